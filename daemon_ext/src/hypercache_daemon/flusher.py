"""Write-back: brings dirty objects to the backend, tries again where it fails, never gives up.

Rules:
1. Uploads of one uri follow each other; the last one is of the newest generation.
2. An object that is replaced or removed while it is uploaded keeps its blocks until the upload ends, and
   the upload's end changes nothing in the cache.
3. An upload goes on when a device fails under it: whether it ended well is known in the end.
4. SYNCED_BACKEND is written to the catalog before anybody is told.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator

import trio

from hypercache_protocol.checksum import crc32
from hypercache_protocol.states import StateEvent, SyncStatus

from .access import DeviceError
from .backend import Backend, BackendError, Target
from .catalog import CatalogError
from .catalog_rows import Put
from .core.objects import StoredObject
from .locks import UriLocks
from .store import Store

log = logging.getLogger(__name__)

_AT_ONCE = 4
_LONGEST_DELAY_S = 300.0


class Flusher:
    """Uploads some objects at once, in the background or for who waits."""

    def __init__(self, store: Store, backend: Backend) -> None:
        self._store = store
        self._backend = backend
        self._slots = trio.CapacityLimiter(_AT_ONCE)
        self._uploading = UriLocks()
        self._sent: dict[str, int] = {}
        self.first_delay_s = 1.0
        """About how long a failed upload waits for its next try; doubled with each further one."""
        self._failures: dict[str, int] = {}  # consecutive, by uri
        self._delayed: set[str] = set()  # wait for another try
        self._queued: set[str] = set()
        self._queue, self._work = trio.open_memory_channel[str](math.inf)
        self.uploaded_objects = 0
        self.uploaded_bytes = 0
        self.failed_uploads = 0
        self.last_error: str | None = None

    def has_target(self, uri: str) -> bool:
        """True where an object of this uri goes to a backend."""
        return self._backend.upload_target(uri) is not None

    def submit(self, uri: str) -> None:
        """Upload the object in the background, if there is a backend for it. What waits already, in the
        queue or for its next try, takes the newest generation with it when its turn comes."""
        if uri not in self._queued and uri not in self._delayed and self.has_target(uri):
            self._queued.add(uri)
            self._queue.send_nowait(uri)

    @property
    def waiting(self) -> int:
        """Uploads that nobody has begun yet."""
        return len(self._queued) + len(self._delayed)

    def progress_percent(self, stored: StoredObject) -> float:
        """How much of an object the backend has been sent: 0 to 100."""
        match stored.state:
            case SyncStatus.SYNCED_BACKEND | SyncStatus.LOCAL_ONLY:
                return 100.0
            case SyncStatus.SYNCING_BACKEND:
                return 100.0 * self._sent.get(stored.uri, 0) / max(stored.size_bytes, 1)
            case _:
                return 0.0

    async def run(self) -> None:
        """Work until cancelled. Everything that is dirty at the start is submitted first."""
        for uri in self._store.cache.uris(SyncStatus.COMMITTED):
            self.submit(uri)
        async with trio.open_nursery() as nursery:
            for _ in range(_AT_ONCE):
                nursery.start_soon(self._work_off, nursery)

    async def upload(self, uri: str, generation: int | None = None) -> str | None:
        """Upload the object now.

        Args:
            generation: that one or none; it has to be here still, or a newer one.

        Returns:
            None where there is nothing left to do, else what went wrong.
        """
        async with self._uploading.hold(uri), self._slots:
            stored = self._store.cache.get(uri)
            target = self._backend.upload_target(uri)
            if stored is None and generation is not None:
                return "it was removed, or a device of its failed, before its turn came"
            if stored is None or target is None or stored.state is not SyncStatus.COMMITTED:
                return None
            if generation is not None and stored.generation != generation:
                return None
            return await self._upload(stored, target)

    async def _work_off(self, nursery: trio.Nursery) -> None:
        async for uri in self._work:
            self._queued.discard(uri)
            try:
                problem = await self.upload(uri)
            except Exception as fault:  # the boundary: a fault of ours must not end the daemon
                log.exception("upload of %s failed by a fault of the daemon", uri)
                problem = str(fault)
            if problem is None:
                self._failures.pop(uri, None)
                continue
            self._failures[uri] = self._failures.get(uri, 0) + 1
            if uri not in self._delayed:
                self._delayed.add(uri)
                nursery.start_soon(self._submit_later, uri, self._failures[uri])

    async def _submit_later(self, uri: str, failures: int) -> None:
        delay_s = min(_LONGEST_DELAY_S, self.first_delay_s * 2 ** min(failures - 1, 16))
        await trio.sleep(delay_s * random.uniform(0.5, 1.0))
        self._delayed.discard(uri)
        self.submit(uri)

    async def _upload(self, stored: StoredObject, target: Target) -> str | None:
        cache = self._store.cache
        cache.apply_change(cache.changed(stored, StateEvent.UPLOAD_STARTED))
        cache.begin_reading(stored)
        problem: str | None = "the upload was cut off"
        try:
            await trio.to_thread.run_sync(self._send, stored, target, abandon_on_cancel=True)
            problem = None
        except (BackendError, DeviceError, OSError) as error:
            problem = str(error)
            log.warning("upload of %s failed: %s", stored.uri, error)
        finally:
            cache.end_reading(stored)
            self._sent.pop(stored.uri, None)
            problem = await self._settle(stored, problem)
        return problem

    def _send(self, stored: StoredObject, target: Target) -> None:
        """Runs in a worker thread."""
        self._backend.upload(target, self._counted_pieces(stored), stored.size_bytes, stored.sha256)

    def _counted_pieces(self, stored: StoredObject) -> Iterator[bytes]:
        self._sent[stored.uri] = 0
        checksums = stored.checksums or [None] * len(stored.extents)
        pieces = self._store.pieces(stored.tier, stored.extents)
        for number, (piece, checksum) in enumerate(zip(pieces, checksums, strict=True)):
            if checksum is not None and crc32(piece) != checksum:
                # Out there nothing would tell it from what was meant.
                raise DeviceError(f"chunk {number} of {stored.uri} is corrupt and must not reach the backend")
            yield piece
            self._sent[stored.uri] += len(piece)
        self._store.vouch(stored.tier, stored.extents)  # while the backend can still throw it all away

    async def _settle(self, stored: StoredObject, problem: str | None) -> str | None:
        """Write down how an upload ended; what it was of may be gone or replaced by now."""
        with trio.CancelScope(shield=True):
            async with self._store.locks.hold(stored.uri):
                now = self._store.cache.owner(stored.uri)
                if now is not None and now.generation == stored.generation:
                    problem = await self._settle_locked(now, problem)
        self._count(stored, problem)
        return problem

    async def _settle_locked(self, now: StoredObject, problem: str | None) -> str | None:
        cache = self._store.cache
        if problem is None:
            try:
                synced = cache.changed(now, StateEvent.UPLOAD_CONFIRMED)
                await self._store.make_durable([Put(synced)])
            except CatalogError as error:
                problem = str(error)
            else:
                cache.apply_change(synced)
                return None
        cache.apply_change(cache.changed(now, StateEvent.UPLOAD_FAILED))
        return problem

    def _count(self, stored: StoredObject, problem: str | None) -> None:
        if problem is None:
            self.uploaded_objects += 1
            self.uploaded_bytes += stored.size_bytes
        else:
            self.failed_uploads += 1
            self.last_error = problem
