"""Reads before writes: which chunk of a store may begin while loads are under way.

Pure; threads go through it by way of write_gate.py.

Rules:
1. While no load is under way, and none was a moment ago, writes are unbounded: they need not ask.
2. While one is, writes earn their turn by what loads move: of all bytes moved then, `write_share` are theirs.
   So it holds whatever a chunk waits for: one device, four of them, or the processor.
3. What is earned lapses once no write waits, so it is never more than one chunk: no burst of writes ever
   stands before a load.
4. One write may always be at work, whatever loads do and however large it is: stores never starve. What it
   had not earned is owed, but never more than that one chunk.
5. When the last load ends the bound does not fall at once. Writes may have as many bytes at work then as they
   had, and as many more as they have written since: between two batches of loads there is mostly a moment
   without any, and all writes that were let in then would stand before the next batch.
6. Writes begin in the order in which they came, but for one that insists: those at work may hang on a device
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
    """Which writes are at work, and which wait. Changes that can begin any give those that they began; they
    are at work then."""

    def __init__(self, write_share: float) -> None:
        """
        Args:
            write_share: of the bytes moved while loads are under way, what writes may take: over 0, and 1
                for no bound.
        """
        self._earned_per_byte = write_share / (1 - write_share) if write_share < 1 else math.inf
        self._loads: set[object] = set()
        self._earned_bytes = 0.0
        self._write_bytes = 0
        self._bound_bytes = ENOUGH_BYTES
        self._waiting: deque[Write] = deque()

    @property
    def bounded(self) -> bool:
        """Whether a write must come and leave here."""
        return (len(self._loads) > 0 or self._bound_bytes < ENOUGH_BYTES) and self._earned_per_byte < math.inf

    def load_begins(self, load: object) -> None:
        """A batch is being loaded; it never waits. `load` stands for it until it ends."""
        self._loads.add(load)

    def loaded(self, size_bytes: int) -> list[Write]:
        """So many bytes of a batch were read."""
        self._earned_bytes += size_bytes * self._earned_per_byte
        return self._begun()

    def load_ends(self, load: object) -> None:
        """A batch is loaded; nothing where it never began, or has ended."""
        if load in self._loads:
            self._loads.remove(load)
            self._bound_bytes = self._write_bytes

    def write_comes(self, write: Write) -> list[Write]:
        """A write is there, and begins at once or waits for its turn."""
        self._waiting.append(write)
        return self._begun()

    def write_insists(self, write: Write) -> None:
        """It has waited too long and begins now, whatever else is at work."""
        if write.at_work:
            return
        if write in self._waiting:  # else Ctrl-C broke off its beginning in another thread
            self._waiting.remove(write)
        self._begin(write)

    def write_leaves(self, write: Write) -> list[Write]:
        """It ended, or no longer waits; nothing where it never came, or has left."""
        if write in self._waiting:
            self._waiting.remove(write)
        elif write.at_work:
            write.at_work = False
            self._write_bytes -= write.size_bytes
            self._bound_bytes += write.size_bytes
        return self._begun()

    def _begun(self) -> list[Write]:
        begun = []
        while self._waiting and self._may_begin(self._waiting[0].size_bytes):
            begun.append(self._waiting.popleft())
            self._begin(begun[-1])
        if not self._waiting:
            self._earned_bytes = min(self._earned_bytes, 0.0)
        return begun

    def _begin(self, write: Write) -> None:
        write.at_work = True
        self._write_bytes += write.size_bytes
        self._earned_bytes = max(self._earned_bytes, 0.0) - write.size_bytes

    def _may_begin(self, size_bytes: int) -> bool:
        if not (self._write_bytes and self.bounded):
            return True
        if self._loads:
            return size_bytes <= self._earned_bytes
        return self._write_bytes + size_bytes <= self._bound_bytes
