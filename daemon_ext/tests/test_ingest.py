"""Fetching missing objects from a real folder: once for all who ask, whole or not at all."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from daemon_harness import CHUNK, DEADLINE_S, MIB, Client, eventually, line, pattern, running
from gated_backend import GatedBackend

from hypercache_compat.raw_wire import read_layout
from hypercache_daemon.backend import Target

URI = "hypercache://a/b"
DATA = pattern(7, CHUNK + 5000)


@pytest.fixture
def backend(short_dir: Path) -> Any:
    """A backend that has DATA under URI."""
    made = GatedBackend(short_dir / "backend", piece_bytes=1_000_003)
    put(made, "a/b", DATA)
    yield made
    made.close()


def put(backend: GatedBackend, path: str, data: bytes) -> None:
    file = backend.folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


async def nothing_stays(client: Client) -> None:
    status = await client.status()
    assert status["objects"] == 0
    for pool in status["pools"].values():
        assert (pool["staged_bytes"], pool["used_bytes"]) == (0, 0)


# -- what is fetched -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [None, "nvme", "ram"])
async def test_a_locate_of_a_missing_object_brings_it_whole_and_verifiable(
    short_dir: Path, backend: GatedBackend, tier: str | None
) -> None:
    async with running(short_dir, own_backend=backend) as daemon:
        client = await daemon.connect()
        wanted = {} if tier is None else {"tier": tier}
        found = await client.ask("locate", uri=URI, **wanted)
        assert (found["status"], found["object_size"]) == ("HIT", len(DATA))
        assert found["sync_status"] == "SYNCED_BACKEND"
        assert {chunk["tier"] for chunk in found["chunk_layout"]} == {tier or "nvme"}
        assert read_layout(found["chunk_layout"]) == DATA
        sums = [zlib.crc32(DATA[:CHUNK]), zlib.crc32(DATA[CHUNK:])]
        assert [chunk["checksum"] for chunk in found["chunk_layout"]] == sums
        status = await client.status()
        assert status["backend"]["ingested_objects"] == 1
        assert status["backend"]["ingested_bytes"] == len(DATA)
        assert status["pools"][tier or "nvme"]["dirty_bytes"] == 0
    async with running(short_dir, own_backend=backend) as daemon:
        assert await (await daemon.connect()).fetch(URI) == DATA
    assert backend.downloads == ["a/b"]
    assert backend.uploads == [], "what came from the backend is not sent back"


async def test_ingest_says_whether_it_had_to_fetch_and_pins_where_that_is_asked(
    short_dir: Path, backend: GatedBackend
) -> None:
    async with running(short_dir, own_backend=backend) as daemon:
        client = await daemon.connect()
        fetched = await client.ask("ingest", uri=URI)
        assert fetched["status"] == "INGESTED"
        again = await client.ask("ingest", uri=URI, pinned=True)
        assert again["status"] == "HIT"
        for name in ("object_size", "chunk_layout", "generation", "sync_status"):
            assert again[name] == fetched[name]
        assert (await client.status())["pools"]["nvme"]["pinned_bytes"] == CHUNK + 8192
        await client.ask("evict", uri=URI)
        assert (await client.ask("ingest", uri=URI, pinned=True))["status"] == "INGESTED"
        assert (await client.status())["pools"]["nvme"]["pinned_bytes"] == CHUNK + 8192


async def test_an_empty_object_is_fetched_too(short_dir: Path, backend: GatedBackend) -> None:
    put(backend, "empty", b"")
    async with running(short_dir, own_backend=backend) as daemon:
        found = await (await daemon.connect()).ask("locate", uri="hypercache://empty")
        assert (found["status"], found["object_size"], found["chunk_layout"]) == ("HIT", 0, [])


async def test_what_was_evicted_after_its_upload_comes_back_from_the_backend(
    short_dir: Path, backend: GatedBackend
) -> None:
    async with running(short_dir, own_backend=backend) as daemon:
        client = await daemon.connect()
        await client.store("hypercache://new", pattern(2, 9000), commit={"write_through": True})
        await client.ask("evict", uri="hypercache://new")
        found = await client.ask("locate", uri="hypercache://new")
        assert read_layout(found["chunk_layout"]) == pattern(2, 9000)


async def test_without_auto_ingest_a_miss_is_a_miss(short_dir: Path, backend: GatedBackend) -> None:
    async with running(short_dir, own_backend=backend) as daemon:
        client = await daemon.connect()
        assert await client.ask("locate", uri=URI, auto_ingest=False) == {"status": "MISS"}
    assert backend.downloads == []


async def test_what_the_backend_has_not_either_is_a_miss_and_for_ingest_an_error(
    short_dir: Path, backend: GatedBackend
) -> None:
    async with running(short_dir, own_backend=backend) as daemon:
        client = await daemon.connect()
        assert await client.ask("locate", uri="hypercache://none", pinned=True) == {"status": "MISS"}
        assert (await client.refusal("ingest", uri="hypercache://none"))[0] == "NOT_FOUND"
        await nothing_stays(client)


async def test_only_places_that_the_configuration_names_are_read(short_dir: Path) -> None:
    for folder in ("allowed", "secret"):
        (short_dir / folder).mkdir()
        (short_dir / folder / "x").write_bytes(folder.encode())
    (short_dir / "allowed" / "link").symlink_to(short_dir / "secret" / "x")
    backend = GatedBackend(short_dir / "backend", [f"file://{short_dir}/allowed"])
    async with running(short_dir, own_backend=backend) as daemon:
        client = await daemon.connect()
        assert read_layout(
            (await client.ask("ingest", uri=f"file://{short_dir}/allowed/x"))["chunk_layout"]
        ) == (b"allowed")
        for place in ("secret/x", "allowed/../secret/x", "allowed2/x", "allowed/./../secret/x"):
            uri = f"file://{short_dir}/{place}"
            assert await client.ask("locate", uri=uri) == {"status": "MISS"}
            code, sentence = await client.refusal("ingest", uri=uri)
            assert code == "NO_BACKEND"
            assert "--ingest-prefix" in sentence
        code, sentence = await client.refusal("ingest", uri=f"file://{short_dir}/allowed/link")
        assert code == "BACKEND_FAILED"
        assert "symbolic link" in sentence
        assert (await client.status())["objects"] == 1


async def test_room_is_made_for_what_is_fetched(short_dir: Path, backend: GatedBackend) -> None:
    async with running(short_dir, own_backend=backend, quarantine_share=0) as daemon:
        client = await daemon.connect()
        for number in range(8):
            await client.store(f"local/{number}", pattern(number, CHUNK))
        assert (await client.ask("locate", uri=URI))["status"] == "HIT"
        assert (await client.ask("locate", uri="local/7"))["status"] == "HIT"
        await client.store("pinned", pattern(1, 20 * MIB), pinned=True)
        put(backend, "large", bytes(16 * MIB))
        assert (await client.refusal("ingest", uri="hypercache://large"))[0] == "NO_SPACE"


# -- one fetch for all ---------------------------------------------------------------------------------


async def test_all_who_miss_one_object_at_once_share_one_fetch(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.gate.clear()
    async with running(short_dir, own_backend=backend) as daemon:
        clients = [await daemon.connect() for _ in range(6)]
        for client in clients[:5]:
            await client.send(line("locate", uri=URI))
        await clients[5].send(line("ingest", uri=URI))
        await eventually(lambda: backend.downloads)
        await clients[0].aclose()  # who asked first goes away
        await trio.testing.wait_all_tasks_blocked(0.05)
        backend.gate.set()
        replies = [await client.receive() for client in clients[1:]]
        assert [reply["status"] for reply in replies] == ["HIT"] * 4 + ["INGESTED"]
        assert all(reply["generation"] == replies[0]["generation"] for reply in replies)
        assert read_layout(replies[0]["chunk_layout"]) == DATA
    assert backend.downloads == ["a/b"]


async def test_no_more_than_four_objects_are_fetched_at_once(short_dir: Path, backend: GatedBackend) -> None:
    backend.gate.clear()
    for number in range(6):
        put(backend, str(number), b"bytes")
    async with running(short_dir, own_backend=backend) as daemon:
        clients = [await daemon.connect() for _ in range(6)]
        for number, client in enumerate(clients):
            await client.send(line("locate", uri=f"hypercache://{number}"))
        await eventually(lambda: len(backend.downloads) == 4)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert len(backend.downloads) == 4
        backend.gate.set()
        assert [(await client.receive())["status"] for client in clients] == ["HIT"] * 6


async def test_nobody_waits_for_a_source_that_does_not_even_say_whether_it_has_it(
    short_dir: Path, backend: GatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, says_so = threading.Event(), threading.Event()

    def hangs(_: Target) -> None:
        asked.set()
        assert says_so.wait(DEADLINE_S)

    monkeypatch.setattr(backend, "size_bytes", hangs)
    async with running(short_dir, own_backend=backend) as daemon:
        client, other = [await daemon.connect() for _ in range(2)]
        await client.send(line("locate", uri=URI))
        await eventually(asked.is_set)
        assert (await other.ask("ping"))["status"] == "PONG"
        assert not says_so.is_set()
        says_so.set()
        assert (await client.receive())["status"] == "MISS"


# -- while it is fetched -------------------------------------------------------------------------------


async def test_nobody_sees_or_touches_what_is_half_fetched(short_dir: Path, backend: GatedBackend) -> None:
    backend.between.clear()
    async with running(short_dir, own_backend=backend, stage_expiry_s=100) as daemon:
        client, other = await daemon.connect(), await daemon.connect()
        await client.send(line("locate", uri=URI))

        async def is_staged() -> bool:
            return (await other.status())["objects_by_state"]["STAGED"] == 1

        await eventually(is_staged)
        assert await other.ask("locate", uri=URI, auto_ingest=False) == {"status": "MISS"}
        assert (await other.refusal("get_write_status", uri=URI))[0] == "NOT_FOUND"
        assert (await other.refusal("append_write", uri=URI, size_bytes=1))[0] == "NOT_STAGED"
        assert (await other.refusal("commit_write", uri=URI))[0] == "NOT_STAGED"
        for stage_id in hex_ids(daemon.parts.store.cache.newest_generation):
            assert (await other.refusal("commit_write", uri=URI, stage_id=stage_id))[0] == "STALE_STAGE"
        assert await other.ask("evict", uri=URI) == {"status": "MISS"}
        await other.ask("purge")
        await other.stage("a client's", b"bytes")
        daemon.ahead_s = 1000
        await eventually(lambda: daemon.parts.store.cache.staged.newest("a client's") is None)
        backend.between.set()
        found = await client.receive()
        assert read_layout(found["chunk_layout"]) == DATA


def hex_ids(last_number: int) -> list[str]:
    """The ids around the last one: they can be guessed."""
    return [f"{last_number + number:x}" for number in range(-3, 4)]


@pytest.mark.parametrize("evicted", [False, True])
async def test_what_a_client_commits_meanwhile_wins_even_if_it_is_gone_again(
    short_dir: Path, backend: GatedBackend, evicted: bool
) -> None:
    backend.between.clear()
    async with running(short_dir, own_backend=backend) as daemon:
        client, other = await daemon.connect(), await daemon.connect()
        await client.send(line("locate", uri=URI))

        async def is_staged() -> bool:
            return (await other.status())["objects_by_state"]["STAGED"] == 1

        await eventually(is_staged)
        await other.store(URI, b"newer")
        if evicted:
            await other.ask("evict", uri=URI)
        backend.between.set()
        reply = await client.receive()
        if evicted:
            assert reply == {"status": "MISS"}
        else:
            assert read_layout(reply["chunk_layout"]) == b"newer"
        assert await other.fetch(URI) == (None if evicted else b"newer")
        status = await other.status()
        assert status["backend"]["ingested_objects"] == 0
        assert status["pools"]["nvme"]["staged_bytes"] == 0


async def test_what_a_client_commits_before_there_are_blocks_for_it_wins_too(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.gate.clear()
    backend.between.clear()
    async with running(short_dir, own_backend=backend) as daemon:
        client, other = await daemon.connect(), await daemon.connect()
        await client.send(line("locate", uri=URI))
        await eventually(lambda: backend.downloads)
        await other.store(URI, b"newer")
        backend.gate.set()

        async def has_staged() -> bool:
            staged = (await other.status())["pools"]["nvme"]
            return bool(staged["staged_bytes"] or staged["quarantined_bytes"])

        await eventually(has_staged)
        await other.ask("evict", uri=URI)
        backend.between.set()
        assert (await client.receive())["object_size"] == len(b"newer")
        assert await other.fetch(URI) is None
        assert (await other.status())["backend"]["ingested_objects"] == 0


async def test_a_client_may_stage_under_the_same_uri_meanwhile_and_commit_later(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.between.clear()
    async with running(short_dir, own_backend=backend) as daemon:
        client, other = await daemon.connect(), await daemon.connect()
        await client.send(line("ingest", uri=URI))
        await eventually(lambda: backend.downloads)
        await other.stage(URI, b"newer")
        backend.between.set()
        assert read_layout((await client.receive())["chunk_layout"]) == DATA
        await other.ask("commit_write", uri=URI, local_only=True)
        assert await other.fetch(URI) == b"newer"


# -- failures ------------------------------------------------------------------------------------------


async def test_a_source_that_fails_is_an_error_and_the_next_try_may_succeed(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.failures = 2
    async with running(short_dir, own_backend=backend) as daemon:
        client = await daemon.connect()
        for action in ("locate", "ingest"):
            code, sentence = await client.refusal(action, uri=URI)
            assert code == "BACKEND_FAILED"
            assert "told to fail" in sentence
            await nothing_stays(client)
        assert (await client.ask("locate", uri=URI))["status"] == "HIT"


def shrink(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(100)


def grow(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(bytes(10 * MIB))


def rewrite(file: Path) -> None:
    file.write_bytes(pattern(8, len(DATA)))


@pytest.mark.parametrize("change", [shrink, grow, rewrite])
async def test_a_source_that_changes_while_it_is_read_gives_no_object(
    short_dir: Path, backend: GatedBackend, change: Callable[[Path], None]
) -> None:
    backend.between.clear()
    async with running(short_dir, own_backend=backend, quarantine_s=100) as daemon:
        client = await daemon.connect()
        await client.send(line("locate", uri=URI))
        await eventually(lambda: daemon.parts.store.cache.pools["nvme"].staged_bytes > 0)
        change(backend.folder / "a" / "b")
        backend.between.set()
        reply = await client.receive()
        assert reply["error_code"] == "BACKEND_FAILED"
        await nothing_stays(client)
        assert (await client.status())["pools"]["nvme"]["quarantined_bytes"] == CHUNK + 8192


class LyingBackend(GatedBackend):
    """Says another size than its pieces have, as a store between two versions of an object may."""

    off_by = 0

    def download(self, target: Any) -> Any:
        size_bytes, pieces = super().download(target)
        return size_bytes + self.off_by, pieces


@pytest.mark.parametrize(
    ("off_by", "words"), [(1, "shrank"), (-1, "grew"), (-len(DATA), "grew"), (CHUNK, "shrank")]
)
async def test_pieces_that_are_not_of_the_size_that_was_told_give_no_object(
    short_dir: Path, off_by: int, words: str
) -> None:
    backend = LyingBackend(short_dir / "backend")
    backend.off_by = off_by
    put(backend, "a/b", DATA)
    async with running(short_dir, own_backend=backend) as daemon:
        client = await daemon.connect()
        code, sentence = await client.refusal("locate", uri=URI)
        assert (code, words in sentence) == ("BACKEND_FAILED", True)
        await nothing_stays(client)


async def test_a_source_that_vanishes_between_two_looks_gives_no_object(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.gate.clear()
    async with running(short_dir, own_backend=backend) as daemon:
        client = await daemon.connect()
        await client.send(line("locate", uri=URI))
        await eventually(lambda: backend.downloads)
        (backend.folder / "a" / "b").unlink()
        backend.gate.set()
        assert (await client.receive())["error_code"] == "BACKEND_FAILED"
        await nothing_stays(client)
        assert await client.ask("locate", uri=URI) == {"status": "MISS"}


class FaultyBackend(GatedBackend):
    """Has a bug."""

    def size_bytes(self, target: Any) -> int | None:
        raise ZeroDivisionError


async def test_a_fault_in_a_fetch_is_an_error_and_ends_nothing(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(short_dir, own_backend=FaultyBackend(short_dir / "backend")) as daemon:
        client = await daemon.connect()
        assert (await client.refusal("locate", uri=URI))[0] == "INTERNAL"
        assert "ZeroDivisionError" in caplog.text
        await client.store(URI, b"bytes")
        assert await client.fetch(URI) == b"bytes"


async def test_a_device_that_cannot_be_written_gives_no_object(
    short_dir: Path, backend: GatedBackend
) -> None:
    backend.gate.clear()
    async with running(short_dir, own_backend=backend) as daemon:
        client = await daemon.connect()
        await client.send(line("locate", uri=URI, tier="ram"))
        await eventually(lambda: backend.downloads)
        backend.between.clear()
        backend.gate.set()
        await eventually(lambda: list((short_dir / "ram").iterdir()))
        for file in (short_dir / "ram").iterdir():
            file.unlink()
        backend.between.set()
        assert (await client.receive())["error_code"] == "BACKEND_FAILED"
        await nothing_stays(client)


async def test_a_source_that_hangs_does_not_keep_a_stop(short_dir: Path, backend: GatedBackend) -> None:
    backend.between.clear()
    async with running(short_dir, own_backend=backend, shutdown_grace_s=0.1) as daemon:
        client = await daemon.connect()
        await client.send(line("locate", uri=URI))
        await eventually(lambda: daemon.parts.store.cache.pools["nvme"].staged_bytes > 0)
        daemon.stop.set()
        with trio.fail_after(10):
            await daemon.ended.wait()
    backend.close()
    async with running(short_dir, own_backend=backend) as daemon:
        client = await daemon.connect()
        assert (await client.status())["objects"] == 0
        found = await client.ask("locate", uri=URI)
        assert read_layout(found["chunk_layout"]) == DATA
