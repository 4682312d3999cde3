"""Everything that takes objects away: evict by a client, purge, eviction by policy, expiry."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain, islice

import trio

from hypercache_protocol.fields import Tier
from hypercache_protocol.states import SyncStatus

from .catalog import CatalogError
from .catalog_rows import Delete
from .core.objects import StoredObject
from .core.rooms import Room
from .store import Store, hold_change

log = logging.getLogger(__name__)

_TOGETHER = 256  # objects that leave in one turn: some milliseconds of the event loop


class Remover:
    """Takes objects away, durably first.

    Args:
        high, low: shares of a pool, and of what may lie under a prefix; eviction starts above `high` and goes
            on down to `low`.
        max_objects: how many objects and staged writes are kept at once, in all pools together.
    """

    def __init__(self, store: Store, *, high: float, low: float, max_objects: int) -> None:
        self._store = store
        self._high = high
        self._low = low
        self.max_objects = max_objects
        self._wake = trio.Event()
        self.evicted_objects = 0
        self.evicted_bytes = 0

    async def evict(self, uris: Sequence[str]) -> list[bool]:
        """Delete each committed object, or where nobody finds one the newest staged write, or where there is
        none the object that is withheld; False if neither. A uri that is given twice is evicted once, and
        both say the same.

        Raises:
            CatalogError: none of them was deleted.
        """
        async with self._store.locks.hold_all(uris):
            doomed = [uri for uri in uris if not self._is_only_staged(uri)]
            removed = {stored.uri for stored in await self._remove_locked(doomed)}
            gone = {uri: uri in removed or self._discard_newest(uri) for uri in dict.fromkeys(uris)}
        return [gone[uri] for uri in uris]

    def _is_only_staged(self, uri: str) -> bool:
        """Whether a staged write is all that clients see. Who gives it up doesn't know of what is withheld,
        which may be the only copy."""
        cache = self._store.cache
        return cache.get(uri) is None and cache.staged.newest(uri) is not None

    def _discard_newest(self, uri: str) -> bool:
        store = self._store
        staged = store.cache.staged.newest(uri)
        if staged is None:
            return False
        # Its row in the catalog stays until its blocks are free.
        store.cache.discard(staged, store.clock(), store.times.stage_expiry_s)
        return True

    async def purge(self) -> int:
        """Delete every committed object; returns how many. Staged writes are not objects and stay.

        Raises:
            CatalogError: some of them are still there.
        """
        cache = self._store.cache
        batches = chain(tuple(cache.uris()), tuple(cache.withheld()))
        removed = 0
        while batch := list(islice(batches, _TOGETHER)):
            async with self._store.locks.hold_all(batch):
                removed += len(await self._remove_locked(batch))
        return removed

    async def drop(self, uris: Sequence[str], doomed: Callable[[StoredObject], bool]) -> list[StoredObject]:
        """Delete the objects of these uris for which `doomed` holds once nobody works on them; returns
        which.

        Raises:
            CatalogError: none of them was deleted.
        """
        async with self._store.locks.hold_all(uris):
            found = [stored for stored in self._store.cache.owners(uris) if stored is not None]
            return await self._remove_locked([stored.uri for stored in found if doomed(stored)])

    async def make_room(self, room: Room, wanted_bytes: int) -> bool:
        """Evict until `wanted_bytes` fit; False, and nothing is evicted, where that could not be.

        Raises:
            CatalogError: less was evicted.
        """
        await self._store.release_all_due()
        if not room.could_hold(wanted_bytes):
            return False
        missing_bytes = room.missing_bytes(wanted_bytes)
        if missing_bytes > 0:
            await self._evict_by_policy(room, missing_bytes)
            await self._store.release_all_due()
        return True

    def object_room(self) -> int:
        """How many more objects and staged writes may be kept; below 0 after a start with a lower limit."""
        cache = self._store.cache
        return self.max_objects - len(cache) - cache.counts()[SyncStatus.STAGED]

    async def make_object_room(self, count: int) -> None:
        """Evict until `count` more objects may be kept, as far as that goes; from the fullest pool first.

        Raises:
            CatalogError: fewer were evicted.
        """
        if self.object_room() >= count:
            return
        pools = self._store.cache.pools
        for tier in sorted(pools, key=lambda tier: sum(pools[tier].counts.values()), reverse=True):
            while (missing := count - self.object_room()) > 0:
                if not await self._evict_coldest(tier, min(missing, _TOGETHER)):
                    break

    def check_watermarks(self, uris: Sequence[str]) -> None:
        """Start eviction in the background where a pool is too full, or a prefix that one of these lies
        under."""
        cache = self._store.cache
        if any(room.excess_bytes(self._high) > 0 for room in cache.rooms.around(uris)):
            self._wake.set()

    async def run(self) -> None:
        """Evict in the background whenever a pool or a prefix is above its high watermark."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            for room in self._store.cache.rooms:
                if room.excess_bytes(self._high) > 0:
                    await self._evict_in_background(room, room.excess_bytes(self._low))

    async def _evict_in_background(self, room: Room, wanted_bytes: int) -> None:
        try:
            await self._evict_by_policy(room, wanted_bytes)
        except CatalogError as error:
            log.warning("eviction from %s waits: %s", room.name, error)
        await self._store.release_all_due()

    async def _evict_by_policy(self, room: Room, wanted_bytes: int) -> None:
        """Evict the coldest objects that make up `wanted_bytes`, some at a time, so that clients have their
        turns. Those that somebody works on are passed over, so evictions that run at once take different
        ones and wait for nobody."""
        cache, is_free = self._store.cache, self._store.locks.is_free
        while wanted_bytes > 0:
            victims = cache.victims(room, wanted_bytes, is_free, _TOGETHER)
            if not victims:
                return
            await self._evict([stored.uri for stored in victims])
            wanted_bytes -= sum(stored.allocated_bytes for stored in victims)

    async def _evict_coldest(self, tier: Tier, count: int) -> int:
        """Evict the `count` coldest objects that nobody works on; returns how many there were."""
        coldest = self._store.cache.pools[tier].policy.victims()
        return await self._evict(list(islice(filter(self._store.locks.is_free, coldest), count)))

    async def _evict(self, uris: Sequence[str]) -> int:
        with self._store.locks.hold_now(uris):
            removed = await self._remove_locked(uris)
        self.evicted_objects += len(removed)
        self.evicted_bytes += sum(stored.allocated_bytes for stored in removed)
        return len(removed)

    async def _remove_locked(self, uris: Sequence[str]) -> list[StoredObject]:
        """Delete the objects of uris whose locks the caller holds."""
        store = self._store
        owners = store.cache.owners(list(dict.fromkeys(uris)))
        found = [stored for stored in owners if stored is not None]
        if not found:
            return []
        now = store.clock()
        deletes = [Delete(stored.generation) for stored in found]
        holds = [hold_change(store.cache.plan_hold(stored, now)) for stored in found]
        await store.make_durable([*deletes, *holds])
        # Until here readers found these: their blocks' rest begins now.
        store.cache.apply_removes([stored.uri for stored in found], store.clock())
        return found


async def run_janitor(store: Store, period_s: float) -> None:
    """Free blocks whose quarantine is over and drop staged writes that expired, every `period_s`. Those of a
    uri that somebody works on are passed over: they may be on their way into the catalog."""
    while True:
        await trio.sleep(period_s)
        now = store.clock()
        for staged in store.cache.expired(now, store.locks.is_free):
            log.info("the staged write %s of %s expired", staged.stage_id, staged.uri)
            store.cache.discard(staged, now, store.times.quarantine_s)
        await store.release_all_due()
