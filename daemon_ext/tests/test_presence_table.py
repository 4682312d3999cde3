"""The presence table as a client gets it: over the socket, sealed, and always as the daemon's objects are."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import msgpack
import pytest
import trio
from daemon_harness import DEADLINE_S, Daemon, eventually, line, pattern, running, sums_of
from frames import HELLO, FrameClient, framed

from hypercache_compat.waiting import wait_until
from hypercache_daemon import presence_table, startup
from hypercache_daemon.catalog import CatalogError
from hypercache_daemon.connection import ConnectionLimits
from hypercache_daemon.presence_table import SharedTable, geometry_for
from hypercache_protocol.presence import Geometry, Presence, TableView
from hypercache_protocol.session import Limits

ASK = msgpack.packb([1, "get_presence_table", {}])


@contextmanager
def greeted(daemon: Daemon) -> Iterator[socket.socket]:
    """A client's socket once it has gone on to frames. Blocks."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(DEADLINE_S)
        client.connect(str(daemon.config.socket))
        client.sendall(line("hello", **HELLO))
        while client.recv(1) != b"\n":
            pass
        yield client


def asked(client: socket.socket, times: int) -> None:
    """Ask so many times for the table."""
    client.sendall((struct.pack(">I", len(ASK)) + ASK) * times)


def read_reply(client: socket.socket) -> tuple[bytes, list[int]]:
    """A frame's body, and the descriptors that came with it."""
    data, descriptors, _, _ = socket.recv_fds(client, 4, 8)
    (length,) = struct.unpack(">I", data)
    return client.recv(length, socket.MSG_WAITALL), descriptors


def read_table(daemon: Daemon) -> tuple[str, dict[str, int], list[int]]:
    """The reply's word and fields, and the descriptors that came with it. Blocks."""
    with greeted(daemon) as client:
        asked(client, 1)
        body, descriptors = read_reply(client)
    _, word, fields = msgpack.unpackb(body)
    return word, fields, descriptors


def counts_for_who_does_not_read(daemon: Daemon) -> list[int]:
    """How many descriptors come with each reply where the table is asked for once, then four times before
    anything of it is read, and then once more. Blocks."""
    counts: list[int] = []
    reply_bytes = 0
    with greeted(daemon) as client:
        for times in (1, 4, 1):
            asked(client, times)
            wait_until(partial(has_arrived, client, times * reply_bytes))
            for _ in range(times):
                body, descriptors = read_reply(client)
                reply_bytes = 4 + len(body)
                counts.append(len(descriptors))
                for descriptor in descriptors:
                    os.close(descriptor)
    return counts


def has_arrived(client: socket.socket, size_bytes: int) -> bool:
    (there,) = struct.unpack("i", fcntl.ioctl(client, termios.FIONREAD, bytes(4)))
    return int(there) >= size_bytes


class Reader:
    """A client's view of the table."""

    def __init__(self, fields: dict[str, int], descriptor: int) -> None:
        assert fields["table_format"] == 1
        geometry = Geometry(fields["seed"], fields["buckets"])
        self.descriptor = descriptor
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ)
        self.view = TableView(memoryview(memory), geometry)

    def __call__(self, *uris: str) -> list[str]:
        return [Presence(state).name for state in self.view.look_up([uri.encode() for uri in uris])]


@contextmanager
def closing_all(descriptors: list[int]) -> Iterator[int]:
    try:
        assert len(descriptors) == 1
        yield descriptors[0]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


async def test_it_follows_everything_that_happens_to_an_object(short_dir: Path) -> None:
    data = pattern(1, 5000)
    sums = {"local_only": True, "chunk_checksums": sums_of(data)}
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.store("a", data, sums)
        _, fields, descriptors = await trio.to_thread.run_sync(read_table, daemon)
        with closing_all(descriptors) as descriptor:
            sees = Reader(fields, descriptor)
            assert sees("a", "b") == ["VERIFIABLE", "ABSENT"]
            await client.stage("b", data)
            assert sees("b") == ["ABSENT"]
            await client.ask("commit_write", uri="b", local_only=True)
            assert sees("a", "b") == ["VERIFIABLE", "UNVERIFIABLE"]
            await client.store("b", data, sums)
            assert sees("b") == ["VERIFIABLE"]
            await client.ask("pin", uri="a", pinned=True)
            assert sees("a") == ["VERIFIABLE"]
            await client.ask("evict", uri="b")
            assert sees("a", "b") == ["VERIFIABLE", "ABSENT"]
            daemon.parts.store.cache.withhold("a")
            assert sees("a") == ["ABSENT"]
            daemon.parts.store.cache.give_back("a")
            assert sees("a") == ["VERIFIABLE"]
            await client.ask("purge")
            assert sees("a") == ["ABSENT"]


async def test_what_was_stored_before_a_restart_is_in_the_new_table(short_dir: Path) -> None:
    data = pattern(1, 5000)
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.store("a", data, {"local_only": True, "chunk_checksums": sums_of(data)})
        await client.store("b", data)
        _, before, descriptors = await trio.to_thread.run_sync(read_table, daemon)
        with closing_all(descriptors):
            pass
    async with running(short_dir) as daemon:
        _, fields, descriptors = await trio.to_thread.run_sync(read_table, daemon)
        with closing_all(descriptors) as descriptor:
            assert Reader(fields, descriptor)("a", "b", "c") == ["VERIFIABLE", "UNVERIFIABLE", "ABSENT"]
    assert before["seed"] != fields["seed"]


