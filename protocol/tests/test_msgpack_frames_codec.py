"""Frames: what goes in comes out, every wire 1 action and every batch, on both of msgpack's unpackers."""

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache_protocol import WIRE_1_1, WIRE_2_1
from hypercache_protocol.actions import actions_in_frames
from hypercache_protocol.batches import FRAMED_REPLIES, GetPresenceTable, Hello, LocatedMany, LocateMany
from hypercache_protocol.codecs.msgpack_frames import (
    MAX_ID,
    FrameReader,
    decode_envelope,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from hypercache_protocol.errors import ErrorCode, InvalidMessage, LocalProtocolError, RemoteProtocolError
from hypercache_protocol.messages import (
    REPLIES,
    CommitWrite,
    GetStatus,
    Locate,
    Ping,
    Reply,
    Request,
    StatusReply,
)
from hypercache_protocol.testing import Cut, byte_by_byte, cut_at, exchanges, messages_of, whole
from hypercache_protocol.versions import LATEST

IDS = st.integers(1, MAX_ID)
FRAMED = [*REPLIES, *FRAMED_REPLIES]


def body_of(frame: bytes) -> bytes:
    """What a frame carries; its length is checked on the way."""
    (length,) = struct.unpack(">I", frame[:4])
    assert length == len(frame) - 4
    return frame[4:]


def frame(*, request_id: object = 1, word: object = "ping", fields: object = None) -> bytes:
    body: bytes = msgpack.packb([request_id, word, {} if fields is None else fields])
    return body


# -- round trips ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", FRAMED, ids=lambda model: model.action)
@given(data=st.data(), request_id=IDS)
def test_every_request_comes_back_as_it_went(
    model: type[Request], data: st.DataObject, request_id: int
) -> None:
    request = data.draw(messages_of(model))
    seen_id, word, fields = decode_envelope(body_of(encode_request(request_id, request, LATEST)))
    assert (seen_id, word) == (request_id, request.action)
    assert decode_request(word, fields, LATEST) == (request, 0)


@given(exchanges(framed=True), IDS)
def test_every_reply_comes_back_as_it_went(exchange: tuple[Request, Reply], request_id: int) -> None:
    request, reply = exchange
    seen_id, word, fields = decode_envelope(body_of(encode_reply(request_id, reply, LATEST)))
    assert (seen_id, word) == (request_id, reply.status)
    decoded, unknown = decode_reply(word, fields, request, LATEST)
    assert (type(decoded), decoded, unknown) == (type(reply), reply, 0)


def test_a_frame_is_its_length_and_a_list_of_id_word_and_fields() -> None:
    assert encode_request(7, Ping(), LATEST) == b"\0\0\0\x08\x93\x07\xa4ping\x80"
    assert encode_request(1, LocateMany(prefix="a", suffixes=("b",)), LATEST) == (
        b"\0\0\0\x2d\x93\x01\xablocate_many\x83\xa6prefix\xa1a\xa8suffixes\x91\xa1b\xa7layouts\xc2"
    )
    # Bitmaps and columns are msgpack's bytes, which no other type is taken for.
    reply = LocatedMany(present=b"\1", verifiable=b"\0")
    assert body_of(encode_reply(1, reply, LATEST)) == (
        b"\x93\x01\xacLOCATED_MANY\x82\xa7present\xc4\x01\x01\xaaverifiable\xc4\x01\x00"
    )


def test_the_version_says_which_actions_a_frame_carries() -> None:
    assert set(actions_in_frames(LATEST).values()) == set(FRAMED)
    assert set(actions_in_frames(WIRE_1_1).values()) == set(REPLIES)
    with pytest.raises(LocalProtocolError, match=r"locate_many cannot be sent in a frame of wire 1\.1"):
        encode_request(1, LocateMany(suffixes=()), WIRE_1_1)
    with pytest.raises(LocalProtocolError, match=r"get_presence_table cannot be sent .* wire 2\.1"):
        encode_request(1, GetPresenceTable(), WIRE_2_1)
    with pytest.raises(LocalProtocolError, match=rf"hello cannot be sent in a frame of wire {LATEST}"):
        encode_request(1, Hello(versions=()), LATEST)


@pytest.mark.parametrize("word", ["hello", "fly", "", "PING"])
def test_an_action_that_frames_do_not_carry_fails_that_request_alone(word: str) -> None:
    with pytest.raises(InvalidMessage, match="unknown action") as caught:
        decode_request(word, {"versions": ["2.0"]}, LATEST)
    assert caught.value.code is ErrorCode.UNKNOWN_ACTION


@pytest.mark.parametrize(
    ("word", "fields", "told"),
    [
        ("locate", {}, "locate: the field 'uri' is missing"),
        ("locate", {"uri": b"a"}, "locate: uri: "),
        ("locate", {"uri": "a", "pinned": 1}, "locate: pinned: "),
        ("locate_many", {"suffixes": ["a"] * 4097}, "locate_many: suffixes: .* at most 4096 items"),
        ("locate_many", {"suffixes": "ab"}, "locate_many: suffixes: must be a list"),
        ("locate_many", {"suffixes": ["a", b"b"]}, r"locate_many: suffixes\[1\]: "),
        ("stage_many", {"suffixes": ["a"], "sizes": [-1]}, r"stage_many: sizes\[0\]: "),
        ("stage_many", {"suffixes": ["a"], "sizes": [0], "tier": "disk"}, "stage_many: tier: "),
        ("commit_many", {"suffixes": ["a"], "stage_ids": [""]}, r"commit_many: stage_ids\[0\]: "),
        ("commit_many", {"suffixes": [], "stage_ids": [], "checksums": "ab"}, "commit_many: checksums: "),
        ("commit_many", {"suffixes": [], "stage_ids": [], "checksums": [1]}, "commit_many: checksums: "),
        ("evict_many", {"suffixes": [None]}, r"evict_many: suffixes\[0\]: "),
    ],
)
def test_a_wrong_field_is_named(word: str, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidMessage, match=told):
        decode_request(word, fields, LATEST)


@pytest.mark.parametrize(
    "fields",
    [
        {"present": b""},
        {"present": b"", "verifiable": ""},
        {"present": [1], "verifiable": b""},
        {"present": b"", "verifiable": b"", "layouts": []},
        {"present": b"", "verifiable": b"", "layouts": {"paths": []}},
    ],
)
def test_a_wrong_reply_is_an_invalid_message(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage, match=r"^the reply to locate_many: "):
        decode_reply("LOCATED_MANY", fields, LocateMany(suffixes=()), LATEST)


@pytest.mark.parametrize("value", [object(), 1 << 64, "\ud800"], ids=["object", "65 bits", "surrogate"])
def test_a_status_reply_that_msgpack_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(LocalProtocolError, match="OK cannot be written as msgpack"):
        encode_reply(1, StatusReply(value=value), LATEST)


def test_a_status_reply_takes_any_map() -> None:
    reply, unknown = decode_reply("OK", {"a": [None, {"b": 1.5}]}, GetStatus(), LATEST)
    assert (reply, unknown) == (StatusReply(a=[None, {"b": 1.5}]), 0)


def test_a_side_held_to_1_0_takes_newer_fields_for_unknown_in_frames_too() -> None:
    fields = {"uri": "a", "local_only": True}
    assert decode_request("commit_write", fields, (1, 0)) == (CommitWrite(uri="a"), 1)


# -- envelopes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", [0, 1, 127, 128, 1 << 32, MAX_ID])
def test_an_id_within_its_bounds_is_read(request_id: int) -> None:
    assert decode_envelope(frame(request_id=request_id)) == (request_id, "ping", {})


@pytest.mark.parametrize(
    "body",
    [
        frame(request_id=-1),
        frame(request_id=MAX_ID + 1),
        frame(request_id=True),
        frame(request_id=1.0),
        frame(request_id="1"),
        frame(request_id=None),
        frame(word=5),
        frame(word=b"ping"),
        frame(fields=[]),
        frame(fields=5),
        msgpack.packb([]),
        msgpack.packb([1, "ping"]),
        msgpack.packb([1, "ping", {}, {}]),
        msgpack.packb({"id": 1}),
        msgpack.packb("ping"),
        msgpack.packb(None),
        msgpack.packb(5),
    ],
    ids=lambda body: body.hex(),
)
def test_a_body_of_another_shape_is_the_end(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=r"^a frame must be the list \[id, word, fields\]$"):
        decode_envelope(body)


# -- cutting -------------------------------------------------------------------------------------------

LIMIT = 16
CUTS = st.just(whole) | st.just(byte_by_byte) | st.lists(st.integers(0, 1 << 16)).map(cut_at)


def headed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def read_all(data: bytes, cut: Cut, limit: int = LIMIT) -> list[bytes | str]:
    """Every body of `data`; `too long` in place of one that is, and nothing after it."""
    reader = FrameReader(limit)
    bodies: list[bytes | str] = []
    for piece in cut(data):
        reader.feed(piece)
        try:
            while (body := reader.next_body()) is not None:
                bodies.append(body)
        except RemoteProtocolError:
            return [*bodies, "too long"]
    return bodies


@given(st.lists(st.binary(max_size=LIMIT + 3)), st.binary(max_size=3), CUTS)
def test_frames_are_the_same_however_the_bytes_were_cut(bodies: list[bytes], tail: bytes, cut: Cut) -> None:
    expected: list[bytes | str] = []
    for body in bodies:
        if len(body) > LIMIT:
            expected.append("too long")
            break
        expected.append(body)
    assert read_all(b"".join(map(headed, bodies)) + tail, cut) == expected


@pytest.mark.parametrize("cut", [whole, byte_by_byte])
def test_a_frame_of_exactly_the_limit_is_read_and_one_byte_more_is_not(cut: Cut) -> None:
    assert read_all(headed(b"x" * LIMIT), cut) == [b"x" * LIMIT]
    assert read_all(headed(b"x" * (LIMIT + 1)), cut) == ["too long"]
    # The length alone is enough to refuse it: nothing of it is waited for.
    assert read_all(struct.pack(">I", LIMIT + 1), cut) == ["too long"]
    assert read_all(struct.pack(">I", LIMIT), cut) == []


def test_the_error_names_the_length_and_the_limit() -> None:
    reader = FrameReader(LIMIT)
    reader.feed(b"\xff\xff\xff\xff")
    with pytest.raises(RemoteProtocolError, match="a frame of 4294967295 bytes is longer than 16") as caught:
        reader.next_body()
    assert caught.value.code is ErrorCode.TOO_LARGE
    assert not reader.has_unread_bytes


def test_a_reader_tells_whether_bytes_are_left() -> None:
    reader = FrameReader(LIMIT)
    assert not reader.has_unread_bytes
    reader.feed(headed(b"abc")[:-1])
    assert reader.next_body() is None
    assert reader.has_unread_bytes
    reader.feed(b"c")
    assert reader.next_body() == b"abc"
    assert not reader.has_unread_bytes


def test_an_old_field_that_may_not_be_dropped_is_refused_in_frames_too() -> None:
    with pytest.raises(LocalProtocolError, match=r"stage_id needs wire 1\.1"):
        encode_request(1, CommitWrite(uri="a", stage_id="s"), (1, 0))
    assert encode_request(1, Locate(uri="a"), WIRE_1_1)
