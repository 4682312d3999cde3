"""Blocks that change hands, or contents, while they are loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from hypercache_compat.altered_replies import Fields
from hypercache_compat.payloads import MIB, payload
from hypercache_compat.raw_wire import store as store_as_old_client

from ..check import Check, Failed, require
from ..places import POOL_MIB, Chunk
from ..scene import ALTERED, OVERWRITING, PLAIN, Block, Scene, block, blocks
from .trust import BELIEVING

THEME = "replacing"
SIZE = 4 * MIB + 4096


def between_locate_and_read(scene: Scene, item: Block, meanwhile: Callable[[], object]) -> list[bool]:
    """Whether the block is loaded with its bytes when `meanwhile` happens after the daemon told its layout
    and before the connector hears of it. (LMCache's process is busy with the load: others act by hand.)"""
    uri, once = scene.uri(item), threading.Lock()
    broke_off: list[Exception] = []

    def rule(request: Fields, reply: Fields) -> Fields:
        if request.get("uri") == uri and reply.get("status") == "HIT" and once.acquire(blocking=False):
            try:
                meanwhile()
            except Exception as error:  # noqa: BLE001 - in the relay's thread: it is raised below
                broke_off.append(error)
        return reply

    with scene.altering(rule):
        loaded = scene.loaded([item], ALTERED)
    require(once.locked(), "the connector did not ask where the block lies")
    if broke_off:
        raise broke_off[0]
    return loaded


def reused(scene: Scene) -> None:
    item = block(SIZE)
    scene.store([item], ALTERED)
    (layout,), uri = scene.chunks([item]), scene.uri(item)

    def meanwhile() -> None:
        scene.asked("evict", uri=uri)
        take_its_place(scene, layout)

    require(between_locate_and_read(scene, item, meanwhile) == [False], "loaded from blocks that others have")


def take_its_place(scene: Scene, layout: list[Chunk]) -> None:
    """Store others' objects until one lies where `layout` was; a RAM chunk's file is simply gone."""
    places = {(chunk["device"], chunk["offset"]) for chunk in layout}
    with scene.by_hand() as writer:
        for number in range(2 * POOL_MIB * MIB // SIZE):
            uri = f"hypercache://stranger/{number}"
            data = payload(uri, SIZE)
            store_as_old_client(writer, uri, data, tier=scene.cell.tier, auto_flush_s3=False)
            if scene.cell.tier == "ram":
                return
            theirs = writer.ask("locate", uri=uri, auto_ingest=False)["chunk_layout"]
            if places & {(chunk["device"], chunk["offset"]) for chunk in theirs}:
                return
    raise Failed("the blocks were never used again, so nothing was shown")


def deleted_meanwhile(scene: Scene) -> None:
    item = block(SIZE)
    scene.store([item], ALTERED)
    uri = scene.uri(item)
    between_locate_and_read(scene, item, lambda: scene.asked("evict", uri=uri))
    scene.expect_missed([item])


def replaced_meanwhile(scene: Scene) -> None:
    item = block(SIZE, content="old")
    new = replace(item, content="new")
    scene.store([item], ALTERED)
    (layout,), uri = scene.chunks([item]), scene.uri(item)

    def meanwhile() -> None:
        with scene.by_hand() as writer:
            store_as_old_client(writer, uri, payload("new", SIZE), tier=scene.cell.tier, auto_flush_s3=False)
        take_its_place(scene, layout)

    require(between_locate_and_read(scene, item, meanwhile) == [False], "loaded from blocks that others have")
    scene.store([new], OVERWRITING)
    scene.expect_kept([new])


def while_it_is_loaded(scene: Scene) -> None:
    items = blocks(4096, SIZE, 100)
    for item in items:
        scene.store([replace(item, content="version 0")], OVERWRITING)
    wrong = scene.call(
        "replace_while_loading",
        OVERWRITING,
        names=[item.key for item in items],
        sizes=[item.size_bytes for item in items],
        rounds=4,
        contents="version",
    )
    require(not wrong, f"neither the old version nor the new one: {wrong[:3]}")
    scene.expect_kept([replace(item, content="version 4") for item in items])


def overwrite_on(scene: Scene) -> None:
    old = blocks(100, 4096, SIZE)
    new = [replace(item, content="new") for item in old]
    scene.store(old, OVERWRITING)
    scene.store(new, OVERWRITING)
    scene.expect_kept(new)


def overwrite_off(scene: Scene) -> None:
    old = blocks(100, 4096, SIZE)
    scene.store(old)
    scene.store([replace(item, content="new") for item in old])
    scene.expect_kept(old)


def of_another_size(scene: Scene) -> None:
    for connection in (PLAIN, OVERWRITING):
        old = blocks(4096, 4096, SIZE)
        new = [
            replace(item, size_bytes=size, content="new")
            for item, size in zip(old, (100, SIZE - 1, 4096), strict=True)
        ]
        scene.store(old, connection)
        scene.store(new, connection)
        scene.expect_kept(new)
        scene.expect_loaded(old, False)


CHECKS = (
    Check(
        "stale-layout",
        THEME,
        reused,
        "Blocks that were given to others after the connector had asked for them are a miss.",
        BELIEVING,
    ),
    Check(
        "stale-replaced",
        THEME,
        replaced_meanwhile,
        "A block that was replaced after the connector had asked, and whose place others have, is a miss.",
        BELIEVING,
    ),
    Check(
        "deleted-while-loaded",
        THEME,
        deleted_meanwhile,
        "A block that is deleted while it is loaded is right or a miss, and gone afterwards.",
        "loads say yes",
    ),
    Check(
        "replaced-while-loaded",
        THEME,
        while_it_is_loaded,
        "Loads while the same keys are stored anew give the old version or the new one, never a mix.",
        "loads give halves",
    ),
    Check(
        "overwrite-on",
        THEME,
        overwrite_on,
        "With `overwrite`, what was stored last is what is loaded.",
        "stores keep what is there",
    ),
    Check(
        "overwrite-off",
        THEME,
        overwrite_off,
        "Without it, a key that is stored keeps its bytes.",
        "stores overwrite",
    ),
    Check(
        "replaced-size",
        THEME,
        of_another_size,
        "A store of another size under a key replaces it, and buffers of the old size miss.",
        "stores say yes",
    ),
)
