"""Keys, what is stored under them, and the memory that it is loaded into."""

from __future__ import annotations

import os
from pathlib import Path

from hypercache_connector.keys import UriMapping
from hypercache_protocol.messages import HitReply

MIB = 1 << 20
MAPPING = UriMapping("test")


def uri(key: str) -> str:
    return MAPPING.uri(key)


def payloads(sizes: list[int]) -> list[bytearray]:
    return [bytearray(os.urandom(size)) for size in sizes]


def keys_for(sizes: list[int]) -> list[str]:
    return [f"org/model@00000001@0@{number:04x}" for number in range(len(sizes))]


def empty(sizes: list[int]) -> list[bytearray]:
    return [bytearray(size) for size in sizes]


def with_chunks(hit: HitReply, **update: object) -> HitReply:
    """The same hit with other values in each of its chunks."""
    chunks = tuple(chunk.model_copy(update=update) for chunk in hit.chunk_layout)
    return hit.model_copy(update={"chunk_layout": chunks})


def path_of(descriptor: int) -> str:
    """What is open as `descriptor`."""
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())
