"""The Unix socket: bound with the right mode from its first instant, and never over somebody else's.

Rules:
1. A socket where somebody answers is refused; one that nobody answers is replaced; anything else at the
   path is never touched.
2. Stopping answers what was asked before it closes.
"""

from __future__ import annotations

import errno
import logging
import os
import socket as stdlib_socket
import stat
from dataclasses import dataclass, field
from pathlib import Path

import trio

from hypercache_protocol.codecs import json_lines
from hypercache_protocol.errors import ErrorCode
from hypercache_protocol.messages import ErrorReply
from hypercache_protocol.versions import WireVersion

from .access import Access
from .connection import Connection, ConnectionLimits
from .handlers import Handlers
from .stream import Stream

log = logging.getLogger(__name__)

_MAX_PATH_BYTES = 107  # what sockaddr_un holds beside its final NUL
_BACKLOG = 1024
_TURN_AWAY_S = 1.0
_TURN_AWAY_BYTES = 4096


class SocketError(Exception):
    """The socket cannot be used; the sentence says what to change."""


def bind(path: Path, access: Access) -> stdlib_socket.socket:
    """A listening Unix socket at `path`, with the mode and group of `access` from the start.

    Raises:
        SocketError: somebody answers there, the path is not a socket, or it cannot be made.
    """
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise SocketError(
            f"the socket path {path} is longer than {_MAX_PATH_BYTES} bytes; choose a shorter one"
        )
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _remove_stale(path)
        return _bound(path, access)
    except OSError as error:
        raise SocketError(f"the socket {path} cannot be made: {error.strerror}") from error


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketError(f"{path} exists and is not a socket; it was left alone: choose another --socket")
    with stdlib_socket.socket(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        code = probe.connect_ex(str(path))
    if code not in (errno.ECONNREFUSED, errno.ENOENT):
        raise SocketError(
            f"a daemon already answers at {path}; stop it first, or give this one another --socket"
        )
    path.unlink(missing_ok=True)
    log.info("replaced the stale socket %s", path)


def _bound(path: Path, access: Access) -> stdlib_socket.socket:
    sock = stdlib_socket.socket(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM)
    try:
        # Nobody gets in before the group is set: the socket is made for its owner alone.
        before = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        if access.gid is not None:
            os.chown(path, -1, access.gid)
            path.chmod(access.mode())
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


@dataclass
class Server:
    """Accepts connections and serves each in a task of its own."""

    handlers: Handlers
    version: WireVersion
    limits: ConnectionLimits
    max_connections: int
    connections: dict[int, Connection] = field(default_factory=dict)
    accepted: int = 0
    refused: int = 0

    async def serve(self, sock: stdlib_socket.socket, stop: trio.Event, grace_s: float) -> None:
        """Serve until `stop` is set, then answer what is under way for at most `grace_s` seconds."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        async with trio.open_nursery() as clients:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(self._accept, listener, clients)
                await stop.wait()
                accepting.cancel_scope.cancel()
            for connection in tuple(self.connections.values()):
                connection.stop()
            clients.cancel_scope.deadline = trio.current_time() + grace_s

    async def _accept(self, listener: trio.SocketListener, clients: trio.Nursery) -> None:
        await trio.serve_listeners(self._serve_one, [listener], handler_nursery=clients)

    async def _serve_one(self, stream: trio.SocketStream) -> None:
        if len(self.connections) >= self.max_connections:
            self.refused += 1
            await self._turn_away(stream)
            return
        self.accepted += 1
        connection_id = self.accepted
        connection = Connection(
            Stream(stream.socket), connection_id, self.handlers, self.version, self.limits
        )
        self.connections[connection_id] = connection
        try:
            await connection.serve()
        except Exception:  # the boundary: a fault of ours must not end other clients' connections
            log.exception("connection %d ended by a fault of the daemon", connection_id)
        finally:
            del self.connections[connection_id]

    async def _turn_away(self, stream: trio.SocketStream) -> None:
        reply = ErrorReply(
            error_message=f"the daemon serves {self.max_connections} connections already, its limit; close "
            "some or raise --max-connections",
            error_code=ErrorCode.UNAVAILABLE,
        )
        async with stream:
            with trio.move_on_after(_TURN_AWAY_S):
                try:
                    await stream.send_all(json_lines.encode_reply(reply, self.version))
                    await stream.send_eof()
                    # Closing at once would break a client that is still writing before it reads the reason.
                    while await stream.receive_some(_TURN_AWAY_BYTES):
                        pass
                except trio.BrokenResourceError:
                    log.debug("a connection that was turned away did not wait for the reason")


def remove_socket(path: Path, sock_inode: int) -> None:
    """Remove the socket file at the end, unless another daemon has put its own there by now."""
    try:
        if path.lstat().st_ino == sock_inode:
            path.unlink()
    except FileNotFoundError:
        log.debug("the socket %s was gone already", path)
