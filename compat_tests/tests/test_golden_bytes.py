"""Every released version's bytes are still read and still written, and no frozen file was touched."""

import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from hypercache_compat import golden
from hypercache_compat.golden import ACTIONS, FOLDER, MANIFEST, Vector, read_vector
from hypercache_protocol.actions import actions_in_frames
from hypercache_protocol.messages import Message, StatusReply
from hypercache_protocol.schema import field_rows, held_models, newer_fields, possible_replies, reply_words
from hypercache_protocol.versions import LATEST, RELEASED, WIRE_1_0, WIRE_2_0, WireVersion

VERSIONS = {f"wire-{version}": version for version in RELEASED}
FILES = sorted((FOLDER / "vectors").glob("*/*.json"))


def version_of(path: Path) -> WireVersion:
    return VERSIONS[path.parent.name]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_frozen_line_is_read_and_written_as_it_was(path: Path) -> None:
    assert list(read_vector(path).faults(version_of(path))) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_frozen_line_is_read_whole_by_this_build(path: Path) -> None:
    vector = read_vector(path)
    message, unknown = vector.decoded(LATEST)
    assert golden.fields_of(message) == vector.fields
    assert unknown == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_frozen_line_is_understood_by_every_version_that_has_its_action(path: Path) -> None:
    vector = read_vector(path)
    knowing = [version for version in RELEASED if vector.action in golden.actions_of(version)]
    assert version_of(path) in knowing
    for version in knowing:
        message, _ = vector.decoded(version)
        if not isinstance(message, StatusReply):
            assert message.model_fields_set <= type(message).model_fields.keys()
            assert not message.model_fields_set & newer_fields(type(message), version).keys()


# -- nothing is left out -------------------------------------------------------------------------------


def vectors(version: WireVersion) -> list[Vector]:
    return [read_vector(path) for path in FILES if version_of(path) == version]


@pytest.mark.parametrize("version", RELEASED, ids=str)
def test_every_message_of_a_version_is_frozen(version: WireVersion) -> None:
    frozen = {(v.direction, v.action, v.word()) for v in vectors(version)}
    models = golden.actions_of(version).values()
    asked = {("request", model.action, model.action) for model in models}
    answered = {
        ("reply", model.action, reply.status) for model in models for reply in possible_replies(model)
    }
    assert frozen == asked | answered


def test_wire_2_freezes_frames_and_the_hello_as_a_line() -> None:
    for version in RELEASED:
        framed = {vector.action for vector in vectors(version) if vector.is_frame}
        assert framed == (set(actions_in_frames(version)) if version >= WIRE_2_0 else set())
    assert {vector.action for vector in vectors(WIRE_2_0) if not vector.is_frame} == {"hello"}


def fields_set(vector: Vector) -> Iterator[tuple[type[Message], str]]:
    """(model, field) for every field that a vector sets, in the models inside it too."""
    model: type[Message] = ACTIONS[vector.action]
    if vector.direction == "reply":
        model = reply_words(ACTIONS[vector.action])[vector.word()]
    yield from fields_in(model, vector.fields)


def fields_in(model: type[Message], fields: dict[str, Any]) -> Iterator[tuple[type[Message], str]]:
    for name, value in fields.items():
        yield model, name
        if name in held_models(model):
            for inner in value if held_models(model)[name].many else [value]:
                yield from fields_in(held_models(model)[name].model, inner)


@pytest.mark.parametrize("version", RELEASED, ids=str)
def test_every_field_of_a_version_is_set_in_some_frozen_line(version: WireVersion) -> None:
    seen = set(chain.from_iterable(map(fields_set, vectors(version))))
    requests = golden.actions_of(version).values()
    models = {*requests, *chain.from_iterable(map(possible_replies, requests))}
    parts = {held.model for model in models for held in held_models(model).values()}
    assert parts == {part for part in golden.PARTS if part.since <= version}
    models |= parts
    wanted = {(model, row.name) for model in models for row in field_rows(model) if row.since <= version}
    assert wanted - seen == set()


def test_the_frozen_files_are_whole_and_this_build_keeps_to_them() -> None:
    assert golden.problems() == []
    assert golden.differing() == []
    assert sorted(golden.missing()) == [], "run: python -m hypercache_compat.golden"


# -- drift is refused ----------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the frozen files that a test may spoil."""
    for name in golden.FROZEN_FOLDERS:
        shutil.copytree(FOLDER / name, tmp_path / name)
    shutil.copy(FOLDER / MANIFEST, tmp_path / MANIFEST)
    assert golden.problems(tmp_path) == []
    return tmp_path


PING = "vectors/wire-1.0/request-ping-plain.json"


def test_an_edited_file_is_told(copy: Path) -> None:
    path = copy / PING
    path.write_text(path.read_text().replace("ping", "pong"))
    assert golden.problems(copy) == [f"{PING} was edited"]
    assert golden.differing(copy) == [f"{PING} is not what this build makes"]


