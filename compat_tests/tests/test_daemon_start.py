"""What the daemon refuses to start on, and what it leaves alone: exit status 2 and one sentence."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypercache_compat.daemon_process import (
    DaemonOptions,
    DaemonProcess,
    daemon_folders,
    run_refused,
    running_daemon,
)
from hypercache_compat.payloads import MIB
from hypercache_compat.raw_wire import fetch, store


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path."""
    with daemon_folders() as (made, _):
        yield made


def _pool(folder: Path, name: str = "pool") -> list[str]:
    return ["--pool-dir", str(folder / name), "--pool-size", "128MiB", "--devices", "2", "--ram-size", "0"]


def _device_file(folder: Path, name: str, size_bytes: int) -> str:
    path = folder / name
    with path.open("wb") as file:
        file.truncate(size_bytes)
    return str(path)


def _sentence(*arguments: str) -> str:
    """What a daemon with these arguments says before it ends with status 2."""
    done = run_refused(*arguments)
    assert done.returncode == 2, f"status {done.returncode}: {done.stderr}"
    said = [line for line in done.stderr.splitlines() if line.startswith("hypercached: ")]
    assert len(said) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return said[0]


def test_a_socket_where_a_daemon_answers_is_refused_and_that_daemon_goes_on(folder: Path) -> None:
    with running_daemon() as daemon:
        with daemon.connect() as connection:
            store(connection, "a", b"bytes")
            assert daemon.socket_path in _sentence("--socket", daemon.socket_path, *_pool(folder))
            assert fetch(connection, "a") == b"bytes"
        with daemon.connect() as connection:
            assert connection.ask("ping")["status"] == "PONG"


def test_a_stale_socket_is_replaced(folder: Path) -> None:
    with running_daemon() as daemon:
        daemon.kill()
        assert stat.S_ISSOCK(Path(daemon.socket_path).lstat().st_mode)
        daemon.start()


def test_a_socket_that_was_bound_by_somebody_who_left_is_replaced() -> None:
    with daemon_folders() as (folder, ram_folder):
        daemon = DaemonProcess(folder, ram_folder)
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(daemon.socket_path)
        daemon.start()
        assert daemon.stop() == 0


@pytest.mark.parametrize("kind", ["file", "folder", "link to a file", "pipe", "dangling link"])
def test_a_path_that_is_not_a_socket_is_refused_and_never_removed(folder: Path, kind: str) -> None:
    path = folder / "s"
    target = folder / "target"
    target.write_text("precious")
    match kind:
        case "file":
            path.write_text("precious")
        case "folder":
            path.mkdir()
        case "link to a file":
            path.symlink_to(target)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.symlink_to(folder / "nothing")
    before = path.lstat()
    assert str(path) in _sentence("--socket", str(path), *_pool(folder))
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert target.read_text() == "precious"
    if kind == "file":
        assert path.read_text() == "precious"


def test_a_socket_path_that_no_client_could_connect_to_is_refused(folder: Path) -> None:
    path = str(folder / ("s" * 100))
    assert path in _sentence("--socket", path, *_pool(folder))


def _with_device(folder: Path, device: str) -> list[str]:
    words = ["--socket", str(folder / "s"), "--state-dir", str(folder / "state"), "--ram-size", "0"]
    return [*words, "--device", device]


def test_a_missing_device_is_refused_by_name(folder: Path) -> None:
    missing = str(folder / "no-such-device")
    assert missing in _sentence(*_with_device(folder, missing))


def test_a_device_that_is_too_small_is_refused_by_name(folder: Path) -> None:
    tiny = _device_file(folder, "tiny", MIB)
    said = _sentence(*_with_device(folder, tiny))
    assert tiny in said
    assert "too small" in said


def test_a_device_with_something_else_on_it_is_refused_by_name_and_untouched(folder: Path) -> None:
    device = _device_file(folder, "photos", 64 * MIB)
    with Path(device).open("r+b") as file:
        file.write(b"holiday photos" * 1000)
    before = Path(device).read_bytes()
    assert device in _sentence(*_with_device(folder, device))
    assert Path(device).read_bytes() == before


def test_a_device_of_a_running_daemon_is_refused_by_name(folder: Path) -> None:
    device = _device_file(folder, "shared", 64 * MIB)
    with running_daemon(DaemonOptions(devices=(device,))) as daemon:
        assert device in _sentence(*_with_device(folder, device))
        with daemon.connect() as connection:
            assert connection.ask("ping")["status"] == "PONG"


def test_a_pool_folder_of_a_running_daemon_is_refused_by_name(folder: Path) -> None:
    with running_daemon() as daemon:
        pool = ["--pool-dir", str(daemon.pool_folder), "--pool-size", "1GiB", "--ram-size", "0"]
        assert str(daemon.pool_folder) in _sentence("--socket", str(folder / "s"), *pool)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--pool-size", "lots"], "pool-size"),
        (["--devices", "0"], "devices"),
        (["--ram-size", "-5"], "ram-size"),
        (["--backend", "nosuchscheme://bucket"], "nosuchscheme"),
        (["--device", "/dev/null"], "--device"),
        (["--group", "no-such-group-here"], "no-such-group-here"),
        (["--log-level", "shout"], "log-level"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_refused_by_name(folder: Path, arguments: list[str], named: str) -> None:
    pool = [] if "--pool-size" in arguments else _pool(folder)
    given = ["--socket", str(folder / "s"), "--pool-dir", str(folder / "pool"), *pool, *arguments]
    assert named in _sentence(*given)


def test_socket_pool_and_memory_files_are_for_the_owner_alone() -> None:
    with running_daemon() as daemon:
        with daemon.connect() as connection:
            store(connection, "a", b"x" * 5000)
            store(connection, "b", b"x" * 5000, tier="ram")
        folders = (daemon.pool_folder, daemon.state_folder, daemon.ram_folder)
        made = [Path(daemon.socket_path), *(path for top in folders for path in top.rglob("*"))]
        assert len(made) > 5
        open_to_others = [str(path) for path in made if path.lstat().st_mode & 0o007]
    assert open_to_others == []


def test_the_default_memory_folder_is_one_of_its_own_and_holds_the_ram_tier() -> None:
    with running_daemon(DaemonOptions(default_ram_folder=True)) as daemon, daemon.connect() as connection:
        store(connection, "a", b"bytes", tier="ram")
        device = Path(connection.ask("locate", uri="a")["chunk_layout"][0]["device"])
        try:
            assert device.is_relative_to("/dev/shm")
            assert device.parent != Path("/dev/shm")
            assert device.parent.stat().st_mode & 0o077 == 0
            assert device.read_bytes() == b"bytes"
        finally:
            shutil.rmtree(device.parent)
