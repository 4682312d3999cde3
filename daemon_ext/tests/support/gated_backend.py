"""The real backend on a real folder, which waits or fails at a test's word."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from hypercache_daemon.backend import Backend, BackendError, Target

DEADLINE_S = 30.0


class GatedBackend(Backend):
    """Uploads and downloads pass while `gate` is set; they are noted in the order in which they began.

    `failures` is how many of the next uploads and downloads fail, after the gate. Objects go in and out in
    pieces of `piece_bytes`, and `between` may hold them up after the piece of number `hold_at`.
    """

    def __init__(self, folder: Path, prefixes: Iterable[str] = (), piece_bytes: int = 4 << 20) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(f"file://{folder}", tuple(prefixes))
        self.folder = folder
        self.gate = threading.Event()
        self.gate.set()
        self.between = threading.Event()
        self.between.set()
        self.hold_at = 0
        self.failures = 0
        self.piece_bytes = piece_bytes
        self.uploads: list[tuple[float, str]] = []
        self.downloads: list[str] = []
        self.under_way = 0
        self.most_under_way = 0
        self._lock = threading.Lock()

    def upload(
        self, target: Target, pieces: Iterable[bytes], size_bytes: int, sha256: str | None = None
    ) -> None:
        with self._lock:
            self.uploads.append((time.monotonic(), target.path))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            self._pass("upload", target)
            super().upload(target, self._paced(pieces), size_bytes, sha256)
        finally:
            with self._lock:
                self.under_way -= 1

    def download(self, target: Target) -> tuple[int, Iterator[bytes]]:
        self.downloads.append(target.path)
        self._pass("download", target)
        size_bytes, pieces = super().download(target)
        return size_bytes, self._paced(pieces)

    def uploaded(self) -> list[str]:
        """The paths of all uploads that began."""
        return [path for _, path in self.uploads]

    def close(self) -> None:
        """Let go of every thread that waits."""
        self.gate.set()
        self.between.set()

    def _pass(self, doing: str, target: Target) -> None:
        if not self.gate.wait(DEADLINE_S):
            raise AssertionError("the test never opened the gate")
        with self._lock:
            fails, self.failures = self.failures > 0, max(0, self.failures - 1)
        if fails:
            raise BackendError(f"cannot {doing} {target.url}: it was told to fail")

    def _paced(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        cut = (
            piece[start : start + self.piece_bytes]
            for piece in pieces
            for start in range(0, len(piece), self.piece_bytes)
        )
        for number, piece in enumerate(cut):
            yield piece
            if number == self.hold_at and not self.between.wait(DEADLINE_S):
                raise AssertionError("the test never let the next piece pass")
