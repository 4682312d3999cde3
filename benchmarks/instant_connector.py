"""The floor: a connector that moves nothing and answers every request at once.

What LMCache measures with it is LMCache's own share of every other figure.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

Completion = tuple[int, bool, str, list[bool] | None]


class InstantConnector:
    """Says yes to everything from within `submit_*`."""

    def __init__(self) -> None:
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ids = itertools.count(1)
        self._finished: list[Completion] = []

    def event_fd(self) -> int:
        return self._event_fd

    def submit_batch_get(self, keys: Sequence[str], _: Sequence[object]) -> int:
        return self._answer([True] * len(keys))

    def submit_batch_set(self, _: Sequence[str], __: Sequence[object]) -> int:
        return self._answer(None)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        return self._answer([True] * len(keys))

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        return self._answer([True] * len(keys))

    def drain_completions(self) -> list[Completion]:
        os.eventfd_read(self._event_fd)  # LMCache drains only once it is readable
        taken: list[Completion] = []
        while self._finished:
            taken.append(self._finished.pop(0))
        return taken

    def close(self) -> None:
        os.close(self._event_fd)

    def _answer(self, result: list[bool] | None) -> int:
        future_id = next(self._ids)
        self._finished.append((future_id, True, "", result))
        os.eventfd_write(self._event_fd, 1)
        return future_id
