"""The RAM tier: one file per chunk in a folder of a memory file system.

Rules:
- Names come from the daemon's own serials, end in .shm (clients of wire 1 map such files afresh at each
  read, and keep a descriptor of any other for ever), and are never used twice.
- The folder is the daemon's own, and locked: a second daemon would sweep the first one's files away.
- What in it does not have such a name is never touched.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Container, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from .access import Access, DeviceError, named
from .claims import lock

_OURS = re.compile(r"[0-9a-f]{16}\.shm")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class RamFiles:
    """The files of the RAM tier in `folder`, held and locked until `close`.

    Raises:
        DeviceError: the folder cannot be made, is a symlink, belongs to another user, is one in which
            others may make files, or is in use.
    """

    def __init__(self, directory: Path, access: Access) -> None:
        self.folder = directory.absolute()
        self._access = access
        with ExitStack() as held:
            self._fd = _open_folder(self.folder, held)
            lock(self._fd, self.folder)
            with named(self.folder, "set the group and mode of", "give another --group"):
                access.apply_to_folder(self._fd)
            self._held = held.pop_all()

    def close(self) -> None:
        """Let go of the folder; the files stay."""
        self._held.close()

    def path(self, serial: int) -> str:
        """The path by which clients open the file of `serial` (0 to 2**64 - 1)."""
        return str(self.folder / _name(serial))

    def create(self, serial: int) -> None:
        """Make the empty file of `serial`; clients may open it from then on.

        Raises:
            FileExistsError: that name was used before.
            OSError: there is no room, or the group cannot be set; nothing is left behind.
        """
        name = _name(serial)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(name, flags, 0o600, dir_fd=self._fd)
        try:
            self._access.apply(fd, self._access.mode())
        except OSError:
            os.unlink(name, dir_fd=self._fd)
            raise
        finally:
            os.close(fd)

    def remove(self, serials: Iterable[int]) -> None:
        """Remove the files of `serials`; those that are gone already are fine.

        A client that has one mapped or open keeps its bytes until it lets go.
        """
        for serial in serials:
            with suppress(FileNotFoundError):
                os.unlink(_name(serial), dir_fd=self._fd)

    def lost(self, expected: Mapping[int, int]) -> set[int]:
        """Which files are no use any more, as all are after a reboot: missing, too short, or no file.

        Args:
            expected: serial -> the length in bytes that its file must have at least.
        """
        return {serial for serial, least in expected.items() if self._length(_name(serial)) < least}

    def sweep(self, owned: Container[int]) -> None:
        """At start: remove the files whose serials no object owns, and set today's access on the others."""
        for name in self._names():
            if int(name[:16], 16) in owned:
                self._adopt(name)
            else:
                self._drop(name)

    def room_bytes(self) -> int:
        """How much the files of this tier may take together: what they take, and what the file system of
        the folder can still take."""
        state = os.fstatvfs(self._fd)
        blocks = [os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_blocks for name in self._names()]
        return state.f_bavail * state.f_frsize + 512 * sum(blocks)

    def _names(self) -> list[str]:
        with os.scandir(self._fd) as entries:
            return [entry.name for entry in entries if _OURS.fullmatch(entry.name)]

    def _length(self, name: str) -> int:
        """-1 where there is no file."""
        try:
            state = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return -1
        return state.st_size if stat.S_ISREG(state.st_mode) else -1

    def _adopt(self, name: str) -> None:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._fd)
        try:
            self._access.apply(fd, self._access.mode())
        finally:
            os.close(fd)

    def _drop(self, name: str) -> None:
        # A folder of that name was not made by us, and unlink refuses it.
        with suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(name, dir_fd=self._fd)


def _name(serial: int) -> str:
    if not 0 <= serial < 1 << 64:
        raise ValueError(f"a RAM file's serial is 0 to 2**64 - 1, not {serial}")
    return f"{serial:016x}.shm"


def _open_folder(directory: Path, held: ExitStack) -> int:
    with named(directory, "make the RAM folder", "give another --ram-dir"), suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    try:
        fd = os.open(directory, _FOLDER)
    except OSError as error:
        raise DeviceError(_why_no_folder(directory, error)) from error
    held.callback(os.close, fd)
    _refuse_shared(directory, os.fstat(fd))
    return fd


def _refuse_shared(directory: Path, state: os.stat_result) -> None:
    if state.st_uid != os.geteuid():
        raise DeviceError(
            f"the RAM folder {directory} belongs to user {state.st_uid}, not to the daemon's user"
            f" {os.geteuid()}: remove it, or give another with --ram-dir"
        )
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DeviceError(
            f"others may make files in the RAM folder {directory}: give a folder of the daemon's own with"
            " --ram-dir"
        )


def _why_no_folder(directory: Path, error: OSError) -> str:
    if directory.is_symlink() or not directory.is_dir():
        return f"the RAM folder {directory} is a symlink or no folder: give a folder with --ram-dir"
    return f"cannot open the RAM folder {directory}: {error.strerror}: give another --ram-dir"
