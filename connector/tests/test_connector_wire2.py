"""Wire 2 as the connector speaks it: how it is agreed on, what a batch costs, what of a reply is believed."""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hypercache_connector import Client, DaemonUnavailable
from hypercache_connector import client as client_module
from hypercache_connector.batching import FRAME_BYTES, batched, pieces, singles, waves
from hypercache_connector.connection import Connection
from hypercache_connector.keys import UriMapping
from hypercache_connector.layouts import Found, Staged
from hypercache_connector.outcomes import Outcome
from hypercache_protocol import (
    WIRE_1_0,
    WIRE_1_1,
    WIRE_2_0,
    WIRE_2_1,
    WIRE_2_2,
    ErrorCode,
    LocalProtocolError,
    SyncStatus,
    Tier,
    WireVersion,
)
from hypercache_protocol.batches import (
    BatchRequest,
    CommitMany,
    CommittedMany,
    EvictedMany,
    EvictMany,
    Hello,
    HelloLimits,
    ItemError,
    LocatedMany,
    LocateMany,
    StagedMany,
    StageMany,
)
from hypercache_protocol.messages import (
    ChunkLocation,
    CommittedReply,
    CommitWrite,
    ErrorReply,
    Evict,
    EvictedReply,
    GetWriteStatus,
    HitReply,
    Locate,
    MissReply,
    Ping,
    PongReply,
    Purge,
    Reply,
    Request,
    StageWrite,
)
from hypercache_protocol.versions import LATEST

DEADLINE_S = 30.0
MAPPING = UriMapping("test")
MakeClient = Callable[..., Client]


@pytest.fixture
def make() -> Iterator[MakeClient]:
    """Makes clients that are closed at the end."""
    made: list[Client] = []

    def client(socket_path: str, timeout_s: float = 10.0, **options) -> Client:
        made.append(Client(socket_path, timeout_s, **options))
        return made[-1]

    yield client
    for each in made:
        each.close()


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def locates(count: int) -> list[Locate]:
    return [Locate(uri=f"u{number}", auto_ingest=False) for number in range(count)]


def hit(size_bytes: int) -> HitReply:
    """A reply that can be told from others by its size."""
    chunks = (ChunkLocation(device="/d", offset=0, length=size_bytes, checksum=1),) if size_bytes else ()
    return HitReply(
        object_size=size_bytes, chunk_layout=chunks, sync_status=SyncStatus.LOCAL_ONLY, generation=1
    )


def failure(client: Client, requests: Sequence[Request]) -> Outcome:
    with pytest.raises(DaemonUnavailable) as caught:
        client.exchange(requests)
    return caught.value.outcome


# -- the hello -----------------------------------------------------------------------------------------------


def in_version(hello: bytes, version: str) -> bytes:
    """The answer to a hello, as of another version."""
    assert LATEST_ON_WIRE in hello
    return hello.replace(LATEST_ON_WIRE, b'"version":"%s"' % version.encode())


LATEST_ON_WIRE = b'"version":"%s"' % str(LATEST).encode()

