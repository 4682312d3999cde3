"""What the operations work with, how they ask the daemon, and how all of it is opened and closed.

Rules:
1. An exchange that breaks off says the same of every request in it; none of its replies can be trusted.
2. After `close_engine` returned, no thread of the engine touches a caller's buffer.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from hypercache_protocol import ErrorCode, LocalProtocolError, SyncStatus, Tier, checksum
from hypercache_protocol.batches import BatchRequest, LocateMany
from hypercache_protocol.messages import ErrorReply, GetWriteStatus, Reply, Request, WriteStatusReply

from .client import Client
from .config import EngineConfig
from .devices import Devices
from .layouts import Answer, Chunk
from .outcomes import Counters, DaemonUnavailable, Outcome, ThrottledLog, logger, tally
from .processes import Process, this_process
from .workers import ChunkWorkers, join_all
from .write_gate import WriteGate

_Answer = TypeVar("_Answer")

ANY_DAEMON: frozenset[str] = frozenset()
LOAD_NEEDS = frozenset({"chunk_checksums", "sync_status"})
STORE_NEEDS = LOAD_NEEDS | {"local_only", "stage_id"}

_ORDINARY = (ErrorCode.STALE_STAGE, ErrorCode.NOT_STAGED, ErrorCode.NOT_FOUND)
"""What a refusal may say where nothing is wrong but the moment."""

_UNVERIFIABLE = frozenset({Outcome.NO_CHECKSUM, Outcome.UNVERIFIABLE})

_ERRORS = {
    errno.EIO: Outcome.IO_ERROR,
    errno.ENOSPC: Outcome.NO_SPACE,
    errno.EDQUOT: Outcome.NO_SPACE,
    errno.ENOMEM: Outcome.NO_MEMORY,
}


@dataclass(frozen=True)
class Engine:
    """What the operations work with, and how they store: in which `tier`, `pinned` or not, to the backend
    too (`write_through`) or local-only. `seals` is the mode in which a daemon without checksums is used, and
    `offers_seals` whether it could be turned on. No chunk begins after `late_at` (monotonic)."""

    client: Client
    devices: Devices
    readers: ChunkWorkers
    writers: ChunkWorkers
    gate: WriteGate
    counters: Counters
    log: ThrottledLog
    transfer_timeout_s: float
    close_timeout_s: float
    tier: Tier = Tier.NVME
    overwrite: bool = False
    pinned: bool = False
    write_through: bool = False
    seals: bool = False
    offers_seals: bool = True
    late_at: float = math.inf
    process: Process = field(default_factory=this_process)

    @property
    def is_at_home(self) -> bool:
        """Whether this is the process that made it: a forked child has none of its threads, and a lock that
        one of them held will never be released there."""
        return self.process == this_process()

    @property
    def load_needs(self) -> frozenset[str]:
        """What a daemon must have for its objects to be verifiable; a seal needs nothing of it."""
        return ANY_DAEMON if self.seals else LOAD_NEEDS

    def deadline(self, begun_s: float) -> float:
        """When chunks of a batch that was begun then may begin no more (both monotonic)."""
        return min(begun_s + self.transfer_timeout_s, self.late_at)


# -- the beginning and the end ----------------------------------------------------------------------------


def open_engine(settings: EngineConfig) -> Engine:
    """An engine with threads of its own. Nothing is connected before the first exchange.

    Raises:
        RuntimeError: there are not so many threads to be had; none is left.
    """
    counters, log = Counters(), ThrottledLog()
    devices = Devices(settings.direct_io, counters, log)
    client = Client(
        settings.socket_path,
        settings.timeout_s,
        probe_interval_s=settings.probe_interval_s,
        on_new_instance=devices.forget_all,
        version=settings.wire,
    )
    readers = ChunkWorkers("hypercache-read", settings.read_workers)
    try:
        writers = ChunkWorkers("hypercache-write", settings.write_workers)
    except BaseException:  # Ctrl-C too: nobody could end these threads any more
        readers.close()
        raise
    return Engine(
        client=client,
        devices=devices,
        readers=readers,
        writers=writers,
        gate=WriteGate(settings.write_share, counters),
        counters=counters,
        log=log,
        transfer_timeout_s=settings.transfer_timeout_s,
        close_timeout_s=settings.close_timeout_s,
    )


def close_engine(engine: Engine, *, loading: Iterable[Thread] = (), others: Iterable[Thread] = ()) -> None:
    """Break off exchanges, begin no more chunks, and wait for those that are on their way.

    After `close_timeout_s` a write that the device still holds is given up: it will never be committed. A
    read is not: the device could yet write into memory that has another owner by then. Each further
    `close_timeout_s` of waiting for it is logged as an error.

    Args:
        loading: further threads that read from devices; `others`: further ones that are to end.
    """
    deadline = time.monotonic() + engine.close_timeout_s
    engine.readers.close()
    engine.writers.close()
    engine.gate.close()
    engine.client.close()
    reading = [*loading, *engine.readers.threads]
    while left := join_all(reading, deadline):
        logger.error("%s: a device does not give back what it was asked to read; waiting on", left[0].name)
        deadline = time.monotonic() + engine.close_timeout_s
    for thread in join_all([*others, *engine.writers.threads], deadline):
        logger.error("%s: a device does not finish what it was given to write; giving it up", thread.name)
    engine.devices.forget_all()


def report(engine: Engine) -> dict[str, Any]:
    """Counts per reason, and how the daemon is; README.md explains each."""
    client = engine.client
    return {
        **engine.counters.snapshot(),
        "ignored": client.ignored(),
        "daemon": {
            "instance_id": client.instance_id,
            "features": sorted(client.features),
            "wire": str(client.wire) if client.wire else None,
            "breaker_open": client.breaker_open,
        },
        "devices_refusing_direct_io": engine.devices.refusing_direct(),
        "checksum_library": checksum.LIBRARY,
    }


def require_home(engine: Engine, what: str) -> None:
    """
    Raises:
        RuntimeError: this is a forked child of the process that made the engine; `what` names its owner.
    """
    if not engine.is_at_home:
        raise RuntimeError(
            f"this {what} was made by process {engine.process[0]}, and its threads are there: make one "
            "in each forked child"
        )


# -- asking -----------------------------------------------------------------------------------------------


def asked(engine: Engine, many: BatchRequest, needs: frozenset[str] = ANY_DAEMON) -> list[Answer]:
    """What came of each uri. A refusal for the daemon's own reasons is logged with its sentence."""
    answers = answered(engine, len(many.suffixes), lambda: engine.client.ask(many, needs=needs))
    _note_refusals(engine, answers)
    return answers


