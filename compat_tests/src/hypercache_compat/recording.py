"""Writes down what passes through a relay, as a capture."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .capture import Captured, head_line, piece_line
from .relay import FROM_CLIENT


def check_sockets(listen: str, to: str) -> None:
    """Nothing where `listen` is free and can be listened on, and a daemon answers on `to`.

    Raises:
        OSError: with a sentence.
    """
    if os.path.lexists(listen):
        raise FileExistsError(f"{listen} is there already; remove it or listen elsewhere")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, private():
        try:
            probe.bind(listen)
        except OSError as error:
            raise OSError(f"{listen} cannot be listened on: {error.strerror or error}") from error
        Path(listen).unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(to)
        except OSError as error:
            raise OSError(f"no daemon answers on {to}: {error.strerror or error}") from error


@contextmanager
def private() -> Iterator[None]:
    """What is made inside is for this user alone."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


class Recorder:
    """Writes a capture; where that fails it ends the recording, and not silently."""

    def __init__(self, capture: IO[str], to: str, stopped: threading.Event) -> None:
        self.count = 0
        self.size_bytes = 0
        self.error: OSError | None = None
        self._capture = capture
        self._stopped = stopped
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        capture.write(head_line(to))
        capture.flush()

    def note(self, number: int, side: str, data: bytes) -> None:
        """Write one piece; a relay's passage calls it (`relay.Noting`)."""
        with self._lock:
            at_s = time.monotonic() - self._began_s
            try:
                self._capture.write(piece_line(Captured(number, side == FROM_CLIENT, at_s, data)))
                self._capture.flush()
            except OSError as error:
                self.error = error
                self._stopped.set()
                return
            self.count += 1
            self.size_bytes += len(data)
