"""Which process this is: connections and threads are of one, and a forked child has them only by name."""

from __future__ import annotations

import os
from typing import NamedTuple

_forks = 0


class Process(NamedTuple):
    """One process: its number, and how many forks lie between it and the one that began this program.

    The number alone is not enough: the first process of a container may have a child that is the first one of
    another namespace. Nor are the forks: what forks without Python is not counted.
    """

    number: int
    forks: int


def this_process() -> Process:
    """The one that asks."""
    return Process(os.getpid(), _forks)


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)
