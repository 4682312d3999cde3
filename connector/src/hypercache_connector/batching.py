"""Wire 2's batches for those who know single requests only: many of one kind become one, and its reply
becomes many. Each is what a daemon of wire 1 would have replied (`replies_of`), or, where layouts are to be
used at once, what that says (`answers_of`).

Rule: a reply that does not fit its batch to the bit is an InvalidMessage; nothing of it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from hypercache_protocol import InvalidMessage, SyncStatus
from hypercache_protocol.batches import (
    BatchRequest,
    CommitMany,
    CommittedMany,
    EvictedMany,
    EvictMany,
    HelloLimits,
    ItemError,
    LayoutColumns,
    LocatedMany,
    LocateMany,
    StagedMany,
    StageMany,
)
from hypercache_protocol.layout import (
    U32,
    U64,
    packed,
    unpack_hits,
    unpack_statuses,
    unpacked,
    unpacked_bits,
)
from hypercache_protocol.messages import (
    CommittedReply,
    CommitWrite,
    ErrorReply,
    Evict,
    EvictedReply,
    Locate,
    MissReply,
    Reply,
    Request,
    StagedReply,
    StageWrite,
)

from .layouts import Answer, answer_of, found_in, staged_in
from .outcomes import Outcome
from .prefixes import shared_prefix

_T = TypeVar("_T")

FRAME_BYTES = 512
"""More than the fields of a batch cost beside its items."""

ITEM_BYTES = 32
"""More than an item costs beside its strings and checksums: their heads, a size, a count."""

CHARACTER_BYTES = 4
"""The most that one character has."""


@dataclass(frozen=True)
class Batch:
    """One request that stands for several: those from `start` on, `count` of them."""

    request: Request
    start: int
    count: int


def batched(requests: Sequence[Request], limits: HelloLimits) -> Iterator[Batch]:
    """The same requests in as few as the daemon's limits allow; what cannot be joined goes alone."""
    start = 0
    while start < len(requests):
        count = _joinable(requests, start, limits)
        if count == 1:
            yield Batch(requests[start], start, 1)
        else:
            yield Batch(_joined(requests[start : start + count]), start, count)
        start += count


def replies_of(batch: Batch, reply: Reply) -> list[Reply]:
    """One reply for each request of the batch.

    Raises:
        InvalidMessage: the reply does not fit the batch.
    """
    if isinstance(reply, ErrorReply) or not isinstance(batch.request, BatchRequest):
        return [reply] * batch.count
    return _SPLIT[type(batch.request)](reply, batch.count)


def answers_of(batch: Batch, reply: Reply) -> list[Answer]:
    """What the reply says of each request of the batch.

    Raises:
        InvalidMessage: the reply does not fit the batch.
    """
    if isinstance(reply, ErrorReply) or not isinstance(batch.request, BatchRequest):
        return [answer_of(reply)] * batch.count
    return _ANSWERS[type(batch.request)](reply, batch.count)


def unless_stored_batches(requests: Sequence[StageWrite], limits: HelloLimits) -> Iterator[Batch]:
    """The same requests as few, that stage nothing where it is stored already (wire 2.1)."""
    for batch in batched(requests, limits):
        many = batch.request if isinstance(batch.request, StageMany) else _joined([batch.request])
        yield replace(batch, request=many.model_copy(update={"unless_stored": True}))


def staged_or_stored(batch: Batch, reply: Reply) -> list[Answer]:
    """For each request of an `unless_stored_batches` its reply, or ALREADY_STORED.

    Raises:
        InvalidMessage: the reply does not fit the batch.
    """
    if not isinstance(reply, StagedMany):
        return [reply] * batch.count
    if reply.stored is None:
        raise InvalidMessage("the reply to stage_many does not tell what is stored although that was asked")
    stored, done = unpacked_bits(reply.stored, batch.count), unpacked_bits(reply.done, batch.count)
    staged, refusals = iter(_staged_ones(staged_in, reply, done)), _refusals(done, reply.errors)
    answers: list[Answer] = []
    for index, (is_stored, is_done) in enumerate(zip(stored, done, strict=True)):
        if is_stored + is_done + (index in refusals) != 1:
            raise InvalidMessage("the reply to stage_many calls a uri neither or both of staged and stored")
        answers.append(Outcome.ALREADY_STORED if is_stored else next(staged) if is_done else refusals[index])
    return answers


