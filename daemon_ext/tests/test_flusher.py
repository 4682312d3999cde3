"""Write-back and write-through to a real folder that waits or fails at a test's word."""

from __future__ import annotations

import hashlib
import resource
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from daemon_harness import CHUNK, MIB, Client, Daemon, Message, cleared, eventually, line, pattern, running
from gated_backend import GatedBackend

from hypercache_daemon import flusher

URI = "hypercache://a/b"
TIERS = pytest.mark.parametrize("tier", ["nvme", "ram"])


@pytest.fixture
def backend(short_dir: Path) -> Any:
    made = GatedBackend(short_dir / "backend")
    yield made
    made.close()


@asynccontextmanager
async def flushing(folder: Path, backend: GatedBackend, **settings: object) -> AsyncIterator[Daemon]:
    """A daemon with this backend; what fails is tried again after milliseconds."""
    async with running(folder, own_backend=backend, **settings) as daemon:
        daemon.parts.flusher.first_delay_s = 0.02
        try:
            yield daemon
        finally:
            backend.close()


async def state_of(client: Client, uri: str = URI) -> tuple[str, float]:
    reply = await client.ask("get_write_status", uri=uri)
    return reply["sync_status"], reply["sync_progress_percent"]


async def synced(client: Client, uri: str = URI) -> None:
    async def is_synced() -> bool:
        return await state_of(client, uri) == ("SYNCED_BACKEND", 100.0)

    await eventually(is_synced, f"SYNCED_BACKEND of {uri}")


async def write(client: Client, data: bytes, uri: str = URI, **commit: object) -> Message:
    return await client.store(uri, data, commit=commit)


# -- write-back ----------------------------------------------------------------------------------------


@TIERS
async def test_a_commit_reaches_the_backend_whole_and_is_not_sent_again_after_a_restart(
    short_dir: Path, backend: GatedBackend, tier: str
) -> None:
    data = pattern(1, 2 * CHUNK + 5)
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        reply = await client.store(URI, data, commit={}, tier=tier)
        assert reply["sync_status"] == "COMMITTED"
        await synced(client)
        assert (backend.folder / "a" / "b").read_bytes() == data
        assert (await client.ask("locate", uri=URI))["sync_status"] == "SYNCED_BACKEND"
        status = await client.status()
        assert status["backend"]["uploaded_objects"] == 1
        assert status["backend"]["uploaded_bytes"] == len(data)
        assert status["pools"][tier]["dirty_bytes"] == 0
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        assert await state_of(client) == ("SYNCED_BACKEND", 100.0)
        await write(client, b"later", "hypercache://later")
        await synced(client, "hypercache://later")
    assert backend.uploaded() == ["a/b", "later"]


async def test_what_is_local_only_or_was_not_to_be_flushed_never_reaches_the_backend(
    short_dir: Path, backend: GatedBackend
) -> None:
    for _ in range(2):
        async with flushing(short_dir, backend) as daemon:
            client = await daemon.connect()
            await client.store("hypercache://1", b"local")
            await client.store("hypercache://2", b"no flush", commit={}, auto_flush_s3=False)
            await write(client, b"bytes", "hypercache://3")
            await synced(client, "hypercache://3")
    assert set(backend.uploaded()) == {"3"}


