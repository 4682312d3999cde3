"""Connections of wire 2: the hello, replies out of order, backpressure, hostile frames, the end."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
from daemon_harness import MIB, Daemon, eventually, line, pattern, running
from frames import HELLO, FrameClient, bits, framed, layouts_of

from hypercache_compat.raw_wire import write_layout
from hypercache_daemon.backend import Backend
from hypercache_daemon.connection import ConnectionLimits
from hypercache_protocol.session import Limits
from hypercache_protocol.versions import LATEST, RELEASED

URI = "hypercache://a/b"


class HeldBackend(Backend):
    """A backend whose uploads begin when they are asked for and end when a test says so."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        super().__init__(f"file://{folder}")
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()

    def upload(self, *arguments: Any, **options: Any) -> None:
        self.begun.release()
        assert self.go_on.wait(30), "the test never let the upload go on"
        super().upload(*arguments, **options)


@pytest.fixture
def held(short_dir: Path) -> Iterator[HeldBackend]:
    backend = HeldBackend(short_dir / "backend")
    yield backend
    backend.go_on.set()


async def begun(backend: HeldBackend) -> None:
    await eventually(lambda: backend.begun.acquire(blocking=False), "an upload")


async def staged_ids(client: FrameClient, uris: list[str]) -> list[str]:
    """Stages and fills each uri with its own name."""
    staged = await client.ask("stage_many", suffixes=uris, sizes=[len(uri) for uri in uris])
    for layout, uri in zip(layouts_of(staged["layouts"]), uris, strict=True):
        write_layout(layout["chunk_layout"], uri.encode())
    ids: list[str] = staged["stage_ids"]
    return ids


async def slow_commit(client: FrameClient, uri: str) -> int:
    """Asks for a commit that waits for the backend; returns its id."""
    (stage_id,) = await staged_ids(client, [uri])
    return await client.send("commit_write", uri=uri, stage_id=stage_id, write_through=True)


# -- the hello -----------------------------------------------------------------------------------------


