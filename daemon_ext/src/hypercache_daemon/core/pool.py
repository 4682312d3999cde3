"""One tier's blocks: who holds how many, and the quarantine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hypercache_protocol.fields import Tier
from hypercache_protocol.states import EVICTABLE, SyncStatus

from .eviction import EvictionPolicy
from .extents import Extent, ExtentTable, allocated_column, rounded_up
from .objects import Hold, NoSpace, Usage
from .quarantine import Quarantine
from .records import Columns, in_tier
from .tally import Tally


class BlockAllocator(Protocol):
    """What a pool needs of its allocator."""

    @property
    def total_bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...
    def allocate_all(self, sizes_bytes: Sequence[int]) -> list[tuple[Extent, ...]] | None: ...
    def claim(self, extents: Iterable[Extent]) -> None: ...
    def load(self, chunks: ExtentTable) -> None: ...
    def release(self, extents: Iterable[Extent]) -> None: ...


class Pool(Tally):
    """Keeps free + used + staged + quarantined == total at every moment.

    Args:
        quarantine_share: of the total; where shortenable holds have more, the oldest of them end before
            their time.
    """

    def __init__(
        self,
        tier: Tier,
        blocks: BlockAllocator,
        policy: EvictionPolicy,
        quarantine_share: float,
        evictable: Set[SyncStatus] = EVICTABLE,
    ) -> None:
        super().__init__(policy, evictable)
        self.tier = tier
        self.blocks = blocks
        self._quarantine = Quarantine(int(blocks.total_bytes * quarantine_share))

    @property
    def quarantined_bytes(self) -> int:
        """What nobody owns and is not free yet."""
        return self._quarantine.total_bytes

    def usage(self) -> Usage:
        """The pool in figures; what is withheld is used."""
        return Usage(
            self.blocks.total_bytes,
            self.blocks.free_bytes,
            self.used_bytes + self.withheld_bytes,
            self.staged_bytes,
            self.quarantined_bytes,
        )

    def no_space(self, wanted_bytes: int) -> NoSpace:
        """The report on a request that does not fit."""
        return NoSpace(
            wanted_bytes,
            self.tier,
            self.blocks.total_bytes,
            self.blocks.free_bytes,
            self.staged_bytes,
            self.quarantined_bytes,
            self.pinned_bytes,
            self.dirty_bytes,
            self.withheld_bytes,
        )

    @property
    def name(self) -> str:
        return f"the {self.tier.value} pool"

    def could_hold(self, size_bytes: int) -> bool:
        """False where not even evicting all that may be evicted would make room for `size_bytes`."""
        most_bytes = self.blocks.free_bytes + self._quarantine.retired_bytes + self.evictable_bytes
        return rounded_up(size_bytes) <= most_bytes

    def missing_bytes(self, size_bytes: int) -> int:
        """How much must be evicted before `size_bytes` are free: the quarantine keeps its share of it."""
        short_bytes = rounded_up(size_bytes) - self.blocks.free_bytes
        if short_bytes <= 0:
            return 0
        return short_bytes + self._quarantine.spare_bytes

    def excess_bytes(self, share: float) -> int:
        """How much more than this share of it is taken; below 0 where it is less. What rests becomes free by
        itself, and so doesn't count."""
        return self.taken_bytes - int(self.blocks.total_bytes * share)

    def load_blocks(self, columns: Columns) -> npt.NDArray[np.int64]:
        """The recorded objects of this tier own their blocks, and nobody owned any before. Returns what each
        takes, in bytes. ValueError where blocks have two owners or lie outside."""
        there = in_tier(columns.heads, self.tier)
        chunks = columns.chunks(there)
        self.blocks.load(chunks)
        return _sizes(columns.heads["extents"][there], chunks)

    # -- quarantine ------------------------------------------------------------------------------------

    def quarantine(self, hold: Hold, generation: int | None = None) -> None:
        """Keep the blocks of `hold` from being handed out, which the object of this generation had, or a
        writer."""
        self._quarantine.add(hold, generation)

    def begin_reading(self, generation: int) -> None:
        """The daemon reads the object of this generation: should nobody own its blocks any more meanwhile,
        their time does not run before `end_reading`."""
        self._quarantine.begin_reading(generation)

    def end_reading(self, generation: int) -> None:
        """Undo one `begin_reading`."""
        self._quarantine.end_reading(generation)

    def release_due(self, now: float, most: int) -> list[Hold]:
        """Free the blocks whose time has come, or whose quarantine is too large; returns their holds, at most
        so many."""
        due = self._quarantine.end_due(now, most)
        self.blocks.release(chain.from_iterable([hold.extents for hold in due]))
        return due


def _sizes(counts: npt.NDArray[np.uint32], chunks: ExtentTable) -> npt.NDArray[np.int64]:
    """What each object takes of the pool, in bytes: the first has the first so many chunks, and so on."""
    sums = np.concatenate(([0], np.cumsum(allocated_column(chunks))))
    ends = np.cumsum(counts, dtype=np.int64)
    sizes: npt.NDArray[np.int64] = sums[ends] - sums[ends - counts]
    return sizes
