"""How much may lie under a prefix of uris (a namespace, a tenant), and who leaves first there.

Rules:
1. A prefix counts by whole segments; what lies under several prefixes counts under each of them.
2. What objects and staged writes take of their pools counts, all tiers together, and so does what waits for
   a failed device. Blocks that rest are nobody's.
3. A prefix makes room among its own objects alone, in the order of a policy of its own: to look for them in
   that of a pool would mean to pass by the objects of all others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set

import numpy as np
import numpy.typing as npt

from hypercache_protocol.states import EVICTABLE, SyncStatus

from .eviction import EvictionPolicy
from .extents import rounded_up
from .objects import OverCapacity
from .records import Heads
from .tally import Tally


class Capacity(Tally):
    """What lies under one prefix.

    Args:
        prefix: ends with "/".
        limit_bytes: what used and staged blocks may be together. After a start with a lower limit they may
            be more, until something is to be staged.
    """

    def __init__(
        self,
        prefix: str,
        limit_bytes: int,
        policy: EvictionPolicy,
        evictable: Set[SyncStatus] = EVICTABLE,
    ) -> None:
        super().__init__(policy, evictable)
        self.prefix = prefix
        self.limit_bytes = limit_bytes

    @property
    def name(self) -> str:
        return self.prefix

    def could_hold(self, size_bytes: int) -> bool:
        """False where not even evicting all that may be evicted would make room for `size_bytes`."""
        return self.missing_bytes(size_bytes) <= self.evictable_bytes

    def missing_bytes(self, size_bytes: int) -> int:
        """How much must be evicted before `size_bytes` may be staged."""
        return max(0, self.taken_bytes + rounded_up(size_bytes) - self.limit_bytes)

    def excess_bytes(self, share: float) -> int:
        """How much more than this share of it is taken; below 0 where it is less."""
        return self.taken_bytes - int(self.limit_bytes * share)

    def no_space(self, wanted_bytes: int) -> OverCapacity:
        """The report on a request that does not fit."""
        return OverCapacity(
            wanted_bytes,
            self.prefix,
            self.limit_bytes,
            self.used_bytes,
            self.staged_bytes,
            self.pinned_bytes,
            self.dirty_bytes,
            self.withheld_bytes,
        )


class Capacities:
    """All prefixes with a limit; without any, nothing here costs anything."""

    def __init__(self, capacities: Iterable[Capacity] = ()) -> None:
        self._by_prefix = {capacity.prefix: capacity for capacity in capacities}
        self._most_segments = max((prefix.count("/") for prefix in self._by_prefix), default=0)
        self._edges = sorted(edge for prefix in self._by_prefix for edge in (prefix[:-1], prefix))
        self.nesting = max((len(self.above(prefix[:-1])) for prefix in self._by_prefix), default=0)
        """The most prefixes that one uri lies under."""

    def __iter__(self) -> Iterator[Capacity]:
        return iter(self._by_prefix.values())

    def __getitem__(self, prefix: str) -> Capacity:
        return self._by_prefix[prefix]

    def above(self, uri: str) -> list[Capacity]:
        """Whatever limits `uri`, the outermost first."""
        found: list[Capacity] = []
        below, end = uri + "/", 0
        for _ in range(self._most_segments):
            end = below.find("/", end) + 1
            if not end:
                break
            capacity = self._by_prefix.get(below[:end])
            if capacity is not None:
                found.append(capacity)
        return found

    def shared(self, uris: Sequence[str]) -> list[Capacity] | None:
        """What limits each of `uris`, or None where that isn't plain to see. Batches of one client mostly lie
        under one prefix, so only two of them are looked at."""
        if not self._by_prefix or not uris:
            return []
        first, last = min(uris), max(uris)
        # What sorts between two names has all their prefixes, and has more only if one begins in between.
        if bisect_right(self._edges, first) != bisect_right(self._edges, last):
            return None
        shared = self.above(first)
        return shared if shared == self.above(last) else None

    def around(self, uris: Sequence[str]) -> list[Capacity]:
        """Whatever limits some of `uris`."""
        return [capacity for capacity, _ in self._by_capacity(uris)]

    def touched(self, uris: Sequence[str]) -> None:
        """These were asked for together, in this order."""
        for capacity, under in self._by_capacity(uris):
            capacity.policy.touched(under)

    def load(self, uris: Iterable[str], sizes: npt.NDArray[np.int64], heads: Heads) -> None:
        """Count the objects of a catalog: what each takes is in `sizes`."""
        if not self._by_prefix:
            return
        names = list(uris)
        indexes: dict[Capacity, list[int]] = {}
        for index, uri in enumerate(names):
            for capacity in self.above(uri):
                indexes.setdefault(capacity, []).append(index)
        for capacity, chosen in indexes.items():
            capacity.load([names[index] for index in chosen], sizes[chosen], heads[chosen])

    def _by_capacity(self, uris: Sequence[str]) -> Iterable[tuple[Capacity, Sequence[str]]]:
        """Whatever limits some of `uris`, and which these are."""
        if (shared := self.shared(uris)) is not None:
            return [(capacity, uris) for capacity in shared]
        under: dict[Capacity, list[str]] = {}
        for uri in uris:
            for capacity in self.above(uri):
                under.setdefault(capacity, []).append(uri)
        return under.items()
