"""What a batch costs: in how few pieces it goes out, and what may go out side by side."""

import time
from typing import Any

import pytest
from asking import MakeClient, failure, hit, limits_of, locates, u32

from hypercache_connector.batching import FRAME_BYTES, pieces, singles, waves
from hypercache_connector.connection import Connection
from hypercache_connector.layouts import Found, Staged
from hypercache_connector.outcomes import Outcome
from hypercache_protocol import WIRE_1_1, WIRE_2_0, WIRE_2_1, Tier, WireVersion
from hypercache_protocol.batches import (
    BatchRequest,
    CommitMany,
    EvictMany,
    HelloLimits,
    LocateMany,
    StageMany,
)
from hypercache_protocol.messages import (
    CommittedReply,
    CommitWrite,
    Evict,
    EvictedReply,
    GetWriteStatus,
    Locate,
    MissReply,
    Ping,
    PongReply,
    Purge,
    Request,
    StageWrite,
)

# -- what a batch costs --------------------------------------------------------------------------------------


def frames(scripted2) -> list[int]:
    """How many uris each batch had that was asked for so far."""
    return [len(request.suffixes) for request in scripted2.requests if hasattr(request, "suffixes")]


def test_a_batch_is_split_only_at_the_most_uris_that_the_daemon_takes(
    scripted2, client_to: MakeClient
) -> None:
    scripted2.limits = HelloLimits(
        max_request_bytes=1 << 20, max_reply_bytes=1 << 20, max_in_flight=64, max_batch=10
    )
    scripted2.objects = {f"u{number}": hit(number) for number in range(0, 25, 2)}
    client = client_to(scripted2.socket_path)
    replies = client.exchange(locates(25))
    assert replies == [MissReply() if number % 2 else hit(number) for number in range(25)]
    assert frames(scripted2) == [10, 10, 5]
    outcomes = client.lookup([f"u{number}" for number in range(25)])
    assert outcomes == [Outcome.ABSENT if number % 2 else Outcome.OK for number in range(25)]
    assert frames(scripted2)[3:] == [10, 10, 5]


@pytest.mark.parametrize("letter", ["x", "é", "𝄞"])
def test_no_request_is_longer_than_the_daemon_takes_and_none_much_shorter(
    scripted2, client_to: MakeClient, relay_to, letter: str
) -> None:
    most_bytes = 20_000
    scripted2.limits = HelloLimits(
        max_request_bytes=most_bytes, max_reply_bytes=1 << 20, max_in_flight=64, max_batch=4096
    )
    relay = relay_to(scripted2.socket_path)
    client = client_to(relay.path)
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
    scripted, client_to: MakeClient, wire: WireVersion, most: int
) -> None:
    scripted.stop()
    scripted.wire = wire
    scripted.limits = HelloLimits(
        max_request_bytes=1 << 20, max_reply_bytes=1 << 20, max_in_flight=64, max_batch=most
    )
    scripted.start()
    client = client_to(scripted.socket_path)
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


def test_a_daemon_that_takes_more_than_this_side_sends_gets_no_more(scripted2, client_to: MakeClient) -> None:
    scripted2.limits = HelloLimits(
        max_request_bytes=1 << 40, max_reply_bytes=1 << 40, max_in_flight=1 << 40, max_batch=1 << 40
    )
    client = client_to(scripted2.socket_path)
    assert (
        client.exchange([Evict(uri=f"{number}{'x' * 4000}") for number in range(600)]) == [MissReply()] * 600
    )
    assert client.lookup([f"{number}{'x' * 4000}" for number in range(600)]) == [Outcome.ABSENT] * 600


def test_what_is_named_twice_is_evicted_once_also_where_it_takes_two_pieces(
    scripted2, client_to: MakeClient
) -> None:
    scripted2.limits = limits_of(2)
    scripted2.objects = {"a": hit(1), "b": hit(1)}
    answers = client_to(scripted2.socket_path).ask(EvictMany(suffixes=("a", "b", "a")))
    assert [type(answer) for answer in answers] == [EvictedReply] * 3
    assert scripted2.counted() == {"hello": 1, "evict_many": 1}


