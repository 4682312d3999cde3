"""Real block devices: loop devices, their partitions, mounts and swap.

They need root and a kernel with loop devices. Elsewhere the same tests run on files, where they prove less;
that is said once, and under CI=true it is a failure.
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from daemon_harness import cleared, eventually, pattern, running

from hypercache_compat.loop_devices import lacks_for_loop_devices
from hypercache_daemon import device_health
from hypercache_daemon.devices import (
    RESERVED_BYTES,
    Access,
    DeviceError,
    Pool,
    open_devices,
    read_chunk,
    write_chunk,
)

MIB = 1 << 20
SIZE = 32 * MIB
PRIVATE = Access()
WITH_SBIN = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}


def run(*command: object) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=WITH_SBIN)
    return done.stdout.strip()


class Machine:
    """Hands out blank disks: loop devices where `loops`, else files. Gives everything back at the end."""

    def __init__(self, folder: Path, loops: bool, kept: ExitStack) -> None:
        self.folder = folder
        self.loops = loops
        self._kept = kept
        self._count = 0

    def image(self, size_bytes: int = SIZE) -> Path:
        self._count += 1
        path = self.folder / f"image-{self._count}"
        with path.open("wb") as file:
            file.truncate(size_bytes)
        return path

    def disk(self, *options: str, size_bytes: int = SIZE) -> str:
        image = self.image(size_bytes)
        return self.attach(image, *options) if self.loops else str(image)

    def attach(self, under: Path | str, *options: str) -> str:
        loop = run("losetup", "--find", "--show", *options, under)
        state = Path(loop).stat()
        self._kept.callback(run, "losetup", "--detach", loop)
        self._kept.callback(os.chown, loop, state.st_uid, state.st_gid)
        self._kept.callback(os.chmod, loop, stat.S_IMODE(state.st_mode))
        return loop

    @contextmanager
    def mounted(self, device: str) -> Iterator[Path]:
        run("mkfs.ext4", "-q", "-F", device)
        with tempfile.TemporaryDirectory(prefix="mnt", dir=self.folder) as point:
            # Read-only: else the kernel goes on making the file system by itself while it is mounted.
            run("mount", "-o", "ro", device, point)
            try:
                yield Path(point)
            finally:
                run("umount", point)

    @contextmanager
    def partition(self, disk: str) -> Iterator[str]:
        """A partition from 1 MiB to the end, as a kernel without that table's format would be told."""
        table = bytes(446) + bytes((0, 0, 0, 0, 0x83, 0, 0, 0))
        table += (2048).to_bytes(4, "little") + (SIZE // 512 - 2048).to_bytes(4, "little")
        write_chunk(disk, 0, table.ljust(510, b"\0") + b"\x55\xaa")
        if not self.loops:
            yield disk
            return
        run("partx", "--update", disk)
        try:
            yield f"{disk}p1"
        finally:
            with suppress(subprocess.CalledProcessError):  # a test may have dropped it
                run("partx", "--delete", disk)


@pytest.fixture(scope="session")
def has_loops(request: pytest.FixtureRequest) -> bool:
    reason = _why_no_loops()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"the tests of block devices cannot run here: {reason}")
    if reason:
        plugins = request.config.pluginmanager
        with plugins.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\nthe tests of block devices run on files only: {reason}")
    return not reason


def _why_no_loops() -> str:
    if lacking := lacks_for_loop_devices("mkfs.ext4", "mount", "umount", "partx"):
        return f"they take {lacking}"
    with tempfile.NamedTemporaryFile(prefix="hc", dir="/tmp") as image:
        os.truncate(image.name, MIB)
        try:
            run("losetup", "--detach", run("losetup", "--find", "--show", image.name))
        except (OSError, subprocess.CalledProcessError) as error:
            return f"no loop device can be made ({error})"
    return ""


@pytest.fixture
def machine(has_loops: bool) -> Iterator[Machine]:
    folder = Path(tempfile.mkdtemp(prefix="hc", dir="/tmp"))
    with ExitStack() as kept:
        kept.callback(shutil.rmtree, folder)
        yield Machine(folder, has_loops, kept)


