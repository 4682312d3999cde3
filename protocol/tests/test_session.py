"""Both ends of a connection: the same events however the bytes were cut, and replies in order."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache_protocol import (
    NEED_DATA,
    WIRE_1_0,
    ConnectionClosed,
    ErrorCode,
    Limits,
    LocalProtocolError,
    RemoteProtocolError,
    ReplyReceived,
    RequestReceived,
    RequestRejected,
    Role,
    Session,
)
from hypercache_protocol.codecs.json_lines import encode_reply, encode_request
from hypercache_protocol.messages import (
    ChunkLocation,
    CommittedReply,
    CommitWrite,
    ErrorReply,
    GetStatus,
    HitReply,
    Locate,
    MissReply,
    Ping,
    PongReply,
    Reply,
    Request,
    StatusReply,
)
from hypercache_protocol.testing import (
    Cut,
    SessionPair,
    byte_by_byte,
    cut_at,
    events,
    exchanges,
    requests,
    whole,
)
from hypercache_protocol.versions import WireVersion

CUTS = st.just(whole) | st.just(byte_by_byte) | st.lists(st.integers(0, 1 << 16)).map(cut_at)
SMALL = Limits(max_request_bytes=64, max_reply_bytes=256)
LOCATE = Locate(uri="a")


def asked(*requests: Request, **options: Any) -> Session:
    """A client that has sent `requests`."""
    client = Session(Role.CLIENT, **options)
    for request in requests:
        client.send_request(request)
    return client


# -- cutting -------------------------------------------------------------------------------------------

GARBAGE = st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"") + b"\n")


@given(st.lists(requests().map(encode_request) | GARBAGE), st.binary(max_size=9), CUTS)
def test_a_daemon_makes_the_same_events_however_the_requests_were_cut(
    lines: list[bytes], tail: bytes, cut: Cut
) -> None:
    data = b"".join(lines) + tail.replace(b"\n", b"")
    expected = events(Session(Role.DAEMON), data, whole)
    assert len(expected) == len(lines)
    assert events(Session(Role.DAEMON), data, cut) == expected


@given(st.lists(exchanges(), max_size=4), st.binary(max_size=9), CUTS)
def test_a_client_makes_the_same_events_however_the_replies_were_cut(
    exchanges: list[tuple[Request, Reply]], tail: bytes, cut: Cut
) -> None:
    sent = [request for request, _ in exchanges]
    data = b"".join(encode_reply(reply) for _, reply in exchanges) + tail.replace(b"\n", b"")
    expected = [ReplyReceived(number, reply) for number, (_, reply) in enumerate(exchanges, 1)]
    assert events(asked(*sent), data, cut) == expected


@pytest.mark.parametrize("first", [encode_request(LOCATE), b"not json\n"])
def test_two_requests_split_at_every_place_are_the_same_two(first: bytes) -> None:
    data = first + encode_request(Ping())
    expected = events(Session(Role.DAEMON), data, whole)
    assert len(expected) == 2
    for at in range(len(data) + 1):
        assert events(Session(Role.DAEMON), data, cut_at([at])) == expected


@given(st.lists(exchanges(), max_size=4), CUTS, CUTS)
def test_pipelined_requests_are_answered_in_their_order(
    exchanges: list[tuple[Request, Reply]], cut_there: Cut, cut_back: Cut
) -> None:
    pair = SessionPair(cut=cut_there)
    asked = pair.ask(*(request for request, _ in exchanges))
    assert asked == [RequestReceived(number, request) for number, (request, _) in enumerate(exchanges, 1)]
    pair = SessionPair(cut=cut_back)
    pair.ask(*(request for request, _ in exchanges))
    answered = pair.answer(*((number, reply) for number, (_, reply) in enumerate(exchanges, 1)))
    assert answered == [ReplyReceived(number, reply) for number, (_, reply) in enumerate(exchanges, 1)]
    assert (pair.client.pending, pair.daemon.pending) == (0, 0)


def test_64_lookups_in_one_piece() -> None:
    pair = SessionPair()
    lookups = [Locate(uri=f"hypercache://{number}", auto_ingest=False) for number in range(64)]
    assert pair.ask(*lookups) == [RequestReceived(number, lookup) for number, lookup in enumerate(lookups, 1)]
    assert pair.client.pending == pair.daemon.pending == 64
    answered = pair.answer(*((number, MissReply()) for number in range(1, 65)))
    assert answered == [ReplyReceived(number, MissReply()) for number in range(1, 65)]


# -- the end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", Role)
def test_before_anything_came_data_is_needed(role: Role) -> None:
    session = Session(role)
    assert session.next_event() is NEED_DATA
    assert repr(NEED_DATA) == "NEED_DATA"


@pytest.mark.parametrize("role", Role)
def test_the_end_is_told_again_and_again(role: Role) -> None:
    session = Session(role)
    session.receive_data(b"")
    assert [session.next_event() for _ in range(3)] == [ConnectionClosed()] * 3


def test_what_came_whole_before_the_end_is_still_told() -> None:
    daemon = Session(Role.DAEMON)
    daemon.receive_data(encode_request(LOCATE) + encode_request(CommitWrite(uri="a"))[:-1])
    daemon.receive_data(b"")
    assert daemon.next_event() == RequestReceived(1, LOCATE)
    # The commit lacks its newline: its sender died while it wrote, and asked for nothing.
    assert daemon.next_event() == ConnectionClosed()


def test_a_client_keeps_what_it_asked_when_the_daemon_goes() -> None:
    client = asked(LOCATE)
    assert events(client, b'{"status":"HI') == []
    client.receive_data(b"")
    assert client.next_event() == ConnectionClosed()
    assert client.pending == 1


# -- a daemon and wrong requests -----------------------------------------------------------------------


def test_a_wrong_request_is_answered_in_its_turn_and_the_next_is_read() -> None:
    daemon = Session(Role.DAEMON)
    data = encode_request(LOCATE) + b'{"action":"fly"}\n' + encode_request(Ping())
    first, second, third = events(daemon, data)
    assert first == RequestReceived(1, LOCATE)
    assert isinstance(second, RequestRejected)
    assert (second.request_id, second.fatal) == (2, False)
    assert second.reply.error_code is ErrorCode.UNKNOWN_ACTION
    assert third == RequestReceived(3, Ping())
    with pytest.raises(LocalProtocolError, match="request 2 is not the next"):
        daemon.send_reply(2, second.reply)
    sent = [
        daemon.send_reply(1, MissReply()),
        daemon.send_reply(2, second.reply),
        daemon.send_reply(3, PongReply()),
    ]
    assert [json.loads(line)["status"] for line in sent] == ["MISS", "ERROR", "PONG"]


def test_a_request_that_is_too_long_is_the_last_that_is_read() -> None:
    daemon = Session(Role.DAEMON, limits=SMALL)
    found = events(daemon, encode_request(Ping()) + b"x" * 65 + b"\n" + encode_request(Ping()))
    assert found[0] == RequestReceived(1, Ping())
    rejected = found[1]
    assert isinstance(rejected, RequestRejected)
    assert (rejected.request_id, rejected.fatal) == (2, True)
    assert rejected.reply.error_code is ErrorCode.TOO_LARGE
    assert "longer than 64 bytes" in rejected.reply.error_message
    assert found[2:] == [ConnectionClosed()]
    assert events(daemon, encode_request(Ping())) == [ConnectionClosed()]
    # What was asked before is still answered, then the refusal; only then is the connection closed.
    assert daemon.send_reply(1, PongReply()) == b'{"status":"PONG"}\n'
    assert json.loads(daemon.send_reply(2, rejected.reply))["error_code"] == "TOO_LARGE"


@pytest.mark.parametrize("cut", [whole, byte_by_byte, cut_at([64]), cut_at([65])])
def test_a_request_of_exactly_the_limit_is_read_and_one_byte_more_is_not(cut: Cut) -> None:
    room = 64 - len(encode_request(Locate(uri="x"))) + 2
    longest = encode_request(Locate(uri="x" * room))
    assert len(longest) == 64 + 1
    assert events(Session(Role.DAEMON, limits=SMALL), longest, cut) == [
        RequestReceived(1, Locate(uri="x" * room))
    ]
    too_long = encode_request(Locate(uri="x" * (room + 1)))
    first, *_ = events(Session(Role.DAEMON, limits=SMALL), too_long, cut)
    assert isinstance(first, RequestRejected)
    assert first.fatal


def test_a_client_sends_a_request_of_exactly_the_limit_and_no_longer_one() -> None:
    room = 64 - len(encode_request(Locate(uri="x"))) + 2
    client = Session(Role.CLIENT, limits=SMALL)
    assert len(client.send_request(Locate(uri="x" * room))[1]) == 64 + 1
    with pytest.raises(
        LocalProtocolError, match="locate: 65 bytes are more than one message may have \\(64\\)"
    ):
        client.send_request(Locate(uri="x" * (room + 1)))
    assert client.pending == 1


def test_after_a_fatal_event_no_memory_grows() -> None:
    daemon = Session(Role.DAEMON, limits=SMALL)
    events(daemon, b"x" * 65)
    tracemalloc.start()
    try:
        for _ in range(1000):
            daemon.receive_data(b"x" * 10_000)
            assert daemon.next_event() == ConnectionClosed()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 20_000
    assert daemon.pending == 1


# -- a client and wrong replies ------------------------------------------------------------------------

BAD_REPLIES = {
    "not json": b"oops\n",
    "no object": b"[]\n",
    "no status": b"{}\n",
    "missing field": b'{"status":"HIT"}\n',
    "too long": b"x" * 257,
}


@pytest.mark.parametrize("data", BAD_REPLIES.values(), ids=BAD_REPLIES.keys())
def test_a_client_gives_the_connection_up_over_a_wrong_reply(data: bytes) -> None:
    client = asked(LOCATE, LOCATE, limits=SMALL)
    client.receive_data(data + encode_reply(MissReply()))
    with pytest.raises(RemoteProtocolError):
        client.next_event()
    # The second reply might be the answer to the first request: no more is read.
    assert client.next_event() == ConnectionClosed()
    assert events(client, encode_reply(MissReply())) == [ConnectionClosed()]


def test_a_reply_that_nobody_asked_for_is_never_taken_for_the_next_one_s() -> None:
    client = asked(LOCATE)
    client.receive_data(encode_reply(MissReply()) * 2)
    assert client.next_event() == ReplyReceived(1, MissReply())
    with pytest.raises(RemoteProtocolError, match="a reply that nobody asked for"):
        client.next_event()
    client.send_request(LOCATE)
    assert client.next_event() == ConnectionClosed()


def test_an_error_reply_answers_its_own_request_only() -> None:
    client = asked(LOCATE, Ping())
    found = events(client, encode_reply(ErrorReply(error_message="no")) + encode_reply(PongReply()))
    assert found == [ReplyReceived(1, ErrorReply(error_message="no")), ReplyReceived(2, PongReply())]


# -- sending replies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", [2, 3, -1, 0, 8])
def test_replies_out_of_order_are_refused_and_nothing_is_lost(request_id: int) -> None:
    pair = SessionPair()
    pair.ask(LOCATE, LOCATE, LOCATE)
    with pytest.raises(LocalProtocolError, match=f"request {request_id} is not the next to be answered"):
        pair.daemon.send_reply(request_id, MissReply())
    assert pair.answer((1, MissReply())) == [ReplyReceived(1, MissReply())]


@pytest.mark.parametrize("wrong", [1, Locate, MissReply(), None, Request()], ids=repr)
def test_what_is_no_request_is_told_in_a_sentence_and_nothing_is_asked(wrong: Any) -> None:
    pair = SessionPair()
    with pytest.raises(TypeError, match=r"give a request such as Ping\(\), of hypercache_protocol, not "):
        pair.client.send_request(wrong)
    assert pair.client.pending == 0


@pytest.mark.parametrize("wrong", [1, MissReply, LOCATE, None, Reply()], ids=repr)
def test_what_is_no_reply_is_told_in_a_sentence_and_its_request_is_still_to_be_answered(wrong: Any) -> None:
    pair = SessionPair()
    pair.ask(LOCATE)
    with pytest.raises(TypeError, match=r"give a reply such as PongReply\(\), of hypercache_protocol, not "):
        pair.daemon.send_reply(1, wrong)
    assert pair.answer((1, MissReply())) == [ReplyReceived(1, MissReply())]


def test_a_reply_is_sent_once_and_not_unasked() -> None:
    pair = SessionPair()
    with pytest.raises(LocalProtocolError):
        pair.daemon.send_reply(1, MissReply())
    pair.ask(LOCATE)
    pair.answer((1, MissReply()))
    with pytest.raises(LocalProtocolError):
        pair.daemon.send_reply(1, MissReply())


@pytest.mark.parametrize(
    "reply", [StatusReply(long="x" * 257), StatusReply(bad="\ud800")], ids=["long", "not json"]
)
def test_a_reply_that_cannot_be_sent_leaves_its_request_to_be_answered(reply: Reply) -> None:
    pair = SessionPair(limits=SMALL)
    pair.ask(GetStatus())
    with pytest.raises(LocalProtocolError):
        pair.daemon.send_reply(1, reply)
    error = ErrorReply(error_message="no")
    assert pair.answer((1, error)) == [ReplyReceived(1, error)]


# -- versions ------------------------------------------------------------------------------------------

HIT = HitReply(
    object_size=1,
    chunk_layout=(ChunkLocation(device="d", offset=0, length=1, checksum=5),),
    sync_status="COMMITTED",
    generation=1,
)


@given(exchanges(WIRE_1_0), st.sampled_from([(WIRE_1_0, (1, 1)), ((1, 1), WIRE_1_0), (WIRE_1_0, WIRE_1_0)]))
def test_what_both_versions_have_passes_between_them(
    exchange: tuple[Request, Reply], versions: tuple[WireVersion, WireVersion]
) -> None:
    pair = SessionPair(client_version=versions[0], daemon_version=versions[1])
    assert pair.exchange(*exchange) == exchange
    assert (pair.client.unknown_fields, pair.daemon.unknown_fields) == (0, 0)


def test_a_new_client_and_an_old_daemon() -> None:
    pair = SessionPair(daemon_version=WIRE_1_0)
    seen, reply = pair.exchange(
        CommitWrite(uri="a", chunk_checksums=(1, 2), stage_id="s", local_only=True),
        CommittedReply(object_size=1, sync_status="COMMITTED", generation=4),
    )
    assert seen == CommitWrite(uri="a")
    assert pair.daemon.unknown_fields == 3
    assert reply == CommittedReply(object_size=1, sync_status="COMMITTED")


def test_an_old_client_and_a_new_daemon() -> None:
    pair = SessionPair(client_version=WIRE_1_0)
    _, reply = pair.exchange(LOCATE, HIT)
    assert isinstance(reply, HitReply)
    assert (reply.sync_status, reply.generation, reply.chunk_layout[0].checksum) == (None, None, None)
    assert pair.client.unknown_fields == 3


def test_a_client_held_to_1_0_cannot_ask_for_what_its_daemon_would_ignore() -> None:
    pair = SessionPair(client_version=WIRE_1_0)
    with pytest.raises(LocalProtocolError, match=r"local_only needs wire 1\.1"):
        pair.ask(CommitWrite(uri="a", local_only=True))
    with pytest.raises(LocalProtocolError, match=r"stage_id needs wire 1\.1"):
        pair.ask(CommitWrite(uri="a", stage_id="s"))
    assert pair.client.pending == 0
    (event,) = pair.ask(CommitWrite(uri="a", chunk_checksums=(1,)))
    assert event == RequestReceived(1, CommitWrite(uri="a"))
    assert pair.daemon.unknown_fields == 0
