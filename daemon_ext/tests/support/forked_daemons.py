"""Daemons in processes of their own that may be killed at any step, and plain blocking clients of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class KillAt:
    """The step at which a daemon is killed; see killed_daemon.py."""

    after: int
    thread: str = "worker"
    event: str = "c_call"
    calls: Sequence[str] = ("execute",)
    caller: str | None = None


class Forks:
    """Forks daemons, one at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._last: ForkedDaemon | None = None

    def start(self, folder: Path, arguments: Sequence[str], kill: KillAt | None = None) -> ForkedDaemon:
        """A daemon with its socket at `folder`/s; it may not answer yet. One before it is ended."""
        if self._last is not None:
            self._last.kill()
        order: dict[str, object] = {
            "arguments": ["--socket", str(folder / "s"), *arguments],
            "log": str(folder / "log"),
        }
        if kill is not None:
            order |= vars(kill)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self._last = ForkedDaemon(folder, int(self.read_line()), self)
        return self._last

    def close(self) -> None:
        """End the last daemon, if a test left it alive, and then the program."""
        if self._last is not None:
            self._last.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)

    @property
    def pid(self) -> int:
        """The process that the daemons are children of."""
        return self._process.pid

    def read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class ForkedDaemon:
    """A daemon that was started and not yet waited for."""

    def __init__(self, folder: Path, pid: int, forks: Forks) -> None:
        self.folder = folder
        self.pid = pid
        self._forks = forks
        self._status: int | None = None

    def wait(self) -> int:
        """Its exit status, or minus the signal that ended it."""
        if self._status is None:
            self._status = int(self._forks.read_line())
        return self._status

    def kill(self) -> int:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def ended(self) -> bool:
        """True once it is a zombie or gone."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX"

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


@contextmanager
def daemon_forks() -> Iterator[Forks]:
    """Something that forks daemons."""
    program = Path(__file__).with_name("killed_daemon.py")
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        forks = Forks(process)
        try:
            yield forks
        finally:
            forks.close()
