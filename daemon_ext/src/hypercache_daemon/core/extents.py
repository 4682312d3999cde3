"""Where chunks lie: one at a time as `Extent`, or many packed in bytes.

The catalog and the cache keep the packed form, 20 bytes a chunk: as Python objects the chunks of a million
objects would take most of a gigabyte, and most of a start's time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .free_space import BLOCK_SIZE

ALIGNMENT = BLOCK_SIZE
"""Every chunk starts at a multiple of this many bytes and owns a multiple of it."""

_PACKED = struct.Struct("<QQI")
PACKED_BYTES = _PACKED.size
_LENGTH_AT = 16
EXTENT_COLUMNS = np.dtype([("device", "<u8"), ("offset", "<u8"), ("length", "<u4")])

ExtentTable = npt.NDArray[np.void]
"""One record for each chunk, with the columns `device`, `offset` and `length`."""


class Extent(NamedTuple):
    """One chunk's place: `length` bytes at `offset` of a device.

    `offset` is a multiple of 4,096; `length` is what the object holds there, 1 to 4,194,304 bytes.
    """

    device: int
    offset: int
    length: int

    @property
    def allocated_bytes(self) -> int:
        """What the chunk takes from its device: `length` rounded up to 4,096."""
        return rounded_up(self.length)


_EXTENT_OF: Callable[[tuple[int, int, int]], Extent] = partial(tuple.__new__, Extent)


def rounded_up(size_bytes: int) -> int:
    """What an object of this size takes of its pool, in bytes."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def packed(extents: Iterable[Extent]) -> bytes:
    """The chunks in 20 bytes each: device and offset as u64, length as u32, little-endian."""
    return b"".join([_PACKED.pack(*extent) for extent in extents])


def unpacked(data: bytes) -> tuple[Extent, ...]:
    """The chunks that were packed."""
    # In C from end to end: Extent._make counts each chunk's values, which are three here.
    return tuple(map(_EXTENT_OF, _PACKED.iter_unpack(data)))


def allocated_in(data: bytes) -> int:
    """What the chunks that were packed take of their pool, in bytes; none is made for it."""
    if len(data) == PACKED_BYTES:  # most objects have one, and this is asked at each step of their way
        return rounded_up(int.from_bytes(data[_LENGTH_AT:], "little"))
    return sum([rounded_up(length) for _, _, length in _PACKED.iter_unpack(data)])


def allocated_column(chunks: ExtentTable) -> npt.NDArray[np.int64]:
    """What each chunk takes from its device, in bytes."""
    lengths: npt.NDArray[Any] = chunks["length"].astype(np.int64)
    return -(-lengths // ALIGNMENT) * ALIGNMENT


def end_on(chunks: ExtentTable, device: int) -> int:
    """Where the last of these chunks on a device ends, in bytes; 0 where there is none."""
    there = chunks["device"] == device
    ends = chunks["offset"][there].astype(np.int64) + allocated_column(chunks[there])
    return int(ends.max(initial=0))