def open_one(disk: str, *, format: bool = False, access: Access = PRIVATE) -> Pool:
    return open_devices([disk], format=format, access=access)


# -- a pool on block devices ---------------------------------------------------------------------------


def test_blank_devices_become_a_pool_and_stay_one(machine: Machine) -> None:
    disks = [machine.disk(), machine.disk(size_bytes=SIZE + 512)]
    with open_devices(disks, access=PRIVATE) as pool:
        assert pool.formatted
        assert [(device.path, device.size_bytes) for device in pool.devices] == [(d, SIZE) for d in disks]
    with open_devices(disks, access=PRIVATE) as again:
        assert not again.formatted
        assert (again.pool_id, again.devices) == (pool.pool_id, pool.devices)
    with pytest.raises(DeviceError, match=f"order: {disks[0]}, {disks[1]}"):
        open_devices(disks[::-1], access=PRIVATE)


def test_facts_are_those_of_a_loop_device(machine: Machine) -> None:
    disk = machine.disk(size_bytes=SIZE + 512)
    with open_one(disk) as pool:
        info = pool.devices[0].info
    assert (info.path, info.size_bytes, info.existing_fs) == (disk, SIZE + 512, None)
    assert (info.is_virtual, info.is_nvme, info.is_partition) == (True, False, False)
    if machine.loops:
        rotational = Path(f"/sys/block/{Path(disk).name}/queue/rotational").read_text().strip()
        assert info.is_rotational is (rotational == "1")


def test_clients_open_it_while_the_daemon_holds_it(machine: Machine) -> None:
    """As they do: a buffered write, a direct read. And the daemon's own reads see what they wrote."""
    disk = machine.disk()
    data = os.urandom(4 * MIB)
    with open_one(disk):
        fd = os.open(disk, os.O_RDWR)
        assert os.pwrite(fd, data, RESERVED_BYTES) == len(data)
        os.fdatasync(fd)
        os.close(fd)
        with mmap.mmap(-1, len(data)) as buffer:
            fd = os.open(disk, os.O_RDONLY | os.O_DIRECT)
            assert os.preadv(fd, [buffer], RESERVED_BYTES) == len(data)
            os.close(fd)
            assert buffer[:] == data
        assert read_chunk(disk, RESERVED_BYTES, len(data)) == data


def test_nobody_else_takes_it_while_the_daemon_holds_it(machine: Machine) -> None:
    disk = machine.disk()
    with open_one(disk):
        for format in (False, True):
            with pytest.raises(DeviceError, match=rf"{disk} is in use by another"):
                open_one(disk, format=format)
        if machine.loops:
            with pytest.raises(subprocess.CalledProcessError):
                run("mount", disk, machine.folder)
    open_one(disk).close()


def test_a_write_past_the_end_is_an_error_and_never_short(machine: Machine) -> None:
    disk = machine.disk()
    if machine.loops:
        with pytest.raises(OSError, match="No space left"):
            write_chunk(disk, SIZE - 4096, bytes(8192))
    with pytest.raises(DeviceError, match="was cut off"):
        read_chunk(disk, SIZE - 4096, 16384)


# -- what is in use ------------------------------------------------------------------------------------


@contextmanager
def used(machine: Machine, disk: str, how: str) -> Iterator[str]:
    """Uses the disk; gives the words by which that is refused."""
    with ExitStack() as kept:
        if not machine.loops:
            kept.enter_context(open_one(disk))
            yield "is in use by another hypercached"
            return
        match how:
            case "mounted":
                yield f"it is mounted at {kept.enter_context(machine.mounted(disk))}:"
            case "swap":
                run("mkswap", disk)
                run("swapon", disk)
                kept.callback(run, "swapoff", disk)
                yield "it is in use as swap space"
            case "partition mounted":
                part = kept.enter_context(machine.partition(disk))
                point = kept.enter_context(machine.mounted(part))
                yield f"its partition {Path(part).name} is mounted at {point}:"
            case "under a loop device":
                yield f"it is what {machine.attach(disk)} lies on"
            case _:
                kept.callback(os.close, os.open(disk, os.O_RDWR | os.O_EXCL))
                yield "is in use by another program"


