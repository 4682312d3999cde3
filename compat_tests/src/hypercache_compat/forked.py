"""Processes that have the daemon imported when they begin: a start costs milliseconds, not half a second.

One process imports it and forks for each start (the standard library's fork server). The code that runs is
the same; what only a new interpreter shows (its environment, its imports) is not. So tests alone start
daemons this way, and some of them don't.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import ParamSpec

_P = ParamSpec("_P")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["hypercache_daemon.command"])


class ForkedProcess:
    """A started process, with as much of `subprocess.Popen` as whoever starts a daemon needs."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    def poll(self) -> int | None:
        """The exit status, minus the signal if one ended it, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        """Signal the process, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended by itself, and its status is on its way
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            self._process.kill()


def fork(log: Path, function: Callable[_P, int], *args: _P.args, **kwargs: _P.kwargs) -> ForkedProcess:
    """A process that calls `function` and ends with the status that it returns.

    Args:
        log: gets what it prints, after what is there.
        function: is found by its name in its module, as are classes of its arguments.
    """
    process = _context.Process(target=_run, args=(str(log), function, args, kwargs), daemon=True)
    process.start()
    return ForkedProcess(process)


def fork_daemon(arguments: Sequence[str], log: Path) -> ForkedProcess:
    """hypercached with these command-line arguments."""
    return fork(log, run_daemon, list(arguments))


def run_daemon(arguments: Sequence[str]) -> int:
    """hypercached in this process; the exit status."""
    from hypercache_daemon.command import main  # not where it is only asked for

    return main(arguments)


def _run(log: str, function: Callable[..., int], args: Sequence[object], kwargs: dict[str, object]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.exit(function(*args, **kwargs))
