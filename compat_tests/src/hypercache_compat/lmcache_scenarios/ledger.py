"""Which versions of a key a load may give, from what its one writer was told.

Rules:
1. A store may take effect from when it was submitted, also where it failed: its reply may be what was lost.
2. What was deleted never comes back: a delete that succeeded drops all versions before it.
3. With overwriting, so does a store that succeeded. Without, whatever was there may have stayed.

They hold where nobody writes a key twice at the same time, which `claim` sees to.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Allowed:
    """What a load that begins now may give: one of `versions`, from `later` on, or before `earlier`."""

    versions: frozenset[int]
    later: int
    earlier: int

    def __contains__(self, version: int) -> bool:
        return version in self.versions or version >= self.later or version < self.earlier


class Ledger:
    """The keys of one load; used by all its threads. Its versions begin with `first_version`: those before
    are another's, who may have stored any of them."""

    def __init__(self, *, overwrite: bool, first_version: int = 0) -> None:
        self._overwrite = overwrite
        self._lock = threading.Lock()
        self._next = defaultdict[str, int](lambda: first_version)
        self._earlier = defaultdict[str, int](lambda: first_version)
        self._possible: defaultdict[str, set[int]] = defaultdict(set)
        self._writing: set[str] = set()

    def claim(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that nobody writes or deletes now; they are the caller's until `release`."""
        with self._lock:
            free = [name for name in names if name not in self._writing]
            self._writing.update(free)
            return free

    def release(self, names: Sequence[str]) -> None:
        """Others may write them."""
        with self._lock:
            self._writing.difference_update(names)

    def begin(self, name: str) -> int:
        """The version that is going to be stored."""
        with self._lock:
            version = self._next[name]
            self._next[name] += 1
            self._possible[name].add(version)
            return version

    def stored(self, name: str, version: int) -> None:
        """The store of it succeeded."""
        if self._overwrite:
            with self._lock:
                self._possible[name] = {version}
                self._earlier[name] = 0

    def deleted(self, name: str) -> None:
        """A delete of it succeeded."""
        with self._lock:
            self._possible[name].clear()
            self._earlier[name] = 0

    def allowed(self, name: str) -> Allowed:
        """What a load that begins now may give."""
        with self._lock:
            return Allowed(frozenset(self._possible[name]), self._next[name], self._earlier[name])
