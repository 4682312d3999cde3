"""The allocator against a naive model: each device's set of taken 4 KiB blocks, searched block by block."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, groupby

import pytest
from chunk_tables import table_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hypercache_daemon.core.allocator import Allocator
from hypercache_daemon.core.extents import ALIGNMENT, Extent
from hypercache_protocol.fields import CHUNK_SIZE, MIB

SLOT_BLOCKS = CHUNK_SIZE // ALIGNMENT
FIRST_BLOCK = MIB // ALIGNMENT
CAPACITIES = {
    0: MIB + 2 * CHUNK_SIZE + 300 * ALIGNMENT + 77,
    1: MIB + CHUNK_SIZE,
    4: MIB + 37 * ALIGNMENT,
}
BLOCKS = {device: range(FIRST_BLOCK, size_bytes // ALIGNMENT) for device, size_bytes in CAPACITIES.items()}
DEVICES = st.sampled_from(sorted(CAPACITIES))
SIZES = st.one_of(
    st.integers(0, 64 * ALIGNMENT),
    st.integers(1, 2 * SLOT_BLOCKS).map(lambda blocks: blocks * ALIGNMENT),
    st.integers(1, 14 * MIB),
    st.sampled_from([CHUNK_SIZE, 2 * CHUNK_SIZE]),
)
SMALL_SIZES = st.sampled_from([1, 64 * ALIGNMENT, 3 * MIB // 2, 2 * MIB])


def blocks_of(extent: Extent) -> range:
    first = extent.offset // ALIGNMENT
    return range(first, first - (-extent.length // ALIGNMENT))


class AllocatorAgainstBlocks(RuleBasedStateMachine):
    """Every step is done to both; what the allocator refuses must be what the model forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(CAPACITIES, MIB)
        self.taken: dict[int, set[int]] = {device: set() for device in CAPACITIES}
        self.in_allocation = set(CAPACITIES)
        self.objects: list[tuple[Extent, ...]] = []

    # -- the model -------------------------------------------------------------------------------------

    def is_free(self, extent: Extent) -> bool:
        blocks, usable = blocks_of(extent), BLOCKS[extent.device]
        inside = blocks.start in usable and blocks[-1] in usable
        return inside and self.taken[extent.device].isdisjoint(blocks)

    def free_blocks(self, device: int) -> int:
        return len(BLOCKS[device]) - len(self.taken[device])

    def holes(self, device: int) -> list[int]:
        """The lengths of the runs of free blocks inside each slot."""
        taken = self.taken[device]
        runs = groupby(((number - FIRST_BLOCK) // SLOT_BLOCKS, number in taken) for number in BLOCKS[device])
        return [len(list(run)) for (_, is_taken), run in runs if not is_taken]

    def largest_hole(self) -> int:
        return max((hole for device in self.in_allocation for hole in self.holes(device)), default=0)

    def take(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            self.taken[extent.device].update(blocks_of(extent))

    def give_back(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            self.taken[extent.device].difference_update(blocks_of(extent))

    # -- the steps -------------------------------------------------------------------------------------

    @initialize(sizes=st.lists(SIZES, max_size=8))
    def begin_with_objects(self, sizes: list[int]) -> None:
        for size_bytes in sizes:
            self.allocate(size_bytes)

    @rule(size_bytes=SIZES)
    def allocate(self, size_bytes: int) -> None:
        fits = -(-size_bytes // ALIGNMENT) <= sum(map(self.free_blocks, self.in_allocation))
        extents = self.allocator.allocate(size_bytes)
        assert (extents is not None) == fits
        if extents is not None:
            self.check_object(extents, size_bytes)

    @rule(sizes=st.lists(st.tuples(SIZES | SMALL_SIZES, st.integers(1, 20)), max_size=4))
    def allocate_all(self, sizes: list[tuple[int, int]]) -> None:
        """Runs of objects of one size."""
        sizes_bytes = [size_bytes for size_bytes, count in sizes for _ in range(count)]
        wanted = sum(-(-size_bytes // ALIGNMENT) for size_bytes in sizes_bytes)
        placed = self.allocator.allocate_all(sizes_bytes)
        assert (placed is not None) == (wanted <= sum(map(self.free_blocks, self.in_allocation)))
        for extents, size_bytes in zip(placed or (), sizes_bytes, strict=placed is not None):
            self.check_object(extents, size_bytes)

    def check_object(self, extents: tuple[Extent, ...], size_bytes: int) -> None:
        left = size_bytes
        for extent in extents:
            self.check_chunk(extent, min(CHUNK_SIZE, left))
            self.take([extent])
            left -= extent.length
        assert left == 0
        self.objects.append(extents)

    def check_chunk(self, extent: Extent, wanted_bytes: int) -> None:
        """Free until now, not on an excluded device, and cut only to the largest hole there was."""
        assert extent.device in self.in_allocation
        assert extent.offset % ALIGNMENT == 0
        assert self.is_free(extent)
        if extent.length != wanted_bytes:
            assert extent.length == self.largest_hole() * ALIGNMENT < wanted_bytes

    @rule(bytes_less=st.integers(0, 2 * ALIGNMENT))
    def fill_up(self, bytes_less: int) -> None:
        self.allocate(max(0, self.allocator.free_bytes - bytes_less))

    @precondition(lambda self: self.objects)
    @rule(data=st.data())
    def release_an_object(self, data: st.DataObject) -> None:
        extents = self.objects.pop(data.draw(st.integers(0, len(self.objects) - 1)))
        self.allocator.release(data.draw(st.permutations(extents)))
        self.give_back(extents)
        if extents:
            with pytest.raises(ValueError, match="not allocated"):
                self.allocator.release(extents)

    @rule(device=DEVICES, block=st.integers(-3, 2400), length=st.integers(1, CHUNK_SIZE))
    def claim_any_place(self, device: int, block: int, length: int) -> None:
        """Whoever owns it; where it is refused, nothing that came along is claimed either."""
        extent = Extent(device, (FIRST_BLOCK + block) * ALIGNMENT, length)
        if self.is_free(extent):
            self.allocator.claim([extent])
            self.take([extent])
            self.objects.append((extent,))
            return
        others = self.allocator.allocate(5 * ALIGNMENT) or ()
        self.allocator.release(others)
        with pytest.raises(ValueError, match=r"allocated already|outside"):
            self.allocator.claim([*others, extent])

    @rule(device=DEVICES, block=st.integers(-3, 2400), length=st.integers(1, CHUNK_SIZE))
    def release_any_place(self, device: int, block: int, length: int) -> None:
        """Whoever owns it, then claim it again; where it is refused, nothing that came along is freed."""
        extent = Extent(device, (FIRST_BLOCK + block) * ALIGNMENT, length)
        if self.taken[device].issuperset(blocks_of(extent)):
            self.allocator.release([extent])
            self.allocator.claim([extent])
            return
        others = next(iter(self.objects), ())
        with pytest.raises(ValueError, match=r"not allocated|outside"):
            self.allocator.release([*others, extent])

    @rule(claimed_singly=st.integers(0, 3))
    def reload(self, claimed_singly: int) -> None:
        """A new start: most of the catalog is loaded at once, and the rest claimed, newest object first."""
        newest_first = self.objects[::-1]
        self.allocator = Allocator(CAPACITIES, MIB)
        self.allocator.load(table_of(chain.from_iterable(newest_first[claimed_singly:])))
        for extents in newest_first[:claimed_singly]:
            self.allocator.claim(extents)
        self.in_allocation = set(CAPACITIES)

    @precondition(lambda self: any(self.objects))
    @rule(device=DEVICES, block=st.integers(-3, 2400), length=st.integers(1, CHUNK_SIZE))
    def load_one_place_too_many(self, device: int, block: int, length: int) -> None:
        """What is owned already or lies outside is refused, and nothing is loaded then."""
        extent = Extent(device, (FIRST_BLOCK + block) * ALIGNMENT, length)
        allocator = Allocator(CAPACITIES, MIB)
        if extent.offset >= 0 and not self.is_free(extent):
            with pytest.raises(ValueError, match=r"allocated already|outside"):
                allocator.load(table_of([*chain.from_iterable(self.objects), extent]))
            assert allocator.free_bytes == sum(map(len, BLOCKS.values())) * ALIGNMENT

    @rule(device=DEVICES)
    def exclude(self, device: int) -> None:
        self.allocator.exclude(device)
        self.in_allocation.discard(device)

    @rule(device=DEVICES)
    def include(self, device: int) -> None:
        self.allocator.include(device)
        self.in_allocation.add(device)

    # -- what always holds -----------------------------------------------------------------------------

    @invariant()
    def free_and_allocated_make_the_total(self) -> None:
        free = sum(map(self.free_blocks, self.in_allocation))
        assert self.allocator.free_bytes == free * ALIGNMENT
        assert self.allocator.total_bytes == (free + sum(map(len, self.taken.values()))) * ALIGNMENT

    @invariant()
    def fragmentation_is_what_a_count_of_whole_slots_says(self) -> None:
        could_hold = sum(self.free_blocks(device) // SLOT_BLOCKS for device in self.in_allocation)
        whole = sum(self.holes(device).count(SLOT_BLOCKS) for device in self.in_allocation)
        assert self.allocator.fragmentation() == (1 - whole / could_hold if could_hold else 0.0)


TestAllocatorAgainstBlocks = AllocatorAgainstBlocks.TestCase
TestAllocatorAgainstBlocks.settings = settings(max_examples=60, stateful_step_count=30)
