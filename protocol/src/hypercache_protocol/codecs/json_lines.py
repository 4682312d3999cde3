"""Wire 1: one JSON object per line, a newline at its end.

Rules:
1. A line either is one whole message or an `InvalidMessage`; the reader stays in step either way.
2. A line longer than the limit is a `RemoteProtocolError`: it is not kept, so the reader is out of step.
3. What follows the last newline is never a message: a peer that died while writing asked for nothing.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticSerializationError, from_json

from ..actions import actions_on_lines
from ..errors import ErrorCode, InvalidMessage, LocalProtocolError, RemoteProtocolError
from ..messages import Message, Reply, Request
from ..versions import LATEST, WireVersion
from .bodies import exclusions, refuse_unsendable, reply_from, request_from


class LineReader:
    """Cuts a stream of bytes into lines of at most `max_line_bytes`, newline not counted."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._buffer = bytearray()
        self._searched = 0  # bytes at the front that are known to hold no newline

    @property
    def has_unread_bytes(self) -> bool:
        """Whether something was fed that is not cut off yet."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take bytes as they came off the stream."""
        self._buffer += data

    def next_body(self) -> bytes | None:
        """The next whole line without its newline, or None until more bytes come.

        Raises:
            RemoteProtocolError: the line is longer than the limit.
        """
        end = self._buffer.find(b"\n", self._searched)
        length = len(self._buffer) if end < 0 else end
        if length > self._max_line_bytes:
            self._buffer.clear()
            self._searched = 0
            raise RemoteProtocolError(
                f"a line is longer than {self._max_line_bytes} bytes, the limit of this side",
                ErrorCode.TOO_LARGE,
            )
        if end < 0:
            self._searched = length
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def take_rest(self) -> bytes:
        """What was fed and not yet cut into lines, for the reader of the next wire."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        return rest


# -- encoding ------------------------------------------------------------------------------------------


def encode_request(request: Request, version: WireVersion = LATEST) -> bytes:
    """The line that carries `request` to a peer of `version`.

    Raises:
        LocalProtocolError: it sets a field that such a peer does not know and that may not be dropped, or
            it is none that lines carry.
    """
    refuse_unsendable(request, version)
    if request.action not in actions_on_lines(LATEST):
        raise LocalProtocolError(
            f"{request.action} needs wire 2.0 and this connection speaks lines of wire {version}"
        )
    return _line("action", request.action, request, version)


def encode_reply(reply: Reply, version: WireVersion = LATEST) -> bytes:
    """The line that carries `reply`; every field a 1.0 peer does not know may be dropped for it.

    Raises:
        LocalProtocolError: a StatusReply holds something that is not JSON.
    """
    return _line("status", reply.status, reply, version)


def _line(key: str, word: str, message: Message, version: WireVersion) -> bytes:
    exclude = exclusions(type(message), version)
    try:
        body = message.__pydantic_serializer__.to_json(message, exclude_none=True, exclude=exclude)
    except PydanticSerializationError as error:
        raise LocalProtocolError(f"{word} cannot be written as JSON: {error}") from None
    head = f'{{"{key}":"{word}"'.encode()
    return head + (b"}\n" if body == b"{}" else b"," + body[1:] + b"\n")


# -- decoding ------------------------------------------------------------------------------------------


def decode_request(line: bytes, version: WireVersion = LATEST) -> tuple[Request, int]:
    """The request that `line` holds, and how many unknown fields it had.

    Args:
        version: what this side is held to; actions and fields of later versions count as unknown.

    Raises:
        InvalidMessage: with a sentence that names what is wrong.
    """
    fields = _json_object(line)
    action = fields.pop("action", None)
    if not isinstance(action, str):
        raise InvalidMessage("the request needs a field 'action' that holds a string")
    return request_from(action, fields, actions_on_lines(version), version)


def decode_reply(line: bytes, request: Request, version: WireVersion = LATEST) -> tuple[Reply, int]:
    """The reply to `request` that `line` holds, and how many unknown fields it had.

    A status that this side does not know becomes an ErrorReply that says so.

    Raises:
        InvalidMessage: the line is no reply, or none to this request.
    """
    fields = _json_object(line)
    return reply_from(fields.pop("status", None), fields, request, version)


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        decoded = from_json(line, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise InvalidMessage(f"the line is not JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise InvalidMessage(f"the line must hold a JSON object, not {type(decoded).__name__}")
    return decoded
