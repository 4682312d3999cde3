"""Store of a batch of keys: one look at all of them, then stage, write and commit in a few parts at once.

Rules:
1. A key is stored only once the daemon acknowledged its commit, which carries the checksum of every chunk
   and names the very staged write that was filled.
2. The checksum is that of the caller's bytes, not of what a device gave back.
3. What is stored already, with checksums and in the same size, is not written again unless asked for.
4. A staged write that could not be filled is given back at once; what is left behind when the daemon
   can't be reached, it drops by itself.
5. The parts have a connection each. While the daemon makes the staging or the commits of one part durable,
   the others' bytes are on their way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from hypercache_protocol.messages import (
    CommittedReply,
    CommitWrite,
    Evict,
    StagedReply,
    StageWrite,
)

from .checksum import crc32
from .direct_io import Buffer
from .layouts import ChunkTransfer, doubt_about, doubt_about_stage, interleaved, refusal, transfers
from .outcomes import Outcome
from .transfers import STORE_NEEDS, Engine, exchanged, located, transfer_failed

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
        Outcome.TRANSFER_LATE,
        Outcome.DAEMON_REFUSED,
    }
)
"""After these the staged write is certainly there, is ours, and will never be committed."""


_PARTS = 4
"""Enough for the daemon to make several parts durable together; more would only split the exchanges."""


@dataclass(slots=True)
class _Write:
    """One key on its way; as long as there is no `outcome` it takes the next step."""

    uri: str
    buffer: Buffer
    outcome: Outcome | None = None
    was_absent: bool = False
    staged: StagedReply | None = None
    checksums: list[int] = field(default_factory=list)


def store(engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
    """Store each buffer under its uri; OK or ALREADY_STORED where a lookup finds it from now on."""
    writes = [_Write(uri, buffer) for uri, buffer in zip(uris, buffers, strict=True)]
    for distinct in _rounds(writes):
        _store_distinct(engine, distinct)
    outcomes = [write.outcome or Outcome.CLOSED for write in writes]  # parts that `close` overtook
    engine.counters.add_outcomes("stores", outcomes)
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
    deadline = time.monotonic() + engine.transfer_timeout_s
    if not engine.overwrite:
        _look(engine, writes)
    going = _going(writes)
    parts = [going[start::_PARTS] for start in range(min(_PARTS, len(going)))]
    # A writer that runs a part and waits for its chunks is no writer lost: it moves them itself.
    engine.writers.map(partial(_store_part, engine, deadline), parts, None)


def _store_part(engine: Engine, deadline: float, writes: Sequence[_Write]) -> None:
    _stage(engine, writes)
    _fill(engine, _going(writes), deadline)
    _commit(engine, _going(writes))
    _give_back(engine, writes)


def _going(writes: Sequence[_Write]) -> list[_Write]:
    return [write for write in writes if write.outcome is None]


def _look(engine: Engine, writes: Sequence[_Write]) -> None:
    for write, answer in zip(writes, located(engine, [write.uri for write in writes]), strict=True):
        if isinstance(answer, Outcome):
            write.outcome = answer
            continue
        doubt = doubt_about(answer, write.buffer.size_bytes)
        write.was_absent = doubt in (Outcome.ABSENT, Outcome.STAGED)
        if doubt is Outcome.OK:
            write.outcome = Outcome.ALREADY_STORED


def _stage(engine: Engine, writes: Sequence[_Write]) -> None:
    requests = [
        StageWrite(uri=write.uri, size_bytes=write.buffer.size_bytes, auto_flush_s3=False, tier=engine.tier)
        for write in writes
    ]
    for write, answer in zip(writes, exchanged(engine, requests, STORE_NEEDS), strict=True):
        write.staged = answer if isinstance(answer, StagedReply) else None
        doubt = doubt_about_stage(answer, write.buffer.size_bytes)
        write.outcome = None if doubt is Outcome.OK else doubt


def _fill(engine: Engine, writes: Sequence[_Write], deadline: float) -> None:
    planned: list[ChunkTransfer] = []
    for index, write in enumerate(writes):
        layout = write.staged.chunk_layout if write.staged else ()
        planned += transfers(index, layout, write.buffer)
        write.checksums = [0] * len(layout)
    planned = interleaved(planned)
    skipped: int | Outcome = Outcome.CLOSED
    results = engine.writers.map(partial(_write_chunk, engine, deadline), planned, skipped)
    for transfer, result in zip(planned, results, strict=True):
        if isinstance(result, Outcome):
            writes[transfer.index].outcome = result
        else:
            writes[transfer.index].checksums[transfer.position] = result


def _write_chunk(engine: Engine, deadline: float, transfer: ChunkTransfer) -> int | Outcome:
    """The checksum of the chunk that was written, or why it was not."""
    if time.monotonic() >= deadline:
        return Outcome.TRANSFER_LATE
    view = transfer.part.view
    checksum = crc32(view)
    try:
        moved = engine.devices.write(transfer.device, transfer.tier, transfer.part, transfer.offset)
    except OSError as error:
        return transfer_failed(engine, transfer, error)
    return checksum if moved == len(view) else Outcome.SHORT_TRANSFER


def _commit(engine: Engine, writes: Sequence[_Write]) -> None:
    requests = [
        CommitWrite(
            uri=write.uri,
            local_only=True,
            chunk_checksums=tuple(write.checksums),
            stage_id=write.staged.stage_id if write.staged else None,
        )
        for write in writes
    ]
    for write, answer in zip(writes, exchanged(engine, requests, STORE_NEEDS), strict=True):
        committed = isinstance(answer, CommittedReply) and answer.object_size == write.buffer.size_bytes
        write.outcome = Outcome.OK if committed else refusal(answer)
        if committed:
            engine.counters.add("bytes", "stored", write.buffer.size_bytes)


def _give_back(engine: Engine, writes: Sequence[_Write]) -> None:
    """Free the blocks of what was staged in vain. There is no request for that but to evict the uri, so
    only where nothing was committed under it before."""
    vain = [write for write in writes if write.staged and write.was_absent and write.outcome in _VAIN]
    exchanged(engine, [Evict(uri=write.uri) for write in vain])
