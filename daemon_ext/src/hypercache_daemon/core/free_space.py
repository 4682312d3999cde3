"""The free blocks of one device, kept so that a million objects cost next to nothing.

Rules:
1. A device is a row of slots of one whole chunk (4 MiB, 1,024 blocks); the last may be shorter. A hole is a
   run of free blocks inside one slot, and no hole reaches over a slot's edge: small pieces fill up slots
   that are already broken, and whole slots stay whole for whole chunks.
2. Only a partly used slot has a list of its holes: ascending block numbers where free and used change, the
   first of them the start of a hole. A slot that is full, or whole, costs ten bytes and nothing else; what
   is allocated costs nothing at all.
3. Every slot is filed under the size of its largest hole, so the tightest slot for a piece is found without
   a search, and taking, claiming and releasing a piece cost the same however large the device is.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from operator import sub

import numpy as np
import numpy.typing as npt

from hypercache_protocol.fields import CHUNK_SIZE

BLOCK_SIZE = 4096
SLOT_BLOCKS = CHUNK_SIZE // BLOCK_SIZE

Blocks = npt.NDArray[np.int64]
_NO_BLOCKS: Blocks = np.empty(0, np.int64)


class FreeSpace:
    """Which of a device's blocks are free; blocks are addressed as (slot, first block, end block).

    Callers stay inside of one slot and inside of the device; nothing here checks that.
    """

    __slots__ = ("_bounds", "_index", "block_count", "free_blocks")

    def __init__(self, block_count: int, firsts: Blocks = _NO_BLOCKS, ends: Blocks = _NO_BLOCKS) -> None:
        """All of a device but the runs of blocks from `firsts` to `ends`: ascending, and none in two."""
        self.block_count = block_count
        self.free_blocks = block_count - int((ends - firsts).sum())
        starts, stops = _holes_between(block_count, firsts, ends)
        slots = starts // SLOT_BLOCKS
        heads = np.flatnonzero(np.diff(slots, prepend=-1))  # where each slot's holes begin
        largest = np.zeros(-(-block_count // SLOT_BLOCKS), np.uint16)
        if heads.size:
            largest[slots[heads]] = np.maximum.reduceat(stops - starts, heads)
        self._index = _SlotIndex(largest)
        partly = largest[slots] < SLOT_BLOCKS
        self._bounds = _bounds_by_slot(slots[partly], starts[partly], stops[partly])

    @property
    def largest_hole(self) -> int:
        """How many blocks the largest piece has that could be taken now; 0 on a full device."""
        return self._index.largest

    @property
    def whole_slots(self) -> int:
        """How many whole chunks could be taken now; looks at each slot."""
        return self._index.hole_in.count(SLOT_BLOCKS)

    def take(self, block_count: int, most: int = 1) -> range:
        """Takes a piece of at most `largest_hole` blocks where it fits tightest, and as many more of its size
        as fit right behind it and `most` allows; returns the first block of each."""
        slot = self._index.tightest(block_count)
        if block_count == SLOT_BLOCKS:
            self._index.move(slot, 0)
            first, end = 0, SLOT_BLOCKS
        else:
            bounds = self._bounds_of(slot)
            hole = _tightest_hole(bounds, block_count)
            first = bounds[hole]
            end = first + block_count * min(most, (bounds[hole + 1] - first) // block_count)
            self._fill(slot, bounds, hole + 1, first, end)
        self.free_blocks -= end - first
        return range(slot * SLOT_BLOCKS + first, slot * SLOT_BLOCKS + end, block_count)

    def claim(self, slot: int, first: int, end: int) -> bool:
        """Takes these very blocks; False, and nothing has changed, where one of them is not free."""
        if end - first == SLOT_BLOCKS:
            if self._index.hole_in[slot] != SLOT_BLOCKS:
                return False
            self._index.move(slot, 0)
        else:
            bounds = self._bounds_of(slot)
            at = bisect_right(bounds, first)
            if at % 2 == 0 or bounds[at] < end:
                return False
            self._fill(slot, bounds, at, first, end)
        self.free_blocks -= end - first
        return True

    def release(self, slot: int, first: int, end: int) -> bool:
        """Frees these blocks; False, and nothing has changed, where one of them is free already."""
        if end - first == SLOT_BLOCKS:
            if self._index.hole_in[slot]:
                return False
            self._index.move(slot, SLOT_BLOCKS)
        else:
            bounds = self._bounds_of(slot)
            at = bisect_right(bounds, first)
            if at % 2 or (at < len(bounds) and bounds[at] < end):
                return False
            self._open(slot, bounds, at, first, end)
        self.free_blocks += end - first
        return True

    def _bounds_of(self, slot: int) -> array[int]:
        largest = self._index.hole_in[slot]
        if largest == 0:
            return array("H")
        if largest == SLOT_BLOCKS:
            return array("H", (0, SLOT_BLOCKS))
        return self._bounds[slot]

    def _fill(self, slot: int, bounds: array[int], at: int, first: int, end: int) -> None:
        """Takes a run out of the hole that ends at `bounds[at]`; only the largest one needs a new look."""
        was_largest = bounds[at] - bounds[at - 1] == self._index.hole_in[slot]
        _toggle(bounds, at, first, end)
        if was_largest:
            self._file(slot, bounds, _largest_hole(bounds))

    def _open(self, slot: int, bounds: array[int], at: int, first: int, end: int) -> None:
        """Frees a run between two holes, which `at` divides; the hole it makes may be the largest."""
        _toggle(bounds, at, first, end)
        at = bisect_right(bounds, first)
        hole = bounds[at] - bounds[at - 1]
        if hole > self._index.hole_in[slot]:
            self._file(slot, bounds, hole)

    def _file(self, slot: int, bounds: array[int], largest: int) -> None:
        if 0 < largest < SLOT_BLOCKS:
            self._bounds[slot] = bounds
        else:
            self._bounds.pop(slot, None)
        self._index.move(slot, largest)


def _holes_between(block_count: int, firsts: Blocks, ends: Blocks) -> tuple[Blocks, Blocks]:
    """Where the holes between used runs start and stop, cut at the slots' edges.

    An edge is a used run without length: the holes on its two sides don't join.
    """
    edges = np.append(np.arange(0, block_count, SLOT_BLOCKS), block_count)
    firsts, ends = np.concatenate((firsts, edges)), np.concatenate((ends, edges))
    order = np.argsort(firsts, kind="stable")
    starts, stops = np.maximum.accumulate(ends[order])[:-1], firsts[order][1:]
    holes = starts < stops
    return starts[holes], stops[holes]


def _bounds_by_slot(slots: Blocks, starts: Blocks, stops: Blocks) -> dict[int, array[int]]:
    """The lists of rule 2, from holes in ascending order."""
    pairs = np.stack((starts, stops), axis=1) - (slots * SLOT_BLOCKS)[:, None]
    data = pairs.astype(np.uint16).tobytes()
    heads = np.flatnonzero(np.diff(slots, prepend=-1))
    cuts = [*(heads * 4).tolist(), len(data)]  # two bounds of two bytes for each hole
    return {
        slot: array("H", data[cut:end])
        for slot, cut, end in zip(slots[heads].tolist(), cuts[:-1], cuts[1:], strict=True)
    }


def _toggle(bounds: array[int], at: int, first: int, end: int) -> None:
    """Turns a run that is all free or all used into the other; `at` is where `end` belongs in `bounds`.

    A bound that is there goes, one that is not there comes: that joins, splits, shrinks and grows holes.
    """
    has_first = at > 0 and bounds[at - 1] == first
    has_end = at < len(bounds) and bounds[at] == end
    if has_first and has_end:
        del bounds[at - 1 : at + 1]
    elif has_first:
        bounds[at - 1] = end
    elif has_end:
        bounds[at] = first
    else:
        bounds[at:at] = array("H", (first, end))


def _tightest_hole(bounds: array[int], block_count: int) -> int:
    """Where in `bounds` the smallest hole of at least `block_count` blocks starts."""
    if len(bounds) == 2:
        return 0
    sizes = _hole_sizes(bounds)
    return 2 * sizes.index(min([size for size in sizes if size >= block_count]))


def _largest_hole(bounds: array[int]) -> int:
    if len(bounds) == 2:
        return bounds[1] - bounds[0]
    return max(_hole_sizes(bounds), default=0)


def _hole_sizes(bounds: array[int]) -> list[int]:
    return list(map(sub, bounds[1::2], bounds[::2]))


class _SlotIndex:
    """Slots filed by the size of their largest hole: one linked list for each size, its links in two arrays.

    The last entry of the arrays ends every list; it may be written to and is never read.
    """

    __slots__ = ("_end", "_heads", "_next", "_present", "_previous", "hole_in", "largest")

    def __init__(self, largest: npt.NDArray[np.uint16]) -> None:
        """Files each slot under the size of its largest hole."""
        end = len(largest)
        slots = np.argsort(largest, kind="stable")[np.count_nonzero(largest == 0) :]
        sizes = largest[slots]
        follows = sizes[1:] == sizes[:-1]
        links = np.full((2, end + 1), end, np.uint32)
        links[0, slots[:-1][follows]] = slots[1:][follows]
        links[1, slots[1:][follows]] = slots[:-1][follows]
        heads = np.full(SLOT_BLOCKS + 1, end, np.uint32)
        heads[sizes[::-1]] = slots[::-1]  # the last one written stays: the first of each size
        self._end = end
        self.hole_in = array("H", largest.tobytes())
        self._heads = array("I", heads.tobytes())
        self._next, self._previous = (array("I", link.tobytes()) for link in links)
        self._present = bytearray((heads != end).tobytes())  # 1 at each size that has a slot
        self.largest = int(sizes[-1]) if sizes.size else 0

    def tightest(self, block_count: int) -> int:
        """A slot whose largest hole has at least `block_count` blocks and no more than it must."""
        return self._heads[self._present.find(1, block_count)]

    def move(self, slot: int, hole: int) -> None:
        """Files `slot` under `hole`; a full slot (0) is in no list."""
        before = self.hole_in[slot]
        self.hole_in[slot] = hole
        if before:
            self._unlink(slot, before)
        if hole:
            self._link(slot, hole)

    def _link(self, slot: int, hole: int) -> None:
        head = self._heads[hole]
        self._next[slot] = head
        self._previous[slot] = self._end
        self._previous[head] = slot
        self._heads[hole] = slot
        self._present[hole] = 1
        if hole > self.largest:
            self.largest = hole

    def _unlink(self, slot: int, hole: int) -> None:
        previous, following = self._previous[slot], self._next[slot]
        self._previous[following] = previous
        if previous != self._end:
            self._next[previous] = following
            return
        self._heads[hole] = following
        if following == self._end:
            self._present[hole] = 0
            if hole == self.largest:
                self.largest = max(self._present.rfind(1), 0)
