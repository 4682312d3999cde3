"""The devices under the daemon, and what can be done to them behind its back."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypercache_compat.loop_devices import can_make_loop_devices, lacks_for_loop_devices, loop_devices
from hypercache_compat.payloads import MIB

POOL_MIB = 512

Chunk = dict[str, Any]
"""An entry of `chunk_layout` in the daemon's reply to `locate`."""


@dataclass(frozen=True)
class Places:
    """Devices, and the file behind each."""

    devices: tuple[str, ...]
    files: tuple[Path, ...]

    def truncate(self, device: str, size_bytes: int) -> None:
        """Make the device end there."""
        file = self.files[self.devices.index(device)]
        os.truncate(file, size_bytes)
        if str(file) != device:
            subprocess.run(["losetup", "--set-capacity", device], check=True, timeout=30)


def kind() -> str:
    """What devices are here."""
    lacking = lacks_for_loop_devices()
    return f"plain files, since loop devices take {lacking}" if lacking else "loop devices"


@contextmanager
def places(count: int, sector_bytes: int = 512) -> Iterator[Places]:
    """`count` devices in memory, of POOL_MIB together, with such sectors where they are loop devices; nothing
    of them is left."""
    with tempfile.TemporaryDirectory(prefix="hc", dir="/dev/shm") as name:
        folder, size_mib = Path(name), POOL_MIB // count
        files = tuple(folder / f"disk-{number}" for number in range(count))
        if can_make_loop_devices():
            with loop_devices(folder, count, size_mib, sector_bytes) as devices:
                yield Places(devices, files)
            return
        for file in files:
            file.touch()
            os.truncate(file, size_mib * MIB)
        yield Places(tuple(map(str, files)), files)


def peek(chunk: Chunk, start: int, length: int) -> bytes:
    """The `length` bytes from `start` of a chunk on."""
    with Path(chunk["device"]).open("rb", buffering=0) as device:
        return os.pread(device.fileno(), length, chunk["offset"] + start)


def poke(chunk: Chunk, start: int, data: bytes) -> None:
    """Put `data` at `start` of a chunk, on the device itself when this returns."""
    with Path(chunk["device"]).open("r+b", buffering=0) as device:
        os.pwrite(device.fileno(), data, chunk["offset"] + start)
        os.fsync(device.fileno())


def whole(chunk: Chunk) -> bytes:
    """All of a chunk."""
    return peek(chunk, 0, chunk["length"])


def flip(chunk: Chunk, bit: int) -> None:
    """Turn one bit of a chunk over."""
    start, place = divmod(bit, 8)
    poke(chunk, start, bytes([peek(chunk, start, 1)[0] ^ 1 << place]))


def swap(one: Chunk, other: Chunk) -> None:
    """Each gets the other's bytes."""
    first, second = whole(one), whole(other)
    poke(one, 0, second)
    poke(other, 0, first)
