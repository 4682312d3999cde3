"""Grease: unknown fields and features in every message, both ways, on both wires, so that tolerance of what
is yet to come cannot rot.

It shares no code with the protocol package: what it lets through must be understood by others' rules.
"""

from __future__ import annotations

import json
import struct
import threading
from typing import Any

import msgpack

from .relay import FROM_CLIENT, FROM_DAEMON

FIELD = "x_grease"
FIELDS: dict[str, Any] = {FIELD: {"a": [1, None, "é"], "b": {}}, "x_grease_too": "ERROR"}
FEATURE = "x_grease"
VERSION = "2.99"
_HEADER = struct.Struct(">I")


class Greased:
    """A relay's passage that adds to each whole message; a part of one waits for the rest."""

    def __init__(self, _number: int = 0) -> None:
        self.greased = {FROM_CLIENT: 0, FROM_DAEMON: 0}
        """Messages that were added to, by side."""
        self._rest = {FROM_CLIENT: b"", FROM_DAEMON: b""}
        self.framed = False
        """Whether both sides have gone on to frames."""
        self._lock = threading.Lock()

    def passed(self, side: str, data: bytes) -> bytes:
        """The whole messages in `data`, each with more in it than before."""
        with self._lock:
            self._rest[side] += data
            out = b""
            while message := (self._frame(side) if self.framed else self._line(side)):
                self.greased[side] += 1
                out += message
            return out

    def _line(self, side: str) -> bytes:
        line, newline, rest = self._rest[side].partition(b"\n")
        if not newline:
            return b""
        self._rest[side] = rest
        message = json.loads(line)
        greasy = json.dumps(greased(message)).encode() + b"\n"
        # Until its hello is answered a client sends nothing, so both sides switch here.
        self.framed = message.get("status") == "HELLO" and message["version"].startswith("2.")
        return greasy

    def _frame(self, side: str) -> bytes:
        held = self._rest[side]
        end = _HEADER.size + (_HEADER.unpack_from(held)[0] if len(held) >= _HEADER.size else 0)
        if len(held) < max(end, _HEADER.size):
            return b""
        self._rest[side] = held[end:]
        number, word, fields = msgpack.unpackb(held[_HEADER.size : end])
        body = msgpack.packb([number, word, greased(fields)])
        return _HEADER.pack(len(body)) + bytes(body)


def greased(value: Any) -> Any:
    """The same message with more fields, in its maps and in those of its lists, and more words in the lists
    of versions and features."""
    if isinstance(value, list):
        return [greased(item) for item in value]
    if not isinstance(value, dict):
        return value
    more = {name: greased(inner) for name, inner in value.items()}
    for name, word in (("features", FEATURE), ("versions", VERSION)):
        if isinstance(value.get(name), list):
            more[name] = [*value[name], word]
    return {**more, **FIELDS}
