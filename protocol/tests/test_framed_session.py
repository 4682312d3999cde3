"""A connection on wire 2: ids, replies in any order, what is dropped, and how it ends."""

import struct
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache_protocol import (
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
from hypercache_protocol.batches import LocatedMany, LocateMany
from hypercache_protocol.codecs.msgpack_frames import MAX_ID, encode_reply, encode_request
from hypercache_protocol.messages import (
    ErrorReply,
    GetStatus,
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
    greased_frame,
    requests,
    unknown_fields,
    whole,
)
from hypercache_protocol.versions import LATEST

LOCATE = Locate(uri="a")
CUTS = st.just(whole) | st.just(byte_by_byte) | st.lists(st.integers(0, 1 << 16)).map(cut_at)
SMALL = Limits(max_request_bytes=400, max_reply_bytes=400)


def framed_pair(**options: Any) -> SessionPair:
    """Two sessions that have gone on to frames; the client's next request has the id 2."""
    pair = SessionPair(**options)
    pair.greet()
    assert pair.client.is_framed
    return pair


def framed_daemon(**options: Any) -> Session:
    return framed_pair(**options).daemon


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


# -- in order and out of it ----------------------------------------------------------------------------


@given(st.lists(exchanges(framed=True), min_size=1, max_size=5), st.randoms(), CUTS)
def test_replies_in_any_order_find_their_requests(
    exchanges: list[tuple[Request, Reply]], random: Any, cut: Cut
) -> None:
    pair = framed_pair()
    pair._cut = cut
    asked = pair.ask(*(request for request, _ in exchanges))
    assert asked == [RequestReceived(number, request) for number, (request, _) in enumerate(exchanges, 2)]
    replies = [(number, reply) for number, (_, reply) in enumerate(exchanges, 2)]
    random.shuffle(replies)
    assert pair.answer(*replies) == [ReplyReceived(number, reply) for number, reply in replies]
    assert (pair.client.pending, pair.daemon.pending) == (0, 0)
    assert (pair.client.unknown_fields, pair.daemon.unknown_fields) == (0, 0)


def test_a_greased_frame_is_whole_and_has_the_fields_in_each_map_that_it_holds() -> None:
    fields = {"limits": {"max_batch": 1}, "layouts": [{"offset": 0}]}
    assert greased_frame(frame(msgpack.packb([7, "HELLO", fields])), {"x": 1}) == frame(
        msgpack.packb(
            [7, "HELLO", {"limits": {"max_batch": 1, "x": 1}, "layouts": [{"offset": 0, "x": 1}], "x": 1}]
        )
    )


@given(exchanges(framed=True), unknown_fields())
def test_unknown_fields_change_nothing_in_frames(
    exchange: tuple[Request, Reply], extra: dict[str, Any]
) -> None:
    request, reply = exchange
    pair = framed_pair()
    pair._alter = lambda data: greased_frame(data, extra)
    seen_request, seen_reply = pair.exchange(request, reply)
    assert seen_request == request
    assert pair.daemon.unknown_fields >= len(extra)
    if not isinstance(reply, StatusReply):  # takes any field
        assert seen_reply == reply
        assert pair.client.unknown_fields >= len(extra)


# No honest peer's: an id in use, no message, and what is not even a frame's body.
ODD_FRAMES = st.sampled_from(
    [
        frame(b"\x93\x09\xa3fly\x80"),
        frame(b"\x93\x09\xa6locate\x80"),
        frame(b"\x93\x00\xa4ping\x80"),
        frame(b"\x93\x02\xa4ping\x80"),
        frame(b""),
        b"\xff\xff\xff\xff",
    ]
)


@given(
    st.lists(st.tuples(st.integers(2, 5), requests(framed=True)) | ODD_FRAMES), st.binary(max_size=3), CUTS
)
def test_a_daemon_makes_the_same_events_however_the_frames_were_cut(
    parts: list[tuple[int, Request] | bytes], tail: bytes, cut: Cut
) -> None:
    data = b"".join(part if isinstance(part, bytes) else encode_request(*part, LATEST) for part in parts)
    expected = events(framed_daemon(), data + tail, whole)
    assert events(framed_daemon(), data + tail, cut) == expected


def test_a_single_frame_cut_at_every_place_is_the_same_frame() -> None:
    many = LocateMany(prefix="hypercache://", suffixes=("a", "b"), layouts=True)
    data = encode_request(2, many, LATEST) + encode_request(3, Ping(), LATEST)
    expected = [RequestReceived(2, many), RequestReceived(3, Ping())]
    for at in range(len(data) + 1):
        assert events(framed_daemon(), data, cut_at([at])) == expected
    assert events(framed_daemon(), data, byte_by_byte) == expected


def test_an_id_may_be_used_again_once_it_is_answered() -> None:
    daemon = framed_daemon()
    for _ in range(2):
        assert events(daemon, encode_request(MAX_ID, LOCATE, LATEST)) == [RequestReceived(MAX_ID, LOCATE)]
        assert daemon.send_reply(MAX_ID, MissReply()) == encode_reply(MAX_ID, MissReply(), LATEST)
    assert daemon.pending == 0


def test_a_wrong_request_fails_alone_and_out_of_turn() -> None:
    daemon = framed_daemon()
    found = events(
        daemon,
        encode_request(5, LOCATE, LATEST)
        + frame(b"\x93\x06\xa3fly\x80")
        + frame(b"\x93\x07\xa6locate\x80")
        + encode_request(8, Ping(), LATEST),
    )
    first, second, third, last = found
    assert (first, last) == (RequestReceived(5, LOCATE), RequestReceived(8, Ping()))
    assert isinstance(second, RequestRejected)
    assert isinstance(third, RequestRejected)
    assert (second.request_id, second.fatal, second.reply.error_code) == (6, False, ErrorCode.UNKNOWN_ACTION)
    assert (third.request_id, third.fatal, third.reply.error_code) == (7, False, ErrorCode.BAD_REQUEST)
    # The refusals need not wait for the request before them.
    daemon.send_reply(7, third.reply)
    daemon.send_reply(6, second.reply)
    daemon.send_reply(8, PongReply())
    daemon.send_reply(5, MissReply())
    assert daemon.pending == 0


# -- ids that are wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", [0, 5])
def test_an_id_in_use_and_the_id_of_nobody_end_the_connection(request_id: int) -> None:
    daemon = framed_daemon()
    open_, rejected, closed = events(
        daemon, encode_request(5, LOCATE, LATEST) + encode_request(request_id, Ping(), LATEST)
    )
    assert open_ == RequestReceived(5, LOCATE)
    assert isinstance(rejected, RequestRejected)
    assert (rejected.request_id, rejected.fatal) == (0, True)
    assert f"the request id {request_id} is in use" in rejected.reply.error_message
    assert closed == ConnectionClosed()
    # What was asked before is still answered, and the last words too.
    assert daemon.send_reply(5, MissReply())
    assert daemon.send_reply(0, rejected.reply)
    assert daemon.pending == 0
    assert events(daemon, encode_request(6, Ping(), LATEST)) == [ConnectionClosed()]


def test_an_id_of_a_refused_request_is_in_use_until_that_is_answered() -> None:
    daemon = framed_daemon()
    wrong = frame(b"\x93\x05\xa3fly\x80")
    (rejected,) = events(daemon, wrong)
    assert isinstance(rejected, RequestRejected)
    daemon.send_reply(5, rejected.reply)
    (again, *_) = events(daemon, wrong)
    assert again == rejected
    fatal, _ = events(daemon, wrong)
    assert isinstance(fatal, RequestRejected)
    assert fatal.fatal


@pytest.mark.parametrize("request_id", [0, 3, -1])
def test_a_daemon_answers_no_id_that_is_not_open(request_id: int) -> None:
    pair = framed_pair()
    pair.ask(LOCATE)
    with pytest.raises(LocalProtocolError, match=f"request {request_id} is not the next"):
        pair.daemon.send_reply(request_id, MissReply())
    assert pair.answer((2, MissReply())) == [ReplyReceived(2, MissReply())]
    with pytest.raises(LocalProtocolError):
        pair.daemon.send_reply(2, MissReply())


# -- replies that nobody waits for ---------------------------------------------------------------------


def test_a_reply_that_was_given_up_is_dropped_and_counted_and_never_the_next_one_s() -> None:
    pair = framed_pair()
    pair.ask(LOCATE, LOCATE)
    pair.client.give_up(2)
    assert pair.client.pending == 1
    (late,) = pair.ask(LOCATE)
    assert late == RequestReceived(4, LOCATE)
    assert pair.answer((2, ErrorReply(error_message="late"))) == []
    assert pair.client.dropped_replies == 1
    assert pair.answer((4, MissReply()), (3, MissReply())) == [
        ReplyReceived(4, MissReply()),
        ReplyReceived(3, MissReply()),
    ]
    assert pair.client.dropped_replies == 1
    pair.client.give_up(3)  # answered already: nothing to give up
    pair.client.give_up(99)


@pytest.mark.parametrize(
    "data",
    [encode_reply(99, MissReply(), LATEST), frame(b"\x93\x63\xa7NEWWORD\x81\xa1x\x01")],
    ids=["a miss", "no known reply"],
)
def test_a_reply_to_no_request_is_dropped_whatever_it_is(data: bytes) -> None:
    client = framed_pair().client
    assert events(client, data * 3) == []
    assert client.dropped_replies == 3


def test_on_wire_1_nothing_is_given_up() -> None:
    client = Session(Role.CLIENT)
    client.send_request(LOCATE)
    with pytest.raises(LocalProtocolError, match="cannot be given up on wire 1; close the connection"):
        client.give_up(1)
    assert client.pending == 1


# -- replies that end it -------------------------------------------------------------------------------


def test_a_reply_to_nobody_is_the_daemon_s_last_word() -> None:
    client = framed_pair().client
    client.send_request(LOCATE)
    reply = ErrorReply(error_message="too long", error_code=ErrorCode.TOO_LARGE)
    client.receive_data(encode_reply(0, reply, LATEST) + encode_reply(2, MissReply(), LATEST))
    with pytest.raises(RemoteProtocolError, match=r"^the daemon ends the connection: too long$"):
        client.next_event()
    assert client.next_event() == ConnectionClosed()
    assert client.pending == 1


def test_long_last_words_are_cut() -> None:
    client = framed_pair().client
    client.receive_data(encode_reply(0, ErrorReply(error_message="x" * 100_000), LATEST))
    with pytest.raises(RemoteProtocolError) as caught:
        client.next_event()
    assert len(str(caught.value)) == 500


BAD_REPLIES = {
    "no body": frame(b""),
    "no envelope": frame(b"\xc0"),
    "missing field": frame(b"\x93\x02\xa3HIT\x80"),
    "wrong type": frame(b"\x93\x02\xa3HIT\x82\xabobject_size\xa11\xacchunk_layout\x90"),
    "too long": struct.pack(">I", 401),
}


@pytest.mark.parametrize("data", BAD_REPLIES.values(), ids=BAD_REPLIES.keys())
def test_a_client_gives_the_connection_up_over_a_wrong_reply(data: bytes) -> None:
    client = framed_pair(limits=SMALL).client
    client.send_request(LOCATE)
    client.send_request(LOCATE)
    client.receive_data(data + encode_reply(3, MissReply(), LATEST))
    with pytest.raises(RemoteProtocolError):
        client.next_event()
    assert client.next_event() == ConnectionClosed()


def test_an_unknown_status_is_an_error_reply_to_its_own_request() -> None:
    client = framed_pair().client
    client.send_request(LOCATE)
    client.send_request(LOCATE)
    (event,) = events(client, frame(b"\x93\x03\xa7NEWWORD\x80"))
    assert isinstance(event, ReplyReceived)
    assert event.request_id == 3
    assert event.reply == ErrorReply(error_message="the daemon answered locate with 'NEWWORD' and no reason")
    assert client.pending == 1


# -- limits --------------------------------------------------------------------------------------------


def test_what_is_too_long_or_cannot_be_written_leaves_its_request_open() -> None:
    pair = framed_pair(limits=SMALL)
    with pytest.raises(
        LocalProtocolError, match=r"locate: \d+ bytes are more than one message may have \(400\)"
    ):
        pair.client.send_request(Locate(uri="x" * 400))
    assert pair.client.pending == 0
    pair.ask(GetStatus())
    for reply in (StatusReply(long="x" * 400), StatusReply(bad=object())):
        with pytest.raises(LocalProtocolError):
            pair.daemon.send_reply(2, reply)
    error = ErrorReply(error_message="no")
    assert pair.answer((2, error)) == [ReplyReceived(2, error)]


def test_whatever_a_side_sends_the_other_s_equal_limit_lets_pass() -> None:
    sent = 0
    for length in range(350, 400):
        pair = framed_pair(limits=SMALL)
        try:
            _, data = pair.client.send_request(Locate(uri="x" * length))
        except LocalProtocolError:
            break
        assert events(pair.daemon, data) == [RequestReceived(2, Locate(uri="x" * length))]
        sent += 1
    assert 0 < sent < 50


@given(st.binary(max_size=200), CUTS)
def test_no_bytes_make_a_session_raise_anything_but_its_own_errors(data: bytes, cut: Cut) -> None:
    events(framed_daemon(), data, cut)
    client = framed_pair().client
    client.send_request(LocateMany(suffixes=("a",)))
    with suppress(RemoteProtocolError):
        events(client, data, cut)


def test_a_reply_with_a_wrong_bitmap_is_still_a_reply() -> None:
    # Only who asked knows how many bits there must be; layout.py refuses it there.
    pair = framed_pair()
    reply = LocatedMany(present=b"\xff\xff", verifiable=b"")
    assert pair.exchange(LocateMany(suffixes=("a",)), reply)[1] == reply
