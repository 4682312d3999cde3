"""Waiting for what comes true by itself: with a deadline, and no longer than it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 30.0
_LOOK_AGAIN_S = 0.005


def wait_until(
    holds: Callable[[], bool], what: str = "what is waited for happened", deadline_s: float = DEADLINE_S
) -> None:
    """Raise AssertionError, which says `what`, where it does not come true in time."""
    deadline = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"it did not come true in {deadline_s:g} s that {what}")
        # No fixed wait: it ends with the look that finds it true. What is waited for here announces nothing.
        time.sleep(_LOOK_AGAIN_S)
