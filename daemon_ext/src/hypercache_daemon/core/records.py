"""A committed object as one string of bytes: how the catalog keeps it, and the cache until it is asked for.

Rules:
1. A record is a head of 28 bytes, then the packed extents, the checksums (u32 each, little-endian) and the
   SHA-256 as hex digits; what an object does not have is not there.
2. The numbers of states and tiers are part of the catalog's schema: new ones go to the end.
3. An upload that a restart cuts off begins again, so what is SYNCING_BACKEND is recorded as COMMITTED.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from hypercache_protocol.fields import Tier
from hypercache_protocol.states import SyncStatus

from .extents import EXTENT_COLUMNS, PACKED_BYTES, ExtentTable
from .objects import CHECKSUM_BYTES, StoredObject

STATES = (SyncStatus.COMMITTED, SyncStatus.SYNCED_BACKEND, SyncStatus.LOCAL_ONLY)
TIERS = (Tier.NVME, Tier.RAM)
_STATE_NUMBERS = {state: number for number, state in enumerate(STATES)} | {SyncStatus.SYNCING_BACKEND: 0}
_TIER_NUMBERS = {tier: number for number, tier in enumerate(TIERS)}
_PINNED = 1
_ANNOUNCE_COMMITTED = 2
_NO_CHECKSUMS = -1

_HEAD = struct.Struct("<QQBBBxIi")
_GENERATION = struct.Struct("<Q")
_HEAD_COLUMNS = np.dtype(
    {
        "names": ["generation", "state", "tier", "flags", "extents", "checksums"],
        "formats": ["<u8", "u1", "u1", "u1", "<u4", "<i4"],
        "offsets": [0, 16, 17, 18, 20, 24],
        "itemsize": _HEAD.size,
    }
)
_STATE_AT = 16
_TIER_AT = 17
_CHECKSUMS_AT = 24
_NO_CHECKSUMS_BYTES = struct.pack("<i", _NO_CHECKSUMS)

_CUT_TOGETHER = 10_000  # all as one piece would take as much memory again as they do

Heads = npt.NDArray[np.void]
"""One head for each record."""


def record_of(stored: StoredObject) -> bytes:
    """The object without its uri. `struct.error` where a number is too large for it."""
    checksums = stored.packed_checksums
    head = _HEAD.pack(
        stored.generation,
        stored.size_bytes,
        _STATE_NUMBERS[stored.state],
        _TIER_NUMBERS[stored.tier],
        _PINNED * stored.pinned | _ANNOUNCE_COMMITTED * stored.announce_committed,
        len(stored.packed_extents) // PACKED_BYTES,
        _NO_CHECKSUMS if checksums is None else len(checksums) // CHECKSUM_BYTES,
    )
    return b"".join((head, stored.packed_extents, checksums or b"", (stored.sha256 or "").encode()))


def stored_of(uri: str, record: bytes) -> StoredObject:
    """The object that was recorded."""
    generation, size_bytes, state, tier, flags, extents, checksums = _HEAD.unpack_from(record)
    extents_end = _HEAD.size + PACKED_BYTES * extents
    checksums_end = extents_end + CHECKSUM_BYTES * max(0, checksums)
    return StoredObject(
        uri,
        TIERS[tier],
        size_bytes,
        record[_HEAD.size : extents_end],
        None if checksums == _NO_CHECKSUMS else record[extents_end:checksums_end],
        generation,
        STATES[state],
        bool(flags & _PINNED),
        record[checksums_end:].decode() or None,
        bool(flags & _ANNOUNCE_COMMITTED),
    )


def generations_of(records: Iterable[bytes]) -> tuple[int, ...]:
    """The generations alone. `struct.error` where a record is too short for one."""
    return tuple(chain.from_iterable(map(_GENERATION.unpack_from, records)))  # in C: a start asks for all


def state_of(record: bytes) -> SyncStatus:
    """The state alone."""
    return STATES[record[_STATE_AT]]


def has_checksums(record: bytes) -> bool:
    """Whether the object has checksums."""
    return record[_CHECKSUMS_AT : _HEAD.size] != _NO_CHECKSUMS_BYTES


def unverifiable(records: Mapping[str, bytes]) -> list[StoredObject]:
    """The objects that have no checksums, of records by uri."""
    return [stored_of(uri, record) for uri, record in records.items() if not has_checksums(record)]


def of_tier(records: Mapping[str, bytes], tier: Tier) -> list[StoredObject]:
    """The objects that lie in `tier`, of records by uri."""
    number = _TIER_NUMBERS[tier]
    tiers = bytes(map(itemgetter(_TIER_AT), records.values()))  # in C: of a million mostly none is in RAM
    if number not in tiers:
        return []
    return [stored_of(uri, record) for uri, record in records.items() if record[_TIER_AT] == number]


# -- many at once, as columns ----------------------------------------------------------------------------


class Columns:
    """Many records, joined and cut by numpy: a start does this for every object there is.

    Raises:
        ValueError: one of them is too short for what its head says.
    """

    def __init__(self, records: Iterable[bytes]) -> None:
        whole = list(records)
        parts = [_cut(whole[first : first + _CUT_TOGETHER]) for first in range(0, len(whole), _CUT_TOGETHER)]
        self.heads: Heads = np.concatenate([np.empty(0, _HEAD_COLUMNS), *(heads for heads, _ in parts)])
        self._chunks: ExtentTable = np.concatenate(
            [np.empty(0, EXTENT_COLUMNS), *(chunks for _, chunks in parts)]
        )

    def chunks(self, which: npt.NDArray[np.bool_]) -> ExtentTable:
        """The chunks of those that `which` names, one record after the other."""
        chunks: ExtentTable = self._chunks[np.repeat(which, self.heads["extents"])]
        return chunks


def _cut(records: Sequence[bytes]) -> tuple[Heads, ExtentTable]:
    """The heads and the chunks of some records."""
    lengths = np.fromiter(map(len, records), np.int64, len(records))
    starts = np.cumsum(lengths) - lengths
    data = b"".join(records)
    _check_whole(lengths, np.int64(_HEAD.size))
    heads: Heads = _items_at(data, starts, _HEAD_COLUMNS)
    counts = heads["extents"].astype(np.int64)
    checksums = np.maximum(heads["checksums"], 0).astype(np.int64)
    _check_whole(lengths, _HEAD.size + PACKED_BYTES * counts + CHECKSUM_BYTES * checksums)
    before = np.cumsum(counts) - counts  # how many chunks those before a record have
    places = np.repeat(starts + _HEAD.size - PACKED_BYTES * before, counts)
    places += PACKED_BYTES * np.arange(len(places))
    return heads, _items_at(data, places, EXTENT_COLUMNS)


def _check_whole(lengths: npt.NDArray[np.int64], least: npt.NDArray[np.int64] | np.int64) -> None:
    # Else the bytes of the next record would be taken for the rest.
    if (lengths < least).any():
        raise ValueError("a record is cut off")


def in_tier(heads: Heads, tier: Tier) -> npt.NDArray[np.bool_]:
    """Which of them lie in `tier`."""
    there: npt.NDArray[np.bool_] = heads["tier"] == _TIER_NUMBERS[tier]
    return there


def verifiable(heads: Heads) -> npt.NDArray[np.bool_]:
    """Which of them have checksums."""
    have: npt.NDArray[np.bool_] = heads["checksums"] != _NO_CHECKSUMS
    return have


def in_state(heads: Heads, state: SyncStatus, *, pinned: bool) -> npt.NDArray[np.bool_]:
    """Which of them are in `state`, and pinned or not."""
    is_pinned = heads["flags"] & _PINNED != 0
    there: npt.NDArray[np.bool_] = (heads["state"] == _STATE_NUMBERS[state]) & (is_pinned == pinned)
    return there


def _items_at(data: bytes, places: npt.NDArray[np.int64], item: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """A copy of the items of this kind that begin at these bytes, wherever that is."""
    if not len(places):
        return np.empty(0, item)
    overlapping: npt.NDArray[np.void] = np.ndarray((len(data) - item.itemsize + 1,), item, data, strides=(1,))
    return overlapping[places]
