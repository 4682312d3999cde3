"""Keys that differ in anything are different blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..check import Check, require
from ..scene import ELSEWHERE, NAMESPACE, PLAIN, Block, Scene, block

THEME = "identity"
SIZE = 4096
MODEL_SO_LONG_THAT_KEYS_ARE_HASHED = "m" * 8200


def apart(scene: Scene, **variants: Sequence[Any]) -> None:
    """Keys that differ in one field alone never meet: stored one after the other, each is found only once it
    is there, holds its own bytes, and leaves alone."""
    ((name, values),) = variants.items()
    first = block(SIZE)
    fields: list[dict[str, Any]] = [{name: value} for value in values]
    never_meet(scene, [replace(first, **each) for each in fields])


def never_meet(scene: Scene, items: Sequence[Block]) -> None:
    """The same, of any keys."""
    for stored, item in enumerate(items):
        scene.expect_found(items, [number < stored for number in range(len(items))])
        scene.store([item])
    scene.expect_kept(items)
    scene.delete(items[:1])
    scene.expect_loaded(items, [False, *[True] * (len(items) - 1)])


def of_models(scene: Scene, models: Sequence[str]) -> None:
    apart(scene, model_name=models)


def of_salts(scene: Scene, salts: Sequence[str]) -> None:
    apart(scene, cache_salt=salts)


def of_hashes(scene: Scene) -> None:
    apart(scene, chunk_hash=["00", "0000", "01", "10", "00ff", "ff00"])


def of_ranks(scene: Scene) -> None:
    apart(scene, kv_rank=[0, 1, 0x10, 0x01000001, 0x10000001, 0xFFFFFFFF])


def of_groups(scene: Scene) -> None:
    apart(scene, object_group_id=[0, 1, 0x10, 0x11, 255])


def of_shifted_fields(scene: Scene) -> None:
    first = block(SIZE, chunk_hash="ab", kv_rank=0x11, object_group_id=0x1)
    shifted = [
        replace(first, kv_rank=0x1, object_group_id=0x11),
        replace(first, model_name=first.model_name + "00000011", kv_rank=0x1),
        replace(first, object_group_id=0x1AB, chunk_hash=""),
        replace(first, chunk_hash="", cache_salt="ab"),
        replace(first, cache_salt="ab"),
        replace(first, chunk_hash="abab"),
    ]
    never_meet(scene, [first, *shifted])


def of_long_keys(scene: Scene) -> None:
    start = "5a" * 499
    apart(scene, chunk_hash=[start + "00", start + "01", start])


def of_keys_beyond_a_uri(scene: Scene) -> None:
    apart(scene, model_name=[MODEL_SO_LONG_THAT_KEYS_ARE_HASHED + end for end in ("", "a", "b")])


def of_namespaces(scene: Scene) -> None:
    mine = block(SIZE)
    theirs = replace(mine, content="theirs")
    scene.store([mine], PLAIN)
    scene.expect_missed([theirs], ELSEWHERE)
    scene.store([theirs], ELSEWHERE)
    scene.expect_kept([mine], PLAIN)
    scene.expect_kept([theirs], ELSEWHERE)
    scene.delete([theirs], ELSEWHERE)
    scene.expect_kept([mine], PLAIN)


def of_namespaces_that_look_alike(scene: Scene) -> None:
    names = ["a/b", "a%2Fb", "a", "A", "a ", "é", "e\u0301", f"{NAMESPACE}/", "."]
    for name in names:
        scene.connect(scene.lmcache, name, namespace=name)
    first = block(SIZE)
    for number, name in enumerate(names):
        for later in names[number:]:
            scene.expect_found([first], False, later)
        scene.store([replace(first, content=name)], name)
    for name in names:
        scene.expect_kept([replace(first, content=name)], name)
        scene.disconnect(name)


GOLDEN = (
    (
        Block(SIZE, "00ff" * 8, "meta-llama/Llama-3.1-8B", 0x01000001),
        "hypercache://lmcache/v1/safety/meta-llama%2FLlama-3.1-8B@01000001@0@" + "00ff" * 8,
    ),
    (
        Block(SIZE, "ab", "a b%/模型", 0xFFFFFFFF, 0x1F, "salt + 1"),
        "hypercache://lmcache/v1/safety/a%20b%25%2F%E6%A8%A1%E5%9E%8B@ffffffff@1f@ab@salt%20%2B%201",
    ),
    (Block(SIZE, "", ".~_-", 0), "hypercache://lmcache/v1/safety/.~_-@00000000@0@"),
    (
        Block(SIZE, "00", "k" * 8200, 1),
        "hypercache://lmcache/v1-sha256/safety/"
        "2fc32be9e8bc48ba54e5226a7ada10e0eb6128c2963f93309586ff8cb3984271",
    ),
)
"""Keys and the uris under which earlier releases stored them: added to, never edited."""


def golden_uris(scene: Scene) -> None:
    for item, uri in GOLDEN:
        scene.store([item])
        reply = scene.asked("locate", uri=uri, auto_ingest=False)
        require(
            reply["status"] == "HIT", f"nothing lies under {uri}: what was stored before an upgrade is lost"
        )
        require(reply["object_size"] == SIZE, f"another object lies under {uri}")
    scene.expect_kept([item for item, _ in GOLDEN])


CHECKS = (
    Check(
        "key-model",
        THEME,
        partial(of_models, models=["org/a", "org/b", "orga", "org/", "a", ""]),
        "Keys that differ in the model alone are different blocks.",
        "keys lose the model",
    ),
    Check(
        "key-rank",
        THEME,
        of_ranks,
        "Keys that differ in the rank alone are different blocks.",
        "keys lose the rank",
    ),
    Check(
        "key-group",
        THEME,
        of_groups,
        "Keys that differ in the object group alone are different blocks.",
        "keys lose the group",
    ),
    Check(
        "key-hash",
        THEME,
        of_hashes,
        "Keys that differ in the chunk's hash alone are different blocks.",
        "keys lose the hash",
    ),
    Check(
        "key-salt",
        THEME,
        partial(of_salts, salts=["", "0", "a", "b", "a" * 128]),
        "Keys that differ in the salt alone, or have none, are different blocks.",
        "keys lose the salt",
    ),
    Check(
        "key-shifted",
        THEME,
        of_shifted_fields,
        "Keys whose fields have the same characters, cut elsewhere, are different blocks.",
        "keys lose their separators",
    ),
    Check(
        "key-case",
        THEME,
        partial(of_models, models=["Org/Model", "org/model", "ORG/MODEL", "org/modeL"]),
        "Keys that differ in upper and lower case are different blocks.",
        "keys lose their case",
    ),
    Check(
        "key-percent",
        THEME,
        partial(of_models, models=["a/b", "a%2Fb", "a%2fb", "a%252Fb", "%", "%25", "%40"]),
        "Keys with percent signs, and what these would stand for, are different blocks.",
        "keys are unquoted",
    ),
    Check(
        "key-salt-percent",
        THEME,
        partial(of_salts, salts=["%", "%25", "%2F", "%00", " ", "+", "%20"]),
        "Salts with percent signs, and what these would stand for, are different blocks.",
        "keys are unquoted",
    ),
    Check(
        "key-paths",
        THEME,
        partial(of_models, models=["a/b", "a/./b", "a//b", "/a/b", "a/b/", "../a/b", "c/../a/b"]),
        "Keys that would be the same path are different blocks.",
        "keys are paths",
    ),
    Check(
        "key-unicode",
        THEME,
        partial(of_models, models=["\u00e9", "e\u0301", "\ufb01", "fi", "Å", "\u212b", "模型", "\U0001f600"]),
        "Keys that look alike in Unicode (composed, decomposed, ligatures) are different blocks.",
        "keys are normalised",
    ),
    Check(
        "key-control",
        THEME,
        partial(of_models, models=["a", "a\n", "\na", "a\0", "a\0b", "a\t", "a\x7f", "a\r\n", "\ufeffa"]),
        "Control characters and NUL are part of a key.",
        "keys lose their control characters",
    ),
    Check(
        "key-surrogates",
        THEME,
        partial(of_models, models=["\ud800", "\udfff", "\ufffd", "?"]),
        "Lone surrogates, which have no UTF-8, are kept apart.",
        "keys lose the model",
    ),
    Check(
        "key-1000-bytes",
        THEME,
        of_long_keys,
        "Keys of 1,000 bytes that differ in the last one are different blocks.",
        "keys lose their end",
    ),
    Check(
        "key-beyond-a-uri",
        THEME,
        of_keys_beyond_a_uri,
        "Keys that are too long for a uri and differ in one character are different blocks.",
        "keys lose their end",
    ),
    Check(
        "namespace",
        THEME,
        of_namespaces,
        "The same key in another namespace is another block, whoever stores or deletes it.",
        "namespaces are ignored",
    ),
    Check(
        "namespaces-alike",
        THEME,
        of_namespaces_that_look_alike,
        "Namespaces that differ in an escape, a slash, case or a Unicode form are kept apart.",
        "namespaces are ignored",
        is_long=True,
    ),
    Check(
        "uri-golden",
        THEME,
        golden_uris,
        "Keys lie under the uris that were frozen with the first release.",
        "keys lose their case",
    ),
)
