"""The Unix socket: bound with the right mode from its first instant, and never over somebody else's.

Rules:
1. A socket where somebody answers is refused; one that nobody answers is replaced; anything else at the
   path is never touched.
2. Who is not let in is told why, for at most a moment, and costs those who are let in nothing.
3. Without file descriptors new clients wait, those who are in are served, and the log says so now and then.
4. Stopping answers what was asked before it closes.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket as stdlib_socket
import stat
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import trio

from hypercache_protocol.codecs import json_lines
from hypercache_protocol.errors import ErrorCode
from hypercache_protocol.messages import ErrorReply
from hypercache_protocol.versions import WireVersion

from . import socket_folder
from .access import Access
from .connection import Connection, ConnectionLimits
from .handlers import Handlers
from .peers import Peer, peer_of
from .rights import Rules
from .stream import Stream

log = logging.getLogger(__name__)

_MAX_PATH_BYTES = 107  # what sockaddr_un holds beside its final NUL
_BACKLOG = 1024
_TURN_AWAY_S = 1.0
_TURN_AWAY_BYTES = 4096
_TURNED_AWAY_AT_ONCE = 64  # beyond that they are closed without a word: each costs a file descriptor
_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
_ACCEPT_AGAIN_S = 0.1
_SHORTAGE_LOG_S = 60.0


class SocketError(Exception):
    """The socket cannot be used; the sentence says what to change."""


def bind(path: Path, access: Access) -> stdlib_socket.socket:
    """A listening Unix socket at `path`, with the mode and group of `access` from the start.

    Raises:
        SocketError: somebody answers there, the path is not a socket, others could replace what lies in its
            folder, or it cannot be made.
    """
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise SocketError(
            f"the socket path {path} is longer than {_MAX_PATH_BYTES} bytes; choose a shorter one"
        )
    try:
        socket_folder.make(path.parent)
        _check_folder(path.parent.absolute())
        _remove_stale(path)
        return _bound(path, access)
    except OSError as error:
        raise SocketError(
            f"the socket {path} cannot be made: {error.strerror}; give a --socket in a folder that the "
            "daemon's user may write to"
        ) from error


def _check_folder(folder: Path) -> None:
    if reason := socket_folder.weakness(folder):
        raise SocketError(
            f"{reason}: let only the daemon's user write to it, or choose a --socket in a folder of its own"
        )
    socket_folder.warn_of_folders_above(folder)


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
    with ExitStack() as undo:
        sock = undo.enter_context(stdlib_socket.socket(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM))
        # Nobody gets in before the group is set: the socket is made for its owner alone.
        before = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        undo.callback(path.unlink)
        if access.gid is not None:
            _give_to_group(path, access.gid)
            path.chmod(access.mode())
        sock.listen(_BACKLOG)
        undo.pop_all()
        return sock


def _give_to_group(path: Path, gid: int) -> None:
    try:
        os.chown(path, -1, gid)
    except PermissionError:
        raise SocketError(
            f"the daemon's user may not give the socket {path} to group {gid}: start it as a member of "
            "--group, or as root"
        ) from None


@dataclass
class Server:
    """Lets clients in, and serves each connection in a task of its own."""

    handlers: Handlers
    version: WireVersion
    limits: ConnectionLimits
    max_connections: int
    rules: Rules
    connections: dict[int, Connection] = field(default_factory=dict)
    accepted: int = 0
    refused: int = 0
    forbidden: int = 0
    idle_closed: int = 0
    failed_accepts: int = 0
    """Tries to let a client in for which there was no file descriptor."""
    _turning_away: int = 0
    _unknown_fields: int = 0  # on connections that are closed
    _shortage_known_until: float = -math.inf
    _strangers: set[int] = field(default_factory=set)

    @property
    def unknown_fields(self) -> int:
        """Fields of requests so far that this daemon does not know, and ignored."""
        return self._unknown_fields + sum(each.unknown_fields for each in self.connections.values())

    async def serve(self, sock: stdlib_socket.socket, stop: trio.Event, grace_s: float) -> None:
        """Serve until `stop` is set, then answer what is under way for at most `grace_s` seconds."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        async with listener, trio.open_nursery() as clients:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(self._accept, listener, clients)
                await stop.wait()
                accepting.cancel_scope.cancel()
            await listener.aclose()  # nobody waits to be let in by a daemon that ends
            for connection in tuple(self.connections.values()):
                connection.stop()
            clients.cancel_scope.deadline = trio.current_time() + grace_s

    async def _accept(self, listener: trio.SocketListener, clients: trio.Nursery) -> None:
        """Accept for ever. Trio's own loop logs a traceback for each try while descriptors are short."""
        while True:
            stream = await self._accepted(listener)
            if stream is None:
                await trio.sleep(_ACCEPT_AGAIN_S)
            else:
                clients.start_soon(self._serve_one, stream)

    async def _accepted(self, listener: trio.SocketListener) -> trio.SocketStream | None:
        """The next client; None where there is no descriptor for it."""
        try:
            return await listener.accept()
        except OSError as error:
            if error.errno not in _OUT_OF_DESCRIPTORS:
                raise
            self._note_shortage(error)
            return None

    def _note_shortage(self, error: OSError) -> None:
        self.failed_accepts += 1
        if trio.current_time() < self._shortage_known_until:
            return
        self._shortage_known_until = trio.current_time() + _SHORTAGE_LOG_S
        log.error(
            "no further client can be let in (%s) while %d are served; they wait: allow more open files "
            "(ulimit -n, LimitNOFILE=), or set a lower --max-connections",
            error.strerror,
            len(self.connections),
        )

    async def _serve_one(self, stream: trio.SocketStream) -> None:
        peer = peer_of(stream.socket)
        refusal = self._refusal(peer)
        if refusal is not None:
            await self._turn_away(stream, refusal)
            return
        self.accepted += 1
        connection_id = self.accepted
        connection = Connection(
            Stream(stream.socket),
            connection_id,
            self.rules.rights_of(peer),
            self.handlers,
            self.version,
            self.limits,
        )
        self.connections[connection_id] = connection
        try:
            await connection.serve()
        except Exception:  # the boundary: a fault of ours must not end other clients' connections
            log.exception("connection %d ended by a fault of the daemon", connection_id)
        finally:
            del self.connections[connection_id]
            self.idle_closed += connection.was_idle
            self._unknown_fields += connection.unknown_fields

    def _refusal(self, peer: Peer) -> ErrorReply | None:
        """Why the next client is not let in; counts those that are not."""
        if not self.rules.lets_in(peer):
            self.forbidden += 1
            self._note_stranger(peer)
            return ErrorReply(
                error_message=f"{peer} may not use this daemon; its operator can name one of them in --allow",
                error_code=ErrorCode.FORBIDDEN,
            )
        if len(self.connections) >= self.max_connections:
            self.refused += 1
            return ErrorReply(
                error_message=f"the daemon serves {self.max_connections} connections already, its limit; "
                "close some or raise --max-connections",
                error_code=ErrorCode.UNAVAILABLE,
            )
        return None

    def _note_stranger(self, peer: Peer) -> None:
        if peer.uid not in self._strangers:  # once for each, so that nobody fills the log
            self._strangers.add(peer.uid)
            log.warning("%s was not let in: --allow names none of them", peer)

    async def _turn_away(self, stream: trio.SocketStream, reply: ErrorReply) -> None:
        self._turning_away += 1
        async with stream:
            try:
                if self._turning_away <= _TURNED_AWAY_AT_ONCE:
                    await self._say_why(stream, reply)
            finally:
                self._turning_away -= 1

    async def _say_why(self, stream: trio.SocketStream, reply: ErrorReply) -> None:
        with trio.move_on_after(_TURN_AWAY_S):
            try:
                await stream.send_all(json_lines.encode_reply(reply, self.version))
                await stream.send_eof()
                # Closing at once would break a client that is still writing before it reads the reason.
                while await stream.receive_some(_TURN_AWAY_BYTES):
                    pass
            except trio.BrokenResourceError:
                log.debug("a connection that was turned away did not wait for the reason")


def socket_identity(path: Path) -> tuple[int, int]:
    """What tells the socket that was bound at `path` from all that are bound there later: its inode, and when
    that was changed last (in ns). The number alone says nothing: many file systems give it to the next."""
    state = path.lstat()
    return state.st_ino, state.st_ctime_ns


def remove_socket(path: Path, identity: tuple[int, int]) -> None:
    """Remove the socket file at the end, unless another daemon has put its own there by now."""
    try:
        if socket_identity(path) == identity:
            path.unlink()
    except FileNotFoundError:
        log.debug("the socket %s was gone already", path)