async def test_a_hello_is_told_what_the_daemon_speaks_takes_and_does_not_know(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        reply = await client.ask(
            "hello",
            versions=["2.0", "9.9"],
            features=["batches", "telepathy"],
            name="n",
            version="1",
            extra=[1],
        )
        pong = await (await daemon.connect()).ask("ping")
        assert (reply["status"], reply["version"], reply["versions"]) == (
            "HELLO",
            "2.0",
            list(map(str, RELEASED)),
        )
        assert reply["unknown"] == ["9.9", "telepathy"]
        for name in ("instance_id", "daemon", "features"):
            assert reply[name] == pong[name]
        assert [Path(path).parent for path in reply["devices"]] == [short_dir / "pool"] * 2
        limits = reply["limits"]
        assert limits["max_request_bytes"] == MIB
        assert (limits["max_batch"], limits["max_in_flight"]) == (4096, 64)


async def test_a_hello_for_a_version_that_does_not_exist_yet_gets_the_best_that_does(
    short_dir: Path,
) -> None:
    async with running(short_dir) as daemon:
        for versions, chosen in (
            (["3.0"], str(LATEST)),
            (["2.99"], str(LATEST)),
            (["2.0", "2.99"], "2.0"),
            (["9.0", "nonsense", "2.0"], "2.0"),
        ):
            reply = await (await daemon.connect()).ask("hello", versions=versions)
            assert reply["version"] == chosen


async def test_a_hello_for_wire_1_leaves_the_connection_on_lines(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        for versions, chosen in ((["1.0", "1.1"], "1.1"), (["1.0"], "1.0"), ([], "1.0"), (["x"], "1.0")):
            client = await daemon.connect()
            assert (await client.ask("hello", versions=versions))["version"] == chosen
            assert (await client.ask("ping"))["status"] == "PONG"


async def test_frames_that_follow_the_hello_in_one_piece_are_frames(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        body = msgpack.packb([1, "ping", {}])
        await client.send(line("ping") + line("hello", **HELLO) + struct.pack(">I", len(body)) + body)
        assert (await client.receive())["status"] == "PONG"
        hello = await client.receive()
        assert hello["status"] == "HELLO"
        frames = FrameClient(client, hello)
        frames._buffer, client._buffer = client._buffer, b""
        assert (await frames.receive() or ())[:2] == (1, "PONG")


@pytest.mark.parametrize("wire", ["1.0", "1.1"])
async def test_a_daemon_held_to_wire_1_answers_a_hello_with_an_unknown_action_and_lives_on(
    short_dir: Path, wire: str
) -> None:
    async with running(short_dir, wire=wire) as daemon:
        client = await daemon.connect()
        reply = await client.ask("hello", **HELLO)
        assert reply["status"] == "ERROR"
        assert "unknown action 'hello'" in reply["error_message"]
        assert reply.get("error_code") == (None if wire == "1.0" else "UNKNOWN_ACTION")
        for action in ("locate_many", "stage_many", "commit_many", "evict_many"):
            reply = await client.ask(action, suffixes=["a"])
            assert "unknown action" in reply["error_message"]
        await client.store(URI, b"bytes", commit={})
        assert await client.fetch(URI) == b"bytes"


@pytest.mark.parametrize("wire", ["2.0", "2.1"])
async def test_a_daemon_held_to_an_earlier_wire_2_neither_names_nor_grants_a_later_one(
    short_dir: Path, wire: str
) -> None:
    async with running(short_dir, wire=wire) as daemon:
        for versions in (["2.0", "2.1", "2.2"], ["2.2"], ["3.0"]):
            hello = await (await daemon.connect()).ask("hello", versions=versions)
            assert (hello["version"], hello["versions"][-1]) == (wire, wire)
            assert "presence_table" not in hello["features"]
            assert hello["unknown"] == [version for version in versions if version > wire]


async def test_a_bad_hello_is_refused_and_the_connection_stays_on_lines(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        for fields in ({}, {"versions": "2.0"}, {"versions": [2.0]}, {"versions": ["2.0"] * 65}):
            assert (await client.refusal("hello", **fields))[0] == "BAD_REQUEST"
        assert (await client.ask("ping"))["status"] == "PONG"


# -- every action --------------------------------------------------------------------------------------


async def test_every_action_of_wire_1_has_the_same_fields_and_replies_in_frames(short_dir: Path) -> None:
    telemetry = {"event_type": "load", "uri": URI, "object_size_bytes": 1, "duration_us": 1}
    asked: list[tuple[str, dict[str, object]]] = [
        ("ping", {}),
        ("get_devices", {}),
        ("locate", {"uri": URI}),
        ("locate", {"uri": "none"}),
        ("ingest", {"uri": "none"}),
        ("pin", {"uri": URI, "pinned": True}),
        ("locate", {"uri": URI, "pinned": True}),
        ("get_write_status", {"uri": URI}),
        ("get_write_status", {"uri": "none"}),
        ("record_telemetry", {**telemetry, "bandwidth_mbps": 1.5}),
        ("record_telemetry", {**telemetry, "bandwidth_mbps": "fast"}),
        ("append_write", {"uri": "none", "size_bytes": 1}),
        ("commit_write", {"uri": "none"}),
        ("evict", {"uri": "none"}),
        ("no such action", {}),
        ("locate", {}),
    ]
    async with running(short_dir) as daemon:
        old, client = await daemon.connect(), await framed(daemon)
        await old.store(URI, pattern(1, 5 * MIB), commit={"chunk_checksums": [1, 2], "local_only": True})
        for action, fields in asked:
            on_lines, in_frame = await old.ask(action, **fields), await client.ask(action, **fields)
            on_lines.pop("error_message", None)
            assert in_frame.pop("error_message", "") or in_frame["status"] != "ERROR"
            assert in_frame == on_lines, action
        staged = await client.ask("stage_write", uri="s", size_bytes=3)
        write_layout(staged["chunk_layout"], b"abc")
        added = await client.ask("append_write", uri="s", size_bytes=2, stage_id=staged["stage_id"])
        write_layout(added["chunk_layout"], b"de")
        assert (await client.ask("commit_write", uri="s", stage_id=added["stage_id"]))["object_size"] == 5
        assert await old.fetch("s") == b"abcde"
        assert (await client.ask("evict", uri="s"))["status"] == "EVICTED"
        assert (await client.ask("purge"))["status"] == "PURGED"
        assert (await client.ask("get_status"))["objects"] == 0


async def test_a_second_hello_is_an_unknown_action(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await framed(daemon)
        assert (await client.ask("hello", **HELLO))["error_code"] == "UNKNOWN_ACTION"
        assert (await client.ask("ping"))["status"] == "PONG"


async def test_unknown_fields_change_nothing_in_frames(short_dir: Path) -> None:
    grease = {"grease": {"deep": [1, None, b"bytes"]}, "": 0}
    async with running(short_dir) as daemon:
        client = await framed(daemon, features=["grease"], grease=1)
        staged = await client.ask("stage_many", suffixes=["a"], sizes=[0], **grease)
        committed = await client.ask("commit_many", suffixes=["a"], stage_ids=staged["stage_ids"], **grease)
        assert bits(committed["done"], 1) == [True]
        assert bits((await client.ask("locate_many", suffixes=["a"], **grease))["present"], 1) == [True]
        status = await client.ask("get_status")
        assert status["connections"]["unknown_fields"] == 1 + 3 * len(grease)


# -- side by side --------------------------------------------------------------------------------------


async def test_a_slow_write_through_delays_nothing_else_on_its_connection(
    short_dir: Path, held: HeldBackend
) -> None:
    async with running(short_dir, own_backend=held) as daemon:
        client = await framed(daemon)
        slow = await slow_commit(client, URI)
        await begun(held)
        located = await client.ask("locate_many", suffixes=[URI, "none"])
        assert bits(located["present"], 2) == [True, False], "it is committed here already"
        assert (await client.ask("stage_write", uri="other", size_bytes=1))["status"] == "WRITESTAGED"
        assert (await client.ask("commit_write", uri="other", local_only=True))["status"] == "WRITECOMMITTED"
        assert (await client.ask("evict", uri="other"))["status"] == "EVICTED"
        assert slow not in client._early, "nobody answered it meanwhile"
        held.go_on.set()
        assert (await client.reply(slow))["sync_status"] == "SYNCED_BACKEND"


async def test_on_lines_the_replies_keep_their_order_behind_a_slow_one(
    short_dir: Path, held: HeldBackend
) -> None:
    async with running(short_dir, own_backend=held) as daemon:
        client = await daemon.connect()
        await client.stage(URI, b"bytes")
        await client.send(line("commit_write", uri=URI, write_through=True) + line("ping"))
        await begun(held)
        held.go_on.set()
        assert [(await client.receive())["status"] for _ in range(2)] == ["WRITECOMMITTED", "PONG"]


async def test_many_requests_in_flight_are_each_answered_once_under_their_own_id(short_dir: Path) -> None:
    expected: dict[int, str] = {}

    async def ask_all(client: FrameClient) -> None:
        for number in range(300):
            expected[await client.send("stage_write", uri=f"u{number}", size_bytes=0)] = "WRITESTAGED"
            expected[await client.send("locate", uri=f"none{number}")] = "MISS"
            expected[await client.send("nonsense")] = "ERROR"

    async with running(short_dir) as daemon:
        client = await framed(daemon)
        answered: dict[int, str] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_all, client)
            for _ in range(900):
                frame = await client.receive()
                assert frame is not None
                assert frame[0] not in answered
                answered[frame[0]] = frame[1]
        assert answered == expected


async def test_at_max_in_flight_nothing_more_is_read_until_one_is_answered(
    short_dir: Path, held: HeldBackend
) -> None:
    limits = ConnectionLimits(Limits(), max_in_flight=3)
    async with running(short_dir, own_backend=held, limits=limits) as daemon:
        client, other = await framed(daemon), await framed(daemon)
        assert client.hello["limits"]["max_in_flight"] == 3
        uris = [f"hypercache://a/{number}" for number in range(4)]
        slow = [
            await client.send("commit_write", uri=uri, stage_id=stage_id, write_through=True)
            for uri, stage_id in zip(uris, await staged_ids(client, uris), strict=True)
        ]
        ping = await client.send("ping")
        await begun(held)
        await eventually(lambda: committed(daemon) == 3)
        assert (await other.ask("ping"))["status"] == "PONG", "another connection is not held up"
        with trio.move_on_after(0.2) as waited:
            await client.reply(ping)
        assert waited.cancelled_caught
        assert committed(daemon) == 3, "the fourth has not begun"
        held.go_on.set()
        for request_id in slow:
            assert (await client.reply(request_id))["status"] == "WRITECOMMITTED"
        assert (await client.reply(ping))["status"] == "PONG"


def committed(daemon: Daemon) -> int:
    return len(list(daemon.parts.store.cache.objects()))


async def test_one_commit_of_many_may_wait_for_the_backend_beside_others_that_do_not(
    short_dir: Path, held: HeldBackend
) -> None:
    async with running(short_dir, own_backend=held) as daemon:
        client = await framed(daemon)
        ids = await staged_ids(client, ["hypercache://a/1", "hypercache://a/2"])
        through = await client.send(
            "commit_many", prefix="hypercache://a/", suffixes=["1", "2"], stage_ids=ids, write_through=True
        )
        await begun(held)
        await client.store({"local": b"bytes"})
        held.go_on.set()
        reply = await client.reply(through)
        assert bits(reply["done"], 2) == [True, True]
        assert reply["sync_statuses"] == b"\x03\x03", "SYNCED_BACKEND"
        assert (short_dir / "backend" / "a" / "1").read_bytes() == b"hypercache://a/1"


async def test_a_backend_that_fails_one_of_a_batch_refuses_that_one_which_is_committed_here(
    short_dir: Path,
) -> None:
    backend = HeldBackend(short_dir / "backend")
    backend.go_on.set()
    (short_dir / "backend" / "a").mkdir()
    (short_dir / "backend" / "a" / "bad").mkdir()  # a folder where the object should go
    async with running(short_dir, own_backend=backend) as daemon:
        client = await framed(daemon)
        uris = ["hypercache://a/good", "hypercache://a/bad"]
        ids = await staged_ids(client, uris)
        reply = await client.ask("commit_many", suffixes=uris, stage_ids=ids, write_through=True)
        assert bits(reply["done"], 2) == [True, False]
        assert [(error["index"], error["error_code"]) for error in reply["errors"]] == [(1, "BACKEND_FAILED")]
        assert await client.fetch(uris[1]) == uris[1].encode()


# -- hostile frames ------------------------------------------------------------------------------------

NESTED = b"\x91" * 2000 + b"\xc0"
HOSTILE: dict[str, bytes] = {
    "4 GiB claimed": b"\xff\xff\xff\xff",
    "one byte too many claimed": struct.pack(">I", MIB + 1),
    "an empty body": struct.pack(">I", 0),
    "no msgpack": struct.pack(">I", 1) + b"\xc1",
    "trailing bytes": struct.pack(">I", 9) + b"\x93\x01\xa4ping\x80\x00",
    "a cut value": struct.pack(">I", 7) + b"\x93\x01\xa4ping",
    "no list": struct.pack(">I", 1) + b"\x80",
    "a short list": struct.pack(">I", 7) + b"\x92\x01\xa4ping",
    "a long list": struct.pack(">I", 9) + b"\x94\x01\xa4ping\x80\xc0",
    "an id that is text": struct.pack(">I", 9) + b"\x93\xa1x\xa4ping\x80",
    "an id that is a boolean": struct.pack(">I", 8) + b"\x93\xc3\xa4ping\x80",
    "an id of 0": struct.pack(">I", 8) + b"\x93\x00\xa4ping\x80",
    "an id below 0": struct.pack(">I", 8) + b"\x93\xff\xa4ping\x80",
    "an id above 2**53": struct.pack(">I", 16)
    + b"\x93\xcf"
    + (2**53 + 1).to_bytes(8, "big")
    + b"\xa4ping\x80",
    "an action that is bytes": struct.pack(">I", 9) + b"\x93\x01\xc4\x04ping\x80",
    "fields with integer keys": struct.pack(">I", 10) + b"\x93\x01\xa4ping\x81\x01\x01",
    "fields with byte keys": struct.pack(">I", 12) + b"\x93\x01\xa4ping\x81\xc4\x01a\x01",
    "an ext type": struct.pack(">I", 13) + b"\x93\x01\xa4ping\x81\xa1a\xd4\x05\x00",
    "a timestamp": struct.pack(">I", 16) + b"\x93\x01\xa4ping\x81\xa1a\xd6\xff\x00\x00\x00\x00",
    "text that is no UTF-8": struct.pack(">I", 11) + b"\x93\x01\xa4ping\x81\xa1\xff\x01",
    "a nesting bomb": struct.pack(">I", 10 + len(NESTED)) + b"\x93\x01\xa4ping\x81\xa1a" + NESTED,
    "a list that claims millions": struct.pack(">I", 14) + b"\x93\x01\xa4ping\x81\xa1a\xdd\x7f\xff\xff\xff",
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_hostile_frame_ends_its_connection_alone_with_the_reason_under_id_0(
    short_dir: Path, what: str
) -> None:
    async with running(short_dir) as daemon:
        client, bystander = await framed(daemon), await framed(daemon)
        ping = await client.send("ping")
        await client.send_bytes(HOSTILE[what])
        assert (await client.reply(ping))["status"] == "PONG"
        await client._client.end()
        frame = await client.receive()
        assert frame is not None
        request_id, status, fields = frame
        assert (request_id, status) == (0, "ERROR")
        assert fields["error_message"]
        assert fields["error_code"] == ("TOO_LARGE" if what.endswith("claimed") else "BAD_REQUEST")
        assert await client.receive() is None
        assert (await bystander.ask("ping"))["status"] == "PONG"
        await eventually(lambda: len(daemon.parts.server.connections) == 1)


async def test_an_id_that_is_in_use_ends_the_connection_and_what_was_under_way_is_done(
    short_dir: Path, held: HeldBackend
) -> None:
    async with running(short_dir, own_backend=held) as daemon:
        client, other = await framed(daemon), await daemon.connect()
        slow = await slow_commit(client, URI)
        await begun(held)
        await client.send_frame([slow, "ping", {}])
        frame = await client.receive()
        assert frame is not None
        assert (frame[0], frame[1]) == (0, "ERROR")
        assert f"the request id {slow} is in use" in frame[2]["error_message"]
        await client.aclose()
        held.go_on.set()
        await eventually(lambda: len(daemon.parts.server.connections) == 1)
        assert await other.fetch(URI) == URI.encode()


async def test_a_frame_that_never_ends_costs_nobody_else_anything(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client, bystander = await framed(daemon), await framed(daemon)
        await client.send_bytes(struct.pack(">I", MIB) + b"\x93\x01")
        assert (await bystander.ask("ping"))["status"] == "PONG"
        await client.aclose()
        await eventually(lambda: len(daemon.parts.server.connections) == 1)


async def test_a_frame_of_the_announced_size_is_read(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await framed(daemon)
        head = b"\x93\x01\xa4ping\x81\xa1x\xc6"
        size = MIB - len(head) - 4
        await client.send_body(head + struct.pack(">I", size) + bytes(size))
        assert (await client.receive() or ())[:2] == (1, "PONG")


# -- the end -------------------------------------------------------------------------------------------


async def test_stopping_answers_what_is_in_flight_and_closes(short_dir: Path, held: HeldBackend) -> None:
    async with running(short_dir, own_backend=held) as daemon:
        client, idle = await framed(daemon), await framed(daemon)
        slow = [await slow_commit(client, f"hypercache://a/{number}") for number in range(2)]
        await begun(held)
        await begun(held)
        daemon.stop.set()
        assert await idle.receive() is None, "who waits for nothing is let go at once"
        held.go_on.set()
        for request_id in slow:
            assert (await client.reply(request_id))["sync_status"] == "SYNCED_BACKEND"
        assert await client.receive() is None


async def test_a_client_that_vanishes_in_the_middle_of_a_batch_leaves_a_sound_daemon(
    short_dir: Path, held: HeldBackend
) -> None:
    async with running(short_dir, own_backend=held) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        ids = await staged_ids(client, ["hypercache://a/1", "hypercache://a/2"])
        await client.send(
            "commit_many", prefix="hypercache://a/", suffixes=["1", "2"], stage_ids=ids, write_through=True
        )
        await begun(held)
        await client.aclose()
        held.go_on.set()
        await eventually(lambda: len(daemon.parts.server.connections) == 1)
        for number in (1, 2):
            assert await old.fetch(f"hypercache://a/{number}") == f"hypercache://a/{number}".encode()
            reply = await old.ask("get_write_status", uri=f"hypercache://a/{number}")
            assert reply["sync_status"] == "SYNCED_BACKEND"


async def test_a_client_that_does_not_read_its_frames_is_closed_and_gets_no_frame_in_pieces(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uris = [f"hypercache://some/rather/long/name/{number}" for number in range(2000)]

    async def ask_on_and_on(client: FrameClient) -> None:
        with suppress(trio.BrokenResourceError):  # so it was closed
            while True:
                await client.send("stage_write", uri="s", size_bytes=1)
                await client.send("locate_many", suffixes=uris, layouts=True)

    limits = ConnectionLimits(Limits(), send_timeout_s=0.3)
    async with running(short_dir, limits=limits) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        await client.store(dict.fromkeys(uris, b""))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_on_and_on, client)
            await eventually(lambda: "did not read its replies" in caplog.text)
            await only_whole_frames_until_the_end(client)
        await eventually(lambda: len(daemon.parts.server.connections) == 1)
        assert (await old.ask("ping"))["status"] == "PONG"


async def only_whole_frames_until_the_end(client: FrameClient) -> None:
    data = b""
    stream = client._client.stream
    with trio.fail_after(30):
        while piece := await received(stream):
            data += piece
    while len(data) >= 4 and len(data) >= 4 + (size := int.from_bytes(data[:4], "big")):
        request_id, status, _ = msgpack.unpackb(data[4 : 4 + size])
        assert request_id > 0
        assert status in ("LOCATED_MANY", "WRITESTAGED")
        data = data[4 + size :]
    assert b"WRITESTAGED" not in data, "another reply came in the middle of the one that was cut off"


async def received(stream: trio.SocketStream) -> bytes:
    try:
        return bytes(await stream.receive_some(1 << 20))
    except trio.BrokenResourceError:
        return b""


async def test_a_reply_that_no_frame_can_carry_becomes_an_error_and_the_connection_lives(
    short_dir: Path,
) -> None:
    limits = ConnectionLimits(Limits(max_reply_bytes=3000))
    async with running(short_dir, limits=limits) as daemon:
        client = await framed(daemon)
        assert client.hello["limits"]["max_reply_bytes"] == 3000
        uris = [f"u{number}" for number in range(100)]
        for start in range(0, 100, 20):
            await client.store(dict.fromkeys(uris[start : start + 20], b"x"))
        reply = await client.ask("locate_many", suffixes=uris, layouts=True)
        assert (reply["status"], reply["error_code"]) == ("ERROR", "INTERNAL")
        assert "3000" in reply["error_message"]
        assert bits((await client.ask("locate_many", suffixes=uris))["present"], 100) == [True] * 100


async def test_lines_and_frames_are_served_side_by_side(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        old, client = await daemon.connect(), await framed(daemon)
        await old.store("a", b"by lines")
        await client.store({"b": b"by frames"})
        assert await client.fetch("a") == b"by lines"
        assert await old.fetch("b") == b"by frames"
