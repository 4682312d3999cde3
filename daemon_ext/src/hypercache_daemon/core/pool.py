"""One tier's blocks: who holds how many, and the quarantine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set
from itertools import chain, islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hypercache_protocol.fields import Tier
from hypercache_protocol.states import EVICTABLE, SyncStatus

from .allocator import Extent
from .eviction import EvictionPolicy
from .extents import ExtentTable, allocated_column, rounded_up
from .objects import Hold, NoSpace, Usage
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
        self._quarantine_limit = int(blocks.total_bytes * quarantine_share)
        self._retired: deque[Hold] = deque()  # shortenable, oldest first
        self._writers: list[Hold] = []  # not shortenable; few
        self.quarantined_bytes = 0
        self._retired_bytes = 0

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
        most_bytes = self.blocks.free_bytes + self._retired_bytes + self.evictable_bytes
        return rounded_up(size_bytes) <= most_bytes

    def missing_bytes(self, size_bytes: int) -> int:
        """How much must be evicted before `size_bytes` are free: the quarantine keeps its share of it."""
        short_bytes = rounded_up(size_bytes) - self.blocks.free_bytes
        if short_bytes <= 0:
            return 0
        return short_bytes + max(0, self._quarantine_limit - self._retired_bytes)

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

    def quarantine(self, hold: Hold) -> None:
        """Keep the blocks of `hold`, which nobody owns any more, from being handed out."""
        self.park(hold)
        self.unpark(hold)

    def park(self, hold: Hold) -> None:
        """Like `quarantine`, but its time does not run before `unpark`: the daemon itself reads them."""
        self.quarantined_bytes += hold.allocated_bytes

    def unpark(self, hold: Hold) -> None:
        """Let the time of a parked hold run."""
        if hold.shortenable:
            self._retired.append(hold)
            self._retired_bytes += hold.allocated_bytes
        else:
            self._writers.append(hold)

    def release_due(self, now: float, most: int) -> list[Hold]:
        """Free the blocks whose time has come, or whose quarantine is too large; returns their holds, at most
        so many."""
        due = list(islice((hold for hold in self._writers if hold.release_at <= now), most))
        if due:
            ended = set(map(id, due))
            self._writers = [hold for hold in self._writers if id(hold) not in ended]
        while len(due) < most and self._retired and self._may_end(self._retired[0], now):
            hold = self._retired.popleft()
            self._retired_bytes -= hold.allocated_bytes
            due.append(hold)
        self.blocks.release(chain.from_iterable([hold.extents for hold in due]))
        self.quarantined_bytes -= sum([hold.allocated_bytes for hold in due])
        return due

    def _may_end(self, hold: Hold, now: float) -> bool:
        return hold.release_at <= now or self._retired_bytes > self._quarantine_limit


def _sizes(counts: npt.NDArray[np.uint32], chunks: ExtentTable) -> npt.NDArray[np.int64]:
    """What each object takes of the pool, in bytes: the first has the first so many chunks, and so on."""
    sums = np.concatenate(([0], np.cumsum(allocated_column(chunks))))
    ends = np.cumsum(counts, dtype=np.int64)
    sizes: npt.NDArray[np.int64] = sums[ends] - sums[ends - counts]
    return sizes
