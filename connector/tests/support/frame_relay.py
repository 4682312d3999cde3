"""Stands between clients and a daemon of wire 2, and counts what is asked."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress

DEADLINE_S = 30.0


class FrameRelay:
    """Stands between clients and a daemon of wire 2 and counts what clients ask for."""

    def __init__(self, path: str, target: str) -> None:
        self.path = path
        self.frame_bytes: list[int] = []
        """The length of each request's body so far."""
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> FrameRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(DEADLINE_S)
        self._listener.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def taken(self) -> int:
        """How many frames clients sent since this was last asked."""
        count = len(self.frame_bytes)
        self.frame_bytes.clear()
        return count

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(accepted,)))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as daemon:
            daemon.connect(self._target)
            unread = bytearray()
            greeted = False
            while True:
                ready, _, _ = select.select([client, daemon], [], [])
                if daemon in ready and not self._passed(daemon, client):
                    return
                if client in ready:
                    if not (data := self._passed(client, daemon)):
                        return
                    unread += data
                    greeted = greeted or self._took_hello(unread)
                    if greeted:
                        self._count(unread)

    def _passed(self, source: socket.socket, sink: socket.socket) -> bytes:
        try:
            data = source.recv(1 << 20)
            sink.sendall(data)
        except OSError:
            return b""
        return data

    def _took_hello(self, unread: bytearray) -> bool:
        line, newline, rest = bytes(unread).partition(b"\n")
        if newline:
            assert b'"hello"' in line
            unread[:] = rest
        return bool(newline)

    def _count(self, unread: bytearray) -> None:
        while len(unread) >= 4 and len(unread) >= 4 + (size := int.from_bytes(unread[:4], "big")):
            self.frame_bytes.append(size)
            del unread[: 4 + size]
