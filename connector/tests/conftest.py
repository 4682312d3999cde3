"""Shared by the connector's tests: a scripted daemon, drivers of connectors, and folders short enough for a
socket."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hypercache_compat.daemon_process import started_by
from hypercache_compat.forked import fork_daemon
from hypercache_connector import Client, HyperCacheConnector, adapter, storing, transfers
from hypercache_protocol.versions import LATEST

# Test files are imported one by one, so what they share needs a place on the path, and so have the suites
# beside the tests, which are packages.
sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from asking import MakeClient
from deadline_clock import DeadlineClock
from frame_relay import FrameRelay
from lmcache_driver import Driver
from scripted_daemon import ScriptedDaemon

Connect = Callable[..., Driver]


@pytest.fixture(scope="session", autouse=True)
def forked_daemons() -> Iterator[None]:
    """Daemons start with everything imported."""
    with started_by(fork_daemon):
        yield


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="hc", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def scripted(folder: Path) -> Iterator[ScriptedDaemon]:
    """A scripted daemon that behaves well until told otherwise."""
    daemon = ScriptedDaemon(folder)
    yield daemon
    daemon.thaw()
    daemon.stop()


@pytest.fixture
def scripted2(folder: Path) -> Iterator[ScriptedDaemon]:
    """A scripted daemon of wire 2 that behaves well until told otherwise."""
    daemon = ScriptedDaemon(folder, wire=LATEST)
    yield daemon
    daemon.thaw()
    daemon.stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> DeadlineClock:
    """The time by which loads and stores are late."""
    made = DeadlineClock(monkeypatch)
    for module in (adapter, storing, transfers):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def relay_to(folder: Path) -> Iterator[Callable[[str], FrameRelay]]:
    """Puts relays before daemons; they end with the test."""
    with ExitStack() as stack:
        yield lambda target: stack.enter_context(FrameRelay(str(folder / "relay"), target))


@pytest.fixture
def client_to() -> Iterator[MakeClient]:
    """Makes clients that are closed at the end."""
    with ExitStack() as stack:

        def make(socket_path: str, timeout_s: float = 10.0, **options: Any) -> Client:
            return stack.enter_context(Client(socket_path, timeout_s, **options))

        yield make


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes drivers of connectors that are closed at the end."""
    with ExitStack() as stack:

        def make(socket_path: str, **parameters: Any) -> Driver:
            connector = HyperCacheConnector(
                **{"socket_path": socket_path, "namespace": "test", "timeout_s": 10.0} | parameters
            )
            stack.callback(connector.close)
            return Driver(connector)

        yield make


@pytest.fixture
def driver(scripted: ScriptedDaemon, connect: Connect) -> Driver:
    """A driver of a connector to the scripted daemon."""
    return connect(scripted.socket_path)


@pytest.fixture
def open_descriptors() -> Callable[[], int]:
    """Counts this process's open descriptors."""
    return lambda: sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def only_so_many_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[threading.Thread]]:
    """Lets so many more threads begin, which come in the list, and fails every one after them."""

    def limit(most: int) -> list[threading.Thread]:
        start, started = threading.Thread.start, list[threading.Thread]()

        def scarce(thread: threading.Thread) -> None:
            if len(started) == most:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", scarce)
        return started

    return limit
