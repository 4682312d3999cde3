"""A relay between clients and a daemon: it passes on what both say, and can note or change it on the way.

Each connection has one thread a direction, so a peer that does not read holds up its own connection only.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

FROM_CLIENT, FROM_DAEMON = "client", "daemon"
_READ_BYTES = 65536


class Passage(Protocol):
    """What happens to the bytes of one connection."""

    def passed(self, side: str, data: bytes) -> bytes:
        """What to send on for `data` that `side` sent: all, more, less, or b"" to wait for the rest."""
        ...


class Relay:
    """Listens at `path` and has a connection of its own to `target` for each client.

    Args:
        passage: makes what watches over a connection, given its number from 0 on.
    """

    def __init__(self, path: str, target: str, passage: Callable[[int], Passage]) -> None:
        self.path = path
        self._target = target
        self._passage = passage
        self._numbers = count()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(128)
        self._start(self._accept)

    def close(self) -> None:
        """End every connection and wait for the threads."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        with self._lock:
            for each in self._open:
                _shut(each)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        Path(self.path).unlink()

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        # Noted before it runs: the first one starts others.
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed by `close`
                return
            self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        daemon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            daemon.connect(self._target)
        except OSError:  # the daemon is down, and the client shall see just that
            client.close()
            daemon.close()
            return
        with self._lock:
            self._open |= {client, daemon}
        link = _Link(client, daemon, self._passage(next(self._numbers)), threading.Barrier(2))
        self._start(self._pump, link, FROM_CLIENT)
        self._start(self._pump, link, FROM_DAEMON)

    def _pump(self, link: _Link, side: str) -> None:
        source, sink = (link.client, link.daemon) if side == FROM_CLIENT else (link.daemon, link.client)
        try:
            with suppress(OSError):
                while data := source.recv(_READ_BYTES):
                    sink.sendall(link.passage.passed(side, data))
        finally:  # a passage that raises ends its connection like a peer that went away
            self._end(link, side, sink)

    def _end(self, link: _Link, side: str, sink: socket.socket) -> None:
        # A client that has said its last word may still read; without its daemon it has nothing left to do.
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR if side == FROM_CLIENT else socket.SHUT_RDWR)
        if link.both_done.wait() == 0:
            with self._lock:
                self._open -= {link.client, link.daemon}
            link.client.close()
            link.daemon.close()


@dataclass(frozen=True)
class _Link:
    client: socket.socket
    daemon: socket.socket
    passage: Passage
    both_done: threading.Barrier


def _shut(peer: socket.socket) -> None:
    with suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


@contextmanager
def relaying(path: str, target: str, passage: Callable[[int], Passage]) -> Iterator[Relay]:
    """A relay that is closed afterwards."""
    relay = Relay(path, target, passage)
    try:
        yield relay
    finally:
        relay.close()
