"""Lines that are no message: each is refused on both ends, and none costs more than its length."""

import json
import sys
import tracemalloc
from collections.abc import Callable

import pytest

from hypercache_protocol.codecs.json_lines import decode_reply, decode_request
from hypercache_protocol.errors import ErrorCode, InvalidMessage
from hypercache_protocol.fields import MIB
from hypercache_protocol.messages import (
    GetDevices,
    Locate,
    Pin,
    Ping,
    Purge,
)

# -- lines that are no JSON object ---------------------------------------------------------------------

NOT_JSON = {
    "empty": b"",
    "spaces": b"   ",
    "word": b"ping",
    "half": b'{"action":"pi',
    "no value": b'{"action":}',
    "single quotes": b"{'action':'ping'}",
    "trailing comma": b'{"action":"ping",}',
    "two objects": b'{"action":"ping"}{"action":"ping"}',
    "tail": b'{"action":"ping"} x',
    "comment": b'{"action":"ping"} // x',
    "byte order mark": b'\xef\xbb\xbf{"action":"ping"}',
    "utf-16": '{"action":"ping"}'.encode("utf-16"),
    "invalid utf-8": b'{"action":"locate","uri":"\xff"}',
    "cut utf-8": b'{"action":"locate","uri":"\xc3"}',
    "overlong utf-8": b'{"action":"locate","uri":"\xc0\xaf"}',
    "surrogate in utf-8": b'{"action":"locate","uri":"\xed\xa0\x80"}',
    "lone surrogate": b'{"action":"locate","uri":"\\ud800"}',
    "low surrogate": b'{"action":"locate","uri":"\\udc00"}',
    "raw control": b'{"action":"locate","uri":"a\x01b"}',
    "raw NUL": b'{"action":"locate","uri":"a\x00b"}',
    "NaN": b'{"action":"stage_write","uri":"a","size_bytes":NaN}',
    "Infinity": b'{"action":"ping","x":Infinity}',
    "-Infinity": b'{"action":"ping","x":-Infinity}',
    "leading zero": b'{"action":"stage_write","uri":"a","size_bytes":05}',
    "plus": b'{"action":"stage_write","uri":"a","size_bytes":+5}',
    "hexadecimal": b'{"action":"stage_write","uri":"a","size_bytes":0x10}',
    "endless integer": b'{"action":"ping","x":' + b"9" * 500_000 + b"}",
    "http": b"GET / HTTP/1.1\r",
    "zeros": b"\0" * 1000,
    "nested lists": b"[" * 100_000,
    "closed nested lists": b"[" * 100_000 + b"]" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "nested unknown field": b'{"action":"ping","x":' + b"[" * 210 + b"]" * 210 + b"}",
}


@pytest.mark.parametrize("line", NOT_JSON.values(), ids=NOT_JSON.keys())
def test_a_line_that_is_not_json_is_an_invalid_message_on_both_ends(line: bytes) -> None:
    for decode in (decode_request, lambda line: decode_reply(line, Ping())):
        with pytest.raises(InvalidMessage, match=r"^the line is not JSON: ") as caught:
            decode(line)
        assert caught.value.code is ErrorCode.BAD_REQUEST
        assert len(caught.value.message) < 200


@pytest.mark.parametrize("line", [b"5", b'"ping"', b"null", b"true", b"[]", b'[{"action":"ping"}]', b"1.5"])
def test_json_that_is_no_object_is_an_invalid_message_on_both_ends(line: bytes) -> None:
    for decode in (decode_request, lambda line: decode_reply(line, Ping())):
        with pytest.raises(InvalidMessage, match=r"^the line must hold a JSON object, not "):
            decode(line)


def test_nesting_that_an_honest_peer_may_send_is_read() -> None:
    line = b'{"action":"ping","x":' + b"[" * 150 + b"]" * 150 + b"}"
    assert decode_request(line) == (Ping(), 1)


def test_the_last_of_a_name_given_twice_counts() -> None:
    assert decode_request(b'{"action":"ping","action":"purge"}') == (Purge(), 0)
    assert decode_request(b'{"action":"pin","uri":"a","uri":"b"}') == (Pin(uri="b"), 0)


def test_white_space_within_a_line_is_no_fault() -> None:
    assert decode_request(b' { "action" :\t"ping" } \r') == (Ping(), 0)


# -- what a wrong line costs ---------------------------------------------------------------------------


def peak_bytes(work: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def filled(start: bytes, item: bytes, end: bytes) -> bytes:
    """A line of 1 MiB that repeats `item`."""
    room = MIB - len(start) - len(end)
    return start + b",".join([item] * (room // (len(item) + 1))) + end


@pytest.mark.parametrize(
    "line",
    [
        filled(b'{"action":"commit_write","uri":"a","chunk_checksums":[', b"-1", b"]}"),
        filled(b'{"action":"commit_write","uri":"a","chunk_checksums":[', b'"a"', b"]}"),
        filled(b'{"action":"commit_write","uri":"a","chunk_checksums":[', b"[]", b"]}"),
        filled(b'{"action":"commit_write","uri":"a","chunk_checksums":[', b"{}", b"]}"),
        filled(b'{"action":"locate","uri":[', b"[]", b"]}"),
        filled(b'{"action":"locate","x":[', b"{}", b"]}"),
    ],
    ids=lambda line: line[:60].decode(),
)
def test_a_line_that_is_wrong_in_every_item_costs_little(line: bytes) -> None:
    def refuse() -> None:
        with pytest.raises(InvalidMessage):
            decode_request(line)

    # 64 bytes for each byte of the line is what the plain JSON tree may take; one error object for
    # each item would be hundreds.
    assert peak_bytes(refuse) < 64 * MIB


@pytest.mark.parametrize("field", ["chunk_layout", "devices", "wire", "features"])
def test_a_reply_that_is_wrong_in_every_item_makes_one_error(field: str) -> None:
    request = {"chunk_layout": Locate(uri="a"), "devices": GetDevices(), "wire": Ping(), "features": Ping()}[
        field
    ]
    status = "HIT" if field == "chunk_layout" else "PONG" if isinstance(request, Ping) else "OK"
    line = json.dumps({"status": status, "object_size": 1, field: [-1.5] * 100_000}).encode()

    def refuse() -> None:
        with pytest.raises(InvalidMessage, match=rf"{field}\[0\]"):
            decode_reply(line, request)

    assert peak_bytes(refuse) < 16 * MIB


def test_the_depth_of_a_line_never_meets_the_interpreter_s_limit() -> None:
    deep = 190
    assert deep < sys.getrecursionlimit()
    line = b'{"action":"locate","uri":' + b"[" * deep + b"]" * deep + b"}"
    with pytest.raises(InvalidMessage, match=r"^locate: uri: .*\(got \[+\.\.\.\]+\)$"):
        decode_request(line)
