"""Wire 2's batches in the words of wire 1: many requests of one kind become one, and its reply becomes many,
each as a daemon of wire 1 would have given it. So loading and storing know single requests only.

Rule: a reply that does not fit its batch to the bit is an InvalidMessage; nothing of it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from hypercache_protocol import ErrorCode, SyncStatus
from hypercache_protocol.batches import (
    BatchRequest,
    CommitMany,
    CommittedMany,
    EvictedMany,
    EvictMany,
    HelloLimits,
    ItemError,
    LocatedMany,
    LocateMany,
    StagedMany,
    StageMany,
)
from hypercache_protocol.layout import (
    U32,
    U64,
    packed,
    unpack_layouts,
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

_ITEM_BYTES = 64
"""What a uri costs in a frame beside its own bytes: sizes, a stage id, the head of a string."""


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


def presence_request(uris: Sequence[str]) -> LocateMany:
    """Asks which of these could be verified if they were loaded now."""
    prefix, suffixes = shared_prefix(uris)
    return LocateMany.trusted(prefix=prefix, suffixes=suffixes)


def presence_batches(uris: Sequence[str], limits: HelloLimits) -> Iterator[Batch]:
    """The requests that ask it of all of them, within the daemon's limits."""
    longest = max(map(len, uris), default=0) + _ITEM_BYTES
    most = max(1, min(limits.max_batch, limits.max_request_bytes // 2 // longest))
    for start in range(0, len(uris), most):
        part = uris[start : start + most]
        yield Batch(presence_request(part), start, len(part))


def shared_prefix(uris: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """What all of them begin with, and the rest of each."""
    prefix = commonprefix(uris)  # noqa: RUF071 - character by character is what is wanted here
    cut = len(prefix)
    return prefix, tuple([uri[cut:] for uri in uris])


# -- joining -------------------------------------------------------------------------------------------


def _joinable(requests: Sequence[Request], start: int, limits: HelloLimits) -> int:
    """How many requests from `start` on fit into one."""
    kind = _kind(requests[start])
    if kind is None:
        return 1
    left_bytes = limits.max_request_bytes // 2  # what is counted below is an estimate
    count = 0
    for request in requests[start : start + limits.max_batch]:
        left_bytes -= _size_bytes(request)
        if _kind(request) != kind or (left_bytes < 0 and count):
            break
        count += 1
    return max(count, 1)


def _size_bytes(request: Any) -> int:
    checksums = getattr(request, "chunk_checksums", None) or ()
    return _ITEM_BYTES + 4 * len(request.uri) + 4 * len(checksums)


def _kind(request: Request) -> tuple[object, ...] | None:
    """What requests must share to be joined; None for one that goes alone."""
    match request:
        case Locate(auto_ingest=False, pinned=False):
            return (Locate,)
        case StageWrite():
            flags = request.is_leader, request.auto_flush_s3, request.write_through, request.pinned
            return (StageWrite, *flags, request.tier)
        case CommitWrite(sha256=None, stage_id=str()):
            known = request.chunk_checksums is not None
            return (CommitWrite, request.write_through, bool(request.local_only), known)
        case Evict():
            return (Evict,)
        case _:
            return None


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


def _located(reply: LocatedMany, count: int) -> list[Reply]:
    present = unpacked_bits(reply.present, count)
    hits = iter(unpack_layouts(reply.layouts, sum(present)) if reply.layouts else ())
    return [next(hits, MissReply()) if is_present else MissReply() for is_present in present]


def _staged(reply: StagedMany, count: int) -> list[Reply]:
    done = unpacked_bits(reply.done, count)
    layouts = unpack_layouts(reply.layouts, sum(done))
    staged = [
        StagedReply.trusted(
            object_size=layout.object_size,
            chunk_layout=layout.chunk_layout,
            sync_status=SyncStatus.STAGED,
            stage_id=stage_id,
        )
        for layout, stage_id in zip(layouts, reply.stage_ids, strict=False)
    ]
    return _in_places(done, staged, reply.errors)


def _committed(reply: CommittedMany, count: int) -> list[Reply]:
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
    refused = {error.index: error for error in reply.errors}
    return [
        EvictedReply() if done else _refusal(refused[index]) if index in refused else MissReply()
        for index, done in enumerate(unpacked_bits(reply.done, count))
    ]


def _in_places(done: Sequence[bool], replies: Sequence[Reply], errors: Sequence[ItemError]) -> list[Reply]:
    """The replies where their bit is set, and a refusal everywhere else."""
    refused = {error.index: error for error in errors}
    unexplained = ItemError(index=0, error_message="the daemon gave no reason")
    left = iter(replies)
    return [
        next(left, None) or _refusal(unexplained) if is_done else _refusal(refused.get(index, unexplained))
        for index, is_done in enumerate(done)
    ]


def _refusal(error: ItemError) -> ErrorReply:
    code: ErrorCode | None = error.error_code
    return ErrorReply(error_message=error.error_message, error_code=code)


_JOIN: dict[type[Request], Callable[[str, tuple[str, ...], Any], BatchRequest]] = {
    Locate: _locate_many,
    StageWrite: _stage_many,
    CommitWrite: _commit_many,
    Evict: _evict_many,
}

_SPLIT: dict[type[Request], Callable[[Any, int], list[Reply]]] = {
    LocateMany: _located,
    StageMany: _staged,
    CommitMany: _committed,
    EvictMany: _evicted,
}
