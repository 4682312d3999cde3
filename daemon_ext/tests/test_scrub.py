"""The scrub: corrupt objects go, and are told of; nothing else goes, and nobody waits."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from daemon_harness import CHUNK, MIB, Client, Daemon, Message, eventually, pattern, running, sums_of

from hypercache_compat.raw_wire import write_layout
from hypercache_daemon import scrub

URI = "hypercache://a/b"
FAST = 100_000
TIERS = pytest.mark.parametrize("tier", ["nvme", "ram"])


async def store(client: Client, uri: str, data: bytes, tier: str = "nvme", **commit: object) -> None:
    choices = {"local_only": True, **commit}
    await client.store(uri, data, {"chunk_checksums": sums_of(data), **choices}, tier=tier)


async def flip(client: Client, uri: str, position: int = 0) -> None:
    """Change one byte of an object behind the daemon's back."""
    flip_in((await client.ask("locate", uri=uri, auto_ingest=False))["chunk_layout"], position)


def flip_in(chunks: list[Message], position: int = 0) -> None:
    chunk = chunks[position // CHUNK]
    with Path(chunk["device"]).open("r+b") as device:
        device.seek(chunk["offset"] + position % CHUNK)
        (byte,) = device.read(1)
        device.seek(-1, 1)
        device.write(bytes([byte ^ 1]))


async def report(client: Client) -> Message:
    found: Message = (await client.status())["scrub"]
    return found


@asynccontextmanager
async def held_up(daemon: Daemon) -> AsyncIterator[None]:
    """A round that has begun and cannot read its first piece before the end of the body; ended then."""
    limiter = daemon.parts.scrubber._thread
    async with trio.open_nursery() as nursery:
        holder = object()
        limiter.acquire_on_behalf_of_nowait(holder)
        nursery.start_soon(daemon.parts.scrubber.round)
        await eventually(lambda: limiter.statistics().tasks_waiting == 1)
        yield
        limiter.release_on_behalf_of(holder)


# -- what is corrupt -----------------------------------------------------------------------------------


@TIERS
@pytest.mark.parametrize("position", [0, CHUNK + 99], ids=["first byte", "last byte"])
async def test_a_flipped_bit_is_found_and_the_object_goes_for_good(
    short_dir: Path, tier: str, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = pattern(1, CHUNK + 100)
    async with running(short_dir, scrub_mib_s=FAST) as daemon:
        client = await daemon.connect()
        for uri in ("hypercache://a/a", URI, "hypercache://a/c"):
            await store(client, uri, data, tier)
        await flip(client, URI, position)
        await daemon.parts.scrubber.round()
        await daemon.parts.scrubber.round()
        assert await client.fetch(URI) is None
        assert await client.fetch("hypercache://a/a") == data
        found = await report(client)
        assert (found["rounds"], found["objects"], found["corrupt_objects"]) == (2, 5, 1)
        assert found["corrupt_dirty_objects"] == found["corrupt_pinned_objects"] == 0
    lines = [record.message for record in caplog.records if record.name == scrub.__name__]
    assert len(lines) == 1, "once for each object"
    assert lines[0].startswith(f"{URI} (LOCAL_ONLY) is corrupt and was dropped: ")
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert await client.fetch(URI) is None
        assert await client.fetch("hypercache://a/c") == data


async def test_the_last_copy_never_goes_without_a_word(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(short_dir, scrub_mib_s=FAST) as daemon:
        client = await daemon.connect()
        await store(client, URI, b"dirty and pinned", local_only=False)
        assert (await client.ask("pin", uri=URI, pinned=True))["status"] == "PONG"
        await flip(client, URI)
        await daemon.parts.scrubber.round()
        assert await client.fetch(URI) is None
        found = await report(client)
        assert [found[f"corrupt_{kind}objects"] for kind in ("", "dirty_", "pinned_")] == [1, 1, 1]
    (record,) = [record for record in caplog.records if record.name == scrub.__name__]
    assert record.levelno == logging.ERROR
    assert f"{URI} (COMMITTED, pinned) is corrupt and was dropped; NO BACKEND HAS IT" in record.message


async def test_a_byte_that_is_wrong_only_once_is_no_corruption(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(short_dir, scrub_mib_s=FAST) as daemon:
        client = await daemon.connect()
        await store(client, URI, b"bytes")
        really, answers = daemon.parts.store.crc32_of, iter([12345])
        monkeypatch.setattr(
            daemon.parts.store, "crc32_of", lambda *of: next(answers, None) or really(*of), raising=True
        )
        await daemon.parts.scrubber.round()
        assert (await report(client))["corrupt_objects"] == 0
        assert next(answers, None) is None, "the wrong answer was given"
        assert await client.fetch(URI) == b"bytes"


async def test_a_ram_file_that_is_gone_is_a_lost_object(short_dir: Path) -> None:
    async with running(short_dir, scrub_mib_s=FAST) as daemon:
        client = await daemon.connect()
        for name, damage in {"gone": Path.unlink, "cut": lambda path: path.write_bytes(b"")}.items():
            await store(client, name, b"bytes", "ram")
            damage(Path((await client.ask("locate", uri=name))["chunk_layout"][0]["device"]))
        await daemon.parts.scrubber.round()
        found = await report(client)
        assert (found["corrupt_objects"], found["unreadable_objects"]) == (2, 2)
        assert await client.fetch("gone") is None
        assert await client.fetch("cut") is None


async def test_what_has_no_checksums_is_not_read(short_dir: Path) -> None:
    async with running(short_dir, scrub_mib_s=FAST) as daemon:
        client = await daemon.connect()
        await client.store(URI, b"bytes")
        await flip(client, URI)
        await daemon.parts.scrubber.round()
        found = await report(client)
        assert (found["rounds"], found["objects"], found["bytes"]) == (1, 0, 0)


# -- what is not corrupt, and who waits ----------------------------------------------------------------


@TIERS
async def test_what_is_replaced_while_it_is_read_is_judged_by_its_own_bytes(
    short_dir: Path, tier: str
) -> None:
    async with running(short_dir, scrub_mib_s=FAST) as daemon:
        client = await daemon.connect()
        await store(client, URI, b"old", tier)
        async with held_up(daemon):
            await flip(client, URI)
            await store(client, URI, b"new", tier)
        assert await client.fetch(URI) == b"new"
        assert (await report(client))["corrupt_objects"] == 0


async def test_blocks_are_not_used_again_while_they_are_read(short_dir: Path) -> None:
    data = pattern(1, 4 * MIB)
    async with running(short_dir, scrub_mib_s=FAST) as daemon:
        client = await daemon.connect()
        await store(client, URI, data)
        places = (await client.ask("locate", uri=URI))["chunk_layout"]
        async with held_up(daemon):
            assert (await client.ask("evict", uri=URI))["status"] == "EVICTED"
            given = []
            for number in range(7):  # all that is free
                staged = await client.ask("stage_write", uri=f"other/{number}", size_bytes=4 * MIB)
                given += staged["chunk_layout"]
            assert places[0]["offset"] not in [
                chunk["offset"] for chunk in given if chunk["device"] == places[0]["device"]
            ]
            refused = await client.ask("stage_write", uri="one/more", size_bytes=4 * MIB)
            assert refused["error_code"] == "NO_SPACE"
        found = await report(client)
        assert (found["objects"], found["bytes"], found["corrupt_objects"]) == (1, MIB, 0), (
            "one piece of four"
        )
        staged = await client.ask("stage_write", uri="one/more", size_bytes=4 * MIB)
        write_layout(staged["chunk_layout"], data)
        assert [chunk["offset"] for chunk in staged["chunk_layout"]] == [places[0]["offset"]]


async def test_what_is_evicted_between_two_pieces_frees_its_blocks_at_once(short_dir: Path) -> None:
    async with running(short_dir, scrub_mib_s=1) as daemon:  # a second after each piece
        client = await daemon.connect()
        await store(client, URI, pattern(1, 2 * MIB))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.parts.scrubber.round)
            await eventually(lambda: daemon.parts.scrubber.report()["bytes"] == MIB)
            assert (await client.ask("evict", uri=URI))["status"] == "EVICTED"
            daemon.parts.store.release_due()
            pool = (await client.status())["pools"]["nvme"]
            assert (pool["quarantined_bytes"], pool["free_bytes"]) == (0, pool["total_bytes"])
            nursery.cancel_scope.cancel()


async def test_nobody_waits_for_a_device_that_hangs_under_the_scrub(short_dir: Path) -> None:
    async with running(short_dir, scrub_mib_s=FAST) as daemon:
        client = await daemon.connect()
        await store(client, URI, b"bytes")
        async with held_up(daemon):
            assert await client.fetch(URI) == b"bytes"
            await store(client, "hypercache://more", b"more")
            assert await client.fetch("hypercache://more") == b"more"
            assert (await client.ask("evict", uri=URI))["status"] == "EVICTED"


# -- how it goes ---------------------------------------------------------------------------------------


async def test_a_round_goes_on_after_a_restart_where_it_was(short_dir: Path) -> None:
    async with running(short_dir, scrub_mib_s=64) as daemon:  # a millisecond for each object
        client = await daemon.connect()
        for number in range(150):
            await store(client, f"hypercache://{number:03}", b"bytes")
        with trio.CancelScope() as cut:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(daemon.parts.scrubber.round)
                await eventually(lambda: daemon.parts.scrubber.report()["objects"] >= 70)
                cut.cancel()
        assert daemon.parts.scrubber.report()["objects"] < 120
    async with running(short_dir, scrub_mib_s=FAST) as daemon:
        client = await daemon.connect()
        await daemon.parts.scrubber.round()
        assert daemon.parts.scrubber.report()["objects"] == 150 - 64, "what was noted is not read again"
        await daemon.parts.scrubber.round()
        assert daemon.parts.scrubber.report()["objects"] == 150 - 64 + 150


async def test_it_keeps_to_its_pace(short_dir: Path) -> None:
    async with running(short_dir, scrub_mib_s=4) as daemon:
        client = await daemon.connect()
        await store(client, URI, pattern(1, MIB))
        began = trio.current_time()
        await daemon.parts.scrubber.round()
        assert trio.current_time() - began >= 0.25


async def test_many_small_objects_and_what_is_not_read_keep_it_from_running_hot(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "_URIS_TOGETHER", 2)
    monkeypatch.setattr(scrub, "_PAUSE_S", 0.05)
    async with running(short_dir, scrub_mib_s=4) as daemon:
        client = await daemon.connect()
        for number in range(8):
            await client.store(f"without/{number}", b"")
        began = trio.current_time()
        await daemon.parts.scrubber.round()
        assert trio.current_time() - began >= 4 * 0.05, "a pause after two each"
        for number in range(8):
            await store(client, f"small/{number}", b"bytes")
        began = trio.current_time()
        await daemon.parts.scrubber.round()
        assert trio.current_time() - began >= 8 * 0.05 + 8 / 64, "each counts as 64 KiB"


async def test_it_begins_by_itself_and_stays_alive(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "_FIRST_AFTER_S", 0.0)
    monkeypatch.setattr(scrub, "_ROUND_EVERY_S", 0.01)
    async with running(short_dir, scrub_mib_s=FAST) as daemon:
        client = await daemon.connect()
        monkeypatch.setattr(daemon.parts.store.catalog, "uris_between", failing)
        await eventually(lambda: failing_calls)
        monkeypatch.undo()
        monkeypatch.setattr(scrub, "_ROUND_EVERY_S", 0.01)
        await store(client, URI, b"bytes")
        await flip(client, URI)
        await eventually(lambda: daemon.parts.scrubber.report()["corrupt_objects"] == 1)


failing_calls: list[int] = []


async def failing(after: int, last: int, count: int) -> list[tuple[int, str]]:
    failing_calls.append(after)
    raise RuntimeError("a fault of the daemon")


async def test_a_pace_of_nothing_turns_it_off(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "_FIRST_AFTER_S", 0.0)
    async with running(short_dir, scrub_mib_s=0) as daemon:
        with trio.fail_after(10):
            await daemon.parts.scrubber.run()
        assert daemon.parts.scrubber.report()["rounds"] == 0


async def test_going_through_what_was_loaded_keeps_none_of_it(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        await store(await daemon.connect(), URI, b"bytes")
    async with running(short_dir, scrub_mib_s=FAST) as daemon:
        await daemon.parts.scrubber.round()
        assert daemon.parts.scrubber.report()["objects"] == 1
        assert isinstance(daemon.parts.store.cache._objects._objects[URI], bytes)
