"""Faults over frames that no honest client sends."""

from __future__ import annotations

import struct

import msgpack

from ..altered_replies import Altered
from ..relay import FROM_CLIENT
from .rules import Fault, each_with

_BODY: bytes = msgpack.packb([1, "ping", {}])
_PING = struct.pack(">I", len(_BODY)) + _BODY
_CLAIMS_4_GIB = b"\xff\xff\xff\xff"


class _AnswersAnything(Altered):
    """Takes what is no message for a ping."""

    def passed(self, side: str, data: bytes) -> bytes:
        if side == FROM_CLIENT and self._framed and data.startswith(_CLAIMS_4_GIB):
            return _PING
        return super().passed(side, data)

    def _changed(self, side: str, message: bytes) -> bytes:
        is_none = side == FROM_CLIENT and self._framed and self._fields(side, message) is None
        return super()._changed(side, _PING if is_none else message)


FAULTS: dict[str, Fault] = {
    "a frame that claims 4 GiB is answered": each_with("hostile.length", "PONG to id 1", _AnswersAnything),
    "a frame that is none is answered": each_with("hostile.bodies", "PONG to id 1", _AnswersAnything),
}
