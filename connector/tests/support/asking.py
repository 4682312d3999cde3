"""What tests ask of clients, and how a daemon of theirs answers."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import pytest

from hypercache_connector import Client, DaemonUnavailable
from hypercache_connector.outcomes import Outcome
from hypercache_protocol import SyncStatus
from hypercache_protocol.batches import HelloLimits
from hypercache_protocol.messages import ChunkLocation, HitReply, Locate, Request

MakeClient = Callable[..., Client]


def locates(count: int, prefix: str = "u") -> list[Locate]:
    return [Locate(uri=f"{prefix}{number}", auto_ingest=False) for number in range(count)]


def hit(size_bytes: int) -> HitReply:
    """A reply that can be told from others by its size."""
    chunks = (ChunkLocation(device="/d", offset=0, length=size_bytes, checksum=1),) if size_bytes else ()
    return HitReply(
        object_size=size_bytes, chunk_layout=chunks, sync_status=SyncStatus.LOCAL_ONLY, generation=1
    )


def failure(client: Client, requests: Sequence[Request]) -> Outcome:
    """Why this exchange fails, as it must."""
    with pytest.raises(DaemonUnavailable) as caught:
        client.exchange(requests)
    return caught.value.outcome


def limits_of(max_batch: int, max_request_bytes: int = 1 << 20) -> HelloLimits:
    return HelloLimits(
        max_request_bytes=max_request_bytes, max_reply_bytes=1 << 20, max_in_flight=64, max_batch=max_batch
    )


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)
