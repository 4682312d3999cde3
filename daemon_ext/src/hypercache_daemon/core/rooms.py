"""Wherever a write must fit in, and what is kept counts: a pool, and each prefix above that has a limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, groupby
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hypercache_protocol.fields import Tier

from .capacities import Capacities, Capacity
from .extents import rounded_up
from .objects import NoRoom, NoSpace, StagedWrite, StoredObject
from .pool import Pool
from .records import Columns, Heads, in_tier
from .tally import Tally

Room: TypeAlias = Pool | Capacity
"""What can be too full, and make room by eviction."""

Want: TypeAlias = tuple[str, int, Tier]
"""A write that is to be staged: its uri, how many bytes it wants, and where."""


class Rooms:
    """All of them: every prefix with a limit, then every pool, for what leaves under a prefix makes room in
    its pool."""

    def __init__(self, pools: Mapping[Tier, Pool], capacities: Capacities) -> None:
        self._pools = pools
        self._capacities = capacities

    def __iter__(self) -> Iterator[Room]:
        yield from self._capacities
        yield from self._pools.values()

    def above(self, uri: str, tier: Tier) -> list[Room]:
        """Wherever a write must fit in. The innermost prefix first: what leaves there makes room in those
        around it as well."""
        return [*reversed(self._capacities.above(uri)), self._pools[tier]]

    def around(self, uris: Sequence[str]) -> list[Room]:
        """Every pool, and the prefixes that some of these lie under."""
        return [*self._pools.values(), *self._capacities.around(uris)]

    def of(self, report: NoRoom) -> Room:
        """What was too full for a request."""
        return self._pools[report.tier] if isinstance(report, NoSpace) else self._capacities[report.prefix]

    def load(self, records: Mapping[str, bytes]) -> Heads:
        """Give each object of a catalog its blocks and count it; returns the heads of the records. ValueError
        where blocks have two owners or lie outside."""
        heads, sizes = self._load_blocks(records)
        for tier, pool in self._pools.items():
            there = in_tier(heads, tier)
            pool.load(list(compress(records, there)), sizes[there], heads[there])
        self._capacities.load(records, sizes, heads)
        return heads

    def _load_blocks(self, records: Mapping[str, bytes]) -> tuple[Heads, npt.NDArray[np.int64]]:
        """The heads, and what each object takes in bytes."""
        columns = Columns(records.values())
        sizes = np.zeros(len(records), np.int64)
        for tier, pool in self._pools.items():
            sizes[in_tier(columns.heads, tier)] = pool.load_blocks(columns)
        return columns.heads, sizes

    # -- what fits -------------------------------------------------------------------------------------

    def that_hold(self, uris: Sequence[str], wanted_bytes: int, tier: Tier) -> list[Room] | None:
        """Wherever these writes must fit in, which want so much together; None where it isn't plain to see
        that they do."""
        limits = self._capacities.shared(uris)
        if limits is None:
            return None
        rooms: list[Room] = [*limits, self._pools[tier]]
        return None if any(room.missing_bytes(wanted_bytes) for room in rooms) else rooms

    def too_full(self, want: Want) -> Room | None:
        """Where room must be made first. Above all that is where none can be: then nothing is evicted
        elsewhere, in vain."""
        uri, size_bytes, tier = want
        full = [room for room in self.above(uri, tier) if room.missing_bytes(size_bytes)]
        hopeless = [room for room in full if not room.could_hold(size_bytes)]
        return next(iter(hopeless or full), None)

    def misfit(self, want: Want) -> NoRoom | None:
        """Why a write could not be staged even if all were evicted that may be."""
        uri, size_bytes, tier = want
        hopeless = [room for room in self.above(uri, tier) if not room.could_hold(size_bytes)]
        return hopeless[0].no_space(size_bytes) if hopeless else None

    def that_fit_together(self, wants: Sequence[Want]) -> list[bool]:
        """Which of these could be held at once, the first of them first, were all evicted that may be."""
        taken: dict[Room, int] = {}
        fit: list[bool] = []
        for uri, size_bytes, tier in wants:
            sums = {room: taken.get(room, 0) + rounded_up(size_bytes) for room in self.above(uri, tier)}
            fit.append(all(room.could_hold(sum_bytes) for room, sum_bytes in sums.items()))
            if fit[-1]:
                taken |= sums
        return fit

    # -- what counts -----------------------------------------------------------------------------------

    def count_in(self, objects: Sequence[StoredObject]) -> None:
        """These are found from now on, one after the other."""
        for tally, some, sizes in self._tallied(objects):
            tally.count_in(some, sizes)

    def count_out(self, objects: Sequence[StoredObject]) -> None:
        """These are not found any more."""
        for tally, some, sizes in self._tallied(objects):
            tally.count_out(some, sizes)

    def count_committed(self, objects: Sequence[StoredObject]) -> None:
        """What was staged is these objects from now on."""
        for tally, some, sizes in self._tallied(objects):
            tally.staged_bytes -= sum(sizes)
            tally.count_in(some, sizes)

    def count_staged(self, staged: StagedWrite, size_bytes: int) -> None:
        """A staged write has so much more."""
        for room in self.above(staged.uri, staged.tier):
            room.staged_bytes += size_bytes

    def count_withheld(self, stored: StoredObject, number: int) -> None:
        """The object is withheld (1), or is so no longer (-1)."""
        size_bytes = stored.allocated_bytes
        for room in self.above(stored.uri, stored.tier):
            room.withheld_bytes += number * size_bytes

    def _tallied(
        self, objects: Sequence[StoredObject]
    ) -> Iterator[tuple[Tally, list[StoredObject], list[int]]]:
        """Wherever some of these count: which of them, and what each takes in bytes."""
        limits = self._capacities.shared([stored.uri for stored in objects])
        if limits is None:
            for stored in objects:
                yield from self._tallied([stored])
            return
        for tier, group in groupby(objects, attrgetter("tier")):
            some = list(group)
            sizes = [stored.allocated_bytes for stored in some]
            for tally in (self._pools[tier], *limits):
                yield tally, some, sizes
