"""Wire 2's batches: from columns to single requests, and from their results to columns.

Each uri has a result of its own; a batch as a whole is refused only where its columns don't fit each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import is_not
from typing import Annotated, TypeAlias, TypeVar

from pydantic import FailFast, TypeAdapter, ValidationError

from hypercache_protocol.batches import (
    CommitMany,
    CommittedMany,
    EvictedMany,
    ItemError,
    LocatedMany,
    LocateMany,
    StagedMany,
    StageMany,
)
from hypercache_protocol.errors import ErrorCode, InvalidMessage
from hypercache_protocol.fields import Uri
from hypercache_protocol.layout import (
    STATUS_CODES,
    U32,
    U64,
    packed,
    packed_bits,
    unpacked,
    values_in,
)

from .core.objects import StagedWrite, StageOptions, StoredObject
from .errors import DaemonError
from .layout_columns import layout_columns
from .orders import CommitOrder, StageOrder
from .store import Store

_T = TypeVar("_T")
_URI: TypeAdapter[str] = TypeAdapter(Uri)
_URIS: TypeAdapter[list[str]] = TypeAdapter(Annotated[list[Uri], FailFast()])


def located(store: Store, request: LocateMany) -> LocatedMany:
    """Which are here, and where they lie if that is asked."""
    uris = request.uris()
    stored = store.cache.locate(uris)
    hits: Sequence[StoredObject | StagedWrite | None] = stored
    if store.cache.staged.has_of_clients and not all(stored):
        hits = [hit or store.cache.staged.newest(uri) for hit, uri in zip(stored, uris, strict=True)]
    layouts = None
    if request.layouts:
        layouts = layout_columns(store, [hit for hit in hits if hit is not None])
    present, verifiable = _bitmaps(hits, stored)
    return LocatedMany.trusted(present=present, verifiable=verifiable, layouts=layouts)


def _bitmaps(
    hits: Sequence[StoredObject | StagedWrite | None], stored: Sequence[StoredObject | None]
) -> tuple[bytes, bytes]:
    """Which are here, and which of them can be verified. Most lookups find all or nothing, and those of many
    keys spend their time here: so as few looks at each as it takes, and no property is asked for."""
    if not any(hits):
        nothing = packed_bits([False] * len(hits))
        return nothing, nothing
    flags = [hit is not None and hit.packed_checksums is not None for hit in stored]
    verifiable = packed_bits(flags)
    if all(flags):
        return verifiable, verifiable
    return packed_bits(list(map(is_not, hits, repeat(None)))), verifiable


# -- staging -------------------------------------------------------------------------------------------

Staged: TypeAlias = StagedWrite | StoredObject | DaemonError
"""What a stage_many comes to for one uri."""


def settled_at_once(
    store: Store, request: StageMany, forbidden: Sequence[DaemonError | None]
) -> list[Staged | None]:
    """For each uri what settles it without a staged write: why it is refused at once, or what is stored of it
    where that spares the client to write it again.

    Args:
        forbidden: for each uri why the client may not write it, or None.

    Raises:
        InvalidMessage: there is not one size for each uri.
    """
    _check_count("sizes", len(request.sizes), len(request.suffixes))
    uris = request.uris()
    stored = _stored(store, request, uris)
    if not any(forbidden) and not any(stored) and _are_uris(uris):  # as it mostly is
        return [None] * len(uris)
    return [
        refusal or _uri_refusal(uri) or here
        for uri, refusal, here in zip(uris, forbidden, stored, strict=True)
    ]


def _stored(store: Store, request: StageMany, uris: Sequence[str]) -> Sequence[StoredObject | None]:
    found = store.cache.locate(uris) if request.unless_stored else ()
    if not any(found):
        return [None] * len(uris)
    return [
        stored if stored and stored.size_bytes == size_bytes and stored.is_verifiable else None
        for stored, size_bytes in zip(found, request.sizes, strict=True)
    ]


def stage_order(request: StageMany, settled: Sequence[Staged | None], connection_id: int) -> StageOrder:
    """What is to be staged: all uris that nothing settles."""
    return StageOrder(
        not_refused(request.uris(), settled),
        not_refused(request.sizes, settled),
        StageOptions(request.auto_flush_s3, request.write_through, request.pinned),
        request.tier,
        connection_id,
    )


def still_stored(store: Store, results: Sequence[Staged]) -> list[Staged | None]:
    """The results, but None for each object that isn't here any more."""
    return [None if _is_gone(store, result) else result for result in results]


