"""Reads before writes: which chunk of a store may begin while loads are under way.

Pure; threads go through it by way of write_gate.py.

Rules:
1. While no load is under way, and none was a moment ago, writes are unbounded: they need not ask.
2. While one is, writes may take `write_share` of all bytes at work. In bytes, since that is what devices
   serve; of those at work, since what a device was given it serves in its own order, and only what it was not
   given yet can be put off. (So writes that began before the load are not counted.)
3. One write may always be at work, whatever loads do and however large it is: stores never starve.
4. When the last load ends the bound does not fall at once: it grows by the bytes of each write that ends.
   Between two batches of loads there is mostly a moment without any, and all writes that were let in then
   would stand before the next batch.
5. Writes begin in the order in which they came, but for one that insists: those at work may hang on a device
   that has failed, and those of other devices must not wait for them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

ENOUGH_BYTES = 64 << 20
"""A bound that has grown to this is none any more: a full chunk for each of 16 threads."""


@dataclass(eq=False, slots=True)
class Write:
    """A chunk of a store, from when it comes until it leaves."""

    size_bytes: int
    at_work: bool = False


class Turns:
    """What is at work, and which writes wait. Every change gives the writes that begin by it; they are at
    work then."""

    def __init__(self, write_share: float, readers: int) -> None:
        """
        Args:
            write_share: of the bytes at work, what writes may take beside reads: over 0, and 1 for no bound.
            readers: how many chunks of loads can be at work at once.
        """
        self._write_bytes_per_read_byte = write_share / (1 - write_share) if write_share < 1 else math.inf
        self._readers = readers
        self._load_chunks = 0
        self._load_bytes = 0
        self._write_bytes = 0
        self._bound_bytes = math.inf
        self._waiting: deque[Write] = deque()

    @property
    def bounded(self) -> bool:
        """Whether a write must come and leave here."""
        return self._bound_bytes < math.inf

    def load_begins(self, chunks: int, size_bytes: int) -> list[Write]:
        """A batch of so many chunks is being loaded; it never waits."""
        return self._loading(self._load_chunks + chunks, self._load_bytes + size_bytes)

    def load_ends(self, chunks: int, size_bytes: int) -> list[Write]:
        """It no longer is."""
        return self._loading(self._load_chunks - chunks, self._load_bytes - size_bytes)

    def write_comes(self, write: Write) -> list[Write]:
        """A write is there, and begins at once or waits for its turn."""
        self._waiting.append(write)
        return self._begun()

    def write_insists(self, write: Write) -> None:
        """It has waited too long and begins now, whatever else is at work."""
        if write in self._waiting:
            self._waiting.remove(write)
            self._begin(write)

    def write_leaves(self, write: Write) -> list[Write]:
        """It ended, or no longer waits; nothing where it never came."""
        if write in self._waiting:
            self._waiting.remove(write)
        elif write.at_work:
            self._write_bytes -= write.size_bytes
            if not self._load_chunks:
                grown_bytes = self._bound_bytes + write.size_bytes
                self._bound_bytes = grown_bytes if grown_bytes < ENOUGH_BYTES else math.inf
        return self._begun()

    def _loading(self, chunks: int, size_bytes: int) -> list[Write]:
        self._load_chunks, self._load_bytes = chunks, size_bytes
        if chunks:
            at_work_bytes = size_bytes * min(1.0, self._readers / chunks)
            self._bound_bytes = at_work_bytes * self._write_bytes_per_read_byte
        return self._begun()

    def _begun(self) -> list[Write]:
        begun = []
        while self._waiting and self._fits(self._waiting[0]):
            begun.append(self._waiting.popleft())
            self._begin(begun[-1])
        return begun

    def _begin(self, write: Write) -> None:
        write.at_work = True
        self._write_bytes += write.size_bytes

    def _fits(self, write: Write) -> bool:
        return not self._write_bytes or self._write_bytes + write.size_bytes <= self._bound_bytes
