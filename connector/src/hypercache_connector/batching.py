"""Requests for many uris, to a daemon of any wire: one of wire 2 gets them as they are, in as many pieces as
its limits make of them, one of wire 1 as a request for each uri. Single requests of one kind are joined to
such a one, too. (batch_replies.py has what comes back.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np

from hypercache_protocol.batches import (
    BatchRequest,
    CommitMany,
    EvictMany,
    HelloLimits,
    LocateMany,
    StageMany,
)
from hypercache_protocol.layout import U32, packed
from hypercache_protocol.messages import (
    CommitWrite,
    Evict,
    GetDevices,
    GetStatus,
    GetWriteStatus,
    Locate,
    Ping,
    RecordTelemetry,
    Request,
    StageWrite,
)

from .prefixes import shared_prefix

FRAME_BYTES = 512
"""More than the fields of a batch cost beside its items."""

ITEM_BYTES = 32
"""More than an item costs beside its strings and checksums: their heads, a size, a count."""

CHARACTER_BYTES = 4
"""The most that one character has."""

_U32_BYTES = U32.itemsize


@dataclass(frozen=True)
class Batch:
    """One request as it goes out, and for how many it stands."""

    request: Request
    count: int


def check_batch(many: object) -> None:
    """Nothing, where it is a batch that can be asked of a daemon of any wire.

    Raises:
        TypeError, ValueError: it is not.
    """
    if type(many) not in _SINGLES:
        raise TypeError(
            f"give a batch such as LocateMany(), of hypercache_protocol.batches, not {many!r}"[:200]
        )
    if isinstance(many, LocateMany) and not many.layouts:
        raise ValueError("locate_many: 'layouts' must be on; `lookup` is for those who want none")


def pieces(many: BatchRequest, limits: HelloLimits) -> Iterator[Batch]:
    """The same request as few that keep to the daemon's limits; for a lone uri mostly one of wire 1."""
    uris, bounds = many.uris(), _checksum_bounds(many)
    for start, end in _cuts(_item_bytes(many, uris, bounds), limits):
        prefix, suffixes = shared_prefix(uris[start:end])
        columns = _columns(many, slice(start, end), slice(bounds[start], bounds[end]))
        piece = many.model_copy(update={"prefix": prefix, "suffixes": suffixes, **columns})
        alone = len(suffixes) == 1 and not spares_stored(piece)
        yield Batch(singles(piece)[0] if alone else piece, len(suffixes))


def once_each(many: BatchRequest) -> BatchRequest:
    """The same request, of each uri once where a daemon carries out once what one frame names twice: to evict
    an object twice, on lines or in two pieces, is to evict what another client has staged in its place."""
    if type(many) is not EvictMany:
        return many
    return EvictMany.trusted(suffixes=tuple(dict.fromkeys(many.uris())))


def singles(many: BatchRequest) -> Sequence[Request]:
    """The same as a request of wire 1 for each uri."""
    return _SINGLES[type(many)](many)


def batched(requests: Sequence[Request], limits: HelloLimits) -> Iterator[Batch]:
    """Single requests as few that keep to the daemon's limits; what cannot be joined goes alone."""
    for kind, group in groupby(requests, _kind):
        alike = list(group)
        if kind is None or len(alike) == 1:
            yield from [Batch(request, 1) for request in alike]
        else:
            yield from pieces(_joined(alike), limits)


