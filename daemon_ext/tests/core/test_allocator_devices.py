"""Many devices: striping, rotation, balance, exclusion; and what allocation costs."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from allocators import GIB, allocated, filled, pool
from hypothesis import given
from hypothesis import strategies as st

from hypercache_daemon.core.extents import Extent
from hypercache_protocol.fields import CHUNK_SIZE, KIB, MIB


def bytes_by_device(objects: Iterable[Iterable[Extent]]) -> Mapping[int, int]:
    taken: Counter[int] = Counter()
    for extents in objects:
        for extent in extents:
            taken[extent.device] += extent.allocated_bytes
    return taken


# -- many devices ------------------------------------------------------------------------------------


def test_an_object_is_striped_over_all_devices() -> None:
    devices = [extent.device for extent in allocated(pool(GIB, GIB, GIB, GIB), 32 * MIB)]
    assert sorted(devices) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(devices[:4]) == [0, 1, 2, 3]


@pytest.mark.parametrize("size_bytes", [1, 256 * KIB, 4 * MIB, 8 * MIB, 14 * MIB, 16 * MIB, 30 * MIB])
@pytest.mark.parametrize("device_count", [2, 3, 4])
def test_successive_objects_start_on_different_devices(device_count: int, size_bytes: int) -> None:
    allocator = pool(*[64 * GIB] * device_count)
    starts = [allocated(allocator, size_bytes)[0].device for _ in range(device_count * 10)]
    assert all(before != after for before, after in itertools.pairwise(starts))
    assert Counter(starts) == dict.fromkeys(range(device_count), 10)


@given(seed=st.integers(0, 1 << 32))
def test_equal_devices_fill_up_together_whatever_the_sizes(seed: int) -> None:
    dice = random.Random(seed)
    allocator = pool(GIB, GIB, GIB)
    objects = [allocated(allocator, int(2 ** dice.uniform(0, 25))) for _ in range(200)]
    taken = bytes_by_device(objects).values()
    assert max(taken) - min(taken) <= 16 * CHUNK_SIZE


def test_sizes_that_alternate_do_not_pile_up_on_one_of_two_devices() -> None:
    allocator = pool(4 * GIB, 4 * GIB)
    objects = [allocated(allocator, size) for _ in range(1500) for size in (4 * MIB, 4 * KIB)]
    taken = bytes_by_device(objects)
    assert abs(taken[0] - taken[1]) < 256 * MIB


@pytest.mark.parametrize("size_bytes", [256 * KIB, 4 * MIB, 14 * MIB])
def test_devices_of_different_sizes_fill_up_together(size_bytes: int) -> None:
    sizes = (2 * GIB, GIB, 512 * MIB)
    allocator = pool(*sizes)
    objects = []
    while allocator.free_bytes > allocator.total_bytes // 2:
        objects.append(allocated(allocator, size_bytes))
    taken = bytes_by_device(objects)
    assert [taken[i] / size for i, size in enumerate(sizes)] == pytest.approx([0.5] * 3, abs=0.06)


def test_a_device_that_was_drained_takes_more_but_not_all_until_it_is_as_full_as_the_others() -> None:
    allocator = pool(GIB, GIB, GIB)
    objects = [allocated(allocator, CHUNK_SIZE) for _ in range(384)]  # half of each
    allocator.release([extent for (extent,) in objects if extent.device == 1])
    more = bytes_by_device([allocated(allocator, CHUNK_SIZE) for _ in range(128)])
    assert more[1] > 1.5 * more[0]
    assert min(more[0], more[2]) > 64 * MIB


def test_a_fuller_device_sits_out_turns_only_in_proportion() -> None:
    allocator = pool(64 * GIB, 32 * GIB)
    devices = [allocated(allocator, CHUNK_SIZE)[0].device for _ in range(300)]
    assert Counter(devices)[0] == pytest.approx(200, abs=6)
    assert "111" not in "".join(map(str, devices)), "its turns are spread"


def test_what_was_taken_ahead_for_turns_that_a_device_then_sits_out_is_free_again() -> None:
    allocator = pool(64 * GIB, 32 * GIB)
    free_bytes = allocator.free_bytes
    placed = allocator.allocate_all([256 * KIB] * 300)
    assert placed is not None
    taken = bytes_by_device(placed)
    assert taken[0] > 1.5 * taken[1], "device 1 was to give half of them"
    assert allocator.free_bytes == free_bytes - 300 * 256 * KIB
    assert [allocator.allocated_bytes(device) for device in (0, 1)] == [taken[0], taken[1]]


def test_a_device_that_has_become_the_freest_owes_no_turns() -> None:
    allocator = pool(GIB, 64 * MIB)
    assert [allocated(allocator, CHUNK_SIZE)[0].device for _ in range(8)] == [0, 1, 0, 1, 0, 0, 0, 0]
    allocator.exclude(0)
    assert allocated(allocator, CHUNK_SIZE)[0].device == 1
    allocator.include(0)
    assert [allocated(allocator, CHUNK_SIZE)[0].device for _ in range(4)] == [0, 1, 0, 1]


# -- exclusion ---------------------------------------------------------------------------------------


def test_an_excluded_device_gets_nothing_and_its_free_space_counts_nowhere() -> None:
    allocator = pool(64 * MIB, 64 * MIB, 64 * MIB)
    before = allocated(allocator, 48 * MIB)
    allocator.exclude(1)
    allocator.exclude(1)
    assert allocator.free_bytes == 96 * MIB
    assert allocator.total_bytes == 144 * MIB
    objects = filled(allocator, 2 * MIB)
    assert bytes_by_device(objects) == {0: 48 * MIB, 2: 48 * MIB}
    assert allocator.free_bytes == 0
    assert not {(e.device, e.offset) for e in before} & {(e.device, e.offset) for o in objects for e in o}


def test_chunks_of_an_excluded_device_are_released_out_of_the_total_and_come_back_with_it() -> None:
    allocator = pool(64 * MIB, 64 * MIB)
    extents = allocated(allocator, 32 * MIB)
    allocator.exclude(0)
    assert (allocator.free_bytes, allocator.total_bytes) == (48 * MIB, 80 * MIB)
    allocator.release(extents)
    assert (allocator.free_bytes, allocator.total_bytes) == (64 * MIB, 64 * MIB)
    allocator.include(0)
    allocator.include(0)
    assert (allocator.free_bytes, allocator.total_bytes) == (128 * MIB, 128 * MIB)
    assert bytes_by_device([allocated(allocator, 32 * MIB)]) == {0: 16 * MIB, 1: 16 * MIB}


def test_a_catalog_is_claimed_on_an_excluded_device_too() -> None:
    allocator = pool(64 * MIB, 64 * MIB)
    allocator.exclude(0)
    allocator.claim([Extent(0, MIB, CHUNK_SIZE)])
    assert (allocator.free_bytes, allocator.total_bytes) == (64 * MIB, 68 * MIB)
    allocator.include(0)
    assert (allocator.free_bytes, allocator.total_bytes) == (124 * MIB, 128 * MIB)


def test_with_every_device_excluded_nothing_fits() -> None:
    allocator = pool(64 * MIB, 64 * MIB)
    for device in (0, 1):
        allocator.exclude(device)
    assert allocator.allocate(1) is None
    assert allocator.allocate(0) == ()
    assert allocator.fragmentation() == 0.0


def test_the_turns_go_on_when_the_device_whose_turn_it_is_goes() -> None:
    allocator = pool(GIB, GIB, GIB)
    for _ in range(2):
        allocated(allocator, 4096)
    allocator.exclude(2)
    starts = [allocated(allocator, 4096)[0].device for _ in range(4)]
    assert starts in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_excluding_or_including_an_unknown_device_is_refused() -> None:
    allocator = pool(GIB)
    for change in (allocator.exclude, allocator.include):
        with pytest.raises(ValueError, match="no device 5"):
            change(5)


# -- fragmentation, waste, memory --------------------------------------------------------------------


def test_fragmentation_is_the_share_of_possible_whole_chunks_that_cannot_be_had() -> None:
    allocator = pool(16 * MIB)
    objects = filled(allocator, MIB)
    assert allocator.fragmentation() == 0.0
    for extents in objects[::2]:
        allocator.release(extents)
    assert allocator.fragmentation() == 1.0  # 8 MiB free, no whole slot
    for extents in objects[1:8:2]:
        allocator.release(extents)
    assert allocator.fragmentation() == pytest.approx(1 / 3)  # 12 MiB free, two whole slots
    for extents in objects[9::2]:
        allocator.release(extents)
    assert allocator.fragmentation() == 0.0


@pytest.mark.parametrize(
    ("size_bytes", "most_waste"),
    [(14 * MIB, 0.05), (14 * MIB - 1001, 0.05), (256 * KIB, 0.1), (250_001, 0.1)],
)
def test_a_pool_filled_to_the_last_object_wastes_little(size_bytes: int, most_waste: float) -> None:
    allocator = pool(GIB, GIB, 700 * MIB)
    objects = filled(allocator, size_bytes)
    assert 1 - len(objects) * size_bytes / allocator.total_bytes < most_waste


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fragmentation_stays_bounded_while_objects_come_and_go(seed: int) -> None:
    """A short run; the long one, with more kinds of load, is benchmarks/allocator.py."""
    dice = random.Random(seed)
    allocator = pool(8 * GIB, 8 * GIB)
    objects: list[tuple[Extent, ...]] = []
    cut = 0
    for _ in range(5000):
        if allocator.free_bytes < allocator.total_bytes // 20:
            allocator.release(objects.pop(dice.randrange(len(objects))))
        else:
            size_bytes = dice.choice((14 * MIB, 256 * KIB))
            objects.append(allocated(allocator, size_bytes))
            cut += len(objects[-1]) - -(-size_bytes // CHUNK_SIZE)
    assert allocator.fragmentation() < 0.2
    assert cut == 0


def test_allocated_objects_cost_the_allocator_no_memory() -> None:
    allocator = pool(*[16 * GIB] * 4)
    tracemalloc.start()
    try:
        for _ in range(3000):
            allocated(allocator, 256 * KIB)
        grown_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown_bytes < 16 * KIB
