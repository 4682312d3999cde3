"""The format of a sealed object: frozen bytes, and no seal that fits anything but what was sealed."""

import os
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercache_connector.sealing import (
    BLOCK_BYTES,
    PIECE_BYTES,
    body_bytes,
    seal,
    sealed_bytes,
    unseal,
)

MIB = 1 << 20
URI = "hypercache://lmcache/v1/n/k"
SIZES = [0, 1, 4095, 4096, 4097, 70_001, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 17]
PAYLOADS = st.binary(max_size=3 * BLOCK_BYTES + 1)
URIS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60)

# magic, version 1, trailer 4096, payload 7, piece 4 MiB, one piece, uri 27; uri; CRC-32 of "payload"
GOLDEN_HEAD = "4843534541 4c0d0a 01000000 00100000 0700000000000000 00004000 01000000 1b000000"


def opened(uri: str, payload: bytes, size_bytes: int, tail: bytes) -> bytes | None:
    """What a reader of `size_bytes` gets who read the body of `payload`; None where the seal is broken."""
    back = bytearray(size_bytes)
    body = payload[: body_bytes(size_bytes)]
    back[: len(body)] = body
    return bytes(back) if unseal(uri, memoryview(back), memoryview(tail)) else None


def test_the_golden_bytes_are_what_they_were() -> None:
    tail = seal(URI, memoryview(b"payload"))
    said = bytes.fromhex(GOLDEN_HEAD) + URI.encode() + bytes.fromhex("156a2c42")
    trailer = said + bytes(BLOCK_BYTES - len(said) - 4)
    assert tail == b"payload" + bytes(BLOCK_BYTES - 7) + trailer + bytes.fromhex("01010331")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("uri", [URI, "u" * 8192], ids=["short uri", "longest uri"])
