"""The RAM tier's budget: chunks with serials of their own, and nothing counted twice."""

from __future__ import annotations

import pytest
from chunk_tables import table_of

from hypercache_daemon.core.extents import Extent
from hypercache_daemon.core.ram import RamAllocator
from hypercache_protocol.fields import CHUNK_SIZE

MIB = 1 << 20


def test_an_object_is_cut_into_chunks_with_serials_that_never_come_again() -> None:
    ram = RamAllocator(10 * MIB, first_serial=7)
    first = ram.allocate(CHUNK_SIZE + 5)
    assert first == (Extent(7, 0, CHUNK_SIZE), Extent(8, 0, 5))
    assert (ram.free_bytes, ram.total_bytes) == (6 * MIB - 4096, 10 * MIB)
    ram.release(first)
    assert ram.free_bytes == 10 * MIB
    assert ram.allocate(1) == (Extent(9, 0, 1),)
    assert ram.allocate(0) == ()


def test_what_is_over_the_budget_is_not_given_and_takes_nothing() -> None:
    ram = RamAllocator(8192, first_serial=0)
    assert ram.allocate(8193) is None
    assert ram.allocate(8192) == (Extent(0, 0, 8192),)
    assert ram.allocate(1) is None


def test_a_pool_that_was_loaded_with_more_than_its_budget_is_that_large_until_it_shrinks() -> None:
    ram = RamAllocator(4096, first_serial=100)
    ram.load(table_of([Extent(1, 0, 4096), Extent(2, 0, 4096)]))
    assert (ram.total_bytes, ram.free_bytes) == (8192, 0)
    ram.release([Extent(1, 0, 4096), Extent(2, 0, 4096)])
    assert (ram.total_bytes, ram.free_bytes) == (4096, 4096)


def test_a_chunk_with_two_owners_or_none_is_refused() -> None:
    ram = RamAllocator(8192, first_serial=0)
    ram.claim([Extent(1, 0, 1)])
    with pytest.raises(ValueError, match="has an owner already"):
        ram.claim([Extent(1, 0, 1)])
    with pytest.raises(ValueError, match="has an owner already"):
        ram.load(table_of([Extent(1, 0, 1), Extent(3, 0, 1)]))
    with pytest.raises(ValueError, match="has no owner"):
        ram.release([Extent(2, 0, 1)])
    ram.release([Extent(1, 0, 1)])
    with pytest.raises(ValueError, match="has no owner"):
        ram.release([Extent(1, 0, 1)])


TWICE = [Extent(8, 0, 1), Extent(9, 0, 1), Extent(8, 0, 1)]


@pytest.mark.parametrize("refused", [[Extent(8, 0, 1), Extent(1, 0, 1)], TWICE], ids=["other owner", "twice"])
def test_a_claim_that_is_refused_takes_nothing(refused: list[Extent]) -> None:
    ram = RamAllocator(40960, first_serial=100)
    ram.claim([Extent(1, 0, 1)])
    for take in (ram.claim, lambda extents: ram.load(table_of(extents))):
        with pytest.raises(ValueError, match="has an owner already"):
            take(refused)
        assert ram.free_bytes == 40960 - 4096
    ram.claim([Extent(8, 0, 1), Extent(9, 0, 1)])  # nobody owns them


@pytest.mark.parametrize("refused", [[Extent(8, 0, 1), Extent(1, 0, 1)], TWICE], ids=["no owner", "twice"])
def test_a_release_that_is_refused_gives_nothing_back(refused: list[Extent]) -> None:
    ram = RamAllocator(40960, first_serial=100)
    ram.claim([Extent(8, 0, 1), Extent(9, 0, 1)])
    with pytest.raises(ValueError, match="has no owner"):
        ram.release(refused)
    assert ram.free_bytes == 40960 - 2 * 4096
    ram.release([Extent(8, 0, 1), Extent(9, 0, 1)])
    assert ram.free_bytes == 40960
