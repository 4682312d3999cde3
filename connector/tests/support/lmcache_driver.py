"""Does with a connector what LMCache does."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Sequence
from typing import Any

from hypercache_connector import HyperCacheConnector
from hypercache_connector.completions import Completion

DEADLINE_S = 30.0


class Driver:
    """Does with a connector what LMCache does, and waits for the results."""

    def __init__(self, connector: HyperCacheConnector) -> None:
        self.connector = connector
        self._results: dict[int, Completion] = {}
        self._draining = threading.Lock()

    def wait(self, future_id: int, deadline_s: float = DEADLINE_S) -> Completion:
        """The completion of `future_id`, which must come in time and once; for any number of threads."""
        deadline = time.monotonic() + deadline_s
        while future_id not in self._results:
            assert time.monotonic() < deadline, f"no completion of {future_id} within {deadline_s} s"
            # Another thread may drain this one's result, so nobody sleeps long.
            select.select([self.connector.event_fd()], [], [], 0.02)
            with self._draining:
                for completion in self.connector.drain_completions():
                    assert completion.future_id not in self._results
                    self._results[completion.future_id] = completion
        return self._results[future_id]

    def store(self, keys: Sequence[str], buffers: Sequence[Any]) -> Completion:
        return self.wait(self.connector.submit_batch_set(keys, buffers))

    def load(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[bool]:
        completion = self.wait(self.connector.submit_batch_get(keys, buffers))
        assert completion.result_bools is not None
        assert len(completion.result_bools) == len(keys)
        return completion.result_bools

    def exists(self, keys: Sequence[str]) -> list[bool]:
        completion = self.wait(self.connector.submit_batch_exists(keys))
        return completion.result_bools if completion.ok and completion.result_bools else [False] * len(keys)

    def delete(self, keys: Sequence[str]) -> list[bool] | None:
        return self.wait(self.connector.submit_batch_delete(keys)).result_bools

    def count(self, group: str, name: str) -> int:
        """A counter of the connector's status."""
        return int(self.connector.status().get(group, {}).get(name, 0))
