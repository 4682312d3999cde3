"""Sealed objects as the operations meet them: told from others, planned, sealed and opened.
(sealing.py has the format.)

Rule: an object that has checksums is verified by them and is not sealed; one that has none is sealed or
unverifiable. So neither is ever taken for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from hypercache_protocol import SyncStatus

from .direct_io import Buffer, own_pages
from .engine import Engine, committed
from .layouts import Answer, Chunk, ChunkTransfer, Found, cut, doubt_about, doubt_about_lengths, transfers
from .outcomes import Outcome
from .sealing import body_bytes, seal, sealed_bytes, unseal


class SealedObject:
    """An object in memory: the caller's payload, and the tail that follows its whole blocks."""

    def __init__(self, uri: str, payload: Buffer) -> None:
        self.size_bytes = sealed_bytes(uri, payload.size_bytes)
        self._uri = uri
        self._payload = payload
        self._body_bytes = body_bytes(payload.size_bytes)
        # Pages of its own, so that it moves past the page cache without a copy.
        self._tail = Buffer(own_pages(self.size_bytes - self._body_bytes), writable=True)

    def transfers(self, key_index: int, layout: Sequence[Chunk]) -> list[ChunkTransfer]:
        """The transfers that move it from or to a layout whose lengths were checked."""
        body, tail = cut(layout, self._body_bytes)
        return [*transfers(key_index, body, self._payload), *transfers(key_index, tail, self._tail)]

    def seal(self) -> None:
        """Fill the tail, from the payload as it is now."""
        self._tail.view[:] = seal(self._uri, self._payload.view)

    def opened(self) -> Outcome:
        """OK where what was read is what was sealed under this uri; the payload is complete then."""
        whole = unseal(self._uri, self._payload.view, self._tail.view)
        return Outcome.OK if whole else Outcome.SEAL_BROKEN


def sealed_object(uri: str, payload: Buffer) -> SealedObject | Outcome:
    """The object of this payload, or NO_MEMORY where there is none for its tail."""
    try:
        return SealedObject(uri, payload)
    except OSError:
        return Outcome.NO_MEMORY


def needs_seal(answer: Answer, *, seals: bool) -> TypeGuard[Found]:
    """Whether only a seal could verify what was located, and seals are looked for."""
    return (
        seals
        and isinstance(answer, Found)
        and bool(answer.chunks)
        and all(chunk.checksum is None for chunk in answer.chunks)
    )


def doubt_about_object(answer: Answer, uri: str, payload_bytes: int, *, seals: bool) -> Outcome:
    """OK if a load of `payload_bytes` could verify what was located, else the first reason why not. An old
    daemon tells no state; see `committed`."""
    if needs_seal(answer, seals=seals):
        return _doubt_about_sealed(answer, payload_bytes, sealed_bytes(uri, payload_bytes))
    return doubt_about(answer, payload_bytes)


def _doubt_about_sealed(hit: Found, payload_bytes: int, size_bytes: int) -> Outcome:
    if hit.sync_status is SyncStatus.STAGED:
        return Outcome.STAGED
    if hit.size_bytes == payload_bytes:
        return Outcome.NO_CHECKSUM
    if hit.size_bytes != size_bytes:
        return Outcome.WRONG_SIZE
    return doubt_about_lengths(hit.chunks, size_bytes)


def looked_up(engine: Engine, uris: Sequence[str], outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes of a lookup where seals are looked for: what is there without checksums may be sealed,
    which only a load can tell, and so is found, unless it is merely staged."""
    unsure = [index for index, outcome in enumerate(outcomes) if outcome in _TELLS_NO_STATE]
    states = dict(zip(unsure, committed(engine, [uris[index] for index in unsure]), strict=True))
    return [
        Outcome.OK if outcome is Outcome.NO_CHECKSUM else states.get(index, outcome)
        for index, outcome in enumerate(outcomes)
    ]


_TELLS_NO_STATE = (Outcome.NO_SYNC_STATUS, Outcome.UNVERIFIABLE)
