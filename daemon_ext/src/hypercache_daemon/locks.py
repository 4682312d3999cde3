"""One lock per uri, made when wanted and gone when nobody wants it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

import trio


class UriLocks:
    """Whoever changes the object of a uri holds its lock from the decision to the end of the change."""

    def __init__(self) -> None:
        self._locks: dict[str, trio.Lock] = {}

    @asynccontextmanager
    async def hold(self, uri: str) -> AsyncIterator[None]:
        """Wait for the lock of `uri` and hold it."""
        lock = self._locks.setdefault(uri, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            statistics = lock.statistics()
            if not statistics.locked and not statistics.tasks_waiting and self._locks.get(uri) is lock:
                del self._locks[uri]

    @asynccontextmanager
    async def hold_all(self, uris: Iterable[str]) -> AsyncIterator[None]:
        """Hold the locks of many uris. Nobody else waits for a lock while holding one, and two callers
        of this take them in the same order, so none waits for ever."""
        async with AsyncExitStack() as stack:
            for uri in sorted(set(uris)):
                await stack.enter_async_context(self.hold(uri))
            yield

    def is_free(self, uri: str) -> bool:
        """True where nobody holds the lock now."""
        lock = self._locks.get(uri)
        return lock is None or not lock.locked()
