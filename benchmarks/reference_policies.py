"""Eviction policies to compare with, behind the daemon's interface. For blocks of one size only.

ARC: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003).
GDSF: Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (1998).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from hypercache_daemon.core.eviction import walk


class Arc:
    """Keys seen once and keys seen again, in a balance that hits in the history of either shift."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once_wanted = 0.0
        self._once: OrderedDict[str, None] = OrderedDict()
        self._again: OrderedDict[str, None] = OrderedDict()
        self._once_left: OrderedDict[str, None] = OrderedDict()
        self._again_left: OrderedDict[str, None] = OrderedDict()

    def inserted(self, key: str, size_bytes: int) -> None:  # noqa: ARG002 - one size
        """Where the key comes out of a history, that list gets more room."""
        once, again = len(self._once_left), len(self._again_left)
        if key in self._once_left:
            self._once_wanted = min(self._capacity, self._once_wanted + max(1.0, again / once))
            del self._once_left[key]
            self._again[key] = None
        elif key in self._again_left:
            self._once_wanted = max(0.0, self._once_wanted - max(1.0, once / again))
            del self._again_left[key]
            self._again[key] = None
        else:
            self._once[key] = None
        self._trim()

    def touched(self, keys_in_batch_order: Sequence[str]) -> None:
        """Known keys are the hottest of those seen again."""
        for key in keys_in_batch_order:
            if key in self._once:
                del self._once[key]
                self._again[key] = None
            elif key in self._again:
                self._again.move_to_end(key)

    def removed(self, key: str) -> None:
        """The key goes into the history of its list."""
        for present, left in ((self._once, self._once_left), (self._again, self._again_left)):
            if key in present:
                del present[key]
                left[key] = None

    def victims(self) -> Iterator[str]:
        """From the keys seen once as long as they are more than wanted, else from the others."""
        lists = walk(self._once), walk(self._again)
        left = [len(self._once), len(self._again)]
        while any(left):
            number = 0 if left[0] and (left[0] > self._once_wanted or not left[1]) else 1
            left[number] -= 1
            key = next(lists[number], None)
            if key is not None:
                yield key

    def _trim(self) -> None:
        while self._once_left and len(self._once) + len(self._once_left) > self._capacity:
            self._once_left.popitem(last=False)
        while self._again_left and self._all() > 2 * self._capacity:
            self._again_left.popitem(last=False)

    def _all(self) -> int:
        return sum(map(len, (self._once, self._again, self._once_left, self._again_left)))


class Gdsf:
    """Each use is worth one; the worth that the last victim had is added to what is used from then on."""

    def __init__(self) -> None:
        self._floor = 0.0
        self._steps = 0
        self._uses: dict[str, int] = {}
        self._entry_of: dict[str, tuple[float, int, str]] = {}
        self._least_first: list[tuple[float, int, str]] = []  # some are out of date

    def inserted(self, key: str, size_bytes: int) -> None:  # noqa: ARG002 - one size
        """A first use."""
        self._uses[key] = 0
        self._use(key)

    def touched(self, keys_in_batch_order: Sequence[str]) -> None:
        """One more use of each known key."""
        for key in keys_in_batch_order:
            if key in self._uses:
                self._use(key)

    def removed(self, key: str) -> None:
        """The floor rises to what this key was worth."""
        entry = self._entry_of.pop(key, None)
        if entry is not None:
            self._floor = max(self._floor, entry[0])
            del self._uses[key]

    def victims(self) -> Iterator[str]:
        """What is worth least first."""
        named: list[tuple[float, int, str]] = []
        try:
            while self._least_first:
                entry = heapq.heappop(self._least_first)
                if self._entry_of.get(entry[2]) == entry:
                    named.append(entry)
                    yield entry[2]
        finally:
            for entry in named:
                if self._entry_of.get(entry[2]) == entry:
                    heapq.heappush(self._least_first, entry)

    def _use(self, key: str) -> None:
        self._steps += 1
        self._uses[key] += 1
        entry = self._floor + self._uses[key], self._steps, key
        self._entry_of[key] = entry
        heapq.heappush(self._least_first, entry)
