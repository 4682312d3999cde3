"""One connection to the daemon under test: the protocol's session, a socket, and every byte that passed."""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import termios
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypercache_protocol import (
    NEED_DATA,
    ProtocolError,
    ReplyReceived,
    Role,
    Session,
)
from hypercache_protocol.batches import Hello, HelloReply
from hypercache_protocol.codecs.json_lines import LineReader
from hypercache_protocol.codecs.msgpack_frames import FrameReader, decode_envelope
from hypercache_protocol.fields import MIB
from hypercache_protocol.messages import ErrorReply, Reply, Request

_R = TypeVar("_R", bound=Reply)
Fields = dict[str, Any]

KEPT_BYTES = 4096
"""What is kept of one piece; a longer one is cut."""

_REPLY_LIMIT_BYTES = 64 * MIB
_READ_BYTES = 65536
_MOST_DESCRIPTORS = 16
_LOOK_AGAIN_S = 0.0005


class CheckFailed(Exception):
    """The daemon did not do what the check asks; the sentence says what it did."""


class NotOffered(Exception):
    """This daemon, or this machine, does not have what the check needs."""


def expect(condition: bool, otherwise: str) -> None:
    """Nothing where `condition` holds.

    Raises:
        CheckFailed: with the sentence `otherwise`.
    """
    if not condition:
        raise CheckFailed(otherwise)


@dataclass
class Piece:
    """Bytes that went one way without a break: the first KEPT_BYTES of `size_bytes`; or a close."""

    connection: int
    is_sent: bool
    data: bytes = b""
    size_bytes: int = 0
    is_close: bool = False

    def add(self, data: bytes) -> None:
        self.data += data[: max(0, KEPT_BYTES - len(self.data))]
        self.size_bytes += len(data)


@dataclass
class Exchange:
    """Everything that one check sent and received, in order."""

    pieces: list[Piece] = field(default_factory=list)

    def add(self, connection: int, is_sent: bool, data: bytes) -> None:
        last = self.pieces[-1] if self.pieces else None
        if last is None or last.is_close or (last.connection, last.is_sent) != (connection, is_sent):
            last = Piece(connection, is_sent)
            self.pieces.append(last)
        last.add(data)

    def add_close(self, connection: int) -> None:
        """The daemon closed."""
        self.pieces.append(Piece(connection, is_sent=False, is_close=True))


@dataclass(frozen=True)
class Answer:
    """A reply twice: as the models read it, and its fields as they came (`status` among them)."""

    request_id: int
    reply: Reply
    fields: Fields