ANSWERS: dict[str, Callable[[bytes], bytes | None]] = {
    "error": lambda _: b'{"status":"ERROR","error_message":"Unknown action"}\n',
    "error in other words": lambda _: b'{"status":"ERROR","error_message":"quoi?","error_code":"NOVEL"}\n',
    "error without words": lambda _: b'{"status":"FAILED"}\n',
    "strange success": lambda _: b'{"status":"OK","hello":"world"}\n',
    "a pong": lambda _: b'{"status":"PONG"}\n',
    "half a hello": lambda _: b'{"status":"HELLO","version":"2.0"}\n',
    "a hello of wire 3": lambda data: in_version(data, "3.0"),
    "a hello of wire 1": lambda data: in_version(data, "1.1"),
    "a hello of no wire": lambda data: in_version(data, "two"),
    "no object": lambda _: b"[]\n",
    "no json": lambda _: b"\x00\xff\xfe!\n",
    "no line": lambda _: b"\x93\x01\x02",
    "twice": lambda data: data + data,
    "half a line": lambda data: data[:20],
    "silence": lambda _: b"",
    "a closed connection": lambda _: None,
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_whatever_an_old_daemon_makes_of_a_hello_wire_1_works_within_a_second(
    scripted2, make: MakeClient, monkeypatch: pytest.MonkeyPatch, answer: Callable[[bytes], bytes | None]
) -> None:
    assert client_module.HELLO_TIMEOUT_S <= 0.5
    monkeypatch.setattr(client_module, "HELLO_TIMEOUT_S", 0.1)  # a busy machine may take the rest
    scripted2.garble = lambda request, data: answer(data) if isinstance(request, Hello) else data
    scripted2.objects = {"u0": hit(5)}
    client = make(scripted2.socket_path)
    began = time.monotonic()
    assert client.exchange(locates(2)) == [hit(5), MissReply()]
    assert time.monotonic() - began < 1.0
    assert client.wire == WIRE_1_1
    assert not client.breaker_open
    assert scripted2.counted()["locate"] == 2
    assert scripted2.counted()["locate_many"] == 0


@pytest.mark.parametrize("answer", ["silence", "half a line"])
def test_a_client_in_a_hurry_has_time_left_for_wire_1(
    scripted2, make: MakeClient, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    scripted2.garble = lambda request, data: ANSWERS[answer](data) if isinstance(request, Hello) else data
    monkeypatch.setattr(client_module, "HELLO_TIMEOUT_S", 60.0)  # so that 1.6 s are a hurry
    client = make(scripted2.socket_path, timeout_s=1.6)
    assert client.exchange(locates(2)) == [MissReply()] * 2
    assert client.wire == WIRE_1_1


def test_an_old_daemon_that_refuses_a_hello_and_closes_is_connected_to_again(
    scripted, make: MakeClient
) -> None:
    def refused_and_closed(request: Request, data: bytes) -> bytes | None:
        if isinstance(request, Ping) and scripted.connections_accepted == 1:
            return None
        return data

    scripted.garble = refused_and_closed
    client = make(scripted.socket_path)
    assert client.exchange(locates(2)) == [MissReply()] * 2
    assert (client.wire, scripted.connections_accepted) == (WIRE_1_1, 2)


def test_each_new_connection_asks_again_and_takes_up_an_upgrade_and_a_downgrade(
    scripted, make: MakeClient
) -> None:
    client = make(scripted.socket_path)
    for wire in (WIRE_1_1, WIRE_2_0, WIRE_1_1, WIRE_2_1, WIRE_2_2, WIRE_2_0):
        scripted.stop()
        scripted.wire = wire
        scripted.start()
        assert client.exchange(locates(2)) == [MissReply()] * 2
        assert client.wire == wire
    assert scripted.counted()["locate_many"] == 4
    assert scripted.counted()["locate"] == 4


def test_a_kept_connection_says_hello_once_and_pings_never(scripted2, make: MakeClient) -> None:
    client = make(scripted2.socket_path)
    for _ in range(5):
        client.exchange(locates(2))
    assert scripted2.counted() == {"hello": 1, "locate_many": 5}
    assert (client.instance_id, client.wire) == ("instance-1", LATEST)
    assert {"batches", "chunk_checksums"} <= client.features


@pytest.mark.parametrize("version", [WIRE_1_1, LATEST], ids=str)
def test_a_daemon_of_wire_2_that_was_too_busy_for_a_hello_is_asked_again(
    scripted2, make: MakeClient, version: WireVersion
) -> None:
    novel = b'{"novel":1,"status"'
    scripted2.garble = lambda request, data: (
        b"" if isinstance(request, Hello) else data.replace(b'{"status"', novel)
    )
    scripted2.change = lambda request, reply: (
        reply.model_copy(update={"wire": (1, 2)}) if isinstance(request, Ping) else reply
    )
    client = make(scripted2.socket_path, version=version)
    client.exchange(locates(1))
    assert client.wire == WIRE_1_1
    assert client.ignored()["unknown_fields"] == 2, "also of the connection that is not kept"
    scripted2.garble = lambda _, data: data
    client.exchange(locates(1))
    assert client.wire == version
    accepted = scripted2.connections_accepted
    client.exchange(locates(1))
    assert scripted2.connections_accepted == accepted


def test_an_instance_that_a_hello_names_is_announced_before_its_first_reply(
    scripted2, make: MakeClient
) -> None:
    announced: list[None] = []
    client = make(scripted2.socket_path, on_new_instance=lambda: announced.append(None))
    client.exchange(locates(1))
    scripted2.stop()
    scripted2.start()
    client.exchange(locates(1))
    assert len(announced) == 2
    assert client.instance_id == "instance-2"


@pytest.mark.parametrize("wire", [WIRE_1_0, WIRE_1_1])
def test_a_client_pinned_to_wire_1_never_says_hello(scripted2, make: MakeClient, wire: WireVersion) -> None:
    client = make(scripted2.socket_path, version=wire)
    client.exchange(locates(3))
    assert scripted2.counted() == {"ping": 1, "locate": 3}


@pytest.mark.parametrize("wire", ["1.1", "2.0", "2.1"])
def test_a_connector_pinned_to_a_wire_works_in_it(scripted2, connect, wire: str) -> None:
    driver = connect(scripted2.socket_path, wire=wire)
    data, back = bytearray(os.urandom(5000)), bytearray(5000)
    assert driver.store(["k"], [data]).ok
    assert driver.load(["k"], [back]) == [True]
    assert back == data
    asked = scripted2.counted()
    assert (asked["hello"] > 0, asked["ping"] > 0) == (wire != "1.1", wire == "1.1")
    for hello in (each for each in scripted2.requests if isinstance(each, Hello)):
        assert hello.versions[-1] == wire, "nothing later than the pin is asked for"


def test_a_connector_pinned_to_1_0_misses_and_fails_since_nothing_can_be_verified(scripted2, connect) -> None:
    assert connect(scripted2.socket_path).store(["k"], [bytearray(100)]).ok
    driver = connect(scripted2.socket_path, wire="1.0")
    asked_before = scripted2.counted()
    assert driver.exists(["k"]) == [False]
    assert driver.load(["k"], [bytearray(100)]) == [False]
    assert not driver.store(["l"], [bytearray(100)]).ok
    assert scripted2.counted() - asked_before == {"ping": 1}, "nothing was asked that means less in 1.0"
    for operation in ("lookups", "loads", "stores"):
        assert driver.count(operation, "daemon_too_old") == 1


# -- what a batch costs --------------------------------------------------------------------------------------


def frames(scripted2) -> list[int]:
    """How many uris each batch had that was asked for so far."""
    return [len(request.suffixes) for request in scripted2.requests if hasattr(request, "suffixes")]


def test_a_batch_is_split_only_at_the_most_uris_that_the_daemon_takes(scripted2, make: MakeClient) -> None:
    scripted2.limits = HelloLimits(
        max_request_bytes=1 << 20, max_reply_bytes=1 << 20, max_in_flight=64, max_batch=10
    )
    scripted2.objects = {f"u{number}": hit(number) for number in range(0, 25, 2)}
    client = make(scripted2.socket_path)
    replies = client.exchange(locates(25))
    assert replies == [MissReply() if number % 2 else hit(number) for number in range(25)]
    assert frames(scripted2) == [10, 10, 5]
    outcomes = client.lookup([f"u{number}" for number in range(25)])
    assert outcomes == [Outcome.ABSENT if number % 2 else Outcome.OK for number in range(25)]
    assert frames(scripted2)[3:] == [10, 10, 5]


@pytest.mark.parametrize("letter", ["x", "é", "𝄞"])
def test_no_request_is_longer_than_the_daemon_takes_and_none_much_shorter(
    scripted2, make: MakeClient, relay_to, letter: str
) -> None:
    most_bytes = 20_000
    scripted2.limits = HelloLimits(
        max_request_bytes=most_bytes, max_reply_bytes=1 << 20, max_in_flight=64, max_batch=4096
    )
    relay = relay_to(scripted2.socket_path)
    client = make(relay.path)
    uris = [f"{number}{letter * 100}" for number in range(700)]  # with no prefix in common
    sums = tuple(range(1 << 31, (1 << 31) + 20))
    kinds: list[list[Request]] = [
        [Locate(uri=uri, auto_ingest=False) for uri in uris],
        [Evict(uri=uri) for uri in uris],
        [StageWrite(uri=uri, size_bytes=100) for uri in uris],
        [CommitWrite(uri=uri, stage_id="s" * 64, chunk_checksums=sums) for uri in uris],
    ]
    for requests in kinds:
        relay.frame_bytes.clear()
        assert len(client.exchange(requests)) == 700
        assert max(relay.frame_bytes) <= most_bytes
        assert min(relay.frame_bytes[:-1]) > most_bytes // 2
    relay.frame_bytes.clear()
    assert client.lookup(uris) == [Outcome.ABSENT] * 700
    assert max(relay.frame_bytes) <= most_bytes
    assert min(relay.frame_bytes[:-1]) > most_bytes // 3
    client.close()


@pytest.mark.parametrize("wire", [WIRE_1_1, WIRE_2_0, WIRE_2_1], ids=str)
@pytest.mark.parametrize("most", [1, 2, 10])
def test_many_are_asked_for_alike_on_every_wire(
    scripted, make: MakeClient, wire: WireVersion, most: int
) -> None:
    scripted.stop()
    scripted.wire = wire
    scripted.limits = HelloLimits(
        max_request_bytes=1 << 20, max_reply_bytes=1 << 20, max_in_flight=64, max_batch=most
    )
    scripted.start()
    client = make(scripted.socket_path)
    names, sizes = ("n/a", "n/b", "n/c", "n/d"), (5 << 20, 6 << 20, 7, 0)
    staged = client.ask(StageMany(suffixes=names, sizes=sizes))
    assert [len(each.chunks) for each in staged if isinstance(each, Staged)] == [2, 2, 1, 0]
    commit = CommitMany(
        suffixes=names,
        stage_ids=tuple(str(each.stage_id) for each in staged if isinstance(each, Staged)),
        local_only=True,
        checksum_counts=u32(2, 2, 1, 0),
        checksums=u32(11, 12, 13, 14, 15),
    )
    committed = client.ask(commit)
    assert [each.object_size for each in committed if isinstance(each, CommittedReply)] == [*sizes]
    found = client.ask(LocateMany(prefix="n/", suffixes=("a", "none", "c", "d", "b"), layouts=True))
    assert [
        [chunk.checksum for chunk in each.chunks] if isinstance(each, Found) else each for each in found
    ] == [[11, 12], MissReply(), [15], [], [13, 14]]
    assert client.ask(EvictMany(suffixes=("n/b", "none"))) == [EvictedReply(), MissReply()]
    assert client.ask(EvictMany(suffixes=())) == []


def limits_of(max_batch: int, max_request_bytes: int = 1 << 20) -> HelloLimits:
    return HelloLimits(
        max_request_bytes=max_request_bytes, max_reply_bytes=1 << 20, max_in_flight=64, max_batch=max_batch
    )


def commits(count: int, **columns: Any) -> CommitMany:
    return CommitMany(
        prefix="p/",
        suffixes=tuple(f"{number}é" for number in range(count)),
        stage_ids=tuple(f"s{number}" for number in range(count)),
        **columns,
    )


WHOLE: list[BatchRequest] = [
    LocateMany(prefix="p/", suffixes=("a", "", "a", "ab"), layouts=True),
    EvictMany(suffixes=("a", "b", "a")),
    StageMany(prefix="p", suffixes=("a", "b", "c"), sizes=(3, 0, 1), pinned=True, tier=Tier.RAM),
    commits(6, local_only=True, checksum_counts=u32(2, 0, 1, 0, 0, 3), checksums=u32(1, 2, 3, 4, 5, 6)),
    commits(3, write_through=True, checksum_counts=u32(0, 0, 0), checksums=b""),
    commits(3),
]


@pytest.mark.parametrize("most", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("most_bytes", [0, FRAME_BYTES + 50, FRAME_BYTES + 100, 1 << 20])
@pytest.mark.parametrize("whole", WHOLE, ids=lambda whole: whole.action)
def test_pieces_ask_for_each_uri_what_the_whole_asks_for_it(
    whole: BatchRequest, most: int, most_bytes: int
) -> None:
    cut = [piece.request for piece in pieces(whole, limits_of(most, most_bytes))]
    asked = [singles(request) if isinstance(request, BatchRequest) else [request] for request in cut]
    assert [request for requests in asked for request in requests] == list(singles(whole))


def test_each_piece_costs_the_same_however_many_there_are() -> None:
    def cost_s(count: int) -> float:
        whole = commits(count, checksum_counts=u32(*[1] * count), checksums=u32(*range(count)))
        start = time.process_time()
        assert sum(piece.count for piece in pieces(whole, limits_of(2))) == count
        return time.process_time() - start

    few, many = (min(cost_s(count) for _ in range(3)) for count in (250, 4000))
    assert many < 3 * 16 * few


def test_a_daemon_that_takes_more_than_this_side_sends_gets_no_more(scripted2, make: MakeClient) -> None:
    scripted2.limits = HelloLimits(
        max_request_bytes=1 << 40, max_reply_bytes=1 << 40, max_in_flight=1 << 40, max_batch=1 << 40
    )
    client = make(scripted2.socket_path)
    assert (
        client.exchange([Evict(uri=f"{number}{'x' * 4000}") for number in range(600)]) == [MissReply()] * 600
    )
    assert client.lookup([f"{number}{'x' * 4000}" for number in range(600)]) == [Outcome.ABSENT] * 600


def test_what_is_named_twice_is_evicted_once_also_where_it_takes_two_pieces(
    scripted2, make: MakeClient
) -> None:
    scripted2.limits = limits_of(2)
    scripted2.objects = {"a": hit(1), "b": hit(1)}
    answers = make(scripted2.socket_path).ask(EvictMany(suffixes=("a", "b", "a")))
    assert [type(answer) for answer in answers] == [EvictedReply] * 3
    assert scripted2.counted() == {"hello": 1, "evict_many": 1}


def test_a_daemon_that_announces_nothing_but_zeros_is_asked_one_by_one(scripted2, make: MakeClient) -> None:
    scripted2.limits = HelloLimits(max_request_bytes=0, max_reply_bytes=0, max_in_flight=0, max_batch=0)
    client = make(scripted2.socket_path)
    assert client.exchange(locates(5)) == [MissReply()] * 5
    assert client.lookup(["a", "b"]) == [Outcome.ABSENT] * 2


def test_no_more_requests_are_in_flight_than_the_daemon_takes(scripted2, make: MakeClient) -> None:
    scripted2.limits = HelloLimits(
        max_request_bytes=1 << 20, max_reply_bytes=1 << 20, max_in_flight=3, max_batch=1
    )
    scripted2.hold = 3  # so that fewer would time out
    assert make(scripted2.socket_path).exchange(locates(9)) == [MissReply()] * 9
    scripted2.hold = 4
    assert failure(make(scripted2.socket_path, 0.5), locates(9)) is Outcome.DAEMON_LATE


def test_what_cannot_be_joined_goes_alone_and_each_gets_its_own_reply(scripted2, make: MakeClient) -> None:
    scripted2.objects = {"a": hit(1), "b": hit(2), "c": hit(3)}
    requests: list[Request] = [
        Locate(uri="a", auto_ingest=False),
        Locate(uri="none", auto_ingest=False),
        Ping(),
        Locate(uri="b"),  # one that may fetch
        Locate(uri="c", auto_ingest=False, pinned=True),
        Evict(uri="a"),
        Evict(uri="none"),
    ]
    replies = make(scripted2.socket_path).exchange(requests)
    assert replies[:2] == [hit(1), MissReply()]
    assert isinstance(replies[2], PongReply)
    assert replies[3:5] == [hit(2), hit(3)]
    assert [reply.status for reply in replies[5:]] == ["EVICTED", "MISS"]
    assert scripted2.counted() == {"hello": 1, "locate_many": 1, "ping": 1, "locate": 2, "evict_many": 1}


def test_what_uris_share_is_sent_once(scripted2, make: MakeClient) -> None:
    make(scripted2.socket_path).lookup(["hypercache://n/aa", "hypercache://n/ab", "hypercache://n/a"])
    (asked,) = [request for request in scripted2.requests if isinstance(request, LocateMany)]
    assert (asked.prefix, asked.suffixes, asked.layouts) == ("hypercache://n/a", ("a", "b", ""), False)


@pytest.mark.parametrize("kind", [LocateMany, StageMany, CommitMany, EvictMany])
def test_what_uris_share_is_sent_once_whatever_is_asked(
    scripted2, make: MakeClient, kind: type[BatchRequest]
) -> None:
    columns = {
        LocateMany: {"layouts": True},
        StageMany: {"sizes": (1, 2)},
        CommitMany: {"stage_ids": ("s", "t"), "checksum_counts": u32(1, 1), "checksums": u32(5, 6)},
        EvictMany: {},
    }
    uris = ("hypercache://n/aa", "hypercache://n/ab")
    make(scripted2.socket_path).ask(kind.trusted(suffixes=uris, **columns[kind]))
    (asked,) = [request for request in scripted2.requests if isinstance(request, BatchRequest)]
    assert (type(asked), asked.prefix, asked.suffixes) == (kind, "hypercache://n/a", ("a", "b"))


# -- replies that lie ----------------------------------------------------------------------------------------


def spoiled_layouts(**columns: object) -> Callable[[Request, Reply], Reply]:
    """What replaces columns of the reply's layouts."""

    def change(request: Request, reply: Reply) -> Reply:
        layouts = getattr(reply, "layouts", None)
        if layouts is None:
            return reply
        return reply.model_copy(update={"layouts": layouts.model_copy(update=columns)})

    return change


def spoiled(kind: type[Reply], **fields: object) -> Callable[[Request, Reply], Reply]:
    return lambda request, reply: reply.model_copy(update=fields) if isinstance(reply, kind) else reply


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


# Three objects of 100 bytes, one chunk each, all present.
LIES_ABOUT_LAYOUTS: dict[str, Callable[[Request, Reply], Reply]] = {
    "too short a bitmap": spoiled(LocatedMany, present=b""),
    "too long a bitmap": spoiled(LocatedMany, present=b"\x07\x00"),
    "a bit beyond": spoiled(LocatedMany, present=b"\x0f"),
    "fewer present than layouts": spoiled(LocatedMany, present=b"\x03"),
    "no layouts": spoiled(LocatedMany, layouts=None),
    "a size too few": spoiled_layouts(object_sizes=u64(100, 100)),
    "half a size": spoiled_layouts(object_sizes=u64(100, 100, 100)[:-1]),
    "another size": spoiled_layouts(object_sizes=u64(100, 101, 100)),
    "generations too few": spoiled_layouts(generations=b""),
    "an unknown status": spoiled_layouts(sync_statuses=b"\x04\x04\xfa"),
    "statuses too many": spoiled_layouts(sync_statuses=b"\x04\x04\x04\x04"),
    "chunks too few": spoiled_layouts(chunk_counts=u32(1, 1, 0)),
    "chunks by the billion": spoiled_layouts(chunk_counts=u32(1, 1, 0xFFFFFFFF)),
    "a path out of range": spoiled_layouts(chunk_paths=u32(0, 1, 2)),
    "no paths": spoiled_layouts(paths=(), path_tiers=b""),
    "tiers too few": spoiled_layouts(path_tiers=b"\x00"),
    "an unknown tier": spoiled_layouts(path_tiers=b"\x00\x09"),
    "an offset out of range": spoiled_layouts(chunk_offsets=u64(0, 4096, 1 << 63)),
    "a length of nothing": spoiled_layouts(chunk_lengths=u32(100, 100, 0)),
    "too long a chunk": spoiled_layouts(chunk_lengths=u32(100, 100, (4 << 20) + 1)),
    "checksums too few": spoiled_layouts(chunk_checksums=u32(1, 2)),
    "checksum bits too many": spoiled_layouts(checksummed=b"\x07\x07"),
}


@pytest.mark.parametrize("lie", LIES_ABOUT_LAYOUTS.values(), ids=LIES_ABOUT_LAYOUTS.keys())
def test_a_locate_of_many_that_lies_is_a_miss_for_all_and_ends_the_connection(
    scripted2, connect, lie: Callable[[Request, Reply], Reply]
) -> None:
    keys, data = ["a", "b", "c"], [bytearray(os.urandom(100)) for _ in range(3)]
    assert connect(scripted2.socket_path).store(keys, data).ok
    driver = connect(scripted2.socket_path)
    accepted = scripted2.connections_accepted
    scripted2.change_batch = lie
    buffers = [bytearray(100) for _ in keys]
    assert driver.load(keys, buffers) == [False] * 3
    assert driver.count("loads", "daemon_garbled") == 3
    scripted2.change_batch = lambda request, reply: reply
    assert driver.load(keys, buffers) == [True] * 3
    assert buffers == data
    assert scripted2.connections_accepted == accepted + 2


@pytest.mark.parametrize(
    "lie",
    [
        spoiled(LocatedMany, present=b"\x07\x00"),
        spoiled(LocatedMany, verifiable=b""),
        spoiled(LocatedMany, verifiable=b"\xff"),
        spoiled(LocatedMany, present=b"\x03", verifiable=b"\x07"),
    ],
    ids=["present too long", "verifiable too short", "a bit beyond", "verifiable and not present"],
)
def test_a_lookup_s_reply_that_lies_is_a_miss_for_all_and_ends_the_connection(
    scripted2, make: MakeClient, lie: Callable[[Request, Reply], Reply]
) -> None:
    client = make(scripted2.socket_path)
    scripted2.change_batch = lie
    with pytest.raises(DaemonUnavailable) as caught:
        client.lookup(["a", "b", "c"])
    assert caught.value.outcome is Outcome.DAEMON_GARBLED
    scripted2.change_batch = lambda request, reply: reply
    assert client.lookup(["a"]) == [Outcome.ABSENT]
    assert scripted2.connections_accepted == 2


STALE = ItemError(index=0, error_message="stale", error_code=ErrorCode.STALE_STAGE)
ALL_STALE = [STALE.model_copy(update={"index": index}) for index in range(3)]
BEYOND = STALE.model_copy(update={"index": 3})
STAGES: list[Request] = [StageWrite(uri=f"u{number}", size_bytes=100) for number in range(3)]
COMMITS: list[Request] = [
    CommitWrite(uri=f"u{number}", stage_id="s", local_only=True, chunk_checksums=(1,)) for number in range(3)
]
EVICTS: list[Request] = [Evict(uri=f"u{number}") for number in range(3)]
LIES: list[tuple[str, list[Request], Callable[[Request, Reply], Reply]]] = [
    ("stage: a stage id too few", STAGES, spoiled(StagedMany, stage_ids=("s", "s"))),
    ("stage: a stage id too many", STAGES, spoiled(StagedMany, stage_ids=("s",) * 4)),
    ("stage: fewer done", STAGES, spoiled(StagedMany, done=b"\x03")),
    ("stage: wrong bitmap", STAGES, spoiled(StagedMany, done=b"")),
    ("stage: done and refused", STAGES, spoiled(StagedMany, errors=(STALE,))),
    ("stage: an error beyond", STAGES, spoiled(StagedMany, errors=(BEYOND,))),
    ("stage: a layout of another size", STAGES, spoiled_layouts(object_sizes=u64(1, 100, 100))),
    ("commit: no reasons", COMMITS, spoiled(CommittedMany, errors=())),
    ("commit: one reason twice", COMMITS, spoiled(CommittedMany, errors=(STALE, STALE, STALE))),
    ("commit: a reason too many", COMMITS, spoiled(CommittedMany, errors=(*ALL_STALE, STALE))),
    ("commit: an error beyond", COMMITS, spoiled(CommittedMany, errors=(STALE, BEYOND, BEYOND))),
    ("commit: done without a size", COMMITS, spoiled(CommittedMany, done=b"\x07", errors=())),
    ("commit: sizes for none", COMMITS, spoiled(CommittedMany, object_sizes=u64(100))),
    ("commit: statuses for none", COMMITS, spoiled(CommittedMany, sync_statuses=b"\x04")),
    ("commit: generations for none", COMMITS, spoiled(CommittedMany, generations=u64(1))),
    ("evict: wrong bitmap", EVICTS, spoiled(EvictedMany, done=b"\x00\x00")),
    ("evict: done and refused", EVICTS, spoiled(EvictedMany, done=b"\x01", errors=(STALE,))),
    ("evict: an error beyond", EVICTS, spoiled(EvictedMany, errors=(BEYOND,))),
    ("evict: one error twice", EVICTS, spoiled(EvictedMany, errors=(STALE, STALE))),
]


@pytest.mark.parametrize(("requests", "lie"), [each[1:] for each in LIES], ids=[each[0] for each in LIES])
def test_a_change_of_many_whose_reply_lies_fails_for_all_and_ends_the_connection(
    scripted2, make: MakeClient, requests: list[Request], lie: Callable[[Request, Reply], Reply]
) -> None:
    client = make(scripted2.socket_path)
    scripted2.change_batch = lie
    assert failure(client, requests) is Outcome.DAEMON_GARBLED
    (whole,) = batched(requests, limits_of(3))
    assert isinstance(whole.request, BatchRequest)
    with pytest.raises(DaemonUnavailable) as caught:
        client.ask(whole.request)
    assert caught.value.outcome is Outcome.DAEMON_GARBLED
    scripted2.change_batch = lambda request, reply: reply
    assert client.exchange(locates(2)) == [MissReply()] * 2
    assert scripted2.connections_accepted == 3


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        struct.pack(">I", 1) + b"\xc1",
        struct.pack(">I", 2) + b"\x90\x90",
        struct.pack(">I", 4) + b"\x93\x00\xa1x",
        struct.pack(">I", 5) + b"\x93\x00\xa1x\x80",
    ],
    ids=["4 GiB claimed", "no msgpack", "trailing bytes", "short list", "the connection's end"],
)
def test_a_frame_that_is_none_fails_its_exchange_and_ends_the_connection(
    scripted2, make: MakeClient, frame: bytes
) -> None:
    client = make(scripted2.socket_path)
    client.exchange([Ping()])
    scripted2.garble = lambda request, data: frame if isinstance(request, LocateMany) else data
    assert failure(client, locates(2)) is Outcome.DAEMON_GARBLED
    scripted2.garble = lambda request, data: data
    assert client.exchange(locates(2)) == [MissReply()] * 2
    assert scripted2.connections_accepted == 2


# -- one uri that fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [LocateMany, StageMany, CommitMany, EvictMany])
def test_a_batch_that_is_refused_as_a_whole_is_that_refusal_for_each(
    scripted2, make: MakeClient, refused: type[Request]
) -> None:
    error = ErrorReply(error_message="not now", error_code=ErrorCode.UNAVAILABLE)
    requests: dict[type[Request], Sequence[Request]] = {
        LocateMany: locates(3),
        StageMany: STAGES,
        CommitMany: COMMITS,
        EvictMany: EVICTS,
    }
    scripted2.change_batch = lambda request, reply: error
    client = make(scripted2.socket_path)
    assert client.exchange(requests[refused]) == [error] * 3
    assert client.lookup(["a"]) == [Outcome.DAEMON_REFUSED]
    assert scripted2.connections_accepted == 1


@pytest.mark.parametrize("step", [StageWrite, CommitWrite])
def test_one_key_that_is_refused_fails_alone(scripted2, connect, step: type[Request]) -> None:
    bad = MAPPING.uri("bad")

    def refuse_one(request: Request, reply: Reply) -> Reply:
        if not (isinstance(request, step) and request.uri == bad):
            return reply
        scripted2.objects.pop(bad, None)
        return ErrorReply(error_message="no", error_code=ErrorCode.NO_SPACE)

    scripted2.change = refuse_one
    keys = ["a", "bad", "b"]
    driver = connect(scripted2.socket_path, store_threads=1)
    assert not driver.store(keys, [bytearray(10)] * 3).ok
    assert driver.exists(keys) == [True, False, True]
    assert driver.connector.status()["stores"] == {"ok": 2, "no_space": 1}


def test_one_delete_that_is_refused_fails_alone(scripted2, connect) -> None:
    driver = connect(scripted2.socket_path)
    assert driver.store(["a", "bad"], [bytearray(10)] * 2).ok
    bad = MAPPING.uri("bad")
    kept = scripted2.objects[bad]

    def refuse_one(request: Request, reply: Reply) -> Reply:
        if request != Evict(uri=bad):
            return reply
        scripted2.objects[bad] = kept
        return ErrorReply(error_message="no")

    scripted2.change = refuse_one
    assert driver.delete(["a", "bad", "none"]) == [True, False, True]
    assert driver.exists(["a", "bad"]) == [False, True]


def test_one_key_without_checksums_and_one_only_staged_are_misses_alone(scripted2, connect) -> None:
    driver = connect(scripted2.socket_path)
    keys, data = ["a", "unsummed", "staged", "b"], [bytearray(os.urandom(10)) for _ in range(4)]
    assert driver.store(keys, data).ok
    for key, changes in {"unsummed": {"checksum": None}, "staged": {}}.items():
        found = scripted2.objects[MAPPING.uri(key)]
        layout = tuple(chunk.model_copy(update=changes) for chunk in found.chunk_layout)
        status = SyncStatus.STAGED if key == "staged" else found.sync_status
        scripted2.objects[MAPPING.uri(key)] = found.model_copy(
            update={"chunk_layout": layout, "sync_status": status}
        )
    back = [bytearray(10) for _ in keys]
    assert driver.exists(keys) == [True, False, False, True]
    assert driver.load(keys, back) == [True, False, False, True]
    assert (back[0], back[3]) == (data[0], data[3])
    assert driver.connector.status()["lookups"] == {"ok": 2, "unverifiable": 2}
    assert driver.connector.status()["loads"] == {"ok": 2, "no_checksum": 1, "staged": 1}


# -- late replies --------------------------------------------------------------------------------------------


def test_a_late_batch_reply_never_reaches_the_next_caller(scripted2, make: MakeClient) -> None:
    client = make(scripted2.socket_path, 0.3, probe_interval_s=0.01)
    client.exchange([Ping()])
    scripted2.objects = {"old": hit(1), "new": hit(2)}
    scripted2.freeze()
    assert failure(client, [Locate(uri="old", auto_ingest=False)] * 2) is Outcome.DAEMON_LATE
    scripted2.thaw()
    deadline = time.monotonic() + DEADLINE_S
    while client.breaker_open:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert client.exchange([Locate(uri="new", auto_ingest=False)] * 2) == [hit(2)] * 2


def test_a_reply_to_nobody_is_dropped_and_the_right_one_still_taken(scripted2, make: MakeClient) -> None:
    client = make(scripted2.socket_path)
    client.exchange([Ping()])
    scripted2.objects = {"a": hit(1)}
    body = b"\x93\xcd\x30\x39\xa4MISS\x80"  # [12345, "MISS", {}]
    stray = struct.pack(">I", len(body)) + body
    scripted2.garble = lambda request, data: stray + data
    assert client.exchange([Locate(uri="a", auto_ingest=False)]) == [hit(1)]
    assert scripted2.connections_accepted == 1
    assert client.ignored() == {"unknown_fields": 0, "dropped_replies": 1}


@pytest.mark.parametrize("wire", [WIRE_1_1, LATEST], ids=str)
def test_what_nobody_used_is_counted_and_told_also_of_connections_that_are_closed(
    scripted2, connect, wire: WireVersion
) -> None:
    """A field in the answer to each greeting, and where it is told."""
    scripted2.garble = lambda request, data: (
        data.replace(b'{"status"', b'{"novel":1,"status"') if isinstance(request, Ping | Hello) else data
    )
    driver = connect(scripted2.socket_path, wire=str(wire))
    told = [{"unknown_fields": 0}]
    for _ in range(2):
        assert driver.exists(["a"]) == [False]
        told.append(driver.connector.status()["ignored"])
        scripted2.stop()
        scripted2.start()
    assert all(later["unknown_fields"] > before["unknown_fields"] for before, later in pairwise(told))
    driver.connector.close()
    assert driver.connector.status()["ignored"]["unknown_fields"] >= told[-1]["unknown_fields"]


def test_replies_out_of_order_reach_the_request_that_asked(folder: Path, make: MakeClient) -> None:
    """By a daemon of its own, since the scripted one answers in order."""
    path = str(folder / "s")
    hello = (
        b'{"status":"HELLO","version":"2.0","versions":["2.0"],"features":[],"devices":[],"instance_id":"i",'
        b'"limits":{"max_request_bytes":9999,"max_reply_bytes":9999,"max_in_flight":9,"max_batch":1}}\n'
    )

    def serve(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        with accepted, suppress(OSError):
            accepted.recv(65536)
            accepted.sendall(hello)
            asked = b""
            while asked.count(b"locate") < 3:
                asked += accepted.recv(65536)
            for number in (4, 2, 3):
                body = bytes([0x93, number]) + b"\xa3HIT\x83\xabobject_size" + bytes([number])
                body += b"\xacchunk_layout\x90\xabsync_status\xaaLOCAL_ONLY"
                accepted.sendall(struct.pack(">I", len(body)) + body)
            accepted.recv(65536)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        client = make(path)
        replies = client.exchange([Locate(uri=f"u{number}") for number in range(3)])
        assert [reply.object_size for reply in replies if isinstance(reply, HitReply)] == [2, 3, 4]
        client.close()
        thread.join(DEADLINE_S)


# -- staging what is not stored (wire 2.1) ----------------------------------------------------------------


def stored_twice(scripted: Any, connect: Any) -> Any:
    """A driver that has stored a and b, and a daemon that counts from then on."""
    driver = connect(scripted.socket_path)
    assert driver.store(["a", "b"], [bytes(10), bytes(20)]).ok
    scripted.requests.clear()
    return driver


def test_a_daemon_of_2_1_looks_for_what_is_stored_when_it_stages(scripted2, connect) -> None:
    driver = stored_twice(scripted2, connect)
    assert driver.store(["a", "c", "b"], [bytes(10), bytes(30), b"x" * 21]).ok
    (staged, committed) = scripted2.requests
    assert isinstance(staged, StageMany)
    assert staged.unless_stored
    assert isinstance(committed, CommitMany)
    assert committed.uris() == [MAPPING.uri("c"), MAPPING.uri("b")], "of another size is another object"
    assert driver.connector.status()["stores"] == {"ok": 4, "already_stored": 1}
    back = [bytearray(size) for size in (10, 21, 30)]
    assert driver.load(["a", "b", "c"], back) == [True] * 3
    assert bytes(back[1]) == b"x" * 21


def test_one_key_that_is_stored_costs_one_exchange_and_one_that_is_not_two(scripted2, connect) -> None:
    driver = stored_twice(scripted2, connect)
    assert driver.store(["a"], [bytes(10)]).ok
    assert scripted2.counted() == {"stage_many": 1}
    assert driver.store(["new"], [bytes(10)]).ok
    assert scripted2.counted() == {"stage_many": 2, "commit_write": 1}


def test_overwrite_asks_for_nothing_to_be_spared(scripted2, connect) -> None:
    driver = connect(scripted2.socket_path, overwrite=True)
    for data in (bytes(10), b"y" * 10):
        assert driver.store(["a", "b"], [data, data]).ok
    assert all(not request.unless_stored for request in scripted2.requests if isinstance(request, StageMany))
    back = bytearray(10)
    assert driver.load(["a"], [back]) == [True]
    assert back == b"y" * 10


@pytest.mark.parametrize("wire", [WIRE_1_1, WIRE_2_0], ids=str)
def test_a_daemon_before_2_1_is_asked_what_is_stored_before_anything_is_staged(
    scripted, connect, wire: WireVersion
) -> None:
    scripted.stop()
    scripted.wire = wire
    scripted.start()
    driver = stored_twice(scripted, connect)
    assert driver.store(["a", "c"], [bytes(10), bytes(30)]).ok
    asked = [request.action for request in scripted.requests]
    assert asked == (
        ["locate", "locate", "stage_write", "commit_write"]
        if wire == WIRE_1_1
        else ["locate_many", "stage_write", "commit_write"]
    )


def test_a_daemon_that_lacks_it_all_at_once_is_stored_to_the_older_way_without_a_word(
    scripted2, connect, caplog: pytest.LogCaptureFixture
) -> None:
    driver = connect(scripted2.socket_path)
    assert driver.store(["a"], [bytearray(5)]).ok
    scripted2.stop()
    scripted2.wire = WIRE_2_0
    scripted2.start()
    assert driver.store(["b"], [bytearray(5)]).ok
    assert driver.connector.status()["daemon"]["wire"] == "2.0"
    assert "unless_stored" not in caplog.text


def test_unless_stored_is_refused_before_a_daemon_of_2_0_could_drop_it(scripted, make: MakeClient) -> None:
    scripted.wire = WIRE_2_0
    client = make(scripted.socket_path)
    request = StageMany(suffixes=("a",), sizes=(1,), unless_stored=True)
    with pytest.raises(LocalProtocolError, match=r"unless_stored needs wire 2\.1 .* speaks wire 2\.0"):
        client.exchange([request])
    needs = {"batches"}
    with pytest.raises(DaemonUnavailable, match=r"lacks unless_stored; upgrade it to wire 2\.1"):
        client.ask(request, needs=needs)
    assert needs == {"batches"}, "the caller's own"
    assert scripted.counted() == {"hello": 2}


def test_a_downgrade_between_two_stores_is_noticed_and_nothing_is_lost(scripted2, connect) -> None:
    driver = stored_twice(scripted2, connect)
    scripted2.stop()
    scripted2.wire = WIRE_2_0
    scripted2.start()
    assert driver.store(["a", "c"], [bytes(10), bytes(30)]).ok
    assert scripted2.counted() == {"hello": 1, "locate_many": 1, "stage_write": 1, "commit_write": 1}
    assert driver.connector.status()["stores"] == {"ok": 3, "already_stored": 1}


def _with(**changes: Any) -> Callable[[StagedMany], StagedMany]:
    return lambda reply: reply.model_copy(update=changes)


@pytest.mark.parametrize(
    "wrong",
    [
        _with(stored=None),
        _with(stored=b"\x00"),
        _with(stored=b"\x03"),
        _with(stored=b"\x05"),
        _with(stored=b"\x01\x00"),
        _with(stored=b""),
        _with(done=b"\x03"),
        _with(errors=(ItemError(index=0, error_message="no"),)),
    ],
    ids=["not told", "nothing", "staged too", "beyond", "too long", "empty", "one too many", "refused too"],
)
def test_what_is_called_stored_is_believed_only_where_the_whole_reply_fits(
    scripted2, connect, wrong: Callable[[StagedMany], StagedMany]
) -> None:
    driver = stored_twice(scripted2, connect)
    scripted2.change_batch = lambda request, reply: wrong(reply) if isinstance(reply, StagedMany) else reply
    assert not driver.store(["a", "c"], [bytes(10), bytes(30)]).ok
    assert driver.count("stores", "daemon_garbled") == 2
    assert MAPPING.uri("c") not in scripted2.objects


@pytest.mark.parametrize("stored", [b"\x01", b"\x00"])
def test_a_refusal_beside_what_is_stored_is_that_key_s_own(scripted2, connect, stored: bytes) -> None:
    driver = stored_twice(scripted2, connect)
    scripted2.change = lambda request, reply: (
        ErrorReply(error_message="full", error_code=ErrorCode.NO_SPACE)
        if isinstance(request, StageWrite) and request.uri == MAPPING.uri("c")
        else reply
    )
    sizes = [10 if stored == b"\x01" else 11, 30]
    assert not driver.store(["a", "c"], [bytes(size) for size in sizes]).ok
    good = "already_stored" if stored == b"\x01" else "ok"
    assert driver.count("stores", "no_space") == 1
    assert driver.count("stores", good) == (1 if good == "already_stored" else 3)


# -- requests that depend on each other -----------------------------------------------------------------


def evict(*names: str) -> list[Request]:
    return [Evict(uri=name) for name in names]


@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        ([], []),
        (evict("a", "b", "c"), [3]),
        (evict("a", "b", "a", "a", "c"), [2, 1, 2]),
        ([*evict("a"), Locate(uri="b"), Locate(uri="c"), *evict("b")], [1, 2, 1]),
        ([GetWriteStatus(uri="a"), GetWriteStatus(uri="a"), Ping(), Ping()], [2, 2]),
        ([Locate(uri="a", auto_ingest=False)] * 3, [3]),
        ([Locate(uri="a", auto_ingest=False), *[Locate(uri="a", pinned=True)] * 2], [1, 1, 1]),
        ([Purge(), Purge()], [1, 1]),
    ],
)
def test_what_may_depend_on_what_came_before_waits_for_it(requests: list[Request], sizes: list[int]) -> None:
    groups = list(waves(requests))
    assert [request for group in groups for request in group] == requests
    assert [len(group) for group in groups] == sizes


def test_only_the_first_of_them_is_sent_again_where_the_connection_was_dead(
    scripted2, make: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make(scripted2.socket_path)
    client.exchange([Ping()])
    nothing_sent_before: list[bool] = []
    real_send = Connection._send

    def noted(self: Connection, data: memoryview, *, untouched: bool) -> int:
        nothing_sent_before.append(untouched)
        return real_send(self, data, untouched=untouched)

    monkeypatch.setattr(Connection, "_send", noted)
    client.exchange([StageWrite(uri="u", size_bytes=1), Evict(uri="u"), Locate(uri="u")])
    assert nothing_sent_before == [True, False, False]
