"""From a daemon's reply to the transfers that it calls for, or the reason why there can be none.

Rule: any doubt is a miss. A layout is used only if every chunk of it can be verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypercache_protocol import ErrorCode, SyncStatus, Tier
from hypercache_protocol.batches import LayoutColumns
from hypercache_protocol.layout import Layouts, unpack_layouts
from hypercache_protocol.messages import ErrorReply, HitReply, MissReply, Reply, StagedReply

from .direct_io import Buffer, Part
from .outcomes import Outcome


class Chunk(NamedTuple):
    """Where one chunk lies: `length` bytes from `offset` of `device` on. `checksum` is what they sum up to,
    where the writer gave one."""

    device: str
    tier: Tier
    offset: int
    length: int
    checksum: int | None = None


class Found(NamedTuple):
    """An object that the daemon has, and its chunks in order."""

    size_bytes: int
    sync_status: SyncStatus | None
    generation: int | None
    chunks: Sequence[Chunk]


class Staged(NamedTuple):
    """A staged write, and the chunks to be written, in order."""

    size_bytes: int
    stage_id: str | None
    chunks: Sequence[Chunk]


Answer = Found | Staged | Reply | Outcome
"""What came of a request: what was found or staged, any other reply of the daemon's, or why there is none
that can be trusted."""


class ChunkTransfer(NamedTuple):
    """One chunk to be moved: number `position` of the key at `key_index` of its batch."""

    key_index: int
    position: int
    chunk: Chunk
    part: Part


# -- what a daemon says, by the wire that it says it in ---------------------------------------------------


def answer_of(reply: Reply) -> Answer:
    """What the reply to a single request says."""
    if isinstance(reply, HitReply):
        return Found(reply.object_size, reply.sync_status, reply.generation, _chunks_of(reply))
    if isinstance(reply, StagedReply):
        return Staged(reply.object_size, reply.stage_id, _chunks_of(reply))
    return reply


def _chunks_of(reply: HitReply | StagedReply) -> list[Chunk]:
    return [
        Chunk(chunk.device, chunk.tier, chunk.offset, chunk.length, chunk.checksum)
        for chunk in reply.chunk_layout
    ]


def found_in(columns: LayoutColumns, count: int) -> list[Found]:
    """The objects that a batch's columns hold.

    Raises:
        InvalidMessage: as `unpack_layouts`.
    """
    layouts = unpack_layouts(columns, count)
    return list(
        map(Found, layouts.sizes_bytes, layouts.sync_statuses, layouts.generations, _chunks_in(layouts))
    )


def staged_in(columns: LayoutColumns, stage_ids: Sequence[str]) -> list[Staged]:
    """The staged writes that a batch's columns hold.

    Raises:
        InvalidMessage: as `unpack_layouts`.
    """
    layouts = unpack_layouts(columns, len(stage_ids))
    return list(map(Staged, layouts.sizes_bytes, stage_ids, _chunks_in(layouts)))


def _chunks_in(layouts: Layouts) -> list[list[Chunk]]:
    chunks = list(
        map(Chunk, layouts.paths, layouts.tiers, layouts.offsets, layouts.lengths, layouts.checksums)
    )
    return [chunks[start:end] for start, end in zip(layouts.starts, layouts.ends, strict=True)]


# -- what is to be believed of it -------------------------------------------------------------------------


_REFUSALS = {
    ErrorCode.NO_SPACE: Outcome.NO_SPACE,
    ErrorCode.STALE_STAGE: Outcome.STALE_STAGE,
    ErrorCode.NOT_STAGED: Outcome.STALE_STAGE,
}


def refusal(answer: Answer) -> Outcome:
    """Why a request was not carried out, by an answer that is not the one hoped for."""
    match answer:
        case Outcome():
            return answer
        case MissReply():
            return Outcome.ABSENT
        case ErrorReply(error_code=ErrorCode() as code):
            return _REFUSALS.get(code, Outcome.DAEMON_REFUSED)
        case _:
            return Outcome.DAEMON_REFUSED


def doubt_about(answer: Answer, size_bytes: int | None = None) -> Outcome:
    """OK if what was located is committed and verifiable, else the first reason why it is not.

    Args:
        size_bytes: the size that the object must have; None where any will do.
    """
    if not isinstance(answer, Found):
        return refusal(answer)
    if answer.sync_status is None:
        return Outcome.NO_SYNC_STATUS
    if answer.sync_status is SyncStatus.STAGED:
        return Outcome.STAGED
    if any(chunk.checksum is None for chunk in answer.chunks):
        return Outcome.NO_CHECKSUM
    if size_bytes is not None and answer.size_bytes != size_bytes:
        return Outcome.WRONG_SIZE
    return doubt_about_lengths(answer.chunks, answer.size_bytes)


def doubt_about_stage(answer: Answer, size_bytes: int, *, named: bool) -> Outcome:
    """OK if the blocks that were staged are what `size_bytes` need, else the reason.

    Args:
        named: whether the staged write must have an id.
    """
    if not isinstance(answer, Staged):
        return refusal(answer)
    if answer.size_bytes != size_bytes:
        return Outcome.WRONG_SIZE
    if named and answer.stage_id is None:
        return Outcome.NO_STAGE_ID
    return doubt_about_lengths(answer.chunks, size_bytes)


def doubt_about_lengths(layout: Sequence[Chunk], size_bytes: int) -> Outcome:
    """OK if the chunks make up `size_bytes`, else BAD_LAYOUT."""
    fits = sum(chunk.length for chunk in layout) == size_bytes
    return Outcome.OK if fits else Outcome.BAD_LAYOUT


def chunks_of(answer: Answer) -> Sequence[Chunk]:
    """The layout of what was located, or nothing."""
    return answer.chunks if isinstance(answer, Found) else ()


# -- what is to be moved ----------------------------------------------------------------------------------


def transfers(key_index: int, layout: Sequence[Chunk], buffer: Buffer) -> list[ChunkTransfer]:
    """The transfers that move `buffer` from or to a layout whose lengths were checked, in its order."""
    planned, start = [], 0
    for position, chunk in enumerate(layout):
        planned.append(ChunkTransfer(key_index, position, chunk, buffer.part(start, chunk.length)))
        start += chunk.length
    return planned


def cut(layout: Sequence[Chunk], at_bytes: int) -> tuple[list[Chunk], list[Chunk]]:
    """The layout of an object's first `at_bytes` and that of the rest, without checksums: those are of whole
    chunks."""
    before: list[Chunk] = []
    after: list[Chunk] = []
    left = at_bytes
    for chunk in layout:
        here = min(left, chunk.length)
        before += _section(chunk, 0, here)
        after += _section(chunk, here, chunk.length)
        left -= here
    return before, after


def _section(chunk: Chunk, start: int, end: int) -> list[Chunk]:
    return [Chunk(chunk.device, chunk.tier, chunk.offset + start, end - start)] if start < end else []
