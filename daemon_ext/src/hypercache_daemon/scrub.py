"""The scrub: reads what has checksums, slowly and one piece at a time, and drops what is corrupt.

Rules:
1. It reads from the devices themselves, in a worker thread of its own: no request waits for it.
2. The blocks of an object stay its own while a piece is read, and it reads no further once that object is
   gone: nobody waits hours for them. Only the very object that was read is dropped: what is replaced or
   evicted meanwhile is nobody's corruption.
3. Wrong twice in a row is corrupt, once the device is known for the pool's own: its path may lead to another
   since the last look. It is dropped whatever its state, for no copy of it may get any further, and the log
   says what is lost with it: once, since then it is gone.
4. What cannot be read is the device's fault, which is not judged here; a RAM file that is gone or cut off
   is a lost object.
5. A round goes through the catalog in the order of commits and goes on after a restart where it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import trio

from hypercache_protocol.fields import Tier
from hypercache_protocol.states import DIRTY

from .access import DeviceError
from .catalog_rows import Remember
from .core.extents import Extent
from .core.objects import StoredObject
from .removal import Remover
from .store import Store

log = logging.getLogger(__name__)

_FIRST_AFTER_S = 60.0  # a start has enough to do
_ROUND_EVERY_S = 86_400.0
_PIECE_BYTES = 1024 * 1024  # half a millisecond of a drive
_LEAST_BYTES = 64 * 1024  # what a read counts as at least: a small one costs the daemon as much as that
_URIS_TOGETHER = 64
_PAUSE_S = 0.01  # after each so many, whether they had to be read or not
_PLACE = "scrubbed up to generation"
_T = TypeVar("_T")


class Scrubber:
    """Goes through all objects once a day, and longer where the pace asks for it.

    Args:
        pace_bytes_s: the most that is read in a second; 0 turns it off.
    """

    def __init__(self, store: Store, remover: Remover, pace_bytes_s: float) -> None:
        self._store = store
        self._remover = remover
        self._pace_bytes_s = pace_bytes_s
        self._thread = trio.CapacityLimiter(1)
        self._after = int(store.catalog.remembered.get(_PLACE, 0))
        self._rounds = 0
        self._objects = 0
        self._bytes = 0
        self._unreadable = 0
        self._corrupt = 0
        self._corrupt_dirty = 0
        self._corrupt_pinned = 0

    def report(self) -> dict[str, int]:
        """What was done since the start of the daemon. A corrupt object was the only copy where it was
        dirty."""
        return {
            "rounds": self._rounds,
            "objects": self._objects,
            "bytes": self._bytes,
            "unreadable_objects": self._unreadable,
            "corrupt_objects": self._corrupt,
            "corrupt_dirty_objects": self._corrupt_dirty,
            "corrupt_pinned_objects": self._corrupt_pinned,
        }

    async def run(self) -> None:
        """Scrub until cancelled."""
        if not self._pace_bytes_s:
            return
        await trio.sleep(_FIRST_AFTER_S)
        while True:
            next_at = trio.current_time() + _ROUND_EVERY_S
            try:
                await self.round()
            except Exception:  # the boundary: a fault of ours must not end the daemon
                log.exception("scrubbing failed, and goes on tomorrow")
            await trio.sleep_until(next_at)

    async def round(self) -> None:
        """Check what is left of the round that was begun last."""
        last = self._store.cache.newest_generation  # else it would not end where commits are quicker
        while found := await self._store.catalog.uris_between(self._after, last, _URIS_TOGETHER):
            for _, uri in found:
                await self._check(uri)
            self._remember(found[-1][0])
            await trio.sleep(_PAUSE_S)
        self._remember(0)
        self._rounds += 1

    def _remember(self, generation: int) -> None:
        self._after = generation
        self._store.catalog.post([Remember(_PLACE, str(generation))])

    async def _check(self, uri: str) -> None:
        stored = self._store.cache.peek(uri)
        if stored is None or stored.checksums is None:
            return
        problem = await self._problem(stored)
        self._objects += 1
        if problem is not None:
            await self._drop(stored, problem)

    async def _problem(self, stored: StoredObject) -> str | None:
        """Why the object must go, or None; also where it went by itself."""
        try:
            for extent, checksum in zip(stored.extents, stored.checksums or (), strict=True):
                for _ in range(2):
                    found = await self._crc32_of(stored, extent)
                    if found is None:
                        return None
                    if found == checksum:
                        break
                    await self._in_thread(self._store.vouch, stored.tier, [extent])
                else:
                    path = self._store.path(stored.tier, extent.device)
                    place = f"{extent.length} bytes at {extent.offset} of {path}"
                    return f"{place} have the CRC-32 {found:#010x} and not {checksum:#010x}"
        except (DeviceError, OSError) as error:
            self._unreadable += 1
            lost = stored.tier is Tier.RAM and isinstance(error, (DeviceError, FileNotFoundError))
            return str(error) if lost else None
        return None

    async def _crc32_of(self, stored: StoredObject, extent: Extent) -> int | None:
        """The CRC-32 of a chunk, or None where the object is found no more."""
        cache = self._store.cache
        device, offset, length = extent
        crc = 0
        for start in range(0, length, _PIECE_BYTES):
            piece = Extent(device, offset + start, min(_PIECE_BYTES, length - start))
            now = cache.peek(stored.uri)
            if now is None or now.generation != stored.generation:
                return None
            cache.begin_reading(stored)
            try:
                crc = await self._in_thread(self._store.crc32_of, stored.tier, piece, crc)
            finally:
                cache.end_reading(stored)
            self._bytes += piece.length
            await trio.sleep(max(piece.length, _LEAST_BYTES) / self._pace_bytes_s)
        return crc

    async def _in_thread(self, function: Callable[..., _T], *arguments: object) -> _T:
        return await trio.to_thread.run_sync(
            function, *arguments, limiter=self._thread, abandon_on_cancel=True
        )

    async def _drop(self, stored: StoredObject, problem: str) -> None:
        dropped = await self._remover.drop([stored.uri], lambda now: now.generation == stored.generation)
        for gone in dropped:
            self._corrupt += 1
            self._corrupt_dirty += gone.state in DIRTY
            self._corrupt_pinned += gone.pinned
            log.error(
                "%s (%s%s) is corrupt and was dropped%s: %s",
                gone.uri,
                gone.state.value,
                ", pinned" if gone.pinned else "",
                "; NO BACKEND HAS IT, so it is lost" if gone.state in DIRTY else "",
                problem,
            )
