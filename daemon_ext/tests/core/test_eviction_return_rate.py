"""ReturnRate: who leaves first, that scans pass it by, that its memory is bounded, and the same order as a
policy written without regard to time and memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hypercache_daemon.core.eviction import EvictionPolicy, Lru
from hypercache_daemon.core.eviction_return_rate import ReturnRate

KEYS = st.sampled_from([f"k{number}" for number in range(12)])


def insert_all(policy: EvictionPolicy, keys: Sequence[str]) -> None:
    for key in keys:
        policy.inserted(key, 4096)


def chain(name: str, length: int) -> list[str]:
    return [f"{name}{number}" for number in range(length)]


def evict(policy: EvictionPolicy, number: int) -> list[str]:
    """What leaves, in order."""
    victims = list(islice(policy.victims(), number))
    for victim in victims:
        policy.removed(victim)
    return victims


def serve(policy: EvictionPolicy, here: set[str], batch: Sequence[str], capacity: int) -> int:
    """Look a batch up and store what is missing; returns how many were there."""
    found = sum(key in here for key in batch)
    policy.touched(batch)
    missing = [key for key in batch if key not in here]
    here.difference_update(evict(policy, max(0, len(here) + len(missing) - capacity)))
    insert_all(policy, missing)
    here.update(missing)
    return found


# -- chains --------------------------------------------------------------------------------------------


def test_a_chain_leaves_from_its_tail() -> None:
    policy = ReturnRate()
    insert_all(policy, ["c", "a", "d", "b"])
    policy.touched(["a", "b", "c", "d"])
    assert list(policy.victims()) == ["d", "c", "b", "a"]


@pytest.mark.parametrize("number", [1, 63, 64, 65, 200])
def test_what_nobody_asked_for_leaves_as_it_came(number: int) -> None:
    policy = ReturnRate()
    insert_all(policy, chain("k", number))
    assert list(policy.victims()) == chain("k", number)


def test_what_came_in_after_a_lookup_leaves_after_what_was_there() -> None:
    policy = ReturnRate()
    insert_all(policy, ["a0", "a1"])
    policy.touched(["absent", "too"])
    insert_all(policy, ["b0", "b1"])
    assert list(policy.victims()) == ["a0", "a1", "b0", "b1"]


@pytest.mark.parametrize("order", [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]])
def test_the_order_of_the_last_batch_counts(order: list[str]) -> None:
    policy = ReturnRate()
    insert_all(policy, ["a", "b", "c"])
    policy.touched(["a", "b", "c"])
    policy.touched(["a", "b", "c"])
    policy.touched(order)
    assert list(policy.victims()) == order[::-1]


def test_a_chain_is_asked_for_as_a_whole_though_one_of_it_was_asked_for_alone() -> None:
    policy = ReturnRate()
    insert_all(policy, ["c", "b", "a"])
    policy.touched(["a", "b", "c"])
    policy.touched(["b"])
    for _ in range(4):
        policy.touched(["a", "b", "c"])
    assert list(policy.victims()) == ["c", "b", "a"]


def test_a_chain_that_was_asked_for_as_before_is_young_again() -> None:
    policy = ReturnRate()
    insert_all(policy, ["tail", "head"])
    policy.touched(["head", "tail"])
    insert_all(policy, chain("other", 5))
    for _ in range(2):
        policy.touched(["head", "tail"])
    assert list(policy.victims())[:4] == chain("other", 4)


def test_what_is_of_another_kind_and_removed_before_its_turn_is_not_named() -> None:
    policy = ReturnRate()
    insert_all(policy, ["asked", "new"])
    policy.touched(["asked"])
    victims = policy.victims()
    assert next(victims) == "new"
    policy.removed("asked")
    assert list(victims) == []


def test_what_changes_its_kind_after_its_turn_is_not_named_again() -> None:
    policy = ReturnRate()
    asked = chain("asked", 40)
    insert_all(policy, [*asked, "new"])
    for key in asked:
        policy.touched([key])
    victims = policy.victims()
    assert next(victims) == "new"
    policy.touched(["new"])
    assert list(victims) == asked


def test_the_age_of_what_came_in_counts_from_then_though_nobody_asked_for_anything_since() -> None:
    policy = ReturnRate()
    insert_all(policy, ["asked"])
    policy.touched(["asked"])
    insert_all(policy, chain("scan", 3000))
    order = list(policy.victims())
    assert order.index("scan2900") < order.index("asked") < order.index("scan2999")


def test_a_conversation_that_grew_stays_and_the_blocks_of_its_old_end_leave() -> None:
    policy, here = ReturnRate(), set[str]()
    for turn in range(1, 40):  # each turn of each conversation: the prompt so far, four more blocks, an end
        for name in "xyz":
            serve(policy, here, [*chain(name, 4 * turn), f"{name}-end-{turn}"], 10_000)
    kept = 3 * 4 * 39
    left = evict(policy, len(here) - kept)
    assert {key[1:6] for key in left} == {"-end-"}


# -- return rates --------------------------------------------------------------------------------------


def test_of_two_that_are_as_old_the_kind_that_comes_back_less_often_leaves_first() -> None:
    policy, here = ReturnRate(), set[str]()
    for number in range(100):
        for _ in range(9):
            serve(policy, here, [f"often{number}"], 10_000)
        serve(policy, here, [f"once{number}"], 10_000)
    assert evict(policy, 20) == chain("once", 20)


def test_a_key_that_comes_back_after_it_left_counts_as_asked_for() -> None:
    policy = ReturnRate()
    insert_all(policy, chain("once", 50))
    insert_all(policy, ["back"])
    policy.removed("back")
    insert_all(policy, ["back", *chain("more", 50)])
    assert list(policy.victims())[-1] == "back"


def scan_survivors(make: Callable[[], EvictionPolicy]) -> int:
    """Of 200 keys that are asked for again and again, how many are left after a scan of 5 times the cache."""
    policy, here, capacity = make(), set[str](), 1000
    chains = [chain(f"hot{number}-", 20) for number in range(10)]
    for turn in range(20):
        for number, hot in enumerate(chains):
            serve(policy, here, hot, capacity)
            serve(policy, here, chain(f"once-{turn}-{number}-", 8), capacity)
    for number in range(100):
        serve(policy, here, chain(f"scan{number}-", 50), capacity)
    return sum(key in here for hot in chains for key in hot)


def test_a_scan_takes_nothing_that_is_used() -> None:
    assert scan_survivors(ReturnRate) == 200
    assert scan_survivors(Lru) == 0, "the scan would harm nobody, so it shows nothing"


def test_what_was_hot_leaves_in_the_end() -> None:
    policy, here, capacity = ReturnRate(), set[str](), 1000
    for _ in range(10):
        serve(policy, here, chain("old", 200), capacity)
    for day in range(1000):
        for _ in range(2):
            serve(policy, here, chain(f"new{day}-", 100), capacity)
    assert not any(key.startswith("old") for key in here)


# -- memory --------------------------------------------------------------------------------------------


def bytes_after(work: Callable[[EvictionPolicy], None]) -> int:
    """What the policy takes after `work`."""
    tracemalloc.start()
    try:
        policy = ReturnRate()
        work(policy)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_the_history_is_bounded_by_what_is_present() -> None:
    def replaced(rounds: int) -> Callable[[EvictionPolicy], None]:
        def work(policy: EvictionPolicy) -> None:
            for number in range(rounds):
                insert_all(policy, [f"{number}-{key}" for key in range(500)])
                evict(policy, 500 if number else 0)

        return work

    assert bytes_after(replaced(40)) < 1.3 * bytes_after(replaced(4))


def test_lookups_of_what_is_missing_take_no_more_memory_for_ever() -> None:
    def work(policy: EvictionPolicy) -> None:
        for number in range(30_000):
            policy.touched([f"head-{number}", f"end-{number}"])

    assert bytes_after(work) < 1_000_000


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_lookups_of_what_is_present_take_no_more_memory_for_ever(batch_size: int) -> None:
    keys = chain("k", 1000)

    def looked_up(rounds: int) -> Callable[[EvictionPolicy], None]:
        def work(policy: EvictionPolicy) -> None:
            insert_all(policy, keys)
            for number in range(rounds):
                start = number * 37 % 900
                policy.touched(keys[start : start + batch_size])

        return work

    # A dict may double once more by chance; a run that stays for every lookup would be far more.
    assert bytes_after(looked_up(20_000)) < 2.5 * bytes_after(looked_up(2000))


def test_what_is_left_of_long_chains_takes_little_memory() -> None:
    def work(left: int) -> Callable[[EvictionPolicy], None]:
        def chains(policy: EvictionPolicy) -> None:
            for number in range(50):
                keys = chain(f"{number}-", 1000)
                insert_all(policy, keys)
                policy.touched(keys)
                for key in keys[left:]:
                    policy.removed(key)

        return chains

    assert bytes_after(work(left=1)) < 0.05 * bytes_after(work(left=1000))


# -- the same order as the plain one -------------------------------------------------------------------


class PlainReturnRate:
    """The rules of the policy with a record for each key, sorted whenever victims are asked for."""

    def __init__(self) -> None:
        self.arrivals = 0
        self.records: dict[str, tuple[int, int, int, int]] = {}  # kind, since, run, place
        self.joined = [0.0] * 7
        self.returned = [0.0] * 7
        self.history: dict[str, int] = {}
        self.ends: set[str] = set()
        self.arriving = (-1, -1, -1)  # kind, since, run
        self.numbers = count()

    def inserted(self, key: str) -> None:
        self.removed(key)
        self.arrivals += 1
        kind = 6 if key in self.ends else 0
        if key in self.history:
            kind = self.next_kind(self.history.pop(key))
        elif kind == 6:
            self.ends.remove(key)
        if self.arriving[0] != kind:
            self.arriving = kind, self.arrivals, next(self.numbers)
        self.records[key] = (*self.arriving, -next(self.numbers))  # of these the first leaves first
        self.join(kind, 1)

    def touched(self, batch: list[str]) -> None:
        self.arriving = (-1, -1, -1)
        runs: dict[int, int] = {}
        joined: dict[int, int] = {}
        for key in dict.fromkeys(batch):
            if key in self.records:
                kind = self.next_kind(self.records[key][0])
                run = runs.setdefault(kind, next(self.numbers))
                self.records[key] = kind, self.arrivals, run, next(self.numbers)
                joined[kind] = joined.get(kind, 0) + 1
        for kind, number in joined.items():
            self.join(kind, number)
        if batch and batch[-1] not in self.records:
            self.ends.add(batch[-1])

    def removed(self, key: str) -> None:
        if key in self.records:
            if self.records[key][:3] == self.arriving:
                self.arriving = (-1, -1, -1)
            self.history[key] = self.records.pop(key)[0]

    def victims(self) -> list[str]:
        def turn(key: str) -> tuple[float, int, int, int]:
            kind, since, run, place = self.records[key]
            rate = max(0.01, (self.returned[kind] + 1) / (self.joined[kind] + 2))
            return (since - self.arrivals - 1) / rate, kind, run, -place

        return sorted(self.records, key=turn)

    def next_kind(self, kind: int) -> int:
        self.returned[kind] += 1
        return 1 if kind == 6 else min(kind + 1, 5)

    def join(self, kind: int, number: int) -> None:
        self.joined[kind] += number
        if self.joined[kind] > 2 * len(self.records) + 64:
            self.joined[kind] /= 2
            self.returned[kind] /= 2


class AgainstThePlainOne(RuleBasedStateMachine):
    """The same steps for both."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = ReturnRate()
        self.plain = PlainReturnRate()

    @rule(keys=st.lists(KEYS, min_size=1, max_size=6))
    def insert(self, keys: list[str]) -> None:
        for key in keys:
            self.policy.inserted(key, 4096)
            self.plain.inserted(key)

    @rule(batch=st.lists(KEYS, max_size=8))
    def touch(self, batch: list[str]) -> None:
        self.policy.touched(batch)
        self.plain.touched(batch)

    @rule(times=st.integers(1, 40))
    def ask_for_all(self, times: int) -> None:
        for _ in range(times):
            self.touch(self.plain.victims()[::-1])

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        self.policy.removed(key)
        self.plain.removed(key)

    @rule(number=st.integers(0, 4))
    def evict(self, number: int) -> None:
        expected = self.plain.victims()[:number]
        assert evict(self.policy, number) == expected
        for key in expected:
            self.plain.removed(key)

    @invariant()
    def the_order_is_the_same(self) -> None:
        assert list(self.policy.victims()) == self.plain.victims()


TestAgainstThePlainOne = AgainstThePlainOne.TestCase
TestAgainstThePlainOne.settings = settings(max_examples=60, stateful_step_count=40)


@given(
    st.lists(st.tuples(st.integers(0, 299), st.integers(0, 299)), max_size=20), st.sets(st.integers(0, 299))
)
def test_victims_are_named_once_whichever_the_caller_removes(
    lookups: list[tuple[int, int]], removed: set[int]
) -> None:
    policy, keys = ReturnRate(), chain("k", 300)
    insert_all(policy, keys)
    for first, last in lookups:
        policy.touched(keys[first:last])
    seen = []
    for place, key in enumerate(policy.victims()):
        seen.append(key)
        if place in removed:
            policy.removed(key)
    assert sorted(seen) == sorted(keys)
    assert list(policy.victims()) == [key for place, key in enumerate(seen) if place not in removed]
