"""What is staged, unverifiable, or told wrongly by the daemon is a miss."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial

from hypercache_compat.altered_replies import Fields
from hypercache_compat.payloads import MIB, payload
from hypercache_compat.raw_wire import store as store_as_old_client
from hypercache_compat.raw_wire import write_layout

from ..check import Check, require, wait_until
from ..scene import ALTERED, Block, Scene, block, blocks

THEME = "trust"
SIZE = 4 * MIB + 4096
BELIEVING = "loads believe daemon and devices"


def bytes_of(item: Block, of: str = "") -> bytes:
    """What belongs into the block, or into another one."""
    return payload(of or item.payload, item.size_bytes)


def by_old(scene: Scene) -> dict[str, object]:
    """How the KV store of an old client stages."""
    return {"tier": scene.cell.tier, "auto_flush_s3": False}


# -- what others wrote -----------------------------------------------------------------------------------


def staged(scene: Scene) -> None:
    item = block(SIZE)
    uri = scene.uri(item)
    with scene.by_hand() as writer:
        reply = writer.ask("stage_write", uri=uri, size_bytes=SIZE, tier=scene.cell.tier)
        scene.expect_missed([item])
        write_layout(reply["chunk_layout"], bytes_of(item, "somebody else's"))
        scene.expect_missed([item])
    scene.expect_missed([item])
    scene.store([item])
    scene.expect_kept([item])


def staged_over_a_committed_block(scene: Scene) -> None:
    item = block(SIZE)
    scene.store([item])
    with scene.by_hand() as writer:
        reply = writer.ask("stage_write", uri=scene.uri(item), size_bytes=SIZE, tier=scene.cell.tier)
        write_layout(reply["chunk_layout"], bytes_of(item, "not yet"))
        scene.expect_kept([item])
    scene.expect_kept([item])


def without_checksums(scene: Scene) -> None:
    item = block(SIZE)
    with scene.by_hand() as writer:
        store_as_old_client(writer, scene.uri(item), bytes_of(item, "an old client's"), **by_old(scene))
    scene.expect_missed([item])
    scene.store([item])
    scene.expect_kept([item])


def replaced_by_an_old_client(scene: Scene) -> None:
    item = block(SIZE)
    scene.store([item])
    with scene.by_hand() as writer:
        store_as_old_client(writer, scene.uri(item), bytes_of(item, "an old client's"), **by_old(scene))
    scene.expect_missed([item])


def committed_with_other_checksums(scene: Scene) -> None:
    item = block(SIZE)
    uri, data = scene.uri(item), bytes_of(item)
    with scene.by_hand() as writer:
        reply = writer.ask("stage_write", uri=uri, size_bytes=SIZE, tier=scene.cell.tier)
        write_layout(reply["chunk_layout"], bytes_of(item, "half written"))
        sums = [zlib.crc32(data[: 4 * MIB]), zlib.crc32(data[4 * MIB :])]
        writer.ask("commit_write", uri=uri, stage_id=reply["stage_id"], local_only=True, chunk_checksums=sums)
    scene.expect_loaded([item], False)


def committed_before_it_was_written(scene: Scene) -> None:
    item, earlier = block(SIZE), block(SIZE)
    scene.store([earlier])
    scene.delete([earlier])  # its bytes still lie where the next one is staged
    uri = scene.uri(item)
    with scene.by_hand() as writer:
        reply = writer.ask("stage_write", uri=uri, size_bytes=SIZE, tier=scene.cell.tier)
        if scene.cell.tier == "ram":
            write_layout(reply["chunk_layout"], bytes(SIZE))
        writer.ask("commit_write", uri=uri, stage_id=reply["stage_id"], local_only=True)
    scene.expect_missed([item])


def in_the_backend(scene: Scene) -> None:
    item = block(SIZE)
    uri = scene.uri(item)
    with scene.by_hand() as writer:
        data = bytes_of(item, "a stranger's")
        store_as_old_client(writer, uri, data, tier=scene.cell.tier, auto_flush_s3=True)
        wait_until(
            lambda: writer.ask("get_write_status", uri=uri)["sync_status"] == "SYNCED_BACKEND",
            "it was uploaded",
        )
        writer.ask("evict", uri=uri)
    scene.expect_missed([item])
    scene.store([item])
    scene.expect_kept([item])


# -- what the daemon says ----------------------------------------------------------------------------------


def altered(scene: Scene, change: Callable[[Fields], Fields]) -> None:
    """A load whose layout is changed on its way is a miss; its neighbours in the batch are right."""
    items = blocks(4096, SIZE, 100)
    victim = scene.uri(items[1])

    def rule(request: Fields, reply: Fields) -> Fields:
        if request.get("uri") == victim and reply.get("status") == "HIT":
            return change(reply)
        return reply

    scene.store(items, ALTERED)
    scene.expect_kept(items, ALTERED)
    with scene.altering(rule):
        scene.expect_loaded(items, [True, False, True], ALTERED)
    scene.expect_loaded(items[::2], True, ALTERED)


def in_each_chunk(**fields: object) -> Callable[[Fields], Fields]:
    """Every chunk of the reply says so."""

    def change(reply: Fields) -> Fields:
        return {**reply, "chunk_layout": [{**chunk, **fields} for chunk in reply["chunk_layout"]]}

    return change


def without_a_checksum(reply: Fields) -> Fields:
    first, *rest = reply["chunk_layout"]
    del first["checksum"]
    return {**reply, "chunk_layout": [first, *rest]}


def without_its_end(reply: Fields) -> Fields:
    return {**reply, "chunk_layout": reply["chunk_layout"][:-1]}


def with_its_end_twice(reply: Fields) -> Fields:
    return {**reply, "chunk_layout": [*reply["chunk_layout"], reply["chunk_layout"][-1]]}


def mixed_up(reply: Fields) -> Fields:
    """The chunks lie in each other's place."""
    first, second = reply["chunk_layout"]
    places = [{name: chunk[name] for name in ("device", "offset")} for chunk in (second, first)]
    return {**reply, "chunk_layout": [{**first, **places[0]}, {**second, **places[1]}]}