def test_a_daemon_that_announces_nothing_but_zeros_is_asked_one_by_one(
    scripted2, client_to: MakeClient
) -> None:
    scripted2.limits = HelloLimits(max_request_bytes=0, max_reply_bytes=0, max_in_flight=0, max_batch=0)
    client = client_to(scripted2.socket_path)
    assert client.exchange(locates(5)) == [MissReply()] * 5
    assert client.lookup(["a", "b"]) == [Outcome.ABSENT] * 2


def test_no_more_requests_are_in_flight_than_the_daemon_takes(scripted2, client_to: MakeClient) -> None:
    scripted2.limits = HelloLimits(
        max_request_bytes=1 << 20, max_reply_bytes=1 << 20, max_in_flight=3, max_batch=1
    )
    scripted2.hold = 3  # so that fewer would time out
    assert client_to(scripted2.socket_path).exchange(locates(9)) == [MissReply()] * 9
    scripted2.hold = 4
    assert failure(client_to(scripted2.socket_path, 0.5), locates(9)) is Outcome.DAEMON_LATE


def test_what_cannot_be_joined_goes_alone_and_each_gets_its_own_reply(
    scripted2, client_to: MakeClient
) -> None:
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
    replies = client_to(scripted2.socket_path).exchange(requests)
    assert replies[:2] == [hit(1), MissReply()]
    assert isinstance(replies[2], PongReply)
    assert replies[3:5] == [hit(2), hit(3)]
    assert [reply.status for reply in replies[5:]] == ["EVICTED", "MISS"]
    assert scripted2.counted() == {"hello": 1, "locate_many": 1, "ping": 1, "locate": 2, "evict_many": 1}


def test_what_uris_share_is_sent_once(scripted2, client_to: MakeClient) -> None:
    client_to(scripted2.socket_path).lookup(["hypercache://n/aa", "hypercache://n/ab", "hypercache://n/a"])
    (asked,) = [request for request in scripted2.requests if isinstance(request, LocateMany)]
    assert (asked.prefix, asked.suffixes, asked.layouts) == ("hypercache://n/a", ("a", "b", ""), False)


@pytest.mark.parametrize("kind", [LocateMany, StageMany, CommitMany, EvictMany])
def test_what_uris_share_is_sent_once_whatever_is_asked(
    scripted2, client_to: MakeClient, kind: type[BatchRequest]
) -> None:
    columns = {
        LocateMany: {"layouts": True},
        StageMany: {"sizes": (1, 2)},
        CommitMany: {"stage_ids": ("s", "t"), "checksum_counts": u32(1, 1), "checksums": u32(5, 6)},
        EvictMany: {},
    }
    uris = ("hypercache://n/aa", "hypercache://n/ab")
    client_to(scripted2.socket_path).ask(kind.trusted(suffixes=uris, **columns[kind]))
    (asked,) = [request for request in scripted2.requests if isinstance(request, BatchRequest)]
    assert (type(asked), asked.prefix, asked.suffixes) == (kind, "hypercache://n/a", ("a", "b"))


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
    scripted2, client_to: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_to(scripted2.socket_path)
    client.exchange([Ping()])
    nothing_sent_before: list[bool] = []
    real_send = Connection._send

    def noted(self: Connection, data: memoryview, *, untouched: bool) -> int:
        nothing_sent_before.append(untouched)
        return real_send(self, data, untouched=untouched)

    monkeypatch.setattr(Connection, "_send", noted)
    client.exchange([StageWrite(uri="u", size_bytes=1), Evict(uri="u"), Locate(uri="u")])
    assert nothing_sent_before == [True, False, False]
