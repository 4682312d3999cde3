"""What a check is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypercache_compat import waiting

if TYPE_CHECKING:
    from .scene import Scene

DEADLINE_S = 30.0


class Failed(AssertionError):
    """What was to be shown does not hold; the text is the sentence for it."""


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Args:
        run: raises Failed where it does not hold.
        proves: one sentence.
        fault: one of the connector's faults (`connector_faults.FAULTS`) with which it must fail.
        is_long: takes long, or a daemon or process of its own, so that `make test` leaves it out.
    """

    name: str
    theme: str
    run: Callable[[Scene], None]
    proves: str
    fault: str
    is_long: bool = False


def require(holds: bool, sentence: str) -> None:
    """Raise Failed with this sentence unless it holds."""
    if not holds:
        raise Failed(sentence)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait for what comes by itself; Failed after DEADLINE_S."""
    try:
        waiting.wait_until(holds, what, DEADLINE_S)
    except AssertionError as error:
        raise Failed(str(error)) from None
