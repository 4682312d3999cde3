"""What the reply to a batch says of each uri of it: an `Answer`, or the reply that a daemon of wire 1 would
have given.

Rule: a reply that does not fit its batch to the bit is an InvalidMessage; nothing of it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from hypercache_protocol import InvalidMessage, SyncStatus
from hypercache_protocol.batches import (
    BatchRequest,
    CommitMany,
    CommittedMany,
    EvictedMany,
    EvictMany,
    ItemError,
    LayoutColumns,
    LocatedMany,
    LocateMany,
    StagedMany,
    StageMany,
)
from hypercache_protocol.layout import U64, unpack_hits, unpack_statuses, unpacked, unpacked_bits
from hypercache_protocol.messages import (
    CommittedReply,
    ErrorReply,
    EvictedReply,
    MissReply,
    Reply,
    StagedReply,
)

from .batching import Batch, spares_stored
from .layouts import Answer, answer_of, found_in, staged_in
from .outcomes import Outcome

_T = TypeVar("_T")


def answers_of(batch: Batch, reply: Reply) -> list[Answer]:
    """What the reply says of each uri of the batch; ALREADY_STORED where a stage was to spare what is stored.

    Raises:
        InvalidMessage: the reply does not fit the batch.
    """
    if isinstance(reply, ErrorReply) or not isinstance(batch.request, BatchRequest):
        return [answer_of(reply)] * batch.count
    if isinstance(reply, StagedMany) and spares_stored(batch.request):
        return _staged_or_stored(reply, batch.count)
    return _ANSWERS[type(batch.request)](reply, batch.count)


def replies_of(batch: Batch, reply: Reply) -> list[Reply]:
    """One reply for each request of the batch.

    Raises:
        InvalidMessage: the reply does not fit the batch.
    """
    if isinstance(reply, ErrorReply) or not isinstance(batch.request, BatchRequest):
        return [reply] * batch.count
    return _REPLIES[type(batch.request)](reply, batch.count)


_Unpack = Callable[[LayoutColumns, int], list[_T]]
"""Makes of columns what was found, so many objects."""

_UnpackStaged = Callable[[LayoutColumns, Sequence[str]], list[_T]]
"""Makes of columns and stage ids what was staged."""


def _located(unpack: _Unpack[_T], reply: LocatedMany, count: int) -> list[_T | MissReply]:
    present = unpacked_bits(reply.present, count)
    if reply.layouts is None:
        raise InvalidMessage("the reply to locate_many lacks the layouts that were asked for")
    hits = iter(unpack(reply.layouts, sum(present)))
    return [next(hits) if is_present else MissReply() for is_present in present]


def _staged(unpack: _UnpackStaged[_T], reply: StagedMany, count: int) -> list[_T | ErrorReply]:
    done = unpacked_bits(reply.done, count)
    return _in_places(done, _staged_ones(unpack, reply, done), reply.errors)


def _staged_or_stored(reply: StagedMany, count: int) -> list[Answer]:
    if reply.stored is None:
        raise InvalidMessage("the reply to stage_many does not tell what is stored although that was asked")
    stored, done = unpacked_bits(reply.stored, count), unpacked_bits(reply.done, count)
    staged, refusals = iter(_staged_ones(staged_in, reply, done)), _refusals(done, reply.errors)
    answers: list[Answer] = []
    for index, (is_stored, is_done) in enumerate(zip(stored, done, strict=True)):
        if is_stored + is_done + (index in refusals) != 1:
            raise InvalidMessage("the reply to stage_many calls a uri neither or both of staged and stored")
        answers.append(Outcome.ALREADY_STORED if is_stored else next(staged) if is_done else refusals[index])
    return answers


def _staged_ones(unpack: _UnpackStaged[_T], reply: StagedMany, done: Sequence[bool]) -> list[_T]:
    """Those that are done, in order."""
    if len(reply.stage_ids) != sum(done):
        raise InvalidMessage(f"stage_ids has {len(reply.stage_ids)} entries for {sum(done)} staged writes")
    return unpack(reply.layouts, reply.stage_ids)


def _staged_replies(columns: LayoutColumns, stage_ids: Sequence[str]) -> list[StagedReply]:
    return [
        StagedReply.trusted(
            object_size=layout.object_size,
            chunk_layout=layout.chunk_layout,
            sync_status=SyncStatus.STAGED,
            stage_id=stage_id,
        )
        for layout, stage_id in zip(unpack_hits(columns, len(stage_ids)), stage_ids, strict=True)
    ]


def _committed(reply: CommittedMany, count: int) -> list[CommittedReply | ErrorReply]:
    done = unpacked_bits(reply.done, count)
    number = sum(done)
    committed = [
        CommittedReply.trusted(object_size=size_bytes, sync_status=status, generation=generation)
        for size_bytes, status, generation in zip(
            unpacked("object_sizes", reply.object_sizes, U64, number),
            unpack_statuses(reply.sync_statuses, number),
            unpacked("generations", reply.generations, U64, number),
            strict=True,
        )
    ]
    return _in_places(done, committed, reply.errors)


def _evicted(reply: EvictedMany, count: int) -> list[Reply]:
    done = unpacked_bits(reply.done, count)
    refusals = _refusals(done, reply.errors)
    return [
        EvictedReply() if is_done else refusals.get(index, MissReply()) for index, is_done in enumerate(done)
    ]


def _in_places(
    done: Sequence[bool], replies: Sequence[_T], errors: Sequence[ItemError]
) -> list[_T | ErrorReply]:
    """The replies where their bit is set, and a refusal everywhere else."""
    refusals = _refusals(done, errors)
    if len(refusals) + len(replies) != len(done):
        raise InvalidMessage("the reply to a batch says of some uris neither that it is done nor why not")
    left = iter(replies)
    return [next(left) if is_done else refusals[index] for index, is_done in enumerate(done)]


def _refusals(done: Sequence[bool], errors: Sequence[ItemError]) -> dict[int, ErrorReply]:
    """Index -> refusal, of what was not done."""
    refusals = {error.index: _refusal(error) for error in errors}
    if len(refusals) != len(errors) or any(index >= len(done) or done[index] for index in refusals):
        raise InvalidMessage("the errors in the reply to a batch don't fit its uris")
    return refusals


def _refusal(error: ItemError) -> ErrorReply:
    return ErrorReply(error_message=error.error_message, error_code=error.error_code)


_REPLIES: dict[type[BatchRequest], Callable[[Any, int], list[Any]]] = {
    LocateMany: partial(_located, unpack_hits),
    StageMany: partial(_staged, _staged_replies),
    CommitMany: _committed,
    EvictMany: _evicted,
}

_ANSWERS = _REPLIES | {
    LocateMany: partial(_located, found_in),
    StageMany: partial(_staged, staged_in),
}