async def test_what_becomes_local_only_while_it_waits_for_its_turn_is_not_uploaded(
    short_dir: Path, backend: GatedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.gate.clear()
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        before = [f"hypercache://{number}" for number in range(4)]
        for uri in (*before, "hypercache://late"):
            await write(client, b"bytes", uri)
        await eventually(lambda: backend.under_way == 4)
        await client.store("hypercache://late", b"local")
        backend.gate.set()
        for uri in before:
            await synced(client, uri)
        await eventually(lambda: daemon.parts.flusher.waiting == 0)
        assert await state_of(client, "hypercache://late") == ("LOCAL_ONLY", 100.0)
    assert "late" not in backend.uploaded()
    assert "fault" not in caplog.text


async def test_without_a_backend_for_it_an_object_stays_committed_and_dirty(
    short_dir: Path, backend: GatedBackend
) -> None:
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        await write(client, b"bytes", "s3://elsewhere/x")
        await write(client, b"bytes", "hypercache://here")
        await synced(client, "hypercache://here")
        assert await state_of(client, "s3://elsewhere/x") == ("COMMITTED", 0.0)
        assert (await client.status())["pools"]["nvme"]["dirty_bytes"] == 4096


async def test_progress_and_state_are_told_while_an_upload_is_under_way(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.hold_at = 1
    backend.between.clear()
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        await write(client, pattern(1, 2 * CHUNK))

        async def is_half_sent() -> bool:
            return await state_of(client) == ("SYNCING_BACKEND", 50.0)

        await eventually(is_half_sent)
        status = await client.status()
        assert status["objects_by_state"]["SYNCING_BACKEND"] == 1
        assert status["pools"]["nvme"]["dirty_bytes"] == 2 * CHUNK
        backend.between.set()
        await synced(client)


async def test_no_more_than_four_uploads_run_at_once_and_others_wait(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.gate.clear()
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        uris = [f"hypercache://{number}" for number in range(10)]
        for uri in uris:
            await write(client, b"bytes", uri)
        await eventually(lambda: backend.under_way == 4)
        assert (await client.status())["backend"]["waiting"] == 6
        backend.gate.set()
        for uri in uris:
            await synced(client, uri)
    assert backend.most_under_way == 4


# -- failures ------------------------------------------------------------------------------------------


async def test_a_failed_upload_is_tried_again_after_growing_delays_and_nothing_is_lost(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.failures = 4
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        await write(client, pattern(1, 5000))
        await eventually(lambda: daemon.parts.flusher.failed_uploads == 2)
        assert await client.fetch(URI) == pattern(1, 5000)
        assert (await client.status())["pools"]["nvme"]["dirty_bytes"] == 8192
        await synced(client)
        figures = (await client.status())["backend"]
        assert (figures["failed_uploads"], figures["uploaded_objects"]) == (4, 1)
        assert "told to fail" in figures["last_error"]
        assert figures["waiting"] == 0
    times = [moment for moment, _ in backend.uploads]
    delays = [later - earlier for earlier, later in pairwise(times)]
    assert len(delays) == 4
    for number, delay_s in enumerate(delays):
        assert delay_s >= 0.02 * 2**number / 2
    assert (backend.folder / "a" / "b").read_bytes() == pattern(1, 5000)


async def test_no_delay_is_longer_than_the_longest(
    short_dir: Path, backend: GatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "_LONGEST_DELAY_S", 0.02)
    backend.failures = 2
    async with flushing(short_dir, backend) as daemon:
        daemon.parts.flusher.first_delay_s = 1000.0
        client = await daemon.connect()
        await write(client, b"bytes")
        await synced(client)


async def test_commits_during_a_delay_neither_hurry_the_backend_nor_pile_up(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.failures = 1
    async with flushing(short_dir, backend) as daemon:
        daemon.parts.flusher.first_delay_s = 1.0
        client = await daemon.connect()
        await write(client, b"first")
        await eventually(lambda: daemon.parts.flusher.failed_uploads == 1)
        for number in range(10):
            await write(client, pattern(number, 100))
        assert len(backend.uploads) == 1
        assert (await client.status())["backend"]["waiting"] == 1
        await synced(client)
        assert len(backend.uploads) == 2
        assert (backend.folder / "a" / "b").read_bytes() == pattern(9, 100)


async def test_what_a_backend_did_not_take_is_uploaded_after_a_restart(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.failures = 1000
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        for number in range(3):
            await write(client, pattern(number, 5000), f"hypercache://{number}")
        await eventually(lambda: daemon.parts.flusher.failed_uploads >= 3)
    backend.failures = 0
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        for number in range(3):
            await synced(client, f"hypercache://{number}")
            assert (backend.folder / str(number)).read_bytes() == pattern(number, 5000)


async def test_an_upload_that_a_stop_cut_off_begins_again_after_the_restart(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.gate.clear()
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        await write(client, pattern(1, 5000))
        await eventually(lambda: backend.under_way == 1)
        assert (await client.ask("pin", uri=URI))["status"] == "PONG"  # writes the state down as it is
        await client.aclose()
        daemon.stop.set()
        with trio.fail_after(10):
            await daemon.ended.wait()
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        await synced(client)
        assert (await client.status())["pools"]["nvme"]["pinned_bytes"] == 8192
    assert (backend.folder / "a" / "b").read_bytes() == pattern(1, 5000)


@pytest.mark.parametrize("written", [b"", b"abc"])
async def test_a_ram_object_whose_file_is_short_is_never_uploaded_and_ends_nothing(
    short_dir: Path, backend: GatedBackend, written: bytes
) -> None:
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        staged = await client.ask("stage_write", uri=URI, size_bytes=5, tier="ram")
        Path(staged["chunk_layout"][0]["device"]).write_bytes(written)
        assert (await client.ask("commit_write", uri=URI))["status"] == "WRITECOMMITTED"
        await eventually(lambda: daemon.parts.flusher.failed_uploads >= 2)
        assert (await state_of(client))[0] in ("COMMITTED", "SYNCING_BACKEND")
        assert "cut off" in (await client.status())["backend"]["last_error"]
        assert not (backend.folder / "a" / "b").exists()
        await write(client, b"bytes", "hypercache://other")
        await synced(client, "hypercache://other")


@pytest.mark.parametrize("kind", ["sha256", "chunk_checksums"])
async def test_bytes_that_no_longer_match_their_checksum_never_reach_the_backend(
    short_dir: Path, backend: GatedBackend, kind: str
) -> None:
    data = pattern(1, 5000)
    checksums = {"sha256": hashlib.sha256(data).hexdigest(), "chunk_checksums": [zlib.crc32(data)]}
    backend.gate.clear()
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        await write(client, data, **{kind: checksums[kind]})
        await eventually(lambda: backend.under_way == 1)
        place = (await client.ask("locate", uri=URI))["chunk_layout"][0]
        with Path(place["device"]).open("r+b") as device:  # a bit flips
            device.seek(place["offset"] + 4000)
            device.write(b"X")
        backend.gate.set()
        await eventually(lambda: daemon.parts.flusher.failed_uploads >= 1)
        said = {"sha256": "sha256", "chunk_checksums": "must not reach the backend"}
        assert said[kind] in (await client.status())["backend"]["last_error"]
        assert not (backend.folder / "a" / "b").exists()


async def test_an_upload_that_cannot_be_written_down_is_told_to_nobody_and_done_again(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.gate.clear()
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        await write(client, b"bytes")
        await eventually(lambda: backend.under_way == 1)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # the catalog's log cannot grow
        try:
            backend.gate.set()
            await eventually(lambda: daemon.parts.flusher.failed_uploads >= 1)
            assert (await state_of(client))[0] != "SYNCED_BACKEND"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await synced(client)
    assert len(backend.uploads) >= 2


class FaultyBackend(GatedBackend):
    """Has a bug that shows once."""

    def upload(self, target: Any, pieces: Any, size_bytes: int, sha256: str | None = None) -> None:
        if not self.uploads:
            self.uploads.append((0.0, target.path))
            raise ZeroDivisionError("oh")
        super().upload(target, pieces, size_bytes, sha256)


async def test_a_fault_in_an_upload_is_in_the_log_and_the_upload_is_tried_again(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with flushing(short_dir, FaultyBackend(short_dir / "backend")) as daemon:
        client = await daemon.connect()
        await write(client, b"bytes")
        await synced(client)
        assert (await client.status())["backend"]["failed_uploads"] == 1
    assert "ZeroDivisionError" in caplog.text
    assert (short_dir / "backend" / "a" / "b").read_bytes() == b"bytes"


# -- objects that change meanwhile ---------------------------------------------------------------------


async def test_an_object_that_is_evicted_during_its_upload_stays_gone_and_keeps_its_blocks_till_the_end(
    short_dir: Path, backend: GatedBackend
) -> None:
    data = pattern(1, 5000)
    backend.gate.clear()
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        await write(client, data)
        await eventually(lambda: backend.under_way == 1)
        assert (await client.ask("evict", uri=URI))["status"] == "EVICTED"
        free_bytes = (await client.status())["pools"]["nvme"]["free_bytes"]
        assert free_bytes == 32 * MIB - 8192, "the daemon still reads these blocks"
        await client.stage("hypercache://all/the/rest", bytes(free_bytes))
        backend.gate.set()
        await eventually(lambda: daemon.parts.flusher.uploaded_objects == 1)
        assert (backend.folder / "a" / "b").read_bytes() == data, "none of the other's bytes"
        assert await client.fetch(URI) is None
        assert (await client.ask("get_write_status", uri=URI))["error_code"] == "NOT_FOUND"
        await eventually(lambda: daemon.parts.store.cache.pools["nvme"].quarantined_bytes == 0)
        assert (await client.status())["pools"]["nvme"]["free_bytes"] == 8192
    async with flushing(short_dir, backend) as daemon:
        assert await (await daemon.connect()).fetch(URI) is None


async def test_a_purge_during_uploads_leaves_nothing_behind(short_dir: Path, backend: GatedBackend) -> None:
    backend.gate.clear()
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        for number in range(6):
            await write(client, b"bytes", f"hypercache://{number}", **{})
        await eventually(lambda: backend.under_way == 4)
        await client.ask("purge")
        backend.gate.set()
        await eventually(lambda: backend.under_way == 0 and daemon.parts.flusher.waiting == 0)
        status = await client.status()
        assert status["objects"] == 0
        assert status["pools"]["nvme"]["dirty_bytes"] == 0
    assert len(backend.uploads) == 4


async def test_an_object_that_is_replaced_during_its_upload_ends_with_the_newest_in_the_backend(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.gate.clear()
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        await write(client, pattern(1, 5000))
        await eventually(lambda: backend.under_way == 1)
        await write(client, pattern(2, 6000))
        await write(client, pattern(3, 7000))
        assert await state_of(client) == ("COMMITTED", 0.0)
        backend.gate.set()
        await synced(client)
        assert (backend.folder / "a" / "b").read_bytes() == pattern(3, 7000)
        assert await client.fetch(URI) == pattern(3, 7000)
    assert len(backend.uploads) == 2, "the one in between is never sent"
    assert backend.most_under_way == 1, "one uri's uploads follow each other"


async def test_dirty_objects_stay_while_the_backend_is_away_and_may_leave_once_it_has_them(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.gate.clear()
    async with flushing(short_dir, backend, quarantine_share=0) as daemon:
        client = await daemon.connect()
        uris = [f"hypercache://{number}" for number in range(8)]
        for number, uri in enumerate(uris):
            await write(client, pattern(number, CHUNK), uri)
        code, sentence = await client.refusal("stage_write", uri="new", size_bytes=1)
        assert code == "NO_SPACE"
        assert f"not yet in a backend {32 * MIB}" in sentence
        backend.gate.set()
        for uri in uris:
            await synced(client, uri)
        assert (await client.ask("stage_write", uri="new", size_bytes=1))["status"] == "WRITESTAGED"
        here = [
            uri for uri in uris if (await client.ask("locate", uri=uri, auto_ingest=False))["status"] == "HIT"
        ]
        assert len(here) < 8


# -- write-through -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_stage", [True, False])
async def test_write_through_answers_once_the_backend_has_it_and_holds_up_nobody(
    short_dir: Path, backend: GatedBackend, at_stage: bool
) -> None:
    data = pattern(1, CHUNK + 5)
    backend.gate.clear()
    async with flushing(short_dir, backend) as daemon:
        client, other = await daemon.connect(), await daemon.connect()
        await client.stage(URI, data, write_through=at_stage)
        await client.send(line("commit_write", uri=URI, write_through=not at_stage))
        await eventually(lambda: backend.under_way == 1)
        await other.store("hypercache://other", b"bytes")
        assert await other.fetch(URI) == data, "committed here already"
        assert (await other.ask("get_write_status", uri=URI))["sync_status"] == "SYNCING_BACKEND"
        await other.stage(URI, b"the next one")
        assert not (backend.folder / "a" / "b").exists()
        backend.gate.set()
        reply = await client.receive()
        assert (reply["status"], reply["sync_status"]) == ("WRITECOMMITTED", "SYNCED_BACKEND")
        assert (backend.folder / "a" / "b").read_bytes() == data


async def test_a_write_through_that_fails_is_an_error_and_the_object_goes_on_trying(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.failures = 1
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        await client.stage(URI, b"bytes")
        code, sentence = await client.refusal("commit_write", uri=URI, write_through=True)
        assert code == "BACKEND_FAILED"
        assert "told to fail" in sentence
        assert "tried again" in sentence
        assert await client.fetch(URI) == b"bytes"
        await synced(client)
        assert (backend.folder / "a" / "b").read_bytes() == b"bytes"


async def test_a_write_through_that_is_replaced_before_its_turn_does_not_claim_to_be_in_the_backend(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.gate.clear()
    async with flushing(short_dir, backend) as daemon:
        client, other = await daemon.connect(), await daemon.connect()
        for number in range(4):  # every upload there may be
            await write(other, b"bytes", f"hypercache://{number}")
        await eventually(lambda: backend.under_way == 4)
        await client.stage(URI, b"first")
        await client.send(line("commit_write", uri=URI, write_through=True))
        await eventually(lambda: daemon.parts.store.cache.get(URI) is not None)
        await write(other, b"second")
        backend.gate.set()
        reply = await client.receive()
        assert (reply["status"], reply["sync_status"]) == ("WRITECOMMITTED", "COMMITTED")
        await synced(other)
        assert (backend.folder / "a" / "b").read_bytes() == b"second"
    assert backend.uploaded().count("a/b") == 1


@pytest.mark.parametrize("ending", ["evict", "its device fails", "it fails and is put back"])
async def test_a_write_through_that_is_gone_before_its_turn_is_not_acknowledged(
    short_dir: Path, backend: GatedBackend, ending: str
) -> None:
    backend.gate.clear()
    async with flushing(short_dir, backend, devices=1, pool_size=17 * MIB) as daemon:
        client, other = await daemon.connect(), await daemon.connect()
        for number in range(4):  # every upload there may be
            await other.store(f"hypercache://{number}", b"bytes", {}, tier="ram")
        await eventually(lambda: backend.under_way == 4)
        await client.stage(URI, b"bytes")
        await client.send(line("commit_write", uri=URI, write_through=True))
        await eventually(lambda: daemon.parts.store.cache.get(URI) is not None)
        health = daemon.parts.health
        if ending == "evict":
            assert (await other.ask("evict", uri=URI))["status"] == "EVICTED"
        else:
            health._judge(health._devices[0], OSError(5, "Input/output error"))
            await cleared(daemon)
        if ending == "it fails and is put back":
            await health.look_again()
        backend.gate.set()
        reply = await client.receive()
        if ending == "it fails and is put back":
            assert (reply["status"], reply["sync_status"]) == ("WRITECOMMITTED", "SYNCED_BACKEND")
        else:
            assert (reply["status"], reply["error_code"]) == ("ERROR", "UNAVAILABLE")
            assert "did not reach the backend" in reply["error_message"]
            assert not (backend.folder / "a" / "b").exists()


async def test_a_write_through_of_what_was_not_to_be_flushed_goes_through(
    short_dir: Path, backend: GatedBackend
) -> None:
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        await client.stage(URI, b"bytes", auto_flush_s3=False)
        reply = await client.ask("commit_write", uri=URI, write_through=True)
        assert reply["sync_status"] == "SYNCED_BACKEND"


async def test_stopping_waits_for_a_write_through_under_way_and_answers_it(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.gate.clear()
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        await client.stage(URI, b"bytes")
        await client.send(line("commit_write", uri=URI, write_through=True))
        await eventually(lambda: backend.under_way == 1)
        daemon.stop.set()
        await trio.testing.wait_all_tasks_blocked(0.05)
        backend.gate.set()
        assert (await client.receive())["sync_status"] == "SYNCED_BACKEND"
        assert await client.receive_line() == b""


async def test_a_backend_that_hangs_keeps_a_stop_no_longer_than_its_grace(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.gate.clear()
    async with flushing(short_dir, backend, shutdown_grace_s=0.2) as daemon:
        client = await daemon.connect()
        await client.stage(URI, b"bytes")
        await client.send(line("commit_write", uri=URI, write_through=True))
        await write(await daemon.connect(), b"bytes", "hypercache://background")
        await eventually(lambda: backend.under_way == 2)
        daemon.stop.set()
        with trio.fail_after(10):
            await daemon.ended.wait()
    async with flushing(short_dir, backend) as daemon:
        client = await daemon.connect()
        for uri in (URI, "hypercache://background"):
            assert await client.fetch(uri) == b"bytes"
            await synced(client, uri)
