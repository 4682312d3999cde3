"""A synchronous client of the daemon, safe to use from any number of threads.

Rules:
1. Each exchange has a connection to itself; connections are kept for the next one, and closed after
   anything that went wrong.
2. A request is sent a second time only where the first attempt found a kept connection dead before the
   daemon could get any of it; and then once.
3. One deadline covers a whole exchange. After one that passed, further exchanges fail at once until a
   background probe gets an answer.
4. A reply tells nothing about which daemon sent it; so whenever the instance changes, `on_new_instance`
   is called before any reply of the new one is handed out.
5. Each new connection begins with a hello. A daemon that does not answer it as one of wire 2 is spoken to
   in wire 1 within a second.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar
from weakref import WeakSet

from hypercache_protocol import WIRE_1_1, WIRE_2_0, WireVersion
from hypercache_protocol.batches import BatchRequest
from hypercache_protocol.messages import Reply, Request
from hypercache_protocol.versions import LATEST, RELEASED

from .actions import Actions, checked_requests, checked_uris
from .batching import check_batch, spares_stored
from .config import ClientConfig, ConfigError, checked, find_socket
from .connection import Connection, DeadBeforeSending
from .greeting import what_is_missing
from .layouts import Answer
from .outcomes import DaemonUnavailable, Outcome, logger
from .processes import this_process

_T = TypeVar("_T")

_MAX_KEPT = 64
HELLO_TIMEOUT_S = 0.5
"""How long a daemon may take to answer a hello before wire 1 is tried on a new connection; at most half of
what is left of the deadline, so that there is time for that."""


class Client(Actions):
    """Connections to one daemon. Nothing is connected before the first exchange.

    Args:
        socket_path: None takes the first socket that is there of those where hypercache-io looks.
        timeout_s: deadline of one exchange.
        probe_interval_s: how often a daemon that stopped answering is tried in the background.
        on_new_instance: is called when another start of the daemon answers than before. No thread gets a
            reply of that one before it returned, so it may not wait for other threads' exchanges.
        version: the newest wire to speak; a daemon of an older one is spoken to in that.

    Raises:
        ConfigError: an argument is wrong. A daemon that is down is no error.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        timeout_s: float = 5.0,
        *,
        probe_interval_s: float = 1.0,
        on_new_instance: Callable[[], None] = lambda: None,
        version: WireVersion = LATEST,
    ) -> None:
        given = {
            "socket_path": find_socket() if socket_path is None else socket_path,
            "timeout_s": timeout_s,
            "probe_interval_s": probe_interval_s,
        }
        settings = checked(ClientConfig, given, "Client")
        if not (isinstance(version, WireVersion) and version in RELEASED):
            known = ", ".join(map(str, RELEASED))
            raise ConfigError(f"Client: 'version' is wrong: must be hypercache_protocol's for one of {known}")
        self.socket_path = settings.socket_path
        self._timeout_s = settings.timeout_s
        self._probe_interval_s = settings.probe_interval_s
        self._on_new_instance = on_new_instance
        self._version = version
        self._lock = threading.Lock()
        self._announcing = threading.RLock()  # whoever announces an instance may ask it
        self._idle: list[Connection] = []
        # Weak, so that one which Ctrl-C takes from its user between two steps closes with its last reference.
        self._busy: WeakSet[Connection] = WeakSet()
        self._closed = threading.Event()
        self._probing: threading.Thread | None = None
        self._process = this_process()
        self._wire: WireVersion | None = None
        self._ignored = Counter(unknown_fields=0, dropped_replies=0)  # on connections that are closed
        self.instance_id: str | None = None
        """Which start of the daemon answered last; None before the first answer, or from an old daemon."""
        self.features: frozenset[str] = frozenset()
        """What the daemon that answered last can do."""

    def exchange(self, requests: Iterable[Request], *, needs: frozenset[str] = frozenset()) -> list[Reply]:
        """One reply for each request, in order, all over one connection and within `timeout_s`. Each is
        carried out after those before it, whatever wire the daemon speaks.

        Args:
            needs: features that the daemon must have for the requests to mean what they say.

        Raises:
            DaemonUnavailable: none of the requests may be taken for carried out, nor for not.
            LocalProtocolError: the wire can't carry one of the requests.
            TypeError: one of them is no request; nothing was asked.
        """
        asked = checked_requests(requests)
        if not asked:
            return []
        return self._carried_out(lambda connection, by: connection.exchange(asked, by), needs)

    def ask(self, many: BatchRequest, *, needs: frozenset[str] = frozenset()) -> list[Answer]:
        """What came of each uri of a batch, in order, whatever wire the daemon speaks; all over one
        connection and within `timeout_s`. `layouts` of a LocateMany must be on.

        Raises:
            DaemonUnavailable, LocalProtocolError: as for `exchange`; also where what is stored is to be
                spared and the daemon can't (wire 2.1).
            TypeError, ValueError: it is no such batch; nothing was asked.
        """
        check_batch(many)
        if not many.suffixes:
            return []
        if spares_stored(many):
            needs = needs | {"unless_stored"}
        return self._carried_out(lambda connection, by: connection.ask(many, by), needs)

    def lookup(self, uris: Iterable[str], *, needs: frozenset[str] = frozenset()) -> list[Outcome]:
        """OK for each uri that a load could verify now, else why not; all within `timeout_s`.

        Raises:
            DaemonUnavailable, LocalProtocolError: as for `exchange`.
            TypeError, ValueError: one of them is no uri; nothing was asked.
        """
        uris = checked_uris(uris)
        return self._carried_out(lambda connection, by: connection.lookup(uris, by), needs) if uris else []

    def borrow(self, *, needs: frozenset[str] = frozenset()) -> Connection:
        """A connection for the caller alone, until it gives it back or discards it; `close` breaks it off.

        Raises:
            DaemonUnavailable: there is none to be had, or the daemon lacks what the caller `needs`.
        """
        self._begin(needs)
        connection = self._kept() or self._connect(time.monotonic() + self._timeout_s)
        self._check_needs(connection, needs)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection, which must be in step, for the next exchange."""
        with self._lock:
            self._busy.discard(connection)
            if self._is_worth_keeping(connection):
                self._idle.append(connection)
                return
            self._ignored.update(connection.ignored)
        connection.close()

    def _is_worth_keeping(self, connection: Connection) -> bool:
        if not self.is_current(connection) or self._closed.is_set() or len(self._idle) >= _MAX_KEPT:
            return False
        # A daemon of wire 2 may have been too busy for the hello: the next connection asks it again.
        could_be_framed = WIRE_2_0.major in connection.majors and self._version >= WIRE_2_0
        return connection.wire >= WIRE_2_0 or not could_be_framed

    def is_current(self, connection: Connection) -> bool:
        """Whether it leads to the daemon that answered last: two may overlap for a moment."""
        return connection.instance_id == self.instance_id

    def discard(self, connection: Connection) -> None:
        """Close a connection that is not in step any more."""
        with self._lock:
            self._busy.discard(connection)
            self._ignored.update(connection.ignored)
        connection.close()

    def note_late(self) -> None:
        """The daemon did not answer in time on a borrowed connection: let no exchange wait for it until it
        answers again."""
        self._open_breaker()

    def _carried_out(self, work: Callable[[Connection, float], list[_T]], needs: frozenset[str]) -> list[_T]:
        """What `work` gives on a connection of its own, by the deadline that it is told."""
        self._begin(needs)
        deadline = time.monotonic() + self._timeout_s
        try:
            try:
                return self._attempt(self._kept() or self._connect(deadline), work, needs, deadline)
            except DeadBeforeSending:
                return self._attempt(self._connect(deadline), work, needs, deadline)
        except DaemonUnavailable as error:
            if self._closed.is_set():
                raise DaemonUnavailable(Outcome.CLOSED, "the client was closed") from None
            if error.outcome is Outcome.DAEMON_LATE:
                self._open_breaker()
            raise

    @property
    def breaker_open(self) -> bool:
        """Whether exchanges fail at once because the daemon stopped answering."""
        return self._probing is not None

    @property
    def wire(self) -> WireVersion | None:
        """The wire that was agreed on with the daemon that answered last; None before the first answer."""
        return self._wire

    def ignored(self) -> dict[str, int]:
        """What the daemon said that this side did not use: `unknown_fields`, which a later version brought,
        and `dropped_replies`, which nobody waited for."""
        with self._lock:
            total = Counter(self._ignored)
            for connection in (*self._idle, *self._busy):
                total.update(connection.ignored)
        return dict(total)

    def close(self) -> None:
        """Make running exchanges fail, and every later one. Any thread may call it, more than once."""
        self._drop_connections_of_parent_process()  # to interrupt them would break off the parent's exchanges
        with self._lock:
            self._closed.set()
            idle, self._idle = self._idle, []
            for connection in idle:
                self._ignored.update(connection.ignored)
            probing = self._probing
            for connection in self._busy:
                connection.interrupt()  # under the lock: its user can't have closed it yet
        for connection in idle:
            connection.close()
        if probing is not None and probing is not threading.current_thread():
            probing.join(self._timeout_s)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Client has connections of this process and cannot be copied or pickled: make one in each "
            "process"
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one attempt -------------------------------------------------------------------------------------

    def _attempt(
        self,
        connection: Connection,
        work: Callable[[Connection, float], list[_T]],
        needs: frozenset[str],
        deadline: float,
    ) -> list[_T]:
        self._check_needs(connection, needs)
        try:
            results = work(connection, deadline)
        except BaseException:
            self.discard(connection)
            raise
        self.give_back(connection)
        return results

    def _check_needs(self, connection: Connection, needs: frozenset[str]) -> None:
        missing = needs - connection.features
        if missing:
            self.give_back(connection)
            raise DaemonUnavailable(
                Outcome.DAEMON_TOO_OLD,
                what_is_missing(missing, connection.wire, self._version),
            )

    def _begin(self, needs: frozenset[str]) -> None:
        """Refuse what can only fail."""
        if not isinstance(needs, (frozenset, set)):
            raise TypeError(f"needs is a set of features, not {needs!r}"[:200])
        self._drop_connections_of_parent_process()
        if self._closed.is_set():
            raise DaemonUnavailable(Outcome.CLOSED, "the client was closed")
        if self._probing is not None:
            raise DaemonUnavailable(
                Outcome.BREAKER_OPEN, "the daemon did not answer lately; waiting for it to answer a probe"
            )

    # -- connections -------------------------------------------------------------------------------------

    def _kept(self) -> Connection | None:
        """An idle connection that is alive, in step and to the daemon that answered last, if there is one."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
                self._busy.add(connection)
            if self.is_current(connection) and not connection.is_out_of_step():
                return connection
            self.discard(connection)

    def _connect(self, deadline: float) -> Connection:
        """A connection to a daemon of any wire. Each asks anew for the best: the daemon may have been
        upgraded since the last one."""
        if self._version.major >= WIRE_2_0.major:
            now_s = time.monotonic()
            try:
                return self._greeted(now_s + min(HELLO_TIMEOUT_S, (deadline - now_s) / 2), self._version)
            except DaemonUnavailable as error:
                if self._closed.is_set():
                    raise
                # What an old daemon makes of a hello is unknown: nonsense, silence or a closed connection.
                logger.debug("%s: no wire 2: %s", self.socket_path, error)
        return self._greeted(deadline, min(self._version, WIRE_1_1))

    def _greeted(self, deadline: float, version: WireVersion) -> Connection:
        connection = Connection(self.socket_path, deadline, self._closed, version)
        with self._lock:
            self._busy.add(connection)  # before the greeting, so that `close` can interrupt it
            if self._closed.is_set():
                connection.interrupt()
        try:
            connection.greet(deadline)
            self._note_daemon(connection)
        except BaseException:
            self.discard(connection)
            raise
        return connection

    def _note_daemon(self, connection: Connection) -> None:
        # Other threads that reach the same instance wait here until it is announced.
        with self._announcing:
            with self._lock:
                known, self.instance_id = self.instance_id, connection.instance_id
                self.features, self._wire = connection.features, connection.wire
            if known is None or known != connection.instance_id:
                try:
                    self._on_new_instance()
                except BaseException:  # Ctrl-C too: then whoever comes next announces it
                    self.instance_id = known
                    raise

    def _drop_connections_of_parent_process(self) -> None:
        # After a fork both processes would read each other's replies from one socket.
        if self._process == this_process():
            return
        with self._lock:
            if self._process == this_process():  # another thread was first, and has connections by now
                return
            inherited, self._idle = self._idle + list(self._busy), []
            self._busy = WeakSet()
            self._announcing = threading.RLock()  # a thread may have had it that the child doesn't have
            self._process = this_process()
            self._probing = None
        for connection in inherited:
            connection.close()

    # -- the breaker -------------------------------------------------------------------------------------

    def _open_breaker(self) -> None:
        with self._lock:
            if self._probing is not None or self._closed.is_set():
                return
            probing = threading.Thread(target=self._probe, name="hypercache-probe", daemon=True)
            try:
                probing.start()
            except RuntimeError as error:  # no thread to be had: a breaker without its probe never closes
                logger.warning("%s: exchanges go on waiting for the daemon: %s", self.socket_path, error)
                return
            self._probing = probing
        logger.warning(
            "%s: no answer within %g s; operations fail at once until the daemon answers again",
            self.socket_path,
            self._timeout_s,
        )

    def _probe(self) -> None:
        while not self._closed.wait(self._probe_interval_s):
            try:
                connection = self._connect(time.monotonic() + self._timeout_s)
            except DaemonUnavailable:
                continue
            except Exception:  # noqa: BLE001 - boundary: should the thread die, the breaker never closes
                logger.exception("%s: the probe failed", self.socket_path)
                continue
            with self._lock:
                self._probing = None
            self.give_back(connection)
            logger.info("%s: the daemon answers again", self.socket_path)
            return