def _is_gone(store: Store, result: Staged) -> bool:
    if not isinstance(result, StoredObject):
        return False
    now = store.cache.get(result.uri)
    return now is None or now.generation != result.generation


def _are_uris(names: list[str]) -> bool:
    try:
        _URIS.validate_python(names)
    except ValidationError:
        return False
    return True


def _uri_refusal(uri: str) -> DaemonError | None:
    try:
        _URI.validate_python(uri)
    except ValidationError as error:
        return DaemonError(ErrorCode.BAD_REQUEST, f"uri: {error.errors()[0]['msg']} (got {uri[:64]!r})")
    return None


def staged_reply(store: Store, results: Sequence[Staged], *, tells_stored: bool) -> StagedMany:
    """The reply to a stage_many; `tells_stored` if the client asked for nothing where it is stored."""
    done = [result for result in results if isinstance(result, StagedWrite)]
    stored = packed_bits([isinstance(result, StoredObject) for result in results])
    return StagedMany.trusted(
        done=packed_bits([isinstance(result, StagedWrite) for result in results]),
        stored=stored if tells_stored else None,
        stage_ids=tuple([staged.stage_id for staged in done]),
        layouts=layout_columns(store, done),
        errors=_errors(results),
    )


# -- committing and evicting ---------------------------------------------------------------------------


def commit_order(
    request: CommitMany, forbidden: Sequence[DaemonError | None], connection_id: int
) -> CommitOrder:
    """What is to be committed: all uris that are not forbidden.

    Raises:
        InvalidMessage: the columns don't fit each other.
    """
    count = len(request.suffixes)
    _check_count("stage_ids", len(request.stage_ids), count)
    return CommitOrder(
        not_refused(request.uris(), forbidden),
        not_refused(request.stage_ids, forbidden),
        not_refused(_checksums(request, count), forbidden),
        request.local_only,
        request.write_through,
        connection_id,
    )


def _checksums(request: CommitMany, count: int) -> Sequence[bytes | None]:
    """Those of each uri, packed."""
    if request.checksums is None or request.checksum_counts is None:
        if request.checksums is not request.checksum_counts:
            raise InvalidMessage("commit_many: give both checksums and checksum_counts, or neither")
        return [None] * count
    counts = unpacked("checksum_counts", request.checksum_counts, U32, count)
    words = values_in("checksums", request.checksums, U32, sum(counts)).tobytes()
    ends = [U32.itemsize * end for end in accumulate(counts)]
    return [words[end - U32.itemsize * number : end] for end, number in zip(ends, counts, strict=True)]


def committed_reply(results: Sequence[StoredObject | DaemonError]) -> CommittedMany:
    """The reply to a commit_many."""
    done = [result for result in results if isinstance(result, StoredObject)]
    return CommittedMany.trusted(
        done=_done(results),
        object_sizes=packed([stored.size_bytes for stored in done], U64),
        generations=packed([stored.generation for stored in done], U64),
        sync_statuses=bytes([STATUS_CODES[stored.announced] for stored in done]),
        errors=_errors(results),
    )


def evicted_reply(results: Sequence[bool | DaemonError]) -> EvictedMany:
    """The reply to an evict_many; False is a uri that was not here."""
    return EvictedMany.trusted(
        done=packed_bits([result is True for result in results]), errors=_errors(results)
    )


def not_refused(items: Sequence[_T], refusals: Sequence[object | None]) -> list[_T]:
    """Those whose refusal, or whatever else settles them, is None, in order."""
    return [item for item, refusal in zip(items, refusals, strict=True) if refusal is None]


def _done(results: Sequence[object]) -> bytes:
    return packed_bits([not isinstance(result, DaemonError) for result in results])


def _errors(results: Sequence[object]) -> tuple[ItemError, ...]:
    return tuple(
        ItemError.trusted(index=index, error_message=result.message, error_code=result.code)
        for index, result in enumerate(results)
        if isinstance(result, DaemonError)
    )


def _check_count(name: str, count: int, wanted: int) -> None:
    if count != wanted:
        raise InvalidMessage(f"{name} has {count} entries for {wanted} uris; give one for each")
