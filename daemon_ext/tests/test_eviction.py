"""Eviction policies: what leaves first, and that victims can be removed while they are named."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hypercache_daemon.core.eviction import EvictionPolicy, Lru

KEYS = st.sampled_from([f"hypercache://k{number}" for number in range(12)])


def policy_with(keys: Iterable[str]) -> EvictionPolicy:
    policy: EvictionPolicy = Lru()
    for key in keys:
        policy.inserted(key, 4096)
    return policy


def numbered(count: int) -> list[str]:
    return [f"k{number}" for number in range(count)]


def test_the_oldest_leaves_first() -> None:
    assert list(policy_with("abc").victims()) == ["a", "b", "c"]


def test_a_touched_key_leaves_last() -> None:
    policy = policy_with("abc")
    policy.touched(["a"])
    assert list(policy.victims()) == ["b", "c", "a"]


def test_of_a_batch_the_tail_leaves_before_the_head() -> None:
    policy = policy_with(["head", "middle", "tail", "other"])
    policy.touched(["head", "middle", "tail"])
    assert list(policy.victims()) == ["other", "tail", "middle", "head"]


def test_a_touch_of_unknown_keys_makes_none_known() -> None:
    policy = policy_with("ab")
    policy.touched(["missing", "a", "gone"])
    assert list(policy.victims()) == ["b", "a"]


def test_inserting_a_known_key_makes_it_the_hottest() -> None:
    policy = policy_with("ab")
    policy.inserted("a", 8192)
    assert list(policy.victims()) == ["b", "a"]


def test_a_removed_key_is_no_victim_and_may_be_removed_again() -> None:
    policy = policy_with("abc")
    policy.removed("b")
    policy.removed("b")
    assert list(policy.victims()) == ["a", "c"]


def test_naming_victims_removes_nothing() -> None:
    policy = policy_with("abc")
    assert list(policy.victims()) == list(policy.victims()) == ["a", "b", "c"]


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 192, 1000])
def test_victims_may_be_removed_while_they_are_named(count: int) -> None:
    policy = policy_with(numbered(count))
    seen = []
    for key in policy.victims():
        policy.removed(key)
        seen.append(key)
    assert seen == numbered(count)
    assert list(policy.victims()) == []


@given(st.sets(st.integers(0, 299)))
def test_victims_are_named_once_whichever_the_caller_removes(removed: set[int]) -> None:
    keys = numbered(300)
    policy = policy_with(keys)
    seen = []
    for number, key in enumerate(policy.victims()):
        seen.append(key)
        if number in removed:
            policy.removed(key)
    assert seen == keys
    assert list(policy.victims()) == [key for number, key in enumerate(keys) if number not in removed]


def test_what_is_removed_before_its_turn_is_not_named() -> None:
    policy = policy_with("abc")
    victims = policy.victims()
    assert next(victims) == "a"
    policy.removed("b")
    assert list(victims) == ["c"]


def test_a_victim_that_comes_back_is_not_named_twice() -> None:
    policy = policy_with("ab")
    victims = policy.victims()
    policy.removed(next(victims))
    policy.inserted("a", 4096)
    assert list(victims) == ["b"]


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
