"""Lookup, load and delete of a batch of keys, as plain functions that return when all is done.
(storing.py has the store.)

Rules:
1. Each key has an outcome of its own; what goes wrong with one never fails another.
2. A load is OK only if every chunk was read whole and the bytes in the caller's buffer are what was stored:
   each chunk sums up to the checksum that the commit gave, or all of it to what the object's seal says. What
   a buffer holds after a miss is undefined.
3. Bytes move straight between the caller's buffers and the devices, all chunks of a batch side by side.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from hypercache_protocol import Tier
from hypercache_protocol.batches import EvictMany
from hypercache_protocol.checksum import crc32
from hypercache_protocol.messages import EvictedReply
from hypercache_protocol.states import DIRTY

from .direct_io import Buffer, sharing
from .engine import Engine, answered, asked, committed, count, located, transfer_failed
from .layouts import Answer, ChunkTransfer, Found, chunks_of, refusal, transfers
from .outcomes import Outcome
from .runs import Run, in_runs, mapped
from .sealed_objects import SealedObject, doubt_about_object, looked_up, needs_seal, sealed_object

_DAMAGE = frozenset(
    {Outcome.CHECKSUM_MISMATCH, Outcome.SHORT_TRANSFER, Outcome.RAM_FILE_GONE, Outcome.IO_ERROR}
)
"""What says that the stored bytes are lost. A device that this process can't open is another matter: it
may be its own permissions, and others may read the object."""

# -- lookup and delete -----------------------------------------------------------------------------------


def lookup(engine: Engine, uris: Sequence[str]) -> list[Outcome]:
    """OK for each uri that a load could verify now; all are asked for in one exchange. Where seals are
    looked for, also for what may be sealed."""
    outcomes = answered(engine, len(uris), lambda: engine.client.lookup(uris, needs=engine.load_needs))
    if engine.seals:
        outcomes = looked_up(engine, uris, outcomes)
    count(engine, "lookups", outcomes)
    return outcomes


def delete(engine: Engine, uris: Sequence[str]) -> list[Outcome]:
    """OK for each uri that was deleted, ABSENT for one that was not there."""
    replies = asked(engine, EvictMany.trusted(suffixes=tuple(uris)))
    outcomes = [Outcome.OK if isinstance(reply, EvictedReply) else refusal(reply) for reply in replies]
    count(engine, "deletes", outcomes)
    return outcomes


# -- load ------------------------------------------------------------------------------------------------


def load(engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
    """Fill each buffer with its uri's object; OK where the bytes in it were verified.

    Args:
        buffers: one writable buffer per uri, of exactly the object's size (of its payload's, if sealed). Of
            two with a byte in common one is a BAD_BUFFER.
    """
    hits = located(engine, uris)
    for index in sharing(buffers):  # else each took the other's bytes for damage, or they left a mix of both
        hits[index] = Outcome.BAD_BUFFER
    return load_located(engine, uris, hits, buffers)


def load_located(
    engine: Engine,
    uris: Sequence[str],
    hits: Sequence[Answer],
    buffers: Sequence[Buffer],
    take: Callable[[int], Outcome] | None = None,
) -> list[Outcome]:
    """The same where it was asked before what lies where: `hits` are what `located` gave for `uris`.

    Args:
        take: takes what was verified out of the buffer with that index, before it is counted as OK, and gives
            OK or why that failed.
    """
    deadline = engine.deadline(time.monotonic())
    doubts = [
        doubt_about_object(hit, uri, buffer.size_bytes, seals=engine.seals)
        for uri, hit, buffer in zip(uris, hits, buffers, strict=True)
    ]
    sealed: dict[int, SealedObject] = {}
    for index, (hit, doubt) in enumerate(zip(hits, doubts, strict=True)):
        if doubt is Outcome.OK and needs_seal(hit, seals=engine.seals):
            made = sealed_object(uris[index], buffers[index])
            if isinstance(made, SealedObject):
                sealed[index] = made
            else:
                doubts[index] = made
    planned = [
        transfer
        for index, (hit, doubt) in enumerate(zip(hits, doubts, strict=True))
        if doubt is Outcome.OK
        for transfer in _planned(index, hit, buffers[index], sealed.get(index))
    ]
    runs = in_runs(planned, engine.devices.needs_alignment)
    with engine.gate.loading():
        read = mapped(engine.readers, partial(_read_before_writes, engine, deadline), runs, Outcome.CLOSED)
    outcomes = _opened(engine, sealed, _settled(hits, doubts, read))
    if take:
        outcomes = [take(index) if each is Outcome.OK else each for index, each in enumerate(outcomes)]
    _count_loads(engine, buffers, outcomes, sealed)
    damaged = {
        transfer.key_index
        for transfer, result in read
        if result in _DAMAGE and not _is_dirty(hits[transfer.key_index])
    }
    damaged |= {index for index in sealed if outcomes[index] is Outcome.SEAL_BROKEN}
    _heal(engine, [(uris[index], hits[index]) for index in sorted(damaged)])
    return outcomes


def _planned(index: int, hit: Answer, buffer: Buffer, sealed: SealedObject | None) -> list[ChunkTransfer]:
    layout = chunks_of(hit)
    return sealed.transfers(index, layout) if sealed else transfers(index, layout, buffer)


def _count_loads(
    engine: Engine,
    buffers: Sequence[Buffer],
    outcomes: Sequence[Outcome],
    sealed: Mapping[int, SealedObject],
) -> None:
    loaded = (buffer.size_bytes for buffer, each in zip(buffers, outcomes, strict=True) if each.good)
    engine.counters.add("bytes", "loaded", sum(loaded))
    if sealed:
        engine.counters.add("sealed", "loaded", sum(outcomes[index].good for index in sealed))
    count(engine, "loads", outcomes)


def _read_before_writes(engine: Engine, deadline: float, run: Run) -> list[Outcome]:
    """The same as `_read_run`; what was read, rightly or not, earns writes that wait for it their turn."""
    outcomes = _read_run(engine, deadline, run)
    if engine.gate.waiting:
        engine.gate.loaded(sum(transfer.chunk.length for transfer in run))
    return outcomes


def _read_run(engine: Engine, deadline: float, run: Run) -> list[Outcome]:
    """For each chunk: OK where it was read and verified, NO_CHECKSUM where it was only read whole."""
    first = run[0].chunk
    if len(run) > 1 and first.tier is Tier.NVME and time.monotonic() < deadline:
        parts = [transfer.part for transfer in run]
        if engine.devices.read_run(first.device, parts, first.offset):
            return [_verified(transfer) for transfer in run]
    return [_read_chunk(engine, deadline, transfer) for transfer in run]


def _read_chunk(engine: Engine, deadline: float, transfer: ChunkTransfer) -> Outcome:
    if time.monotonic() >= deadline:
        return Outcome.TRANSFER_LATE
    chunk = transfer.chunk
    try:
        moved = engine.devices.read(chunk.device, chunk.tier, transfer.part, chunk.offset)
    except OSError as error:
        return transfer_failed(engine, chunk, error)
    return _verified(transfer) if moved == chunk.length else Outcome.SHORT_TRANSFER


def _verified(transfer: ChunkTransfer) -> Outcome:
    if transfer.chunk.checksum is None:
        return Outcome.NO_CHECKSUM
    is_right = crc32(transfer.part.view) == transfer.chunk.checksum
    return Outcome.OK if is_right else Outcome.CHECKSUM_MISMATCH


def _settled(
    hits: Sequence[Answer],
    doubts: Sequence[Outcome],
    read: Iterable[tuple[ChunkTransfer, Outcome]],
) -> list[Outcome]:
    """The outcome of each key: its doubt if there was one, else the first failure among its chunks, and OK
    only if as many chunks were verified as it has. NO_CHECKSUM says that nothing else failed."""
    verified: Counter[int] = Counter()
    failures: dict[int, Outcome] = {}
    for transfer, result in read:
        if result is Outcome.OK:
            verified[transfer.key_index] += 1
        elif failures.get(transfer.key_index, Outcome.NO_CHECKSUM) is Outcome.NO_CHECKSUM:
            failures[transfer.key_index] = result
    for index, doubt in enumerate(doubts):
        if doubt is Outcome.OK and verified[index] != len(chunks_of(hits[index])):
            failures.setdefault(index, Outcome.INTERNAL_ERROR)
    return [failures.get(index, doubt) for index, doubt in enumerate(doubts)]


def _opened(engine: Engine, sealed: Mapping[int, SealedObject], outcomes: list[Outcome]) -> list[Outcome]:
    """The same outcomes, with that of its seal for each sealed object of which all was read."""
    read = [index for index in sealed if outcomes[index] is Outcome.NO_CHECKSUM]
    if not read:
        return outcomes
    results = engine.readers.map(lambda index: sealed[index].opened(), read, Outcome.CLOSED)
    opened = dict(zip(read, results, strict=True))
    return [opened.get(index, outcome) for index, outcome in enumerate(outcomes)]


def _is_dirty(answer: Answer) -> bool:
    """What no backend has yet is not for a reader to drop: it may be the device that failed, or another one
    in its place, and the object comes back with it. The daemon judges that. (It knows nothing of seals.)"""
    return isinstance(answer, Found) and answer.sync_status in DIRTY


def _heal(engine: Engine, damaged: Sequence[tuple[str, Answer]]) -> None:
    """Evict what was read and found damaged, so that a lookup says no and a store writes it anew."""
    if not damaged:
        return
    for _, hit in damaged:
        for chunk in chunks_of(hit):
            if chunk.tier is Tier.NVME:
                engine.devices.forget(chunk.device)  # the path may name another file by now
    # Replaced while it was read, an object is sound and stays; that it missed once is all.
    now = located(engine, [uri for uri, _ in damaged])
    still = [uri for (uri, hit), again in zip(damaged, now, strict=True) if again == hit]
    if engine.seals:  # where the daemon tells no state, it may have been another's write under way
        states = committed(engine, still)
        still = [uri for uri, state in zip(still, states, strict=True) if state is Outcome.OK]
    evicted = asked(engine, EvictMany.trusted(suffixes=tuple(still)))
    engine.counters.add("healing", "evicted", sum(isinstance(reply, EvictedReply) for reply in evicted))