def shifted(reply: Fields) -> Fields:
    first, *rest = reply["chunk_layout"]
    half = first["length"] // 2
    return {**reply, "chunk_layout": [{**first, "offset": first["offset"] + half}, *rest]}


def of_another_object(scene: Scene) -> None:
    """The reply about one key is given for another one of the same size."""
    items = blocks(SIZE, SIZE)
    scene.store(items, ALTERED)
    mine, other = (scene.uri(item) for item in items)
    reply_to_other = scene.asked("locate", uri=other, auto_ingest=False)

    def checksums_of_mine(request: Fields, reply: Fields) -> Fields:
        if request.get("uri") != mine or reply.get("status") != "HIT":
            return reply
        own = [chunk["checksum"] for chunk in reply["chunk_layout"]]
        pairs = zip(reply_to_other["chunk_layout"], own, strict=True)
        return {**reply, "chunk_layout": [{**chunk, "checksum": checksum} for chunk, checksum in pairs]}

    with scene.altering(checksums_of_mine):
        scene.expect_loaded(items, [False, True], ALTERED)


def daemon_without_checksums(scene: Scene) -> None:
    with scene.anew("--wire", "1.0") as old:
        item = block(SIZE)
        with old.by_hand() as writer:
            store_as_old_client(writer, old.uri(item), bytes_of(item, "an old client's"), **by_old(old))
        old.expect_missed([item])
        require(not old.tried_to_store(blocks(SIZE)), "stored where nothing can be verified")


CHECKS = (
    Check(
        "staged",
        THEME,
        staged,
        "What is staged and not committed is neither found nor loaded, half written or whole.",
        BELIEVING,
    ),
    Check(
        "staged-over-committed",
        THEME,
        staged_over_a_committed_block,
        "While a new version is staged, the committed one is what is loaded.",
        "loads say yes",
    ),
    Check(
        "no-checksums",
        THEME,
        without_checksums,
        "What an old client committed without checksums is a miss, and is stored anew.",
        BELIEVING,
    ),
    Check(
        "no-checksums-replacing",
        THEME,
        replaced_by_an_old_client,
        "A block that an old client replaced without checksums is a miss.",
        BELIEVING,
    ),
    Check(
        "other-checksums",
        THEME,
        committed_with_other_checksums,
        "A block that was committed with the checksums of other bytes is a miss.",
        BELIEVING,
    ),
    Check(
        "never-written",
        THEME,
        committed_before_it_was_written,
        "A block that was committed without having been written is a miss, whatever its space held before.",
        BELIEVING,
    ),
    Check(
        "backend-copy",
        THEME,
        in_the_backend,
        "What lies in the backend under a block's name is neither found nor loaded.",
        "loads fetch from the backend",
    ),
    Check(
        "reply-staged",
        THEME,
        partial(altered, change=lambda reply: {**reply, "sync_status": "STAGED"}),
        "A layout that the daemon calls staged is not read.",
        BELIEVING,
    ),
    Check(
        "reply-no-state",
        THEME,
        partial(altered, change=lambda reply: {**reply, "sync_status": None}),
        "A layout without a state is not read.",
        BELIEVING,
    ),
    Check(
        "reply-no-checksum",
        THEME,
        partial(altered, change=without_a_checksum),
        "A layout in which one chunk has no checksum is a miss.",
        BELIEVING,
    ),
    Check(
        "reply-other-checksum",
        THEME,
        partial(altered, change=in_each_chunk(checksum=1)),
        "A layout with other checksums than those of the bytes is a miss.",
        BELIEVING,
    ),
    Check(
        "reply-other-size",
        THEME,
        partial(altered, change=lambda reply: {**reply, "object_size": SIZE - 1}),
        "A layout of another size than the buffer's is a miss, even where its chunks would fit.",
        BELIEVING,
    ),
    Check(
        "reply-too-short",
        THEME,
        partial(altered, change=without_its_end),
        "A layout that lacks its last chunk is a miss.",
        BELIEVING,
    ),
    Check(
        "reply-too-long",
        THEME,
        partial(altered, change=with_its_end_twice),
        "A layout with a chunk too many is a miss, and nothing behind the buffer is written.",
        BELIEVING,
    ),
    Check(
        "reply-mixed-up",
        THEME,
        partial(altered, change=mixed_up),
        "A layout that names the place of one chunk for another is a miss.",
        BELIEVING,
    ),
    Check(
        "reply-shifted",
        THEME,
        partial(altered, change=shifted),
        "A layout that names another place on the same device is a miss.",
        BELIEVING,
    ),
    Check(
        "reply-no-device",
        THEME,
        partial(altered, change=in_each_chunk(device="/dev/null")),
        "A layout that names what is no device is a miss.",
        BELIEVING,
    ),
    Check(
        "reply-other-object",
        THEME,
        of_another_object,
        "Another block's place beside this block's checksums is a miss.",
        BELIEVING,
    ),
    Check(
        "daemon-without-checksums",
        THEME,
        daemon_without_checksums,
        "A daemon that knows no checksums is believed nothing and given nothing.",
        BELIEVING,
        is_long=True,
    ),
)
