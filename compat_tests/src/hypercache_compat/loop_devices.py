"""Loop devices for tests: real block devices, backed by files, where the process may make them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .machine import lacks
from .payloads import MIB

LOOP_CONTROL = "/dev/loop-control"


def lacks_for_loop_devices(*programs: str) -> str:
    """What this process lacks to attach loop devices, and to run these programs on them; "" where nothing."""
    return lacks("losetup", *programs, files=(LOOP_CONTROL,))


def can_make_loop_devices() -> bool:
    """Whether this process may attach loop devices."""
    return not lacks_for_loop_devices()


@contextmanager
def loop_device(backing_file: Path, sector_bytes: int = 512) -> Iterator[str]:
    """The path of a loop device over `backing_file`; it is detached afterwards."""
    sectors = ("--sector-size", str(sector_bytes))
    device = _run("losetup", "--find", "--show", *sectors, str(backing_file)).strip()
    try:
        yield device
    finally:
        _run("losetup", "--detach", device)


@contextmanager
def loop_devices(
    folder: Path, count: int, size_mib: int, sector_bytes: int = 512
) -> Iterator[tuple[str, ...]]:
    """`count` loop devices of `size_mib` MiB each over new files in `folder`."""
    with ExitStack() as stack:
        devices = []
        for number in range(count):
            backing_file = folder / f"disk-{number}"
            with backing_file.open("wb") as file:
                file.truncate(size_mib * MIB)
            devices.append(stack.enter_context(loop_device(backing_file, sector_bytes)))
        yield tuple(devices)


@contextmanager
def mounted(device: str, folder: Path) -> Iterator[None]:
    """The file system on `device` is mounted at `folder` for the block."""
    _run("mount", device, str(folder))
    try:
        yield
    finally:
        _run("umount", str(folder))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
