"""One lock per uri, which is there only while somebody holds it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import trio


class UriLocks:
    """Whoever changes the object of a uri holds its lock from the decision to the end of the change.

    A lock goes to those who wait for it in the order in which they came. Who wants several joins all their
    queues at one moment, so who is before it in one of them is behind it in none: nobody waits for ever.
    """

    def __init__(self) -> None:
        self._holders: dict[str, _Turn] = {}
        self._queues: dict[str, deque[_Turn]] = {}  # of those uris alone for which somebody waits

    def hold(self, uri: str) -> AbstractAsyncContextManager[None]:
        """Wait for the lock of `uri` and hold it."""
        return self.hold_all((uri,))

    @asynccontextmanager
    async def hold_all(self, uris: Iterable[str]) -> AsyncIterator[None]:
        """Wait for the locks of many uris and hold them."""
        wanted = set(uris)
        turn = self._join(wanted)
        try:
            if turn.missing:
                await turn.came.wait()
            yield
        finally:
            self._leave(wanted, turn)

    @contextmanager
    def hold_now(self, uris: Iterable[str]) -> Iterator[None]:
        """Hold the locks of uris that are all free, without waiting."""
        wanted = set(uris)
        assert self._holders.keys().isdisjoint(wanted), "only who waits may want what others hold"
        turn = self._join(wanted)
        try:
            yield
        finally:
            self._leave(wanted, turn)

    def is_free(self, uri: str) -> bool:
        """True where nobody holds the lock now."""
        return uri not in self._holders

    # A batch names many uris, and mostly nobody else wants one of them: in C from end to end then.

    def _join(self, wanted: set[str]) -> _Turn:
        held = wanted & self._holders.keys()
        turn = _Turn(len(held))
        for uri in held:
            self._queues.setdefault(uri, deque()).append(turn)
        self._holders.update(dict.fromkeys(wanted - held, turn))
        return turn

    def _leave(self, wanted: set[str], turn: _Turn) -> None:
        waited_for = wanted & self._queues.keys()
        for uri in waited_for:
            self._leave_queue(uri, turn)
        deque(map(self._holders.pop, wanted - waited_for), maxlen=0)

    def _leave_queue(self, uri: str, turn: _Turn) -> None:
        queue = self._queues[uri]
        if self._holders[uri] is turn:
            following = self._holders[uri] = queue.popleft()
            following.got_one()
        else:  # it was cancelled before it got this one
            queue.remove(turn)
        if not queue:
            del self._queues[uri]


class _Turn:
    """One who holds locks, and waits for those that are `missing`."""

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.came = trio.Event()

    def got_one(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.came.set()
