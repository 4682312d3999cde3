"""What a seeded fault is: a daemon behind a relay that spoils something, and the check that must see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .relay import Passage


@dataclass(frozen=True)
class Fault:
    """`check` is the name of a check that must fail, and `words` are in what it says.

    `passages` makes, for one relay, what makes the passage of each of its connections: what the passages
    of one relay share is anew for the next.
    """

    check: str
    words: str
    passages: Callable[[], Callable[[int], Passage]]
