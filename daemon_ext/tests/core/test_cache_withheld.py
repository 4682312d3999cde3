"""Objects that nobody finds, since a device failed under them: what is counted, and how each of them ends."""

from __future__ import annotations

import pytest

from hypercache_daemon.core.allocator import Allocator
from hypercache_daemon.core.cache import Cache
from hypercache_daemon.core.eviction import Lru
from hypercache_daemon.core.objects import NoSpace, StagedWrite, StageOptions, StoredObject, Times
from hypercache_daemon.core.pool import Pool
from hypercache_protocol.fields import Tier
from hypercache_protocol.states import StateEvent, SyncStatus

MIB = 1 << 20


def cache_of(**events: StateEvent) -> Cache:
    """Objects of 1 MiB by name, and how each was committed, in a pool of 16 MiB."""
    pool = Pool(Tier.NVME, Allocator({0: 16 * MIB}, 0), Lru(), quarantine_share=0)
    cache = Cache({Tier.NVME: pool}, last_number=1, times=Times())
    for uri, event in events.items():
        commit(cache, uri, event)
    return cache


def stage(cache: Cache, uri: str, connection_id: int | None = 1) -> StagedWrite:
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)
    staged = cache.stage(uri, MIB, Tier.NVME, connection_id, options, now=0)
    assert isinstance(staged, StagedWrite)
    return staged


def commit(cache: Cache, uri: str, event: StateEvent = StateEvent.COMMIT) -> StoredObject:
    staged = stage(cache, uri)
    stored = cache.plan_commit(staged, event)
    cache.apply_commits([(staged, stored)], now=0)
    return stored


def figures(cache: Cache) -> tuple[int, int, int]:
    """Used, withheld and evictable, in MiB; everything together is always the total."""
    pool = cache.pools[Tier.NVME]
    usage = pool.usage()
    parts = usage.free_bytes + usage.used_bytes + usage.staged_bytes + usage.quarantined_bytes
    assert parts == usage.total_bytes == 16 * MIB
    return usage.used_bytes // MIB, pool.withheld_bytes // MIB, pool.evictable_bytes // MIB


def test_what_is_withheld_is_found_by_nobody_and_keeps_its_blocks() -> None:
    cache = cache_of(a=StateEvent.COMMIT, b=StateEvent.COMMIT_LOCAL_ONLY)
    stored = cache.get("a")
    cache.withhold("a")
    assert cache.get("a") is None
    assert cache.peek("a") is None
    assert cache.peek("b") == cache.get("b")
    assert cache.owners(["nowhere", "b", "a"]) == [None, cache.get("b"), stored]
    assert cache.locate(["a", "b"])[0] is None
    assert cache.uris() == ["b"]
    assert len(cache) == 1
    assert cache.counts()[SyncStatus.COMMITTED] == 0
    assert cache.withheld() == ["a"]
    assert cache.owner("a") == cache.withheld_at("a") == stored
    assert cache.owner("a") == stored
    assert cache.owner("b") == cache.get("b")
    assert cache.owner("nobody") is None
    assert figures(cache) == (2, 1, 1)


def test_what_is_given_back_is_as_it_was() -> None:
    cache = cache_of(a=StateEvent.COMMIT, b=StateEvent.COMMIT_LOCAL_ONLY)
    for uri in ("a", "b"):
        stored = cache.get(uri)
        before = figures(cache)
        cache.withhold(uri)
        assert cache.give_back(uri) == stored == cache.get(uri)
        assert figures(cache) == before == (2, 0, 1)
    assert cache.withheld() == []
    assert [stored.uri for stored in cache.victims(cache.pools[Tier.NVME], MIB, lambda _: True, 9)] == ["b"]


