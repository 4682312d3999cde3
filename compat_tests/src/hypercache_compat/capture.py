"""A capture: every byte that passed between clients and a daemon, as lines of JSON, and how it is read.

The first line is `{"hypercache_capture": 1, "to": "<the daemon's socket>"}`. Each other line is one piece,
in the order in which the relay saw them: `connection` (0, 1, …), `from` ("client" or "daemon"), `at_s`
(seconds since the capture began) and `data` (base64). Read are frozen transcripts, too.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgpack
import numpy as np

from hypercache_protocol.fields import MIB
from hypercache_protocol.layout import STATUS_CODES, TIER_CODES
from hypercache_protocol.negotiation import parsed

from .printable import printable

FORMAT = 1
_MAX_FRAME_BYTES = 64 * MIB
_SHOWN_LETTERS = 200
_SHOWN_ITEMS = 16
_INDENT = 19
_DEEPEST = _INDENT + 2 * 32
"""From here on a map is shown as one value."""
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What comes of JSON that is something else."""
_U64 = ("object_sizes", "generations", "chunk_offsets")
_U32 = ("chunk_counts", "chunk_paths", "chunk_lengths", "chunk_checksums", "checksum_counts", "checksums")
_BITS = ("present", "verifiable", "done", "stored", "checksummed")
_COLUMNS: dict[str, np.dtype[np.unsignedinteger[Any]]] = {
    **dict.fromkeys(_U64, np.dtype("<u8")),
    **dict.fromkeys(_U32, np.dtype("<u4")),
}
_WORDS: dict[str, dict[int, str]] = {
    "sync_statuses": {code: status.value for status, code in STATUS_CODES.items()},
    "path_tiers": {code: tier.value for tier, code in TIER_CODES.items()},
}


class NoCapture(Exception):
    """The file is no capture; the sentence says where it stops being one."""


@dataclass(frozen=True)
class Captured:
    """Bytes of one side of one connection; `at_s` None: nobody knows when."""

    connection: int
    is_from_client: bool
    at_s: float | None
    data: bytes


def head_line(to: str) -> str:
    """The first line of a capture."""
    return json.dumps({"hypercache_capture": FORMAT, "to": to}) + "\n"


def piece_line(piece: Captured) -> str:
    """The line of one piece."""
    fields = {
        "connection": piece.connection,
        "from": "client" if piece.is_from_client else "daemon",
        "at_s": piece.at_s if piece.at_s is None else round(piece.at_s, 6),
        "data": base64.b64encode(piece.data).decode(),
    }
    return json.dumps(fields) + "\n"


def read_capture(text: str) -> Iterator[Captured]:
    """The pieces of a capture or of a transcript.

    Raises:
        NoCapture: it is none. The last line of a capture may be cut short, as by a full disk.
    """
    head, _, rest = text.partition("\n")
    try:
        version = json.loads(head)["hypercache_capture"]
    except _UNREADABLE:
        yield from _transcript(text)
        return
    if version != FORMAT:
        raise NoCapture(f"the capture has the format {version}, and this program reads {FORMAT}")
    for number, line in enumerate(rest.split("\n")[:-1], 2):
        yield _piece(number, line)


def _transcript(text: str) -> Iterator[Captured]:
    try:
        for connection, side, said in json.loads(text)["turns"]:
            yield Captured(int(connection), {"client": True, "daemon": False}[side], None, said.encode())
    except _UNREADABLE as error:
        raise NoCapture(
            "the file is neither a capture of hypercache-compat record nor a transcript"
        ) from error


def _piece(number: int, line: str) -> Captured:
    try:
        fields = json.loads(line)
        is_from_client = {"client": True, "daemon": False}[fields["from"]]
        data = base64.b64decode(fields["data"], validate=True)
        at_s = None if fields["at_s"] is None else float(fields["at_s"])
        return Captured(int(fields["connection"]), is_from_client, at_s, data)
    except _UNREADABLE as error:
        raise NoCapture(f"line {number} is no piece of a capture: {error}") from error


# -- decoding ------------------------------------------------------------------------------------------


@dataclass
class _Talk:
    """One connection while it is read."""

    buffers: dict[bool, bytearray] = field(default_factory=lambda: {True: bytearray(), False: bytearray()})
    is_framed: bool = False
    is_lost: set[bool] = field(default_factory=set)


def decoded(pieces: Iterable[Captured], *, cut: bool = True) -> Iterator[str]:
    """The capture as lines for people: each message with its fields, `>` from a client, `<` from the daemon.
    Whatever was said in it, each line is one line and no command for a terminal.

    Args:
        cut: whether long values are cut.
    """
    return map(printable, _decoded(pieces, cut))


def _decoded(pieces: Iterable[Captured], cut: bool) -> Iterator[str]:
    talks: dict[int, _Talk] = {}
    for piece in pieces:
        talk = talks.setdefault(piece.connection, _Talk())
        when = f"{'':12}" if piece.at_s is None else f"{piece.at_s:10.6f} s"
        head = f"{when}  {piece.connection} {'>' if piece.is_from_client else '<'}"
        talk.buffers[piece.is_from_client] += piece.data
        yield from _messages(talk, piece.is_from_client, head, cut)
    for connection, talk in talks.items():
        for is_from_client, buffer in talk.buffers.items():
            if buffer:
                side = "client" if is_from_client else "daemon"
                yield f"connection {connection}: {len(buffer)} bytes of an unfinished message of the {side}"