# -- joining -------------------------------------------------------------------------------------------


def _joinable(requests: Sequence[Request], start: int, limits: HelloLimits) -> int:
    """How many requests from `start` on fit into one."""
    kind = _kind(requests[start])
    if kind is None:
        return 1
    left_bytes = limits.max_request_bytes - FRAME_BYTES
    count = 0
    for request in requests[start : start + limits.max_batch]:
        if _kind(request) != kind:
            break
        left_bytes -= _size_bytes(request)
        if left_bytes < 0:
            break
        count += 1
    return max(count, 1)


def _size_bytes(request: Any) -> int:
    size_bytes = ITEM_BYTES + len(request.uri.encode())
    # By its type: to ask a message of pydantic's for what it lacks takes longer than all else here.
    if type(request) is CommitWrite:
        size_bytes += len((request.stage_id or "").encode()) + 4 * len(request.chunk_checksums or ())
    return size_bytes


def _kind(request: Request) -> tuple[object, ...] | None:
    """What requests must share to be joined; None for one that goes alone."""
    kind_of = _KINDS.get(type(request))
    return None if kind_of is None else kind_of(request)


def _locate_kind(request: Locate) -> tuple[object, ...] | None:
    return None if request.auto_ingest or request.pinned else (Locate,)


def _stage_kind(request: StageWrite) -> tuple[object, ...]:
    flags = request.is_leader, request.auto_flush_s3, request.write_through, request.pinned
    return (StageWrite, *flags, request.tier)


def _commit_kind(request: CommitWrite) -> tuple[object, ...] | None:
    if request.sha256 is not None or request.stage_id is None:
        return None
    known = request.chunk_checksums is not None
    return (CommitWrite, request.write_through, bool(request.local_only), known)


_KINDS: dict[type, Callable[[Any], tuple[object, ...] | None]] = {
    Locate: _locate_kind,
    StageWrite: _stage_kind,
    CommitWrite: _commit_kind,
    Evict: lambda _: (Evict,),
}


def _joined(requests: Sequence[Any]) -> BatchRequest:
    prefix, suffixes = shared_prefix([request.uri for request in requests])
    return _JOIN[type(requests[0])](prefix, suffixes, requests)


def _locate_many(prefix: str, suffixes: tuple[str, ...], _: Sequence[Locate]) -> BatchRequest:
    return LocateMany.trusted(prefix=prefix, suffixes=suffixes, layouts=True)


def _stage_many(prefix: str, suffixes: tuple[str, ...], requests: Sequence[StageWrite]) -> BatchRequest:
    first = requests[0]
    return StageMany.trusted(
        prefix=prefix,
        suffixes=suffixes,
        sizes=tuple([request.size_bytes for request in requests]),
        is_leader=first.is_leader,
        auto_flush_s3=first.auto_flush_s3,
        write_through=first.write_through,
        pinned=first.pinned,
        tier=first.tier,
    )


def _commit_many(prefix: str, suffixes: tuple[str, ...], requests: Sequence[CommitWrite]) -> BatchRequest:
    words = [request.chunk_checksums for request in requests if request.chunk_checksums is not None]
    return CommitMany.trusted(
        prefix=prefix,
        suffixes=suffixes,
        stage_ids=tuple([request.stage_id for request in requests]),
        local_only=bool(requests[0].local_only),
        write_through=requests[0].write_through,
        checksum_counts=packed([len(each) for each in words], U32) if words else None,
        checksums=packed([word for each in words for word in each], U32) if words else None,
    )


def _evict_many(prefix: str, suffixes: tuple[str, ...], _: Sequence[Evict]) -> BatchRequest:
    return EvictMany.trusted(prefix=prefix, suffixes=suffixes)


# -- splitting -----------------------------------------------------------------------------------------


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


_JOIN: dict[type[Request], Callable[[str, tuple[str, ...], Any], BatchRequest]] = {
    Locate: _locate_many,
    StageWrite: _stage_many,
    CommitWrite: _commit_many,
    Evict: _evict_many,
}

_SPLIT: dict[type[Request], Callable[[Any, int], list[Any]]] = {
    LocateMany: partial(_located, unpack_hits),
    StageMany: partial(_staged, _staged_replies),
    CommitMany: _committed,
    EvictMany: _evicted,
}

_ANSWERS = _SPLIT | {
    LocateMany: partial(_located, found_in),
    StageMany: partial(_staged, staged_in),
}
