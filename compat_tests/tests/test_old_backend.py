"""What the released client sees of the backend: write-back, write-through, ingest, auto-ingest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, running_daemon
from hypercache_compat.payloads import MIB, payload
from hypercache_compat.scenario_process import ScenarioProcess

WAYS = ["ingest", "ingest to ram", "preload", "open", "locate"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A backend's folder, and two of other people's: one to ingest from, one that is off limits."""
    return {name: tmp_path_factory.mktemp(name) for name in ("backend", "origin", "private")}


@pytest.fixture(scope="module")
def backed_daemon(places: dict[str, Path]) -> Iterator[DaemonProcess]:
    options = DaemonOptions(
        backend=f"file://{places['backend']}", ingest_prefixes=(f"file://{places['origin']}/",)
    )
    with running_daemon(options) as process:
        yield process


def _backend_holds(places: dict[str, Path], data: bytes) -> bool:
    return any(file.read_bytes() == data for file in places["backend"].rglob("*") if file.is_file())


@pytest.mark.parametrize("size_bytes", [1, 1920, 9 * MIB + 13])
def test_a_write_reaches_the_backend_and_comes_back_from_it(
    old: ScenarioProcess, backed_daemon: DaemonProcess, places: dict[str, Path], uri: str, size_bytes: int
) -> None:
    seen = old.call(
        "write_back.write_back", socket_path=backed_daemon.socket_path, uri=uri, size_bytes=size_bytes
    )
    assert seen[-1] == "SYNCED_BACKEND"
    assert set(seen) <= {"COMMITTED", "SYNCING_BACKEND", "SYNCED_BACKEND"}
    assert _backend_holds(places, payload(uri, size_bytes))


def test_a_write_through_is_in_the_backend_when_close_returns(
    old: ScenarioProcess, backed_daemon: DaemonProcess, places: dict[str, Path], uri: str
) -> None:
    status = old.call(
        "write_back.write_through", socket_path=backed_daemon.socket_path, uri=uri, size_bytes=6 * MIB
    )
    assert status == "SYNCED_BACKEND"
    assert _backend_holds(places, payload(uri, 6 * MIB))


def test_what_was_written_with_auto_flush_off_never_reaches_the_backend(
    old: ScenarioProcess, backed_daemon: DaemonProcess, places: dict[str, Path], uri: str
) -> None:
    path = backed_daemon.socket_path
    old.call("write_back.keep_here", socket_path=path, uri=uri, size_bytes=5000)
    # Objects are flushed in the order of their commits: when this later one is there, the first had its turn.
    old.call("write_back.write_back", socket_path=path, uri=uri + ".later", size_bytes=5000)
    assert not _backend_holds(places, payload(uri, 5000))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("size_bytes", [1, 9 * MIB + 13])
def test_an_object_outside_is_fetched_in_each_way_that_the_client_has(
    old: ScenarioProcess, backed_daemon: DaemonProcess, places: dict[str, Path], size_bytes: int, how: str
) -> None:
    name = f"{how}-{size_bytes}-{old.label}".replace(" ", "-")
    origin = places["origin"] / name
    origin.write_bytes(payload(name, size_bytes))
    old.call(
        "write_back.ingest",
        socket_path=backed_daemon.socket_path,
        uri=f"file://{origin}",
        origin=name,
        size_bytes=size_bytes,
        how=how,
    )


def test_a_place_outside_the_allowed_ones_is_refused(
    old: ScenarioProcess, backed_daemon: DaemonProcess, places: dict[str, Path]
) -> None:
    secret = places["private"] / "secret"
    secret.write_bytes(b"not for the cache")
    around = f"file://{places['origin']}/../private/secret"
    for uri in (f"file://{secret}", around):
        status, sentence = old.call(
            "write_back.ingest_refused", socket_path=backed_daemon.socket_path, uri=uri
        )
        assert status == "ERROR"
        assert uri in sentence
