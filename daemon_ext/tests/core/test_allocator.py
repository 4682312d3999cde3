"""Chunks of a pool: cut, taken, released and claimed so that no block ever has two owners."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import chain

import pytest
from allocators import GIB, SUPERBLOCK_BYTES, allocated, filled, pool
from chunk_tables import table_of

from hypercache_daemon.core.allocator import Allocator
from hypercache_daemon.core.extents import ALIGNMENT, Extent
from hypercache_protocol.fields import CHUNK_SIZE, KIB, MIB


def assert_disjoint(objects: Iterable[Iterable[Extent]]) -> None:
    """Nobody's blocks are another's, and all are aligned and behind the reserved start."""
    ends: dict[int, int] = {}
    flat = [extent for extents in objects for extent in extents]
    for extent in sorted(flat, key=lambda extent: (extent.device, extent.offset)):
        assert extent.offset % ALIGNMENT == 0
        assert extent.offset >= ends.get(extent.device, SUPERBLOCK_BYTES)
        ends[extent.device] = extent.offset + extent.allocated_bytes


# -- one object --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size_bytes", "lengths"),
    [
        (0, []),
        (1, [1]),
        (4096, [4096]),
        (CHUNK_SIZE, [CHUNK_SIZE]),
        (CHUNK_SIZE + 1, [CHUNK_SIZE, 1]),
        (14 * MIB, [CHUNK_SIZE, CHUNK_SIZE, CHUNK_SIZE, 2 * MIB]),
        (14 * MIB - 5, [CHUNK_SIZE, CHUNK_SIZE, CHUNK_SIZE, 2 * MIB - 5]),
    ],
)
def test_an_object_is_whole_chunks_and_a_rest_in_object_order(size_bytes: int, lengths: list[int]) -> None:
    assert [extent.length for extent in allocated(pool(GIB, GIB), size_bytes)] == lengths


@pytest.mark.parametrize(
    ("length", "taken"), [(1, 4096), (4096, 4096), (4097, 8192), (CHUNK_SIZE, CHUNK_SIZE)]
)
def test_a_chunk_takes_whole_blocks(length: int, taken: int) -> None:
    allocator = pool(GIB)
    (extent,) = allocated(allocator, length)
    assert extent.allocated_bytes == taken
    assert allocator.free_bytes == GIB - taken


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        pool(GIB).allocate(-1)


@pytest.mark.parametrize("reserved", [0, 4096, MIB, 6 * MIB])
def test_the_reserved_start_and_the_odd_end_of_a_device_are_never_handed_out(reserved: int) -> None:
    allocator = Allocator({3: 10 * MIB + 4095}, reserved)
    assert allocator.total_bytes == allocator.free_bytes == 10 * MIB - reserved
    extents = allocated(allocator, allocator.free_bytes)
    assert {extent.device for extent in extents} == {3}
    assert min(extent.offset for extent in extents) == reserved
    assert max(extent.offset + extent.length for extent in extents) == 10 * MIB


@pytest.mark.parametrize("reserved", [-4096, 1, 4095, 4097])
def test_an_unaligned_reserved_start_is_refused(reserved: int) -> None:
    with pytest.raises(ValueError, match="first_offset_bytes"):
        Allocator({0: GIB}, reserved)


def test_a_device_without_room_behind_its_superblock_gives_nothing() -> None:
    allocator = Allocator({0: 512 * KIB, 1: MIB, 2: 3 * MIB}, MIB)
    assert allocator.total_bytes == 2 * MIB
    assert [extent.device for extent in allocated(allocator, 2 * MIB)] == [2]


def test_a_pool_without_devices_holds_empty_objects_only() -> None:
    allocator = Allocator({}, MIB)
    assert allocator.allocate(0) == ()
    assert allocator.allocate(1) is None
    assert (allocator.total_bytes, allocator.free_bytes, allocator.fragmentation()) == (0, 0, 0.0)


# -- a full pool -------------------------------------------------------------------------------------


def test_what_does_not_fit_is_none_and_takes_nothing() -> None:
    allocator = pool(8 * MIB, 8 * MIB)
    assert allocator.allocate(16 * MIB + 1) is None
    assert allocator.free_bytes == 16 * MIB
    assert len(allocated(allocator, 16 * MIB)) == 4
    assert allocator.allocate(1) is None


def test_scattered_free_space_is_used_to_the_last_block() -> None:
    allocator = pool(12 * MIB, 12 * MIB)
    objects = filled(allocator, 12 * KIB)
    for extents in objects[::2]:
        allocator.release(extents)
    size_bytes = allocator.free_bytes - 1
    scattered = allocated(allocator, size_bytes)
    assert allocator.free_bytes == 0
    assert sum(extent.length for extent in scattered) == size_bytes
    assert all(extent.length % ALIGNMENT == 0 for extent in scattered[:-1])
    assert_disjoint([scattered, *objects[1::2]])


def test_scattered_free_space_gives_its_largest_pieces_first() -> None:
    allocator = pool(4 * MIB, 4 * MIB)
    holes = [allocated(allocator, size) for size in (MIB, 3 * MIB, 2 * MIB, 2 * MIB)]
    assert allocator.free_bytes == 0
    allocator.release([*holes[0], *holes[1], *holes[2]])
    whole = {extents[0].device for extents in holes[:2]}
    assert len(whole) == 2, "the first two objects start on different devices"
    lengths = [extent.length for extent in allocated(allocator, 6 * MIB)]
    assert lengths == [3 * MIB, 3 * MIB]


def test_whole_chunks_are_taken_elsewhere_rather_than_cut_on_the_device_whose_turn_it_is() -> None:
    allocator = pool(64 * MIB, 8 * MIB)
    small = [Extent(1, SUPERBLOCK_BYTES + slot * CHUNK_SIZE, 4096) for slot in range(2)]
    allocator.claim(small)
    extents = allocated(allocator, 40 * MIB)
    assert [(extent.device, extent.length) for extent in extents] == [(0, CHUNK_SIZE)] * 10


def test_small_pieces_fill_broken_slots_before_they_break_whole_ones() -> None:
    allocator = pool(64 * MIB)
    objects = filled(allocator, 256 * KIB)
    for slot in range(16):
        allocator.release(objects[16 * slot])  # a hole in every slot
    allocator.release([extent for extents in objects[1:16] for extent in extents])  # one slot whole
    for _ in range(15):
        allocated(allocator, 256 * KIB)
    assert allocator.fragmentation() == 0.0
    assert len(allocated(allocator, CHUNK_SIZE)) == 1


def test_a_small_piece_goes_where_it_fits_tightest() -> None:
    allocator = pool(4 * MIB)
    pieces = [allocated(allocator, blocks * ALIGNMENT) for blocks in (8, 1, 3, 1, 5, 1)]
    allocated(allocator, allocator.free_bytes)
    for extents in pieces[::2]:
        allocator.release(extents)
    assert allocated(allocator, 3 * ALIGNMENT) == pieces[2]
    assert allocated(allocator, 4 * ALIGNMENT)[0].offset == pieces[4][0].offset
    assert allocated(allocator, 8 * ALIGNMENT) == pieces[0]


# -- release -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 1, 64 * KIB, 256 * KIB, 600 * KIB, 2 * MIB, 14 * MIB])
@pytest.mark.parametrize("seed", range(4))
def test_objects_that_are_allocated_together_lie_where_they_would_one_after_the_other(
    size_bytes: int, seed: int
) -> None:
    twins = [filled_at_random(seed) for _ in range(2)]
    for _ in range(3):
        together = twins[0].allocate_all([size_bytes] * 37)
        singly = [twins[1].allocate(size_bytes) for _ in range(37)]
        assert together == singly
        for twin in twins:
            for extents in singly[::3]:
                twin.release(extents or ())


def filled_at_random(seed: int) -> Allocator:
    """Half full, with holes of all sizes."""
    chance = random.Random(seed)
    allocator = pool(GIB, GIB, GIB, GIB)
    objects = [allocated(allocator, chance.randrange(1, 5 * MIB)) for _ in range(800)]
    for extents in chance.sample(objects, 400):
        allocator.release(extents)
    return allocator


def test_what_is_released_can_be_had_again() -> None:
    allocator = pool(16 * MIB, 16 * MIB)
    objects = filled(allocator, 3 * MIB - 7)
    for extents in objects:
        allocator.release(iter(extents))
    assert allocator.free_bytes == allocator.total_bytes == 32 * MIB
    assert allocator.fragmentation() == 0.0
    assert len(allocated(allocator, 32 * MIB)) == 8


@pytest.mark.parametrize("size_bytes", [1, 12 * KIB, 4 * MIB, 14 * MIB])
def test_a_double_free_is_refused(size_bytes: int) -> None:
    allocator = pool(GIB, GIB)
    extents = allocated(allocator, size_bytes)
    allocator.release(extents)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.release(extents)
    assert allocator.free_bytes == allocator.total_bytes


@pytest.mark.parametrize(
    ("first_block", "block_count"), [(3, 1), (5, 1), (3, 2), (4, 2), (3, 3), (0, 1024), (4, 1020), (9, 1)]
)
def test_a_release_that_touches_a_free_block_is_refused(first_block: int, block_count: int) -> None:
    allocator = pool(4 * MIB)
    free = (3, 5, 9)
    allocated(allocator, 4 * MIB)
    for block in free:
        allocator.release([Extent(0, SUPERBLOCK_BYTES + block * ALIGNMENT, ALIGNMENT)])
    extent = Extent(0, SUPERBLOCK_BYTES + first_block * ALIGNMENT, block_count * ALIGNMENT)
    assert any(first_block <= block < first_block + block_count for block in free)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.release([extent])
    assert allocator.free_bytes == 3 * ALIGNMENT


@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_a_double_free_among_others_frees_none_of_them(place: int) -> None:
    allocator = pool(GIB, GIB)
    extents = allocated(allocator, 14 * MIB)
    freed = allocated(allocator, 5000)
    allocator.release(freed)
    free_bytes = allocator.free_bytes
    with pytest.raises(ValueError, match="not allocated"):
        allocator.release([*extents[:place], *freed, *extents[place:]])
    assert allocator.free_bytes == free_bytes
    allocator.release(extents)


def test_the_same_chunk_twice_in_one_release_is_refused() -> None:
    allocator = pool(GIB)
    extents = allocated(allocator, 14 * MIB)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.release([*extents, extents[0]])
    assert allocator.free_bytes == GIB - 14 * MIB
    allocator.release(extents)


def test_a_part_of_an_object_can_be_released() -> None:
    allocator = pool(GIB)
    (extent,) = allocated(allocator, CHUNK_SIZE)
    allocator.release([Extent(extent.device, extent.offset + MIB, MIB)])
    assert allocator.free_bytes == GIB - 3 * MIB
    assert allocated(allocator, MIB) == (Extent(extent.device, extent.offset + MIB, MIB),)


# -- claim -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded_at_once", [0, 30, 60])
def test_a_catalog_claimed_in_any_order_leaves_the_same_free_space(loaded_at_once: int) -> None:
    sizes = (64 * MIB, 96 * MIB + 12 * KIB, 5 * MIB)
    before, after = pool(*sizes), pool(*sizes)
    dice = random.Random(4)
    objects = filled(before, 700 * KIB + 1)
    dice.shuffle(objects)
    for extents in objects[60:]:
        before.release(extents)
    kept = objects[:60]
    after.load(table_of(chain.from_iterable(kept[:loaded_at_once])))
    for extents in kept[loaded_at_once:]:
        after.claim(iter(extents))
    assert after.free_bytes == before.free_bytes
    assert after.fragmentation() == before.fragmentation()
    rest = allocated(after, after.free_bytes)
    assert_disjoint([*kept, rest])


@pytest.mark.parametrize("size_bytes", [1, 4096, 100 * KIB + 1, 256 * KIB, 3 * MIB])
def test_what_lies_in_rows_is_released_together_and_nothing_beside_it(size_bytes: int) -> None:
    allocator = pool(16 * MIB, 16 * MIB)
    objects = filled(allocator, size_bytes)[:1000]
    rest = allocator.free_bytes
    leaving, staying = [objects[number] for number in range(len(objects)) if number % 7], objects[::7]
    taken = sum(extent.allocated_bytes for extent in chain.from_iterable(leaving))
    allocator.release(chain.from_iterable(reversed(leaving)))
    assert allocator.free_bytes == rest + taken
    for extents in staying:
        with pytest.raises(ValueError, match="allocated already"):
            allocator.claim(extents)


def test_chunks_that_lie_across_slots_are_claimed_and_released() -> None:
    allocator = pool(16 * MIB)
    across = Extent(0, SUPERBLOCK_BYTES + 2 * MIB, CHUNK_SIZE)
    allocator.claim([across])
    assert allocator.free_bytes == 12 * MIB
    assert_disjoint([[across], allocated(allocator, 12 * MIB)])
    allocator.release([across])
    assert allocator.free_bytes == CHUNK_SIZE


@pytest.mark.parametrize(
    ("device", "offset", "length", "message"),
    [
        (7, MIB, 4096, "no device 7"),
        (0, MIB + 1, 4096, "multiple of 4096"),
        (0, MIB + 512, 4096, "multiple of 4096"),
        (0, MIB, 0, "1 to 4194304 bytes"),
        (0, MIB, -4096, "1 to 4194304 bytes"),
        (0, MIB, CHUNK_SIZE + 1, "1 to 4194304 bytes"),
        (0, 0, 4096, "outside"),
        (0, MIB - 4096, 8192, "outside"),
        (0, -4096, 4096, "outside"),
        (0, 7 * MIB, 4096, "outside"),
        (0, 7 * MIB - 4096, 4097, "outside"),
        (0, 3 * MIB + 4096, CHUNK_SIZE, "outside"),
        (0, 1 << 62, 4096, "outside"),
    ],
)
def test_what_cannot_be_a_chunk_of_the_pool_is_refused(
    device: int, offset: int, length: int, message: str
) -> None:
    allocator = pool(6 * MIB)
    for change in (allocator.claim, allocator.release):
        with pytest.raises(ValueError, match=message):
            change([Extent(0, MIB, 4096), Extent(device, offset, length)])
        assert allocator.free_bytes == allocator.total_bytes


@pytest.mark.parametrize(
    ("first_block", "block_count"),
    [(10, 1), (19, 1), (9, 2), (19, 2), (0, 1024), (12, 3), (5, 100), (10, 10), (9, 12), (1020, 8)],
)
def test_a_claim_of_an_owned_block_is_refused_and_claims_nothing(first_block: int, block_count: int) -> None:
    allocator = pool(16 * MIB)
    owned = [Extent(0, MIB + block * ALIGNMENT, ALIGNMENT) for block in (*range(10, 20), 1025)]
    allocator.claim(owned)
    free_bytes = allocator.free_bytes
    other = Extent(0, 9 * MIB, CHUNK_SIZE)
    wrong = Extent(0, MIB + first_block * ALIGNMENT, block_count * ALIGNMENT)
    with pytest.raises(ValueError, match="allocated already"):
        allocator.claim([other, wrong])
    assert allocator.free_bytes == free_bytes
    allocator.claim([other])
    with pytest.raises(ValueError, match="allocated already"):
        allocator.claim([other])


@pytest.mark.parametrize(
    ("device", "offset", "length", "message"),
    [
        (7, MIB, 4096, "no device 7"),
        (2**64 - 1, MIB, 4096, "no device 18446744073709551615"),
        (0, MIB + 512, 4096, "multiple of 4096"),
        (0, MIB, 0, "1 to 4194304 bytes"),
        (0, MIB, CHUNK_SIZE + 1, "1 to 4194304 bytes"),
        (0, MIB - 4096, 8192, "outside"),
        (0, 7 * MIB - 4096, 4097, "outside"),
        (0, 2**64 - 4096, 4096, "outside"),
        (0, 2 * MIB, 4096, "device 0, 4096 bytes at 2097152: a block is allocated already"),
        (0, 2 * MIB - 4096, 8192, "4096 bytes at 2097152: a block is allocated already"),
    ],
)
def test_a_catalog_with_an_impossible_chunk_is_refused_and_none_of_it_is_loaded(
    device: int, offset: int, length: int, message: str
) -> None:
    allocator = pool(6 * MIB, 6 * MIB)
    good = [Extent(1, MIB, 4096), Extent(0, 2 * MIB, 4096)]
    with pytest.raises(ValueError, match=message):
        allocator.load(table_of([*good, Extent(device, offset, length)]))
    assert allocator.free_bytes == allocator.total_bytes
    allocator.load(table_of(good))
    with pytest.raises(ValueError, match="allocated already"):
        allocator.claim(good)


@pytest.mark.parametrize("shift", [0, 1, 511, 1023])
def test_runs_that_lie_across_slots_are_loaded_as_they_are_claimed(shift: int) -> None:
    chunks = [Extent(0, MIB + (slot * 1024 + shift) * ALIGNMENT, CHUNK_SIZE - 4096) for slot in range(3)]
    loaded, claimed = pool(16 * MIB + 4096), pool(16 * MIB + 4096)
    loaded.load(table_of(chunks))
    claimed.claim(chunks)
    assert loaded.free_bytes == claimed.free_bytes
    assert loaded.fragmentation() == claimed.fragmentation()
    for size_bytes in (3 * MIB, 4096, 2 * MIB, 4096, 4 * MIB):
        lengths = [extent.length for extent in loaded.allocate(size_bytes) or ()]
        assert lengths == [extent.length for extent in claimed.allocate(size_bytes) or ()]
    loaded.release(chunks)
    assert_disjoint([allocated(loaded, loaded.free_bytes)])
