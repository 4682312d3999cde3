"""From a daemon's reply to the transfers that it calls for, or the reason why there can be none.

Rule: any doubt is a miss. A layout is used only if every chunk of it can be verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypercache_protocol import ErrorCode, SyncStatus, Tier
from hypercache_protocol.messages import ChunkLocation, ErrorReply, HitReply, MissReply, Reply, StagedReply

from .direct_io import Buffer, Part
from .outcomes import Outcome

Answer = Reply | Outcome
"""What came of a request: the daemon's reply, or why there is none that can be trusted."""


@dataclass(frozen=True, slots=True)
class ChunkTransfer:
    """One chunk to be moved: number `position` of the key at `index` of its batch. `checksum` is what a
    chunk that is read must sum up to."""

    index: int
    position: int
    device: str
    tier: Tier
    offset: int
    part: Part
    checksum: int | None


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


def doubt_about(reply: Answer, size_bytes: int | None = None) -> Outcome:
    """OK if what was located is committed and verifiable, else the first reason why it is not.

    Args:
        size_bytes: the size that the object must have; None where any will do.
    """
    if not isinstance(reply, HitReply):
        return refusal(reply)
    if reply.sync_status is None:
        return Outcome.NO_SYNC_STATUS
    if reply.sync_status is SyncStatus.STAGED:
        return Outcome.STAGED
    if any(chunk.checksum is None for chunk in reply.chunk_layout):
        return Outcome.NO_CHECKSUM
    if size_bytes is not None and reply.object_size != size_bytes:
        return Outcome.WRONG_SIZE
    return doubt_about_lengths(reply.chunk_layout, reply.object_size)


def doubt_about_stage(reply: Answer, size_bytes: int, *, named: bool = True) -> Outcome:
    """OK if the blocks that were staged are what `size_bytes` need, else the reason.

    Args:
        named: whether the staged write must have an id.
    """
    if not isinstance(reply, StagedReply):
        return refusal(reply)
    if reply.object_size != size_bytes:
        return Outcome.WRONG_SIZE
    if named and reply.stage_id is None:
        return Outcome.NO_STAGE_ID
    return doubt_about_lengths(reply.chunk_layout, size_bytes)


def doubt_about_lengths(layout: Sequence[ChunkLocation], size_bytes: int) -> Outcome:
    """OK if the chunks make up `size_bytes`, else BAD_LAYOUT."""
    fits = sum(chunk.length for chunk in layout) == size_bytes
    return Outcome.OK if fits else Outcome.BAD_LAYOUT


def chunks_of(answer: Answer) -> tuple[ChunkLocation, ...]:
    """The layout of what was located, or nothing."""
    return answer.chunk_layout if isinstance(answer, HitReply) else ()


def transfers(index: int, layout: Sequence[ChunkLocation], buffer: Buffer) -> list[ChunkTransfer]:
    """The transfers that move `buffer` from or to a layout whose lengths were checked, in its order."""
    planned, start = [], 0
    for position, chunk in enumerate(layout):
        part = buffer.part(start, chunk.length)
        planned.append(
            ChunkTransfer(index, position, chunk.device, chunk.tier, chunk.offset, part, chunk.checksum)
        )
        start += chunk.length
    return planned


def cut(layout: Sequence[ChunkLocation], at_bytes: int) -> tuple[list[ChunkLocation], list[ChunkLocation]]:
    """The layout of an object's first `at_bytes` and that of the rest, without checksums: those are of whole
    chunks."""
    before: list[ChunkLocation] = []
    after: list[ChunkLocation] = []
    left = at_bytes
    for chunk in layout:
        here = min(left, chunk.length)
        before += _section(chunk, 0, here)
        after += _section(chunk, here, chunk.length)
        left -= here
    return before, after


def _section(chunk: ChunkLocation, start: int, end: int) -> list[ChunkLocation]:
    if start == end:
        return []
    offset = chunk.offset + start
    return [ChunkLocation.trusted(device=chunk.device, offset=offset, length=end - start, tier=chunk.tier)]