def test_no_policy_takes_what_is_withheld() -> None:
    cache = cache_of(a=StateEvent.COMMIT_LOCAL_ONLY)
    cache.withhold("a")
    assert cache.victims(cache.pools[Tier.NVME], MIB, lambda _: True, 9) == []
    assert figures(cache) == (1, 1, 0)


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (StateEvent.UPLOAD_CONFIRMED, SyncStatus.SYNCED_BACKEND),
        (StateEvent.UPLOAD_FAILED, SyncStatus.COMMITTED),
    ],
)
@pytest.mark.parametrize("is_back", [False, True], ids=["withheld", "given back"])
def test_an_upload_that_was_under_way_ends_as_it_does(
    event: StateEvent, state: SyncStatus, is_back: bool
) -> None:
    cache = cache_of(a=StateEvent.COMMIT)
    stored = cache.get("a")
    assert stored is not None
    cache.apply_change(cache.changed(stored, StateEvent.UPLOAD_STARTED))
    cache.withhold("a")
    if is_back:
        cache.give_back("a")
    owner = cache.owner("a")
    assert owner is not None
    cache.apply_change(cache.changed(owner, event))
    assert cache.withholds_the_newest("a") is (not is_back and state is SyncStatus.COMMITTED)
    if not is_back:
        cache.give_back("a")
    assert cache.get("a") == stored._replace(state=state)
    assert cache.counts()[state] == 1
    assert figures(cache) == (1, 0, int(state is SyncStatus.SYNCED_BACKEND))


def test_what_is_withheld_can_be_removed_and_replaced() -> None:
    cache = cache_of(a=StateEvent.COMMIT, b=StateEvent.COMMIT)
    for uri in ("a", "b"):
        cache.withhold(uri)
    removed, replaced = map(cache.withheld_at, cache.withheld())
    assert removed is not None
    assert replaced is not None
    (hold,) = cache.apply_removes(["a"], now=0)
    assert hold is not None
    assert hold.extents == removed.extents
    assert cache.apply_removes(["a"], now=0) == [None]
    new = commit(cache, "b")
    assert cache.get("b") == new
    assert cache.withheld() == []
    assert new.extents != replaced.extents
    assert figures(cache)[:2] == (1, 0)
    cache.release_due(now=100, most=9)
    assert figures(cache)[:2] == (1, 0)
    assert cache.pools[Tier.NVME].usage().quarantined_bytes == 0


def test_a_pin_is_kept_when_what_is_withheld_is_replaced() -> None:
    cache = cache_of()
    options = StageOptions(auto_flush=False, write_through=False, pinned=True)
    staged = cache.stage("a", MIB, Tier.NVME, 1, options, now=0)
    assert isinstance(staged, StagedWrite)
    cache.apply_commits([(staged, cache.plan_commit(staged, StateEvent.COMMIT))], now=0)
    cache.withhold("a")
    assert commit(cache, "a").pinned


@pytest.mark.parametrize(
    ("event", "newest"),
    [(StateEvent.COMMIT, True), (StateEvent.COMMIT_LOCAL_ONLY, True), (StateEvent.INGESTED, False)],
)
def test_what_no_backend_has_is_not_overtaken_by_what_one_has(event: StateEvent, newest: bool) -> None:
    cache = cache_of(a=event)
    assert not cache.withholds_the_newest("a")
    cache.withhold("a")
    assert cache.withholds_the_newest("a") is newest


def test_a_refusal_says_how_much_waits_for_a_device() -> None:
    cache = cache_of(a=StateEvent.COMMIT)
    options = StageOptions(auto_flush=False, write_through=False, pinned=False)

    def refusal() -> str:
        report = cache.stage("b", 16 * MIB, Tier.NVME, 1, options, now=0)
        assert isinstance(report, NoSpace)
        return report.sentence()

    assert "devices that failed" not in refusal()
    cache.withhold("a")
    assert refusal().endswith(
        f"not yet in a backend 0, staged 0, quarantined 0, on devices that failed {MIB}"
    )


def test_all_staged_writes_are_told_those_of_the_daemon_too() -> None:
    cache = cache_of()
    writes = [stage(cache, "a"), stage(cache, "b", None)]
    assert list(cache.staged) == writes
    assert [cache.staged.of(uri) for uri in ("a", "b", "c")] == [writes[:1], writes[1:], []]


def test_an_allocator_says_what_lies_on_a_device() -> None:
    blocks = Allocator({0: 16 * MIB, 1: 16 * MIB}, 0)
    blocks.exclude(0)
    extents = blocks.allocate(5 * MIB)
    assert extents is not None
    blocks.include(0)
    blocks.exclude(1)
    assert (blocks.allocated_bytes(0), blocks.allocated_bytes(1)) == (0, 5 * MIB)
    with pytest.raises(ValueError, match="no device 2"):
        blocks.allocated_bytes(2)
