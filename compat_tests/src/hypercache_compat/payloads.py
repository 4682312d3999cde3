"""Bytes that two processes can make alike without sending them to each other."""

from __future__ import annotations

import random

MIB = 1024 * 1024


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