def test_a_file_that_is_gone_is_told(copy: Path) -> None:
    (copy / PING).unlink()
    assert golden.problems(copy) == [f"{PING} is gone"]


def test_a_file_that_was_put_there_by_hand_is_told(copy: Path) -> None:
    (copy / "vectors/wire-1.0/extra.json").write_text("{}")
    assert golden.problems(copy) == [f"vectors/wire-1.0/extra.json is not in {MANIFEST}"]


def test_adding_never_writes_over_a_file(copy: Path) -> None:
    path = copy / PING
    path.write_text("spoiled")
    assert golden.add(copy) == []
    assert path.read_text() == "spoiled"


def test_freezing_refuses_a_file_that_is_there(copy: Path) -> None:
    name = "schemas/wire-1.0.json"
    held = (copy / name).read_bytes(), (copy / MANIFEST).read_bytes()
    with pytest.raises(FileExistsError):
        golden.freeze({name: "{}"}, copy)
    assert ((copy / name).read_bytes(), (copy / MANIFEST).read_bytes()) == held


def test_adding_to_nothing_freezes_everything(tmp_path: Path) -> None:
    added = golden.add(tmp_path)
    assert added == sorted(name for name in golden.frozen_files() if not name.startswith("transcripts/"))
    assert golden.frozen_files(tmp_path).keys() == set(added)
    assert golden.problems(tmp_path) == golden.differing(tmp_path) == []
    assert golden.add(tmp_path) == []


HIT = read_vector(FOLDER / "vectors/wire-1.0/reply-locate-hit.json")
PING_FRAME = b"\0\0\0\x08\x93\x07\xa4ping\x80"


@pytest.mark.parametrize(
    ("vector", "told"),
    [
        (Vector("request", "ping", b'{"action":"pung"}\n', {}), "no longer read: unknown action"),
        (Vector("request", "ping", b'{"action":"ping","x":1}\n', {}), "1 fields that are no longer known"),
        (Vector("request", "ping", b'{"action": "ping"}\n', {}), 'is written as b\'{"action":"ping"}'),
        (Vector("reply", "locate", HIT.line, {**HIT.fields, "chunk_size": 1}), "is read as {'object_size'"),
    ],
)
def test_a_line_that_is_read_or_written_otherwise_is_told(vector: Vector, told: Any) -> None:
    assert any(told in fault for fault in vector.faults(WIRE_1_0))


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        (PING_FRAME, None),
        (PING_FRAME.replace(b"\x07", b"\x08"), "its id is not what was frozen"),
        (PING_FRAME.replace(b"\x08", b"\x09"), "the frame's length"),
        (PING_FRAME.replace(b"ping", b"pung"), "no longer read: unknown action"),
        (b"\0\0\0\x0b" + PING_FRAME[4:-1] + b"\x81\xa1x\x01", "1 fields that are no longer known"),
        (b"\0\0\0\x0a" + PING_FRAME[4:-1] + b"\xde\0\0", "is written as b"),
    ],
)
def test_a_frame_that_is_read_or_written_otherwise_is_told(frame: bytes, told: str | None) -> None:
    faults = list(Vector("request", "ping", frame, {}, is_frame=True).faults(WIRE_2_0))
    assert faults == [] if told is None else any(told in fault for fault in faults)


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"a": {"kind": "integer"}, "words": ["HIT", "MISS"]}, []),
        ({"a": {"kind": "integer", "more": 1}, "words": ["MISS", "HIT", "NEW"], "b": {}}, []),
        ({"a": {"kind": "string"}, "words": ["HIT", "MISS"]}, ["/a/kind was integer and is string"]),
        ({"words": ["HIT", "MISS"]}, ["/a was {'kind': 'integer'} and is nothing"]),
        ({"a": {"kind": "integer"}, "words": ["HIT"]}, ["/words lacks MISS"]),
    ],
)
def test_a_schema_may_grow_and_never_shrink_or_change(now: dict[str, Any], told: Any) -> None:
    assert list(golden.lost({"a": {"kind": "integer"}, "words": ["HIT", "MISS"]}, now)) == told


def test_the_command_adds_nothing_to_a_folder_that_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ([], ["--check"]):
        monkeypatch.setattr("sys.argv", ["golden", *options])
        assert golden.main() == 0
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("options", [[], ["--check"]])
def test_the_command_fails_on_a_fault_and_then_adds_nothing(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["golden", *options])
    monkeypatch.setattr(golden, "problems", lambda: ["a was edited"])
    monkeypatch.setattr(golden, "missing", lambda *_: {"../nowhere/b": "text"})
    assert golden.main() == 1
    assert capsys.readouterr().out.startswith("a was edited\n")
    assert not (FOLDER / "../nowhere").exists()
