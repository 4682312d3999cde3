"""The short way of a lookup, without a thread of its own: looked up in the daemon's presence table by the
thread that drains, with all others that were submitted by then; or asked in the thread that submits it and
answered in the one that drains.

To hand a lookup to a thread and its result back costs more than the daemon's answer to it, and one look at
many keys costs less than many looks.

Rules:
1. The lane takes only what goes into one frame on the connection that it has, and waits for nothing. What it
   does not take goes the ordinary way, whose thread then opens the lane for those that follow.
2. Anything odd closes the lane, and whatever waited in it goes the ordinary way. A lookup may be asked twice;
   nothing else comes here.
3. What is not answered in time is late, and the client is told. Answers are looked for once more before that,
   since nobody may have drained.
4. Callbacks are called without the lane's lock.
5. A forked child touches neither the lane's connection nor `ready`: both are its parent's.
6. The table is as good as the connection that it came over, and no longer: what waits for a look in it when
   the connection closes goes the ordinary way.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, Protocol, TypeVar

from hypercache_protocol import WIRE_2_0, LocalProtocolError
from hypercache_protocol.messages import Reply

from .connection import Connection, Posted
from .engine import Engine, count_tallied
from .keys import UriMapping
from .outcomes import DaemonUnavailable, Outcome, logger, tally
from .presence import PresenceTable, Seen, UnusableTable
from .processes import this_process


class Lookup(Protocol):
    """What the lane is given."""

    @property
    def keys(self) -> list[str]:
        """What is looked up."""
        ...


T = TypeVar("T", bound=Lookup)

MOST_KEYS = 512
"""More take longer to write down than a thread takes to be woken."""
_KEYS_AT_ONE_LOOK = 2048
"""As many as stay in a core's cache, with what is made of them."""
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
        engine: Engine,
        timeout_s: float,
        mapping: UriMapping,
        ready: select.epoll,
        *,
        announce: Callable[[], None],
        answered: Callable[[T, Sequence[Outcome]], None],
        handed_back: Callable[[T], None],
    ) -> None:
        """
        Args:
            ready: becomes readable when `take` has something to do.
            announce: is called when `look_up` has.
            answered: is told the outcomes of each task that the daemon was asked, one for each of its keys.
            handed_back: is given each task that must go the ordinary way.
        """
        self._engine = engine
        self._client = engine.client
        self._timeout_s = timeout_s
        self._mapping = mapping
        self._ready = ready
        self._announce = announce
        self._report = answered
        self._handed_back = handed_back
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._table: PresenceTable | None = None
        self._next_has_no_table = False
        self._for_table: list[T] = []
        self._unsent = bytearray()
        self._waiting: dict[int, _Waiting[T]] = {}  # by request id, oldest first
        self._closed = threading.Event()
        self._process = this_process()
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
        except Exception as error:  # noqa: BLE001 - boundary: the thread that looked something up goes on
            self._engine.log.note("lane", "the lookup lane cannot be opened", fault=error)
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
        except UnusableTable as error:
            self._engine.log.note("table", "the daemon's presence table is not used: %s", error)
            return None
        except BaseException:
            self._next_has_no_table = True  # else a daemon that never gives it has each lookup wait for it
            self._client.discard(connection)
            raise

    def _leave_other_daemon(self) -> None:
        """Close a connection to a daemon that is not the client's any more: it may hang for ever."""
        left: list[T] = []
        with self._lock:
            if self._connection is not None and not self._client.is_current(self._connection):
                left = self._fall("another daemon answers by now")
        self._hand_back(left)

    def ask(self, task: T) -> bool:
        """Keep it for `look_up` or ask the daemon; False where `task` must go the ordinary way."""
        if self._connection is None or not self._is_at_home():
            return False
        if self._kept(task):
            self._announce()
            return True
        return self._asked(task)

    def _kept(self, task: T) -> bool:
        with self._lock:
            if self._table is None:
                return False
            self._for_table.append(task)
            return True

    def look_up(self) -> list[tuple[T, list[bool]]]:
        """The tasks that waited for a look in the table, and which of each one's keys could be loaded. What
        the table doesn't tell goes another way."""
        if not self._for_table or not self._is_at_home():
            return []
        with self._lock:
            tasks, self._for_table = self._for_table, []
            connection, table = self._connection, self._table
        done: list[tuple[T, list[bool]]] = []
        for together in _looked_up_at_once(tasks):
            seen = self._seen(together, connection, table)
            if seen is None:
                self._hand_back([task for task in together if not self._asked(task)])
            else:
                self._count(seen.counted, len(together))
                left = iter(seen.good)
                done += [(task, list(islice(left, len(task.keys)))) for task in together]
        return done

    def _seen(
        self, tasks: Sequence[T], connection: Connection | None, table: PresenceTable | None
    ) -> Seen | None:
        if table is None or connection is None or self._client.breaker_open:
            return None
        try:
            if not self._client.is_current(connection) or connection.is_hung_up():
                return None
            return table.look_up(self._mapping.encoded(list(chain.from_iterable(map(_keys, tasks)))))
        except Exception as error:  # noqa: BLE001 - boundary: nothing may be raised into LMCache
            self._break(error)
            return None

    def _asked(self, task: T) -> bool:
        try:
            return self._posted(task)
        except LocalProtocolError:  # the ordinary way says what is wrong
            return False
        except Exception as error:  # noqa: BLE001 - boundary: nothing may be raised into LMCache
            self._break(error)
            return False

    def _posted(self, task: T) -> bool:
        with self._lock:
            connection = self._connection
            if connection is None or not self._has_room(connection):
                return False
            posted = connection.post_lookup(*self._mapping.split(task.keys))
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
        left: list[T] = []
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
        self._break("it was closed")

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

    def _fall(self, why: object) -> list[T]:
        """Close the connection. Returns what waited, which the caller hands back without the lock."""
        if isinstance(why, Exception) and not isinstance(why, DaemonUnavailable):
            self._engine.log.note("lane", "the lookup lane has a fault", fault=why)
        connection, self._connection = self._connection, None
        self._table = None
        left = [*(waiting.task for waiting in self._waiting.values()), *self._for_table]
        self._waiting.clear()
        self._for_table.clear()
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

    def _break(self, why: object) -> None:
        with self._lock:
            left = self._fall(why)
        self._hand_back(left)

    def _hand_back(self, left: Sequence[T]) -> None:
        for task in left:
            self._engine.counters.add("lookup_lane", "handed_back")
            self._handed_back(task)

    def _answered(self, task: T, outcomes: Sequence[Outcome]) -> None:
        self._count(tally(outcomes), 1)
        self._report(task, outcomes)

    def _count(self, counted: Mapping[Outcome, int], lookups: int) -> None:
        count_tallied(self._engine, "lookups", counted)
        self._engine.counters.add("lookup_lane", "answered", lookups)

    def _is_at_home(self) -> bool:
        """Whether this is the process that made the lane."""
        return self._process == this_process()

    def _watch(self) -> None:
        while not self._closed.wait(self._timeout_s / _LOOKS_PER_TIMEOUT):
            self.take()
            self._give_up_late(time.monotonic())

    def _give_up_late(self, now: float) -> None:
        with self._lock:
            late = [waiting for waiting in self._waiting.values() if waiting.late_at <= now]
            if not late:
                return
            for waiting in late:
                del self._waiting[waiting.posted.request_id]
            left = self._fall("an answer is late")
        self._client.note_late()
        for waiting in late:
            self._answered(waiting.task, [Outcome.DAEMON_LATE] * waiting.posted.batch.count)
        self._hand_back(left)


def _keys(lookup: Lookup) -> list[str]:
    return lookup.keys


def _looked_up_at_once(tasks: Sequence[T]) -> Iterator[list[T]]:
    """The tasks in groups of so many that a look at one of them is quickest for each key."""
    group: list[T] = []
    keys = 0
    for task in tasks:
        if keys + len(task.keys) > _KEYS_AT_ONE_LOOK and group:
            yield group
            group, keys = [], 0
        group.append(task)
        keys += len(task.keys)
    if group:
        yield group