def exchanged(engine: Engine, requests: Sequence[Request]) -> list[Reply | Outcome]:
    """What came of each request, of which none asks for layouts. Refusals are logged as above."""
    replies = answered(engine, len(requests), lambda: engine.client.exchange(requests))
    _note_refusals(engine, replies)
    return replies


def _note_refusals(engine: Engine, answers: Sequence[Answer]) -> None:
    for answer in answers:
        # By its type, since isinstance asks pydantic, and this looks at every answer.
        if type(answer) is ErrorReply and answer.error_code not in _ORDINARY:
            # A full pool is said again and again, and must not hide what else is wrong.
            subject = "full" if answer.error_code is ErrorCode.NO_SPACE else "refused"
            engine.log.note(
                subject, "%s: the daemon refuses: %s", engine.client.socket_path, answer.error_message
            )
            break


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
        advice = ", or turn on 'seal_for_old_daemons'" if engine.offers_seals else ""
        engine.log.note(error.outcome.value, "%s: %s%s", engine.client.socket_path, error, advice)


def located(engine: Engine, uris: Sequence[str]) -> list[Answer]:
    """Where the daemon says each uri lies; nothing is fetched from a backend."""
    return asked(engine, LocateMany.trusted(suffixes=tuple(uris), layouts=True), engine.load_needs)


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
    """Count what came of each key of an operation, and say in the log what unverifiable ones may be."""
    count_tallied(engine, group, tally(outcomes))


def count_tallied(engine: Engine, group: str, counted: Mapping[Outcome, int]) -> None:
    """The same for who knows already how often each outcome was there."""
    engine.counters.add_outcomes(group, counted)
    if not _UNVERIFIABLE.isdisjoint(counted):
        advice = "; those that were sealed can be loaded with 'seal_for_old_daemons'"
        engine.log.note(
            "unverifiable",
            "%s: %d of %d objects have no checksums or no commit, so they are misses until stored anew%s",
            engine.client.socket_path,
            sum(counted.get(outcome, 0) for outcome in _UNVERIFIABLE),
            sum(counted.values()),
            advice if engine.offers_seals and not engine.seals else "",
        )


def transfer_failed(engine: Engine, chunk: Chunk, error: OSError) -> Outcome:
    """The outcome of a chunk whose transfer raised `error`."""
    if chunk.tier is Tier.RAM:
        return _ram_transfer_failed(engine, chunk, error)
    engine.devices.forget(chunk.device)  # it may be closed, replaced or gone
    engine.log.note(f"device {chunk.device}", "%s: %s", chunk.device, error.strerror)
    return _ERRORS.get(error.errno or 0, Outcome.DEVICE_FAILED)


def _ram_transfer_failed(engine: Engine, chunk: Chunk, error: OSError) -> Outcome:
    # A file vanishes with its object, so mostly this is an eviction that came first. Without its folder
    # it is this process that sees another file system than the daemon.
    if error.errno == errno.ENOENT and Path(chunk.device).parent.is_dir():
        return Outcome.RAM_FILE_GONE
    engine.log.note("ram", "%s: %s", chunk.device, error.strerror)
    return _ERRORS.get(error.errno or 0, Outcome.DEVICE_FAILED)
