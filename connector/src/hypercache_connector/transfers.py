"""Lookup, load and delete of a batch of keys, as plain functions that return when all is done.
(storing.py has the store.)

Rules:
1. Each key has an outcome of its own; what goes wrong with one never fails another. Only an exchange with
   the daemon that breaks off fails every key in it: none of its replies can be trusted.
2. A load is OK only if every chunk was read whole and its bytes in the caller's buffer sum up to the
   checksum that the commit gave. What a buffer holds after a miss is undefined.
3. Bytes move straight between the caller's buffers and the devices, all chunks of a batch side by side.
4. A store is OK only once the daemon acknowledged the commit.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from hypercache_protocol import LocalProtocolError, Tier
from hypercache_protocol.messages import Evict, EvictedReply, Locate, Request

from .checksum import crc32
from .client import Client
from .connection import DaemonUnavailable
from .devices import Devices
from .direct_io import Buffer
from .layouts import Answer, ChunkTransfer, chunks_of, doubt_about, interleaved, refusal, transfers
from .outcomes import Counters, Outcome, ThrottledLog
from .workers import ChunkWorkers

_Answer = TypeVar("_Answer")

LOAD_NEEDS = frozenset({"chunk_checksums", "sync_status"})
STORE_NEEDS = LOAD_NEEDS | {"local_only", "stage_id"}

_DAMAGE = frozenset(
    {Outcome.CHECKSUM_MISMATCH, Outcome.SHORT_TRANSFER, Outcome.RAM_FILE_GONE, Outcome.IO_ERROR}
)
"""What says that the stored bytes are lost. A device that this process can't open is another matter: it
may be its own permissions, and others may read the object."""

_ERRORS = {errno.EIO: Outcome.IO_ERROR, errno.ENOSPC: Outcome.NO_SPACE, errno.EDQUOT: Outcome.NO_SPACE}


@dataclass(frozen=True)
class Engine:
    """What the operations work with."""

    client: Client
    devices: Devices
    readers: ChunkWorkers
    writers: ChunkWorkers
    counters: Counters
    log: ThrottledLog
    tier: Tier = Tier.NVME
    overwrite: bool = False
    transfer_timeout_s: float = 30.0


# -- lookup and delete -----------------------------------------------------------------------------------


def lookup(engine: Engine, uris: Sequence[str]) -> list[Outcome]:
    """OK for each uri that a load could verify now; all are asked for in one exchange."""
    outcomes = _answered(engine, len(uris), lambda: engine.client.lookup(uris, needs=LOAD_NEEDS))
    engine.counters.add_outcomes("lookups", outcomes)
    return outcomes


def delete(engine: Engine, uris: Sequence[str]) -> list[Outcome]:
    """OK for each uri that was deleted, ABSENT for one that was not there."""
    replies = exchanged(engine, [Evict(uri=uri) for uri in uris])
    outcomes = [Outcome.OK if isinstance(reply, EvictedReply) else refusal(reply) for reply in replies]
    engine.counters.add_outcomes("deletes", outcomes)
    return outcomes


# -- load ------------------------------------------------------------------------------------------------


def load(engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
    """Fill each buffer with its uri's object; OK where the bytes in it were verified.

    Args:
        buffers: one writable buffer per uri, of exactly the object's size.
    """
    deadline = time.monotonic() + engine.transfer_timeout_s
    hits = located(engine, uris)
    doubts = [doubt_about(hit, buffer.size_bytes) for hit, buffer in zip(hits, buffers, strict=True)]
    planned = interleaved(
        [
            transfer
            for index, (hit, doubt) in enumerate(zip(hits, doubts, strict=True))
            if doubt is Outcome.OK
            for transfer in transfers(index, chunks_of(hit), buffers[index])
        ]
    )
    results = engine.readers.map(partial(_read_chunk, engine, deadline), planned, Outcome.CLOSED)
    outcomes = _settled(hits, doubts, planned, results)
    _count_loads(engine, buffers, outcomes)
    damaged = {transfer.index for transfer, result in zip(planned, results, strict=True) if result in _DAMAGE}
    _heal(engine, [(uris[index], hits[index]) for index in sorted(damaged)])
    return outcomes


def _count_loads(engine: Engine, buffers: Sequence[Buffer], outcomes: Sequence[Outcome]) -> None:
    loaded = (buffer.size_bytes for buffer, each in zip(buffers, outcomes, strict=True) if each.good)
    engine.counters.add("bytes", "loaded", sum(loaded))
    engine.counters.add_outcomes("loads", outcomes)


def _read_chunk(engine: Engine, deadline: float, transfer: ChunkTransfer) -> Outcome:
    if time.monotonic() >= deadline:
        return Outcome.TRANSFER_LATE
    view = transfer.part.view
    try:
        moved = engine.devices.read(transfer.device, transfer.tier, transfer.part, transfer.offset)
    except OSError as error:
        return transfer_failed(engine, transfer, error)
    if moved != len(view):
        return Outcome.SHORT_TRANSFER
    return Outcome.OK if crc32(view) == transfer.checksum else Outcome.CHECKSUM_MISMATCH


def _settled(
    hits: Sequence[Answer],
    doubts: Sequence[Outcome],
    planned: Sequence[ChunkTransfer],
    results: Sequence[Outcome],
) -> list[Outcome]:
    """The outcome of each key: its doubt if there was one, else the first failure among its chunks, and OK
    only if as many chunks were verified as it has."""
    verified: Counter[int] = Counter()
    failures: dict[int, Outcome] = {}
    for transfer, result in zip(planned, results, strict=True):
        if result is Outcome.OK:
            verified[transfer.index] += 1
        else:
            failures.setdefault(transfer.index, result)
    for index, doubt in enumerate(doubts):
        if doubt is Outcome.OK and verified[index] != len(chunks_of(hits[index])):
            failures.setdefault(index, Outcome.INTERNAL_ERROR)
    return [failures.get(index, doubt) for index, doubt in enumerate(doubts)]


def _heal(engine: Engine, damaged: Sequence[tuple[str, Answer]]) -> None:
    """Evict what was read and found damaged, so that a lookup says no and a store writes it anew."""
    if not damaged:
        return
    for _, reply in damaged:
        for chunk in chunks_of(reply):
            if chunk.tier is Tier.NVME:
                engine.devices.forget(chunk.device)  # the path may name another file by now
    # Replaced while it was read, an object is sound and stays; that it missed once is all.
    now = located(engine, [uri for uri, _ in damaged])
    still = [uri for (uri, reply), again in zip(damaged, now, strict=True) if again == reply]
    evicted = exchanged(engine, [Evict(uri=uri) for uri in still])
    engine.counters.add("healing", "evicted", sum(isinstance(reply, EvictedReply) for reply in evicted))


# -- with the daemon -------------------------------------------------------------------------------------


def exchanged(
    engine: Engine, requests: Sequence[Request], needs: frozenset[str] = frozenset()
) -> list[Answer]:
    """What came of each request. An exchange that broke off says the same of all of them."""
    return _answered(engine, len(requests), lambda: engine.client.exchange(requests, needs=needs))


def _answered(engine: Engine, count: int, ask: Callable[[], Sequence[_Answer]]) -> list[_Answer | Outcome]:
    try:
        return list(ask())
    except DaemonUnavailable as error:
        engine.log.note(error.outcome.value, "%s: %s", engine.client.socket_path, error)
        return [error.outcome] * count
    except LocalProtocolError as error:
        engine.log.note("unsendable", "a request cannot be sent: %s", error)
        return [Outcome.INTERNAL_ERROR] * count


def located(engine: Engine, uris: Sequence[str]) -> list[Answer]:
    """Where the daemon says each uri lies; nothing is fetched from a backend."""
    return exchanged(engine, [Locate(uri=uri, auto_ingest=False) for uri in uris], LOAD_NEEDS)


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
