"""Results on their way to LMCache: popped once, announced by one eventfd.

Rules:
1. Every id that `begin` gave completes exactly once; a second completion is ignored.
2. `drain` clears the eventfd before it takes the results, so none is left without a signal. Until then one
   write announces all.
3. Nothing here raises into LMCache: a completion that was taken and then lost would be lost for ever.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple


class Completion(NamedTuple):
    """One finished operation, in the order that LMCache unpacks."""

    future_id: int
    ok: bool
    error: str
    result_bools: list[bool] | None


class Completions:
    """The ids in flight, the finished ones, and the eventfd that says that there are some."""

    def __init__(self) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._pending: dict[int, Completion] = {}
        self._finished: list[Completion] = []
        self._announced = False
        self._closed = False

    def begin(self, key_count: int | None) -> int:
        """A new id. Should it never be completed, it fails at `close`, with `key_count` times False."""
        with self._lock:
            future_id = next(self._ids)
            bools = None if key_count is None else [False] * key_count
            self._pending[future_id] = Completion(future_id, False, "the connector was closed", bools)
            return future_id

    def complete(self, completion: Completion) -> None:
        """Hand over a result, unless its id has one already."""
        with self._lock:
            if self._pending.pop(completion.future_id, None) is not None:
                self._finished.append(completion)
                self._announce()

    def settle(self, completions: Sequence[Completion]) -> list[Completion]:
        """The same for who drains: those of these results whose id has none yet, which he takes himself."""
        with self._lock:
            return [each for each in completions if self._pending.pop(each.future_id, None) is not None]

    def announce(self) -> None:
        """Have `drain` called."""
        with self._lock:
            self._announce()

    def drain(self) -> list[Completion]:
        """Every result not taken yet; the eventfd is clear afterwards."""
        with self._lock:
            if self._announced and not self._closed:
                os.eventfd_read(self.event_fd)
                self._announced = False
            taken, self._finished = self._finished, []
            return taken

    @property
    def pending(self) -> int:
        """How many ids are not completed yet."""
        with self._lock:
            return len(self._pending)

    def close(self) -> None:
        """Fail what is pending and close the eventfd. Results may still be drained."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._finished.extend(self._pending.values())
            self._pending.clear()
            os.close(self.event_fd)

    def _announce(self) -> None:
        if not self._announced and not self._closed:
            os.eventfd_write(self.event_fd, 1)
            self._announced = True
