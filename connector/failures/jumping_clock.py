"""hypercached with a clock that can be set while it runs.

The daemon reads one clock, Trio's. On Linux that is CLOCK_MONOTONIC, which nobody can set for a process that
runs: so this process is one that has another function in its place. The wall clock it never reads.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hypercache_compat.daemon_process import Process, Starter
from hypercache_compat.forked import fork, run_daemon

_OFFSET = struct.Struct("d")


class JumpingClock:
    """What daemons that `starter` starts take for the time.

    Args:
        path: of a new file that they and this process share.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.jump_to(0.0)

    def jump_to(self, ahead_s: float) -> None:
        """It is `ahead_s` ahead of the real one from now on; less than 0: behind."""
        if self._path.exists():
            with self._path.open("r+b") as file:
                file.write(_OFFSET.pack(ahead_s))
        else:
            self._path.write_bytes(_OFFSET.pack(ahead_s))

    def starter(self) -> Starter:
        """Starts daemons in processes of their own."""
        return partial(_start, self._path)


def _start(clock: Path, arguments: Sequence[str], log: Path) -> Process:
    return fork(log, run, list(arguments), str(clock))


def run(arguments: Sequence[str], clock: str) -> int:
    """hypercached in this process; the exit status."""
    import trio._core._run

    with Path(clock).open("rb") as file:
        shared = mmap.mmap(file.fileno(), _OFFSET.size, prot=mmap.PROT_READ)
    real = time.perf_counter
    trio._core._run.perf_counter = lambda: real() + _OFFSET.unpack(shared)[0]  # type: ignore[attr-defined]
    return run_daemon(arguments)
