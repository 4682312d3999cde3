"""Where objects lie: hands out chunks of a pool's devices and takes them back.

Rules:
1. An object is cut into chunks of 4 MiB and a rest. A chunk is cut smaller, at a multiple of 4,096 bytes,
   only where no device in allocation has a hole for it; so `allocate` fails only where free space is short.
2. Devices take turns: the next chunk goes to the next device, and the next object starts one device further.
3. A device with less free space than the freest gives up turns in that proportion: half as free, half the
   turns. So all devices fill up together, whatever their sizes and whatever was released where.
4. Everything that changes more than one block is all or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from hypercache_protocol.fields import CHUNK_SIZE

from .extents import ALIGNMENT, Extent, ExtentTable, rounded_up
from .free_space import SLOT_BLOCKS, FreeSpace


class Allocator:
    """The free and the allocated space of a pool of devices.

    Args:
        capacities: each device's size in bytes; what is over a multiple of 4,096 is not used.
        first_offset_bytes: how much of the start of each device is reserved, a multiple of 4,096.

    Raises:
        ValueError: `first_offset_bytes` is negative or not aligned.
    """

    def __init__(self, capacities: Mapping[int, int], first_offset_bytes: int) -> None:
        if first_offset_bytes < 0 or first_offset_bytes % ALIGNMENT:
            raise ValueError(f"first_offset_bytes: not a multiple of {ALIGNMENT}: {first_offset_bytes}")
        self._first_block = first_offset_bytes // ALIGNMENT
        self._devices = {
            device: _Device(device, FreeSpace(max(0, size_bytes // ALIGNMENT - self._first_block)))
            for device, size_bytes in sorted(capacities.items())
        }
        self._close_ring()
        self._last_start: _Device | None = None

    @property
    def total_bytes(self) -> int:
        """Free and allocated space together; shrinks by what is free on a device that is excluded."""
        allocated = sum(device.allocated_blocks for device in self._devices.values())
        return allocated * ALIGNMENT + self.free_bytes

    @property
    def free_bytes(self) -> int:
        """What can be allocated now: an object fits exactly if its size, rounded up to 4,096, is not more."""
        return sum([device.space.free_blocks for device in self._ring]) * ALIGNMENT

    def allocate(self, size_bytes: int) -> tuple[Extent, ...] | None:
        """Chunks for an object of `size_bytes`, in its order; None, and nothing is taken, if it doesn't fit.

        Raises:
            ValueError: `size_bytes` is negative.
        """
        placed = self.allocate_all((size_bytes,))
        return None if placed is None else placed[0]

    def allocate_all(self, sizes_bytes: Sequence[int]) -> list[tuple[Extent, ...]] | None:
        """Chunks for objects of these sizes, as if for one after the other; None, and nothing is taken, if
        they don't fit together.

        Raises:
            ValueError: one of them is negative.
        """
        if min(sizes_bytes, default=0) < 0:
            raise ValueError(f"size_bytes must not be negative, and is {min(sizes_bytes)}")
        if sum(map(_blocks, sizes_bytes)) * ALIGNMENT > self.free_bytes:
            return None
        placed: list[tuple[Extent, ...]] = []
        for size_bytes, alike in groupby(sizes_bytes):
            placed += self._allocate_alike(size_bytes, len(list(alike)))
        return placed

    def _allocate_alike(self, size_bytes: int, count: int) -> list[tuple[Extent, ...]]:
        """Chunks for so many objects of one size, which fit."""
        # Small ones that will follow one another on a device are taken there together.
        devices = len(self._ring) if size_bytes <= CHUNK_SIZE // 2 else count
        free_blocks = [device.free_blocks for device in self._ring]
        placed = [
            self._allocate(size_bytes, -(-left // max(1, devices)), free_blocks)
            for left in range(count, 0, -1)
        ]
        for device in self._ring:
            device.put_back()
        return placed

    def _allocate(self, size_bytes: int, likely: int, free_blocks: list[int]) -> tuple[Extent, ...]:
        """Chunks for an object that fits; each device will likely give so many like them. `free_blocks` has
        what each device of the ring has not given, before and after."""
        blocks_left = _blocks(size_bytes)
        freest_blocks = max(free_blocks, default=0)
        extents: list[Extent] = []
        position = self._last_start.position + 1 if self._last_start else 0
        while blocks_left:
            wanted_blocks = min(SLOT_BLOCKS, blocks_left)
            device, block_count = self._next_turn(position, wanted_blocks, freest_blocks)
            position = device.position + 1
            if not extents:
                self._last_start = device
            blocks_left -= block_count
            length = block_count * ALIGNMENT if blocks_left else size_bytes
            size_bytes -= length
            offset = (self._first_block + device.take(block_count, likely)) * ALIGNMENT
            free_blocks[device.position] -= block_count
            extents.append(Extent(device.index, offset, length))
        return tuple(extents)

    def release(self, extents: Iterable[Extent]) -> None:
        """Frees what `extents` cover, on excluded devices too.

        Raises:
            ValueError: a block is not allocated (it was freed before), or is none of the pool's; then nothing
                is freed.
        """
        self._change_all(_joined(extents), FreeSpace.release, FreeSpace.claim, _NOT_TAKEN)

    def claim(self, extents: Iterable[Extent]) -> None:
        """Marks what `extents` cover as allocated, on excluded devices too.

        Raises:
            ValueError: a block is allocated already, or is none of the pool's, or an extent is not aligned;
                then nothing is claimed.
        """
        self._change_all(extents, FreeSpace.claim, FreeSpace.release, _TAKEN)

    def load(self, chunks: ExtentTable) -> None:
        """Like `claim`, for all chunks of a catalog at once and before anything else is allocated.

        Raises:
            ValueError: as for `claim`.
        """
        assert not any(device.allocated_blocks for device in self._devices.values()), "loaded before"
        strange = ~np.isin(chunks["device"], np.array(list(self._devices), np.uint64))
        if strange.any():
            self._device(int(chunks["device"][strange][0]))
        spaces = [
            self._space_without(device, chunks[chunks["device"] == device.index])
            for device in self._devices.values()
        ]
        for device, space in zip(self._devices.values(), spaces, strict=True):
            device.space = space

    def exclude(self, device: int) -> None:
        """Takes a device out of allocation; its chunks stay allocated until they are released.

        What is free on it, or is freed later, counts neither as free nor in the total: `free_bytes` is always
        what can be had. Allocated chunks count in the total wherever they lie.

        Raises:
            ValueError: no such device.
        """
        self._device(device).excluded = True
        self._close_ring()

    def include(self, device: int) -> None:
        """Puts a device back into allocation, and what is free on it back into the free space and the total.

        Raises:
            ValueError: no such device.
        """
        self._device(device).excluded = False
        self._close_ring()

    def allocated_bytes(self, device: int) -> int:
        """What is allocated on one device, excluded or not, in bytes.

        Raises:
            ValueError: no such device.
        """
        return self._device(device).allocated_blocks * ALIGNMENT

    def fragmentation(self) -> float:
        """How much of the free space is too scattered for whole chunks, from 0.0 (nothing) to 1.0 (all).

        Of the whole 4 MiB chunks that each device's free space could hold if it lay together, the share that
        cannot be had in one piece. 0.0 where free space is too little for a whole chunk anyway. Excluded
        devices don't count.
        """
        could_hold = sum(device.space.free_blocks // SLOT_BLOCKS for device in self._ring)
        holds = sum(device.space.whole_slots for device in self._ring)
        return 1 - holds / could_hold if could_hold else 0.0

    def _close_ring(self) -> None:
        self._ring = [device for device in self._devices.values() if not device.excluded]
        for position, device in enumerate(self._ring):
            device.position = position

    def _next_turn(self, position: int, wanted_blocks: int, freest_blocks: int) -> tuple[_Device, int]:
        """The device, from `position` on, whose turn the next piece is, and how many blocks it gives."""
        device = self._ring[position % len(self._ring)]
        if device.debt_blocks >= SLOT_BLOCKS or not device.can_give(wanted_blocks):
            for other in self._ring:
                other.put_back()
            ring = self._ring[device.position :] + self._ring[: device.position]
            wanted_blocks = min(wanted_blocks, max(device.space.largest_hole for device in ring))
            able = [device for device in ring if device.space.largest_hole >= wanted_blocks]
            freest_blocks = max(device.space.free_blocks for device in able)
            device = next(device for device in able if not device.sits_out(wanted_blocks, freest_blocks))
        device.charge(wanted_blocks, freest_blocks)
        return device, wanted_blocks

    def _space_without(self, device: _Device, chunks: ExtentTable) -> FreeSpace:
        """What is left of a whole device, which all of these chunks lie on."""
        offsets, lengths = chunks["offset"], chunks["length"].astype(np.int64)
        firsts = (offsets // ALIGNMENT).astype(np.int64) - self._first_block
        ends = firsts - (-lengths // ALIGNMENT)
        impossible = (offsets % ALIGNMENT != 0) | (lengths < 1) | (lengths > CHUNK_SIZE)
        impossible |= (firsts < 0) | (ends > device.space.block_count)
        if impossible.any():
            self._pieces(Extent._make(chunks[impossible][0].item()))  # which says what is wrong with it
        # Place and size as one number: to sort numbers takes a third of what it takes to sort by them.
        chunks_in_order = np.sort(firsts << _SIZE_BITS | ends - firsts)
        firsts, sizes = chunks_in_order >> _SIZE_BITS, chunks_in_order & (1 << _SIZE_BITS) - 1
        overlaps = np.flatnonzero(firsts[1:] < (firsts + sizes)[:-1])
        if overlaps.size:
            second = overlaps[0] + 1
            raise ValueError(self._refused(device, firsts[second], sizes[second], _TAKEN))
        return FreeSpace(device.space.block_count, firsts, firsts + sizes)

    def _refused(self, device: _Device, block: int, block_count: int, refusal: str) -> str:
        offset = (self._first_block + block) * ALIGNMENT
        return f"device {device.index}, {block_count * ALIGNMENT} bytes at {offset}: {refusal}"

    def _change_all(self, extents: Iterable[Extent], change: _Change, undo: _Change, refusal: str) -> None:
        pieces: list[_Piece] = []
        for extent in extents:
            pieces += self._pieces(extent)
        for done, (device, slot, first, end) in enumerate(pieces):
            if change(device.space, slot, first, end):
                continue
            for undone, *piece in pieces[:done]:
                undo(undone.space, *piece)
            raise ValueError(self._refused(device, slot * SLOT_BLOCKS + first, end - first, refusal))

    def _pieces(self, extent: Extent) -> tuple[_Piece, ...]:
        """An extent cut at the slots' edges: chunks made with another first offset may lie across one."""
        index, offset, length = extent
        if offset % ALIGNMENT or not 0 < length <= CHUNK_SIZE:
            raise ValueError(f"{extent}: not 1 to {CHUNK_SIZE} bytes at a multiple of {ALIGNMENT}")
        device = self._device(index)
        block = offset // ALIGNMENT - self._first_block
        slot, first = block // SLOT_BLOCKS, block % SLOT_BLOCKS
        end = first - (-length // ALIGNMENT)
        if block < 0 or slot * SLOT_BLOCKS + end > device.space.block_count:
            raise ValueError(f"{extent}: outside of the device's usable space")
        if end <= SLOT_BLOCKS:
            return ((device, slot, first, end),)
        return (device, slot, first, SLOT_BLOCKS), (device, slot + 1, 0, end - SLOT_BLOCKS)

    def _device(self, device: int) -> _Device:
        try:
            return self._devices[device]
        except KeyError:
            raise ValueError(f"the pool has no device {device}") from None


@dataclass(slots=True)
class _Device:
    """A device and its place in the ring; `debt_blocks` is what it has taken beyond its share.

    `ahead` has the first blocks of pieces of `ahead_blocks` each that are taken and not given yet, the next
    one last: never between two calls of the allocator.
    """

    index: int
    space: FreeSpace
    position: int = 0
    debt_blocks: int = 0
    excluded: bool = False
    ahead: list[int] = field(default_factory=list)
    ahead_blocks: int = 0

    @property
    def allocated_blocks(self) -> int:
        return self.space.block_count - self.space.free_blocks

    @property
    def free_blocks(self) -> int:
        """What has not been given."""
        return self.space.free_blocks + len(self.ahead) * self.ahead_blocks

    def can_give(self, block_count: int) -> bool:
        return (self.ahead and self.ahead_blocks == block_count) or self.space.largest_hole >= block_count

    def take(self, block_count: int, likely: int) -> int:
        """The first block of a piece; so many like it will likely be wanted, this one among them."""
        if not self.ahead or self.ahead_blocks != block_count:
            self.put_back()
            self.ahead += reversed(self.space.take(block_count, likely))
            self.ahead_blocks = block_count
        return self.ahead.pop()

    def put_back(self) -> None:
        """Free what was taken ahead."""
        for block in self.ahead:
            slot, first = divmod(block, SLOT_BLOCKS)
            self.space.release(slot, first, first + self.ahead_blocks)
        self.ahead.clear()

    def sits_out(self, block_count: int, freest_blocks: int) -> bool:
        """Whether it gives up this turn to pay off its debt; the freest device never does."""
        free_blocks = self.free_blocks
        if self.debt_blocks < SLOT_BLOCKS or free_blocks == freest_blocks:
            return False
        self.debt_blocks -= block_count * free_blocks // freest_blocks
        return True

    def charge(self, block_count: int, freest_blocks: int) -> None:
        """Adds what a piece is over the device's share; the freest device has no debt."""
        short_blocks = freest_blocks - self.free_blocks
        self.debt_blocks = (
            self.debt_blocks + block_count * short_blocks // freest_blocks if short_blocks else 0
        )


_SIZE_BITS = SLOT_BLOCKS.bit_length()  # of a chunk, in blocks
_TAKEN = "a block is allocated already"
_NOT_TAKEN = "a block is not allocated"
_Change = Callable[[FreeSpace, int, int, int], bool]
_Piece = tuple[_Device, int, int, int]


def _joined(extents: Iterable[Extent]) -> list[Extent]:
    """The same blocks, those that lie in a row together, as far as one chunk may be long: small objects that
    came together mostly leave together."""
    joined: list[Extent] = []
    for extent in sorted(extents):
        if joined and _is_behind(extent, joined[-1]):
            before = joined[-1]
            joined[-1] = Extent(before.device, before.offset, before.allocated_bytes + extent.length)
        else:
            joined.append(extent)
    return joined


def _is_behind(extent: Extent, before: Extent) -> bool:
    """Whether it begins where the other one ends, and both could be one chunk. What is no chunk is neither:
    it is to be refused."""
    device, offset, length = before
    end = offset + rounded_up(length)
    could_be_one = length > 0 and 0 < extent.length <= offset + CHUNK_SIZE - end
    return could_be_one and extent.device == device and extent.offset == end


def _blocks(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT)
