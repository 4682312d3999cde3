"""The RAM tier's allocator: a budget in bytes, and a file of its own, never reused, for each chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypercache_protocol.fields import CHUNK_SIZE

from .extents import Extent, ExtentTable, rounded_up


class RamAllocator:
    """Same interface as `Allocator`; an extent's `device` is the serial number of its file.

    Args:
        budget_bytes: what it may take together. A pool that was loaded with more is that large until
            enough of it is evicted.
        first_serial: above every serial ever handed out for this pool.
    """

    def __init__(self, budget_bytes: int, first_serial: int) -> None:
        self._budget_bytes = budget_bytes
        self._next_serial = first_serial
        self._taken: dict[int, int] = {}
        self._taken_bytes = 0

    @property
    def total_bytes(self) -> int:
        return max(self._budget_bytes, self._taken_bytes)

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self._taken_bytes

    def allocate(self, size_bytes: int) -> tuple[Extent, ...] | None:
        """Chunks of at most 4 MiB in object order, or None if the budget does not allow it."""
        placed = self.allocate_all((size_bytes,))
        return None if placed is None else placed[0]

    def allocate_all(self, sizes_bytes: Sequence[int]) -> list[tuple[Extent, ...]] | None:
        """The same for each of these objects; None, and nothing is taken, if they don't fit together."""
        if sum(map(rounded_up, sizes_bytes)) > self.free_bytes:
            return None
        return list(map(self._take, sizes_bytes))

    def _take(self, size_bytes: int) -> tuple[Extent, ...]:
        lengths = [min(CHUNK_SIZE, size_bytes - start) for start in range(0, size_bytes, CHUNK_SIZE)]
        extents = tuple(Extent(self._next_serial + i, 0, length) for i, length in enumerate(lengths))
        self._next_serial += len(extents)
        self.claim(extents)
        return extents

    def claim(self, extents: Iterable[Extent]) -> None:
        """Take these as allocated. ValueError where one is already; then none is taken."""
        fresh: dict[int, int] = {}
        for extent in extents:
            if extent.device in self._taken or extent.device in fresh:
                raise ValueError(f"RAM chunk {extent.device} has an owner already")
            fresh[extent.device] = extent.allocated_bytes
        self._taken |= fresh
        self._taken_bytes += sum(fresh.values())

    def load(self, chunks: ExtentTable) -> None:
        """Take all chunks of a catalog as allocated. ValueError where two of them are the same."""
        self.claim(map(Extent._make, chunks.tolist()))

    def release(self, extents: Iterable[Extent]) -> None:
        """Give these back. ValueError where one is not allocated; then none is given back."""
        serials: set[int] = set()
        for extent in extents:
            if extent.device not in self._taken or extent.device in serials:
                raise ValueError(f"RAM chunk {extent.device} has no owner")
            serials.add(extent.device)
        self._taken_bytes -= sum(map(self._taken.pop, serials))
