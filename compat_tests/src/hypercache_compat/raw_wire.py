"""Wire 1 by hand: a witness that shares no line with the protocol package it testifies about.

It also reads and writes the bytes that a layout names, so that what one client wrote can be checked
without any client.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Message = dict[str, Any]


class RawConnection:
    """One connection to the daemon; every read has a deadline."""

    def __init__(self, socket_path: str, timeout_s: float = 20.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        self._buffer = bytearray()
        try:
            self._socket.connect(socket_path)
        except OSError:
            self._socket.close()
            raise

    def send(self, data: bytes) -> None:
        """Write `data` as it is."""
        self._socket.sendall(data)

    def end(self) -> None:
        """Say that nothing more will be sent; replies can still be read."""
        self._socket.shutdown(socket.SHUT_WR)

    def receive_line(self) -> bytes:
        """The next line without its newline; b"" where the daemon closed the connection."""
        while b"\n" not in self._buffer:
            try:
                data = self._socket.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                return b""
            self._buffer += data
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line

    def receive(self) -> Message:
        """The next reply.

        Raises:
            ConnectionError: the daemon closed instead.
        """
        line = self.receive_line()
        if not line:
            raise ConnectionError("the daemon closed the connection instead of answering")
        reply: Message = json.loads(line)
        return reply

    def ask(self, action: str, **fields: object) -> Message:
        """Send one request and give its reply."""
        self.send(json.dumps({"action": action, **fields}).encode() + b"\n")
        return self.receive()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_layout(chunks: Sequence[Message]) -> bytes:
    """The bytes that lie where `chunk_layout` says, in order."""
    parts = []
    for chunk in chunks:
        with Path(chunk["device"]).open("rb") as device:
            device.seek(chunk["offset"])
            parts.append(device.read(chunk["length"]))
    return b"".join(parts)


def write_layout(chunks: Sequence[Message], data: bytes) -> None:
    """Put `data` where `chunk_layout` says, as an old client does it on either tier."""
    position = 0
    for chunk in chunks:
        mode = "wb" if chunk.get("tier", "nvme") == "ram" else "r+b"
        with Path(chunk["device"]).open(mode) as device:
            device.seek(chunk["offset"])
            device.write(data[position : position + chunk["length"]])
        position += chunk["length"]
    assert position == len(data), f"{len(data)} bytes for chunks of {position}"


def store(connection: RawConnection, uri: str, data: bytes, **stage_fields: object) -> Message:
    """Stage, write and commit one object; gives the commit's reply."""
    staged = connection.ask("stage_write", uri=uri, size_bytes=len(data), **stage_fields)
    if staged["status"] != "WRITESTAGED":
        return staged
    write_layout(staged["chunk_layout"], data)
    return connection.ask("commit_write", uri=uri)


def fetch(connection: RawConnection, uri: str) -> bytes | None:
    """The object's bytes, read where locate says they lie; None on a miss."""
    found = connection.ask("locate", uri=uri, auto_ingest=False)
    return read_layout(found["chunk_layout"]) if found["status"] == "HIT" else None
