"""A connector with one known fault, loaded by LMCache like any other: what watches connectors must see it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from itertools import count

LATE_S = 0.4
EVERY = 4
"""Of so many loads one is done wrong."""

Completion = tuple[int, bool, str, "list[bool] | None"]


class UnreliableConnector:
    """Keeps objects in memory. `fault` is what it does to loads ("forgets", "repeats", "delays", "flips"), or
    to deletes, which it then only claims to have done ("keeps")."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._objects: dict[str, bytes] = {}
        self._ids = count(1)
        self._loads = count(1)
        self._done: deque[Completion] = deque()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def event_fd(self) -> int:
        """Readable when there is something to drain."""
        return self._event_fd

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Stored at once; what is there stays."""
        for key, view in zip(keys, views, strict=True):
            self._objects.setdefault(key, bytes(view))
        return self._completed(None)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Answered at once."""
        return self._completed([key in self._objects for key in keys])

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Deleted at once."""
        for key in keys if self._fault != "keeps" else ():
            self._objects.pop(key, None)
        return self._completed([True] * len(keys))

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Loaded at once, but for the fault."""
        found = [key in self._objects for key in keys]
        for key, view in zip(keys, views, strict=True):
            view.cast("B")[:] = self._objects.get(key, bytes(len(view)))
        if next(self._loads) % EVERY:
            return self._completed(found)
        if self._fault == "flips":
            for view in views:
                view.cast("B")[-1] ^= 1
        if self._fault == "forgets":
            return next(self._ids)
        return self._completed(
            found,
            times=2 if self._fault == "repeats" else 1,
            after_s=LATE_S if self._fault == "delays" else 0.0,
        )

    def drain_completions(self) -> list[Completion]:
        """Each of them."""
        os.eventfd_read(self._event_fd)
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Let go of the descriptor."""
        os.close(self._event_fd)

    def _completed(self, found: list[bool] | None, times: int = 1, after_s: float = 0.0) -> int:
        future_id = next(self._ids)
        completions: list[Completion] = [(future_id, True, "", found)] * times

        def complete() -> None:
            self._done.extend(completions)
            os.eventfd_write(self._event_fd, 1)

        if after_s:
            threading.Timer(after_s, complete).start()
        else:
            complete()
        return future_id
