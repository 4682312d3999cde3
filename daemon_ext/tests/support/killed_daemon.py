"""A daemon that ends itself by SIGKILL at a chosen step. It runs in a process of its own."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from hypercache_compat.forked import run_daemon


@dataclass(frozen=True)
class KillAt:
    """The step at which the daemon is killed.

    Args:
        after: the number of the call, counted from 1.
        thread: "main" or "worker": whose calls are counted.
        event: "c_call" or "c_return": before or after the call.
        calls: names of the built-in functions that are counted.
        caller: where given, only calls from a function of this name are counted.
    """

    after: int
    thread: str = "worker"
    event: str = "c_call"
    calls: Sequence[str] = ("execute",)
    caller: str | None = None


def run(arguments: Sequence[str], kill: KillAt | None, descriptors: tuple[int, int] | None) -> int:
    """hypercached with these arguments; it is born with these limits (soft, hard) of open files, if given."""
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
    if kill is not None:
        _count_down(kill)
    return run_daemon(arguments)


def _count_down(kill: KillAt) -> None:
    """Kill this process at the chosen call; the interpreter's own profiler hook sees every one."""
    left = kill.after

    def see(frame: FrameType, what: str, called: Any) -> None:
        nonlocal left
        if (
            what == kill.event
            and called.__name__ in kill.calls
            and kill.caller in (None, frame.f_code.co_name)
        ):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if kill.thread == "main":
        sys.setprofile(see)
    else:
        threading.setprofile(see)
