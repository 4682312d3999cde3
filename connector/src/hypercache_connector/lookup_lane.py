"""The short way of a lookup: looked up in the daemon's presence table, or asked in the thread that submits it
and answered in the one that drains.

To hand a lookup to a thread and its result back costs more than the daemon's answer to it.

Rules:
1. The lane takes only what goes into one frame on the connection that it has, and waits for nothing. What it
   does not take goes the ordinary way, whose thread then opens the lane for those that follow.
2. Anything odd closes the lane, and whatever waited in it goes the ordinary way. A lookup may be asked twice;
   nothing else comes here.
3. What is not answered in time is late, and the client is told. Answers are looked for once more before that,
   since nobody may have drained.
4. Callbacks are called without the lane's lock.
5. A forked child touches neither the lane's connection nor `ready`: both are its parent's.
6. The table is as good as the connection that it came over, and no longer.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hypercache_protocol import WIRE_2_0, LocalProtocolError
from hypercache_protocol.messages import Reply

from .client import Client
from .connection import Connection, Posted
from .outcomes import DaemonUnavailable, Outcome, logger
from .presence import PresenceTable

T = TypeVar("T")

MOST_KEYS = 512
"""More take longer to write down than a thread takes to be woken."""
_MOST_UNSENT_BYTES = 1 << 20
_LOOKS_PER_TIMEOUT = 8


@dataclass(slots=True)
class _Waiting(Generic[T]):
    """One lookup that the daemon was asked."""

    task: T
    posted: Posted
    late_at: float


class LookupLane(Generic[T]):
    """One connection of its own, on which many lookups may wait."""

    def __init__(
        self,
        client: Client,
        timeout_s: float,
        ready: select.epoll,
        *,
        uris: Callable[[T], tuple[str, tuple[str, ...]]],
        answered: Callable[[T, list[Outcome]], None],
        handed_back: Callable[[T], None],
    ) -> None:
        """
        Args:
            ready: becomes readable when `take` has something to do.
            uris: what a task looks up, as what the uris begin with and the rest of each.
            answered: is told each task's outcomes, one for each of its uris.
            handed_back: is given each task that must go the ordinary way.
        """
        self._client = client
        self._timeout_s = timeout_s
        self._ready = ready
        self._uris = uris
        self._answered = answered
        self._handed_back = handed_back
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._table: PresenceTable | None = None
        self._next_has_no_table = False
        self._unsent = bytearray()
        self._waiting: dict[int, _Waiting[T]] = {}  # by request id, oldest first
        self._closed = threading.Event()
        self._process_id = os.getpid()
        # From the start: were there no thread to be had later, what is late would never be told.
        self.watch = threading.Thread(target=self._watch, name="hypercache-lane", daemon=True)
        """The thread that sees what is late."""
        self.watch.start()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    @property
    def is_waiting(self) -> bool:
        """Whether there are lookups in it."""
        return bool(self._waiting)

    @property
    def has_table(self) -> bool:
        """Whether lookups need no exchange."""
        return self._table is not None

    def open(self, needs: frozenset[str]) -> None:
        """Take a connection from the client, unless there is one or the daemon speaks no frames. Raises
        nothing: without a lane lookups go the ordinary way.

        Args:
            needs: features that the daemon must have.
        """
        if not self._is_at_home():
            return
        self._leave_other_daemon()
        wire = self._client.wire
        if self.is_open or self._closed.is_set() or wire is None or wire < WIRE_2_0:
            return
        try:
            connection = self._client.borrow(needs=needs)
            table = self._table_over(connection)
        except DaemonUnavailable as error:
            logger.debug("the lookup lane stays closed: %s", error)
            return
        except Exception:  # noqa: BLE001 - boundary: the thread that looked something up goes on
            logger.exception("the lookup lane cannot be opened")
            return
        with self._lock:
            usable = connection.max_in_flight and not self.is_open and not self._closed.is_set()
            if usable:
                self._connection, self._table = connection, table
                try:
                    self._ready.register(connection.fileno(), select.EPOLLIN)
                except OSError as error:  # the machine watches as many descriptors as it may
                    self._fall(error)
        if not usable:
            self._client.give_back(connection)

    def _table_over(self, connection: Connection) -> PresenceTable | None:
        if "presence_table" not in connection.features or self._next_has_no_table:
            self._next_has_no_table = False
            return None
        try:
            return connection.presence_table(time.monotonic() + self._timeout_s)
        except BaseException:
            self._next_has_no_table = True  # else a daemon that never gives it has each lookup wait for it
            self._client.discard(connection)
            raise

    def _leave_other_daemon(self) -> None:
        """Close a connection to a daemon that is not the client's any more: it may hang for ever."""
        left: list[_Waiting[T]] = []
        with self._lock:
            if self._connection is not None and not self._client.is_current(self._connection):
                left = self._fall("another daemon answers by now")
        self._hand_back(left)

    def ask(self, task: T) -> bool:
        """Look it up or ask the daemon; False where `task` must go the ordinary way."""
        if self._connection is None or not self._is_at_home():
            return False
        left: list[_Waiting[T]] = []
        try:
            outcomes = self._from_table(task)
            if outcomes is None:
                return self._posted(task)
        except LocalProtocolError:  # the ordinary way says what is wrong
            return False
        except Exception as error:  # noqa: BLE001 - boundary: nothing may be raised into LMCache
            with self._lock:
                left = self._fall(error)
            self._hand_back(left)
            return False
        self._answered(task, outcomes)
        return True

    def _from_table(self, task: T) -> list[Outcome] | None:
        # The connection first: where it is still open at the end, a table that was seen after it is its own.
        connection = self._connection
        table = self._table
        if table is None or connection is None or self._client.breaker_open:
            return None
        if not self._client.is_current(connection) or connection.is_hung_up():
            return None
        return table.look_up(*self._uris(task))

    def _posted(self, task: T) -> bool:
        with self._lock:
            connection = self._connection
            if connection is None or not self._has_room(connection):
                return False
            posted = connection.post_lookup(*self._uris(task))
            if posted is None:
                return False
            self._send(connection, posted.data)
            self._waiting[posted.request_id] = _Waiting(task, posted, time.monotonic() + self._timeout_s)
            return True

    def take(self) -> None:
        """Send what could not be sent before, and tell what has been answered by now."""
        if self._connection is None or not self._is_at_home():
            return
        done: list[tuple[T, list[Outcome]]] = []
        left: list[_Waiting[T]] = []
        with self._lock:
            connection = self._connection
            if connection is None:
                return
            replies: dict[int, Reply] = {}
            try:
                if self._unsent:
                    self._send(connection)
                connection.receive_into(replies)
                done = self._settled(connection, replies)
            except Exception as error:  # noqa: BLE001 - boundary: nothing may be raised into LMCache
                left = self._fall(error)
        for task, outcomes in done:
            self._answered(task, outcomes)
        self._hand_back(left)

    def close(self) -> None:
        """Hand back what waits and take nothing more."""
        self._closed.set()
        with self._lock:
            left = self._fall("it was closed")
        self._hand_back(left)

    # -- under the lock ----------------------------------------------------------------------------------

    def _has_room(self, connection: Connection) -> bool:
        return (
            self._client.is_current(connection)
            and not self._client.breaker_open
            and len(self._waiting) < connection.max_in_flight
            and len(self._unsent) < _MOST_UNSENT_BYTES
        )

    def _send(self, connection: Connection, data: bytes = b"") -> None:
        """Send what waits and then `data`, as far as the kernel takes it."""
        was_blocked = bool(self._unsent)
        self._unsent += data
        del self._unsent[: connection.send_now(self._unsent)]
        if was_blocked or self._unsent:
            wanted = select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0)
            self._ready.modify(connection.fileno(), wanted)

    def _settled(self, connection: Connection, replies: dict[int, Reply]) -> list[tuple[T, list[Outcome]]]:
        """The tasks that `replies` answer, none of them if one is garbled."""
        done = [
            (self._waiting[request_id].task, connection.presence(self._waiting[request_id].posted, reply))
            for request_id, reply in replies.items()
        ]
        for request_id in replies:
            del self._waiting[request_id]
        return done

    def _fall(self, why: object) -> list[_Waiting[T]]:
        """Close the connection. Returns what waited, which the caller hands back without the lock."""
        if isinstance(why, Exception) and not isinstance(why, DaemonUnavailable):
            logger.error("the lookup lane has a fault", exc_info=why)
        connection, self._connection = self._connection, None
        self._table = None
        left = list(self._waiting.values())
        self._waiting.clear()
        self._unsent.clear()
        if connection is not None:
            logger.debug("the lookup lane closes with %d lookups in it: %s", len(left), why)
            if self._is_at_home():
                # Closing it is not enough where a child has it too. Whatever comes, `left` is handed back.
                with contextlib.suppress(OSError):
                    self._ready.unregister(connection.fileno())
            self._client.discard(connection)
        return left

    # -- without the lock --------------------------------------------------------------------------------

    def _hand_back(self, left: Sequence[_Waiting[T]]) -> None:
        for waiting in left:
            self._handed_back(waiting.task)

    def _is_at_home(self) -> bool:
        """Whether this is the process that made the lane."""
        return self._process_id == os.getpid()

    def _watch(self) -> None:
        while not self._closed.wait(self._timeout_s / _LOOKS_PER_TIMEOUT):
            self.take()
            self._give_up_late(time.monotonic())

    def _give_up_late(self, now: float) -> None:
        with self._lock:
            oldest = next(iter(self._waiting.values()), None)
            if oldest is None or oldest.late_at > now:
                return
            left = self._fall("an answer is late")
        self._client.note_late()
        for waiting in left:
            if waiting.late_at <= now:
                self._answered(waiting.task, [Outcome.DAEMON_LATE] * waiting.posted.batch.count)
            else:
                self._handed_back(waiting.task)
