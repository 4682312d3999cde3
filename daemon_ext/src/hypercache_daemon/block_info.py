"""What the kernel knows about a block device or a file: facts for `get_devices`, and who uses it now.

A device is known by its number ("259:0"), never by its name: many names lead to one device. The kernel's
own exclusive open is the guard that counts (see claims.py); what is found here gives a refusal its reason.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hypercache_protocol.messages import DeviceInfo

_ESCAPED = re.compile(rb"\\([0-7]{3})")


def number_of(device: int) -> str:
    """The kernel's name of a device number, "major:minor"."""
    return f"{os.major(device)}:{os.minor(device)}"


@dataclass(frozen=True)
class Host:
    """Reads /sys and /proc; tests give it other folders."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")

    # -- facts -----------------------------------------------------------------------------------------

    def describe_block(self, path: str, number: str, size_bytes: int) -> DeviceInfo:
        """The facts about block device `number`, which clients open as `path`."""
        node = self._node(number)
        is_partition = (node / "partition").exists()
        disk = node.parent if is_partition else node
        return DeviceInfo(
            path=path,
            is_nvme=disk.name.startswith("nvme"),
            is_virtual="/devices/virtual/block/" in str(node),
            is_partition=is_partition,
            is_rotational=self._is_rotational(number),
            size_bytes=size_bytes,
            model=_read(disk / "device/model") or None,
            numa_node=_numa_node(disk / "device"),
        )

    def describe_file(self, path: str, number: str, size_bytes: int) -> DeviceInfo:
        """The facts about a file that serves as a device, on a file system on device `number`."""
        return DeviceInfo(
            path=path,
            is_nvme=False,
            is_virtual=True,
            is_partition=False,
            is_rotational=self._is_rotational(number),
            size_bytes=size_bytes,
        )

    def logical_block_bytes(self, number: str) -> int:
        """The smallest piece that the device reads or writes."""
        return int(_read(self._disk(number) / "queue/logical_block_size") or 512)

    def is_read_only(self, number: str) -> bool:
        """Does the kernel refuse writes to it? (It may be opened for writing all the same.)"""
        return _read(self._node(number) / "ro") == "1"

    def partitions(self, number: str) -> dict[str, str]:
        """Number -> name of the partitions that the kernel sees on a disk."""
        found = {}
        with suppress(FileNotFoundError):  # a container may show no /sys: then there is nothing to say
            for child in sorted(self._node(number).iterdir()):
                if (child / "partition").exists():
                    found[_read(child / "dev")] = child.name
        return found

    def disk_of(self, number: str) -> str | None:
        """The number of the disk that a partition is part of; None where the device is no partition."""
        if not (self._node(number) / "partition").exists():
            return None
        return _read(self._disk(number) / "dev") or None

    def _node(self, number: str) -> Path:
        return (self.sys / "dev/block" / number).resolve()

    def _disk(self, number: str) -> Path:
        node = self._node(number)
        return node.parent if (node / "partition").exists() else node

    def _is_rotational(self, number: str) -> bool:
        return _read(self._disk(number) / "queue/rotational") == "1"

    # -- users -----------------------------------------------------------------------------------------

    def use_of_block(self, number: str) -> str | None:
        """What uses the device, the disk it is part of, or a partition of it; None where nothing does."""
        partitions = self.partitions(number).items()
        relatives = {number: "it"} | {part: f"its partition {name}" for part, name in partitions}
        disk = self.disk_of(number)
        if disk is not None:
            relatives[disk] = f"the disk {self._disk(number).name} that it is part of"
        for used, use in self._uses():
            if used in relatives:
                return f"{relatives[used]} {use}"
        for relative, name in relatives.items():
            for holder in _names(self._node(relative) / "holders"):
                return f"{name} is held by {holder}"
        return None

    def use_of_file(self, state: os.stat_result) -> str | None:
        """What uses the file as swap space or as the ground of a loop device; None where nothing does."""
        for used, use in self._uses():
            if used == _identity(state):
                return f"it {use}"
        return None

    def _uses(self) -> Iterator[tuple[str, str]]:
        yield from self._mounts()
        for line in _lines(self.proc / "swaps")[1:]:
            yield _identity_at(_unescaped(line.split()[0])), "is in use as swap space"
        for loop in sorted(self.sys.glob("block/loop*/loop/backing_file")):
            yield _identity_at(_read(loop)), f"is what /dev/{loop.parent.parent.name} lies on"

    def _mounts(self) -> Iterator[tuple[str, str]]:
        for line in _lines(self.proc / "self/mountinfo"):
            fields = line.split()
            use = f"is mounted at {_unescaped(fields[4])}"
            yield fields[2].decode(), use
            # btrfs and some others show a number of their own here, and the device as the source.
            source = _unescaped(fields[fields.index(b"-") + 2])
            if source.startswith("/dev/"):
                yield _identity_at(source), use


def _identity(state: os.stat_result) -> str:
    if stat.S_ISBLK(state.st_mode):
        return number_of(state.st_rdev)
    return f"file {state.st_dev} {state.st_ino}"


def _identity_at(path: str) -> str:
    try:
        return _identity(Path(path).stat())
    except OSError:
        return "gone"  # a name from another mount namespace, or removed since: nobody can give us that


def _unescaped(field: bytes) -> str:
    return os.fsdecode(_ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), field))


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except FileNotFoundError:
        return []  # a kernel without swap has no such file


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except FileNotFoundError:
        return []


def _read(path: Path) -> str:
    """An attribute of /sys, or "" where this device has none such."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _numa_node(device: Path) -> int | None:
    """The nearest answer on the way from the device up to the bus that it sits on."""
    start = device.resolve()
    for folder in (start, *start.parents):
        text = _read(folder / "numa_node")
        if text:
            return int(text) if int(text) >= 0 else None
    return None
