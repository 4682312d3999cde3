"""How a scripted daemon takes a batch: uri by uri, as its singles, whose replies are put together again."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

from hypercache_protocol import SyncStatus, Tier
from hypercache_protocol.batches import (
    BatchRequest,
    CommitMany,
    CommittedMany,
    EvictedMany,
    EvictMany,
    ItemError,
    LocatedMany,
    LocateMany,
    StagedMany,
    StageMany,
)
from hypercache_protocol.layout import STATUS_CODES, Layout, pack_layouts, packed, packed_bits
from hypercache_protocol.messages import (
    CommitWrite,
    ErrorReply,
    Evict,
    HitReply,
    Locate,
    MissReply,
    Reply,
    Request,
    StagedReply,
    StageWrite,
)


def singles_of(request: BatchRequest) -> list[Request]:
    """What the batch would have been on wire 1."""
    uris = request.uris()
    match request:
        case LocateMany():
            return [Locate(uri=uri, auto_ingest=False) for uri in uris]
        case EvictMany():
            return [Evict(uri=uri) for uri in uris]
        case StageMany():
            return [
                StageWrite(uri=uri, size_bytes=size, auto_flush_s3=request.auto_flush_s3, tier=request.tier)
                for uri, size in zip(uris, request.sizes, strict=True)
            ]
        case CommitMany():
            assert request.checksum_counts is not None
            assert request.checksums is not None
            counts = struct.unpack(f"<{len(uris)}I", request.checksum_counts)
            words = iter(struct.unpack(f"<{sum(counts)}I", request.checksums))
            return [
                CommitWrite(
                    uri=uri,
                    stage_id=stage_id,
                    local_only=request.local_only,
                    chunk_checksums=tuple(itertools.islice(words, count)),
                )
                for uri, stage_id, count in zip(uris, request.stage_ids, counts, strict=True)
            ]
        case _:
            raise AssertionError(request)


def together(request: BatchRequest, replies: Sequence[Any]) -> Reply:
    """The replies to the singles as one."""
    done = [reply for reply in replies if not isinstance(reply, ErrorReply | MissReply)]
    bits = packed_bits([not isinstance(reply, ErrorReply | MissReply) for reply in replies])
    errors = tuple(
        ItemError(index=index, error_message=reply.error_message, error_code=reply.error_code)
        for index, reply in enumerate(replies)
        if isinstance(reply, ErrorReply)
    )
    match request:
        case LocateMany():
            layouts = pack_layouts([layout_of(reply) for reply in done]) if request.layouts else None
            verifiable = packed_bits(
                [isinstance(reply, HitReply) and layout_of(reply).checksums is not None for reply in replies]
            )
            return LocatedMany(present=bits, verifiable=verifiable, layouts=layouts)
        case EvictMany():
            return EvictedMany(done=bits, errors=errors)
        case StageMany():
            staged = [reply for reply in replies if isinstance(reply, StagedReply)]
            return StagedMany(
                done=packed_bits([isinstance(reply, StagedReply) for reply in replies]),
                stage_ids=tuple(reply.stage_id for reply in staged),
                layouts=pack_layouts([layout_of(reply) for reply in staged]),
                errors=errors,
                stored=packed_bits([isinstance(reply, HitReply) for reply in replies])
                if request.unless_stored
                else None,
            )
        case _:
            return CommittedMany(
                done=bits,
                object_sizes=packed([reply.object_size for reply in done], "<u8"),
                generations=packed([reply.generation or 0 for reply in done], "<u8"),
                sync_statuses=bytes([STATUS_CODES[reply.sync_status] for reply in done]),
                errors=errors,
            )


def layout_of(reply: HitReply | StagedReply) -> Layout:
    """One reply's layout, to be packed."""
    chunks = reply.chunk_layout
    sums = [chunk.checksum for chunk in chunks if chunk.checksum is not None]
    return Layout(
        reply.object_size,
        (reply.generation or 0) if isinstance(reply, HitReply) else 0,
        reply.sync_status or SyncStatus.STAGED,
        chunks[0].tier if chunks else Tier.NVME,
        [chunk.device for chunk in chunks],
        [chunk.offset for chunk in chunks],
        [chunk.length for chunk in chunks],
        sums if len(sums) == len(chunks) and reply.sync_status is not SyncStatus.STAGED else None,
    )
