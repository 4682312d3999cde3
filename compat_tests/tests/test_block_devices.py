"""On real block devices where this process may make loop devices, and on files given as devices."""

from __future__ import annotations

import base64
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hypercache_compat.daemon_process import (
    DaemonOptions,
    DaemonProcess,
    daemon_folders,
    run_refused,
    running_daemon,
)
from hypercache_compat.loop_devices import can_make_loop_devices, loop_device, loop_devices, mounted
from hypercache_compat.payloads import MIB
from hypercache_compat.scenario_process import ScenarioProcess

KINDS = ["files", "loop devices", "links in /dev"] if can_make_loop_devices() else ["files"]
AN_EMPTY_EXT2 = Path(__file__).parent / "data" / "ext2-256-kib.b85"


@pytest.fixture(scope="module", params=KINDS)
def disks(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    """Two devices of 512 MiB each."""
    with daemon_folders() as (folder, _):
        if request.param == "loop devices":
            with loop_devices(folder, count=2, size_mib=512) as devices:
                yield devices
        elif request.param == "links in /dev":
            with loop_devices(folder, count=2, size_mib=512) as devices, _links_to(devices) as links:
                yield links
        else:
            yield tuple(_file(folder / f"disk-{number}", 512 * MIB) for number in range(2))


@pytest.fixture(scope="module")
def disk_daemon(disks: tuple[str, ...]) -> Iterator[DaemonProcess]:
    with running_daemon(DaemonOptions(devices=disks)) as process:
        yield process


@contextmanager
def _links_to(devices: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Further names of these, as udev and LVM make them."""
    with tempfile.TemporaryDirectory(prefix="hypercache-test-", dir="/dev") as folder:
        links = [Path(folder) / f"disk-{number}" for number in range(len(devices))]
        for link, device in zip(links, devices, strict=True):
            link.symlink_to(device)
        yield tuple(map(str, links))


def _file(path: Path, size_bytes: int) -> str:
    with path.open("wb") as file:
        file.truncate(size_bytes)
    return str(path)


def test_the_devices_that_were_given_are_the_ones_in_use(
    disks: tuple[str, ...], disk_daemon: DaemonProcess
) -> None:
    with disk_daemon.connect() as connection:
        listed = {device["path"]: device for device in connection.ask("get_devices")["devices"]}
    assert set(listed) == set(disks)
    for device in listed.values():
        assert 500 * MIB < device["size_bytes"] <= 512 * MIB
        assert device["is_nvme"] is False
        assert device["is_partition"] is False


def test_the_old_client_and_the_connector_share_them(
    old: ScenarioProcess, lmcaches: dict[str, ScenarioProcess], disk_daemon: DaemonProcess, uri: str
) -> None:
    path, lmcache = disk_daemon.socket_path, lmcaches["0.5.6"]
    written = {"socket_path": path, "uri": uri, "size_bytes": 21 * MIB + 1920}
    old.call("file_system.write_in_pieces", **written, write_bytes=MIB)
    names, sizes = ["a", "b", "c", "d"], [14 * MIB, 4097, 9 * MIB + 1, 4 * MIB]
    lmcache.call("adapter.connect", socket_path=path, namespace=uri)
    assert lmcache.call("adapter.store", names=names, sizes=sizes)
    assert old.call("file_system.read_whole", **written) is True
    old.call("file_system.patch_earlier_pieces", socket_path=path, uri=uri, size_bytes=9 * MIB, tier=None)
    old.call("file_system.zip_file", socket_path=path, uri=uri, member_sizes=[5 * MIB, 77])
    got = lmcache.call("adapter.load", names=names, sizes=sizes)
    assert got == {"loaded": [True] * 4, "wrong": []}
    lmcache.call("adapter.close")


def test_commits_outlive_a_crash_of_the_daemon(
    old: ScenarioProcess, disk_daemon: DaemonProcess, uri: str
) -> None:
    written = {"socket_path": disk_daemon.socket_path, "uri": uri, "size_bytes": 17 * MIB + 3}
    old.call("client_calls.store", **written)
    disk_daemon.restart(crash=True)
    assert old.call("client_calls.fetch", **written) is True


def _refused(folder: Path, *devices: str) -> str:
    """What the daemon says of these devices before it ends with status 2."""
    words = ["--socket", str(folder / "s"), "--state-dir", str(folder / "state"), "--ram-size", "0"]
    done = run_refused(*words, *(word for device in devices for word in ("--device", device)))
    assert done.returncode == 2, done.stderr
    return done.stderr


if can_make_loop_devices():

    @pytest.fixture
    def ext2_disk() -> Iterator[tuple[Path, str]]:
        """A folder, and a loop device of 64 MiB with an empty file system on it."""
        with daemon_folders() as (folder, _):
            image = folder / "image"
            image.write_bytes(zlib.decompress(base64.b85decode(AN_EMPTY_EXT2.read_text().replace("\n", ""))))
            with image.open("r+b") as file:
                file.truncate(64 * MIB)
            with loop_device(image) as device:
                yield folder, device

    def test_a_mounted_device_is_refused_by_name_whatever_is_asked(ext2_disk: tuple[Path, str]) -> None:
        folder, device = ext2_disk
        mount_point = folder / "mnt"
        mount_point.mkdir()
        with mounted(device, mount_point):
            (mount_point / "file").write_text("precious")
            for extra in ((), ("--format",)):
                words = ["--socket", str(folder / "s"), "--state-dir", str(folder / "state"), *extra]
                done = run_refused(*words, "--device", device, "--ram-size", "0")
                assert done.returncode == 2, done.stderr
                assert device in done.stderr
                assert str(mount_point) in done.stderr
            assert (mount_point / "file").read_text() == "precious"

    def test_a_device_with_a_file_system_is_refused_by_name_and_untouched(
        ext2_disk: tuple[Path, str],
    ) -> None:
        folder, device = ext2_disk
        before = Path(device).read_bytes()
        said = _refused(folder, device)
        assert device in said
        assert "ext" in said
        assert Path(device).read_bytes() == before

    def test_a_file_behind_a_loop_device_is_refused_by_name() -> None:
        with daemon_folders() as (folder, _):
            backing = _file(folder / "disk", 64 * MIB)
            with loop_device(Path(backing)):
                assert backing in _refused(folder, backing)

    def test_a_block_device_that_is_too_small_is_refused_by_name() -> None:
        with daemon_folders() as (folder, _), loop_devices(folder, count=1, size_mib=4) as (device,):
            assert device in _refused(folder, device)


def test_a_device_given_twice_is_refused_by_name() -> None:
    with daemon_folders() as (folder, _):
        device = _file(folder / "disk", 64 * MIB)
        assert device in _refused(folder, device, device)