class Connection:
    """One connection; every wait has a deadline, after which the check fails."""

    def __init__(self, socket_path: str, timeout_s: float, exchange: Exchange, number: int) -> None:
        self._number = number
        self._timeout_s = timeout_s
        self._exchange = exchange
        self._session = Session(Role.CLIENT)
        self._lines = LineReader(_REPLY_LIMIT_BYTES)
        self._frames = FrameReader(_REPLY_LIMIT_BYTES)
        self._peeked: bytes | None = None
        self._descriptors: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(socket_path)
        except OSError:
            self._socket.close()
            raise

    # -- bytes -----------------------------------------------------------------------------------------

    def send_bytes(self, data: bytes) -> None:
        """Write `data` as it is."""
        self._exchange.add(self._number, True, data)
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.sendall(data)
        except (OSError, TimeoutError) as error:
            raise CheckFailed(f"the daemon does not take what is sent: {error}") from error

    def send_byte_by_byte(self, data: bytes) -> None:
        """Write `data` so that the daemon reads each byte by itself, where the kernel tells what is read.

        Raises:
            CheckFailed: it does not read them all in time.
        """
        last_s = time.monotonic() + self._timeout_s
        for byte in data:
            self.send_bytes(bytes([byte]))
            while self._has_unread():
                if time.monotonic() > last_s:
                    raise CheckFailed("the daemon does not read what is sent")
                time.sleep(_LOOK_AGAIN_S)

    def _has_unread(self) -> bool:
        """Whether the daemon has not yet read all that was sent, where the kernel tells it."""
        try:
            return any(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
        except OSError:  # a sandbox may not; then pieces may be read together
            return False

    def wait_for_answer(self) -> None:
        """Nothing once the daemon has begun to answer; what it says is left unread.

        Raises:
            CheckFailed: it does not begin in time.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(self._timeout_s * 1000):
            raise CheckFailed(f"no answer came within {self._timeout_s:g} s")

    def end(self) -> None:
        """Say that nothing more will be sent."""
        self._socket.shutdown(socket.SHUT_WR)

    def read_body(self) -> bytes | None:
        """The next whole line or frame, without newline or length; None where the daemon closed."""
        if self._peeked is not None:
            peeked, self._peeked = self._peeked, None
            return peeked
        last_s = time.monotonic() + self._timeout_s
        while (body := self._next_body()) is None:
            data = self._receive(last_s)
            if not data:
                return None
            (self._frames if self._session.is_framed else self._lines).feed(data)
        return body

    def read_rest(self, timeout_s: float) -> bytes:
        """(wire 1) What is not read yet, and what comes until the daemon closes, for `timeout_s` at most."""
        parts = [self._lines.take_rest()]
        last_s = time.monotonic() + timeout_s
        with suppress(CheckFailed):
            while data := self._receive(last_s):
                parts.append(data)
        return b"".join(parts)

    def _next_body(self) -> bytes | None:
        try:
            return (self._frames if self._session.is_framed else self._lines).next_body()
        except ProtocolError as error:
            raise CheckFailed(str(error)) from error

    def _receive(self, last_s: float) -> bytes:
        # Each read gets what is left of the time: a daemon that trickles bytes is late all the same.
        left_s = last_s - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, _READ_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            self._descriptors += descriptors
        except ConnectionResetError:
            data = b""
        except TimeoutError:
            raise CheckFailed(f"no answer came within {self._timeout_s:g} s") from None
        if data:
            self._exchange.add(self._number, False, data)
        else:
            self._exchange.add_close(self._number)
        return data

    # -- fields ----------------------------------------------------------------------------------------

    def send_fields(self, **fields: object) -> None:
        """Write one JSON line, right or wrong."""
        self.send_bytes(json.dumps(fields).encode() + b"\n")

    def read_fields(self) -> Fields:
        """The next reply on a line, as it came.

        Raises:
            CheckFailed: the daemon closed, or the line is no JSON object.
        """
        body = self.read_body()
        if body is None:
            raise CheckFailed("the daemon closed the connection instead of answering")
        return _json_object(body)

    def ask_fields(self, **fields: object) -> Fields:
        """Send one JSON line and give its reply as it came."""
        self.send_fields(**fields)
        return self.read_fields()

    def read_frame(self) -> tuple[int, str, Fields]:
        """The next frame's id, word and fields, as they came.

        Raises:
            CheckFailed: the daemon closed, or it is no frame.
        """
        body = self.read_body()
        if body is None:
            raise CheckFailed("the daemon closed the connection instead of answering")
        try:
            return decode_envelope(body)
        except ProtocolError as error:
            raise CheckFailed(str(error)) from error

    def has_more(self) -> bool:
        """Whether another frame comes before the daemon closes.

        Raises:
            CheckFailed: it neither sends nor closes.
        """
        if self._peeked is None:
            self._peeked = self.read_body()
        return self._peeked is not None

    # -- messages --------------------------------------------------------------------------------------

    def ask(self, request: Request) -> Answer:
        """Send one request and give its answer."""
        return self.ask_all([request])[0]

    def ask_all(self, requests: Iterable[Request]) -> list[Answer]:
        """Send all in one piece and give their answers, in the order of the requests.

        Raises:
            CheckFailed: the daemon closed, or one answer is none that the wire allows.
        """
        sent = [self._session.send_request(request) for request in requests]
        self.send_bytes(b"".join(data for _, data in sent))
        answers = {answer.request_id: answer for answer in (self._read_answer() for _ in sent)}
        return [answers[request_id] for request_id, _ in sent]

    def get(self, request: Request, kind: type[_R]) -> _R:
        """The reply to `request`, which must be of `kind`.

        Raises:
            CheckFailed: it is another.
        """
        return self.get_answer(request, kind)[0]

    def get_answer(self, request: Request, kind: type[_R]) -> tuple[_R, Fields]:
        """As `get`, and the reply's fields as they came."""
        answer = self.ask(request)
        if not isinstance(answer.reply, kind):
            raise CheckFailed(f"{request.action} was answered with {_shown(answer)}, not {kind.status}")
        return answer.reply, answer.fields

    def refused(self, request: Request) -> ErrorReply:
        """The error that `request` must have."""
        return self.get(request, ErrorReply)

    def go_framed(self, hello: Hello) -> HelloReply:
        """Say `hello` and go on in wire 2.

        Raises:
            CheckFailed: the daemon does not.
        """
        reply = self.get(hello, HelloReply)
        expect(self._session.is_framed, f"a hello for 2.0 was answered with version {reply.version!r}")
        self._frames.feed(self._lines.take_rest())
        return reply

    def _read_answer(self) -> Answer:
        was_framed = self._session.is_framed
        body = self.read_body()
        if body is None:
            raise CheckFailed("the daemon closed the connection instead of answering")
        self._session.receive_data(len(body).to_bytes(4, "big") + body if was_framed else body + b"\n")
        try:
            event = self._session.next_event()
        except ProtocolError as error:
            raise CheckFailed(f"{error}; no client can read that, and the check ends here") from error
        if event is NEED_DATA:
            raise CheckFailed("the daemon answered with an id that no request had")
        assert isinstance(event, ReplyReceived), event
        return Answer(event.request_id, event.reply, _fields_of(body, was_framed))

    def take_descriptors(self) -> list[int]:
        """What came enclosed since the last time; they are the caller's."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        for descriptor in self.take_descriptors():
            os.close(descriptor)
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fields_of(body: bytes, is_framed: bool) -> Fields:
    if not is_framed:
        return _json_object(body)
    _, word, fields = decode_envelope(body)
    return {"status": word, **fields}


def _json_object(line: bytes) -> Fields:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckFailed(f"the daemon sent a line that is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckFailed("the daemon sent a line that is no JSON object")
    return value


def _shown(answer: Answer) -> str:
    if isinstance(answer.reply, ErrorReply):
        return f"an error ({answer.reply.error_message[:300]})"
    return answer.reply.status
