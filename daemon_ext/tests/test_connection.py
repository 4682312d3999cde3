"""One client's connection: how bytes may come, what it may cost, and how it ends."""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
from daemon_harness import (
    CHUNK,
    DEADLINE_S,
    MIB,
    Client,
    Daemon,
    eventually,
    line,
    no_checking,
    pattern,
    running,
)
from frames import framed

from hypercache_daemon.connection import DEFAULT_LIMITS, Connection, ConnectionLimits
from hypercache_daemon.peers import Peer
from hypercache_daemon.rights import Rights
from hypercache_daemon.stream import READ_BYTES
from hypercache_protocol.messages import ChunkLocation, HitReply
from hypercache_protocol.session import Limits
from hypercache_protocol.versions import LATEST

URI = "hypercache://a/b"
PING = line("ping")


# -- what a request costs ------------------------------------------------------------------------------


class Turns(trio.abc.Instrument):
    """Counts how often the event loop let each task run."""

    def __init__(self) -> None:
        self.counts: Counter[trio.lowlevel.Task] = Counter()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Called by trio."""
        self.counts[task] += 1


async def test_a_request_that_waits_for_nothing_costs_one_turn_of_the_event_loop(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert (await client.ask("ping"))["status"] == "PONG"
        turns = Turns()
        trio.lowlevel.add_instrument(turns)
        for _ in range(10):
            assert (await client.ask("ping"))["status"] == "PONG"
        trio.lowlevel.remove_instrument(turns)
        del turns.counts[trio.lowlevel.current_task()]
        assert max(turns.counts.values()) == 10


@pytest.mark.parametrize(
    ("asked", "batches", "turns_at_least"),
    [({}, 24, 6), ({"layouts": True}, 10, 10)],
    ids=["2,048 looked up", "512 with layouts"],
)
async def test_others_have_their_turn_between_long_batches_that_came_together(
    short_dir: Path, asked: dict[str, bool], batches: int, turns_at_least: int
) -> None:
    suffixes = [f"{key}" for key in range(512)]
    numbers = range(1, batches + 1)
    frames = [msgpack.packb([number, "locate_many", {"suffixes": suffixes, **asked}]) for number in numbers]
    data = b"".join(struct.pack(">I", len(frame)) + frame for frame in frames)
    assert len(data) < READ_BYTES, "else there is a turn for each time that some of it is read"
    async with running(short_dir) as daemon:
        client = await framed(daemon)
        turns = Turns()
        trio.lowlevel.add_instrument(turns)
        await client.send_bytes(data)
        for number in numbers:
            assert (await client.reply(number))["status"] == "LOCATED_MANY"
        trio.lowlevel.remove_instrument(turns)
        del turns.counts[trio.lowlevel.current_task()]
        assert max(turns.counts.values()) >= turns_at_least


class ReadsAtOnce:
    """A socket that brings `data` at once and takes all replies; notes in which turn each went out."""

    def __init__(self, data: bytes, turns: Turns) -> None:
        self._data = [b"", data]
        self._turns = turns
        self.sent_in: list[int] = []

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._data.pop()

    def send_now(self, data: bytearray) -> int:
        self.sent_in.append(self._turns.counts[trio.lowlevel.current_task()])
        return len(data)

    def close(self) -> None: ...


class LongReplies:
    """Handlers with an object of many chunks."""

    def answer_now(self, *_: object) -> HitReply:
        chunk = ChunkLocation(device="/dev/x", offset=0, length=CHUNK)
        return HitReply(object_size=2000 * CHUNK, chunk_layout=(chunk,) * 2000)


async def test_others_have_their_turn_after_each_long_reply_also_where_it_is_taken_at_once() -> None:
    turns = Turns()
    stream: Any = ReadsAtOnce(line("locate", uri=URI) * 10, turns)
    handlers: Any = LongReplies()
    rights = Rights(Peer(0, frozenset()))
    trio.lowlevel.add_instrument(turns)
    await Connection(stream, 1, rights, handlers, LATEST, DEFAULT_LIMITS).serve()
    trio.lowlevel.remove_instrument(turns)
    assert len(stream.sent_in) == len(set(stream.sent_in)) == 10


# -- how bytes may come --------------------------------------------------------------------------------


async def test_a_request_may_come_byte_by_byte(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        for byte in line("stage_write", uri=URI, size_bytes=5) + PING:
            await client.send(bytes([byte]))
        assert (await client.receive())["status"] == "WRITESTAGED"
        assert (await client.receive())["status"] == "PONG"


@pytest.mark.parametrize("piece_bytes", [2, 3, 7, 50, 10_000])
async def test_requests_cut_anywhere_are_answered_in_order(short_dir: Path, piece_bytes: int) -> None:
    requests = [line("locate", uri=f"u{number}" * 20, auto_ingest=False) for number in range(20)]
    requests[7:7] = [b"garbage\n", PING]
    data = b"".join(requests)
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        for start in range(0, len(data), piece_bytes):
            await client.send(data[start : start + piece_bytes])
            await trio.lowlevel.checkpoint()
        replies = [(await client.receive())["status"] for _ in requests]
    assert replies == ["MISS"] * 7 + ["ERROR", "PONG"] + ["MISS"] * 13


async def test_replies_come_in_the_order_of_the_requests_and_are_not_held_back_by_one_that_waits(
    short_dir: Path,
) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.stage(URI, b"bytes")
        with no_checking(daemon):
            await client.send(PING + line("commit_write", uri=URI, sha256="0" * 64) + PING)
            assert (await client.receive())["status"] == "PONG"
            with trio.move_on_after(0.1) as nothing:
                await client.receive()
            assert nothing.cancelled_caught
        assert (await client.receive())["error_code"] == "CHECKSUM_MISMATCH"
        assert (await client.receive())["status"] == "PONG"


# -- how it ends ---------------------------------------------------------------------------------------


async def test_a_client_that_sends_no_more_still_gets_every_reply(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.send(PING * 3 + line("stage_write", uri=URI, size_bytes=5) + b'{"action": "purge"')
        await client.end()
        words = [(await client.receive())["status"] for _ in range(4)]
        assert words == ["PONG"] * 3 + ["WRITESTAGED"]
        assert await client.receive_line() == b"", "half a request is none"
        await eventually(lambda: daemon.parts.server.connections == {})


async def test_a_client_that_dies_with_replies_unread_disturbs_nobody_and_is_no_fault(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(short_dir) as daemon:
        other = await daemon.connect()
        await other.store("kept", pattern(1, 5000))
        for _ in range(5):
            client = await daemon.connect()
            await client.send(line("stage_write", uri=URI, size_bytes=5) + PING * 500)
            await client.aclose()
        await eventually(lambda: len(daemon.parts.server.connections) == 1)
        assert await other.fetch("kept") == pattern(1, 5000)
        assert (await other.ask("commit_write", uri=URI, local_only=True))["status"] == "WRITECOMMITTED"
    assert "fault" not in caplog.text


async def test_a_fault_in_a_connection_ends_that_one_and_no_other(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(short_dir) as daemon:
        unlucky, other = await daemon.connect(), await daemon.connect()
        await other.ask("ping")
        counters = daemon.parts.handlers.counters
        daemon.parts.handlers.counters = None  # what a bug may do
        await unlucky.send(PING)
        assert await unlucky.receive_line() == b""
        daemon.parts.handlers.counters = counters
        assert (await other.ask("ping"))["status"] == "PONG"
    assert "ended by a fault of the daemon" in caplog.text
    assert "Traceback" in caplog.text


# -- what it may cost ----------------------------------------------------------------------------------


async def test_a_line_of_just_the_allowed_length_is_a_request(short_dir: Path) -> None:
    limits = ConnectionLimits(Limits(max_request_bytes=1000))
    async with running(short_dir, limits=limits) as daemon:
        client = await daemon.connect()
        await client.send(PING[:-1].ljust(1000) + b"\n")
        assert (await client.receive())["status"] == "PONG"
        await client.send(PING[:-1].ljust(1001) + b"\n")
        assert (await client.receive())["error_code"] == "TOO_LARGE"
        assert await client.receive_line() == b""


@pytest.mark.parametrize(
    ("size_bytes", "may_be_written"), [(2 * MIB, True), (12 * MIB, True), (40 * MIB, False)]
)
async def test_an_overlong_line_gets_an_error_and_then_the_end_and_may_be_written_within_reason(
    short_dir: Path, size_bytes: int, may_be_written: bool
) -> None:
    limits = ConnectionLimits(Limits(), drain_s=3600)
    written: list[bool] = []
    async with running(short_dir, limits=limits) as daemon:
        client, other = await daemon.connect(), await daemon.connect()
        await client.send(PING)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write_on, client, size_bytes, written)
            assert (await client.receive())["status"] == "PONG"
            reply = await client.receive()
            assert (reply["status"], reply["error_code"]) == ("ERROR", "TOO_LARGE")
            assert str(MIB) in reply["error_message"]
            assert await client.receive_line() == b""
            assert (await other.ask("ping"))["status"] == "PONG"
    assert written == [may_be_written]


async def write_on(client: Client, size_bytes: int, written: list[bool]) -> None:
    """Write one endless line; notes whether the daemon took all of it."""
    piece = b"x" * 65536
    try:
        for _ in range(size_bytes // len(piece)):
            await client.send(piece)
        written.append(True)
    except trio.BrokenResourceError:
        written.append(False)


async def test_a_client_that_never_reads_is_closed_in_time_and_holds_up_nobody(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = ConnectionLimits(Limits(), send_timeout_s=0.5)
    async with running(short_dir, limits=limits) as daemon:
        deaf, other = await daemon.connect(), await daemon.connect()
        await deaf.store(URI, bytes(CHUNK))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_on, deaf)
            await eventually(lambda: daemon.parts.handlers.counters["locate.HIT"] > 50)
            answered = 0
            with trio.fail_after(DEADLINE_S):
                while len(daemon.parts.server.connections) == 2:
                    assert (await other.ask("locate", uri=URI))["status"] == "HIT"
                    answered += 1
        assert answered > 20
    assert "did not read its replies" in caplog.text


async def ask_on(client: Client) -> None:
    """Ask and never read, until the daemon closes."""
    try:
        while True:
            await client.send(line("locate", uri=URI) * 50)
    except trio.BrokenResourceError:
        return


async def test_a_client_that_reads_slowly_is_served(short_dir: Path) -> None:
    limits = ConnectionLimits(Limits(), send_timeout_s=20)
    async with running(short_dir, limits=limits) as daemon:
        client = await daemon.connect()
        await client.stage(URI, b"x" * 200, tier="ram")
        for _ in range(199):
            await client.ask("append_write", uri=URI, size_bytes=1)
        count = 40  # replies of 25 KB each: more than the socket holds
        await client.send(line("locate", uri=URI) * count)
        for _ in range(count):
            assert len((await client.receive())["chunk_layout"]) == 200


async def test_a_flood_of_garbage_costs_others_no_more_than_their_turn(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        noisy, other = await daemon.connect(), await daemon.connect()
        refused: list[int] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood, noisy)
            nursery.start_soon(count_lines, noisy, refused)
            await eventually(lambda: refused)
            for _ in range(20):
                await other.ask("ping")
            nursery.cancel_scope.cancel()
        assert sum(refused) < 20 * 65536 / 4, "each ping waited for a whole read full of garbage"


async def flood(client: Client) -> None:
    while True:
        await client.send(b"\n" * 65536)


async def count_lines(client: Client, counts: list[int]) -> None:
    while data := await client.stream.receive_some(1 << 20):
        counts.append(data.count(b"\n"))


async def test_one_too_many_is_told_so_and_there_is_room_again_when_one_leaves(short_dir: Path) -> None:
    async with running(short_dir, max_connections=2) as daemon:
        first, second = await daemon.connect(), await daemon.connect()
        assert [(await client.ask("ping"))["status"] for client in (first, second)] == ["PONG"] * 2
        third = await daemon.connect()
        await eventually(lambda: daemon.parts.server.refused == 1)
        await trio.testing.wait_all_tasks_blocked(0.05)
        await third.send(PING)  # as a client does: it writes first, and reads then
        reply = await third.receive()
        assert (reply["status"], reply["error_code"]) == ("ERROR", "UNAVAILABLE")
        assert "--max-connections" in reply["error_message"]
        assert await third.receive_line() == b""
        connections = (await first.status())["connections"]
        assert (connections["open"], connections["accepted"], connections["refused"]) == (2, 2, 1)
        await second.aclose()
        await eventually(lambda: len(daemon.parts.server.connections) == 1)
        fourth = await daemon.connect()
        assert (await fourth.ask("ping"))["status"] == "PONG"


async def test_who_is_turned_away_and_stays_is_not_waited_for_longer_than_a_moment(short_dir: Path) -> None:
    async with running(short_dir, max_connections=1) as daemon:
        first = await daemon.connect()
        await first.ask("ping")
        before = open_files()
        stubborn = [await daemon.connect() for _ in range(3)]
        for client in stubborn:
            assert (await client.receive())["error_code"] == "UNAVAILABLE"
            assert await client.receive_line() == b""
        await eventually(lambda: open_files() == before + 3, "letting go of them, but for our own ends")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# -- when the daemon stops -----------------------------------------------------------------------------


async def test_stopping_answers_all_that_was_asked_before_it_closes(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client, idle = await daemon.connect(), await daemon.connect()
        await idle.ask("ping")
        await client.stage(URI, b"bytes")
        with no_checking(daemon):
            await client.send(line("commit_write", uri=URI, sha256="0" * 64) + PING)
            await client.send(line("commit_write", uri=URI))
            await eventually(lambda: daemon.parts.store.hashing.statistics().tasks_waiting == 1)
            daemon.stop.set()
            assert await idle.receive_line() == b""
        assert (await client.receive())["error_code"] == "CHECKSUM_MISMATCH"
        assert (await client.receive())["status"] == "PONG"
        assert (await client.receive())["status"] == "WRITECOMMITTED"
        assert await client.receive_line() == b""
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert (await client.ask("get_write_status", uri=URI))["sync_status"] == "COMMITTED"


async def test_stopping_waits_no_longer_than_the_grace_for_a_client_that_goes_on_asking(
    short_dir: Path,
) -> None:
    async with running(short_dir, shutdown_grace_s=0.3) as daemon:
        client = await daemon.connect()
        await client.store(URI, bytes(5000))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_on, client)
            await eventually(lambda: daemon.parts.handlers.counters["locate.HIT"] > 100)
            started = trio.current_time()
            daemon.stop.set()
            await eventually(lambda: daemon.parts.server.connections == {})
            assert trio.current_time() - started < 5


async def test_after_a_stop_nobody_gets_in(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.ask("ping")
        daemon.stop.set()
        assert await client.receive_line() == b""
        await eventually(lambda: refused(daemon))


async def refused(daemon: Daemon) -> bool:
    try:
        stream = await trio.open_unix_socket(daemon.config.socket)
    except OSError:
        return True
    await stream.aclose()
    return False


async def test_numbers_of_any_size_in_a_line_are_no_danger(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        digits = "9" * 900_000
        await client.send(b'{"action": "stage_write", "uri": "a", "size_bytes": ' + digits.encode() + b"}\n")
        reply = json.loads(await client.receive_line())
        assert reply["error_code"] == "BAD_REQUEST"
        assert len(reply["error_message"]) < 1000
