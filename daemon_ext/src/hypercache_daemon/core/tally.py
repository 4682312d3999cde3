"""Who has the bytes of a pool, or of what lies under a prefix, and who leaves first there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import groupby, product

import numpy as np
import numpy.typing as npt

from hypercache_protocol.states import DIRTY, EVICTABLE, SyncStatus

from .eviction import EvictionPolicy
from .objects import StoredObject
from .records import STATES, Heads, in_state


class Tally:
    """Figures in bytes, of what is allocated; each change costs the same, however many objects there are.

    Args:
        policy: knows what may be evicted.
        evictable: the states in which an object may be, unless it is pinned.
    """

    def __init__(self, policy: EvictionPolicy, evictable: Set[SyncStatus] = EVICTABLE) -> None:
        self.policy = policy
        self._evictable = evictable
        self.used_bytes = 0
        self.staged_bytes = 0
        self.evictable_bytes = 0
        self.pinned_bytes = 0
        self.dirty_bytes = 0
        self.withheld_bytes = 0
        """Of objects that nobody finds, since a device that they lie on failed; none of the above."""
        self.counts = dict.fromkeys(SyncStatus, 0)
        """Committed objects by state."""

    def may_be_evicted(self, state: SyncStatus, pinned: bool) -> bool:
        """Whether policy may drop what is in this state, pinned or not."""
        return state in self._evictable and not pinned

    @property
    def taken_bytes(self) -> int:
        """What has an owner."""
        return self.used_bytes + self.staged_bytes + self.withheld_bytes

    def load(self, uris: Sequence[str], sizes: npt.NDArray[np.int64], heads: Heads) -> None:
        """Count the recorded objects, of which there were none before: what each takes is in `sizes`. What
        was committed first is the coldest."""
        evictable = np.zeros(len(heads), np.bool_)
        for state, pinned in product(STATES, (False, True)):
            there = in_state(heads, state, pinned=pinned)
            self._count(state, pinned, int(np.count_nonzero(there)), int(sizes[there].sum()))
            if self.may_be_evicted(state, pinned):
                evictable |= there
        oldest_first = np.argsort(heads["generation"], kind="stable")
        coldest_first = oldest_first[evictable[oldest_first]]
        keys = np.array(uris, np.object_)[coldest_first].tolist()
        self.policy.load(keys, sizes[coldest_first].tolist())

    def count_in(self, objects: Sequence[StoredObject], sizes: Sequence[int]) -> None:
        """These are here from now on, one after the other; what each takes is in `sizes`."""
        for stored, size_bytes in self._counted(objects, sizes, 1):
            self.policy.inserted(stored.uri, size_bytes)

    def count_out(self, objects: Sequence[StoredObject], sizes: Sequence[int]) -> None:
        """These are not here any more; what each took is in `sizes`."""
        for stored, _ in self._counted(objects, sizes, -1):
            self.policy.removed(stored.uri)

    def _counted(
        self, objects: Sequence[StoredObject], sizes: Sequence[int], sign: int
    ) -> Iterator[tuple[StoredObject, int]]:
        """Count them, those of one kind together; returns those that the policy is to know of."""
        for (state, pinned), group in groupby(zip(objects, sizes, strict=True), _kind):
            alike = list(group)
            self._count(state, pinned, sign * len(alike), sign * sum([size_bytes for _, size_bytes in alike]))
            if self.may_be_evicted(state, pinned):
                yield from alike

    def _count(self, state: SyncStatus, pinned: bool, number: int, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        self.counts[state] += number
        self.pinned_bytes += size_bytes if pinned else 0
        self.dirty_bytes += size_bytes if state in DIRTY else 0
        self.evictable_bytes += size_bytes if self.may_be_evicted(state, pinned) else 0


def _kind(counted: tuple[StoredObject, int]) -> tuple[SyncStatus, bool]:
    stored, _ = counted
    return stored.state, stored.pinned
