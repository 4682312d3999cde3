"""Getting objects away from a device that failed or is drained, while clients have their turns.

A failed device's objects are withheld first, which takes no I/O, and evicted then. Nothing is allocated on
either kind of device any more, so what is found in one pass is all there is, but for what is being changed
just now: that is waited for.

Many uris are kept as a tuple: the garbage collector soon looks no more at one of strings, but at all that is
in a list with every full collection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import trio

from hypercache_protocol.fields import Tier
from hypercache_protocol.states import SyncStatus

from .core.objects import StagedWrite, StoredObject
from .removal import Remover
from .store import Store

_LOOKED_AT_TOGETHER = 64  # a millisecond or two of the event loop
_REMOVED_TOGETHER = 64  # about what a batch of a client takes
_T = TypeVar("_T")


def is_on(index: int, it: StoredObject | StagedWrite) -> bool:
    """Whether it has a chunk on the device of this index."""
    return it.tier is Tier.NVME and any(extent.device == index for extent in it.extents)


class DeviceClearing:
    """What happens to what lies on a device; it decides nothing about devices."""

    def __init__(self, store: Store, remover: Remover) -> None:
        self._store = store
        self._remover = remover

    async def uris_on(self, index: int) -> tuple[str, ...]:
        """The uris of all objects that are found, and of staged writes, with a chunk on the device."""
        cache = self._store.cache
        found = [staged.uri for staged in cache.staged if is_on(index, staged)]
        for uris in _slices(tuple(cache.uris()), _LOOKED_AT_TOGETHER):
            found += [uri for uri in uris if (stored := cache.peek(uri)) and is_on(index, stored)]
            await trio.lowlevel.checkpoint()
        return tuple(found)

    async def withheld_on(self, index: int) -> tuple[str, ...]:
        """The uris of what is withheld and has a chunk on the device."""
        cache = self._store.cache
        found: list[str] = []
        for uris in _slices(tuple(cache.withheld()), _LOOKED_AT_TOGETHER):
            found += [uri for uri in uris if (stored := cache.withheld_at(uri)) and is_on(index, stored)]
            await trio.lowlevel.checkpoint()
        return tuple(found)

    async def is_any_uploading(self, uris: Sequence[str]) -> bool:
        """Whether one of these objects is on its way to the backend."""
        cache = self._store.cache
        for some in _slices(uris, _LOOKED_AT_TOGETHER):
            owners = filter(None, map(cache.withheld_at, some))
            if any(stored.state is SyncStatus.SYNCING_BACKEND for stored in owners):
                return True
            await trio.lowlevel.checkpoint()
        return False

    async def withhold_all(self, index: int) -> None:
        """Withhold every object with a chunk on the device, and drop every staged write."""
        locks = self._store.locks
        busy: list[str] = []
        for uris in _slices(await self.uris_on(index), _LOOKED_AT_TOGETHER):
            for uri in uris:
                if locks.is_free(uri):
                    self._withhold(index, uri)
                else:
                    busy.append(uri)
            await trio.lowlevel.checkpoint()
        for uri in busy:
            async with locks.hold(uri):
                self._withhold(index, uri)

    def _withhold(self, index: int, uri: str) -> None:
        """The same for one uri, on which nobody works just now."""
        store = self._store
        stored = store.cache.peek(uri)
        if stored is not None and is_on(index, stored):
            store.cache.withhold(uri)
        for staged in store.cache.staged.of(uri):
            if not is_on(index, staged):
                continue
            if staged.connection_id is None:
                staged.overtaken = True  # who fetches it drops it then
            else:
                store.cache.discard(staged, store.clock(), store.times.stage_expiry_s)

    async def give_back(self, is_readable: Callable[[StoredObject], bool]) -> list[StoredObject]:
        """Let everybody find again what is withheld and readable; returns what that is."""
        cache = self._store.cache
        returned: list[StoredObject] = []
        for uris in _slices(tuple(cache.withheld()), _LOOKED_AT_TOGETHER):
            # Meanwhile somebody may have deleted or replaced one.
            still = [uri for uri in uris if (stored := cache.withheld_at(uri)) and is_readable(stored)]
            returned += [cache.give_back(uri) for uri in still]
            await trio.lowlevel.checkpoint()
        return returned

    async def evict(self, index: int, uris: Sequence[str]) -> int:
        """Evict those of these objects that may be and have a chunk on the device; returns how many.

        Raises:
            CatalogError: some of them are still there.
        """

        def may_leave(stored: StoredObject) -> bool:
            return is_on(index, stored) and self._store.cache.may_be_evicted(stored)

        is_free = self._store.locks.is_free
        evicted = 0
        busy: list[str] = []  # waited for one by one: nobody else's lock is held meanwhile
        for batch in _slices(uris, _REMOVED_TOGETHER):
            busy += [uri for uri in batch if not is_free(uri)]
            evicted += len(await self._remover.drop(list(filter(is_free, batch)), may_leave))
        for uri in busy:
            evicted += len(await self._remover.drop([uri], may_leave))
        return evicted


def _slices(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
