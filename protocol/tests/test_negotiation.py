"""Hello: which wire two sides go on in, and the byte at which they do."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache_protocol import (
    NEED_DATA,
    WIRE_1_0,
    WIRE_1_1,
    WIRE_2_0,
    WIRE_2_1,
    ConnectionClosed,
    ErrorCode,
    LocalProtocolError,
    RemoteProtocolError,
    ReplyReceived,
    RequestReceived,
    RequestRejected,
    Role,
    Session,
)
from hypercache_protocol.batches import EvictMany, Hello, LocateMany
from hypercache_protocol.codecs.json_lines import decode_request, encode_reply, encode_request
from hypercache_protocol.codecs.msgpack_frames import encode_reply as framed_reply
from hypercache_protocol.codecs.msgpack_frames import encode_request as framed_request
from hypercache_protocol.messages import ErrorReply, Locate, MissReply, Ping, PongReply, Reply
from hypercache_protocol.negotiation import choose, parsed, spoken, unknown_words
from hypercache_protocol.testing import (
    Cut,
    SessionPair,
    byte_by_byte,
    cut_at,
    events,
    messages_of,
    welcome,
    whole,
)
from hypercache_protocol.versions import LATEST, RELEASED, WireVersion

HELLO = Hello(versions=tuple(map(str, RELEASED)))
LOCATE = Locate(uri="a")
CUTS = st.just(whole) | st.just(byte_by_byte) | st.lists(st.integers(0, 1 << 12)).map(cut_at)

# -- choosing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "version"),
    [
        ("2.0", (2, 0)),
        ("10.11", (10, 11)),
        ("0.0", (0, 0)),
        ("2", None),
        ("2.", None),
        (".0", None),
        ("", None),
        (".", None),
        ("two", None),
        ("2.0.1", None),
        ("-2.0", None),
        ("+2.0", None),
        (" 2.0", None),
        ("2.0\n", None),
        ("²٫٠", None),
        ("².0", None),
        ("2.٠", None),
        ("0x2.0", None),
        ("1e1.0", None),
        ("1_0.0", None),
    ],
)
def test_a_version_is_two_plain_numbers(word: str, version: tuple[int, int] | None) -> None:
    assert parsed(word) == version


@pytest.mark.parametrize(
    ("wanted", "most", "chosen"),
    [
        # The best that both name.
        (("1.0", "1.1", "2.0"), WIRE_2_0, WIRE_2_0),
        (("2.0", "1.0"), WIRE_2_0, WIRE_2_0),
        (("1.0", "1.1"), WIRE_2_0, WIRE_1_1),
        (("1.0", "1.1", "2.0", "2.1"), WIRE_2_1, WIRE_2_1),
        (("1.0", "1.1", "2.0"), WIRE_2_1, WIRE_2_0),
        (("1.0", "1.1", "2.0", "2.1"), WIRE_2_0, WIRE_2_0),
        (("1.0",), WIRE_2_0, WIRE_1_0),
        (("1.0", "2.0"), WIRE_1_1, WIRE_1_0),
        # A future client that names ours too.
        (("2.0", "2.1", "3.0"), WIRE_2_0, WIRE_2_0),
        (("1.1", "3.0"), WIRE_2_0, WIRE_1_1),
        # A future client that names none of ours gets the best below its own.
        (("2.7",), WIRE_2_0, WIRE_2_0),
        (("2.7",), WIRE_2_1, WIRE_2_1),
        (("3.0", "99.99"), WIRE_2_0, WIRE_2_0),
        (("1.9",), WIRE_2_0, WIRE_1_1),
        (("9.9",), WIRE_1_1, WIRE_1_1),
        (("2.0",), WIRE_1_0, WIRE_1_0),
        # Nothing that could be understood: the first wire, which everyone has.
        ((), WIRE_2_0, WIRE_1_0),
        (("", "two", "2", "2.0.0"), WIRE_2_0, WIRE_1_0),
        (("0.9",), WIRE_2_0, WIRE_1_0),
        # Nonsense beside a version changes nothing.
        (("two", "2.0", ""), WIRE_2_0, WIRE_2_0),
        (("two", "1.1"), WIRE_2_0, WIRE_1_1),
    ],
)
def test_the_best_wire_for_both_is_chosen(
    wanted: tuple[str, ...], most: WireVersion, chosen: WireVersion
) -> None:
    assert choose(wanted, most) == chosen


@given(
    st.lists(st.text(max_size=5) | st.sampled_from(["1.0", "1.1", "2.0", "3.1"])), st.sampled_from(RELEASED)
)
def test_whatever_is_asked_a_released_wire_up_to_the_pin_is_chosen(
    wanted: list[str], most: WireVersion
) -> None:
    chosen = choose(wanted, most)
    assert chosen in RELEASED
    assert chosen <= most
    assert choose(reversed(wanted), most) == chosen


def test_what_is_unknown_is_told_as_it_was_written() -> None:
    asked = ("1.0", "2.0", "2.7", "two", "02.0"), ("frames", "batches", "teleport", "local_only")
    assert unknown_words(*asked, WIRE_2_0) == ("2.7", "two", "02.0", "teleport")
    assert unknown_words(*asked, WIRE_1_1) == ("2.0", "2.7", "two", "02.0", "frames", "batches", "teleport")
    assert unknown_words((), (), WIRE_2_0) == ()


def test_a_side_names_every_version_up_to_its_pin() -> None:
    assert spoken(WIRE_1_0) == ("1.0",)
    assert spoken(WIRE_1_1) == ("1.0", "1.1")
    assert spoken(WIRE_2_0) == ("1.0", "1.1", "2.0")


# -- the words on the wire -----------------------------------------------------------------------------


def test_hello_and_its_answer_are_these_lines_for_ever() -> None:
    hello = Hello(versions=("1.0", "2.0"), features=("frames",), name="n", version="0.1")
    line = b'{"action":"hello","versions":["1.0","2.0"],"features":["frames"],"name":"n","version":"0.1"}\n'
    assert encode_request(hello) == line
    reply = welcome("2.0", features=("frames",), devices=("/dev/a",), daemon="d", unknown=("3.0",))
    assert encode_reply(reply) == (
        b'{"status":"HELLO","version":"2.0","versions":["2.0"],"features":["frames"],'
        b'"limits":{"max_request_bytes":1048576,"max_reply_bytes":67108864,"max_in_flight":64,'
        b'"max_batch":4096},"devices":["/dev/a"],"instance_id":"1","daemon":"d","unknown":["3.0"]}\n'
    )


@given(messages_of(Hello))
def test_a_hello_comes_back_as_it_went(hello: Hello) -> None:
    assert decode_request(encode_request(hello)) == (hello, 0)


def test_a_hello_of_the_future_is_read_and_its_new_fields_are_counted() -> None:
    line = b'{"action":"hello","versions":["9.9"],"features":["teleport"],"shoe_size":43}\n'
    daemon = Session(Role.DAEMON)
    assert events(daemon, line) == [RequestReceived(1, Hello(versions=("9.9",), features=("teleport",)))]
    assert daemon.unknown_fields == 1


@pytest.mark.parametrize("version", [WIRE_1_0, WIRE_1_1], ids=str)
def test_to_a_daemon_held_to_wire_1_hello_is_an_unknown_action(version: WireVersion) -> None:
    pair = SessionPair(daemon_version=version)
    (rejected,) = pair.ask(HELLO)
    assert isinstance(rejected, RequestRejected)
    assert (rejected.fatal, rejected.reply.error_code) == (False, ErrorCode.UNKNOWN_ACTION)
    assert "'hello'" in rejected.reply.error_message
    assert "hello" not in rejected.reply.error_message.partition("known are")[2]
    # The connection lives, and goes on in lines.
    (answered,) = pair.answer((1, rejected.reply))
    assert isinstance(answered, ReplyReceived)
    assert isinstance(answered.reply, ErrorReply)
    assert answered.reply.error_message == rejected.reply.error_message
    assert pair.exchange(LOCATE, MissReply()) == (LOCATE, MissReply())
    assert not pair.client.is_framed
    assert not pair.daemon.is_framed


@pytest.mark.parametrize(
    "hello",
    [
        {"versions": "2.0"},
        {"versions": [2.0]},
        {"versions": ["x" * 17]},
        {"versions": ["2.0"] * 65},
        {"versions": ["2.0"], "features": ["x"] * 257},
        {"features": []},
    ],
)
def test_a_wrong_hello_is_refused_and_changes_nothing(hello: dict[str, object]) -> None:
    daemon = Session(Role.DAEMON)
    line = json.dumps({"action": "hello", **hello}).encode() + b"\n"
    rejected, ping = events(daemon, line + encode_request(Ping()))
    assert isinstance(rejected, RequestRejected)
    assert rejected.reply.error_message.startswith("hello: ")
    assert ping == RequestReceived(2, Ping())
    assert not daemon.is_framed


# -- switching -----------------------------------------------------------------------------------------


def test_after_a_welcome_to_wire_2_both_sides_speak_frames() -> None:
    pair = SessionPair()
    assert pair.greet().version == str(LATEST)
    assert pair.client.is_framed
    assert pair.daemon.is_framed
    many = LocateMany(prefix="a", suffixes=("b", "c"))
    assert pair.client.send_request(many) == (2, framed_request(2, many, WIRE_2_0))


@pytest.mark.parametrize(("client", "daemon"), [(WIRE_1_1, WIRE_2_0), (WIRE_1_0, WIRE_2_0)])
def test_after_a_welcome_to_wire_1_both_sides_go_on_in_lines(
    client: WireVersion, daemon: WireVersion
) -> None:
    pair = SessionPair(client_version=client, daemon_version=daemon)
    assert pair.greet().version == str(client)
    assert not pair.client.is_framed
    assert not pair.daemon.is_framed
    assert pair.exchange(LOCATE, MissReply()) == (LOCATE, MissReply())
    with pytest.raises(LocalProtocolError, match=r"evict_many needs wire 2"):
        pair.ask(EvictMany(suffixes=("a",)))
    assert pair.greet().version == str(client)  # and it may be asked again


def test_an_error_for_an_answer_leaves_both_sides_on_lines() -> None:
    pair = SessionPair()
    pair.ask(HELLO)
    pair.answer((1, ErrorReply(error_message="not now")))
    assert not pair.client.is_framed
    assert not pair.daemon.is_framed
    assert pair.exchange(LOCATE, MissReply()) == (LOCATE, MissReply())


@given(CUTS)
def test_replies_in_the_same_piece_as_the_welcome_are_read_as_frames(cut: Cut) -> None:
    client = Session(Role.CLIENT)
    client.send_request(Ping())
    client.send_request(HELLO)
    # A dropped reply behind the welcome: the daemon may send frames from the next byte on.
    data = encode_reply(PongReply()) + encode_reply(welcome("2.0")) + framed_reply(9, MissReply(), WIRE_2_0)
    assert events(client, data, cut) == [ReplyReceived(1, PongReply()), ReplyReceived(2, welcome("2.0"))]
    assert client.dropped_replies == 1
    assert not client.has_unread_bytes


@pytest.mark.parametrize("version", ["2.0", "1.1"])
@pytest.mark.parametrize("at", [0, 1, 5, 1000])
def test_a_daemon_leaves_what_follows_a_hello_unread_until_it_has_answered(version: str, at: int) -> None:
    daemon = Session(Role.DAEMON)
    hello = encode_request(HELLO)
    after = framed_request(7, LOCATE, WIRE_2_0) if version == "2.0" else encode_request(LOCATE)
    assert events(daemon, encode_request(Ping()) + hello + after[:at]) == [
        RequestReceived(1, Ping()),
        RequestReceived(2, HELLO),
    ]
    assert events(daemon, after[at:]) == []
    assert daemon.has_unread_bytes
    assert daemon.next_event() is NEED_DATA
    daemon.send_reply(1, PongReply())
    assert daemon.next_event() is NEED_DATA
    daemon.send_reply(2, welcome(version))
    assert daemon.next_event() == RequestReceived(7 if version == "2.0" else 3, LOCATE)
    assert daemon.next_event() is NEED_DATA


def test_a_client_sends_nothing_between_its_hello_and_the_answer() -> None:
    pair = SessionPair()
    pair.ask(HELLO)
    for request in (Ping(), HELLO):
        with pytest.raises(LocalProtocolError, match="the hello before it is not answered yet"):
            pair.client.send_request(request)
    assert pair.client.pending == 1
    pair.answer((1, welcome("2.0")))
    assert pair.exchange(LOCATE, MissReply()) == (LOCATE, MissReply())


@pytest.mark.parametrize("version", ["3.0", "2.99", "99.99", "", "two", "2"])
def test_a_client_does_not_go_on_in_a_wire_that_it_does_not_speak(version: str) -> None:
    client = Session(Role.CLIENT)
    client.send_request(HELLO)
    client.receive_data(encode_reply(welcome(version)))
    with pytest.raises(RemoteProtocolError, match=f"the daemon goes on in wire '{version}' and this side"):
        client.next_event()
    assert client.next_event() == ConnectionClosed()
    assert not client.is_framed


def test_a_client_held_to_wire_1_is_not_led_on_to_frames() -> None:
    client = Session(Role.CLIENT, version=WIRE_1_1)
    client.send_request(HELLO)
    client.receive_data(encode_reply(welcome("2.0")))
    with pytest.raises(RemoteProtocolError, match=r"goes on in wire '2\.0' and this side speaks up to 1\.1"):
        client.next_event()


STRANGE: dict[str, Reply | bytes] = {
    "a pong": PongReply(),
    "a miss": MissReply(),
    "an ok": b'{"status":"OK"}\n',
    "another wording": b'{"status":"error","message":"Unknown command"}\n',
}


@pytest.mark.parametrize("answer", STRANGE.values(), ids=STRANGE.keys())
def test_a_strange_answer_to_a_hello_is_an_error_reply_and_no_welcome(answer: Reply | bytes) -> None:
    client = Session(Role.CLIENT)
    client.send_request(HELLO)
    (event,) = events(client, answer if isinstance(answer, bytes) else encode_reply(answer))
    assert isinstance(event, ReplyReceived)
    assert isinstance(event.reply, ErrorReply)
    assert not client.is_framed
    assert client.send_request(Ping()) == (2, encode_request(Ping()))


def test_a_welcome_to_something_else_changes_nothing() -> None:
    client = Session(Role.CLIENT)
    client.send_request(Ping())
    (event,) = events(client, encode_reply(welcome("2.0")))
    assert isinstance(event, ReplyReceived)
    assert isinstance(event.reply, ErrorReply)
    assert not client.is_framed
