"""The protocol's state for one connection, without any I/O.

    session.receive_data(data)      what came off the socket; b"" when it ended
    session.next_event()            what that means, or NEED_DATA
    session.send_request(request)   the bytes to write, and the id that its reply will carry
    session.send_reply(id, reply)   the bytes to write

Rules:
1. Events come out the same however the bytes were cut.
2. On wire 1 replies come in the order of the requests; a session refuses to send or read anything else.
3. After a fatal event or a RemoteProtocolError the connection must be closed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

from .codecs import json_lines
from .errors import ErrorCode, InvalidMessage, LocalProtocolError, RemoteProtocolError
from .fields import MIB
from .messages import ErrorReply, Reply, Request
from .versions import LATEST, WireVersion


class Role(Enum):
    """Which end of the connection a session is."""

    CLIENT = "client"
    DAEMON = "daemon"


class NeedData(Enum):
    """The type of NEED_DATA; an enum, so that `is NEED_DATA` narrows."""

    NEED_DATA = "NEED_DATA"

    def __repr__(self) -> str:
        return "NEED_DATA"


NEED_DATA: Final = NeedData.NEED_DATA
"""There is no whole message yet: read from the socket, then ask again."""


@dataclass(frozen=True)
class RequestReceived:
    """The peer asks; answer with `send_reply(request_id, …)`."""

    request_id: int
    request: Request


@dataclass(frozen=True)
class RequestRejected:
    """The peer sent something that is no request; send `reply` and, if `fatal`, close."""

    request_id: int
    reply: ErrorReply
    fatal: bool = False


@dataclass(frozen=True)
class ReplyReceived:
    """The answer to the request that `send_request` numbered `request_id`."""

    request_id: int
    reply: Reply


@dataclass(frozen=True)
class ConnectionClosed:
    """The peer closed; what it had not finished writing was dropped."""


Event = RequestReceived | RequestRejected | ReplyReceived | ConnectionClosed


@dataclass(frozen=True)
class Limits:
    """What a session holds at most. A client reads longer lines than it sends: a layout is long."""

    max_request_bytes: int = MIB
    max_reply_bytes: int = 64 * MIB


DEFAULT_LIMITS = Limits()


class Session:
    """One connection's protocol state, for either end of it."""

    def __init__(self, role: Role, *, version: WireVersion = LATEST, limits: Limits = DEFAULT_LIMITS) -> None:
        self.role = role
        self.version = version
        self.unknown_fields = 0
        """Fields this side did not know and ignored, so far."""
        incoming = limits.max_request_bytes if role is Role.DAEMON else limits.max_reply_bytes
        self._limits = limits
        self._reader = json_lines.LineReader(incoming)
        self._open: deque[tuple[int, Request | None]] = deque()  # asked and not yet answered, in order
        self._next_id = 0
        self._ended = False
        self._failed = False

    @property
    def pending(self) -> int:
        """Requests that are asked and not yet answered."""
        return len(self._open)

    def receive_data(self, data: bytes) -> None:
        """Take what came off the socket; b"" says that the peer closed."""
        if not data:
            self._ended = True
        elif not self._failed:
            self._reader.feed(data)

    def next_event(self) -> Event | NeedData:
        """What the bytes so far mean, one event at a time.

        Raises:
            RemoteProtocolError: (client) the daemon sent no reply that fits; close the connection.
        """
        if self._failed:
            return ConnectionClosed()
        try:
            line = self._reader.next_line()
        except RemoteProtocolError as error:
            self._failed = True
            if self.role is Role.CLIENT:
                raise
            reply = ErrorReply(error_message=str(error), error_code=ErrorCode.TOO_LARGE)
            return RequestRejected(self._opened(None), reply, fatal=True)
        if line is None:
            return ConnectionClosed() if self._ended else NEED_DATA
        return self._request_event(line) if self.role is Role.DAEMON else self._reply_event(line)

    def send_request(self, request: Request) -> tuple[int, bytes]:
        """The id that the reply will carry, and the bytes to write.

        Raises:
            LocalProtocolError: the peer's wire version cannot carry it, or it is too long.
        """
        data = json_lines.encode_request(request, self.version)
        _check_length(request.action, data, self._limits.max_request_bytes)
        return self._opened(request), data

    def send_reply(self, request_id: int, reply: Reply) -> bytes:
        """The bytes that answer the request `request_id`.

        Raises:
            LocalProtocolError: it is not the oldest unanswered request; or the reply is too long or holds
                what JSON cannot, and the request is still unanswered.
        """
        if not self._open or self._open[0][0] != request_id:
            raise LocalProtocolError(f"request {request_id} is not the next to be answered on wire 1")
        data = json_lines.encode_reply(reply, self.version)
        _check_length(reply.status, data, self._limits.max_reply_bytes)
        self._open.popleft()
        return data

    def _opened(self, request: Request | None) -> int:
        request_id = self._next_id
        self._next_id += 1
        self._open.append((request_id, request))
        return request_id

    def _request_event(self, line: bytes) -> RequestReceived | RequestRejected:
        try:
            request, unknown = json_lines.decode_request(line, self.version)
        except InvalidMessage as error:
            reply = ErrorReply(error_message=error.message, error_code=error.code)
            return RequestRejected(self._opened(None), reply)
        self.unknown_fields += unknown
        return RequestReceived(self._opened(request), request)

    def _reply_event(self, line: bytes) -> ReplyReceived:
        if not self._open:
            self._failed = True
            raise RemoteProtocolError("the daemon sent a reply that nobody asked for")
        request_id, request = self._open.popleft()
        assert request is not None  # only a daemon's session opens requests without one
        try:
            reply, unknown = json_lines.decode_reply(line, request, self.version)
        except InvalidMessage as error:
            self._failed = True
            raise RemoteProtocolError(error.message) from None
        self.unknown_fields += unknown
        return ReplyReceived(request_id, reply)


def _check_length(word: str, line: bytes, most: int) -> None:
    length = len(line) - 1  # the newline does not count
    if length > most:
        raise LocalProtocolError(f"{word}: {length} bytes are more than one line may have ({most})")
