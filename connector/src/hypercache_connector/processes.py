"""Which process this is: connections and threads are of one, and a forked child has them only by name."""

from __future__ import annotations

import os
from typing import TypeAlias

Process: TypeAlias = tuple[int, int]
"""The number of a process, and how many forks lie between it and the one that began this program.

The number alone is not enough: the first process of a container may have a child that is the first one of
another namespace. Nor are the forks: what forks without Python is not counted. (A plain tuple, since each
call of LMCache's asks.)
"""

_forks = 0


def this_process() -> Process:
    """The one that asks."""
    return os.getpid(), _forks


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)
