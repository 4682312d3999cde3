"""A relay's passage that changes whole messages by a rule: a daemon with a fault of one's choice.

Like the grease it shares no code with the protocol package.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgpack

from .relay import FROM_CLIENT, FROM_DAEMON

Fields = dict[str, Any]
OnRequest = Callable[[Fields], Fields]
"""What the daemon gets for what the client sent; a request's word is under `action`."""

OnReply = Callable[[Fields, Fields], Fields]
"""What the client gets for a request and its reply, whose word is under `status`. It may raise HangUp."""

ID = "#id"
"""Under this name a frame's fields hold its id; lines have none."""

_HEADER = struct.Struct(">I")


InOrder = Callable[[list[bytes]], list[bytes]]
"""The frames of the daemon that came together, in the order in which the client gets them."""


def unchanged(fields: Fields) -> Fields:
    """The rule that changes no request."""
    return fields


def unchanged_reply(_: Fields, reply: Fields) -> Fields:
    """The rule that changes no reply."""
    return reply


def as_they_came(frames: list[bytes]) -> list[bytes]:
    """The rule that changes no order."""
    return frames


class Altered:
    """One connection's passage. What is no message passes as it is."""

    def __init__(
        self,
        on_request: OnRequest = unchanged,
        on_reply: OnReply = unchanged_reply,
        in_order: InOrder = as_they_came,
    ) -> None:
        self._on_request = on_request
        self._on_reply = on_reply
        self._in_order = in_order
        self._rest = {FROM_CLIENT: b"", FROM_DAEMON: b""}
        self._asked: list[Fields] = []
        self._framed = False
        self._lock = threading.Lock()

    def passed(self, side: str, data: bytes) -> bytes:
        """The whole messages in `data`, as the rules make them."""
        with self._lock:
            self._rest[side] += data
            reorders = self._framed and side == FROM_DAEMON  # the answer to a hello is no frame yet
            messages = []
            while message := self._next(side):
                messages.append(self._changed(side, message))
            if reorders:
                messages = self._in_order(messages)
            return b"".join(messages)

    def _next(self, side: str) -> bytes:
        """The next whole line or frame, newline and length among it; b"" until there is one."""
        held = self._rest[side]
        if not self._framed:
            end = held.find(b"\n") + 1
        elif len(held) < _HEADER.size:
            end = 0
        else:
            end = _HEADER.size + int(_HEADER.unpack_from(held)[0])
            end = len(held) if end > 1 << 26 else (end if len(held) >= end else 0)
        self._rest[side] = held[end:]
        return held[:end]

    def _changed(self, side: str, message: bytes) -> bytes:
        fields = self._fields(side, message)
        if side == FROM_CLIENT:
            self._asked.append(fields or {})
            return message if fields is None else self._written(message, fields, self._on_request(fields))
        if fields is None:
            return message
        reply = self._on_reply(self._request_of(fields), fields)
        out = self._written(message, fields, reply)
        # Until its hello is answered a client sends nothing, so both sides switch here.
        hello = fields.get("status") == "HELLO" and str(fields.get("version")).startswith("2.")
        if hello and not self._framed:
            self._framed = True
            self._asked.clear()
        return out

    def _request_of(self, reply: Fields) -> Fields:
        for index, request in enumerate(self._asked):
            if not self._framed or request.get(ID) == reply[ID]:
                return self._asked.pop(index)
        return {}

    def _fields(self, side: str, message: bytes) -> Fields | None:
        """A copy that a rule may change."""
        try:
            if not self._framed:
                fields = json.loads(message)
                return fields if isinstance(fields, dict) else None
            number, word, fields = msgpack.unpackb(message[_HEADER.size :])
            return {ID: number, "action" if side == FROM_CLIENT else "status": word, **fields}
        except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
            return None

    def _written(self, message: bytes, before: Fields, after: Fields) -> bytes:
        if after is before:
            return message
        if not self._framed:
            return json.dumps(after).encode() + b"\n"
        rest = dict(after)
        number, word = rest.pop(ID), rest.pop("action", None) or rest.pop("status", None)
        body: bytes = msgpack.packb([number, word, rest])
        return _HEADER.pack(len(body)) + body
