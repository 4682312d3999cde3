"""What every eviction policy keeps, foremost that victims may be removed while they are named; and Lru."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hypercache_daemon.core.eviction import EvictionPolicy, Lru
from hypercache_daemon.core.eviction_return_rate import ReturnRate

KEYS = st.sampled_from([f"hypercache://k{number}" for number in range(12)])


Make = Callable[[], EvictionPolicy]
every_policy = pytest.mark.parametrize("make", [Lru, ReturnRate])


def policy_with(keys: Iterable[str], make: Make = Lru) -> EvictionPolicy:
    policy = make()
    for key in keys:
        policy.inserted(key, 4096)
    return policy


def numbered(count: int) -> list[str]:
    return [f"k{number}" for number in range(count)]


# -- every policy --------------------------------------------------------------------------------------


class Twins:
    """A policy that was loaded, and one that had the same keys inserted."""

    def __init__(self, make: Make, count: int) -> None:
        self.loaded, self.filled = make(), policy_with(numbered(count), make)
        self.loaded.load(numbered(count), [4096] * count)

    def both(self, change: Callable[[EvictionPolicy], None]) -> None:
        change(self.loaded)
        change(self.filled)

    def check(self) -> None:
        assert list(self.loaded.victims()) == list(self.filled.victims())


CHANGES = st.lists(
    st.one_of(
        st.builds(lambda key: lambda policy: policy.inserted(f"k{key}", 4096), st.integers(0, 200)),
        st.builds(lambda key: lambda policy: policy.removed(f"k{key}"), st.integers(0, 200)),
        st.builds(
            lambda first, count: lambda policy: policy.touched(numbered(200)[first : first + count]),
            st.integers(0, 200),
            st.integers(0, 100),
        ),
    ),
    max_size=30,
)


@every_policy
@given(count=st.integers(0, 150), changes=CHANGES)
def test_what_is_loaded_at_once_goes_on_like_what_was_inserted_one_by_one(
    make: Make, count: int, changes: list[Callable[[EvictionPolicy], None]]
) -> None:
    twins = Twins(make, count)
    twins.check()
    for change in changes:
        twins.both(change)
        twins.check()


@every_policy
@pytest.mark.parametrize("count", [0, 1, 64, 65, 150])
def test_what_is_loaded_leaves_in_its_order_and_before_what_comes_later(make: Make, count: int) -> None:
    twins = Twins(make, count)
    twins.check()
    twins.both(lambda policy: policy.inserted("new", 4096))
    twins.check()
    assert list(twins.loaded.victims()) == [*numbered(count), "new"]
    twins.both(lambda policy: policy.touched([]))
    twins.check()


@every_policy
def test_of_a_batch_the_tail_leaves_before_the_head(make: Make) -> None:
    policy = policy_with(["head", "middle", "tail", "other"], make)
    policy.touched(["head", "middle", "tail"])
    assert list(policy.victims()) == ["other", "tail", "middle", "head"]


@every_policy
def test_a_touch_of_unknown_keys_makes_none_known(make: Make) -> None:
    policy = policy_with("ab", make)
    policy.touched(["missing", "a", "gone"])
    assert list(policy.victims()) == ["b", "a"]


@every_policy
def test_a_key_that_is_twice_in_a_batch_is_named_once(make: Make) -> None:
    policy = policy_with("ab", make)
    policy.touched(["a", "b", "a"])
    assert sorted(policy.victims()) == ["a", "b"]


@every_policy
def test_a_removed_key_is_no_victim_and_may_be_removed_again(make: Make) -> None:
    policy = policy_with("abc", make)
    policy.removed("b")
    policy.removed("b")
    assert sorted(policy.victims()) == ["a", "c"]


@every_policy
def test_inserting_a_known_key_makes_it_the_hottest(make: Make) -> None:
    policy = policy_with("ab", make)
    policy.inserted("a", 8192)
    assert list(policy.victims()) == ["b", "a"]


@every_policy
def test_naming_victims_removes_nothing(make: Make) -> None:
    policy = policy_with("abc", make)
    first = list(policy.victims())
    assert first == list(policy.victims())
    assert sorted(first) == ["a", "b", "c"]


@every_policy
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 48, 1000])
def test_victims_may_be_removed_while_they_are_named(make: Make, count: int) -> None:
    policy = policy_with(numbered(count), make)
    order = list(policy.victims())
    seen = []
    for key in policy.victims():
        policy.removed(key)
        seen.append(key)
    assert seen == order
    assert sorted(order) == sorted(numbered(count))
    assert list(policy.victims()) == []


@every_policy
@given(removed=st.sets(st.integers(0, 299)))
def test_victims_are_named_once_whichever_the_caller_removes(make: Make, removed: set[int]) -> None:
    policy = policy_with(numbered(300), make)
    order = list(policy.victims())
    seen = []
    for place, key in enumerate(policy.victims()):
        seen.append(key)
        if place in removed:
            policy.removed(key)
    assert seen == order
    assert list(policy.victims()) == [key for place, key in enumerate(order) if place not in removed]


@every_policy
def test_what_is_removed_before_its_turn_is_not_named(make: Make) -> None:
    policy = policy_with("abc", make)
    first, second, third = policy.victims()
    victims = policy.victims()
    assert next(victims) == first
    policy.removed(second)
    assert list(victims) == [third]


@every_policy
def test_a_victim_that_comes_back_is_not_named_twice(make: Make) -> None:
    policy = policy_with("ab", make)
    victims = policy.victims()
    first = next(victims)
    policy.removed(first)
    policy.inserted(first, 4096)
    assert list(victims) == [*{"a", "b"} - {first}]


@every_policy
def test_a_victim_that_was_left_and_is_asked_for_is_not_named_twice(make: Make) -> None:
    policy = policy_with("ab", make)
    victims = policy.victims()
    first = next(victims)
    policy.touched([first])
    assert list(victims) == [*{"a", "b"} - {first}]


# -- Lru -----------------------------------------------------------------------------------------------


def test_the_oldest_leaves_first() -> None:
    assert list(policy_with("abc").victims()) == ["a", "b", "c"]


def test_a_touched_key_leaves_last() -> None:
    policy = policy_with("abc")
    policy.touched(["a"])
    assert list(policy.victims()) == ["b", "c", "a"]


class LruAgainstAList(RuleBasedStateMachine):
    """The same steps on a plain list, coldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Lru()
        self.coldest_first: list[str] = []

    def heat(self, key: str) -> None:
        self.coldest_first.remove(key)
        self.coldest_first.append(key)

    @rule(key=KEYS)
    def insert(self, key: str) -> None:
        self.policy.inserted(key, 4096)
        if key not in self.coldest_first:
            self.coldest_first.append(key)
        self.heat(key)

    @rule(batch=st.lists(KEYS, max_size=5))
    def touch(self, batch: list[str]) -> None:
        self.policy.touched(batch)
        for key in reversed(batch):
            if key in self.coldest_first:
                self.heat(key)

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        self.policy.removed(key)
        if key in self.coldest_first:
            self.coldest_first.remove(key)

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        for _, key in zip(range(count), self.policy.victims(), strict=False):
            assert key == self.coldest_first.pop(0)
            self.policy.removed(key)

    @invariant()
    def the_order_is_the_same(self) -> None:
        assert list(self.policy.victims()) == self.coldest_first


TestLruAgainstAList = LruAgainstAList.TestCase
