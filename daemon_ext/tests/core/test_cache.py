"""Which objects leave when room is wanted, and other small promises of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hypercache_daemon.core.allocator import Allocator
from hypercache_daemon.core.cache import Cache
from hypercache_daemon.core.capacities import Capacities, Capacity
from hypercache_daemon.core.eviction import Lru
from hypercache_daemon.core.objects import NoSpace, StagedWrite, StageOptions, Times
from hypercache_daemon.core.pool import Pool
from hypercache_daemon.core.ram import RamAllocator
from hypercache_daemon.core.records import record_of
from hypercache_daemon.core.staged_writes import NotStaged
from hypercache_protocol.fields import Tier
from hypercache_protocol.states import EVICTABLE, StateEvent, SyncStatus

MIB = 1 << 20


def cache_of(sizes: list[int]) -> Cache:
    """Objects "0", "1", … that may be evicted, the first the coldest, in a pool of 16 MiB."""
    pool = Pool(Tier.NVME, Allocator({0: 16 * MIB}, 0), Lru(), quarantine_share=0)
    cache = Cache({Tier.NVME: pool}, last_number=1, times=Times())
    for number, size_bytes in enumerate(sizes):
        commit(cache, str(number), size_bytes)
    return cache


def commit(cache: Cache, uri: str, size_bytes: int, tier: Tier = Tier.NVME) -> None:
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)
    staged = cache.stage(uri, size_bytes, tier, 1, options, now=0)
    assert isinstance(staged, StagedWrite)
    cache.apply_commits([(staged, cache.plan_commit(staged, StateEvent.COMMIT_LOCAL_ONLY))], now=0)


def victims(cache: Cache, wanted_bytes: int, busy: str = "", most: int = 100) -> list[str]:
    room = cache.pools[Tier.NVME]
    return [stored.uri for stored in cache.victims(room, wanted_bytes, lambda uri: uri not in busy, most)]


def test_the_coldest_leave_until_there_is_enough() -> None:
    cache = cache_of([MIB, 2 * MIB, MIB])
    assert victims(cache, 1) == ["0"]
    assert victims(cache, MIB) == ["0"]
    assert victims(cache, MIB + 1) == ["0", "1"]
    assert victims(cache, 3 * MIB) == ["0", "1"]
    assert victims(cache, 100 * MIB) == ["0", "1", "2"]
    assert victims(cache, 0) == []


def test_no_more_leave_together_than_may() -> None:
    assert victims(cache_of([MIB] * 4), 3 * MIB, most=2) == ["0", "1"]


def test_how_much_more_than_a_share_is_taken() -> None:
    cache = limited_cache(a=4 * MIB)
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)
    cache.stage("a/1", 3 * MIB, Tier.NVME, 1, options, now=0)
    prefix, pool = cache.rooms
    assert (prefix.name, pool.name) == ("a/", "the nvme pool")
    assert (prefix.excess_bytes(0.5), prefix.excess_bytes(1)) == (MIB, -MIB)
    assert (pool.excess_bytes(0.125), pool.excess_bytes(0.5)) == (MIB, -5 * MIB)


def test_a_batch_is_staged_as_a_whole_or_not_at_all() -> None:
    cache = limited_cache(a=4 * MIB)
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)

    def stage_all(*wants: tuple[str, int]) -> list[StagedWrite] | None:
        uris, sizes_bytes = zip(*wants, strict=True)
        return cache.stage_all(uris, sizes_bytes, Tier.NVME, 1, options, now=7)

    prefix, pool = cache.rooms
    assert stage_all(("a/1", 1), ("a/2", 4 * MIB)) is None, "too much for the prefix"
    assert stage_all(("b/1", 9 * MIB), ("b/2", 9 * MIB)) is None, "too much for the pool"
    assert stage_all(("a/1", 1), ("b/1", 1)) is None, "each has a limit of its own"
    assert (prefix.staged_bytes, pool.staged_bytes, list(cache.staged)) == (0, 0, [])
    staged = stage_all(("a/1", 1), ("a/2", 2 * MIB), ("a/1", 0))
    assert staged is not None
    assert list(cache.staged) == staged
    assert [(write.uri, write.size_bytes, write.touched_at) for write in staged] == [
        ("a/1", 1, 7),
        ("a/2", 2 * MIB, 7),
        ("a/1", 0, 7),
    ]
    assert len({write.stage_id for write in staged}) == 3
    assert (prefix.staged_bytes, pool.staged_bytes) == (2 * MIB + 4096,) * 2
    assert cache.staged.of("a/1") == [staged[0], staged[2]]


def test_of_a_batch_each_object_counts_wherever_it_lies() -> None:
    cache = limited_cache(a=4 * MIB, b=4 * MIB)
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)
    planned = []
    for uri, size_bytes in (("a/1", MIB), ("b/1", 2 * MIB), ("c/1", 3 * MIB)):
        staged = cache.stage(uri, size_bytes, Tier.NVME, 1, options, now=0)
        assert isinstance(staged, StagedWrite)
        planned.append((staged, cache.plan_commit(staged, StateEvent.COMMIT_LOCAL_ONLY)))

    def figures() -> list[tuple[int, int, int]]:
        return [
            (room.staged_bytes // MIB, room.used_bytes // MIB, room.evictable_bytes // MIB)
            for room in cache.rooms
        ]

    assert figures() == [(1, 0, 0), (2, 0, 0), (6, 0, 0)]
    assert cache.apply_commits(planned, now=0) == [None] * 3
    assert figures() == [(0, 1, 1), (0, 2, 2), (0, 6, 6)]
    assert None not in cache.apply_removes(["c/1", "a/1"], now=0)
    assert figures() == [(0, 0, 0), (0, 2, 2), (0, 2, 2)]


def test_what_an_object_takes_counts_and_not_its_length() -> None:
    assert victims(cache_of([1, 1, 1]), 8192) == ["0", "1"]


def test_who_is_busy_is_passed_over() -> None:
    assert victims(cache_of([MIB, MIB, MIB]), 2 * MIB, busy="1") == ["0", "2"]


def test_a_batch_that_was_located_leaves_last_and_its_tail_before_its_head() -> None:
    cache = cache_of([MIB, MIB, MIB])
    cache.locate(["0", "nowhere", "1"])
    assert victims(cache, 3 * MIB) == ["2", "1", "0"]


def test_a_policy_sees_the_whole_batch_or_the_end_alone_of_one_of_which_nothing_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = cache_of([MIB, MIB])
    seen: list[Sequence[str]] = []
    monkeypatch.setattr(cache.pools[Tier.NVME].policy, "touched", seen.append)
    for uris in (["a", "0", "b"], ["a", "b"], []):
        cache.locate(uris)
    assert seen == [["a", "0", "b"], ["b"], []]


def test_a_pool_in_which_nothing_is_does_not_hear_of_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = of_both_tiers()
    commit(cache, "a", MIB, Tier.RAM)
    seen: list[Tier] = []
    for tier, pool in cache.pools.items():
        monkeypatch.setattr(pool.policy, "touched", lambda _, tier=tier: seen.append(tier))
    cache.locate(["a"])
    assert seen == [Tier.RAM]


def test_naming_victims_changes_nothing() -> None:
    cache = cache_of([MIB, MIB])
    before = cache.pools[Tier.NVME].usage()
    assert victims(cache, 2 * MIB) == victims(cache, 2 * MIB)
    assert cache.pools[Tier.NVME].usage() == before
    assert len(cache) == 2


def limited_cache(**limits: int) -> Cache:
    """A pool of 16 MiB, and so much under each prefix."""
    pool = Pool(Tier.NVME, Allocator({0: 16 * MIB}, 0), Lru(), quarantine_share=0)
    capacities = Capacities(Capacity(f"{name}/", limit, Lru()) for name, limit in limits.items())
    return Cache({Tier.NVME: pool}, last_number=1, times=Times(), capacities=capacities)


def fit(cache: Cache, *wants: tuple[str, int]) -> list[bool]:
    return cache.rooms.that_fit_together([(uri, size_bytes, Tier.NVME) for uri, size_bytes in wants])


def test_of_many_writes_the_first_ones_fit_as_far_as_all_that_limits_them_allows() -> None:
    cache = limited_cache(a=4 * MIB, b=100 * MIB)
    assert fit(cache, ("a/1", 3 * MIB), ("a/2", 2 * MIB), ("a/3", MIB)) == [True, False, True]
    assert fit(cache, ("b/1", 10 * MIB), ("a/1", 4 * MIB), ("b/2", 3 * MIB), ("c", 2 * MIB)) == [
        True,
        True,
        False,
        True,
    ]
    assert fit(cache, *[("a/1", 1)] * 1025) == [True] * 1024 + [False], "whole blocks count"
    assert fit(cache) == []


def test_what_may_be_evicted_counts_as_room() -> None:
    assert fit(cache_of([8 * MIB, 8 * MIB]), ("new", 16 * MIB), ("more", 1)) == [True, False]


def test_a_misfit_is_told_by_the_innermost_that_is_too_small_for_it() -> None:
    cache = limited_cache(a=4 * MIB)
    for uri, size_bytes, word in [("a/1", 5 * MIB, "under a/"), ("b", 17 * MIB, "nvme pool")]:
        report = cache.rooms.misfit((uri, size_bytes, Tier.NVME))
        assert report is not None
        assert word in report.sentence()
    assert cache.rooms.misfit(("a/1", 4 * MIB, Tier.NVME)) is None


def test_a_report_leads_to_what_was_too_full() -> None:
    narrow = Capacity("a/", MIB, Lru())
    pool = Pool(Tier.NVME, Allocator({0: 16 * MIB}, 0), Lru(), quarantine_share=0)
    cache = Cache({Tier.NVME: pool}, last_number=1, times=Times(), capacities=Capacities([narrow]))
    assert cache.rooms.of(narrow.no_space(1)) is narrow
    assert cache.rooms.of(pool.no_space(1)) is pool


def test_around_some_uris_are_every_pool_and_the_prefixes_above_one_of_them() -> None:
    cache = limited_cache(a=MIB, b=MIB, c=MIB)
    a, _, c, pool = cache.rooms
    around = cache.rooms.around(["c/1", "a/1", "d/1", "a/2"])
    assert (len(around), set(around)) == (3, {pool, a, c})


def test_an_append_that_does_not_fit_is_a_report_and_changes_nothing() -> None:
    cache = cache_of([MIB])
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)
    staged = cache.stage("new", 5, Tier.NVME, 1, options, now=0)
    assert isinstance(staged, StagedWrite)
    report = cache.append(staged, 16 * MIB, now=100)
    assert isinstance(report, NoSpace)
    assert (report.wanted_bytes, report.free_bytes) == (16 * MIB, 15 * MIB - 4096)
    assert (staged.size_bytes, len(staged.extents), staged.touched_at) == (5, 1, 0)


def test_only_a_client_that_asked_for_local_only_is_told_of_it() -> None:
    stored = next(cache_of([1]).objects())
    assert stored.announced is SyncStatus.LOCAL_ONLY
    assert stored._replace(announce_committed=True).announced is SyncStatus.COMMITTED
    synced = stored._replace(announce_committed=True, state=SyncStatus.SYNCED_BACKEND)
    assert synced.announced is SyncStatus.SYNCED_BACKEND


def test_a_full_pool_says_who_has_its_bytes() -> None:
    cache = cache_of([MIB, 2 * MIB])
    pinned, dirty = cache.get("0"), cache.get("1")
    assert pinned is not None
    assert dirty is not None
    cache.apply_change(pinned._replace(pinned=True))
    cache.apply_change(dirty._replace(state=SyncStatus.COMMITTED))
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)
    cache.stage("staged", 4 * MIB, Tier.NVME, 1, options, now=0)
    refused = cache.stage("more", 10 * MIB, Tier.NVME, 1, options, now=0)
    assert isinstance(refused, NoSpace)
    assert refused.sentence() == (
        f"no space for {10 * MIB} bytes in the nvme pool of {16 * MIB}: free {9 * MIB}, pinned {MIB}, "
        f"not yet in a backend {2 * MIB}, staged {4 * MIB}, quarantined 0"
    )


def test_the_uris_of_all_objects_and_of_those_in_a_state_are_told() -> None:
    cache = cache_of([MIB, MIB, MIB])
    stored = cache.get("1")
    assert stored is not None
    cache.apply_change(stored._replace(state=SyncStatus.COMMITTED))
    assert sorted(cache.uris()) == ["0", "1", "2"]
    assert cache.uris(SyncStatus.COMMITTED) == ["1"]


def test_the_owners_of_some_uris_come_in_their_order() -> None:
    cache = cache_of([MIB, MIB])
    assert cache.owners(["1", "nowhere", "0"]) == [cache.get("1"), None, cache.get("0")]


def test_a_commit_overtakes_what_the_daemon_itself_fetches_of_the_same_uri_alone() -> None:
    cache = cache_of([])
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)
    fetches = [cache.stage(uri, MIB, Tier.NVME, None, options, now=0) for uri in ("a", "b")]
    commit(cache, "a", MIB)
    assert [isinstance(fetch, StagedWrite) and fetch.overtaken for fetch in fetches] == [True, False]


def test_only_writes_of_clients_that_are_not_committed_count_as_staged() -> None:
    cache = cache_of([MIB])
    assert not cache.staged.has_of_clients
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)
    cache.stage("own", MIB, Tier.NVME, None, options, now=0)
    assert not cache.staged.has_of_clients
    cache.stage("new", MIB, Tier.NVME, 1, options, now=0)
    assert cache.staged.has_of_clients


def test_of_writes_that_were_dropped_only_the_last_are_remembered() -> None:
    cache = cache_of([])
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)
    for number in range(1025):
        staged = cache.stage(str(number), 0, Tier.NVME, 1, options, now=0)
        assert isinstance(staged, StagedWrite)
        cache.discard(staged, 0, 0)
    found = [cache.staged.find(str(number), 1, None) for number in (0, 1, 1024)]
    assert [isinstance(each, NotStaged) and each.dropped for each in found] == [False, True, True]


# -- loading the catalog -----------------------------------------------------------------------------------


def loaded_again(cache: Cache, uris: list[str]) -> Cache:
    """A new cache with the objects of another, read from the catalog in this order."""
    again = cache_of([])
    again.load({uri: record_of(stored) for uri in uris if (stored := cache.get(uri)) is not None})
    return again


@pytest.mark.parametrize("order", [["0", "1", "2", "3"], ["3", "2", "1", "0"], ["2", "0", "3", "1"]])
def test_in_whatever_order_objects_are_read_the_oldest_commits_leave_first(order: list[str]) -> None:
    again = loaded_again(cache_of([MIB, MIB, MIB, MIB]), order)
    assert victims(again, 4 * MIB) == ["0", "1", "2", "3"]


def test_a_loaded_pool_has_the_figures_of_the_one_that_was_written() -> None:
    cache = cache_of([0, 1, MIB + 1, 5 * MIB, 4096, 4097])
    for uri, state, pinned in (
        ("1", SyncStatus.COMMITTED, False),
        ("2", SyncStatus.COMMITTED, True),
        ("3", SyncStatus.SYNCED_BACKEND, False),
        ("4", SyncStatus.LOCAL_ONLY, True),
    ):
        stored = cache.get(uri)
        assert stored is not None
        cache.apply_change(stored._replace(state=state, pinned=pinned))
    pool = cache.pools[Tier.NVME]
    again = loaded_again(cache, ["5", "3", "1", "4", "2", "0"]).pools[Tier.NVME]
    for name in ("used_bytes", "dirty_bytes", "pinned_bytes", "evictable_bytes", "counts"):
        assert getattr(again, name) == getattr(pool, name), name
    assert again.usage() == pool.usage()


def of_both_tiers() -> Cache:
    blocks = {Tier.NVME: Allocator({0: 16 * MIB}, 0), Tier.RAM: RamAllocator(16 * MIB, 1)}
    pools = {tier: Pool(tier, each, Lru(), quarantine_share=0) for tier, each in blocks.items()}
    return Cache(pools, last_number=1, times=Times())


def test_objects_of_both_tiers_are_loaded_into_the_pool_of_each() -> None:
    cache, again = of_both_tiers(), of_both_tiers()
    for number, size_bytes in enumerate([1, 5 * MIB, 4097, 2 * MIB, 4096]):
        commit(cache, str(number), size_bytes, Tier.RAM if number % 2 else Tier.NVME)
    again.load({stored.uri: record_of(stored) for stored in cache.objects()})
    for tier, pool in again.pools.items():
        assert pool.usage() == cache.pools[tier].usage()
        assert pool.evictable_bytes == cache.pools[tier].evictable_bytes
    assert again.pools[Tier.RAM].usage().used_bytes == 7 * MIB


def test_each_prefix_counts_what_was_loaded_under_it() -> None:
    cache, again = (limited_cache(a=4 * MIB, b=4 * MIB) for _ in range(2))
    for uri, size_bytes in (("a/1", MIB), ("c", MIB), ("b/1", 4097), ("a/2", 2 * MIB)):
        commit(cache, uri, size_bytes)
    again.load({stored.uri: record_of(stored) for stored in cache.objects()})
    figures = [[(room.used_bytes, room.evictable_bytes) for room in each.rooms] for each in (cache, again)]
    assert figures[0] == figures[1] == [(3 * MIB,) * 2, (8192,) * 2, (4 * MIB + 8192,) * 2]
    assert [list(room.policy.victims()) for room in again.rooms][:2] == [["a/1", "a/2"], ["b/1"]]


def test_a_catalog_in_which_a_block_has_two_owners_is_refused() -> None:
    cache = cache_of([MIB, MIB])
    first, second = cache.get("0"), cache.get("1")
    assert first is not None
    assert second is not None
    places = {"packed_extents": first.packed_extents}
    with pytest.raises(ValueError, match="1048576 bytes at 0: a block is allocated already"):
        cache_of([]).load({"0": record_of(first), "1": record_of(second._replace(generation=7, **places))})


def test_blocks_that_rested_when_the_catalog_was_written_rest_on() -> None:
    cache = cache_of([MIB])
    (hold,) = cache.apply_removes(["0"], now=0)
    assert hold is not None
    again = cache_of([])
    again.load_hold(hold)
    assert again.pools[Tier.NVME].usage() == cache.pools[Tier.NVME].usage()
    assert again.release_due(now=hold.release_at, most=9) == [hold]
    assert again.pools[Tier.NVME].usage().free_bytes == 16 * MIB
    with pytest.raises(ValueError, match="a block is allocated already"):
        cache_of([MIB]).load_hold(hold)


def test_no_object_is_of_a_newer_generation_than_the_newest() -> None:
    cache = cache_of([])
    assert cache.newest_generation == 1
    commit(cache, "a", MIB)
    commit(cache, "b", MIB)
    assert cache.newest_generation == max(stored.generation for stored in cache.objects())


def test_a_staged_write_that_no_client_heard_of_leaves_nothing() -> None:
    cache = cache_of([])
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)
    before = cache.pools[Tier.NVME].usage()
    staged = cache.stage("new", 2 * MIB, Tier.NVME, 1, options, now=0)
    assert isinstance(staged, StagedWrite)
    cache.undo_stage(staged)
    assert (list(cache.staged), cache.staged.newest("new")) == ([], None)
    assert cache.pools[Tier.NVME].usage() == before


def test_an_append_that_no_client_heard_of_leaves_nothing() -> None:
    cache = cache_of([])
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)
    staged = cache.stage("new", 5, Tier.NVME, 1, options, now=0)
    assert isinstance(staged, StagedWrite)
    extents, before = staged.extents, cache.pools[Tier.NVME].usage()
    appended = cache.append(staged, 2 * MIB, now=1)
    assert isinstance(appended, tuple)
    assert (staged.extents, staged.extents_from(1)) == (extents + appended, appended)
    assert staged.chunk_count == 1 + len(appended)
    cache.undo_append(staged, appended)
    assert (staged.extents, staged.size_bytes) == (extents, 5)
    assert cache.pools[Tier.NVME].usage() == before


def test_what_nobody_touched_for_the_expiry_time_expires_unless_its_uri_is_in_use() -> None:
    cache = cache_of([])
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)
    for uri, now in (("old", 0), ("busy", 0), ("new", 1)):
        cache.stage(uri, MIB, Tier.NVME, 1, options, now)
    expired = cache.expired(Times().stage_expiry_s, lambda uri: uri != "busy")
    assert [staged.uri for staged in expired] == ["old"]


def test_what_two_read_rests_only_once_both_have_ended() -> None:
    cache = cache_of([MIB])
    stored = cache.get("0")
    assert stored is not None
    cache.begin_reading(stored)
    cache.begin_reading(stored)
    cache.apply_removes(["0"], now=0)
    cache.end_reading(stored)
    assert cache.release_due(now=1000, most=9) == []
    cache.end_reading(stored)
    assert [hold.extents for hold in cache.release_due(now=1000, most=9)] == [stored.extents]
    cache.begin_reading(stored)
    cache.end_reading(stored)  # of what nobody removed meanwhile
    assert cache.pools[Tier.NVME].usage().free_bytes == 16 * MIB


def test_what_a_writer_may_still_write_rests_for_its_own_time() -> None:
    cache = cache_of([])
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)
    holds = []
    for uri, quarantine_s in (("long", 20), ("short", 10)):
        staged = cache.stage(uri, MIB, Tier.NVME, 1, options, now=0)
        assert isinstance(staged, StagedWrite)
        holds.append(cache.discard(staged, 0, quarantine_s))
    long, short = holds
    assert [cache.release_due(now, most=9) for now in (9, 10, 19, 20)] == [[], [short], [], [long]]


def test_to_end_what_nobody_began_is_no_reading_that_never_ends() -> None:
    cache = cache_of([MIB])
    stored = cache.get("0")
    assert stored is not None
    with pytest.raises(KeyError):
        cache.end_reading(stored)
    cache.apply_removes(["0"], now=0)
    assert len(cache.release_due(now=1000, most=9)) == 1


def test_what_was_to_be_flushed_may_leave_only_where_that_is_said() -> None:
    for evictable, leaves in [(EVICTABLE, []), (EVICTABLE | {SyncStatus.COMMITTED}, ["dirty"])]:
        pool = Pool(Tier.NVME, Allocator({0: 16 * MIB}, 0), Lru(), 0, evictable)
        cache = Cache({Tier.NVME: pool}, last_number=1, times=Times())
        for uri in ("dirty", "pinned"):
            options = StageOptions(auto_flush=True, write_through=False, pinned=uri == "pinned")
            staged = cache.stage(uri, MIB, Tier.NVME, 1, options, now=0)
            assert isinstance(staged, StagedWrite)
            cache.apply_commits([(staged, cache.plan_commit(staged, StateEvent.COMMIT))], now=0)
        assert victims(cache, 16 * MIB) == leaves
        assert pool.evictable_bytes == MIB * len(leaves)
        assert [stored.uri for stored in cache.objects() if cache.may_be_evicted(stored)] == leaves
