"""One lock per uri, made when wanted and gone when nobody wants it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

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
            self._drop_unused(uri, lock)

    @asynccontextmanager
    async def hold_all(self, uris: Iterable[str]) -> AsyncIterator[None]:
        """Hold the locks of many uris. Nobody else waits for a lock while holding one, and two callers
        of this take them in the same order, so none waits for ever."""
        wanted = set(uris)
        if all(map(self.is_free, wanted)):
            with self.hold_now(wanted):
                yield
            return
        async with AsyncExitStack() as stack:
            for uri in sorted(wanted):
                await stack.enter_async_context(self.hold(uri))
            yield

    @contextmanager
    def hold_now(self, uris: Iterable[str]) -> Iterator[None]:
        """Hold the locks of uris that `is_free`, without waiting."""
        locks = {uri: self._locks.setdefault(uri, trio.Lock()) for uri in set(uris)}
        for lock in locks.values():
            lock.acquire_nowait()
        try:
            yield
        finally:
            for uri, lock in locks.items():
                lock.release()
                self._drop_unused(uri, lock)

    def is_free(self, uri: str) -> bool:
        """True where nobody holds the lock now."""
        lock = self._locks.get(uri)
        return lock is None or not lock.locked()

    def _drop_unused(self, uri: str, lock: trio.Lock) -> None:
        # A lock that was released with others waiting is theirs already, so it counts as locked.
        if not lock.locked():
            self._locks.pop(uri, None)
