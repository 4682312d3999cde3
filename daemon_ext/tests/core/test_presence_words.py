"""What the presence table has, against a plain dict: also where many objects find no place in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache_daemon.core.allocator import Allocator
from hypercache_daemon.core.cache import Cache
from hypercache_daemon.core.eviction import Lru
from hypercache_daemon.core.extents import Extent, packed
from hypercache_daemon.core.object_table import ObjectTable
from hypercache_daemon.core.objects import StagedWrite, StageOptions, StoredObject, Times, packed_checksums
from hypercache_daemon.core.pool import Pool
from hypercache_daemon.core.presence import PresenceWords
from hypercache_daemon.core.records import record_of
from hypercache_protocol.fields import Tier
from hypercache_protocol.presence import Geometry, Presence, TableView
from hypercache_protocol.states import StateEvent, SyncStatus

URIS = [f"hypercache://a/{number}" for number in range(60)]


def view(buckets: int) -> TableView:
    geometry = Geometry(3, buckets)
    return TableView(memoryview(bytearray(geometry.size_bytes)), geometry)


def stored(uri: str, *, verifiable: bool) -> StoredObject:
    sums = packed_checksums([1]) if verifiable else None
    return StoredObject(uri, Tier.NVME, 1, packed([Extent(0, 0, 1)]), sums, 1, SyncStatus.LOCAL_ONLY)


def seen(table: TableView, uris: Sequence[str]) -> list[int]:
    return table.look_up([uri.encode() for uri in uris])


def states(objects: dict[str, bool]) -> list[int]:
    told = {True: Presence.VERIFIABLE, False: Presence.UNVERIFIABLE, None: Presence.ABSENT}
    return [told[objects.get(uri)] for uri in URIS]


def agree(table: TableView, objects: dict[str, bool]) -> None:
    """What it says is right, but for what it says itself that it has no place for."""
    said, right = seen(table, URIS), states(objects)
    wrong = [said_one for said_one, right_one in zip(said, right, strict=True) if said_one != right_one]
    assert wrong == [Presence.ABSENT] * table.unplaced
    assert np.count_nonzero(table.buckets) + table.unplaced == len(objects)


STEPS = st.lists(st.tuples(st.sampled_from(URIS), st.sampled_from([True, False, None])), max_size=200)


@pytest.mark.parametrize("buckets", [1, 2, 8, 64])
@given(loaded=st.dictionaries(st.sampled_from(URIS), st.booleans()), steps=STEPS)
def test_it_has_what_the_object_table_has(
    buckets: int, loaded: dict[str, bool], steps: list[tuple[str, bool | None]]
) -> None:
    objects = dict(loaded)
    table, kept = view(buckets), ObjectTable()
    kept.publish(PresenceWords(table))
    records = {uri: record_of(stored(uri, verifiable=has)) for uri, has in loaded.items()}
    kept.load(records, np.array(list(loaded.values()), np.bool_))
    agree(table, objects)
    for uri, has in steps:
        if has is None:
            kept.pop([uri])
            objects.pop(uri, None)
        else:
            kept.put([stored(uri, verifiable=has)])
            objects[uri] = has
        agree(table, objects)


def test_a_table_is_published_and_loaded_before_anything_is_in_it() -> None:
    kept = ObjectTable()
    kept.put([stored("a", verifiable=True)])
    with pytest.raises(AssertionError, match="published before anything is here"):
        kept.publish(PresenceWords(view(1)))
    with pytest.raises(AssertionError, match="loaded before anything is here"):
        kept.load({}, np.empty(0, np.bool_))
    assert kept.uris() == ["a"]


def cache_with(table: TableView) -> Cache:
    pool = Pool(Tier.NVME, Allocator({0: 16 << 20}, 0), Lru(), quarantine_share=0)
    cache = Cache({Tier.NVME: pool}, last_number=1, times=Times())
    cache.publish(PresenceWords(table))
    return cache


def test_a_cache_publishes_what_can_be_found_in_it() -> None:
    table = view(64)
    cache = cache_with(table)
    staged = cache.stage("a", 4096, Tier.NVME, 1, StageOptions(False, False, False), now=0)
    assert isinstance(staged, StagedWrite)
    assert seen(table, ["a"]) == [Presence.ABSENT]
    cache.apply_commits([(staged, cache.plan_commit(staged, StateEvent.COMMIT_LOCAL_ONLY))], now=0)
    assert seen(table, ["a"]) == [Presence.UNVERIFIABLE]
    cache.withhold("a")
    assert seen(table, ["a"]) == [Presence.ABSENT]
    cache.give_back("a")
    assert seen(table, ["a"]) == [Presence.UNVERIFIABLE]
    cache.apply_removes(["a"], now=0)
    assert seen(table, ["a"]) == [Presence.ABSENT]


def test_nobody_misses_an_object_while_another_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(PresenceWords, "_remove", lambda _, word: taken.append(word))
    table = view(64)
    cache = cache_with(table)
    for _ in range(2):
        staged = cache.stage("a", 4096, Tier.NVME, 1, StageOptions(False, False, False), now=0)
        assert isinstance(staged, StagedWrite)
        cache.apply_commits([(staged, cache.plan_commit(staged, StateEvent.COMMIT_LOCAL_ONLY))], now=0)
    assert (seen(table, ["a"]), taken) == ([Presence.UNVERIFIABLE], [])
    cache.apply_removes(["a"], now=0)
    assert len(taken) == 1


def test_what_found_no_place_is_counted_until_it_goes() -> None:
    table = view(1)
    words = PresenceWords(table)
    for uri in URIS[:10]:
        words.change([uri], [None], [True])
    assert table.unplaced == 2
    words.change([URIS[9]], [True], [None])
    assert table.unplaced == 1
    words.change([URIS[0]], [True], [None])
    assert (table.unplaced, seen(table, URIS[:1])) == (1, [Presence.ABSENT])
    words.change([URIS[8]], [True], [None])
    assert table.unplaced == 0


def test_two_without_a_place_that_share_a_word_are_counted_apart() -> None:
    table = view(1)
    words = PresenceWords(table)
    for uri in URIS[:8]:
        words.change([uri], [None], [True])
    for unplaced in (1, 2):
        words.change(["twin"], [None], [True])  # of another uri of the same word, which are hard to find
        assert table.unplaced == unplaced
    for unplaced in (1, 0):
        words.change(["twin"], [True], [None])
        assert table.unplaced == unplaced


def test_what_finds_no_place_costs_the_same_however_much_there_is_of_it() -> None:
    uris = [f"hypercache://a/{number}" for number in range(30_000)]
    table = view(1)
    words = PresenceWords(table)
    started = time.perf_counter()
    words.load(uris, np.ones(len(uris), np.bool_))
    for uri in uris:
        words.change([uri], [True], [None])
    assert time.perf_counter() - started < 5, "it goes over all of them for each"
    assert table.unplaced == 0


def test_a_cache_publishes_what_it_is_loaded_with() -> None:
    table = view(64)
    has = {"a": True, "b": False, "c": True}
    records = {
        uri: record_of(stored(uri, verifiable=one)._replace(packed_extents=packed([Extent(0, offset, 1)])))
        for offset, (uri, one) in zip(count(0, 4096), has.items(), strict=False)
    }
    cache_with(table).load(records)
    assert seen(table, [*has, "nowhere"]) == [
        Presence.VERIFIABLE,
        Presence.UNVERIFIABLE,
        Presence.VERIFIABLE,
        Presence.ABSENT,
    ]


def test_of_many_hardly_any_finds_no_place_where_a_quarter_is_filled() -> None:
    table = view(1 << 14)
    uris = [f"hypercache://a/{number}" for number in range(1 << 15)]
    PresenceWords(table).load(uris, np.ones(len(uris), np.bool_))
    assert table.unplaced <= 1
    assert set(seen(table, uris)) == {Presence.VERIFIABLE}
