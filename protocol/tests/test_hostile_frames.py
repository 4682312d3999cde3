"""Frames that no honest peer sends: one error from both of msgpack's unpackers, and bounded memory.

The C unpacker and the pure-Python one (which msgpack falls back to where it has no wheel) are both driven,
whichever of them this machine has by default.
"""

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgpack
import msgpack._cmsgpack
import msgpack.fallback
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hypercache_protocol import ConnectionClosed, ErrorCode, Limits, RequestRejected
from hypercache_protocol.codecs import msgpack_frames
from hypercache_protocol.codecs.msgpack_frames import decode_envelope
from hypercache_protocol.errors import RemoteProtocolError
from hypercache_protocol.fields import MIB
from hypercache_protocol.testing import SessionPair, byte_by_byte, events, whole

UNPACKERS = {"C": msgpack._cmsgpack, "Python": msgpack.fallback}


@contextmanager
def unpacker(name: str) -> Iterator[None]:
    """Have the codec unpack with the C unpacker, or with the pure-Python one."""
    chosen = UNPACKERS[name]
    replacement = SimpleNamespace(
        **{key: value for key, value in vars(msgpack).items() if not key.startswith("_")}
        | {"Unpacker": chosen.Unpacker, "unpackb": chosen.unpackb}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(msgpack_frames, "msgpack", replacement)
        yield


def outcome(name: str, body: bytes) -> Any:
    """What the codec makes of a frame's body with that unpacker: its envelope, or the error's words."""
    with unpacker(name):
        try:
            return decode_envelope(body)
        except RemoteProtocolError as error:
            return type(error), str(error), error.code


def envelope(value: bytes, *, key: bytes = b"\xa1x") -> bytes:
    """The body [1, "ping", {"x": value}], where `key` may replace "x"."""
    return b"\x93\x01\xa4ping\x81" + key + value


LIST_16_OF = b"\xdc"
LIST_32_OF = b"\xdd"
MAP_32_OF = b"\xdf"
MOST_32 = b"\xff\xff\xff\xff"

NOT_WHOLE = {
    "empty": b"",
    "one byte of many": b"\x93",
    "truncated in the word": b"\x93\x01\xa4pin",
    "truncated in the fields": envelope(b"\xa5abcd"),
    "trailing byte": envelope(b"\xc0") + b"\0",
    "two bodies": envelope(b"\xc0") * 2,
    "never used byte": envelope(b"\xc1"),
    "invalid UTF-8": envelope(b"\xa1\xff"),
    "surrogate in UTF-8": envelope(b"\xa3\xed\xa0\x80"),
    "invalid UTF-8 in a key": envelope(b"\xc0", key=b"\xa1\xff"),
    "integer key": envelope(b"\xc0", key=b"\x05"),
    "nil key": envelope(b"\xc0", key=b"\xc0"),
    "bool key": envelope(b"\xc0", key=b"\xc3"),
    "float key": envelope(b"\xc0", key=b"\xcb" + b"\0" * 8),
    "list key": envelope(b"\xc0", key=b"\x90"),
    "map key": envelope(b"\xc0", key=b"\x80"),
    "bytes key": envelope(b"\xc0", key=b"\xc4\x01x"),
    "bytes key deep inside": envelope(b"\x91\x81\xc4\x01x\xc0"),
    "integer key deep inside": envelope(b"\x91\x81\x07\xc0"),
    "ext as a value": envelope(b"\xd4\x05\0"),
    "ext as a key": envelope(b"\xc0", key=b"\xd4\x05\0"),
    "ext of 16 bytes": envelope(b"\xd8\x00" + b"\0" * 16),
    "ext as the body": b"\xc7\x01\x05\0",
    "ext that claims 4 GiB": envelope(b"\xc9" + MOST_32 + b"\x05"),
    "timestamp of 4 bytes": envelope(b"\xd6\xff" + b"\0" * 4),
    "timestamp of 8 bytes": envelope(b"\xd7\xff" + b"\0" * 8),
    "timestamp of 12 bytes": envelope(b"\xc7\x0c\xff" + b"\0" * 12),
    "timestamp of no valid length": envelope(b"\xc7\x03\xff" + b"\0" * 3),
    "timestamp with too many nanoseconds": envelope(b"\xd7\xff" + MOST_32 * 2),
    "timestamp deep inside": envelope(b"\x91\x81\xa1a\x91\xd6\xff" + b"\0" * 4),
    "timestamp as a key": envelope(b"\xc0", key=b"\xd6\xff" + b"\0" * 4),
    "timestamp as the body": b"\xd6\xff" + b"\0" * 4,
    "string that claims 4 GiB": envelope(b"\xdb" + MOST_32 + b"a"),
    "bytes that claim 4 GiB": envelope(b"\xc6" + MOST_32 + b"a"),
    "list that claims 4 G items": envelope(LIST_32_OF + MOST_32),
    "list that claims 64 K items": envelope(LIST_16_OF + b"\xff\xff" + b"\xc0" * 9),
    "map that claims 4 G items": envelope(MAP_32_OF + MOST_32),
    "body that is a list of 4 G items": LIST_32_OF + MOST_32,
    "nested lists that end": b"\x91" * 100_000 + b"\xc0",
    "nested lists without an end": b"\x91" * 100_000,
    "nested maps": b"\x81\xa1a" * 100_000 + b"\xc0",
    "a little too deep": envelope(b"\x91" * 40 + b"\xc0"),
    "deeper than C's stack": envelope(b"\x91" * 1100 + b"\xc0"),
}


@pytest.mark.parametrize("body", NOT_WHOLE.values(), ids=NOT_WHOLE.keys())
@pytest.mark.parametrize("name", UNPACKERS)
def test_a_hostile_body_is_one_and_the_same_error(name: str, body: bytes) -> None:
    kind, words, code = outcome(name, body)
    assert kind is RemoteProtocolError
    assert words.startswith("a frame's body is not one whole msgpack value")
    assert code is ErrorCode.BAD_REQUEST


def test_an_unpacker_that_runs_out_of_stack_is_that_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of older releases of msgpack, written in Python, do."""

    class Shallow(msgpack.fallback.Unpacker):
        def skip(self) -> None:
            raise RecursionError

    monkeypatch.setattr(msgpack, "Unpacker", Shallow)
    with pytest.raises(RemoteProtocolError, match="not one whole msgpack value"):
        decode_envelope(envelope(b"\xc0"))


@pytest.mark.parametrize("name", UNPACKERS)
def test_what_an_honest_peer_may_send_is_read(name: str) -> None:
    deep = b"\x91" * 28 + b"\xc0"
    assert outcome(name, envelope(deep))[:2] == (1, "ping")
    plain = {"a": [1, -1, 1.5, None, True, "\0é", b"\xff", {"": {}}], "b": 2**64 - 1}
    assert outcome(name, msgpack.packb([1, "ping", plain])) == (1, "ping", plain)
    # The last of a name given twice counts.
    assert outcome(name, b"\x93\x01\xa4ping\x82\xa1a\x01\xa1a\x02") == (1, "ping", {"a": 2})


@pytest.mark.parametrize("depth", [*range(26, 36)])
def test_both_unpackers_draw_the_line_at_the_same_depth(depth: int) -> None:
    body = envelope(b"\x91" * depth + b"\xc0")
    expected_read = depth <= 30  # with the list and the map around it: 32
    for name in UNPACKERS:
        assert (outcome(name, body)[0] == 1) is expected_read


# -- anything at all -----------------------------------------------------------------------------------

PLAIN = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary()
ODD = (
    PLAIN
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20))
    | st.just(msgpack.Timestamp(1, 2))
)
KEYS = st.text(max_size=3) | st.integers().filter(lambda key: abs(key) < 1 << 60) | st.binary(max_size=3)
VALUES = st.recursive(ODD, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=10)
DAMAGE = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3)


@given(st.binary(max_size=64) | st.binary(max_size=60).map(lambda rest: b"\x93\x01\xa1x" + rest))
@example(b"\x93\x01\xa1x\x81\xa1a\xd7\xff" + MOST_32 * 2)
def test_both_unpackers_make_the_same_of_any_bytes(body: bytes) -> None:
    assert outcome("C", body) == outcome("Python", body)


@given(VALUES, DAMAGE)
def test_both_unpackers_make_the_same_of_damaged_frames(value: object, damage: list[tuple[int, int]]) -> None:
    body = bytearray(msgpack.packb([1, "ping", {"x": value}]))
    for at, byte in damage:
        body[at % len(body)] = byte
    assert outcome("C", bytes(body)) == outcome("Python", bytes(body))


# -- what it costs -------------------------------------------------------------------------------------


def nested_claims(size_bytes: int) -> bytes:
    """Lists in lists, each of which claims as many items as the whole body has bytes."""
    heads = (LIST_32_OF + struct.pack(">I", size_bytes - 5)) * 1000
    return heads + b"\xc0" * (size_bytes - len(heads))


BOMBS = {
    "nested lists of a million claimed items": nested_claims(MIB),
    "nested lists of 64 K claimed items": (LIST_16_OF + b"\xff\xff") * 1000 + b"\xc0" * (MIB - 3000),
    "nested lists": b"\x91" * MIB,
    "nested maps": b"\x81\xa1a" * (MIB // 3),
    "claimed string": envelope(b"\xdb" + MOST_32),
    "claimed list": envelope(LIST_32_OF + MOST_32),
    "claimed map": envelope(MAP_32_OF + MOST_32),
    "claimed ext": envelope(b"\xc9" + MOST_32 + b"\x05"),
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS.keys())
@pytest.mark.parametrize("name", UNPACKERS)
def test_a_bomb_costs_no_more_than_a_few_times_its_size(name: str, body: bytes) -> None:
    tracemalloc.start()
    try:
        assert outcome(name, body)[0] is RemoteProtocolError
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The fallback walks with one Python frame a level until the interpreter stops it; the C unpacker's
    # lists alone would be 8 GiB.
    assert peak < 8 * MIB


@pytest.mark.parametrize("cut", [whole, byte_by_byte])
def test_a_claimed_length_of_4_gib_is_refused_when_it_is_read(cut: Any) -> None:
    pair = SessionPair(limits=Limits(max_request_bytes=1 << 16, max_reply_bytes=1 << 16))
    pair.greet()
    tracemalloc.start()
    try:
        rejected, closed = events(pair.daemon, MOST_32 + b"x" * 100, cut)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MIB
    assert isinstance(rejected, RequestRejected)
    assert (rejected.request_id, rejected.fatal) == (0, True)
    assert rejected.reply.error_code is ErrorCode.TOO_LARGE
    assert closed == ConnectionClosed()


@pytest.mark.parametrize("body", NOT_WHOLE.values(), ids=NOT_WHOLE.keys())
def test_a_hostile_frame_ends_its_own_connection_with_a_reason(body: bytes) -> None:
    pair = SessionPair()
    pair.greet()
    rejected, closed = events(pair.daemon, struct.pack(">I", len(body)) + body)
    assert isinstance(rejected, RequestRejected)
    assert (rejected.request_id, rejected.fatal) == (0, True)
    assert closed == ConnectionClosed()
    # The daemon's last words reach the client, as the reply that answers no request.
    pair.client.receive_data(pair.daemon.send_reply(0, rejected.reply))
    with pytest.raises(RemoteProtocolError, match="the daemon ends the connection: a frame's body"):
        pair.client.next_event()
