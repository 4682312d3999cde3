"""A clock of a test's for the connector's deadlines, and devices that take long by it."""

from __future__ import annotations

import os

import pytest


class DeadlineClock:
    """The time of the connector's deadlines, which stands still until it is told to go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self._patch = patch

    def monotonic(self) -> float:
        """What the connector reads of `time`."""
        return self.now_s

    def slow_down(self, move: str, seconds: float) -> list[int]:
        """Have each call of this function of `os`, which reads or writes a chunk, take so long. Returns the
        offsets of those that were made."""
        moved: list[int] = []
        real = getattr(os, move)

        def slow(descriptor: int, pieces: list[memoryview], offset: int) -> int:
            moved.append(offset)
            self.now_s += seconds
            done: int = real(descriptor, pieces, offset)
            return done

        self._patch.setattr(os, move, slow)
        return moved