def test_a_reader_by_hand_finds_what_the_format_says(size: int, uri: str) -> None:
    payload = os.urandom(size)
    image = payload[: body_bytes(size)] + seal(uri, memoryview(payload))
    assert len(image) == sealed_bytes(uri, size)
    assert len(image) % BLOCK_BYTES == 0
    trailer_at = -(-size // BLOCK_BYTES) * BLOCK_BYTES
    assert image[:trailer_at] == payload.ljust(trailer_at, b"\0")
    trailer = image[trailer_at:]
    magic, version, trailer_bytes, *sizes, count, uri_bytes = struct.unpack_from("<8sIIQIII", trailer)
    assert (magic, version, trailer_bytes) == (b"HCSEAL\r\n", 1, len(trailer))
    assert (sizes, count) == ([size, 4 * MIB], -(-size // PIECE_BYTES))
    assert trailer[36 : 36 + uri_bytes] == uri.encode()
    pieces = [payload[at : at + PIECE_BYTES] for at in range(0, size, PIECE_BYTES)]
    assert list(struct.unpack_from(f"<{count}I", trailer, 36 + uri_bytes)) == list(map(zlib.crc32, pieces))
    assert not any(trailer[36 + uri_bytes + 4 * count : -4])
    assert trailer[-4:] == struct.pack("<I", zlib.crc32(trailer[:-4]))


@pytest.mark.parametrize("size", SIZES)
def test_every_size_comes_back_and_is_larger_than_its_payload(size: int) -> None:
    payload = os.urandom(size)
    tail = seal(URI, memoryview(payload))
    assert opened(URI, payload, size, tail) == payload
    assert sealed_bytes(URI, size) >= size + BLOCK_BYTES


@settings(max_examples=100)
@given(URIS, PAYLOADS)
def test_any_payload_under_any_uri_comes_back(uri: str, payload: bytes) -> None:
    tail = seal(uri, memoryview(payload))
    assert body_bytes(len(payload)) + len(tail) == sealed_bytes(uri, len(payload))
    assert opened(uri, payload, len(payload), tail) == payload


@settings(max_examples=300)
@given(PAYLOADS, st.data())
def test_a_flipped_bit_anywhere_breaks_the_seal(payload: bytes, data: st.DataObject) -> None:
    image = bytearray(payload[: body_bytes(len(payload))] + seal(URI, memoryview(payload)))
    bit = data.draw(st.integers(0, 8 * len(image) - 1))
    image[bit // 8] ^= 1 << bit % 8
    body = body_bytes(len(payload))
    assert opened(URI, bytes(image[:body]), len(payload), bytes(image[body:])) is None


@settings(max_examples=100)
@given(URIS, URIS, PAYLOADS)
def test_another_uri_breaks_the_seal(uri: str, other: str, payload: bytes) -> None:
    tail = seal(uri, memoryview(payload))
    assert (opened(other, payload, len(payload), tail) is not None) == (other == uri)


@settings(max_examples=100)
@given(PAYLOADS, st.integers(0, 3 * BLOCK_BYTES + 1))
def test_a_buffer_of_another_size_breaks_the_seal(payload: bytes, size: int) -> None:
    image = payload[: body_bytes(len(payload))] + seal(URI, memoryview(payload))
    got = opened(URI, image, size, image[body_bytes(size) :].ljust(BLOCK_BYTES, b"\0"))
    assert (got is not None) == (size == len(payload))


@settings(max_examples=100)
@given(PAYLOADS, PAYLOADS)
def test_the_seal_of_another_payload_breaks(payload: bytes, other: bytes) -> None:
    tail = seal(URI, memoryview(other))
    got = opened(URI, payload, len(other), tail)
    body = body_bytes(len(other))
    assert (got is not None) == (payload[:body].ljust(body, b"\0") == other[:body])
    assert got in (None, other), "nothing but what was sealed is ever handed out"


CLAIMS = [0, 1, 2, 7, 4096, 1 << 16, (1 << 31) - 1, (1 << 32) - 1]


@pytest.mark.parametrize("field", range(7))
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_false_claim_with_a_right_checksum_of_its_own_breaks_the_seal(field: int, claim: int) -> None:
    """Whoever wrote it computed the trailer's CRC-32 anew, so only the claim itself is wrong."""
    payload = b"payload"
    tail = bytearray(seal(URI, memoryview(payload)))
    head = struct.Struct("<8sIIQIII")
    fields = list(head.unpack_from(tail, BLOCK_BYTES))
    wrong = struct.pack("<Q", claim) if field == 0 else claim
    is_true = fields[field] == wrong
    fields[field] = wrong
    head.pack_into(tail, BLOCK_BYTES, *fields)
    struct.pack_into("<I", tail, len(tail) - 4, zlib.crc32(tail[BLOCK_BYTES:-4]))
    assert (opened(URI, payload, len(payload), bytes(tail)) == payload) == is_true


@settings(max_examples=100)
@given(st.binary(max_size=3 * BLOCK_BYTES))
def test_any_other_tail_breaks_the_seal(tail: bytes) -> None:
    assert opened(URI, b"payload", 7, tail.ljust(7, b"\0")) is None


@pytest.mark.parametrize("change", [lambda tail: tail[:-BLOCK_BYTES], lambda tail: tail + bytes(BLOCK_BYTES)])
def test_a_tail_that_is_shorter_or_longer_breaks_the_seal(change) -> None:
    tail = seal(URI, memoryview(b"payload"))
    assert opened(URI, b"payload", 7, change(tail)) is None


@pytest.mark.parametrize("swapped", [(0, 1), (1, 2), (0, 2)])
def test_pieces_that_changed_places_break_the_seal(swapped: tuple[int, int]) -> None:
    payload = os.urandom(3 * PIECE_BYTES)
    tail = seal(URI, memoryview(payload))
    pieces = [payload[at : at + PIECE_BYTES] for at in range(0, len(payload), PIECE_BYTES)]
    first, second = swapped
    pieces[first], pieces[second] = pieces[second], pieces[first]
    assert opened(URI, b"".join(pieces), len(payload), tail) is None
