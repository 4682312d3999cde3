"""Lines out of a stream: the same however it was cut, and never more kept than the limit allows."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache_protocol.codecs.json_lines import LineReader
from hypercache_protocol.errors import RemoteProtocolError
from hypercache_protocol.testing import Cut, byte_by_byte, cut_at, whole

LIMIT = 16


def read_all(data: bytes, cut: Cut, limit: int = LIMIT) -> list[bytes | str]:
    """Every line of `data`; `too long` in place of one that is, and nothing after it."""
    reader = LineReader(limit)
    lines: list[bytes | str] = []
    for piece in cut(data):
        reader.feed(piece)
        try:
            while (line := reader.next_body()) is not None:
                lines.append(line)
        except RemoteProtocolError:
            return [*lines, "too long"]
    return lines


CUTS = st.just(whole) | st.just(byte_by_byte) | st.lists(st.integers(0, 1 << 16)).map(cut_at)
STREAMS = st.lists(st.binary(max_size=LIMIT + 3) | st.just(b"\n")).map(b"\n".join)


@given(STREAMS, CUTS)
def test_lines_are_the_same_however_the_bytes_were_cut(data: bytes, cut: Cut) -> None:
    expected: list[bytes | str] = []
    for line in data.split(b"\n")[:-1]:
        if len(line) > LIMIT:
            expected.append("too long")
            break
        expected.append(line)
    else:
        if len(data.rpartition(b"\n")[2]) > LIMIT:
            expected.append("too long")
    assert read_all(data, cut) == expected


@pytest.mark.parametrize("cut", [whole, byte_by_byte, cut_at([LIMIT]), cut_at([LIMIT + 1])])
def test_a_line_of_exactly_the_limit_is_read_and_one_byte_more_is_not(cut: Cut) -> None:
    assert read_all(b"x" * LIMIT + b"\n", cut) == [b"x" * LIMIT]
    assert read_all(b"x" * (LIMIT + 1) + b"\n", cut) == ["too long"]
    assert read_all(b"x" * (LIMIT + 1), cut) == ["too long"]
    assert read_all(b"x" * LIMIT, cut) == []


def test_lines_before_one_that_is_too_long_are_still_read() -> None:
    assert read_all(b"a\nb\n" + b"x" * 100 + b"\nc\n", whole) == [b"a", b"b", "too long"]


def test_the_error_tells_the_limit() -> None:
    reader = LineReader(LIMIT)
    reader.feed(b"x" * 17)
    with pytest.raises(RemoteProtocolError, match="longer than 16 bytes"):
        reader.next_body()


def test_what_follows_the_last_newline_is_no_line() -> None:
    reader = LineReader(LIMIT)
    reader.feed(b"a\ntail")
    assert [reader.next_body(), reader.next_body()] == [b"a", None]


def test_lines_may_hold_any_byte_but_the_newline() -> None:
    line = bytes(range(256)).replace(b"\n", b"")
    assert read_all(line + b"\n", byte_by_byte, limit=1000) == [line]


def test_a_peer_that_never_sends_a_newline_is_held_to_the_limit() -> None:
    limit, piece = 1 << 20, b"x" * (1 << 16)
    tracemalloc.start()
    try:
        reader = LineReader(limit)
        refused = False
        while not refused:
            reader.feed(piece)
            try:
                assert reader.next_body() is None
            except RemoteProtocolError:
                refused = True
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * limit
    assert kept < limit // 8


def test_many_lines_in_one_piece_take_time_in_proportion() -> None:
    # 200,000 lines: moving the rest of the buffer for each would be 200 GB of copying.
    lines = read_all(b"{}\n" * 200_000, whole)
    assert len(lines) == 200_000
