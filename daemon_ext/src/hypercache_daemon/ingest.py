"""Fetching: what is not here is brought from the place that its uri names, where the configuration allows it.

Rules:
1. Callers that want one missing object share one fetch.
2. A fetched object is committed whole, with checksums, or not at all.
3. What a client commits meanwhile wins over what was fetched.
4. Nothing older takes the place of an object that waits for a device that failed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import trio

from hypercache_protocol.checksum import crc32
from hypercache_protocol.errors import ErrorCode
from hypercache_protocol.fields import Tier
from hypercache_protocol.states import StateEvent

from .access import DeviceError
from .backend import Backend, BackendError, Target
from .catalog import CatalogError
from .committing import Committer
from .core.objects import StagedWrite, StageOptions, StoredObject, packed_checksums
from .errors import DaemonError, sole
from .orders import StageOrder
from .staging import Stager
from .store import Store

log = logging.getLogger(__name__)

_AT_ONCE = 4


class _Fetch:
    """One fetch under way, and everybody who waits for it."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.result: StoredObject | None = None
        self.error: DaemonError | None = None


@dataclass
class Ingester:
    """Fetches missing objects, some at once."""

    store: Store
    stager: Stager
    committer: Committer
    backend: Backend
    nursery: trio.Nursery
    ingested_objects: int = 0
    ingested_bytes: int = 0
    _fetches: dict[str, _Fetch] = field(default_factory=dict)
    _slots: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(_AT_ONCE))

    def can_fetch(self, uri: str) -> bool:
        """True where the configuration names a place that `uri` may be fetched from."""
        return self.backend.ingest_source(uri) is not None

    async def fetch(self, uri: str, tier: Tier | None) -> StoredObject | None:
        """The object, fetched unless it is here by now; None where its source has none either.

        Raises:
            DaemonError: no source is allowed, there is no space, or the source failed.

        If cancelled: the fetch goes on for those who wait for it, and for the next who asks.
        """
        source = self.backend.ingest_source(uri)
        if source is None:
            raise DaemonError(
                ErrorCode.NO_BACKEND,
                f"{uri} may not be fetched: no backend holds it and no --ingest-prefix allows its place",
            )
        fetch = self._fetches.get(uri)
        if fetch is None:
            fetch = self._fetches[uri] = _Fetch()
            self.nursery.start_soon(self._run, uri, tier, source, fetch)
        await fetch.done.wait()
        if fetch.error is not None:
            raise fetch.error
        return fetch.result

    async def _run(self, uri: str, tier: Tier | None, source: Target, fetch: _Fetch) -> None:
        try:
            async with self._slots:
                fetch.result = await self._fetch(uri, tier, source)
        except DaemonError as error:
            fetch.error = error
        except (BackendError, DeviceError, OSError, CatalogError) as error:
            log.warning("%s could not be fetched: %s", uri, error)
            fetch.error = DaemonError(ErrorCode.BACKEND_FAILED, f"{uri} could not be fetched: {error}")
        except Exception:  # the boundary: a fault of ours must not end the daemon with all its clients
            log.exception("fetching %s failed by a fault of the daemon", uri)
            fetch.error = DaemonError(
                ErrorCode.INTERNAL, f"{uri} could not be fetched by a fault of the daemon; its log says more"
            )
        finally:
            del self._fetches[uri]
            fetch.done.set()

    async def _fetch(self, uri: str, tier: Tier | None, source: Target) -> StoredObject | None:
        here = self.store.cache.get(uri)
        if here is not None:
            return here
        if self.store.cache.withholds_the_newest(uri):
            return None
        if await trio.to_thread.run_sync(self.backend.size_bytes, source, abandon_on_cancel=True) is None:
            return None
        size_bytes, pieces = await trio.to_thread.run_sync(
            self.backend.download, source, abandon_on_cancel=True
        )
        options = StageOptions(auto_flush=False, write_through=False, pinned=False)
        staged = sole(await self.stager.stage(StageOrder([uri], [size_bytes], options, tier, None)))
        committed = False
        try:
            # What is committed from here on overtakes it; what was before may be gone again at the end.
            if (here := self.store.cache.get(uri)) is not None:
                return here
            # Cancelled only when the daemon ends: then no source that hangs may keep it.
            checksums = await trio.to_thread.run_sync(self._fill, staged, pieces, abandon_on_cancel=True)
            committed = await self._commit(staged, checksums)
        finally:
            if not committed:
                store = self.store
                store.cache.discard(staged, store.clock(), store.times.quarantine_s)
        return self.store.cache.get(uri)

    def _fill(self, staged: StagedWrite, pieces: Iterator[bytes]) -> tuple[int, ...]:
        """Write the pieces to the staged blocks; runs in a worker thread. Returns each chunk's CRC-32."""
        self.store.vouch(staged.tier, staged.extents)  # nobody else's disk is written to
        checksums = []
        buffer = bytearray()
        for extent in staged.extents:
            while len(buffer) < extent.length:
                piece = next(pieces, b"")
                if not piece:
                    raise BackendError(f"{staged.uri} shrank while it was fetched")
                buffer += piece
            chunk = bytes(buffer[: extent.length])
            del buffer[: extent.length]
            self.store.write(staged.tier, extent, chunk)
            checksums.append(crc32(chunk))
        if buffer or next(pieces, b""):
            raise BackendError(f"{staged.uri} grew while it was fetched")
        self.store.vouch(staged.tier, staged.extents)
        return tuple(checksums)

    async def _commit(self, staged: StagedWrite, checksums: tuple[int, ...]) -> bool:
        """False where a client committed meanwhile, even if that is evicted again: its bytes are newer."""
        async with self.store.locks.hold(staged.uri):
            cache = self.store.cache
            if staged.overtaken or cache.get(staged.uri) or cache.withholds_the_newest(staged.uri):
                return False
            stored = self.store.cache.plan_commit(
                staged, StateEvent.INGESTED, checksums=packed_checksums(checksums)
            )
            await self.committer.swap_in([(staged, stored)])
        self.ingested_objects += 1
        self.ingested_bytes += stored.size_bytes
        return True
