"""Getting objects away from a device that failed or is drained, while clients have their turns.

A failed device's objects are withheld first, which takes no I/O, and evicted then. Nothing is allocated on
either kind of device any more, so what is found in one pass is all there is, but for what is being changed
just now: that is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import trio

from hypercache_protocol.fields import Tier
from hypercache_protocol.states import EVICTABLE

from .core.objects import StagedWrite, StoredObject
from .removal import Remover
from .store import Store

_LOOKED_AT_TOGETHER = 256  # about a millisecond
_REMOVED_TOGETHER = 512


def is_on(index: int, it: StoredObject | StagedWrite) -> bool:
    """Whether it has a chunk on the device of this index."""
    return it.tier is Tier.NVME and any(extent.device == index for extent in it.extents)


class DeviceClearing:
    """What happens to what lies on a device; it decides nothing about devices."""

    def __init__(self, store: Store, remover: Remover) -> None:
        self._store = store
        self._remover = remover

    async def uris_on(self, index: int) -> list[str]:
        """The uris of all objects and staged writes that are found and have a chunk on the device."""
        cache = self._store.cache
        found = [staged.uri for staged in cache.staged_writes() if is_on(index, staged)]
        for number, stored in enumerate(cache.objects(), 1):
            if is_on(index, stored):
                found.append(stored.uri)
            if number % _LOOKED_AT_TOGETHER == 0:
                await trio.lowlevel.checkpoint()
        return list(dict.fromkeys(found))

    async def withhold_all(self, index: int) -> None:
        """Withhold every object with a chunk on the device, and drop every staged write."""
        locks = self._store.locks
        busy: list[str] = []
        for uris in _batches(await self.uris_on(index), _LOOKED_AT_TOGETHER):
            for uri in uris:
                if locks.is_free(uri):
                    self._withhold(index, uri)
                else:
                    busy.append(uri)
            await trio.lowlevel.checkpoint()
        for uri in busy:
            async with locks.hold(uri):
                self._withhold(index, uri)

    async def evict(self, index: int, uris: Sequence[str]) -> int:
        """Evict those of these objects that may be and have a chunk on the device; returns how many.

        Raises:
            CatalogError: some of them are still there.
        """

        def may_leave(stored: StoredObject) -> bool:
            return is_on(index, stored) and stored.state in EVICTABLE and not stored.pinned

        evicted = 0
        for batch in _batches(uris, _REMOVED_TOGETHER):
            evicted += len(await self._remover.drop(batch, may_leave))
        return evicted

    def withheld_on(self, index: int) -> list[str]:
        """The uris of what is withheld and has a chunk on the device."""
        return [stored.uri for stored in self._store.cache.withheld() if is_on(index, stored)]

    def _withhold(self, index: int, uri: str) -> None:
        """The same for one uri, on which nobody works just now."""
        store = self._store
        stored = store.cache.get(uri)
        if stored is not None and is_on(index, stored):
            store.cache.withhold(uri)
        for staged in store.cache.staged_writes():
            if staged.uri != uri or not is_on(index, staged):
                continue
            if staged.connection_id is None:
                staged.overtaken = True  # who fetches it drops it then
            else:
                store.cache.discard(staged, store.clock(), store.times.stage_expiry_s)


def _batches(uris: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (uris[start : start + size] for start in range(0, len(uris), size))
