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
from itertools import repeat
from operator import add

from hypercache_protocol.batches import PresenceTableReply
from hypercache_protocol.presence import FORMAT, Geometry, Presence, TableView

from .outcomes import Outcome

_OUTCOMES = {
    Presence.VERIFIABLE: Outcome.OK,
    Presence.UNVERIFIABLE: Outcome.UNVERIFIABLE,
    Presence.ABSENT: Outcome.ABSENT,
}
_BY_STATE = tuple([_OUTCOMES[state] for state in sorted(Presence)])


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

    def look_up(self, prefix: str, suffixes: Sequence[str]) -> list[Outcome] | None:
        """What a lookup of each uri comes to, which is `prefix` and one of `suffixes`; None where only the
        daemon can tell."""
        states = self._view.look_up(list(map(add, repeat(prefix), suffixes)))
        if self._view.unplaced and Presence.ABSENT in states:
            return None
        return list(map(_BY_STATE.__getitem__, states))


def _check_sealed(descriptor: int) -> None:
    # Memory that shrinks would end this process with a SIGBUS at the next look.
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("the table's memory may shrink")
