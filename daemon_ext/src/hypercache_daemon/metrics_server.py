"""`--metrics`: Prometheus asks over HTTP, and is answered one GET for each connection.

Rules:
1. Clients come first: at most four are asked for at once, for ten seconds each, and what takes time (making
   text of the figures) happens in a worker thread.
2. Nothing that happens here ends the daemon; only an address that cannot be had at its start does.
3. Whoever reaches the address is answered: it is meant for loopback, or for a network of the operator's own.
"""

from __future__ import annotations

import logging
import socket as stdlib_socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from socket import getaddrinfo
from typing import Any, TypeAlias

import trio

from .config import ConfigError
from .metrics import exposition

log = logging.getLogger(__name__)

Report: TypeAlias = Callable[[], Mapping[str, Any]]

_AT_ONCE = 4
_WITHIN_S = 10.0
_MOST_HEAD_BYTES = 16 * 1024
_ACCEPT_AGAIN_S = 1.0
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def bind_metrics(address: tuple[str, int]) -> stdlib_socket.socket:
    """A listening TCP socket at this host and port.

    Raises:
        ConfigError: it cannot be had.
    """
    host, port = address
    try:
        family, kind, number, _, place = getaddrinfo(host, port, type=stdlib_socket.SOCK_STREAM)[0]
        with ExitStack() as held:
            sock = held.enter_context(stdlib_socket.socket(family, kind, number))
            sock.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_REUSEADDR, 1)
            sock.bind(place)
            sock.listen(_AT_ONCE)
            held.pop_all()
            return sock
    except OSError as error:
        raise ConfigError(
            f"--metrics {host}:{port} cannot be had: {error.strerror}; give an address of this machine and a "
            "port that is free"
        ) from error


class MetricsServer:
    """Answers with what `report` says."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._places = trio.Semaphore(_AT_ONCE)
        self._problem: str | None = None

    async def serve(self, sock: stdlib_socket.socket) -> None:
        """Answer whoever connects to a listening socket, until cancelled."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        async with listener, trio.open_nursery() as asking:
            while True:
                await self._places.acquire()
                while (stream := await self._accepted(listener)) is None:
                    await trio.sleep(_ACCEPT_AGAIN_S)
                asking.start_soon(self._serve_one, stream)

    async def _accepted(self, listener: trio.SocketListener) -> trio.SocketStream | None:
        """Who asks next; None where nobody can, without a file descriptor, say: clients have them."""
        try:
            return await listener.accept()
        except OSError as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.warning("nobody can ask for metrics just now: %s", error)
            return None

    async def _serve_one(self, stream: trio.SocketStream) -> None:
        try:
            with trio.move_on_after(_WITHIN_S):
                async with stream:
                    await stream.send_all(await _answer(await _request_line(stream), self._report))
                    await stream.send_eof()
        except trio.BrokenResourceError:
            log.debug("who asked for metrics did not wait for them")
        except Exception:  # the boundary: a fault of ours must not end the daemon
            log.exception("metrics could not be told by a fault of the daemon")
        finally:
            self._places.release()


async def _request_line(stream: trio.SocketStream) -> bytes:
    """The first line of a request whose head has come whole; b"" where it is too long or cut off."""
    head = b""
    while b"\r\n\r\n" not in head:
        data = await stream.receive_some(_MOST_HEAD_BYTES)
        head += data
        if not data or len(head) > _MOST_HEAD_BYTES:
            return b""
    return head.partition(b"\r\n")[0]


async def _answer(line: bytes, report: Report) -> bytes:
    method, _, rest = line.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if not line:
        return _response("400 Bad Request", b"send a whole GET request of at most 16 KiB\n")
    if method != b"GET":
        return _response("405 Method Not Allowed", b"only GET is answered\n", "Allow: GET\r\n")
    if path != b"/metrics":
        return _response("404 Not Found", b"the metrics are at /metrics\n")
    return _response("200 OK", await trio.to_thread.run_sync(exposition, report()))


def _response(status: str, body: bytes, header: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {_CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        f"{header}Connection: close\r\n\r\n"
    )
    return head.encode() + body
