"""A relay between clients and a daemon: it passes on what both say, with the descriptors that go with it, and
can note or change it on the way.

Rules:
1. Each connection has one thread a direction, so a peer that does not read holds up its own connection only.
2. Whatever a passage raises ends its connection, on both sides. An OSError is how a peer goes away or a
   passage hangs up; anything else is a fault that nobody expected, and `close` raises it.
3. No thread waits for another one, so `close` never hangs.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

FROM_CLIENT, FROM_DAEMON = "client", "daemon"
_READ_BYTES = 65536
_MOST_DESCRIPTORS = 16
_RETRY_CONNECT_S = 0.01


class HangUp(ConnectionError):
    """Raised by a passage that ends the connection; `last` goes on before that."""

    def __init__(self, why: object = "", last: bytes = b"") -> None:
        super().__init__(why)
        self.last = last


class Passage(Protocol):
    """What happens to the bytes of one connection."""

    def passed(self, side: str, data: bytes) -> bytes:
        """What to send on for `data` that `side` sent: all, more, less, or b"" to wait for the rest."""
        ...


@dataclass(frozen=True)
class Noting:
    """A passage that changes nothing. `note` gets its number, side and bytes before they are passed on: else
    the answer could be noted first."""

    note: Callable[[int, str, bytes], object]
    number: int

    def passed(self, side: str, data: bytes) -> bytes:
        """The same."""
        self.note(self.number, side, data)
        return data


class Relay:
    """Listens at `path` and has a connection of its own to `target` for each client.

    Args:
        passage: makes what watches over a connection, given its number from 0 on.
        on_failure: called, by any thread, when there is something that `close` will raise.
    """

    def __init__(
        self,
        path: str,
        target: str,
        passage: Callable[[int], Passage],
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self.path = path
        self._on_failure = on_failure
        self._target = target
        self._passage = passage
        self._numbers = count()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._failures: list[Exception] = []
        self._pumps: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(128)
        self._accepting = self._started(self._accept)

    def close(self) -> None:
        """End every connection and wait for the threads.

        Raises:
            Exception: what the first passage that failed raised, or what ended the listening.
        """
        self._closing.set()
        _shut(self._listener)
        self._accepting.join()
        with self._lock:
            for each in self._open:
                _shut(each)
        for thread in self._pumps:
            thread.join()
        self._listener.close()
        Path(self.path).unlink()
        if self._failures:
            raise self._failures[0]

    def _started(self, function: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=self._watched, args=(function, *arguments), daemon=True)
        thread.start()
        return thread

    def _watched(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: `close` raises it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failures.append(error)
        self._on_failure()

    # -- accepting -------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            while True:
                client, _ = self._listener.accept()
                self._serve(client)
        except OSError:
            if not self._closing.is_set():  # no descriptor is left, say
                raise
        finally:
            _shut(self._listener)  # from here on clients see that nobody listens

    def _serve(self, client: socket.socket) -> None:
        try:
            daemon = self._to_daemon()
        except OSError:  # the daemon is down, and the client shall see just that
            client.close()
            return
        try:
            link = _Link(client, daemon, self._passage(next(self._numbers)))
        except Exception as error:  # noqa: BLE001 - the boundary: a passage may raise anything
            self._fail(error)
            client.close()
            daemon.close()
            return
        with self._lock:
            self._open |= {client, daemon}
        pumps = [self._started(self._pump, link, side) for side in (FROM_CLIENT, FROM_DAEMON)]
        self._pumps = [*(each for each in self._pumps if each.is_alive()), *pumps]

    def _to_daemon(self) -> socket.socket:
        daemon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        daemon.setblocking(False)
        # A connect that waits for a place in the daemon's backlog would wait on while the relay closes.
        while code := daemon.connect_ex(self._target):
            if code != errno.EAGAIN or self._closing.wait(_RETRY_CONNECT_S):
                daemon.close()
                raise OSError(code, os.strerror(code))
        daemon.setblocking(True)
        return daemon

    # -- passing on ------------------------------------------------------------------------------------

    def _pump(self, link: _Link, side: str) -> None:
        source, sink = (link.client, link.daemon) if side == FROM_CLIENT else (link.daemon, link.client)
        try:
            with suppress(OSError):
                self._pass_on(link.passage, side, source, sink)
        except BaseException:
            # Neither peer may wait for what will never be passed on.
            _shut(source)
            _shut(sink)
            raise
        finally:
            self._end(link, side, sink)

    def _pass_on(self, passage: Passage, side: str, source: socket.socket, sink: socket.socket) -> None:
        enclosed: list[int] = []  # descriptors that wait for a byte to go with
        try:
            while data := _receive(source, enclosed):
                _send(sink, passage.passed(side, data), enclosed)
        except HangUp as end:
            sink.sendall(end.last)
        finally:
            _close_all(enclosed)

    def _end(self, link: _Link, side: str, sink: socket.socket) -> None:
        # A client that has said its last word may still read; without its daemon it has nothing left to do.
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR if side == FROM_CLIENT else socket.SHUT_RDWR)
        with self._lock:
            link.running.discard(side)
            if link.running:
                return
            self._open -= {link.client, link.daemon}
        link.client.close()
        link.daemon.close()


@dataclass(frozen=True)
class _Link:
    client: socket.socket
    daemon: socket.socket
    passage: Passage
    running: set[str] = field(default_factory=lambda: {FROM_CLIENT, FROM_DAEMON})
    """The sides that may still say something; the last one closes."""


def _receive(source: socket.socket, enclosed: list[int]) -> bytes:
    data, descriptors, _, _ = socket.recv_fds(source, _READ_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    enclosed += descriptors
    return data


def _send(sink: socket.socket, data: bytes, enclosed: list[int]) -> None:
    if data and enclosed:
        sent = socket.send_fds(sink, [data], enclosed)
        _close_all(enclosed)
        data = data[sent:]
    sink.sendall(data)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _shut(peer: socket.socket) -> None:
    with suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


@contextmanager
def relaying(
    path: str,
    target: str,
    passage: Callable[[int], Passage],
    on_failure: Callable[[], object] = lambda: None,
) -> Iterator[Relay]:
    """A relay that is closed afterwards."""
    relay = Relay(path, target, passage, on_failure)
    try:
        yield relay
    finally:
        relay.close()
