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

from hypercache_protocol.fields import Tier
from hypercache_protocol.states import StateEvent, SyncStatus, next_state

from .capacities import Capacities
from .extents import PACKED_BYTES, Extent, packed, rounded_up
from .object_table import ObjectTable
from .objects import Hold, NoRoom, StagedWrite, StageOptions, StoredObject, Times, allocated_bytes
from .pool import Pool
from .presence import PresenceWords
from .records import verifiable
from .rooms import Room, Rooms
from .staged_writes import StagedWrites


class Cache:
    """All objects, staged writes and pools of one daemon.

    Args:
        last_number: generations and stage ids count on from here. It grows with every start of the daemon,
            by more than one start ever counts.
    """

    def __init__(
        self,
        pools: Mapping[Tier, Pool],
        last_number: int,
        times: Times,
        capacities: Capacities | None = None,
    ) -> None:
        self.pools = pools
        self.capacities = capacities or Capacities()
        self.rooms = Rooms(pools, self.capacities)
        self.staged = StagedWrites()
        self.times = times
        self._last_number = last_number
        self._objects = ObjectTable()
        self._withheld = ObjectTable()

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
        return self._last_number

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

    def objects(self) -> Iterator[StoredObject]:
        """Every committed object, in no promised order."""
        return self._objects.values()

    def uris(self, state: SyncStatus | None = None) -> list[str]:
        """The uris of all objects, or of those in `state`, in no promised order."""
        return self._objects.uris() if state is None else self._objects.in_state(state)

    def counts(self) -> dict[SyncStatus, int]:
        """How many objects and staged writes are in each state."""
        counts = {state: sum(pool.counts[state] for pool in self.pools.values()) for state in SyncStatus}
        return counts | {SyncStatus.STAGED: len(self.staged)}

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
        full = self.rooms.too_full((uri, size_bytes, tier))
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
        wanted_bytes = sum(map(rounded_up, sizes_bytes))
        rooms = self.rooms.that_hold(uris, wanted_bytes, tier)
        if rooms is None:
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
        self.staged.add(fresh)
        return fresh

    def append(self, staged: StagedWrite, size_bytes: int, now: float) -> tuple[Extent, ...] | NoRoom:
        """More blocks for a staged write: only the new ones."""
        full = self.rooms.too_full((staged.uri, size_bytes, staged.tier))
        if full is not None:
            return full.no_space(size_bytes)
        (extents,) = self._allocated([size_bytes], staged.tier)
        self.rooms.count_staged(staged, allocated_bytes(extents))
        staged.packed_extents += packed(extents)
        staged.size_bytes += size_bytes
        staged.touched_at = now
        return extents

    def discard(self, staged: StagedWrite, now: float, quarantine_s: float) -> Hold:
        """Drop a staged write; its blocks rest, for the writer may still be writing."""
        self.staged.drop(staged)
        extents = staged.packed_extents
        hold = Hold(staged.stage_id, staged.tier, extents, now + quarantine_s, shortenable=False)
        self._unstage(staged, staged.extents)
        self.pools[staged.tier].quarantine(hold)
        return hold

    def undo_stage(self, staged: StagedWrite) -> None:
        """Take back a staged write that no client has heard of: its blocks are free at once."""
        self.staged.remove(staged)
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
        untouched = self.staged.untouched_since(now - self.times.stage_expiry_s)
        return [staged for staged in untouched if is_free(staged.uri)]

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
            self.staged.remove(staged)
            for other in self.staged.own_of(staged.uri):
                other.overtaken = True
        objects = [stored for _, stored in planned]
        uris = [stored.uri for stored in objects]
        holds = self._retired(uris, self._objects.put(objects), now)
        self.rooms.count_committed(objects)
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
        self.rooms.count_out([before])
        self._objects.put([changed])
        self.rooms.count_in([changed])

    def changed(self, stored: StoredObject, event: StateEvent) -> StoredObject:
        """`stored` after `event`."""
        return stored._replace(state=next_state(stored.state, event))

    def may_be_evicted(self, stored: StoredObject) -> bool:
        """Whether policy may drop it."""
        return self.pools[stored.tier].may_be_evicted(stored.state, stored.pinned)

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
        self.rooms.count_out([stored])
        self.rooms.count_withheld(stored, 1)
        self._objects.hand_over(uri, self._withheld)

    def give_back(self, uri: str) -> StoredObject:
        """Let everybody find what was withheld under this uri."""
        stored = self._withheld.peek(uri)
        assert stored is not None, "only what is withheld can be given back"
        self.rooms.count_withheld(stored, -1)
        self._withheld.hand_over(uri, self._objects)
        self.rooms.count_in([stored])
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
        self.pools[stored.tier].begin_reading(stored.generation)

    def end_reading(self, stored: StoredObject) -> None:
        """Undo one `begin_reading`."""
        self.pools[stored.tier].end_reading(stored.generation)

    # -- what clients see without asking ---------------------------------------------------------------

    def publish(self, words: PresenceWords) -> None:
        """Keep in `words`, which are empty yet, which objects are here from now on: before any is."""
        self._objects.publish(words)

    # -- loading the catalog ---------------------------------------------------------------------------

    def load(self, records: dict[str, bytes]) -> None:
        """Take all objects from the catalog: a record for each uri, in any order. The dict is the cache's
        own from then on. ValueError where blocks have two owners or lie outside."""
        self._objects.load(records, verifiable(self.rooms.load(records)))

    def load_hold(self, hold: Hold) -> None:
        """Take a hold from the catalog, after the objects. ValueError as for `load`."""
        pool = self.pools[hold.tier]
        pool.blocks.claim(hold.extents)
        pool.quarantine(hold)

    # -- inside ----------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._last_number += 1
        return self._last_number

    def _allocated(self, sizes_bytes: Sequence[int], tier: Tier) -> list[tuple[Extent, ...]]:
        """Blocks for writers, for whom there is room."""
        placed = self.pools[tier].blocks.allocate_all(sizes_bytes)
        assert placed is not None, "a pool that misses nothing has that much"
        return placed

    def _unstage(self, staged: StagedWrite, extents: Sequence[Extent]) -> None:
        """These blocks are no writer's any more; the caller says at once whose they are."""
        self.rooms.count_staged(staged, -allocated_bytes(extents))

    def _free_unseen(self, staged: StagedWrite, extents: Sequence[Extent]) -> None:
        self._unstage(staged, extents)
        self.pools[staged.tier].blocks.release(extents)

    def _retired(
        self, uris: Sequence[str], found: Sequence[StoredObject | None], now: float
    ) -> list[Hold | None]:
        """Have the blocks rest of what was found under each of these uris before, or else of what is withheld
        there."""
        self.rooms.count_out([before for before in found if before is not None])
        owners: Sequence[StoredObject | None] = found
        if len(self._withheld):
            owners = [
                before or self._no_longer_withheld(uri) for uri, before in zip(uris, found, strict=True)
            ]
        return [None if before is None else self._at_rest(before, now) for before in owners]

    def _no_longer_withheld(self, uri: str) -> StoredObject | None:
        (stored,) = self._withheld.pop([uri])
        if stored is not None:
            self.rooms.count_withheld(stored, -1)
        return stored

    def _at_rest(self, before: StoredObject, now: float) -> Hold:
        hold = self.plan_hold(before, now)
        self.pools[before.tier].quarantine(hold, before.generation)
        return hold
