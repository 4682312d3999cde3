"""The cache against a model that is too simple to be wrong: lists of who owns which blocks.

After every step: free + used + staged + quarantined == total, no block has two owners, every figure of every
pool and prefix is what the lists add up to, and each policy knows exactly the objects that may be evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hypercache_daemon.core.allocator import Allocator
from hypercache_daemon.core.cache import Cache
from hypercache_daemon.core.capacities import Capacities, Capacity
from hypercache_daemon.core.eviction import Lru
from hypercache_daemon.core.extents import Extent, packed
from hypercache_daemon.core.objects import (
    Hold,
    NoRoom,
    NoSpace,
    OverCapacity,
    StagedWrite,
    StageOptions,
    StoredObject,
    Times,
    packed_checksums,
)
from hypercache_daemon.core.pool import Pool
from hypercache_daemon.core.ram import RamAllocator
from hypercache_daemon.core.records import record_of
from hypercache_daemon.core.staged_writes import NotStaged
from hypercache_protocol.fields import CHUNK_SIZE, Tier
from hypercache_protocol.states import StateEvent, SyncStatus

PAGE = 4096
MIB = 1 << 20
DEVICES = {0: 9 * MIB, 1: 6 * MIB}
FIRST_OFFSET = MIB
RAM_BYTES = 7 * MIB
SHARE = 0.25
TIMES = Times(quarantine_s=10.0, stage_expiry_s=100.0)
OPTIONS = StageOptions(auto_flush=True, write_through=False, pinned=False)

LIMITS = {"x://a/b/": 3 * MIB, "x://a/": 6 * MIB}
"""The innermost first."""
URIS = st.sampled_from(["x://a/1", "x://a/b/2", "x://a/b", "x://ab"])
TIERS = st.sampled_from(Tier)
SIZES = st.sampled_from([0, 1, PAGE, PAGE + 1, MIB, CHUNK_SIZE + 1]) | st.integers(0, 3 * MIB)
CONNECTIONS = st.sampled_from([1, 2, None])


def pages(extents: Iterable[Extent]) -> int:
    """Bytes that the extents take, by an addition of our own."""
    return sum(-(-extent.length // PAGE) * PAGE for extent in extents)


def rounded(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


def under(uri: str, prefix: str) -> bool:
    return f"{uri}/".startswith(prefix)


@dataclass
class Write:
    """A staged write as the model sees it."""

    staged: StagedWrite
    extents: list[Extent]
    size_bytes: int
    touched_at: float
    overtaken: bool = False


@dataclass
class TierModel:
    """Owners of one tier's blocks."""

    total_bytes: int
    limit_bytes: int
    retired: list[Hold] = field(default_factory=list)
    writers: list[Hold] = field(default_factory=list)
    parked: dict[int, Hold] = field(default_factory=dict)

    def holds(self) -> list[Hold]:
        return [*self.retired, *self.writers, *self.parked.values()]

    def due(self, now: float, most: int) -> list[Hold]:
        """Takes out and returns what ends now, or so much of it."""
        ended = [hold for hold in self.writers if hold.release_at <= now][:most]
        self.writers = [hold for hold in self.writers if hold not in ended]
        while (
            len(ended) < most
            and self.retired
            and (
                self.retired[0].release_at <= now
                or sum(pages(hold.extents) for hold in self.retired) > self.limit_bytes
            )
        ):
            ended.append(self.retired.pop(0))
        return ended