def waves(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """The requests in groups, each to be sent once the one before it is answered: then they mean what they do
    on wire 1. There a daemon takes one after the other, while what it gets in frames goes on side by side."""
    for (_, only_tells), alike in groupby(requests, lambda request: (type(request), _only_tells(request))):
        if only_tells:
            yield list(alike)
        else:
            yield from _of_distinct_uris(alike)


def _of_distinct_uris(requests: Iterable[Request]) -> Iterator[list[Request]]:
    wave: dict[str | None, Request] = {}
    for request in requests:
        uri = getattr(request, "uri", None)
        if uri in wave:
            yield list(wave.values())
            wave = {}
        wave[uri] = request
    yield list(wave.values())


def _only_tells(request: Request) -> bool:
    """Whether it changes nothing that another request could notice."""
    if isinstance(request, Locate):
        return _kind(request) is not None
    return isinstance(request, (Ping, GetStatus, GetDevices, GetWriteStatus, RecordTelemetry))


def spares_stored(request: BatchRequest) -> bool:
    """Whether it stages nothing where the object is stored already."""
    return isinstance(request, StageMany) and bool(request.unless_stored)


# -- pieces --------------------------------------------------------------------------------------------


def _cuts(item_bytes: Sequence[int], limits: HelloLimits) -> Iterator[tuple[int, int]]:
    """Where each piece starts and ends. One item is a piece, however long it is."""
    most_bytes = limits.max_request_bytes - FRAME_BYTES
    start, left_bytes = 0, most_bytes
    for index, size_bytes in enumerate(item_bytes):
        if index > start and (size_bytes > left_bytes or index - start >= limits.max_batch):
            yield start, index
            start, left_bytes = index, most_bytes
        left_bytes -= size_bytes
    if item_bytes:
        yield start, len(item_bytes)


def _item_bytes(many: BatchRequest, uris: Sequence[str], bounds: Sequence[int]) -> list[int]:
    """No less than each item takes in a frame."""
    item_bytes = [ITEM_BYTES + len(uri.encode()) for uri in uris]
    if isinstance(many, CommitMany):
        for index, stage_id in enumerate(many.stage_ids):
            item_bytes[index] += len(stage_id.encode()) + _U32_BYTES * (bounds[index + 1] - bounds[index])
    return item_bytes


def _checksum_bounds(many: BatchRequest) -> list[int]:
    """Where the checksums of each uri start, and at last where those of the last one end."""
    if not isinstance(many, CommitMany) or many.checksum_counts is None:
        return [0] * (len(many.suffixes) + 1)
    ends: list[int] = np.frombuffer(many.checksum_counts, U32).cumsum().tolist()
    return [0, *ends]


def _columns(many: BatchRequest, items: slice, words: slice) -> dict[str, Any]:
    """What the request has beside the names of these items; `words` are their checksums."""
    match many:
        case StageMany():
            return {"sizes": many.sizes[items]}
        case CommitMany():
            return {
                "stage_ids": many.stage_ids[items],
                "checksum_counts": _words_in(many.checksum_counts, items),
                "checksums": _words_in(many.checksums, words),
            }
        case _:
            return {}


def _words_in(column: bytes | None, part: slice) -> bytes | None:
    return None if column is None else column[_U32_BYTES * part.start : _U32_BYTES * part.stop]


# -- single requests -----------------------------------------------------------------------------------


def _locates(many: LocateMany) -> list[Locate]:
    return [Locate(uri=uri, auto_ingest=False) for uri in many.uris()]


def _stage_writes(many: StageMany) -> list[StageWrite]:
    return [
        StageWrite(
            uri=uri,
            size_bytes=size_bytes,
            is_leader=many.is_leader,
            auto_flush_s3=many.auto_flush_s3,
            write_through=many.write_through,
            pinned=many.pinned,
            tier=many.tier,
        )
        for uri, size_bytes in zip(many.uris(), many.sizes, strict=True)
    ]


def _commit_writes(many: CommitMany) -> list[CommitWrite]:
    return [
        CommitWrite(
            uri=uri,
            write_through=many.write_through,
            local_only=many.local_only,
            chunk_checksums=checksums,
            stage_id=stage_id,
        )
        for uri, stage_id, checksums in zip(many.uris(), many.stage_ids, _checksums(many), strict=True)
    ]


def _checksums(many: CommitMany) -> list[tuple[int, ...] | None]:
    if many.checksums is None:
        return [None] * len(many.stage_ids)
    words = np.frombuffer(many.checksums, U32).tolist()
    return [tuple(words[start:end]) for start, end in pairwise(_checksum_bounds(many))]


_SINGLES: dict[type[BatchRequest], Callable[[Any], Sequence[Request]]] = {
    LocateMany: _locates,
    StageMany: _stage_writes,
    CommitMany: _commit_writes,
    EvictMany: lambda many: [Evict(uri=uri) for uri in many.uris()],
}


# -- joining -------------------------------------------------------------------------------------------


def _kind(request: Request) -> tuple[object, ...] | None:
    """What requests must share to be joined; None for those that go alone."""
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
    return _JOIN[type(requests[0])](tuple([request.uri for request in requests]), requests)


def _stage_many(uris: tuple[str, ...], requests: Sequence[StageWrite]) -> BatchRequest:
    first = requests[0]
    return StageMany.trusted(
        suffixes=uris,
        sizes=tuple([request.size_bytes for request in requests]),
        is_leader=first.is_leader,
        auto_flush_s3=first.auto_flush_s3,
        write_through=first.write_through,
        pinned=first.pinned,
        tier=first.tier,
    )


def _commit_many(uris: tuple[str, ...], requests: Sequence[CommitWrite]) -> BatchRequest:
    words = [request.chunk_checksums for request in requests if request.chunk_checksums is not None]
    return CommitMany.trusted(
        suffixes=uris,
        stage_ids=tuple([request.stage_id for request in requests]),
        local_only=bool(requests[0].local_only),
        write_through=requests[0].write_through,
        checksum_counts=packed([len(each) for each in words], U32) if words else None,
        checksums=packed(list(chain.from_iterable(words)), U32) if words else None,
    )


_JOIN: dict[type[Request], Callable[[tuple[str, ...], Any], BatchRequest]] = {
    Locate: lambda uris, _: LocateMany.trusted(suffixes=uris, layouts=True),
    StageWrite: _stage_many,
    CommitWrite: _commit_many,
    Evict: lambda uris, _: EvictMany.trusted(suffixes=uris),
}
