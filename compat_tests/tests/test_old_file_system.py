"""The released client's fsspec file system, against the real daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypercache_compat.daemon_process import DaemonProcess
from hypercache_compat.payloads import MIB, payload
from hypercache_compat.raw_wire import RawConnection, fetch
from hypercache_compat.scenario_process import ScenarioProcess

PIECE = 4 * MIB
STREAMED = [1, 1920, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 1920, 3 * PIECE, 5 * PIECE + 77]


@pytest.mark.parametrize("tier", [None, "ram"])
@pytest.mark.parametrize("size_bytes", STREAMED)
def test_a_file_written_in_pieces_comes_back(
    old: ScenarioProcess,
    daemon: DaemonProcess,
    raw: RawConnection,
    uri: str,
    size_bytes: int,
    tier: str | None,
) -> None:
    old.call(
        "file_system.write_in_pieces",
        socket_path=daemon.socket_path,
        uri=uri,
        size_bytes=size_bytes,
        write_bytes=MIB + 7,
        tier=tier,
    )
    assert fetch(raw, uri) == payload(uri, size_bytes)
    raw.ask("evict", uri=uri)


@pytest.mark.parametrize("scheme", ["s3://bucket/", "nfs://export/", "file:///nowhere/", "hypercache://"])
def test_a_uri_of_any_scheme_is_just_a_name(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str, scheme: str
) -> None:
    old.call(
        "file_system.write_in_pieces",
        socket_path=daemon.socket_path,
        uri=scheme + uri.removeprefix("hypercache://") + " ü%2F",
        size_bytes=5000,
        write_bytes=5000,
        is_leader=True,
        pinned=True,
        auto_flush_s3=False,
    )


def test_reading_from_any_place_gives_the_bytes_there(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str
) -> None:
    old.call(
        "file_system.seek_and_read", socket_path=daemon.socket_path, uri=uri, size_bytes=2 * PIECE + 1920
    )


@pytest.mark.parametrize("tier", [None, "ram"])
def test_patching_earlier_pieces_changes_just_those_bytes(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str, tier: str | None
) -> None:
    old.call(
        "file_system.patch_earlier_pieces",
        socket_path=daemon.socket_path,
        uri=uri,
        size_bytes=2 * PIECE + 700_000,
        tier=tier,
    )


def test_a_real_zip_file_is_written_and_passes_its_own_test(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str
) -> None:
    sizes = [1000, PIECE + 5, 0, 2 * MIB, 3 * MIB + 1]
    old.call("file_system.zip_file", socket_path=daemon.socket_path, uri=uri, member_sizes=sizes)


@pytest.mark.parametrize("tier", [None, "ram"])
def test_a_write_goes_on_over_a_new_connection(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str, tier: str | None
) -> None:
    old.call(
        "file_system.connection_closed_between_pieces",
        socket_path=daemon.socket_path,
        uri=uri,
        size_bytes=3 * PIECE + 1920,
        tier=tier,
    )


@pytest.mark.parametrize(("old_size", "new_size"), [(9 * MIB, 6 * MIB + 5), (3000, 9 * MIB), (5 * MIB, 1)])
def test_overwriting_a_file_shows_the_new_bytes_when_it_is_closed(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str, old_size: int, new_size: int
) -> None:
    old.call(
        "file_system.overwrite_committed",
        socket_path=daemon.socket_path,
        uri=uri,
        old_size=old_size,
        new_size=new_size,
    )


def test_a_file_closed_without_a_write_is_not_there(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str
) -> None:
    assert old.call("file_system.empty_file", socket_path=daemon.socket_path, uri=uri) is False


def test_fsspecs_own_calls_work_by_url(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str, tmp_path: Path
) -> None:
    seen = old.call(
        "file_system.general_calls", socket_path=daemon.socket_path, uri=uri, folder=str(tmp_path)
    )
    assert seen["info"]["size"] == 9 * MIB + 13
    assert seen["info"]["chunk_count"] == 3
    assert seen["missing"] is True


@pytest.mark.parametrize("size_bytes", [1000, 5 * MIB + 3])
def test_a_file_is_read_into_a_tensor(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str, size_bytes: int
) -> None:
    old.call("file_system.read_into_tensor", socket_path=daemon.socket_path, uri=uri, size_bytes=size_bytes)
