"""Wire 2: length-prefixed msgpack frames.

A frame is four bytes, its body's length as an unsigned big-endian number, and the body: the msgpack list
[id, word, fields], where `id` is the client's number for the request (1 to 2**53; 0 in a reply means that
it answers no request), `word` the action or the status, and `fields` a map with string keys.

Rules:
1. A length above the limit is refused when it is read; nothing is ever allocated on its say-so. A list that
   claims more items than there are bytes for is found before anything is made of it.
2. A body that is [id, word, fields] and no message fails that request alone. Any other body leaves nobody
   to answer: the connection is over.
3. Extension types, timestamps among them, and maps with keys that are no strings are refused at any depth.
4. What msgpack's C and pure-Python unpackers disagree on (deep nesting) is refused by both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import msgpack

from ..actions import actions_in_frames
from ..errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from ..messages import Reply, Request
from ..versions import WireVersion
from .bodies import exclusions, refuse_unsendable, reply_from, request_from

NOBODY = 0
"""The id of a reply that answers no request: the connection is over, and this is why."""

MAX_ID = 1 << 53
_HEADER = struct.Struct(">I")
_MAX_DEPTH = 32
_STRINGS = frozenset({str})
_NOT_PLAIN = frozenset({dict, list, msgpack.Timestamp})
_NOT_WHOLE = "a frame's body is not one whole msgpack value of lists, maps with string keys and plain values"


class FrameReader:
    """Cuts a stream of bytes into frames whose bodies have at most `max_body_bytes`."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._buffer = bytearray()

    @property
    def has_unread_bytes(self) -> bool:
        """Whether something was fed that is not cut off yet."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take bytes as they came off the stream."""
        self._buffer += data

    def next_body(self) -> bytes | None:
        """The body of the next whole frame, or None until more bytes come.

        Raises:
            RemoteProtocolError: the frame claims to be longer than the limit.
        """
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > self._max_body_bytes:
            self._buffer.clear()
            raise RemoteProtocolError(
                f"a frame of {length} bytes is longer than {self._max_body_bytes}, the limit of this side",
                ErrorCode.TOO_LARGE,
            )
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:  # a slice of the buffer itself would be a copy more
            body = bytes(view[_HEADER.size : end])
        del self._buffer[:end]
        return body


# -- encoding ------------------------------------------------------------------------------------------


def encode_request(request_id: int, request: Request, version: WireVersion) -> bytes:
    """The frame that carries `request` to a peer of `version`.

    Raises:
        LocalProtocolError: it sets a field that such a peer does not know and that may not be dropped, or
            it is none that frames carry.
    """
    refuse_unsendable(request, version)
    if request.action not in actions_in_frames(version):
        raise LocalProtocolError(f"{request.action} cannot be sent in a frame of wire {version}")
    return _frame(request_id, request.action, request, version)


def encode_reply(request_id: int, reply: Reply, version: WireVersion) -> bytes:
    """The frame that carries `reply`.

    Raises:
        LocalProtocolError: a StatusReply holds something that msgpack cannot carry.
    """
    return _frame(request_id, reply.status, reply, version)


def _frame(request_id: int, word: str, message: Request | Reply, version: WireVersion) -> bytes:
    exclude = exclusions(type(message), version)
    fields = message.__pydantic_serializer__.to_python(message, exclude_none=True, exclude=exclude)
    try:
        body: bytes = msgpack.packb([request_id, word, fields])
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"{word} cannot be written as msgpack: {error}") from None
    return _HEADER.pack(len(body)) + body


# -- decoding ------------------------------------------------------------------------------------------


def decode_envelope(body: bytes) -> tuple[int, str, dict[str, Any]]:
    """The id, the word and the fields of a frame.

    Raises:
        RemoteProtocolError: it is no frame of this wire.
    """
    envelope = _unpacked(body)
    match envelope:
        case [int() as request_id, str() as word, dict() as fields] if _is_id(request_id):
            return request_id, word, fields
        case _:
            raise RemoteProtocolError("a frame must be the list [id, word, fields]")


def decode_request(word: str, fields: dict[str, Any], version: WireVersion) -> tuple[Request, int]:
    """The request that a frame's word and fields are, and how many unknown fields it had.

    Raises:
        InvalidMessage: with a sentence that names what is wrong.
    """
    return request_from(word, fields, actions_in_frames(version), version)


def decode_reply(
    word: str, fields: dict[str, Any], request: Request, version: WireVersion
) -> tuple[Reply, int]:
    """The reply to `request` that a frame's word and fields are, and how many unknown fields it had.

    Raises:
        InvalidMessage: it is none to this request.
    """
    return reply_from(word, fields, request, version)


def _unpacked(body: bytes) -> Any:
    try:
        _check_whole(body)
        value = msgpack.unpackb(body, raw=False, strict_map_key=True, ext_hook=_refuse_extension)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(_NOT_WHOLE) from error
    if not _is_sound(value):
        raise RemoteProtocolError(_NOT_WHOLE)
    return value


def _check_whole(body: bytes) -> None:
    """Walk over the body without making anything of it: msgpack's C unpacker makes a list as long as it
    claims to be before it has seen one item, so 1 MiB of nested lists would claim 8 GiB."""
    scanner = msgpack.Unpacker(max_buffer_size=len(body))
    scanner.feed(body)
    scanner.skip()


def _refuse_extension(code: int, _: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _is_id(request_id: int) -> bool:
    return not isinstance(request_id, bool) and NOBODY <= request_id <= MAX_ID


def _is_sound(value: Any) -> bool:
    # Level by level and only through containers; of a batch of plain strings none is looked at in Python.
    level = [value] if type(value) in _NOT_PLAIN else []
    for _ in range(_MAX_DEPTH):
        if not all(map(_has_sound_keys, level)):
            return False
        level = [item for container in level for item in _containers(container)]
        if not level:
            return True
    return False


def _has_sound_keys(container: Any) -> bool:
    if isinstance(container, dict):
        return _STRINGS.issuperset(map(type, container))
    return not isinstance(container, msgpack.Timestamp)  # which no ext_hook is asked about


def _containers(container: Any) -> Iterable[Any]:
    """What is in a container and is not plain."""
    items = container.values() if isinstance(container, dict) else container
    if _are_strings(items) or _NOT_PLAIN.isdisjoint(map(type, items)):
        return ()
    return [item for item in items if type(item) in _NOT_PLAIN]


def _are_strings(items: Iterable[Any]) -> bool:
    # Most of what a batch holds is one long list of strings, and this is three times as quick as their types.
    try:
        "".join(items)
    except TypeError:
        return False
    return True