def _messages(talk: _Talk, is_from_client: bool, head: str, cut: bool) -> Iterator[str]:
    buffer = talk.buffers[is_from_client]
    while True:
        if is_from_client in talk.is_lost:
            yield f"{head} {len(buffer)} bytes of no known wire"
            buffer.clear()
            return
        body = _frame(buffer) if talk.is_framed else _line(buffer)
        if body is None:
            return
        if isinstance(body, int):
            talk.is_lost.add(is_from_client)
            yield f"{head} a frame that claims {body} bytes"
            continue
        yield from _shown_frame(body, head, cut) if talk.is_framed else _shown_line(body, head, cut)
        if not talk.is_framed and not is_from_client:
            talk.is_framed = _begins_frames(body)


def _line(buffer: bytearray) -> bytes | None:
    end = buffer.find(b"\n")
    if end < 0:
        return None
    line = bytes(buffer[:end])
    del buffer[: end + 1]
    return line


def _frame(buffer: bytearray) -> bytes | int | None:
    """The next body; or the length that it claims, where that is more than any frame has."""
    if len(buffer) < 4:
        return None
    (length,) = struct.unpack_from(">I", buffer)
    if length > _MAX_FRAME_BYTES:
        return int(length)
    if len(buffer) < 4 + length:
        return None
    body = bytes(buffer[4 : 4 + length])
    del buffer[: 4 + length]
    return body


def _begins_frames(line: bytes) -> bool:
    try:
        fields = json.loads(line)
        version = parsed(fields["version"]) if fields["status"] == "HELLO" else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return version is not None and version.major >= 2


def _shown_line(line: bytes, head: str, cut: bool) -> Iterator[str]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        yield f"{head} no JSON object: {_letters(repr(line)[2:-1], cut)}"
        return
    kind = "action" if head.endswith(">") else "status"
    word = fields.pop(kind, None)
    yield f"{head} {f'(no {kind})' if word is None else _word(word, cut)}"
    yield from _shown_fields(fields, cut)


def _shown_frame(body: bytes, head: str, cut: bool) -> Iterator[str]:
    try:
        request_id, word, fields = msgpack.unpackb(body, raw=False, strict_map_key=False)
        items = dict(fields)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        yield f"{head} no frame of wire 2: {_letters(repr(body)[2:-1], cut)}"
        return
    yield f"{head} #{_word(request_id, cut)} {_word(word, cut)}"
    yield from _shown_fields(items, cut)


def _shown_fields(fields: dict[Any, Any], cut: bool, indent: int = _INDENT) -> Iterator[str]:
    for name, value in ((_letters(str(each), cut), value) for each, value in fields.items()):
        if isinstance(value, dict) and indent < _DEEPEST:
            yield f"{'':{indent}}{name}:"
            yield from _shown_fields(value, cut, indent + 2)
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield f"{'':{indent}}{name}: {len(value)}"
            shown = value[:_SHOWN_ITEMS] if cut else value
            yield from (f"{'':{indent + 2}}{_value(name, item, cut)}" for item in shown)
            yield from (f"{'':{indent + 2}}… and {len(value) - len(shown)} more",) * (shown != value)
        else:
            yield f"{'':{indent}}{name}: {_value(name, value, cut)}"


def _word(word: Any, cut: bool) -> str:
    """Should it be none, it is a value like any other."""
    return _letters(word, cut) if isinstance(word, str) else _value("", word, cut)


def _value(name: Any, value: Any, cut: bool) -> str:
    if isinstance(value, bytes):
        return _letters(_column(name, value), cut)
    if isinstance(value, msgpack.ExtType):  # to JSON it would be a list
        return _letters(repr(value), cut)
    try:
        return _letters(_nested(name, value), cut)
    except RecursionError:
        return "(nested too deep to be shown)"


def _nested(name: Any, value: Any) -> str:
    try:
        return json.dumps(value, default=partial(_column, name))
    except (TypeError, ValueError):  # a key that JSON does not have
        return repr(value)


def _column(name: Any, column: bytes) -> str:
    dtype = _COLUMNS.get(name)
    if name in _WORDS:
        return "[" + ", ".join(_WORDS[name].get(code, str(code)) for code in column) + "]"
    if name in _BITS:
        return "".join(f"{byte:08b}"[::-1] for byte in column) + " (bit 0 first)"
    if dtype is None or len(column) % dtype.itemsize:
        return f"{len(column)} bytes {column.hex()}"
    return str(np.frombuffer(column, dtype=dtype).tolist())


def _letters(text: str, cut: bool) -> str:
    if not cut or len(text) <= _SHOWN_LETTERS:
        return text
    return f"{text[:_SHOWN_LETTERS]}… ({len(text)} letters)"
