"""Daemons and clients that the proofs share.

What changes a whole daemon (restart, purge, a small pool) starts its own with `running_daemon`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hypercache_compat.daemon_process import DaemonProcess, running_daemon, started_by
from hypercache_compat.forked import fork_daemon
from hypercache_compat.lmcache_versions import lmcache_process
from hypercache_compat.old_clients import old_client
from hypercache_compat.raw_wire import RawConnection
from hypercache_compat.releases import LMCACHE_VERSIONS, OLD_CLIENT_VERSIONS
from hypercache_compat.scenario_process import ScenarioProcess

sys.path.insert(0, str(Path(__file__).parents[2] / "connector"))  # where the safety suite is


@pytest.fixture(scope="session", autouse=True)
def forked_daemons() -> Iterator[None]:
    """Daemons start with everything imported."""
    with started_by(fork_daemon):
        yield


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """One daemon for a file's tests; each uses uris of its own."""
    with running_daemon() as process:
        yield process


@pytest.fixture(scope="session")
def old_clients() -> Iterator[dict[str, ScenarioProcess]]:
    """A process for each released client, by version."""
    with ExitStack() as stack:
        clients = {version: old_client(version) for version in OLD_CLIENT_VERSIONS}
        for client in clients.values():
            stack.callback(client.kill)
        yield clients


class _LMCaches(dict[str, ScenarioProcess]):
    """Each release's process begins when it is first asked for: importing LMCache takes long."""

    def __missing__(self, version: str) -> ScenarioProcess:
        self[version] = lmcache_process(version)
        return self[version]


@pytest.fixture(scope="session")
def lmcaches() -> Iterator[dict[str, ScenarioProcess]]:
    """A process for each release of LMCache, by version."""
    processes = _LMCaches()
    yield processes
    for process in processes.values():
        process.kill()  # the end of an interpreter takes seconds


@pytest.fixture(params=LMCACHE_VERSIONS)
def lmcache(request: pytest.FixtureRequest, lmcaches: dict[str, ScenarioProcess]) -> ScenarioProcess:
    """Each release of LMCache in turn."""
    return lmcaches[request.param]


@pytest.fixture(params=OLD_CLIENT_VERSIONS)
def old(request: pytest.FixtureRequest, old_clients: dict[str, ScenarioProcess]) -> ScenarioProcess:
    """Each released client in turn."""
    return old_clients[request.param]


@pytest.fixture
def uri(request: pytest.FixtureRequest) -> str:
    """A uri that no other test uses."""
    return f"hypercache://test/{request.node.name}"


@pytest.fixture
def raw(daemon: DaemonProcess) -> Iterator[RawConnection]:
    """A connection by hand."""
    with daemon.connect() as connection:
        yield connection
