"""The presence table in shared memory: written by the daemon alone, read by whoever gets its descriptor.

Rules:
1. Its size never changes and no client can write to it: it is sealed before anybody gets it.
2. It has no name. Who may connect gets it over the socket; nothing of it outlives the daemon and its readers.
3. Its memory is taken at once: were some missing later, that would end whoever touches it, reader or daemon.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
from dataclasses import dataclass

from hypercache_protocol.batches import PresenceTableReply
from hypercache_protocol.presence import BUCKET_WORDS, FORMAT, HEADER_BYTES, Geometry, TableView

log = logging.getLogger(__name__)

_BUCKET_BYTES = BUCKET_WORDS * 8
_FILLED = 4
"""Words for each object that is expected: in a quarter of the places hardly any finds both buckets full."""
_FEWEST_OBJECTS = 1 << 14
_SEAL_FUTURE_WRITE = 0x0010  # fcntl has no name for it before Python 3.13
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


def geometry_for(objects: int, most_bytes: int) -> Geometry | None:
    """A table for so many objects within `most_bytes`; None where not even one bucket fits."""
    wanted = -(-max(objects, _FEWEST_OBJECTS) * _FILLED // BUCKET_WORDS)
    possible = (most_bytes - HEADER_BYTES) // _BUCKET_BYTES
    if possible < 1:
        return None
    return Geometry(secrets.randbits(63), min(1 << (wanted - 1).bit_length(), 1 << possible.bit_length() - 1))


@dataclass(frozen=True)
class SharedTable:
    """A table, and the descriptor that clients are given."""

    descriptor: int
    view: TableView

    def reply(self) -> PresenceTableReply:
        """What goes with the descriptor."""
        geometry = self.view.geometry
        return PresenceTableReply(table_format=FORMAT, seed=geometry.seed, buckets=geometry.buckets)

    def close(self) -> None:
        """Let go of it; who has it keeps it."""
        os.close(self.descriptor)


def made(geometry: Geometry | None) -> SharedTable | None:
    """An empty table; None, and a sentence in the log, where this machine can't have one."""
    if geometry is None:
        return None
    try:
        return _made(geometry)
    except OSError as error:
        log.warning("no presence table, so clients ask for each lookup: %s", error)
        return None


def _made(geometry: Geometry) -> SharedTable:
    descriptor = os.memfd_create("hypercache-presence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, geometry.size_bytes)
        memory = mmap.mmap(descriptor, geometry.size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return SharedTable(descriptor, TableView(memoryview(memory), geometry))
    except BaseException:  # whatever it is, nobody else has the descriptor
        os.close(descriptor)
        raise
