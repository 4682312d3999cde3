"""Wire 1: one JSON object per line, a newline at its end.

Rules:
1. A line either is one whole message or an `InvalidMessage`; the reader stays in step either way.
2. A line longer than the limit is a `RemoteProtocolError`: it is not kept, so the reader is out of step.
3. What follows the last newline is never a message: a peer that died while writing asked for nothing.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError, from_json

from ..errors import ErrorCode, InvalidMessage, LocalProtocolError, RemoteProtocolError
from ..messages import REPLIES, REQUESTS, STATUS_FREE, ErrorReply, Message, Reply, Request
from ..schema import item_models, newer_fields, reply_words, required_fields
from ..versions import LATEST, WireVersion

_M = TypeVar("_M", bound=Message)


class LineReader:
    """Cuts a stream of bytes into lines of at most `max_line_bytes`, newline not counted."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._buffer = bytearray()
        self._searched = 0  # bytes at the front that are known to hold no newline

    def feed(self, data: bytes) -> None:
        """Take bytes as they came off the stream."""
        self._buffer += data

    def next_line(self) -> bytes | None:
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
                f"a line is longer than {self._max_line_bytes} bytes, the limit of this side"
            )
        if end < 0:
            self._searched = length
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line


# -- encoding ------------------------------------------------------------------------------------------


def encode_request(request: Request, version: WireVersion = LATEST) -> bytes:
    """The line that carries `request` to a peer of `version`.

    Raises:
        LocalProtocolError: it sets a field that such a peer does not know and that may not be dropped.
    """
    for name, mark in newer_fields(type(request), version).items():
        if getattr(request, name) is not None and not mark.safe_to_drop:
            raise LocalProtocolError(
                f"{request.action}: {name} needs wire {mark.version} and this connection speaks wire "
                f"{version}; leave it out or upgrade the daemon"
            )
    return _line("action", request.action, request, version)


def encode_reply(reply: Reply, version: WireVersion = LATEST) -> bytes:
    """The line that carries `reply`; every field a 1.0 peer does not know may be dropped for it.

    Raises:
        LocalProtocolError: a StatusReply holds something that is not JSON.
    """
    return _line("status", reply.status, reply, version)


def _line(key: str, word: str, message: Message, version: WireVersion) -> bytes:
    exclude = None if version >= LATEST else _exclusions(type(message), version)
    try:
        body = message.__pydantic_serializer__.to_json(message, exclude_none=True, exclude=exclude)
    except PydanticSerializationError as error:
        raise LocalProtocolError(f"{word} cannot be written as JSON: {error}") from None
    head = f'{{"{key}":"{word}"'.encode()
    return head + (b"}\n" if body == b"{}" else b"," + body[1:] + b"\n")


@cache
def _exclusions(model: type[BaseModel], version: WireVersion) -> dict[str, Any]:
    own: dict[str, Any] = dict.fromkeys(newer_fields(model, version), True)
    nested = {name: _exclusions(item, version) for name, item in item_models(model).items()}
    return own | {name: {"__all__": inner} for name, inner in nested.items() if inner}


# -- decoding ------------------------------------------------------------------------------------------


def decode_request(line: bytes, version: WireVersion = LATEST) -> tuple[Request, int]:
    """The request that `line` holds, and how many unknown fields it had.

    Args:
        version: what this side is held to; fields of later versions count as unknown.

    Raises:
        InvalidMessage: with a sentence that names what is wrong.
    """
    fields = _json_object(line)
    action = fields.pop("action", None)
    if not isinstance(action, str):
        raise InvalidMessage("the request needs a field 'action' that holds a string")
    model = REQUESTS.get(action)
    if model is None:
        known = ", ".join(sorted(REQUESTS))
        raise InvalidMessage(f"unknown action {action[:64]!r}; known are {known}", ErrorCode.UNKNOWN_ACTION)
    request, unknown = _validated(model, action, fields, version)
    return request, unknown


def decode_reply(line: bytes, request: Request, version: WireVersion = LATEST) -> tuple[Reply, int]:
    """The reply to `request` that `line` holds, and how many unknown fields it had.

    A status that this side does not know becomes an ErrorReply that says so.

    Raises:
        InvalidMessage: the line is no reply, or none to this request.
    """
    fields = _json_object(line)
    status = fields.pop("status", None)
    model = _reply_model(type(request), status, fields)
    if model is not None and model is not ErrorReply:
        return _validated(model, f"the reply to {request.action}", fields, version)
    if not isinstance(status, str):
        raise InvalidMessage(f"the reply to {request.action} has no field 'status' that holds a string")
    # An error stays an error however little it says: the request it answers is known.
    if not isinstance(fields.get("error_message"), str):
        fields["error_message"] = f"the daemon answered {request.action} with {status[:64]!r} and no reason"
    return _validated(ErrorReply, f"the error reply to {request.action}", fields, version)


def _reply_model(request: type[Request], status: object, fields: dict[str, Any]) -> type[Reply] | None:
    model = reply_words(request).get(status) if isinstance(status, str) else None
    if model is not None or request not in STATUS_FREE or "error_message" in fields:
        return model
    sole = REPLIES[request][0]
    return sole if required_fields(sole) <= fields.keys() else None


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        decoded = from_json(line, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise InvalidMessage(f"the line is not JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise InvalidMessage(f"the line must hold a JSON object, not {type(decoded).__name__}")
    return decoded


def _validated(model: type[_M], what: str, fields: dict[str, Any], version: WireVersion) -> tuple[_M, int]:
    seen = fields if version >= LATEST else _as_seen_by(model, fields, version)
    try:
        message = model.model_validate(seen)
    except ValidationError as error:
        raise InvalidMessage(f"{what}: {_sentence(error)}") from None
    return message, _count_unknown(message, fields)


def _as_seen_by(model: type[BaseModel], fields: dict[str, Any], version: WireVersion) -> dict[str, Any]:
    """The same fields without those that came after `version`, in the items of lists too."""
    hidden = newer_fields(model, version)
    seen = {name: value for name, value in fields.items() if name not in hidden}
    for name, item_model in item_models(model).items():
        items = seen.get(name)
        if isinstance(items, list):
            seen[name] = [
                _as_seen_by(item_model, item, version) if isinstance(item, dict) else item for item in items
            ]
    return seen


def _count_unknown(message: Message, fields: Mapping[str, Any]) -> int:
    """How many of `fields`, those of the items of lists among them, `message` did not take."""
    if message.model_extra is not None:
        return 0
    unknown = len(fields) - len(message.model_fields_set)
    for name in item_models(type(message)):
        items = zip(fields[name], getattr(message, name), strict=True)
        unknown += sum(len(item) - len(taken.model_fields_set) for item, taken in items)
    return unknown


def _sentence(error: ValidationError) -> str:
    """The first thing that is wrong, as 'field: what', with the value cut short."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return f"the field {path!r} is missing"
    if first["type"] == "tuple_type":
        return f"{path}: must be a list (got {_short(first['input'])})"
    return f"{path}: {first['msg'].removeprefix('Value error, ')} (got {_short(first['input'])})"


def _short(value: object) -> str:
    return reprlib.repr(value)[:64]  # abbreviates before it builds: the value may be a whole line long
