"""The daemon's presence table: lookups that need neither a thread nor an exchange.

Rules:
1. The table is a hint. What it says to be there is verified when it is loaded, like anything else.
2. A table that could change its size under this process, or has not the size that it claims, is not used.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

from hypercache_protocol.batches import PresenceTableReply
from hypercache_protocol.presence import FORMAT, Geometry, Presence, TableView

from .outcomes import Outcome, tally

_OUTCOMES = {
    int(Presence.VERIFIABLE): Outcome.OK,
    int(Presence.UNVERIFIABLE): Outcome.UNVERIFIABLE,
    int(Presence.ABSENT): Outcome.ABSENT,
}
_is_verifiable = int(Presence.VERIFIABLE).__eq__


class Seen(NamedTuple):
    """What a look came to: whether each uri could be loaded, and how often each outcome came of them."""

    good: list[bool]
    counted: dict[Outcome, int]


class UnusableTable(Exception):
    """The sentence says why."""


class PresenceTable:
    """What a daemon has, as it is at each look.

    Args:
        descriptor: of the memory; it stays the caller's.

    Raises:
        UnusableTable: it is not what `reply` says, or could become something else.
    """

    def __init__(self, reply: PresenceTableReply, descriptor: int) -> None:
        if reply.table_format != FORMAT:
            raise UnusableTable(f"the table has format {reply.table_format}, not {FORMAT}")
        try:
            geometry = Geometry(reply.seed, reply.buckets)
            _check_sealed(descriptor)
            memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ)
            self._view = TableView(memoryview(memory), geometry)
        except (OSError, ValueError) as error:
            raise UnusableTable(str(error)) from None

    def look_up(self, uris: Sequence[bytes]) -> Seen | None:
        """What a lookup of these comes to; None where only the daemon can tell."""
        states = self._view.look_up(uris)
        counted = {_OUTCOMES[state]: count for state, count in tally(states).items()}
        if Outcome.ABSENT in counted and self._view.unplaced:
            return None
        return Seen(list(map(_is_verifiable, states)), counted)


def _check_sealed(descriptor: int) -> None:
    # Memory that shrinks would end this process with a SIGBUS at the next look.
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("the table's memory may shrink")
