"""What lies under a prefix of uris, and what is said where it is too much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hypercache_daemon.core.capacities import Capacities, Capacity
from hypercache_daemon.core.eviction import Lru

PREFIXES = ("hypercache://", "hypercache://a/", "hypercache://a/b/", "hypercache://a!/", "s3://a/")


def capacities(*prefixes: str) -> Capacities:
    return Capacities(Capacity(prefix, 1, Lru()) for prefix in prefixes)


@pytest.mark.parametrize(
    ("uri", "above"),
    [
        ("hypercache://a/b/c", ["hypercache://", "hypercache://a/", "hypercache://a/b/"]),
        ("hypercache://a/b", ["hypercache://", "hypercache://a/", "hypercache://a/b/"]),
        ("hypercache://a/bc", ["hypercache://", "hypercache://a/"]),
        ("hypercache://a", ["hypercache://", "hypercache://a/"]),
        ("hypercache://ab/b/c", ["hypercache://"]),
        ("s3://ab", []),
        ("a/b", []),
        ("", []),
    ],
)
def test_a_uri_lies_under_whole_segments_the_outermost_first(uri: str, above: list[str]) -> None:
    assert [capacity.prefix for capacity in capacities(*reversed(PREFIXES)).above(uri)] == above


def test_how_deep_prefixes_are_nested_is_known() -> None:
    assert [capacities(*PREFIXES[:count]).nesting for count in range(4)] == [0, 1, 2, 3]


@dataclass
class Notes(Lru):
    """A policy that notes what was asked for."""

    batches: list[list[str]] = field(default_factory=list)

    def touched(self, keys_in_batch_order: Sequence[str]) -> None:
        self.batches.append(list(keys_in_batch_order))


A, B, C = "hypercache://a/1", "hypercache://b", "hypercache://a/b/2"


@pytest.mark.parametrize(
    ("uris", "outer", "inner"),
    [
        ([A, A], [[A, A]], []),
        ([A, B, C], [[A, C]], [[C]]),
        ([C, C], [[C, C]], [[C, C]]),
        ([B], [], []),
        ([], [], []),
    ],
)
def test_a_prefix_hears_of_its_part_of_a_batch(
    uris: list[str], outer: list[list[str]], inner: list[list[str]]
) -> None:
    policies = {"hypercache://a/": Notes(), "hypercache://a/b/": Notes()}
    limits = Capacities(Capacity(prefix, 1, policy) for prefix, policy in policies.items())
    limits.touched(uris)
    assert [policy.batches for policy in policies.values()] == [outer, inner]
    heard = [prefix for prefix, policy in policies.items() if policy.batches]
    assert sorted(capacity.prefix for capacity in limits.around(uris)) == heard


SEGMENTS = st.sampled_from(["a", "b", "a!", "a0", ""])
URIS = st.builds(
    lambda scheme, segments: scheme + "/".join(segments),
    st.sampled_from(["hypercache://", "s3://", ""]),
    st.lists(SEGMENTS, max_size=4),
)


@given(st.lists(URIS, max_size=4), st.sets(st.sampled_from(PREFIXES)))
@example(["hypercache://", "hypercache://a", "hypercache://a!"], {"hypercache://a/"})
@example(["hypercache://a!", "hypercache://a/x", "hypercache://a0"], {"hypercache://a/"})
def test_of_a_batch_each_prefix_hears_of_what_lies_under_it(uris: list[str], prefixes: set[str]) -> None:
    policies = {prefix: Notes() for prefix in sorted(prefixes)}
    limits = Capacities(Capacity(prefix, 1, policy) for prefix, policy in policies.items())
    limits.touched(uris)
    around = {capacity.prefix for capacity in limits.around(uris)}
    assert around == {capacity.prefix for uri in uris for capacity in limits.above(uri)}
    shared = limits.shared(uris)
    assert shared is None or all(limits.above(uri) == shared for uri in uris)
    for prefix, policy in policies.items():
        under = [uri for uri in uris if f"{uri}/".startswith(prefix)]
        assert policy.batches == ([under] if under else [])


def test_what_does_not_fit_is_told_the_limit_and_what_takes_it() -> None:
    capacity = Capacity("hypercache://a/", 4096, Lru())
    capacity.used_bytes, capacity.pinned_bytes, capacity.dirty_bytes = 7, 5, 3
    capacity.staged_bytes = 2
    assert capacity.no_space(1).sentence() == (
        "no space for 1 bytes under hypercache://a/, whose --capacity is 4096: used 7 (pinned 5, not yet in "
        "a backend 3), staged 2; evict or unpin some of it, or ask for a higher limit"
    )
