"""Where loads say that they are under way, and where the chunks of stores wait for their turn (turns.py).

Rules:
1. A load never waits here; a write does for its turn, until its patience, its deadline or `close` ends that.
2. Each change wakes the writes whose turn it is by now, and no other thread.
3. Where only one direction works it costs next to nothing: loads take the lock twice for each batch, and for
   what they read only while a write waits; writes look at `bounded` without it. One that looked a moment too
   early is one more on its way to the devices.
4. Ctrl-C may break off any step, and what never leaves holds up writes for good: so what has begun to leave
   does, and to leave twice does no harm. Each way of leaving stands in full: it comes at the entry of a
   function too, so one that both shared would be entered outside of its own `try`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .devices import COUNTS
from .outcomes import Counters, Outcome
from .turns import Turns, Write

PATIENCE_S = 5.0
"""A full chunk of each of 16 threads takes less, one after the other, on a device that writes 14 MB/s."""


class WriteGate:
    """One for all transfers of an engine."""

    def __init__(self, write_share: float, counters: Counters, patience_s: float = PATIENCE_S) -> None:
        """
        Args:
            write_share: of the bytes moved while loads are under way, what writes may take: over 0, and 1
                for no bound.
            patience_s: how long a write waits for its turn before it begins all the same.
        """
        self._turns = Turns(write_share)
        self._counters = counters
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._called: dict[Write, threading.Event] = {}
        self._closed = False

    @property
    def bounded(self) -> bool:
        """Whether a write has to go through `writing` now."""
        return self._turns.bounded

    @property
    def waiting(self) -> int:
        """How many writes wait for their turn."""
        return len(self._called)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A batch is being loaded."""
        load = object()
        try:  # rule 4
            with self._lock:
                self._turns.load_begins(load)
            yield
        finally:
            try:
                self._end(load)
            except BaseException:  # Ctrl-C is none of Exception's
                self._end(load)
                raise

    def loaded(self, size_bytes: int) -> None:
        """So many bytes of a batch were read. Only worth saying while a write waits."""
        with self._lock:
            self._call(self._turns.loaded(size_bytes))

    @contextmanager
    def writing(self, size_bytes: int, deadline: float) -> Iterator[Outcome]:
        """OK, and so many bytes of a store are at work, once it is their turn. TRANSFER_LATE where that did
        not come by `deadline` (monotonic), CLOSED where `close` did before: then nothing must be written.
        """
        write = Write(size_bytes)
        try:  # rule 4
            with self._lock:
                self._call(self._turns.write_comes(write))
            yield self._turn(write, deadline)
        finally:
            try:
                self._leave(write)
            except BaseException:  # as above
                self._leave(write)
                raise

    def close(self) -> None:
        """Send away the writes that wait, and any that still come."""
        with self._lock:
            self._closed = True
            self._call(list(self._called))

    def _end(self, load: object) -> None:
        with self._lock:
            self._turns.load_ends(load)

    def _leave(self, write: Write) -> None:
        with self._lock:
            self._called.pop(write, None)
            self._call(self._turns.write_leaves(write))

    def _turn(self, write: Write, deadline: float) -> Outcome:
        if not write.at_work:
            self._wait(write, deadline)
        if self._closed:
            return Outcome.CLOSED
        return Outcome.OK if write.at_work else Outcome.TRANSFER_LATE

    def _wait(self, write: Write, deadline: float) -> None:
        with self._lock:
            if write.at_work or self._closed:
                return
            called = self._called[write] = threading.Event()
        self._counters.add(COUNTS, "waited")
        left_s = deadline - time.monotonic()
        if not called.wait(max(0.0, min(left_s, self._patience_s))) and self._patience_s < left_s:
            with self._lock:
                self._called.pop(write, None)
                self._turns.write_insists(write)

    def _call(self, writes: Iterable[Write]) -> None:
        for write in writes:
            called = self._called.pop(write, None)
            if called is not None:
                called.set()
