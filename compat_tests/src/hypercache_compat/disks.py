"""Disks that fail: files that are gone, file systems that are full, frozen, or cut off by a power loss.

Mounting and freezing take root, tools, and a kernel that lets us; the rest anybody can do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from .loop_devices import LOOP_CONTROL
from .machine import lacks
from .payloads import MIB


@contextmanager
def in_memory(place: Path, size_bytes: int) -> Iterator[None]:
    """A file system in memory at `place`."""
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", place)
    try:
        yield
    finally:
        _run("umount", place)


@contextmanager
def on_a_file(place: Path, image: Path, size_bytes: int) -> Iterator[None]:
    """A file system at `place` that can be frozen, or lose its power, in a new file."""
    image.touch()
    os.truncate(image, size_bytes)
    _run("mkfs.ext4", "-q", image)
    _mount_file(image, place)
    try:
        yield
    finally:
        _run("umount", place)


def lose_power(place: Path, image: Path) -> None:
    """Take back from the file system at `place` all that its file has not got yet: what nobody synced, for
    half a minute or so. Nobody may have anything open there."""
    synced = image.with_suffix(".synced")
    shutil.copyfile(image, synced)
    _run("umount", place)  # which writes the rest
    synced.replace(image)
    _mount_file(image, place)


def _mount_file(image: Path, place: Path) -> None:
    _run("mount", "-o", "loop,commit=600", image, place)  # else the kernel syncs by itself every 5 s


@contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Whatever writes to the file system meanwhile waits."""
    _run("fsfreeze", "--freeze", place)
    try:
        yield
    finally:
        _run("fsfreeze", "--unfreeze", place)


@contextmanager
def filled(ballast: Path) -> Iterator[None]:
    """Nothing more fits into the file system meanwhile; `ballast` is a new file on it."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def gone(path: Path) -> Iterator[None]:
    """It is elsewhere meanwhile."""
    elsewhere = path.with_suffix(".elsewhere")
    path.rename(elsewhere)
    try:
        yield
    finally:
        elsewhere.rename(path)


def lacks_to_mount() -> str:
    """What this machine lacks to mount a file system in memory, "" where nothing; tried out."""
    return lacks("mount", "umount") or _refusal(lambda folder: in_memory(folder, MIB))


def lacks_to_freeze() -> str:
    """What this machine lacks to mount a file, and to freeze what is in it, "" where nothing; tried out."""

    @contextmanager
    def both(folder: Path) -> Iterator[None]:
        place = folder / "place"
        place.mkdir()
        with on_a_file(place, folder / "image", 2 * MIB), frozen(place):
            yield

    tools = ("mkfs.ext4", "mount", "umount", "fsfreeze")
    return lacks(*tools, files=(LOOP_CONTROL,)) or _refusal(both)


def _refusal(tried: Callable[[Path], AbstractContextManager[None]]) -> str:
    with tempfile.TemporaryDirectory(prefix="hc", dir="/dev/shm") as folder:
        try:
            with tried(Path(folder)):
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            return f"a machine that lets root do it ({' '.join(said.split())})"


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)
