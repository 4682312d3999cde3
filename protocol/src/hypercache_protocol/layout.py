"""Columns and bitmaps of wire 2's batches: from layouts to little-endian arrays and back.

Rule: what comes from a peer is checked before it is used: the lengths of all columns against each other,
every index, every range. A column that lies is an `InvalidMessage`, never an odd layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .batches import LayoutColumns
from .errors import InvalidMessage
from .fields import CHUNK_SIZE, MAX_GENERATION, MAX_OBJECT_BYTES, Tier
from .messages import ChunkLocation, HitReply
from .states import SyncStatus

_T = TypeVar("_T")

U8, U32, U64 = np.dtype("u1"), np.dtype("<u4"), np.dtype("<u8")

STATUS_CODES: dict[SyncStatus, int] = {
    SyncStatus.STAGED: 0,
    SyncStatus.COMMITTED: 1,
    SyncStatus.SYNCING_BACKEND: 2,
    SyncStatus.SYNCED_BACKEND: 3,
    SyncStatus.LOCAL_ONLY: 4,
}
"""What a sync status is in a column. A code is never used again for something else."""

TIER_CODES: dict[Tier, int] = {Tier.NVME: 0, Tier.RAM: 1}

_STATUSES = {code: status for status, code in STATUS_CODES.items()}
_TIERS = {code: tier for tier, code in TIER_CODES.items()}


def packed_bits(flags: Sequence[bool]) -> bytes:
    """A bitmap: bit i is flags[i], the lowest bit of a byte first."""
    return np.packbits(np.frombuffer(bytes(flags), dtype=bool), bitorder="little").tobytes()


def unpacked_bits(bitmap: bytes, count: int) -> list[bool]:
    """The first `count` bits.

    Raises:
        InvalidMessage: the bitmap has not exactly the bytes for that many, or a bit beyond them.
    """
    flags: list[bool] = bit_array(bitmap, count).astype(bool).tolist()
    return flags


def bit_array(bitmap: bytes, count: int) -> npt.NDArray[np.uint8]:
    """The first `count` bits, each 0 or 1.

    Raises:
        InvalidMessage: as for `unpacked_bits`.
    """
    if len(bitmap) != (count + 7) // 8:
        raise InvalidMessage(
            f"a bitmap for {count} uris must have {(count + 7) // 8} bytes, not {len(bitmap)}"
        )
    bits = np.unpackbits(np.frombuffer(bitmap, dtype=U8), bitorder="little")
    if count % 8 and bitmap[-1] >> count % 8:
        raise InvalidMessage(f"a bitmap for {count} uris has a bit set beyond them")
    return bits[:count]


def packed(values: Sequence[int], dtype: npt.DTypeLike) -> bytes:
    """A column."""
    return np.array(values, dtype=dtype).tobytes()


def unpacked(name: str, column: bytes, dtype: np.dtype[np.generic], count: int) -> list[int]:
    """The values of a column that must have `count` of them.

    Raises:
        InvalidMessage: it has not.
    """
    if len(column) != count * dtype.itemsize:
        raise InvalidMessage(
            f"{name} must have {count} values, so {count * dtype.itemsize} bytes, not {len(column)}"
        )
    values: list[int] = np.frombuffer(column, dtype=dtype).tolist()
    return values


class Layout(NamedTuple):
    """Where one object lies: its chunks in order, as parallel sequences. `checksums` None: there are none."""

    size_bytes: int
    generation: int
    sync_status: SyncStatus
    tier: Tier
    paths: Sequence[str]
    offsets: Sequence[int]
    lengths: Sequence[int]
    checksums: Sequence[int] | None


def pack_layouts(layouts: Sequence[Layout]) -> LayoutColumns:
    """The columns of these layouts."""
    known: dict[tuple[str, Tier], int] = {}
    chunk_paths: list[int] = []
    checksums: list[int] = []
    for layout in layouts:
        tier = layout.tier
        chunk_paths += [known.setdefault((path, tier), len(known)) for path in layout.paths]
        checksums += [0] * len(layout.paths) if layout.checksums is None else layout.checksums
    return LayoutColumns.trusted(
        object_sizes=packed([layout.size_bytes for layout in layouts], U64),
        generations=packed([layout.generation for layout in layouts], U64),
        sync_statuses=bytes([STATUS_CODES[layout.sync_status] for layout in layouts]),
        chunk_counts=packed([len(layout.paths) for layout in layouts], U32),
        checksummed=packed_bits([layout.checksums is not None for layout in layouts]),
        paths=tuple([path for path, _ in known]),
        path_tiers=bytes([TIER_CODES[tier] for _, tier in known]),
        chunk_paths=packed(chunk_paths, U32),
        chunk_offsets=packed(list(chain.from_iterable([layout.offsets for layout in layouts])), U64),
        chunk_lengths=packed(list(chain.from_iterable([layout.lengths for layout in layouts])), U32),
        chunk_checksums=packed(checksums, U32),
    )


def unpack_layouts(columns: LayoutColumns, count: int) -> list[HitReply]:
    """The layouts that the columns hold, as the hits that single locates would have been.

    Args:
        count: how many there must be.

    Raises:
        InvalidMessage: the columns don't fit each other, or hold a value out of its range.
    """
    sizes = unpacked("object_sizes", columns.object_sizes, U64, count)
    generations = unpacked("generations", columns.generations, U64, count)
    if count and max(generations) > MAX_GENERATION:
        raise InvalidMessage("generations has a value out of range")
    statuses = _coded("sync_statuses", columns.sync_statuses, _STATUSES, count)
    counts = unpacked("chunk_counts", columns.chunk_counts, U32, count)
    checksummed = unpacked_bits(columns.checksummed, count)
    chunks = iter(_chunks(columns, counts, checksummed))
    hits = []
    for size_bytes, generation, status, chunk_count in zip(sizes, generations, statuses, counts, strict=True):
        layout = tuple(next(chunks) for _ in range(chunk_count))
        if sum(chunk.length for chunk in layout) != size_bytes or size_bytes > MAX_OBJECT_BYTES:
            raise InvalidMessage(f"an object of {size_bytes} bytes has chunks of another total length")
        hits.append(
            HitReply.trusted(
                object_size=size_bytes,
                chunk_size=CHUNK_SIZE,
                chunk_layout=layout,
                sync_status=status,
                generation=generation,
            )
        )
    return hits


def _chunks(
    columns: LayoutColumns, counts: Sequence[int], checksummed: Sequence[bool]
) -> list[ChunkLocation]:
    total = sum(counts)
    tiers = _coded("path_tiers", columns.path_tiers, _TIERS, len(columns.paths))
    indexes = unpacked("chunk_paths", columns.chunk_paths, U32, total)
    offsets = unpacked("chunk_offsets", columns.chunk_offsets, U64, total)
    lengths = unpacked("chunk_lengths", columns.chunk_lengths, U32, total)
    words = unpacked("chunk_checksums", columns.chunk_checksums, U32, total)
    if total and max(indexes) >= len(columns.paths):
        raise InvalidMessage(f"chunk_paths names path {max(indexes)} and there are {len(columns.paths)}")
    if total and not (min(lengths) >= 1 and max(lengths) <= CHUNK_SIZE and max(offsets) <= 1 << 62):
        raise InvalidMessage("chunk_lengths or chunk_offsets has a value out of range")
    known = chain.from_iterable([flag] * count for flag, count in zip(checksummed, counts, strict=True))
    return [
        ChunkLocation.trusted(
            device=columns.paths[index],
            offset=offset,
            length=length,
            tier=tiers[index],
            checksum=word if has_word else None,
        )
        for index, offset, length, word, has_word in zip(indexes, offsets, lengths, words, known, strict=True)
    ]


def _coded(name: str, column: bytes, meanings: dict[int, _T], count: int) -> list[_T]:
    codes = unpacked(name, column, U8, count)
    try:
        return [meanings[code] for code in codes]
    except KeyError as error:
        raise InvalidMessage(f"{name} has the code {error}, which this side does not know") from None


def unpack_statuses(column: bytes, count: int) -> list[SyncStatus]:
    """The sync statuses of a column that must have `count` of them.

    Raises:
        InvalidMessage: it has not, or one is of no known code.
    """
    return _coded("sync_statuses", column, _STATUSES, count)
