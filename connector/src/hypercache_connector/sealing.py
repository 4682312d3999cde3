"""The format of a sealed object: version 1, frozen. Pure; README.md draws it.

An object that its daemon keeps no checksums for carries them itself: the payload, zeros up to a multiple of
BLOCK_BYTES, and a trailer that names the uri, the payload's size and the CRC-32 of every piece of it. The
payload comes first, so its chunks lie as they would without a seal.

Rules:
1. Equal payloads under equal uris have equal seals. So a seal is checked by making it anew from the bytes
   that were read, and comparing: nothing that a trailer claims is believed, and no bit of it is ignored.
2. A sealed object is never as long as its payload: there is at least one block more.
3. The format never changes under its version number; a change needs a new number, and the golden bytes of
   the tests stay.
"""

from __future__ import annotations

import struct

from hypercache_protocol.checksum import crc32

MAGIC = b"HCSEAL\r\n"
FORMAT_VERSION = 1
BLOCK_BYTES = 4096
PIECE_BYTES = 4 << 20
"""Of the payload that one CRC-32 covers; the last piece may be shorter."""

# Magic, version, the trailer's own size, the payload's size, the piece size, the number of pieces, the
# uri's size. The uri, the CRC-32s and zeros follow; the CRC-32 of all that ends the trailer.
_HEAD = struct.Struct("<8sIIQIII")
_CRC32_BYTES = 4


def body_bytes(payload_bytes: int) -> int:
    """How much of a payload lies in whole blocks; what follows them in a sealed object is its tail."""
    return payload_bytes // BLOCK_BYTES * BLOCK_BYTES


def sealed_bytes(uri: str, payload_bytes: int) -> int:
    """The size of the sealed object."""
    return _whole_blocks(payload_bytes) + _trailer_bytes(uri, payload_bytes)


def seal(uri: str, payload: memoryview) -> bytes:
    """The tail: the rest of the payload, zeros up to a whole block, and the trailer."""
    rest = payload[body_bytes(len(payload)) :]
    padding = bytes(_whole_blocks(len(rest)) - len(rest))
    return b"".join([rest, padding, _trailer(uri, payload)])


def unseal(uri: str, payload: memoryview, tail: memoryview) -> bool:
    """Move the payload's rest from `tail` to its place; True where the seal is that of this uri and of
    exactly these bytes.

    Args:
        payload: writable, of the payload's size, its body filled.
        tail: all that follows the body in the sealed object.
    """
    body = body_bytes(len(payload))
    if rest := len(payload) - body:  # an empty buffer may not be writable
        payload[body:] = tail[:rest]
    return tail == seal(uri, payload)


def _trailer(uri: str, payload: memoryview) -> bytes:
    name = uri.encode()
    checksums = [crc32(payload[at : at + PIECE_BYTES]) for at in range(0, len(payload), PIECE_BYTES)]
    size_bytes = _trailer_bytes(uri, len(payload))
    head = _HEAD.pack(MAGIC, FORMAT_VERSION, size_bytes, len(payload), PIECE_BYTES, len(checksums), len(name))
    said = head + name + struct.pack(f"<{len(checksums)}I", *checksums)
    said = said.ljust(size_bytes - _CRC32_BYTES, b"\0")
    return said + struct.pack("<I", crc32(memoryview(said)))


def _trailer_bytes(uri: str, payload_bytes: int) -> int:
    pieces = -(-payload_bytes // PIECE_BYTES)
    return _whole_blocks(_HEAD.size + len(uri.encode()) + pieces * _CRC32_BYTES + _CRC32_BYTES)


def _whole_blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
