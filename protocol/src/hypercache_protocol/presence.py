"""The presence table: which objects a daemon has, in memory that its clients read without asking.

Format 1, frozen: a page of HEADER_BYTES, then `buckets` (a power of two) of BUCKET_WORDS words each, all
little-endian u64. A word stands for one object: the XXH3 of its uri in UTF-8 under the table's seed, with the
highest bit set, and the lowest where it is committed with checksums. It lies in one of two buckets, which
`places` names; 0 is an empty place. The header's first number is how many objects found no place.

Rules:
1. What the table says is a hint, as old as the look at it: whoever loads asks the daemon, and verifies.
2. Where some found no place, only what is found is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat

import numpy as np
import numpy.typing as npt
import xxhash

from .layout import U64

FORMAT = 1
HEADER_BYTES = 4096
BUCKET_WORDS = 8
_WORD_BYTES = 8
HEADER_WORDS = HEADER_BYTES // _WORD_BYTES
_MOST_BUCKETS = 1 << 31  # each half of a word names a bucket

Words = npt.NDArray[np.uint64]

VERIFIABLE = np.uint64(1)
"""The bit of a word that says that its object has checksums."""
_TAKEN = np.uint64(1 << 63 | 1)
_HALVES = np.array([[1], [32]])
"""How far to shift a word for the number of its first and of its second bucket."""


class Presence(IntEnum):
    """What a table says of one uri."""

    VERIFIABLE = 0
    UNVERIFIABLE = 1
    ABSENT = 2


_ABSENT = np.uint64(Presence.ABSENT)


@dataclass(frozen=True)
class Geometry:
    """The shape of a table.

    Raises:
        ValueError: `buckets` is no power of two from 1 to 2**31.
    """

    seed: int
    buckets: int

    def __post_init__(self) -> None:
        if not 1 <= self.buckets <= _MOST_BUCKETS or self.buckets & (self.buckets - 1):
            raise ValueError(f"a presence table has a power of two of buckets, not {self.buckets}")

    @property
    def size_bytes(self) -> int:
        """Header and buckets."""
        return HEADER_BYTES + self.buckets * BUCKET_WORDS * _WORD_BYTES


def words_of(uris: Sequence[bytes], seed: int) -> Words:
    """The word of each uri, as of an object with checksums; shape (len(uris),)."""
    return np.frombuffer(b"".join(map(xxhash.xxh3_64_digest, uris, repeat(seed))), U64) | _TAKEN


def places(words: Words, buckets: int) -> npt.NDArray[np.int64]:
    """The numbers of the two buckets of each word; shape (2, len(words))."""
    numbers: npt.NDArray[np.int64] = words.view(np.int64) >> _HALVES & np.int64(buckets - 1)
    return numbers


class TableView:
    """A table as numpy sees it.

    Args:
        memory: exactly `geometry.size_bytes` of it.

    Raises:
        ValueError: it has another size.
    """

    def __init__(self, memory: memoryview, geometry: Geometry) -> None:
        if len(memory) != geometry.size_bytes:
            raise ValueError(f"the table has {len(memory)} bytes, not {geometry.size_bytes}")
        self.geometry = geometry
        self.memory = memory
        self.header = np.frombuffer(memory, U64, HEADER_WORDS)
        self.buckets = np.frombuffer(memory, U64, offset=HEADER_BYTES).reshape(-1, BUCKET_WORDS)

    @property
    def unplaced(self) -> int:
        """How many objects found no place."""
        return int(self.header[0])

    def look_up(self, uris: Sequence[bytes]) -> list[int]:
        """A `Presence` for each uri, as a plain int."""
        # As few steps as may be, of all uris each: after a pause a step's code costs more than its numbers.
        words = words_of(uris, self.geometry.seed)
        differences = self.buckets.take(places(words, len(self.buckets)), axis=0)
        differences ^= words[:, np.newaxis]
        # The same word leaves 0, one without checksums 1, and any other, or an empty place, a large number.
        states: list[int] = differences.min(axis=(0, 2), initial=_ABSENT).tolist()
        return states