@pytest.mark.parametrize(
    "how", ["mounted", "swap", "partition mounted", "under a loop device", "open by a program"]
)
@pytest.mark.parametrize("format", [False, True])
def test_a_device_in_use_is_refused_by_name_even_with_format(
    machine: Machine, how: str, format: bool
) -> None:
    blank, disk = machine.disk(), machine.disk()
    with used(machine, disk, how) as words:
        before = read_chunk(disk, 0, SIZE)
        with pytest.raises(DeviceError, match=words) as refused:
            open_devices([blank, disk], format=format, access=PRIVATE)
        assert disk in str(refused.value)
        assert read_chunk(disk, 0, SIZE) == before
        assert read_chunk(blank, 0, SIZE) == bytes(SIZE), "and nothing else was touched either"


@pytest.mark.parametrize("format", [False, True])
def test_a_partition_of_a_mounted_disk_is_refused(machine: Machine, format: bool) -> None:
    disk = machine.disk()
    with ExitStack() as kept:
        part = kept.enter_context(machine.partition(disk))
        words = kept.enter_context(used(machine, disk, "mounted") if machine.loops else held_by_format(disk))
        with pytest.raises(DeviceError, match=words.removeprefix("it ")):
            open_one(part, format=format)


@contextmanager
def held_by_format(disk: str) -> Iterator[str]:
    with open_one(disk, format=True):
        yield "is in use by another hypercached"


def test_a_file_under_a_loop_device_is_refused(machine: Machine) -> None:
    image = machine.image()
    words = "is in use by another hypercached"
    with ExitStack() as kept:
        if machine.loops:
            words = f"it is what {machine.attach(image)} lies on"
        else:
            kept.enter_context(open_one(str(image)))
        for format in (False, True):
            with pytest.raises(DeviceError, match=words):
                open_one(str(image), format=format)


# -- what lies on it -----------------------------------------------------------------------------------


def test_a_file_system_is_refused_and_kept_until_format(machine: Machine) -> None:
    disk = machine.disk()
    run("mkfs.ext4", "-q", "-F", disk)
    before = read_chunk(disk, 0, SIZE)
    with pytest.raises(DeviceError, match=rf"{disk} holds something already \(ext4\).*--format"):
        open_one(disk)
    assert read_chunk(disk, 0, SIZE) == before
    with open_one(disk, format=True) as pool:
        assert pool.formatted
    if machine.loops:
        with pytest.raises(subprocess.CalledProcessError):
            run("mount", disk, machine.folder)


def test_a_disk_with_partitions_is_refused_and_kept(machine: Machine) -> None:
    disk = machine.disk()
    with machine.partition(disk) as part:
        words = rf"has partitions \({Path(part).name}\): give one of those" if machine.loops else r"\(dos\)"
        with pytest.raises(DeviceError, match=words):
            open_one(disk)
        assert read_chunk(disk, 510, 2) == b"\x55\xaa"


@pytest.mark.parametrize("options", [("--partscan",), ()], ids=["kernel drops them", "kernel keeps them"])
def test_format_of_a_disk_with_partitions_leaves_none_or_says_how(
    machine: Machine, options: tuple[str, ...]
) -> None:
    disk = machine.disk(*options)
    with machine.partition(disk) as part:
        if machine.loops and not options:
            with pytest.raises(
                DeviceError, match=rf"still shows {Path(part).name} on .*: run partx -d {disk}"
            ):
                open_one(disk, format=True)
            run("partx", "--delete", disk)
        with open_one(disk, format=not machine.loops or bool(options)) as pool:
            assert pool.formatted
            assert part == disk or not Path(part).exists()


def test_a_partition_is_a_device_and_its_disk_beside_it_is_refused(machine: Machine) -> None:
    disk = machine.disk()
    with machine.partition(disk) as part:
        with open_one(part, format=not machine.loops) as pool:
            assert pool.devices[0].info.is_partition is machine.loops
            assert pool.devices[0].size_bytes == (SIZE - MIB if machine.loops else SIZE)
        words = f"{part} is a partition of {disk}" if machine.loops else "are the same device"
        for pair in ([disk, part], [part, disk]):
            with pytest.raises(DeviceError, match=words):
                open_devices(pair, format=True, access=PRIVATE)


