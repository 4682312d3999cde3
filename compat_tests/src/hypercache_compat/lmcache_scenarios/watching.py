"""What comes of a verified load: figures, and what LMCache's adapter alone would not tell."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any

from lmcache.v1.distributed.internal_api import L2AdapterListener

_TOLD_AT_MOST = 20
_IDS_KEPT = 1000


class Figures:
    """What came of everything so far."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.problems: list[str] = []
        self.slowest_s = 0.0
        self.marked = time.monotonic()
        self.since_mark: dict[str, float] = {}

    def good(self, kind: str, begun: float) -> None:
        """Something of that kind, begun then, succeeded."""
        self.counts[f"{kind} good"] += 1
        if begun >= self.marked:
            self.since_mark.setdefault(kind, time.monotonic() - self.marked)

    def completed(self, kind: str, begun: float, deadline_s: float) -> None:
        """A future completed."""
        took_s = time.monotonic() - begun
        self.slowest_s = max(self.slowest_s, took_s)
        self.counts[f"{kind} done"] += 1
        if took_s > deadline_s:
            self.counts["late"] += 1
            self.problem(f"a {kind} took {took_s:.1f} s")

    def problem(self, sentence: str) -> None:
        """To be told, up to some."""
        if len(self.problems) < _TOLD_AT_MOST:
            self.problems.append(sentence)

    def is_wrong(self, sentence: str) -> None:
        """A load gave wrong bytes."""
        self.counts["wrong"] += 1
        if len(self.wrong) < _TOLD_AT_MOST:
            self.wrong.append(sentence)

    def report(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "counts": dict(self.counts),
            "wrong": self.wrong,
            "problems": self.problems,
            "slowest_s": self.slowest_s,
            "since_mark": dict(self.since_mark),
        }


class Deleted(L2AdapterListener):  # type: ignore[misc] # LMCache publishes no types
    """LMCache tells its listeners what was deleted, and the caller nothing."""

    def __init__(self) -> None:
        self.keys: set[Any] = set()

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        """Not asked for."""

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        """Not asked for."""

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        """Remember them."""
        self.keys.update(keys)


class Once:
    """A native client whose completions are counted by id: a second one for an id would be a fault."""

    def __init__(self, client: Any, figures: Figures) -> None:
        self._client = client
        self._figures = figures
        self._latest: deque[int] = deque(maxlen=_IDS_KEPT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def drain_completions(self) -> Any:
        """What the client gives."""
        drained = self._client.drain_completions()
        for future_id, *_ in drained:
            if future_id in self._latest:
                self._figures.counts["twice"] += 1
                self._figures.problem(f"future {future_id} completed twice")
            self._latest.append(future_id)
        return drained
