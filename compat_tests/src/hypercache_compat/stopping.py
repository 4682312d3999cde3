"""How commands end where they are told to: by an exception, so that whatever they started and made is gone
afterwards, and with an exit status of its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

STOPPED = 130
"""The exit status of a command that was stopped."""


def stoppable(command: Callable[[], int]) -> int:
    """The exit status of `command`; Ctrl-C and SIGTERM end it once it has cleaned up."""
    try:
        with on_signals(interrupt):
            return command()
    except KeyboardInterrupt:
        _end_children()
        print("\nstopped; what was started is ended, and what was made is removed", file=sys.stderr)
        return STOPPED


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGINT, also where a shell had it ignored, and SIGTERM end the command as `handler` says."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, held in before.items():
            signal.signal(number, held)


def interrupt(number: int, _frame: FrameType | None) -> None:
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt(number)


def _end_children() -> None:
    """End what is still running: the signal may have come while a child was made and nobody held it yet."""
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
