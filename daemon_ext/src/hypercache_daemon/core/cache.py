"""The cache's decisions: which write becomes which object, and what is free. No I/O, and time is an argument.

Rules:
1. Every change that the catalog must know of first has a `plan_…` that changes nothing and an `apply_…`
   that cannot fail. The shell makes the plan durable in between, under a lock on the uri.
2. Blocks go free -> staged -> used -> quarantined -> free, and never skip the quarantine once a client has
   seen them.
3. A commit swaps whole objects: a reader gets the old layout or the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hypercache_protocol.fields import Tier
from hypercache_protocol.states import StateEvent, SyncStatus, next_state

from .capacities import Capacities, Capacity
from .extents import PACKED_BYTES, Extent, packed, rounded_up
from .object_table import ObjectTable
from .objects import Hold, NoRoom, NoSpace, StagedWrite, StoredObject, allocated_bytes
from .pool import Pool
from .presence import PresenceWords
from .records import Columns, Heads, in_tier, verifiable
from .tally import Tally

Room: TypeAlias = Pool | Capacity
"""What can be too full, and make room by eviction."""

Want: TypeAlias = tuple[str, int, Tier]
"""A write that is to be staged: its uri, how many bytes it wants, and where."""


@dataclass(frozen=True)
class Times:
    """How long blocks rest, in seconds."""

    quarantine_s: float = 10.0
    stage_expiry_s: float = 3600.0


@dataclass(frozen=True)
class NotStaged:
    """No staged write fits the request; `stale` where its stage_id is no longer valid."""

    uri: str
    stale: bool


@dataclass(frozen=True, slots=True)
class StageOptions:
    """What a stage_write asks for beside its size."""

    auto_flush: bool
    write_through: bool
    pinned: bool


class Cache:
    """All objects, staged writes and pools of one daemon.

    Args:
        epoch: differs at every start of the daemon and grows; it keeps generations and stage ids unique.
    """

    def __init__(
        self,
        pools: Mapping[Tier, Pool],
        epoch: int,
        times: Times,
        capacities: Capacities | None = None,
    ) -> None:
        self.pools = pools
        self.capacities = capacities or Capacities()
        self.times = times
        self._epoch = epoch
        self._counter = 0
        self._objects = ObjectTable()
        self._staged: dict[str, StagedWrite] = {}  # by stage_id, oldest first
        self._staged_by_uri: dict[str, list[StagedWrite]] = {}  # oldest first, of clients
        self._own_by_uri: dict[str, list[StagedWrite]] = {}  # of the daemon itself
        self._withheld = ObjectTable()
        self._reading: dict[int, int] = {}  # generation -> the daemon's own readers
        self._parked: dict[int, Hold] = {}

    # -- looking ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, uri: str) -> StoredObject | None:
        """The committed object, without touching it."""
        return self._objects.get(uri)

    def peek(self, uri: str) -> StoredObject | None:
        """Like `get`, for who goes through all objects: it costs no memory that stays."""
        return self._objects.peek(uri)

    def owner(self, uri: str) -> StoredObject | None:
        """The object that has blocks under this uri, which nobody finds where it is withheld."""
        return self._objects.get(uri) or self._withheld.peek(uri)

    def owners(self, uris: Sequence[str]) -> list[StoredObject | None]:
        """The same for each of these."""
        found = self._objects.many(uris)
        if not len(self._withheld):
            return found
        return [here or self._withheld.peek(uri) for here, uri in zip(found, uris, strict=True)]

    @property
    def newest_generation(self) -> int:
        """No object has a greater one."""
        return self._epoch << 40 | self._counter

    def locate(self, uris: Sequence[str]) -> list[StoredObject | None]:
        """The committed objects of one batch, in its order; counts as a use of each."""
        found = self._objects.many(uris)
        # A policy passes over what is absent, pinned, dirty or another pool's, but for a batch's end: where
        # nothing is here that is all there is for it to see.
        asked = uris if any(found) else uris[-1:]
        for pool in self.pools.values():
            if pool.used_bytes:
                pool.policy.touched(asked)
        self.capacities.touched(asked)
        return found

    def newest_staged(self, uri: str) -> StagedWrite | None:
        """What clients wrote last under a uri and have not committed."""
        writes = self._staged_by_uri.get(uri)
        return writes[-1] if writes else None

    def staged_writes(self) -> list[StagedWrite]:
        """All of them, the daemon's own too, oldest first."""
        return list(self._staged.values())

    def writes_of(self, uri: str) -> list[StagedWrite]:
        """What is staged under a uri, by clients and by the daemon itself."""
        return [*self._staged_by_uri.get(uri, ()), *self._own_by_uri.get(uri, ())]

    @property
    def has_staged_writes(self) -> bool:
        """Whether clients have writes that are not committed."""
        return bool(self._staged_by_uri)

    def objects(self) -> Iterator[StoredObject]:
        """Every committed object, in no promised order."""
        return self._objects.values()

    def uris(self, state: SyncStatus | None = None) -> list[str]:
        """The uris of all objects, or of those in `state`, in no promised order."""
        return self._objects.uris() if state is None else self._objects.in_state(state)

    def counts(self) -> dict[SyncStatus, int]:
        """How many objects and staged writes are in each state."""
        counts = {state: sum(pool.counts[state] for pool in self.pools.values()) for state in SyncStatus}
        return counts | {SyncStatus.STAGED: len(self._staged)}

    # -- staging ---------------------------------------------------------------------------------------

    def stage(
        self,
        uri: str,
        size_bytes: int,
        tier: Tier,
        connection_id: int | None,
        options: StageOptions,
        now: float,
    ) -> StagedWrite | NoRoom:
        """Blocks of its own for a new write of `uri`; `connection_id` None is the daemon itself."""
        staged = self.stage_all([uri], [size_bytes], tier, connection_id, options, now)
        if staged is not None:
            return staged[0]
        full = self._too_full(uri, size_bytes, tier)
        assert full is not None, "what limits one write is plain to see"
        return full.no_space(size_bytes)

    def stage_all(
        self,
        uris: Sequence[str],
        sizes_bytes: Sequence[int],
        tier: Tier,
        connection_id: int | None,
        options: StageOptions,
        now: float,
    ) -> list[StagedWrite] | None:
        """Like `stage` for each of these, for a fraction of what that costs; None, and nothing is staged,
        where it isn't plain to see that there is room for all of them."""
        limits = self.capacities.shared(uris)
        wanted_bytes = sum(map(rounded_up, sizes_bytes))
        if limits is None:
            return None
        rooms: list[Room] = [*limits, self.pools[tier]]
        if any(room.missing_bytes(wanted_bytes) for room in rooms):
            return None
        for room in rooms:
            room.staged_bytes += wanted_bytes
        placed = self._allocated(sizes_bytes, tier)
        fresh = [
            StagedWrite(
                f"{self._next():x}",
                uri,
                tier,
                connection_id,
                options.auto_flush,
                options.write_through,
                options.pinned,
                now,
                packed(extents),
                size_bytes,
            )
            for uri, size_bytes, extents in zip(uris, sizes_bytes, placed, strict=True)
        ]
        for staged in fresh:
            self._staged[staged.stage_id] = staged
            self._writes_like(staged).setdefault(staged.uri, []).append(staged)
        return fresh

    def append(self, staged: StagedWrite, size_bytes: int, now: float) -> tuple[Extent, ...] | NoRoom:
        """More blocks for a staged write: only the new ones."""
        full = self._too_full(staged.uri, size_bytes, staged.tier)
        if full is not None:
            return full.no_space(size_bytes)
        (extents,) = self._allocated([size_bytes], staged.tier)
        self._count_staged(staged, allocated_bytes(extents))
        staged.packed_extents += packed(extents)
        staged.size_bytes += size_bytes
        staged.touched_at = now
        return extents

    def find_staged(self, uri: str, connection_id: int, stage_id: str | None) -> StagedWrite | NotStaged:
        """The write that an append or a commit means: the one named, else the connection's newest of that
        uri, else the newest of all."""
        if stage_id is not None:
            named = self._staged.get(stage_id)
            if named is None or named.uri != uri or named.connection_id is None:
                return NotStaged(uri, stale=True)
            return named
        writes = self._staged_by_uri.get(uri, [])
        own = [staged for staged in writes if staged.connection_id == connection_id]
        candidates = own or writes
        return candidates[-1] if candidates else NotStaged(uri, stale=False)

    def discard(self, staged: StagedWrite, now: float, quarantine_s: float) -> Hold:
        """Drop a staged write; its blocks rest, for the writer may still be writing."""
        self._forget_staged(staged)
        extents = staged.packed_extents
        hold = Hold(staged.stage_id, staged.tier, extents, now + quarantine_s, shortenable=False)
        self._unstage(staged, staged.extents)
        self.pools[staged.tier].quarantine(hold)
        return hold

    def undo_stage(self, staged: StagedWrite) -> None:
        """Take back a staged write that no client has heard of: its blocks are free at once."""
        self._forget_staged(staged)
        self._free_unseen(staged, staged.extents)

    def undo_append(self, staged: StagedWrite, extents: Sequence[Extent]) -> None:
        """Take back the last append, which no client has heard of."""
        kept = staged.chunk_count - len(extents)
        staged.packed_extents = staged.packed_extents[: PACKED_BYTES * kept]
        staged.size_bytes -= sum(extent.length for extent in extents)
        self._free_unseen(staged, extents)

    def expired(self, now: float, is_free: Callable[[str], bool]) -> list[StagedWrite]:
        """Staged writes of clients that nobody touched for the expiry time; those whose uri is not free are
        passed over."""
        deadline = now - self.times.stage_expiry_s
        return [
            staged
            for staged in self._staged.values()
            if staged.touched_at <= deadline and staged.connection_id is not None and is_free(staged.uri)
        ]

    # -- committing and removing ----------------------------------------------------------------------

    def plan_commit(
        self,
        staged: StagedWrite,
        event: StateEvent,
        *,
        checksums: bytes | None = None,
        sha256: str | None = None,
        announce_committed: bool = False,
    ) -> StoredObject:
        """The object that the staged write becomes; its CRC-32s are packed. A pin is kept when an object is
        replaced."""
        before = self.owner(staged.uri)
        return StoredObject(
            staged.uri,
            staged.tier,
            staged.size_bytes,
            staged.packed_extents,
            checksums,
            self._next(),
            next_state(SyncStatus.STAGED, event),
            staged.pinned or (before is not None and before.pinned),
            sha256,
            announce_committed,
        )

    def apply_commits(
        self, planned: Sequence[tuple[StagedWrite, StoredObject]], now: float
    ) -> list[Hold | None]:
        """Swap the objects in, all of different uris; returns for each the hold on the blocks of the one that
        it replaces."""
        for staged, _ in planned:
            self._forget_staged(staged)
            for other in self._own_by_uri.get(staged.uri, ()):
                other.overtaken = True
        objects = [stored for _, stored in planned]
        uris = [stored.uri for stored in objects]
        holds = self._retired(uris, self._objects.put(objects), now)
        for tally, some, sizes in self._tallied(objects):
            tally.staged_bytes -= sum(sizes)
            tally.count_in(some, sizes)
        return holds

    def plan_hold(self, stored: StoredObject, now: float) -> Hold:
        """How the blocks of an object rest once it is removed or replaced."""
        release_at = now + self.times.quarantine_s
        hold_id = f"{stored.generation:x}"
        return Hold(hold_id, stored.tier, stored.packed_extents, release_at, shortenable=True)

    def apply_removes(self, uris: Sequence[str], now: float) -> list[Hold | None]:
        """Drop the committed objects of these uris, which are all different; returns for each the hold on its
        blocks, if there is one."""
        return self._retired(uris, self._objects.pop(uris), now)

    def apply_change(self, changed: StoredObject) -> None:
        """Put `changed` in the place of the object with its uri: same blocks, other state or pin."""
        before = self.owner(changed.uri)
        assert before is not None, "only what is here can change"
        assert before.generation == changed.generation, "a change must not swap blocks"
        if self._withheld.peek(changed.uri) is not None:
            self._withheld.put([changed])
            return
        self._count_out([before])
        self._objects.put([changed])
        self._count_in(changed)

    def changed(self, stored: StoredObject, event: StateEvent) -> StoredObject:
        """`stored` after `event`."""
        return stored._replace(state=next_state(stored.state, event))

    def may_be_evicted(self, stored: StoredObject) -> bool:
        """Whether policy may drop it."""
        return self.pools[stored.tier].may_be_evicted(stored.state, stored.pinned)

    def all_rooms(self) -> list[Room]:
        """Every prefix with a limit, then every pool: what leaves under a prefix makes room in its pool."""
        return [*self.capacities, *self.pools.values()]

    def rooms(self, uri: str, tier: Tier) -> list[Room]:
        """Wherever a write must fit in. The innermost prefix first: what leaves there makes room in those
        around it as well."""
        return [*reversed(self.capacities.above(uri)), self.pools[tier]]

    def that_fit_together(self, wants: Sequence[Want]) -> list[bool]:
        """Which of these could be held at once, the first of them first, were all evicted that may be."""
        taken: dict[Room, int] = {}
        fit: list[bool] = []
        for uri, size_bytes, tier in wants:
            sums = {room: taken.get(room, 0) + rounded_up(size_bytes) for room in self.rooms(uri, tier)}
            fit.append(all(room.could_hold(sum_bytes) for room, sum_bytes in sums.items()))
            if fit[-1]:
                taken |= sums
        return fit

    def misfit(self, want: Want) -> NoRoom | None:
        """Why a write could not be staged even if all were evicted that may be."""
        uri, size_bytes, tier = want
        hopeless = [room for room in self.rooms(uri, tier) if not room.could_hold(size_bytes)]
        return hopeless[0].no_space(size_bytes) if hopeless else None

    def room(self, report: NoRoom) -> Room:
        """What was too full for a request."""
        return self.pools[report.tier] if isinstance(report, NoSpace) else self.capacities[report.prefix]

    def victims(
        self, room: Room, wanted_bytes: int, is_free: Callable[[str], bool], most: int
    ) -> list[StoredObject]:
        """The coldest objects there that may be evicted and together free `wanted_bytes`, but no more than
        `most`; those whose uri is not free are passed over."""
        chosen: list[StoredObject] = []
        missing = wanted_bytes
        for uri in room.policy.victims():
            if missing <= 0 or len(chosen) >= most:
                break
            if is_free(uri):
                stored = self._objects.peek(uri)
                assert stored is not None, "a policy knows only what is here"
                chosen.append(stored)
                missing -= stored.allocated_bytes
        return chosen

    # -- what lies on a device that failed -------------------------------------------------------------

    def withhold(self, uri: str) -> None:
        """Let nobody find the object that is here under this uri. Its blocks stay its own until it is given
        back, removed or replaced, and an upload that is under way may still end well."""
        stored = self._objects.peek(uri)
        assert stored is not None, "only what is here can be withheld"
        self._count_out([stored])
        self._count_withheld(stored, 1)
        self._objects.hand_over(uri, self._withheld)

    def give_back(self, uri: str) -> StoredObject:
        """Let everybody find what was withheld under this uri."""
        stored = self._withheld.peek(uri)
        assert stored is not None, "only what is withheld can be given back"
        self._count_withheld(stored, -1)
        self._withheld.hand_over(uri, self._objects)
        self._count_in(stored)
        return stored

    def withheld(self) -> list[str]:
        """The uris of everything that is withheld; `owner` has the objects."""
        return self._withheld.uris()

    def withheld_at(self, uri: str) -> StoredObject | None:
        """What is withheld under this uri."""
        return self._withheld.peek(uri)

    def withholds_the_newest(self, uri: str) -> bool:
        """Whether what is withheld under this uri is newer than what any backend has."""
        stored = self._withheld.peek(uri)
        return stored is not None and stored.state is not SyncStatus.SYNCED_BACKEND

    # -- blocks that rest ------------------------------------------------------------------------------

    def release_due(self, now: float, most: int) -> list[Hold]:
        """Free what has rested long enough, of each pool at most so many holds."""
        return [hold for pool in self.pools.values() for hold in pool.release_due(now, most)]

    def begin_reading(self, stored: StoredObject) -> None:
        """The daemon reads the object's blocks: they stay its own, removed or not, until `end_reading`."""
        self._reading[stored.generation] = self._reading.get(stored.generation, 0) + 1

    def end_reading(self, stored: StoredObject) -> None:
        """Undo one `begin_reading`."""
        self._reading[stored.generation] -= 1
        if self._reading[stored.generation] == 0:
            del self._reading[stored.generation]
            parked = self._parked.pop(stored.generation, None)
            if parked is not None:
                self.pools[parked.tier].unpark(parked)

    # -- what clients see without asking ---------------------------------------------------------------

    def publish(self, words: PresenceWords) -> None:
        """Keep in `words`, which are empty yet, which objects are here from now on: before any is."""
        self._objects.publish(words)

    # -- loading the catalog ---------------------------------------------------------------------------

    def load(self, records: dict[str, bytes]) -> None:
        """Take all objects from the catalog: a record for each uri, in any order. The dict is the cache's
        own from then on. ValueError where blocks have two owners or lie outside."""
        heads, sizes = self._load_blocks(records)
        for tier, pool in self.pools.items():
            there = in_tier(heads, tier)
            pool.load(list(compress(records, there)), sizes[there], heads[there])
        self.capacities.load(records, sizes, heads)
        self._objects.load(records, verifiable(heads))

    def _load_blocks(self, records: dict[str, bytes]) -> tuple[Heads, npt.NDArray[np.int64]]:
        """Give each object its blocks; returns the heads, and what each takes in bytes."""
        columns = Columns(records.values())
        sizes = np.zeros(len(records), np.int64)
        for tier, pool in self.pools.items():
            sizes[in_tier(columns.heads, tier)] = pool.load_blocks(columns)
        return columns.heads, sizes

    def load_hold(self, hold: Hold) -> None:
        """Take a hold from the catalog, after the objects. ValueError as for `load`."""
        pool = self.pools[hold.tier]
        pool.blocks.claim(hold.extents)
        pool.quarantine(hold)

    # -- inside ----------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._counter += 1
        return self.newest_generation

    def _tallies(self, tier: Tier, uri: str) -> tuple[Tally, ...]:
        """Wherever something of this name counts."""
        return (self.pools[tier], *self.capacities.above(uri))

    def _tallied(
        self, objects: Sequence[StoredObject]
    ) -> Iterator[tuple[Tally, list[StoredObject], list[int]]]:
        """Wherever some of these count: which of them, and what each takes in bytes."""
        limits = self.capacities.shared([stored.uri for stored in objects])
        if limits is None:
            for stored in objects:
                yield from self._tallied([stored])
            return
        for tier, group in groupby(objects, attrgetter("tier")):
            some = list(group)
            sizes = [stored.allocated_bytes for stored in some]
            for tally in (self.pools[tier], *limits):
                yield tally, some, sizes

    def _count_in(self, stored: StoredObject) -> None:
        for tally, some, sizes in self._tallied([stored]):
            tally.count_in(some, sizes)

    def _count_out(self, objects: Sequence[StoredObject]) -> None:
        for tally, some, sizes in self._tallied(objects):
            tally.count_out(some, sizes)

    def _count_withheld(self, stored: StoredObject, number: int) -> None:
        size_bytes = stored.allocated_bytes
        for tally in self._tallies(stored.tier, stored.uri):
            tally.withheld_bytes += number * size_bytes

    def _count_staged(self, staged: StagedWrite, size_bytes: int) -> None:
        for tally in self._tallies(staged.tier, staged.uri):
            tally.staged_bytes += size_bytes

    def _allocated(self, sizes_bytes: Sequence[int], tier: Tier) -> list[tuple[Extent, ...]]:
        """Blocks for writers, for whom there is room."""
        placed = self.pools[tier].blocks.allocate_all(sizes_bytes)
        assert placed is not None, "a pool that misses nothing has that much"
        return placed

    def _too_full(self, uri: str, size_bytes: int, tier: Tier) -> Room | None:
        """Where room must be made first. Above all that is where none can be: then nothing is evicted
        elsewhere, in vain."""
        full = [room for room in self.rooms(uri, tier) if room.missing_bytes(size_bytes)]
        hopeless = [room for room in full if not room.could_hold(size_bytes)]
        return next(iter(hopeless or full), None)

    def _unstage(self, staged: StagedWrite, extents: Sequence[Extent]) -> None:
        """These blocks are no writer's any more; the caller says at once whose they are."""
        self._count_staged(staged, -allocated_bytes(extents))

    def _free_unseen(self, staged: StagedWrite, extents: Sequence[Extent]) -> None:
        self._unstage(staged, extents)
        self.pools[staged.tier].blocks.release(extents)

    def _forget_staged(self, staged: StagedWrite) -> None:
        del self._staged[staged.stage_id]
        by_uri = self._writes_like(staged)
        writes = by_uri[staged.uri]
        writes.remove(staged)
        if not writes:
            del by_uri[staged.uri]

    def _writes_like(self, staged: StagedWrite) -> dict[str, list[StagedWrite]]:
        return self._own_by_uri if staged.connection_id is None else self._staged_by_uri

    def _retired(
        self, uris: Sequence[str], found: Sequence[StoredObject | None], now: float
    ) -> list[Hold | None]:
        """Have the blocks rest of what was found under each of these uris before, or else of what is withheld
        there."""
        self._count_out([before for before in found if before is not None])
        owners: Sequence[StoredObject | None] = found
        if len(self._withheld):
            owners = [
                before or self._no_longer_withheld(uri) for uri, before in zip(uris, found, strict=True)
            ]
        return [None if before is None else self._at_rest(before, now) for before in owners]

    def _no_longer_withheld(self, uri: str) -> StoredObject | None:
        (stored,) = self._withheld.pop([uri])
        if stored is not None:
            self._count_withheld(stored, -1)
        return stored

    def _at_rest(self, before: StoredObject, now: float) -> Hold:
        pool = self.pools[before.tier]
        hold = self.plan_hold(before, now)
        if before.generation in self._reading:
            pool.park(hold)
            self._parked[before.generation] = hold
        else:
            pool.quarantine(hold)
        return hold
