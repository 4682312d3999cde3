"""What the peers store on: always fresh, of the size asked for, with its blocks allocated before anything is
timed, and gone afterwards.

* RAM loop devices (root): block devices over files in memory; for a peer that wants a folder, ext4 on one.
* RAM files (anybody): files in memory.
* Disk files: files on the file system that holds this work tree.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypercache_compat.loop_devices import lacks_for_loop_devices, loop_device, mounted
from hypercache_protocol.fields import MIB

ROOT = Path(__file__).resolve().parent.parent
RAM = Path("/dev/shm")


@dataclass(frozen=True)
class Storage:
    """A place for devices and folders.

    Args:
        in_memory: it is no disk, so its speed is that of memory.
        direct: transfers can bypass the page cache (O_DIRECT).
        loop: devices are loop devices over files in `parent`, and folders file systems on such.
    """

    name: str
    parent: Path
    in_memory: bool
    direct: bool
    loop: bool

    @contextmanager
    def devices(self, count: int, size_bytes: int) -> Iterator[tuple[str, ...]]:
        """The paths of `count` devices that together have `size_bytes`."""
        with self._fresh_folder() as folder, ExitStack() as stack:
            paths = []
            for number in range(count):
                path = folder / f"device-{number}"
                self._allocate(path, _rounded(size_bytes // count))
                paths.append(stack.enter_context(loop_device(path)) if self.loop else str(path))
            yield tuple(paths)

    @contextmanager
    def folder(self, size_bytes: int) -> Iterator[Path]:
        """A folder for files of together at most `size_bytes`."""
        if not self.loop:
            with self._fresh_folder() as folder:
                yield folder
            return
        with self.devices(1, size_bytes) as (device,), _fresh(Path("/tmp")) as folder:
            # Discarding would give the blocks back that were allocated on purpose.
            options = ("-E", "nodiscard,lazy_itable_init=0", "-O", "^has_journal", "-m", "0")
            subprocess.run(["mkfs.ext4", "-q", "-F", *options, device], check=True, timeout=60)
            with mounted(device, folder):
                yield folder

    def _allocate(self, path: Path, size_bytes: int) -> None:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            # A page of memory is only there once it was written: a virtual machine gets it from its host
            # then, which takes longer than what is measured here.
            for _ in range(size_bytes // MIB if self.in_memory else 0):
                file.write(bytes(MIB))

    @contextmanager
    def _fresh_folder(self) -> Iterator[Path]:
        with _fresh(self.parent) as folder:
            yield folder


def in_memory() -> Storage:
    """Loop devices over memory where this user may make them, else files in memory."""
    lacking = lacks_for_loop_devices("mkfs.ext4", "mount", "umount")
    if not lacking:
        return Storage("RAM, loop devices", RAM, in_memory=True, direct=True, loop=True)
    print(f"files stand in for loop devices, which take {lacking}", file=sys.stderr)
    return Storage("RAM, files", RAM, in_memory=True, direct=_takes_direct(RAM), loop=False)


def on_disk(folder: Path | None) -> Storage:
    """Files in `folder`, or in the work tree."""
    parent = folder or ROOT / ".cache"
    parent.mkdir(exist_ok=True)
    return Storage("disk, files", parent, in_memory=False, direct=_takes_direct(parent), loop=False)


@contextmanager
def _fresh(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="hc", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // MIB) * MIB


def _takes_direct(folder: Path) -> bool:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            return False
    return True
