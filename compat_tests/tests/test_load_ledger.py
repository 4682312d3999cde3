"""Which versions a verified load takes for right."""

from __future__ import annotations

import pytest

from hypercache_compat.lmcache_scenarios.ledger import Ledger


def test_what_was_never_stored_is_not_allowed_and_what_comes_later_is() -> None:
    ledger = Ledger(overwrite=False)
    allowed = ledger.allowed("a")
    assert ledger.begin("a") in allowed
    assert ledger.begin("a") == 1
    other = ledger.allowed("b")
    assert (other.versions, other.later) == (frozenset(), 0)


def test_a_store_that_may_have_failed_is_allowed() -> None:
    ledger = Ledger(overwrite=False)
    version = ledger.begin("a")
    assert version in ledger.allowed("a")


@pytest.mark.parametrize("overwrite", [True, False])
def test_only_overwriting_ends_what_was_there_before(overwrite: bool) -> None:
    ledger = Ledger(overwrite=overwrite)
    first, second = ledger.begin("a"), ledger.begin("a")
    ledger.stored("a", first)
    ledger.stored("a", second)
    allowed = ledger.allowed("a")
    assert second in allowed
    assert (first in allowed) == (not overwrite)


def test_what_was_deleted_never_comes_back() -> None:
    ledger = Ledger(overwrite=False)
    version = ledger.begin("a")
    ledger.stored("a", version)
    ledger.deleted("a")
    assert version not in ledger.allowed("a")
    assert ledger.begin("a") in ledger.allowed("a")


def test_what_another_stored_is_allowed_until_it_is_deleted_or_replaced() -> None:
    ledger = Ledger(overwrite=True, first_version=100)
    assert 99 in ledger.allowed("a")
    assert 99 in ledger.allowed("b")
    ledger.deleted("a")
    assert 99 not in ledger.allowed("a")
    version = ledger.begin("b")
    assert version == 100
    ledger.stored("b", version)
    assert 99 not in ledger.allowed("b")


def test_a_key_is_one_writers_until_it_is_released() -> None:
    ledger = Ledger(overwrite=False)
    assert ledger.claim(["a", "b"]) == ["a", "b"]
    assert ledger.claim(["b", "c"]) == ["c"]
    ledger.release(["a", "b"])
    assert ledger.claim(["a", "c"]) == ["a"]
