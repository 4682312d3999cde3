"""The protocol's state for one connection, without any I/O.

    session.receive_data(data)      what came off the socket; b"" when it ended
    session.next_event()            what that means, or NEED_DATA
    session.send_request(request)   the bytes to write, and the id that its reply will carry
    session.send_reply(id, reply)   the bytes to write

Rules:
1. Events come out the same however the bytes were cut.
2. A session begins on wire 1. Once a hello is answered with a version of wire 2 both sides go on in
   frames. Between its hello and the answer a client sends nothing, and what a daemon gets is left unread:
   the answer decides what those bytes are.
3. On wire 1 replies come in the order of the requests; a session refuses to send or read anything else.
   On wire 2 they come in any order; one that nobody waits for is dropped and counted.
4. After a fatal event or a RemoteProtocolError the connection must be closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from .actions import check_reply, check_request
from .batches import Hello, HelloReply
from .codecs import json_lines, msgpack_frames
from .errors import InvalidMessage, LocalProtocolError, RemoteProtocolError
from .fields import MIB
from .messages import ErrorReply, Reply, Request
from .negotiation import parsed
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
    """What a session holds at most. A client reads longer messages than it sends: a layout is long."""

    max_request_bytes: int = MIB
    max_reply_bytes: int = 64 * MIB


DEFAULT_LIMITS = Limits()

_FRAMES_MAJOR = 2


class Session:
    """One connection's protocol state, for either end of it.

    Args:
        version: the newest wire that this side speaks and knows.
    """

    def __init__(self, role: Role, *, version: WireVersion = LATEST, limits: Limits = DEFAULT_LIMITS) -> None:
        self.role = role
        self.version = version
        self.is_framed = False
        """Whether both sides have gone on to wire 2."""
        self.unknown_fields = 0
        """Fields this side did not know and ignored, so far."""
        self.dropped_replies = 0
        """Replies that nobody waited for, so far."""
        self._limits = limits
        self._incoming_bytes = limits.max_request_bytes if role is Role.DAEMON else limits.max_reply_bytes
        self._reader: json_lines.LineReader | msgpack_frames.FrameReader
        self._reader = json_lines.LineReader(self._incoming_bytes)
        self._open: dict[int, Request | None] = {}  # asked and not yet answered, in order
        self._last_id = msgpack_frames.NOBODY
        self._hello_id: int | None = None  # of a hello that is not answered yet
        self._ended = False
        self._failed = False

    @property
    def pending(self) -> int:
        """Requests that are asked and not yet answered."""
        return len(self._open)

    @property
    def has_unread_bytes(self) -> bool:
        """Whether there are bytes that no event was made of yet."""
        return self._reader.has_unread_bytes

    # -- receiving -------------------------------------------------------------------------------------

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
            # A daemon leaves what follows a hello unread until it has answered.
            waits = self._hello_id is not None and self.role is Role.DAEMON
            while not waits and (body := self._reader.next_body()) is not None:
                event = self._request_event(body) if self.role is Role.DAEMON else self._reply_event(body)
                if event is not None:
                    return event
        except RemoteProtocolError as error:
            self._failed = True
            if self.role is Role.CLIENT:
                raise
            return self._farewell(error)
        return ConnectionClosed() if self._ended else NEED_DATA

    def _farewell(self, error: RemoteProtocolError) -> RequestRejected:
        request_id = msgpack_frames.NOBODY if self.is_framed else self._next_id()
        self._open[request_id] = None
        reply = ErrorReply(error_message=str(error), error_code=error.code)
        return RequestRejected(request_id, reply, fatal=True)

    def _request_event(self, body: bytes) -> RequestReceived | RequestRejected:
        if self.is_framed:
            request_id, word, fields = msgpack_frames.decode_envelope(body)
            if request_id in self._open or request_id == msgpack_frames.NOBODY:
                raise RemoteProtocolError(
                    f"the request id {request_id} is in use; give each its own, from 1 on"
                )
        else:
            request_id, word, fields = self._next_id(), "", {}
        try:
            if self.is_framed:
                request, unknown = msgpack_frames.decode_request(word, fields, self.version)
            else:
                request, unknown = json_lines.decode_request(body, self.version)
        except InvalidMessage as error:
            self._open[request_id] = None
            reply = ErrorReply(error_message=error.message, error_code=error.code)
            return RequestRejected(request_id, reply)
        self.unknown_fields += unknown
        self._open[request_id] = request
        if isinstance(request, Hello):
            self._hello_id = request_id
        return RequestReceived(request_id, request)

    def _reply_event(self, body: bytes) -> ReplyReceived | None:
        try:
            return self._framed_reply(body) if self.is_framed else self._reply_on_line(body)
        except InvalidMessage as error:
            raise RemoteProtocolError(error.message) from None

    def _reply_on_line(self, line: bytes) -> ReplyReceived:
        if not self._open:
            raise RemoteProtocolError("the daemon sent a reply that nobody asked for")
        request_id = next(iter(self._open))
        reply, unknown = json_lines.decode_reply(line, self._answered(request_id), self.version)
        self.unknown_fields += unknown
        self._check_welcome(reply)
        self._switch_after(request_id, reply)
        return ReplyReceived(request_id, reply)

    def _check_welcome(self, reply: Reply) -> None:
        if isinstance(reply, HelloReply):
            chosen = parsed(reply.version)
            if chosen is None or chosen > self.version:
                raise InvalidMessage(
                    f"the daemon goes on in wire {reply.version!r} and this side speaks up to {self.version}"
                )

    def _framed_reply(self, body: bytes) -> ReplyReceived | None:
        request_id, word, fields = msgpack_frames.decode_envelope(body)
        if request_id == msgpack_frames.NOBODY:
            raise RemoteProtocolError(f"the daemon ends the connection: {fields.get('error_message')}"[:500])
        if request_id not in self._open:
            self.dropped_replies += 1
            return None
        request = self._answered(request_id)
        reply, unknown = msgpack_frames.decode_reply(word, fields, request, self.version)
        self.unknown_fields += unknown
        return ReplyReceived(request_id, reply)

    def _answered(self, request_id: int) -> Request:
        request = self._open.pop(request_id)
        assert request is not None  # only a daemon's session opens requests without one
        return request

    # -- sending ---------------------------------------------------------------------------------------

    def send_request(self, request: Request) -> tuple[int, bytes]:
        """The id that the reply will carry, and the bytes to write.

        Raises:
            LocalProtocolError: the wire that is spoken cannot carry it, it is too long, or a hello is not
                answered yet.
            TypeError: it is no request.
        """
        check_request(request)
        if self._hello_id is not None:
            raise LocalProtocolError(f"{request.action}: the hello before it is not answered yet")
        request_id = self._last_id + 1
        if self.is_framed:
            data = msgpack_frames.encode_request(request_id, request, self.version)
        else:
            data = json_lines.encode_request(request, self.version)
        _check_length(request.action, data, self._limits.max_request_bytes)
        self._open[self._next_id()] = request
        if isinstance(request, Hello):
            self._hello_id = request_id
        return request_id, data

    def send_reply(self, request_id: int, reply: Reply) -> bytes:
        """The bytes that answer the request `request_id`.

        Raises:
            LocalProtocolError: nobody asked, or on wire 1 an older request is unanswered; or the reply is
                too long or holds what the wire cannot carry, and the request is still unanswered.
            TypeError: it is no reply; the request is still unanswered.
        """
        check_reply(reply)
        if request_id not in self._open or not (self.is_framed or request_id == next(iter(self._open))):
            raise LocalProtocolError(f"request {request_id} is not the next to be answered")
        if self.is_framed:
            data = msgpack_frames.encode_reply(request_id, reply, self.version)
        else:
            data = json_lines.encode_reply(reply, self.version)
        _check_length(reply.status, data, self._limits.max_reply_bytes)
        del self._open[request_id]
        self._switch_after(request_id, reply)
        return data

    def give_up(self, request_id: int) -> None:
        """(client, wire 2) Nobody waits for this reply any more; when it comes it is dropped and counted.

        Raises:
            LocalProtocolError: on wire 1 it would be taken for the answer to the next request; close the
                connection instead.
        """
        if not self.is_framed:
            raise LocalProtocolError("a reply cannot be given up on wire 1; close the connection")
        self._open.pop(request_id, None)

    # -- inside ----------------------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _switch_after(self, request_id: int, reply: Reply) -> None:
        """Go on in frames where `reply` answers a hello and says so."""
        if request_id != self._hello_id:
            return
        self._hello_id = None
        chosen = parsed(reply.version) if isinstance(reply, HelloReply) else None
        if (
            chosen is None
            or chosen.major < _FRAMES_MAJOR
            or not isinstance(self._reader, json_lines.LineReader)
        ):
            return
        rest = self._reader.take_rest()
        self._reader = msgpack_frames.FrameReader(self._incoming_bytes)
        self._reader.feed(rest)
        self.is_framed = True


def _check_length(word: str, data: bytes, most: int) -> None:
    # Neither the newline of a line nor the length of a frame counts, but four bytes are not worth a word.
    if len(data) - 1 > most:
        raise LocalProtocolError(f"{word}: {len(data) - 1} bytes are more than one message may have ({most})")
