"""What one behaviour of one client with one daemon may come to, and the daemons that clients meet.

Rule: only a sentence that names both versions makes less than all of it acceptable. What is less and says
nothing is a failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from hypercache_protocol.versions import LATEST, RELEASED

from .daemon_process import DaemonOptions, DaemonProcess, running_daemon
from .grease import Greased
from .relay import FROM_CLIENT, FROM_DAEMON, relaying


class Verdict(Enum):
    """How a behaviour went; the value is the word in the table."""

    WORKS = "works"
    DEGRADES = "degrades"
    REFUSES = "refuses"
    FAILS = "FAILS"


@dataclass(frozen=True)
class Seen:
    """A verdict, and what the client said where it is not "works"."""

    verdict: Verdict
    said: str = ""


WORKS = Seen(Verdict.WORKS)


def less(verdict: Verdict, said: str) -> Seen:
    """A behaviour that is not all there; a failure where `said` does not name two versions."""
    named = set(re.findall(r"wire (\d+\.\d+)", said))
    return Seen(verdict, said) if len(named) == 2 else Seen(Verdict.FAILS, f"says only: {said!r}")


def checked(right: bool, what: str) -> Seen:
    """WORKS if `right`, else a failure that says `what`."""
    return WORKS if right else Seen(Verdict.FAILS, what)


# -- daemons -------------------------------------------------------------------------------------------

WHOLE = f"daemon, wire {LATEST}"
GREASED = f"{WHOLE}, behind grease"
DAEMONS = {
    WHOLE: LATEST,
    **{f"daemon held to {version}": version for version in reversed(RELEASED) if version < LATEST},
}
"""Label -> the newest wire that it speaks."""


@dataclass(frozen=True)
class Meeting:
    """A daemon, and the path at which clients reach it."""

    label: str
    daemon: DaemonProcess
    path: str


@contextmanager
def meeting(label: str) -> Iterator[Meeting]:
    """One of DAEMONS, running."""
    options = DaemonOptions(pool_size="512MiB", extra=("--wire", str(DAEMONS[label])))
    with running_daemon(options) as daemon:
        yield Meeting(label, daemon, daemon.socket_path)


@contextmanager
def greased_meeting(held: Meeting) -> Iterator[tuple[Meeting, list[Greased]]]:
    """The same daemon behind a relay that adds to every message, and what watches its connections."""
    passages: list[Greased] = []

    def passage(number: int) -> Greased:
        passages.append(Greased(number))
        return passages[-1]

    path = str(held.daemon.folder / "grease")
    with relaying(path, held.path, passage):
        yield Meeting(GREASED, held.daemon, path), passages


def grease_was_met(passages: list[Greased]) -> bool:
    """Whether messages of both sides were added to, on lines and in frames."""
    kinds = [[one for one in passages if one.framed is framed] for framed in (False, True)]
    return all(
        sum(one.greased[side] for one in kind) for kind in kinds for side in (FROM_CLIENT, FROM_DAEMON)
    )
