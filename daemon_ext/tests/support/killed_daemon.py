"""Starts daemons one after the other, and lets them end themselves by SIGKILL at a chosen step.

A program of its own. It has the daemon imported once and forks for each start, so a start costs
milliseconds. Each line of its input is an order, a JSON object:

    arguments   the daemon's command line
    log         the file for what the daemon prints
    thread      "main" or "worker": whose calls are counted
    event       "c_call" or "c_return": before or after the call
    calls       names of the built-in functions that are counted
    caller      where given: count only calls from a function of this name
    after       the daemon is killed at the call of this number; 0: never

It prints the process id of the daemon, and its exit status, or minus a signal, once it has ended. The
id is not given to another process before the next order, so it may be signalled without care.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from hypercache_daemon.__main__ import main


def count_down(order: dict[str, Any]) -> None:
    """Kill this process at the chosen call; the interpreter's own profiler hook sees every one."""
    event, calls, caller, left = order["event"], set(order["calls"]), order.get("caller"), order["after"]

    def see(frame: FrameType, what: str, called: Any) -> None:
        nonlocal left
        if what == event and called.__name__ in calls and caller in (None, frame.f_code.co_name):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if order["thread"] == "main":
        sys.setprofile(see)
    else:
        threading.setprofile(see)


def run(order: dict[str, Any]) -> int:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if order.get("after"):
        count_down(order)
    return main(order["arguments"])


pid = 0
for text in sys.stdin:
    if pid:
        os.waitpid(pid, 0)
    received = json.loads(text)
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(run(received))
        finally:
            os._exit(70)
    print(pid, flush=True)
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    print(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status, flush=True)