async def test_nobody_who_gets_it_can_change_it(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        _, _, descriptors = await trio.to_thread.run_sync(read_table, daemon)
        with closing_all(descriptors) as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            with pytest.raises(PermissionError):
                os.pwrite(descriptor, b"x", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, size_bytes)
            for other in (size_bytes - 1, size_bytes + 1):
                with pytest.raises(PermissionError):
                    os.ftruncate(descriptor, other)
            with pytest.raises(PermissionError):
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
            try:
                with pytest.raises(PermissionError):
                    mmap.mmap(again, size_bytes)
            finally:
                os.close(again)


async def test_no_look_has_to_find_memory_for_it(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        _, _, descriptors = await trio.to_thread.run_sync(read_table, daemon)
        with closing_all(descriptors) as descriptor:
            found = os.fstat(descriptor)
            assert found.st_blocks * 512 >= found.st_size


async def test_the_table_goes_without_its_descriptor_where_too_many_are_on_their_way(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel counts those of one user that are sent and not received: others may keep it at the limit.
    def refuse(*_: object) -> int:
        raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")

    async with running(short_dir) as daemon:
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "sendmsg", refuse)
            word, _, descriptors = await trio.to_thread.run_sync(read_table, daemon)
        assert (word, descriptors) == ("PRESENCE_TABLE", [])
        _, _, descriptors = await trio.to_thread.run_sync(read_table, daemon)
        with closing_all(descriptors):
            pass


async def test_who_does_not_read_has_one_descriptor_on_its_way_at_most(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        counts = await trio.to_thread.run_sync(counts_for_who_does_not_read, daemon)
    assert counts == [1, 1, 0, 0, 0, 1]


async def test_who_asks_on_and_on_and_never_reads_is_closed(short_dir: Path) -> None:
    async def ask_on_and_on(client: FrameClient) -> None:
        with suppress(trio.BrokenResourceError):  # so it was closed
            while True:
                await client.send("get_presence_table")

    limits = ConnectionLimits(Limits(), send_timeout_s=0.3)
    async with running(short_dir, limits=limits) as daemon:
        client = await framed(daemon)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_on_and_on, client)
            await eventually(lambda: not daemon.parts.server.connections)


@pytest.mark.parametrize("asked_before", [0, 40])
async def test_the_descriptor_comes_with_its_own_reply_among_others(
    short_dir: Path, asked_before: int
) -> None:
    async with running(short_dir) as daemon:
        client = await framed(daemon)
        pings = [await client.send("ping") for _ in range(asked_before)]
        table = await client.send("get_presence_table")
        last = await client.send("ping")
        for request_id in (*pings, last):
            assert (await client.reply(request_id))["status"] == "PONG"
        assert (await client.reply(table))["status"] == "PRESENCE_TABLE"


async def test_without_a_table_a_client_is_told_to_ask(short_dir: Path) -> None:
    async with running(short_dir, presence_table_size=0) as daemon:
        client = await framed(daemon)
        reply = await client.ask("get_presence_table")
        assert reply == {
            "status": "ERROR",
            "error_code": "UNAVAILABLE",
            "error_message": "this daemon has no presence table: ask with locate_many",
        }


async def test_a_machine_that_cannot_make_one_serves_without(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(presence_table, "_SEALS", 1 << 20)  # as on a kernel that knows no such seal
    async with running(short_dir) as daemon:
        client = await framed(daemon)
        assert (await client.ask("get_presence_table"))["status"] == "ERROR"
    assert "no presence table, so clients ask for each lookup" in caplog.text


async def test_a_client_that_hangs_up_before_it_gets_the_table_costs_nobody_anything(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        for _ in range(20):
            client = await framed(daemon)
            await client.send("get_presence_table")
            await client.aclose()
        assert (await (await daemon.connect()).ask("ping"))["status"] == "PONG"


async def test_a_table_has_room_for_twice_what_a_start_finds(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        table = startup._published(daemon.config, daemon.parts.store.cache, 100_000)
        assert table is not None
        with closing(table):
            assert table.view.geometry.buckets == 1 << 17


async def test_a_start_that_fails_lets_go_of_its_table(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = SharedTable.close
    let_go: list[SharedTable] = []

    def fails(*_: object) -> None:
        raise CatalogError("a test")

    monkeypatch.setattr(startup, "_fill", fails)
    monkeypatch.setattr(SharedTable, "close", lambda table: let_go.append(table) or close(table))
    with pytest.raises(CatalogError, match="a test"):
        async with running(short_dir):
            pass
    assert len(let_go) == 1


@pytest.mark.parametrize(
    ("objects", "most_bytes", "buckets"),
    [
        (0, 64 << 20, 1 << 13),
        (1 << 14, 64 << 20, 1 << 13),
        ((1 << 14) + 1, 64 << 20, 1 << 14),
        (1_000_000, 64 << 20, 1 << 19),
        (1 << 30, 64 << 20, 1 << 19),
        (1 << 30, (64 << 20) + 4096, 1 << 20),
        (0, 4096 + 64, 1),
        (0, 4096 + 63, None),
        (0, 0, None),
    ],
)
def test_a_table_has_room_for_four_times_the_objects_within_the_limit(
    objects: int, most_bytes: int, buckets: int | None
) -> None:
    geometry = geometry_for(objects, most_bytes)
    assert (geometry and geometry.buckets) == buckets
    assert geometry is None or geometry.size_bytes <= most_bytes
