"""What a commit with checksums reads back before it is acknowledged, where the operator wants that."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from daemon_harness import (
    CHUNK,
    DEADLINE_S,
    Client,
    Message,
    eventually,
    line,
    no_checking,
    pattern,
    running,
    sums_of,
)
from frames import framed, layouts_of

from hypercache_compat.raw_wire import write_layout
from hypercache_daemon.access import DeviceError
from hypercache_daemon.core.objects import packed_checksums
from hypercache_daemon.direct_reads import read_direct
from hypercache_daemon.orders import CommitOrder
from hypercache_daemon.removal import run_janitor

URI = "hypercache://a/b"
TIERS = pytest.mark.parametrize("tier", ["nvme", "ram"])


@TIERS
async def test_a_wrong_byte_is_found_before_the_commit_is_acknowledged(short_dir: Path, tier: str) -> None:
    data = pattern(1, CHUNK + 100)
    async with running(short_dir, verify_on_commit=True) as daemon:
        client = await daemon.connect()
        staged = await client.stage(URI, data[:-1] + b"X", tier=tier)
        request = {"uri": URI, "chunk_checksums": sums_of(data), "local_only": True}
        code, sentence = await client.refusal("commit_write", **request)
        assert code == "CHECKSUM_MISMATCH"
        assert f"1 of 2 chunks of {URI}" in sentence
        assert "the first of them chunk 1 " in sentence
        assert (await client.ask("locate", uri=URI))["sync_status"] == "STAGED", "the staged write stays"
        write_layout(staged["chunk_layout"], data)
        assert (await client.ask("commit_write", **request))["status"] == "WRITECOMMITTED"
        assert await client.fetch(URI) == data


async def test_the_object_before_stays_where_its_successor_is_wrong(short_dir: Path) -> None:
    async with running(short_dir, verify_on_commit=True) as daemon:
        client = await daemon.connect()
        await client.store(URI, b"old")
        await client.stage(URI, b"neW")
        refused = await client.refusal("commit_write", uri=URI, chunk_checksums=sums_of(b"new"))
        assert refused[0] == "CHECKSUM_MISMATCH"
        assert await client.fetch(URI) == b"old"


async def test_nothing_is_read_back_unless_it_is_asked_for(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        reply = await client.store(URI, b"bytes", {"chunk_checksums": sums_of(b"other")})
        assert reply["status"] == "WRITECOMMITTED"
    async with running(short_dir, verify_on_commit=True) as daemon:
        client = await daemon.connect()
        with no_checking(daemon):
            reply = await client.store("hypercache://without/checksums", b"bytes")
        assert reply["status"] == "WRITECOMMITTED"


async def test_of_a_batch_only_what_is_wrong_is_refused(short_dir: Path) -> None:
    objects = {"good": b"one", "bad": b"two", "last": b"three"}
    async with running(short_dir, verify_on_commit=True) as daemon:
        client = await framed(daemon)
        sizes = [len(data) for data in objects.values()]
        staged = await client.ask("stage_many", suffixes=list(objects), sizes=sizes)
        for layout, data in zip(layouts_of(staged["layouts"]), objects.values(), strict=True):
            write_layout(layout["chunk_layout"], data)
        reply = await client.ask(
            "commit_many",
            suffixes=list(objects),
            stage_ids=staged["stage_ids"],
            local_only=True,
            checksum_counts=words([1, 1, 1]),
            checksums=words([zlib.crc32(b"one"), zlib.crc32(b"TWO"), zlib.crc32(b"three")]),
        )
        assert [(error["index"], error["error_code"]) for error in reply["errors"]] == [
            (1, "CHECKSUM_MISMATCH")
        ]
        assert [await client.fetch(name) for name in objects] == [b"one", b"two", b"three"]
        assert daemon.parts.store.cache.staged.newest("bad") is not None, "what was refused stays staged"


def words(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


async def test_others_are_served_while_a_commit_is_read_back(short_dir: Path) -> None:
    async with running(short_dir, verify_on_commit=True) as daemon:
        slow, other = await daemon.connect(), await daemon.connect()
        await slow.stage(URI, b"bytes")
        async with trio.open_nursery() as nursery:
            with no_checking(daemon):
                nursery.start_soon(commits, slow)
                for number in range(3):
                    await other.store(f"hypercache://other/{number}", b"more")
                assert (await other.ask("locate", uri=URI))["sync_status"] == "STAGED"
        assert (await other.ask("locate", uri=URI))["sync_status"] == "COMMITTED"


async def test_nothing_of_a_batch_expires_while_the_rest_of_it_is_read_back(short_dir: Path) -> None:
    async with running(short_dir, verify_on_commit=True, stage_expiry_s=100, quarantine_s=50) as daemon:
        client, parts = await daemon.connect(), daemon.parts
        for uri in ("first", "second", "idle"):
            await client.stage(uri, uri.encode())
        checksums = [None, packed_checksums(sums_of(b"second"))]
        order = CommitOrder(("first", "second"), (None, None), checksums, True, False, 1)
        async with trio.open_nursery() as nursery:
            with no_checking(daemon):
                nursery.start_soon(parts.handlers.committer.commit, order)
                await eventually(lambda: parts.store.hashing.statistics().tasks_waiting)
                daemon.ahead_s = 1000
                nursery.start_soon(run_janitor, parts.store, 0)
                await eventually(lambda: parts.store.cache.staged.newest("idle") is None)
            await eventually(lambda: parts.store.cache.get("second"))
            nursery.cancel_scope.cancel()
        assert [await client.fetch(uri) for uri in ("first", "second")] == [b"first", b"second"]
        assert (await client.status())["pools"]["nvme"]["quarantined_bytes"] == 4096, "that of the idle one"


async def commits(client: Client) -> None:
    reply = await client.ask("commit_write", uri=URI, chunk_checksums=sums_of(b"bytes"))
    assert reply["status"] == "WRITECOMMITTED"


async def test_what_is_read_back_comes_from_the_device_and_not_from_the_page_cache(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[bool] = []

    def noted(path: str, flags: int, *more: int, dir_fd: int | None = None) -> int:
        if str(path).startswith("/proc/self/fd/"):  # as the daemon opens a chunk of its devices
            reads.append(bool(flags & os.O_DIRECT))
        return opened(path, flags, *more, dir_fd=dir_fd)

    opened = os.open
    async with running(short_dir, verify_on_commit=True) as daemon:
        client = await daemon.connect()
        await client.stage(URI, b"bytes")
        monkeypatch.setattr(os, "open", noted)
        reply = await client.ask("commit_write", uri=URI, chunk_checksums=sums_of(b"bytes"), local_only=True)
        monkeypatch.undo()
        assert reply["status"] == "WRITECOMMITTED"
    assert reads[0], "where the file system has no such reads, the next one is another"


async def test_what_cannot_be_read_back_is_refused_and_stays_staged(short_dir: Path) -> None:
    async with running(short_dir, verify_on_commit=True) as daemon:
        client = await daemon.connect()
        staged = await client.ask("stage_write", uri=URI, size_bytes=5, tier="ram")  # and writes nothing
        code, sentence = await client.refusal("commit_write", uri=URI, chunk_checksums=[0])
        assert code == "UNAVAILABLE"
        assert "was cut off" in sentence
        write_layout(staged["chunk_layout"], b"bytes")
        reply = await client.ask("commit_write", uri=URI, chunk_checksums=sums_of(b"bytes"))
        assert reply["status"] == "WRITECOMMITTED"


@pytest.mark.parametrize(
    "check", [{"chunk_checksums": sums_of(b"bytes")}, {"sha256": hashlib.sha256(b"bytes").hexdigest()}]
)
async def test_a_device_that_does_not_answer_keeps_a_stop_no_longer_than_its_grace(
    short_dir: Path, check: Message
) -> None:
    answers = threading.Event()

    def hangs(*_: object) -> str:
        answers.wait(DEADLINE_S)
        return "/var/tmp/there-is-no-such-device"

    async with running(short_dir, verify_on_commit=True, shutdown_grace_s=0.1) as daemon:
        client, store = await daemon.connect(), daemon.parts.store
        await client.stage(URI, b"bytes", tier="ram")
        store.path = hangs
        await client.send(line("commit_write", uri=URI, **check))
        await eventually(lambda: store.hashing.borrowed_tokens == 1)
        daemon.stop.set()
        try:
            with trio.fail_after(5):
                await daemon.ended.wait()
        finally:
            answers.set()
    async with running(short_dir) as daemon:
        assert await (await daemon.connect()).fetch(URI) is None, "it was never acknowledged"


# -- the reading itself --------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["/dev/shm", "/var/tmp"])  # without and with reads past the page cache
@pytest.mark.parametrize("length", [1, 511, 4096, 4097, 300_000])
def test_direct_reads_are_the_bytes_of_the_file(folder: str, length: int) -> None:
    data = pattern(3, 400_000)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(data)
        file.flush()
        assert read_direct(file.name, 4096, length) == data[4096 : 4096 + length]


@pytest.mark.parametrize("folder", ["/dev/shm", "/var/tmp"])
@pytest.mark.parametrize("left", [0, 4096, 5000, 8191])
def test_a_device_that_ends_too_early_is_named(folder: str, left: int) -> None:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(left)
        with pytest.raises(DeviceError, match=rf"{file.name} was cut off: it ends before byte 8192"):
            read_direct(file.name, 4096, 4096)


def test_a_device_that_is_gone_is_an_error_of_the_system() -> None:
    with pytest.raises(FileNotFoundError):
        read_direct("/var/tmp/there-is-no-such-device", 0, 1)
