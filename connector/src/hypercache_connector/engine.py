"""What the operations work with, and how they ask the daemon.

Rule: an exchange that breaks off says the same of every request in it; none of its replies can be trusted.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hypercache_protocol import LocalProtocolError, SyncStatus, Tier
from hypercache_protocol.messages import GetWriteStatus, Locate, Request, WriteStatusReply

from .client import Client
from .connection import DaemonUnavailable
from .devices import Devices
from .layouts import Answer, ChunkTransfer
from .outcomes import Counters, Outcome, ThrottledLog
from .workers import ChunkWorkers

_Answer = TypeVar("_Answer")

ANY_DAEMON: frozenset[str] = frozenset()
LOAD_NEEDS = frozenset({"chunk_checksums", "sync_status"})
STORE_NEEDS = LOAD_NEEDS | {"local_only", "stage_id"}

_UNVERIFIABLE = (Outcome.NO_CHECKSUM, Outcome.UNVERIFIABLE)

_ERRORS = {errno.EIO: Outcome.IO_ERROR, errno.ENOSPC: Outcome.NO_SPACE, errno.EDQUOT: Outcome.NO_SPACE}


@dataclass(frozen=True)
class Engine:
    """What the operations work with. `seals` is the mode in which a daemon without checksums is used."""

    client: Client
    devices: Devices
    readers: ChunkWorkers
    writers: ChunkWorkers
    counters: Counters
    log: ThrottledLog
    tier: Tier = Tier.NVME
    overwrite: bool = False
    seals: bool = False
    transfer_timeout_s: float = 30.0

    @property
    def load_needs(self) -> frozenset[str]:
        """What a daemon must have for its objects to be verifiable; a seal needs nothing of it."""
        return ANY_DAEMON if self.seals else LOAD_NEEDS


def exchanged(
    engine: Engine, requests: Sequence[Request], needs: frozenset[str] = ANY_DAEMON
) -> list[Answer]:
    """What came of each request."""
    return answered(engine, len(requests), lambda: engine.client.exchange(requests, needs=needs))


def answered(engine: Engine, count: int, ask: Callable[[], Sequence[_Answer]]) -> list[_Answer | Outcome]:
    """What `ask` gives, or `count` times why there is no answer; that is logged."""
    try:
        return list(ask())
    except DaemonUnavailable as error:
        _note_unavailable(engine, error)
        return [error.outcome] * count
    except LocalProtocolError as error:
        engine.log.note("unsendable", "a request cannot be sent: %s", error)
        return [Outcome.INTERNAL_ERROR] * count


def _note_unavailable(engine: Engine, error: DaemonUnavailable) -> None:
    if error.outcome is not Outcome.DAEMON_TOO_OLD:
        engine.log.note(error.outcome.value, "%s: %s", engine.client.socket_path, error)
    elif not engine.seals:  # else a seal stands for what the daemon lacks
        text = "%s: %s, or turn on 'seal_for_old_daemons'"
        engine.log.note(error.outcome.value, text, engine.client.socket_path, error)


def located(engine: Engine, uris: Sequence[str]) -> list[Answer]:
    """Where the daemon says each uri lies; nothing is fetched from a backend."""
    return exchanged(engine, [Locate(uri=uri, auto_ingest=False) for uri in uris], engine.load_needs)


def committed(engine: Engine, uris: Sequence[str]) -> list[Outcome]:
    """OK for each uri unless the daemon says that nothing was committed under it (STAGED) or gives no
    answer. For daemons whose locate tells no state: this question is as old as the wire."""
    return [_state(reply) for reply in exchanged(engine, [GetWriteStatus(uri=uri) for uri in uris])]


def _state(reply: Answer) -> Outcome:
    match reply:
        case Outcome():
            return reply
        case WriteStatusReply(sync_status=SyncStatus.STAGED):
            return Outcome.STAGED
        case _:
            return Outcome.OK


def count(engine: Engine, group: str, outcomes: Sequence[Outcome]) -> None:
    """Count what came of each key of a lookup or load, and say in the log what unverifiable ones may be."""
    counted = engine.counters.add_outcomes(group, outcomes)
    unverifiable = sum(counted.get(outcome.value, 0) for outcome in _UNVERIFIABLE)
    if unverifiable:
        engine.log.note(
            "unverifiable",
            "%d of %d objects have no checksums, so they are misses until they are stored anew%s",
            unverifiable,
            len(outcomes),
            "" if engine.seals else "; those that were sealed can be loaded with 'seal_for_old_daemons'",
        )


def transfer_failed(engine: Engine, transfer: ChunkTransfer, error: OSError) -> Outcome:
    """The outcome of a chunk whose transfer raised `error`."""
    if transfer.tier is Tier.RAM:
        return _ram_transfer_failed(engine, transfer, error)
    engine.devices.forget(transfer.device)  # it may be closed, replaced or gone
    engine.log.note(f"device {transfer.device}", "%s: %s", transfer.device, error.strerror)
    return _ERRORS.get(error.errno or 0, Outcome.DEVICE_FAILED)


def _ram_transfer_failed(engine: Engine, transfer: ChunkTransfer, error: OSError) -> Outcome:
    # A file vanishes with its object, so mostly this is an eviction that came first. Without its folder
    # it is this process that sees another file system than the daemon.
    if error.errno == errno.ENOENT and Path(transfer.device).parent.is_dir():
        return Outcome.RAM_FILE_GONE
    engine.log.note("ram", "%s: %s", transfer.device, error.strerror)
    return _ERRORS.get(error.errno or 0, Outcome.DEVICE_FAILED)
