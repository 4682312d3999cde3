"""Store of a batch of keys: stage what is not stored yet, write and commit, each step once for all of them.

Rules:
1. A key is stored only once the daemon acknowledged its commit, which carries the checksum of every chunk
   and names the very staged write that was filled. With a daemon that knows neither, it is sealed (where
   that is turned on): the object then tells by itself whether its bytes are whole.
2. The checksum is that of the caller's bytes, not of what a device gave back.
3. What is stored already, verifiable and in the same size, is not written again unless asked for. A daemon
   of wire 2.1 looks for it when it stages; others are asked before. What is to be written through is stored
   only where the backend has it.
4. A staged write that could not be filled is given back at once; what is left behind when the daemon
   can't be reached, it drops by itself. What a backend refused is committed here all the same, and stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from hypercache_protocol import SyncStatus, Tier
from hypercache_protocol.batches import CommitMany, EvictMany, StageMany
from hypercache_protocol.checksum import crc32
from hypercache_protocol.layout import U32, packed
from hypercache_protocol.messages import CommittedReply, CommitWrite

from .client import Client
from .direct_io import Buffer
from .engine import (
    ANY_DAEMON,
    STORE_NEEDS,
    Engine,
    answered,
    asked,
    committed,
    count,
    exchanged,
    located,
    transfer_failed,
)
from .layouts import Answer, Chunk, ChunkTransfer, Found, Staged, doubt_about_stage, refusal, transfers
from .outcomes import DaemonUnavailable, Outcome
from .runs import Run, in_runs, mapped
from .sealed_objects import SealedObject, doubt_about_object, sealed_object

_VAIN = frozenset(
    {
        Outcome.WRONG_SIZE,
        Outcome.BAD_LAYOUT,
        Outcome.NO_STAGE_ID,
        Outcome.DEVICE_FAILED,
        Outcome.RAM_FILE_GONE,
        Outcome.IO_ERROR,
        Outcome.SHORT_TRANSFER,
        Outcome.NO_SPACE,
        Outcome.NO_MEMORY,
        Outcome.TRANSFER_LATE,
        Outcome.DAEMON_REFUSED,
    }
)
"""After these the staged write is certainly there, is ours, and will never be committed."""


@dataclass(slots=True)
class _Write:
    """One key on its way; as long as there is no `outcome` it takes the next step."""

    uri: str
    buffer: Buffer
    outcome: Outcome | None = None
    staged: Staged | None = None
    checksums: list[int] = field(default_factory=list)
    sealed: SealedObject | None = None
    """The form that it is stored in, where the daemon knows no checksums."""

    @property
    def size_bytes(self) -> int:
        """The size of the object to be."""
        return self.sealed.size_bytes if self.sealed else self.buffer.size_bytes

    @property
    def stage_id(self) -> str:
        """Of what was staged; "" where it has none."""
        return (self.staged and self.staged.stage_id) or ""

    def transfers(self, key_index: int, layout: Sequence[Chunk]) -> list[ChunkTransfer]:
        """What moves it to a layout whose lengths were checked."""
        if self.sealed:
            return self.sealed.transfers(key_index, layout)
        return transfers(key_index, layout, self.buffer)


def store(engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
    """Store each buffer under its uri; OK or ALREADY_STORED where a lookup finds it from now on."""
    writes = [_Write(uri, buffer) for uri, buffer in zip(uris, buffers, strict=True)]
    for distinct in _rounds(writes):
        _store_distinct(engine, distinct)
    # None is left without an outcome but by `close`.
    outcomes = [write.outcome or Outcome.CLOSED for write in writes]
    count(engine, "stores", outcomes)
    return outcomes


def _rounds(writes: Sequence[_Write]) -> Iterator[list[_Write]]:
    """The writes, such that no uri comes twice in one round: a second staged write would make the first
    one stale. The same key twice in a batch is legal, and rare."""
    left = list(writes)
    while left:
        first: dict[str, _Write] = {}
        again = [write for write in left if first.setdefault(write.uri, write) is not write]
        yield list(first.values())
        left = again


def _store_distinct(engine: Engine, writes: Sequence[_Write]) -> None:
    deadline = engine.deadline(time.monotonic())
    if engine.overwrite or not _stage_absent(engine, writes):
        if not engine.overwrite:
            _look(engine, writes)
        _stage(engine, _going(writes))
    _fill(engine, _going(writes), deadline)
    _commit(engine, _going(writes))
    _give_back(engine, writes)


def _going(writes: Sequence[_Write]) -> list[_Write]:
    return [write for write in writes if write.outcome is None]


def _look(engine: Engine, writes: Sequence[_Write]) -> None:
    unsure: list[_Write] = []
    for write, answer in zip(writes, located(engine, [write.uri for write in writes]), strict=True):
        if isinstance(answer, Outcome):
            write.outcome = answer
            continue
        doubt = doubt_about_object(answer, write.uri, write.buffer.size_bytes, seals=engine.seals)
        if doubt is Outcome.OK and _is_where_wanted(engine, answer):
            write.outcome = Outcome.ALREADY_STORED
            unsure += [write] if _tells_no_state(answer) else []
    for write, state in zip(unsure, committed(engine, [write.uri for write in unsure]), strict=True):
        if state is not Outcome.OK:
            write.outcome = None if state is Outcome.STAGED else state


def _is_where_wanted(engine: Engine, answer: Answer) -> bool:
    if not engine.write_through:
        return True
    return isinstance(answer, Found) and answer.sync_status is SyncStatus.SYNCED_BACKEND


def _tells_no_state(answer: Answer) -> bool:
    return isinstance(answer, Found) and answer.sync_status is None


def _stage_absent(engine: Engine, writes: Sequence[_Write]) -> bool:
    """Look and stage in one exchange; False where this daemon can't and nothing was asked. It does not look
    for seals, nor whether the backend has it, so where these matter the connector looks itself."""
    client = engine.client
    if engine.seals or engine.write_through or "unless_stored" not in client.features:
        return False
    many = _stage_many(engine, writes).model_copy(update={"unless_stored": True})
    answers = answered(engine, len(writes), lambda: _staged_unless_stored(client, many))
    if Outcome.DAEMON_TOO_OLD in answers:  # another daemon than the one whose features were known
        return False
    _take_stages(writes, answers)
    return True


def _staged_unless_stored(client: Client, many: StageMany) -> Sequence[Answer]:
    try:
        return client.ask(many, needs=STORE_NEEDS)
    except DaemonUnavailable as error:
        if error.outcome is not Outcome.DAEMON_TOO_OLD:
            raise
        # Not for the log: the older way comes next, and says itself what it lacks.
        return [error.outcome] * len(many.suffixes)


def _stage(engine: Engine, writes: Sequence[_Write]) -> None:
    _stage_with(engine, writes, STORE_NEEDS)
    if engine.seals:
        old = [write for write in writes if write.outcome is Outcome.DAEMON_TOO_OLD]  # nothing was asked yet
        skipped: SealedObject | Outcome = Outcome.CLOSED
        for write, sealed in zip(old, engine.writers.map(_sealed, old, skipped), strict=True):
            if isinstance(sealed, SealedObject):
                write.sealed, write.outcome = sealed, None
            else:
                write.outcome = sealed
        _stage_with(engine, _going(old), ANY_DAEMON)


def _sealed(write: _Write) -> SealedObject | Outcome:
    sealed = sealed_object(write.uri, write.buffer)
    if isinstance(sealed, SealedObject):
        sealed.seal()
    return sealed


def _stage_with(engine: Engine, writes: Sequence[_Write], needs: frozenset[str]) -> None:
    _take_stages(writes, asked(engine, _stage_many(engine, writes), needs))


def _stage_many(engine: Engine, writes: Sequence[_Write]) -> StageMany:
    return StageMany.trusted(
        suffixes=tuple([write.uri for write in writes]),
        sizes=tuple([write.size_bytes for write in writes]),
        auto_flush_s3=False,
        write_through=engine.write_through,
        pinned=engine.pinned,
        tier=engine.tier,
    )


def _take_stages(writes: Sequence[_Write], answers: Sequence[Answer]) -> None:
    for write, answer in zip(writes, answers, strict=True):
        write.staged = answer if isinstance(answer, Staged) else None
        doubt = doubt_about_stage(answer, write.size_bytes, named=not write.sealed)
        write.outcome = None if doubt is Outcome.OK else doubt


def _fill(engine: Engine, writes: Sequence[_Write], deadline: float) -> None:
    planned: list[ChunkTransfer] = []
    for index, write in enumerate(writes):
        layout = write.staged.chunks if write.staged else ()
        planned += write.transfers(index, layout)
        write.checksums = [0] * len(layout)
    skipped: int | Outcome = Outcome.CLOSED
    write_run = partial(_write_in_turn, engine, deadline)
    runs = in_runs(planned, engine.devices.needs_alignment)
    for transfer, result in mapped(engine.writers, write_run, runs, skipped):
        if isinstance(result, Outcome):
            writes[transfer.key_index].outcome = result
        else:
            writes[transfer.key_index].checksums[transfer.position] = result


def _write_in_turn(engine: Engine, deadline: float, run: Run) -> list[int | Outcome]:
    """For each chunk its checksum where it was written, or why it was not. Loads under way go before."""
    if time.monotonic() >= deadline:
        return [Outcome.TRANSFER_LATE] * len(run)
    if not engine.gate.bounded:
        return _write_run(engine, run)
    size_bytes = sum(transfer.chunk.length for transfer in run)
    with engine.gate.writing(size_bytes, deadline) as turn:
        return _write_run(engine, run) if turn is Outcome.OK else [turn] * len(run)


def _write_run(engine: Engine, run: Run) -> list[int | Outcome]:
    checksums = [crc32(transfer.part.view) for transfer in run]
    first = run[0].chunk
    if len(run) > 1 and first.tier is Tier.NVME:
        parts = [transfer.part for transfer in run]
        if engine.devices.write_run(first.device, parts, first.offset):
            return list(checksums)
    return [
        _write_chunk(engine, transfer, checksum) for transfer, checksum in zip(run, checksums, strict=True)
    ]


def _write_chunk(engine: Engine, transfer: ChunkTransfer, checksum: int) -> int | Outcome:
    chunk = transfer.chunk
    try:
        moved = engine.devices.write(chunk.device, chunk.tier, transfer.part, chunk.offset)
    except OSError as error:
        return transfer_failed(engine, chunk, error)
    return checksum if moved == chunk.length else Outcome.SHORT_TRANSFER


def _commit(engine: Engine, writes: Sequence[_Write]) -> None:
    plain = [write for write in writes if not write.sealed]
    _take_commits(engine, plain, asked(engine, _commit_many(engine, plain), STORE_NEEDS))
    sealed = [write for write in writes if write.sealed]
    _take_commits(engine, sealed, exchanged(engine, [CommitWrite(uri=write.uri) for write in sealed]))


def _commit_many(engine: Engine, writes: Sequence[_Write]) -> CommitMany:
    return CommitMany.trusted(
        suffixes=tuple([write.uri for write in writes]),
        stage_ids=tuple([write.stage_id for write in writes]),
        local_only=not engine.write_through,
        write_through=engine.write_through,
        checksum_counts=packed([len(write.checksums) for write in writes], U32),
        checksums=packed([word for write in writes for word in write.checksums], U32),
    )


def _take_commits(engine: Engine, writes: Sequence[_Write], answers: Sequence[Answer]) -> None:
    stored_bytes = 0
    for write, answer in zip(writes, answers, strict=True):
        done = isinstance(answer, CommittedReply) and answer.object_size == write.size_bytes
        write.outcome = Outcome.OK if done else refusal(answer)
        stored_bytes += write.buffer.size_bytes if done else 0
        if done and write.sealed:
            engine.counters.add("sealed", "stored")
    if stored_bytes:
        engine.counters.add("bytes", "stored", stored_bytes)


def _give_back(engine: Engine, writes: Sequence[_Write]) -> None:
    """Free the blocks of what was staged in vain. There is no request for that but to evict the uri, so
    only where nothing is committed under it."""
    vain = [write.uri for write in writes if write.staged and write.outcome in _VAIN]
    states = committed(engine, vain)
    staged_only = [uri for uri, state in zip(vain, states, strict=True) if state is Outcome.STAGED]
    asked(engine, EvictMany.trusted(suffixes=tuple(staged_only)))
