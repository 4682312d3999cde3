"""The real hypercached in a process of its own, on folders of its own.

Every wait has a deadline; a daemon that ends early is reported with the end of its log. Processes are ended
by their id only.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .process_figures import peak_bytes
from .raw_wire import RawConnection

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 20.0
_TAIL_LINES = 30


class Process(Protocol):
    """What is needed of a started process; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...


Starter = Callable[[Sequence[str], Path], Process]
"""Starts a daemon with these arguments; what it prints goes to the end of a file."""


@dataclass(frozen=True)
class DaemonOptions:
    """What to start a daemon with. With `devices` empty it makes files in a pool folder.

    With `new_interpreter` it is the command that a user runs, whatever else starts daemons here.
    """

    devices: tuple[str, ...] = ()
    pool_size: str = "1GiB"
    pool_devices: int = 4
    ram_size: str = "128MiB"
    default_ram_folder: bool = False
    backend: str | None = None
    ingest_prefixes: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    new_interpreter: bool = False


class DaemonFailed(RuntimeError):
    """The daemon ended, or did not answer in time; the message holds the end of its log."""


class DaemonProcess:
    """One hypercached and the folders that outlive its restarts."""

    def __init__(self, folder: Path, ram_folder: Path, options: DaemonOptions | None = None) -> None:
        self.folder = folder
        self.ram_folder = ram_folder
        self.options = options or DaemonOptions()
        self.socket_path = str(folder / "s")
        self.pool_folder = folder / "pool"
        self.state_folder = folder / "state"
        self.log_path = folder / "daemon.log"
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        """The process id of the running daemon."""
        return self._running().pid

    def arguments(self) -> list[str]:
        """The command line, without the interpreter."""
        options = self.options
        words = ["--socket", self.socket_path, "--state-dir", str(self.state_folder)]
        words += ["--ram-size", options.ram_size]
        words += [] if options.default_ram_folder else ["--ram-dir", str(self.ram_folder)]
        if options.devices:
            words += [word for device in options.devices for word in ("--device", device)]
        else:
            words += ["--pool-dir", str(self.pool_folder), "--pool-size", options.pool_size]
            words += ["--devices", str(options.pool_devices)]
        if options.backend is not None:
            words += ["--backend", options.backend]
        words += [word for prefix in options.ingest_prefixes for word in ("--ingest-prefix", prefix)]
        return [*words, *options.extra]

    def start(self) -> None:
        """Start the daemon and wait until it answers a ping.

        Raises:
            DaemonFailed: it ended, or did not answer within START_DEADLINE_S.
        """
        starter = start_command if self.options.new_interpreter else _starter
        self._process = starter(self.arguments(), self.log_path)
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            if (status := self._process.poll()) is not None:
                raise DaemonFailed(f"hypercached ended with {status}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise DaemonFailed(f"hypercached did not answer in time:\n{self.log_tail()}")
            time.sleep(0.02)

    def stop(self) -> int:
        """Ask it to end (SIGTERM) and give its exit status."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """End it at once (SIGKILL), as a crash would."""
        return self._end(signal.SIGKILL)

    def restart(self, *, crash: bool = False) -> None:
        """Stop it, or crash it, and start it again on the same folders."""
        self.kill() if crash else self.stop()
        self.start()

    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def connect(self, timeout_s: float = 20.0) -> RawConnection:
        """A new raw connection."""
        return RawConnection(self.socket_path, timeout_s)

    def log_text(self) -> str:
        """All that it printed, over its restarts."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self) -> str:
        """The last lines of it."""
        return "\n".join(self.log_text().splitlines()[-_TAIL_LINES:])

    def peak_memory_bytes(self) -> int:
        """The most resident memory that the process has had so far."""
        return peak_bytes(self.pid)

    def _answers(self) -> bool:
        try:
            with self.connect(timeout_s=5.0) as connection:
                return bool(connection.ask("ping")["status"] == "PONG")
        except OSError:
            return False

    def _running(self) -> Process:
        if self._process is None:
            raise DaemonFailed("the daemon was not started")
        return self._process

    def _end(self, number: signal.Signals) -> int:
        process = self._running()
        if process.poll() is None:
            process.send_signal(number)
        try:
            return process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise DaemonFailed(
                f"hypercached did not end within {STOP_DEADLINE_S} s:\n{self.log_tail()}"
            ) from None


def daemon_command(*arguments: str) -> list[str]:
    """The command that runs the daemon of this environment."""
    return [sys.executable, "-m", "hypercache_daemon", *arguments]


def start_command(arguments: Sequence[str], log_path: Path) -> Process:
    """The daemon as a user starts it."""
    with log_path.open("ab") as log:
        return subprocess.Popen(daemon_command(*arguments), stdin=subprocess.DEVNULL, stdout=log, stderr=log)


_starter: Starter = start_command


@contextmanager
def started_by(starter: Starter) -> Iterator[None]:
    """All daemons are started by `starter` meanwhile."""
    global _starter
    before, _starter = _starter, starter
    try:
        yield
    finally:
        _starter = before


@dataclass(frozen=True)
class Refusal:
    """How a daemon ended by itself, and what it printed."""

    returncode: int
    stderr: str


def run_refused(*arguments: str) -> Refusal:
    """Run a daemon that is expected to refuse its configuration."""
    with tempfile.TemporaryDirectory(prefix="hc", dir="/tmp") as folder:
        log_path = Path(folder, "log")
        process = _starter(arguments, log_path)
        try:
            return Refusal(process.wait(START_DEADLINE_S), log_path.read_text())
        finally:
            process.kill()


@contextmanager
def daemon_folders() -> Iterator[tuple[Path, Path]]:
    """A short folder for socket, pool and log, and one of the same name in memory; both go afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hc", dir="/tmp"))
    ram_folder = Path("/dev/shm") / folder.name
    try:
        ram_folder.mkdir(mode=0o700)
        yield folder, ram_folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(ram_folder, ignore_errors=True)


@contextmanager
def running_daemon(options: DaemonOptions | None = None) -> Iterator[DaemonProcess]:
    """A daemon that answers; it is stopped and its folders are removed afterwards."""
    with daemon_folders() as (folder, ram_folder):
        daemon = DaemonProcess(folder, ram_folder, options)
        try:
            daemon.start()
            yield daemon
        finally:
            if daemon.is_running():
                daemon.stop()
