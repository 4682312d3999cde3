"""Bytes that two processes can make alike without sending them to each other."""

from __future__ import annotations

import random
import struct
import zlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MIB = 1024 * 1024

MARK = b"HCMARK\r\n"
"""Every versioned payload begins with it, so that what lies on a device can be found."""
LEAST_VERSIONED_BYTES = 64

_HEADER = struct.Struct("<8sQII")
_NOISE_BYTES = 1_048_583
"""A prime: no two chunks or pages of a payload are alike, nor those of two payloads at the same place."""


def payload(name: str, size_bytes: int) -> bytes:
    """The `size_bytes` bytes that belong to `name`: random to look at, the same in every process."""
    return random.Random(name).randbytes(size_bytes)


def first_difference(got: object, want: bytes) -> str | None:
    """A sentence that says where `got` (bytes or what has a buffer) leaves `want`; None where it does not."""
    seen = memoryview(got).cast("B")  # type: ignore[arg-type]
    if len(seen) != len(want):
        return f"{len(seen)} bytes came back, {len(want)} were written"
    if seen == want:
        return None
    at = next(i for i in range(len(want)) if seen[i] != want[i])
    return f"byte {at} of {len(want)} is {seen[at]:#04x}, {want[at]:#04x} was written"


def require_same(got: object, want: bytes) -> None:
    """Raise AssertionError with the first difference, if there is one."""
    difference = first_difference(got, want)
    assert difference is None, difference


def versioned(name: str, version: int, size_bytes: int) -> bytes:
    """The bytes of one version of `name`, at least LEAST_VERSIONED_BYTES of them. They say themselves which
    they are; `version_in` reads it."""
    assert size_bytes >= LEAST_VERSIONED_BYTES, "a versioned payload is too short"
    header = _HEADER.pack(MARK, version, zlib.crc32(name.encode()), size_bytes)
    return header + _noise_after(header, size_bytes).tobytes()


def version_in(name: str, got: object) -> int | None:
    """Which version of `name` all these bytes are; None where they are none as a whole."""
    seen = memoryview(got).cast("B")  # type: ignore[arg-type]
    if len(seen) < LEAST_VERSIONED_BYTES:
        return None
    header = bytes(seen[: _HEADER.size])
    version: int = _HEADER.unpack(header)[1]
    if header != _HEADER.pack(MARK, version, zlib.crc32(name.encode()), len(seen)):
        return None
    noise = np.frombuffer(seen[_HEADER.size :], np.uint8)
    return version if np.array_equal(noise, _noise_after(header, len(seen))) else None


def _noise_after(header: bytes, size_bytes: int) -> NDArray[np.uint8]:
    """What follows the header in a payload of that size: a piece of an endless repetition, without a copy."""
    start = zlib.crc32(header) % _NOISE_BYTES
    length = size_bytes - len(header)
    return _repeated(-(-(start + length) // _NOISE_BYTES))[start : start + length]


@lru_cache(maxsize=8)
def _repeated(times: int) -> NDArray[np.uint8]:
    once = random.Random("versioned payloads").randbytes(_NOISE_BYTES)
    return np.tile(np.frombuffer(once, np.uint8), times)
