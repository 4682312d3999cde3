"""Where objects lie, as wire 2's batches say it: columns made of the packed chunks of all at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

import numpy as np

from hypercache_protocol.batches import LayoutColumns
from hypercache_protocol.layout import STATUS_CODES, TIER_CODES, U32, U64, packed, packed_bits

from .core.extents import EXTENT_COLUMNS, PACKED_BYTES
from .core.objects import StagedWrite, StoredObject
from .store import Store


def layout_columns(store: Store, hits: Sequence[StoredObject | StagedWrite]) -> LayoutColumns:
    """The layouts of these, in order."""
    # A lookup of many keys spends its time here: as few steps for each as it takes.
    each = [hit.packed_extents for hit in hits]
    counts = [len(one) // PACKED_BYTES for one in each]
    chunks = np.frombuffer(b"".join(each), EXTENT_COLUMNS)
    tiers = chain.from_iterable(map(repeat, [hit.tier for hit in hits], counts))
    places = list(zip(tiers, chunks["device"].tolist(), strict=True))
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    checksums = [hit.packed_checksums for hit in hits]
    return LayoutColumns.trusted(
        object_sizes=packed([hit.size_bytes for hit in hits], U64),
        generations=packed([hit.generation for hit in hits], U64),
        sync_statuses=bytes([STATUS_CODES[hit.announced] for hit in hits]),
        chunk_counts=packed(counts, U32),
        checksummed=packed_bits([sums is not None for sums in checksums]),
        paths=tuple([store.path(tier, device) for tier, device in numbers]),
        path_tiers=bytes([TIER_CODES[tier] for tier, _ in numbers]),
        chunk_paths=packed([numbers[place] for place in places], U32),
        chunk_offsets=chunks["offset"].tobytes(),
        chunk_lengths=chunks["length"].tobytes(),
        chunk_checksums=b"".join(map(_words, checksums, counts)),
    )


def _words(checksums: bytes | None, count: int) -> bytes:
    return bytes(U32.itemsize * count) if checksums is None else checksums
