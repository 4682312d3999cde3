"""Deletes of what is there, is not, or is in use."""

from __future__ import annotations

from dataclasses import replace

from hypercache_compat.payloads import MIB
from hypercache_compat.raw_wire import write_layout

from ..check import Check, require
from ..scene import Scene, block, blocks

THEME = "deleting"
SIZE = 4 * MIB + 1


def present(scene: Scene) -> None:
    gone, kept = blocks(SIZE, 100), blocks(4096, 100)
    scene.store([*gone, *kept])
    scene.delete(gone)
    scene.expect_missed(gone)
    scene.expect_kept(kept)


def absent(scene: Scene) -> None:
    kept, never = blocks(4096, 100), blocks(SIZE, 100)
    scene.store(kept)
    before = scene.delete([])
    require(
        scene.delete(never) == before, "a delete of what is not there changed what LMCache counts as used"
    )
    scene.expect_kept(kept)
    scene.store(never)
    scene.expect_kept([*kept, *never])


def pinned(scene: Scene) -> None:
    item, kept = block(SIZE), block(4096)
    scene.store([item, kept])
    scene.asked("pin", uri=scene.uri(item), pinned=True)
    scene.expect_kept([item])
    scene.delete([item])
    scene.expect_missed([item])
    scene.expect_kept([kept])
    scene.store([replace(item, content="anew")])
    scene.expect_kept([replace(item, content="anew")])


def staged(scene: Scene) -> None:
    item, kept = block(SIZE), block(4096)
    scene.store([kept])
    uri = scene.uri(item)
    with scene.by_hand() as writer:
        reply = writer.ask("stage_write", uri=uri, size_bytes=SIZE, tier=scene.cell.tier)
        write_layout(reply["chunk_layout"], b"s" * SIZE)
        scene.delete([item])
        committed = writer.ask("commit_write", uri=uri, stage_id=reply["stage_id"], local_only=True)
    require(committed["status"] == "ERROR", "a staged write that was deleted could be committed")
    scene.expect_missed([item])
    scene.expect_kept([kept])
    scene.store([item])
    scene.expect_kept([item])


def and_stored_anew(scene: Scene) -> None:
    items = blocks(SIZE, 100)
    for version in range(3):
        now = [replace(item, content=f"version {version}") for item in items]
        scene.store(now)
        scene.expect_kept(now)
        scene.delete(now)
        scene.expect_missed(now)


def twice(scene: Scene) -> None:
    items = blocks(SIZE, 100)
    before = scene.delete([])
    scene.store(items)
    require(scene.delete([*items, *items]) == before, "LMCache counts bytes as used that were deleted")
    scene.delete(items)
    scene.expect_missed(items)


CHECKS = (
    Check(
        "delete-present",
        THEME,
        present,
        "A deleted block is gone, and its neighbours are not.",
        "deletes do nothing",
    ),
    Check(
        "delete-absent",
        THEME,
        absent,
        "A delete of what was never stored changes nothing, and doesn't hinder a later store.",
        "deletes take all",
    ),
    Check(
        "delete-pinned",
        THEME,
        pinned,
        "A pinned block is gone when it was deleted, and can be stored with other bytes.",
        "deletes do nothing",
    ),
    Check(
        "delete-staged",
        THEME,
        staged,
        "A delete takes what is staged under the key as well: it can't be committed afterwards.",
        "deletes do nothing",
    ),
    Check(
        "delete-and-store",
        THEME,
        and_stored_anew,
        "After a delete and a store with other bytes the new ones are loaded, time and again.",
        "deletes do nothing",
    ),
    Check(
        "delete-twice",
        THEME,
        twice,
        "A key may come twice in a delete, and be deleted again; LMCache's count of bytes stays right.",
        "deletes do nothing",
    ),
)
