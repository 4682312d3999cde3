"""Blocks of a pool that nobody owns and that are not free yet: somebody may still read or write them.

Rules:
1. What a client's reader may still read rests for its time, or until it is more than may rest; what a writer
   may still write rests for its time.
2. The time of what the daemon itself reads begins when it has read it.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice

from .objects import Hold


class Quarantine:
    """The holds of one pool.

    Args:
        limit_bytes: where shortenable holds have more, the oldest of them end before their time.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._retired: deque[Hold] = deque()  # shortenable, oldest first
        self._writers: list[Hold] = []  # not shortenable; few
        self._readers: Counter[int] = Counter()  # of the daemon itself, by the generation that they read
        self._parked: dict[int, Hold] = {}  # by generation: what they read, and nobody owns any more
        self.total_bytes = 0
        self.retired_bytes = 0

    @property
    def spare_bytes(self) -> int:
        """How much more of what readers may read could rest."""
        return max(0, self._limit_bytes - self.retired_bytes)

    def add(self, hold: Hold, generation: int | None) -> None:
        """These blocks rest, which the object of this generation had; None: a writer had them."""
        self.total_bytes += hold.allocated_bytes
        if generation is not None and generation in self._readers:
            self._parked[generation] = hold
        else:
            self._rest(hold)

    def begin_reading(self, generation: int) -> None:
        """The daemon reads the object of this generation, until as many `end_reading`."""
        self._readers[generation] += 1

    def end_reading(self, generation: int) -> None:
        """Undo one `begin_reading`. KeyError where there was none."""
        others = self._readers.pop(generation) - 1
        if others:
            self._readers[generation] = others
        elif generation in self._parked:
            self._rest(self._parked.pop(generation))

    def end_due(self, now: float, most: int) -> list[Hold]:
        """At most so many holds whose time has come, or which are too much together; they are no more."""
        due = list(islice((hold for hold in self._writers if hold.release_at <= now), most))
        if due:
            ended = set(map(id, due))
            self._writers = [hold for hold in self._writers if id(hold) not in ended]
        while len(due) < most and self._retired and self._may_end(self._retired[0], now):
            hold = self._retired.popleft()
            self.retired_bytes -= hold.allocated_bytes
            due.append(hold)
        self.total_bytes -= sum([hold.allocated_bytes for hold in due])
        return due

    def _rest(self, hold: Hold) -> None:
        if hold.shortenable:
            self._retired.append(hold)
            self.retired_bytes += hold.allocated_bytes
        else:
            self._writers.append(hold)

    def _may_end(self, hold: Hold, now: float) -> bool:
        return hold.release_at <= now or self.retired_bytes > self._limit_bytes