def test_a_resized_device_is_refused(machine: Machine) -> None:
    image = machine.image()
    disk = machine.attach(image) if machine.loops else str(image)
    open_one(disk).close()
    os.truncate(image, SIZE + MIB)
    if machine.loops:
        run("losetup", "--set-capacity", disk)
    with pytest.raises(DeviceError, match=rf"{disk} has 33\.0 MiB but had 32\.0 MiB"):
        open_one(disk)


@pytest.mark.parametrize("format", [False, True])
def test_a_device_too_small_is_refused(machine: Machine, format: bool) -> None:
    disk = machine.disk(size_bytes=16 * MIB)
    with pytest.raises(DeviceError, match=rf"{disk} is too small, it has 16\.0 MiB: .* at least 17\.0 MiB"):
        open_one(disk, format=format)


def test_two_names_of_one_device_are_refused(machine: Machine) -> None:
    disk, link = machine.disk(), machine.folder / "by-name"
    link.symlink_to(disk)
    with pytest.raises(DeviceError, match=rf"{link} and {disk} are the same device"):
        open_devices([disk, str(link)], access=PRIVATE)


# -- access --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [False, True])
def test_a_device_that_cannot_be_written_is_refused_by_name(machine: Machine, format: bool) -> None:
    disk, words = f"{machine.disk()}/below-a-file", "Not a directory"
    if machine.loops:
        disk, words = machine.disk("--read-only"), "is read-only: run blockdev --setrw"
    with pytest.raises(DeviceError, match=rf"{disk}.*{words}"):
        open_one(disk, format=format)


def test_a_node_that_everybody_may_open_is_refused(machine: Machine) -> None:
    disk = machine.disk()
    Path(disk).chmod(0o666)
    if machine.loops:
        with pytest.raises(
            DeviceError, match=rf"everybody on this host may open {disk}: run chmod o= {disk}"
        ):
            open_one(disk)
    else:
        open_one(disk).close()
        assert stat.S_IMODE(Path(disk).stat().st_mode) == 0o600


def test_a_node_keeps_its_mode_until_a_group_is_configured(machine: Machine) -> None:
    disk = machine.disk()
    Path(disk).chmod(0o640)
    open_one(disk).close()
    assert stat.S_IMODE(Path(disk).stat().st_mode) == (0o640 if machine.loops else 0o600)
    gid = 12345 if machine.loops else os.getgid()
    open_one(disk, access=Access(gid=gid)).close()
    state = Path(disk).stat()
    assert (stat.S_IMODE(state.st_mode), state.st_gid) == (0o660, gid)


# -- a device that fails under the daemon --------------------------------------------------------------


async def test_a_device_whose_end_cannot_be_read_any_more_is_taken_out_of_use(
    machine: Machine, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel answers buffered reads from its memory long after the device is gone: it must be asked."""
    monkeypatch.setattr(device_health, "_PROBE_EVERY_S", 0.01)
    images = [machine.image(), machine.image()]
    disks = [machine.attach(image) if machine.loops else str(image) for image in images]
    async with running(short_dir, pool_dir=None, device=disks, state_dir=short_dir) as daemon:
        client = await daemon.connect()
        for number in range(4):
            await client.store(f"object/{number}", pattern(number, 4096))
        os.truncate(images[0], RESERVED_BYTES)
        if machine.loops:
            assert read_chunk(disks[0], RESERVED_BYTES, 4096), "as if nothing had happened"
        health = daemon.parts.health
        await eventually(lambda: health.report()[0]["failure"])
        failure = health.report()[0]["failure"]
        assert failure == "Input/output error" if machine.loops else "was cut off" in failure
        await cleared(daemon)
        found = [await client.fetch(f"object/{number}") for number in range(4)]
        assert found[0::2] == [None, None]
        assert found[1::2] == [pattern(1, 4096), pattern(3, 4096)]
        os.truncate(images[0], SIZE)
        await health.look_again()
        await client.store("both", pattern(5, 8 * MIB))
        assert await client.fetch("both") == pattern(5, 8 * MIB)
        assert health.report()[0]["allocated_bytes"] == 4 * MIB
