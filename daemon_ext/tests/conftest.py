"""Shared by the daemon's tests: async tests run under Trio, and folders short enough for a socket."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_trio.enable_trio_mode import *  # noqa: F403 - this is how pytest-trio is told

from hypercache_compat.daemon_process import started_by
from hypercache_compat.forked import fork_daemon

# Test files are imported one by one, so what they share needs a place on the path.
sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from forked_daemons import Forks, daemon_forks


@pytest.fixture(scope="session", autouse=True)
def forked_daemons() -> Iterator[None]:
    """Daemons start with everything imported."""
    with started_by(fork_daemon):
        yield


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A new folder whose path leaves room for a socket's name in the 107 bytes that one may have."""
    folder = Path(tempfile.mkdtemp(prefix="hc", dir="/dev/shm"))  # where a sync costs nothing
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Starts daemons in processes of their own."""
    with daemon_forks() as made:
        yield made


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are looked at when a test says so."""
    monkeypatch.setattr("hypercache_daemon.device_health._PROBE_EVERY_S", 3600.0)


@pytest.fixture
def probes(no_probes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are looked at all the time."""
    monkeypatch.setattr("hypercache_daemon.device_health._PROBE_EVERY_S", 0.01)
