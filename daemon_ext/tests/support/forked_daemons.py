"""Daemons in processes of their own that may be killed at any step, and plain blocking clients of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daemon_harness import MIB
from killed_daemon import KillAt, run

from hypercache_compat.forked import ForkedProcess, fork

DEADLINE_S = 30.0
Message = dict[str, Any]


class Gone(Exception):
    """The daemon ended before it answered."""


class BlockingClient:
    """One connection; every read has a deadline."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(DEADLINE_S)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise Gone from error
        self._reader = self._socket.makefile("rb")

    def ask(self, action: str, **fields: object) -> Message:
        """The reply. Raises Gone."""
        try:
            self._socket.sendall(json.dumps({"action": action, **fields}).encode() + b"\n")
            line = self._reader.readline()
        except ConnectionError as error:
            raise Gone from error
        if not line.endswith(b"\n"):
            raise Gone
        reply: Message = json.loads(line)
        return reply

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Forks:
    """Starts daemons, one at a time."""

    def __init__(self) -> None:
        self._last: ForkedDaemon | None = None

    def start(
        self,
        folder: Path,
        arguments: Sequence[str],
        kill: KillAt | None = None,
        descriptors: tuple[int, int] | None = None,
    ) -> ForkedDaemon:
        """A daemon with its socket at `folder`/s; it may not answer yet. One before it is ended.

        Args:
            kill: where it ends itself.
            descriptors: the soft and the hard limit of open files that it is born with.
        """
        self.close()
        words = ["--socket", str(folder / "s"), *arguments]
        self._last = ForkedDaemon(folder, fork(folder / "log", run, words, kill, descriptors))
        return self._last

    def close(self) -> None:
        """End the last daemon, if a test left it alive."""
        if self._last is not None:
            self._last.kill()


class ForkedDaemon:
    """A daemon that was started."""

    def __init__(self, folder: Path, process: ForkedProcess) -> None:
        self.folder = folder
        self.pid = process.pid
        self._process = process

    def wait(self) -> int:
        """Its exit status, or minus the signal that ended it."""
        return self._process.wait(DEADLINE_S)

    def kill(self) -> int:
        self._process.kill()
        return self.wait()

    def stop(self) -> int:
        os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def connect(self) -> BlockingClient:
        """A connection to it as soon as it answers. Raises Gone where it ends before."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            try:
                client = BlockingClient(self.folder / "s")
            except Gone:
                if self.ended():
                    raise
                time.sleep(0.002)
                continue
            try:
                client.ask("ping")
            except Gone:
                client.close()
                raise
            return client
        raise AssertionError(f"no answer in {DEADLINE_S} s:\n{self.log()}")

    def log(self) -> str:
        return (self.folder / "log").read_text()


def small_pool(folder: Path, *more: str) -> list[str]:
    """The arguments of a daemon with two devices and a RAM tier in `folder`, and `more`."""
    return [
        *("--pool-dir", str(folder / "pool"), "--pool-size", str(34 * MIB), "--devices", "2"),
        *("--ram-dir", str(folder / "ram"), "--ram-size", str(16 * MIB)),
        *more,
    ]


def checked_status(client: BlockingClient) -> Message:
    """What get_status says; every pool's sum is checked on the way."""
    status = client.ask("get_status")
    for pool in status["pools"].values():
        parts = ("free_bytes", "used_bytes", "staged_bytes", "quarantined_bytes")
        assert sum(pool[part] for part in parts) == pool["total_bytes"], pool
    return status


@contextmanager
def daemon_forks() -> Iterator[Forks]:
    """Something that starts daemons."""
    forks = Forks()
    try:
        yield forks
    finally:
        forks.close()