class CacheMachine(RuleBasedStateMachine):
    """Random requests; the rules do what the daemon does, in the order in which it does it."""

    @initialize()
    def start(self) -> None:
        self.now = 1000.0
        self.epoch = 1
        self.objects: dict[str, StoredObject] = {}
        self.withheld: dict[str, StoredObject] = {}
        self.writes: list[Write] = []
        self.dropped: set[tuple[int | None, str]] = set()
        self.reading: list[StoredObject] = []
        self.newest_generation = 0
        self.stage_ids: set[str] = set()
        self.tiers = {
            Tier.NVME: TierModel(sum(DEVICES.values()) - 2 * FIRST_OFFSET, 0),
            Tier.RAM: TierModel(RAM_BYTES, 0),
        }
        for tier in self.tiers.values():
            tier.limit_bytes = int(tier.total_bytes * SHARE)
        self.cache = self.new_cache()

    def new_cache(self) -> Cache:
        pools = {
            Tier.NVME: Pool(Tier.NVME, Allocator(DEVICES, FIRST_OFFSET), Lru(), SHARE),
            Tier.RAM: Pool(Tier.RAM, RamAllocator(RAM_BYTES, self.epoch << 40), Lru(), SHARE),
        }
        capacities = Capacities(Capacity(prefix, limit, Lru()) for prefix, limit in LIMITS.items())
        return Cache(pools, self.epoch << 40, TIMES, capacities)

    # -- writing -----------------------------------------------------------------------------------------

    @rule(uri=URIS, size=SIZES, tier=TIERS, connection=CONNECTIONS, pinned=st.booleans())
    def stage(self, uri: str, size: int, tier: Tier, connection: int | None, pinned: bool) -> None:
        report = self.report(uri, size, tier)
        staged = self.cache.stage(uri, size, tier, connection, replace(OPTIONS, pinned=pinned), self.now)
        if report is not None:
            assert staged == report
            return
        assert isinstance(staged, StagedWrite)
        assert staged.stage_id not in self.stage_ids
        self.stage_ids.add(staged.stage_id)
        self.check_granted(staged.extents, size)
        self.writes.append(Write(staged, list(staged.extents), size, self.now))
        self.dropped.discard((connection, uri))

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), size=SIZES)
    def append(self, data: st.DataObject, size: int) -> None:
        write = self.pick(data, self.writes)
        report = self.report(write.staged.uri, size, write.staged.tier)
        extents = self.cache.append(write.staged, size, self.now)
        if report is not None:
            assert extents == report
            return
        assert isinstance(extents, tuple)
        self.check_granted(extents, size)
        if data.draw(st.booleans(), "the catalog refuses it"):
            self.cache.undo_append(write.staged, extents)
            write.touched_at = self.now
            return
        write.extents += extents
        write.size_bytes += size
        write.touched_at = self.now

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), quarantine_s=st.sampled_from([None, 0.0, 10.0, 100.0]))
    def give_up_a_write(self, data: st.DataObject, quarantine_s: float | None) -> None:
        write = self.pick(data, self.writes)
        if quarantine_s is None:  # the catalog refused it, and no client has heard of it
            self.writes.remove(write)
            self.cache.undo_stage(write.staged)
        else:
            self.drop(write, quarantine_s)

    def drop(self, write: Write, quarantine_s: float) -> None:
        whose = (write.staged.connection_id, write.staged.uri)
        alike = [w for w in self.writes if (w.staged.connection_id, w.staged.uri) == whose]
        if write is alike[-1]:
            self.dropped.add(whose)
        self.writes.remove(write)
        hold = self.cache.discard(write.staged, self.now, quarantine_s)
        expected = Hold(
            write.staged.stage_id,
            write.staged.tier,
            packed(write.extents),
            self.now + quarantine_s,
            shortenable=False,
        )
        assert hold == expected
        self.tiers[hold.tier].writers.append(hold)

    @precondition(lambda self: self.writes)
    @rule(uri=URIS, connection=st.sampled_from([1, 2, 3]))
    def find_staged(self, uri: str, connection: int) -> None:
        mine = [w for w in self.writes if w.staged.uri == uri and w.staged.connection_id is not None]
        own = [w for w in mine if w.staged.connection_id == connection]
        found = self.cache.staged.find(uri, connection, None)
        if (connection, uri) in self.dropped:
            assert found == NotStaged(uri, stale=False, dropped=True)
        elif mine:
            assert found is (own or mine)[-1].staged
        else:
            assert found == NotStaged(uri, stale=False)
        assert self.cache.staged.newest(uri) is (mine[-1].staged if mine else None)
        self.find_staged_by_id(uri)

    def find_staged_by_id(self, uri: str) -> None:
        known = {write.staged.stage_id: write.staged for write in self.writes}
        for stage_id in self.stage_ids:
            staged = known.get(stage_id)
            fits = staged is not None and staged.uri == uri and staged.connection_id is not None
            found = self.cache.staged.find(uri, 1, stage_id)
            assert found is staged if fits else found == NotStaged(uri, stale=True)

    @precondition(lambda self: self.writes or self.holds())
    @rule(seconds=st.sampled_from([1.0, 10.0, 60.0, 100.0]), locked=st.sets(URIS, max_size=1))
    def wait_and_expire(self, seconds: float, locked: set[str]) -> None:
        self.now += seconds
        old = [
            w
            for w in self.writes
            if w.touched_at <= self.now - TIMES.stage_expiry_s
            and w.staged.connection_id is not None
            and w.staged.uri not in locked
        ]
        assert self.cache.expired(self.now, lambda uri: uri not in locked) == [w.staged for w in old]
        for write in old:
            self.drop(write, TIMES.quarantine_s)

    # -- objects -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.writes)
    @rule(
        data=st.data(),
        event=st.sampled_from([StateEvent.COMMIT, StateEvent.COMMIT_LOCAL_ONLY, StateEvent.INGESTED]),
        with_checksums=st.booleans(),
    )
    def commit(self, data: st.DataObject, event: StateEvent, with_checksums: bool) -> None:
        self.commit_write(self.pick(data, self.writes), event, with_checksums)

    @rule(
        uri=URIS,
        size=SIZES,
        tier=TIERS,
        event=st.sampled_from([StateEvent.COMMIT, StateEvent.COMMIT_LOCAL_ONLY]),
        pinned=st.booleans(),
    )
    def stage_and_commit(self, uri: str, size: int, tier: Tier, event: StateEvent, pinned: bool) -> None:
        before = len(self.writes)
        self.stage(uri, size, tier, 1, pinned)
        if len(self.writes) > before:
            self.commit_write(self.writes[-1], event, with_checksums=True)

    def commit_write(self, write: Write, event: StateEvent, with_checksums: bool) -> None:
        staged = write.staged
        seen, before = self.objects.get(staged.uri), self.owner(staged.uri)
        checksums = tuple(range(len(write.extents))) if with_checksums else None
        stored = self.cache.plan_commit(staged, event, checksums=packed_checksums(checksums), sha256="f" * 64)
        assert (self.cache.get(staged.uri), self.cache.owner(staged.uri)) == (seen, before), (
            "a plan does nothing"
        )
        assert stored.extents == tuple(write.extents)
        assert (stored.uri, stored.size_bytes, stored.tier) == (staged.uri, write.size_bytes, staged.tier)
        assert stored.checksums == checksums
        assert stored.pinned == (staged.pinned or (before is not None and before.pinned))
        assert stored.generation > self.newest_generation
        self.newest_generation = stored.generation
        (hold,) = self.cache.apply_commits([(staged, stored)], self.now)
        self.writes.remove(write)
        for other in self.writes:
            other.overtaken |= other.staged.uri == staged.uri and other.staged.connection_id is None
        self.retire(before, hold)
        self.withheld.pop(staged.uri, None)
        self.objects[staged.uri] = stored
        assert self.cache.get(staged.uri) is stored

    @precondition(lambda self: self.objects or self.withheld)
    @rule(uri=URIS)
    def remove(self, uri: str) -> None:
        before = self.objects.pop(uri, None) or self.withheld.pop(uri, None)
        self.retire(before, *self.cache.apply_removes([uri], self.now))
        assert self.cache.get(uri) is None

    def retire(self, before: StoredObject | None, hold: Hold | None) -> None:
        if before is None:
            assert hold is None
            return
        assert hold == Hold(
            f"{before.generation:x}", before.tier, before.packed_extents, self.now + 10.0, shortenable=True
        )
        assert hold == self.cache.plan_hold(before, self.now)
        tier = self.tiers[before.tier]
        if before.generation in [stored.generation for stored in self.reading]:
            tier.parked[before.generation] = hold
        else:
            tier.retired.append(hold)

    @precondition(lambda self: self.objects)
    @rule(data=st.data())
    def withhold(self, data: st.DataObject) -> None:
        stored = self.pick(data, list(self.objects.values()))
        self.cache.withhold(stored.uri)
        self.withheld[stored.uri] = stored
        del self.objects[stored.uri]

    @precondition(lambda self: self.withheld)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        stored = self.pick(data, list(self.withheld.values()))
        assert self.cache.give_back(stored.uri) == stored
        self.objects[stored.uri] = self.withheld.pop(stored.uri)

    @precondition(lambda self: self.objects)
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        stored = self.pick(data, list(self.objects.values()))
        self.change(stored._replace(pinned=pinned))

    @precondition(lambda self: self.dirty() or self.withheld_amid_upload())
    @rule(data=st.data(), succeeds=st.booleans())
    def upload(self, data: st.DataObject, succeeds: bool) -> None:
        stored = self.pick(data, self.dirty() + self.withheld_amid_upload())
        if stored.state is SyncStatus.COMMITTED:
            event, state = StateEvent.UPLOAD_STARTED, SyncStatus.SYNCING_BACKEND
        elif succeeds:
            event, state = StateEvent.UPLOAD_CONFIRMED, SyncStatus.SYNCED_BACKEND
        else:
            event, state = StateEvent.UPLOAD_FAILED, SyncStatus.COMMITTED
        changed = self.cache.changed(stored, event)
        assert changed == stored._replace(state=state)
        self.change(changed)

    def change(self, changed: StoredObject) -> None:
        self.cache.apply_change(changed)
        (self.withheld if changed.uri in self.withheld else self.objects)[changed.uri] = changed

    @precondition(lambda self: self.objects)
    @rule(uris=st.lists(URIS, max_size=5))
    def locate(self, uris: list[str]) -> None:
        assert self.cache.locate(uris) == [self.objects.get(uri) for uri in uris]

    @precondition(lambda self: any(self.evictable(tier) for tier in Tier))
    @rule(
        place=TIERS | st.sampled_from(list(LIMITS)),
        size=SIZES | st.integers(6 * MIB, 14 * MIB),
        locked=st.sets(URIS, max_size=1),
    )
    def make_room(self, place: Tier | str, size: int, locked: set[str]) -> None:
        is_tier = isinstance(place, Tier)
        room = self.cache.pools[place] if is_tier else self.cache.capacities[place]
        evictable = self.evictable(place) if is_tier else self.evictable_under(place)
        missing_bytes = room.missing_bytes(size)
        victims = self.cache.victims(room, missing_bytes, lambda uri: uri not in locked, 1000)
        assert set(victims) <= {stored for stored in evictable if stored.uri not in locked}
        assert len(set(victims)) == len(victims)
        freed_bytes = sum(pages(stored.extents) for stored in victims)
        if freed_bytes < missing_bytes:
            assert set(victims) == {stored for stored in evictable if stored.uri not in locked}
        elif victims:
            assert freed_bytes - pages(victims[-1].extents) < missing_bytes, "one victim too many"
        read = {stored.generation for stored in self.reading}
        for stored in victims:
            self.remove(stored.uri)
        self.release_due(most=1000)
        if freed_bytes >= missing_bytes and not read.intersection(v.generation for v in victims):
            assert not is_tier or self.free_bytes(place) >= rounded(size)
            assert is_tier or room.missing_bytes(size) == 0

    # -- blocks that rest --------------------------------------------------------------------------------

    @precondition(lambda self: self.holds())
    @rule(most=st.sampled_from([1, 2, 1000]))
    def release_due(self, most: int) -> None:
        expected = [hold for tier in self.tiers.values() for hold in tier.due(self.now, most)]
        assert Counter(self.cache.release_due(self.now, most)) == Counter(expected)

    @precondition(lambda self: self.objects)
    @rule(data=st.data())
    def begin_reading(self, data: st.DataObject) -> None:
        stored = self.pick(data, list(self.objects.values()))
        self.cache.begin_reading(stored)
        self.reading.append(stored)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        stored = self.pick(data, self.reading)
        self.reading.remove(stored)
        self.cache.end_reading(stored)
        if stored.generation not in [other.generation for other in self.reading]:
            tier = self.tiers[stored.tier]
            hold = tier.parked.pop(stored.generation, None)
            if hold is not None:
                tier.retired.append(hold)

    @rule(chance=st.integers(0, 4))
    def restart(self, chance: int) -> None:
        """All objects come back, and every block that somebody may still use is held."""
        if chance:
            return
        self.epoch += 1
        self.cache = self.new_cache()
        self.dropped.clear()
        self.objects |= self.withheld
        self.withheld.clear()
        self.cache.load({uri: record_of(stored) for uri, stored in self.objects.items()})
        for uri, stored in self.objects.items():
            if stored.state is SyncStatus.SYNCING_BACKEND:  # that upload was cut off
                self.objects[uri] = stored._replace(state=SyncStatus.COMMITTED)
        for tier in self.tiers.values():
            tier.retired += tier.parked.values()
            tier.parked.clear()
        for write in self.writes:
            staged = write.staged
            hold = Hold(
                staged.stage_id, staged.tier, packed(write.extents), self.now + 100.0, shortenable=False
            )
            self.tiers[staged.tier].writers.append(hold)
        self.writes.clear()
        self.reading.clear()
        for tier in self.tiers.values():
            for hold in tier.holds():
                self.cache.load_hold(hold)

    # -- what always holds -------------------------------------------------------------------------------

    @invariant()
    def figures_add_up(self) -> None:
        for tier, pool in self.cache.pools.items():
            usage = pool.usage()
            model = self.tiers[tier]
            objects = [stored for stored in self.objects.values() if stored.tier is tier]
            assert usage.total_bytes == model.total_bytes
            withheld = [stored for stored in self.withheld.values() if stored.tier is tier]
            assert pool.withheld_bytes == sum(pages(stored.extents) for stored in withheld)
            assert usage.used_bytes == sum(pages(stored.extents) for stored in objects + withheld)
            assert usage.staged_bytes == self.staged_bytes(tier)
            assert usage.quarantined_bytes == sum(pages(hold.extents) for hold in model.holds())
            assert usage.free_bytes == self.free_bytes(tier)
            assert (
                usage.free_bytes + usage.used_bytes + usage.staged_bytes + usage.quarantined_bytes
                == usage.total_bytes
            )

    @invariant()
    def room_that_can_be_made_is_known(self) -> None:
        for tier, pool in self.cache.pools.items():
            model = self.tiers[tier]
            free_bytes = self.free_bytes(tier)
            retired_bytes = sum(pages(hold.extents) for hold in model.retired)
            assert pool.could_hold(self.most_bytes(tier))
            assert not pool.could_hold(self.most_bytes(tier) + 1)
            assert pool.missing_bytes(free_bytes) == 0
            kept_bytes = max(0, model.limit_bytes - retired_bytes)
            assert pool.missing_bytes(free_bytes + 1) == PAGE + kept_bytes

    @invariant()
    def kinds_are_counted(self) -> None:
        for tier, pool in self.cache.pools.items():
            objects = [stored for stored in self.objects.values() if stored.tier is tier]
            dirty = [stored for stored in self.dirty() if stored.tier is tier]
            assert pool.pinned_bytes == sum(pages(stored.extents) for stored in objects if stored.pinned)
            assert pool.dirty_bytes == sum(pages(stored.extents) for stored in dirty)
            assert pool.evictable_bytes == sum(pages(stored.extents) for stored in self.evictable(tier))
        states = Counter(stored.state for stored in self.objects.values())
        expected = {state: states[state] for state in SyncStatus} | {SyncStatus.STAGED: len(self.writes)}
        assert self.cache.counts() == expected
        assert len(self.cache) == len(self.objects)

    @invariant()
    def prefixes_are_counted(self) -> None:
        for capacity in self.cache.capacities:
            objects = [stored for stored in self.objects.values() if under(stored.uri, capacity.prefix)]
            dirty = [stored for stored in self.dirty() if stored in objects]
            evictable = self.evictable_under(capacity.prefix)
            assert sum(capacity.counts.values()) == len(objects)
            assert capacity.used_bytes == sum(pages(stored.extents) for stored in objects)
            withheld = [stored for stored in self.withheld.values() if under(stored.uri, capacity.prefix)]
            assert capacity.withheld_bytes == sum(pages(stored.extents) for stored in withheld)
            assert capacity.staged_bytes == self.staged_under(capacity.prefix)
            assert capacity.pinned_bytes == sum(pages(stored.extents) for stored in objects if stored.pinned)
            assert capacity.dirty_bytes == sum(pages(stored.extents) for stored in dirty)
            assert capacity.evictable_bytes == sum(pages(stored.extents) for stored in evictable)
            assert capacity.could_hold(self.left_under(capacity.prefix) + capacity.evictable_bytes)
            assert not capacity.could_hold(self.left_under(capacity.prefix) + capacity.evictable_bytes + 1)

    @invariant()
    def a_prefix_has_the_order_that_its_objects_have_in_their_pools(self) -> None:
        for capacity in self.cache.capacities:
            known = list(capacity.policy.victims())
            for tier, pool in self.cache.pools.items():
                in_pool = [uri for uri in pool.policy.victims() if under(uri, capacity.prefix)]
                assert [uri for uri in known if self.objects[uri].tier is tier] == in_pool

    @invariant()
    def no_block_has_two_owners(self) -> None:
        owned = [
            (tier, extent.device, extent.offset, extent.offset + pages([extent]))
            for tier, extents in self.owners()
            for extent in extents
        ]
        owned.sort(key=lambda item: (item[0].value, *item[1:]))
        for (tier, device, _, end), (next_tier, next_device, start, _) in pairwise(owned):
            assert (tier, device) != (next_tier, next_device) or end <= start, "two owners"

    @invariant()
    def the_policy_knows_the_evictable_and_no_others(self) -> None:
        for tier, pool in self.cache.pools.items():
            known = list(pool.policy.victims())
            assert sorted(known) == sorted(stored.uri for stored in self.evictable(tier))

    @invariant()
    def objects_and_writes_are_what_was_made_of_them(self) -> None:
        assert {stored.uri: stored for stored in self.cache.objects()} == self.objects
        uris = sorted({*self.objects, *self.withheld, "x://nowhere"})
        assert self.cache.owners(uris) == list(map(self.owner, uris))
        assert {uri: self.cache.withheld_at(uri) for uri in self.cache.withheld()} == self.withheld
        for write in self.writes:
            assert write.staged.extents == tuple(write.extents)
            assert write.staged.size_bytes == write.size_bytes
            assert write.staged.overtaken == write.overtaken

    # -- inside ------------------------------------------------------------------------------------------

    def pick(self, data: st.DataObject, things: Sequence[object]) -> object:
        return things[data.draw(st.integers(0, len(things) - 1))]

    def owner(self, uri: str) -> StoredObject | None:
        return self.objects.get(uri) or self.withheld.get(uri)

    def owners(self) -> Iterable[tuple[Tier, Sequence[Extent]]]:
        yield from ((stored.tier, stored.extents) for stored in self.objects.values())
        yield from ((stored.tier, stored.extents) for stored in self.withheld.values())
        yield from ((write.staged.tier, write.extents) for write in self.writes)
        for tier, model in self.tiers.items():
            yield from ((tier, hold.extents) for hold in model.holds())

    def staged_bytes(self, tier: Tier) -> int:
        return sum(pages(write.extents) for write in self.writes if write.staged.tier is tier)

    def free_bytes(self, tier: Tier) -> int:
        taken = sum(pages(extents) for owner, extents in self.owners() if owner is tier)
        return self.tiers[tier].total_bytes - taken

    def holds(self) -> list[Hold]:
        return [hold for tier in self.tiers.values() for hold in tier.holds()]

    def dirty(self) -> list[StoredObject]:
        states = (SyncStatus.COMMITTED, SyncStatus.SYNCING_BACKEND)
        return [stored for stored in self.objects.values() if stored.state in states]

    def withheld_amid_upload(self) -> list[StoredObject]:
        return [stored for stored in self.withheld.values() if stored.state is SyncStatus.SYNCING_BACKEND]

    def evictable(self, tier: Tier) -> list[StoredObject]:
        may = (SyncStatus.SYNCED_BACKEND, SyncStatus.LOCAL_ONLY)
        return [o for o in self.objects.values() if o.tier is tier and o.state in may and not o.pinned]

    def check_granted(self, extents: Sequence[Extent], size: int) -> None:
        assert sum(extent.length for extent in extents) == size
        assert all(0 < extent.length <= CHUNK_SIZE for extent in extents)

    def evictable_under(self, prefix: str) -> list[StoredObject]:
        return [stored for tier in Tier for stored in self.evictable(tier) if under(stored.uri, prefix)]

    def staged_under(self, prefix: str) -> int:
        return sum(pages(write.extents) for write in self.writes if under(write.staged.uri, prefix))

    def left_under(self, prefix: str) -> int:
        there = [*self.objects.values(), *self.withheld.values()]
        used = sum(pages(stored.extents) for stored in there if under(stored.uri, prefix))
        return LIMITS[prefix] - used - self.staged_under(prefix)

    def report(self, uri: str, size: int, tier: Tier) -> NoRoom | None:
        """Why so much cannot be had now, and first of all why evicting would not help; None where it can."""
        rooms = [self.room_under(prefix, size) for prefix in LIMITS if under(uri, prefix)]
        rooms.append(self.room_in(tier, size))
        full = [room for room in rooms if rounded(size) > room[0]]
        hopeless = [room for room in full if rounded(size) > room[1]]
        return next((report for _, _, report in hopeless + full), None)

    def room_under(self, prefix: str, size: int) -> tuple[int, int, NoRoom]:
        """How much is left, how much evicting all would leave, and the report on `size`."""
        left_bytes, there = self.left_under(prefix), self.cache.capacities[prefix]
        report = OverCapacity(
            size,
            prefix,
            LIMITS[prefix],
            there.used_bytes,
            there.staged_bytes,
            there.pinned_bytes,
            there.dirty_bytes,
            there.withheld_bytes,
        )
        return left_bytes, left_bytes + sum(pages(o.extents) for o in self.evictable_under(prefix)), report

    def room_in(self, tier: Tier, size: int) -> tuple[int, int, NoRoom]:
        """The same of a pool."""
        pool, free_bytes = self.cache.pools[tier], self.free_bytes(tier)
        report = NoSpace(
            size,
            tier,
            self.tiers[tier].total_bytes,
            free_bytes,
            self.staged_bytes(tier),
            sum(pages(hold.extents) for hold in self.tiers[tier].holds()),
            pool.pinned_bytes,
            pool.dirty_bytes,
            pool.withheld_bytes,
        )
        return free_bytes, self.most_bytes(tier), report

    def most_bytes(self, tier: Tier) -> int:
        """What evicting all would leave of a pool, once it has rested."""
        retired_bytes = sum(pages(hold.extents) for hold in self.tiers[tier].retired)
        evictable_bytes = sum(pages(stored.extents) for stored in self.evictable(tier))
        return self.free_bytes(tier) + retired_bytes + evictable_bytes


CacheMachine.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestCacheAgainstItsModel = CacheMachine.TestCase
