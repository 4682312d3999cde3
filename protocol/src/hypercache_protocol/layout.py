"""Columns and bitmaps of wire 2's batches: from layouts to little-endian arrays and back.

Rule: what comes from a peer is checked before it is used: the lengths of all columns against each other,
every index, every range. A column that lies is an `InvalidMessage`, never an odd layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .batches import LayoutColumns
from .errors import InvalidMessage
from .fields import CHUNK_SIZE, MAX_GENERATION, MAX_OBJECT_BYTES, MAX_OFFSET, Tier
from .messages import ChunkLocation, HitReply
from .states import SyncStatus

_T = TypeVar("_T")
_N = TypeVar("_N", bound=np.generic)

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
    """The first `count` bits, each 0 or 1; shape (count,).

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


def unpacked(name: str, column: bytes, dtype: np.dtype[Any], count: int) -> list[int]:
    """The values of a column that must have `count` of them.

    Raises:
        InvalidMessage: it has not.
    """
    values: list[int] = values_in(name, column, dtype, count).tolist()
    return values


def values_in(name: str, column: bytes, dtype: np.dtype[_N], count: int) -> npt.NDArray[_N]:
    """The same as an array of `dtype`, shape (count,), which is a view of the column.

    Raises:
        InvalidMessage: as for `unpacked`.
    """
    if len(column) != count * dtype.itemsize:
        raise InvalidMessage(
            f"{name} must have {count} values, so {count * dtype.itemsize} bytes, not {len(column)}"
        )
    return np.frombuffer(column, dtype=dtype)


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
    """The columns of these layouts, of which nothing is checked."""
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


class Layouts(NamedTuple):
    """Many layouts, as parallel lists: of the objects, and of all their chunks one after another.

    The chunks of the object at `i` are those from `starts[i]` up to `ends[i]`. A checksum is None where there
    is none.
    """

    sizes_bytes: list[int]
    generations: list[int]
    sync_statuses: list[SyncStatus]
    starts: list[int]
    ends: list[int]
    paths: list[str]
    tiers: list[Tier]
    offsets: list[int]
    lengths: list[int]
    checksums: list[int | None]


def unpack_layouts(columns: LayoutColumns, count: int) -> Layouts:
    """The layouts that the columns hold.

    Args:
        count: how many there must be.

    Raises:
        InvalidMessage: the columns don't fit each other, or hold a value out of its range.
    """
    sizes_bytes = values_in("object_sizes", columns.object_sizes, U64, count)
    generations = values_in("generations", columns.generations, U64, count)
    _check_range("generations", generations, 0, MAX_GENERATION)
    statuses = unpack_statuses(columns.sync_statuses, count)
    counts = values_in("chunk_counts", columns.chunk_counts, U32, count)
    checksummed = bit_array(columns.checksummed, count)

    total = int(counts.sum(dtype=U64))
    indexes = values_in("chunk_paths", columns.chunk_paths, U32, total)
    offsets = values_in("chunk_offsets", columns.chunk_offsets, U64, total)
    lengths = values_in("chunk_lengths", columns.chunk_lengths, U32, total)
    words = values_in("chunk_checksums", columns.chunk_checksums, U32, total)
    _check_range("chunk_lengths", lengths, 1, CHUNK_SIZE)
    _check_range("chunk_offsets", offsets, 0, MAX_OFFSET)

    # From here on there are as many chunks as are claimed.
    ends = np.cumsum(counts, dtype=np.int64)
    starts = ends - counts
    _check_sizes(sizes_bytes, lengths, starts, ends)
    paths, tiers = _places(columns, indexes)
    return Layouts(
        sizes_bytes.tolist(),
        generations.tolist(),
        statuses,
        starts.tolist(),
        ends.tolist(),
        paths,
        tiers,
        offsets.tolist(),
        lengths.tolist(),
        _where(np.repeat(checksummed, counts), words.tolist()),
    )


def unpack_hits(columns: LayoutColumns, count: int) -> list[HitReply]:
    """The same as the hits that single locates would have been.

    Raises:
        InvalidMessage: as for `unpack_layouts`.
    """
    layouts = unpack_layouts(columns, count)
    chunks = [
        ChunkLocation.trusted(device=path, offset=offset, length=length, tier=tier, checksum=word)
        for path, tier, offset, length, word in zip(
            layouts.paths, layouts.tiers, layouts.offsets, layouts.lengths, layouts.checksums, strict=True
        )
    ]
    return [
        HitReply.trusted(
            object_size=size_bytes,
            chunk_size=CHUNK_SIZE,
            chunk_layout=tuple(chunks[start:end]),
            sync_status=status,
            generation=generation,
        )
        for size_bytes, generation, status, start, end in zip(
            layouts.sizes_bytes,
            layouts.generations,
            layouts.sync_statuses,
            layouts.starts,
            layouts.ends,
            strict=True,
        )
    ]


def _check_range(name: str, values: npt.NDArray[np.unsignedinteger[Any]], least: int, most: int) -> None:
    if values.size and not (least <= int(values.min()) and int(values.max()) <= most):
        raise InvalidMessage(f"{name} has a value out of range")


def _check_sizes(
    sizes_bytes: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint32],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> None:
    """That each object is as large as its chunks together."""
    before = np.zeros(len(lengths) + 1, dtype=U64)
    np.cumsum(lengths, out=before[1:])
    wrong = (before[ends] - before[starts] != sizes_bytes) | (sizes_bytes > MAX_OBJECT_BYTES)
    if wrong.any():
        raise InvalidMessage(
            f"an object of {sizes_bytes[wrong.argmax()]} bytes has chunks of another total length"
        )


def _places(columns: LayoutColumns, indexes: npt.NDArray[np.uint32]) -> tuple[list[str], list[Tier]]:
    """The path and the tier of each chunk, by the index of its path."""
    tiers = _coded("path_tiers", columns.path_tiers, _TIERS, len(columns.paths))
    if indexes.size and indexes.max() >= len(columns.paths):
        raise InvalidMessage(f"chunk_paths names path {indexes.max()} and there are {len(columns.paths)}")
    each = indexes.tolist()
    return [columns.paths[index] for index in each], [tiers[index] for index in each]


def _where(known: npt.NDArray[np.uint8], words: list[int]) -> list[int | None]:
    if known.all():
        return [*words]
    return [word if is_known else None for word, is_known in zip(words, known.tolist(), strict=True)]


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
