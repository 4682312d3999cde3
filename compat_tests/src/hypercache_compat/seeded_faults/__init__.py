"""Faults that a daemon could have, made by a relay that alters what is said, and which check sees each.

The modules are named as those of the conformance suite whose checks they are for; each check has one.
"""

from __future__ import annotations

from . import (
    actions,
    additions,
    frames,
    hello,
    hostile,
    many,
    presence,
    restarts,
    sessions,
    transport,
    writing,
)
from .rules import Fault

FAULTS: dict[str, Fault] = {
    **transport.FAULTS,
    **actions.FAULTS,
    **writing.FAULTS,
    **additions.FAULTS,
    **hello.FAULTS,
    **frames.FAULTS,
    **hostile.FAULTS,
    **sessions.FAULTS,
    **many.FAULTS,
    **presence.FAULTS,
    **restarts.FAULTS,
}
"""What is wrong -> how, and which check says so."""
