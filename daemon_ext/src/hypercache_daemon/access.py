"""Who may open what the daemon makes, and the one error that everything about devices raises."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


class DeviceError(Exception):
    """A device, a pool or a RAM folder cannot be used: one sentence that names it and the way out."""


@contextmanager
def named(path: object, doing: str, way_out: str) -> Iterator[None]:
    """Turns an OSError of the body into a DeviceError: cannot `doing` `path`: the reason: `way_out`."""
    try:
        yield
    except OSError as error:
        raise DeviceError(f"cannot {doing} {path}: {error.strerror or error}: {way_out}") from error


def in_words(size_bytes: int) -> str:
    """A size for people, "1.5 GiB"."""
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{size_bytes} bytes"


@dataclass(frozen=True)
class Access:
    """Who beside the daemon's own user may open its files: nobody, or the members of group `gid`."""

    gid: int | None = None

    def mode(self) -> int:
        """Permission bits of a file."""
        return 0o600 if self.gid is None else 0o660

    def folder_mode(self) -> int:
        """Permission bits of a folder: the group may reach what lies in it, and add nothing."""
        return 0o700 if self.gid is None else 0o750

    def apply_to_folder(self, fd: int) -> None:
        """Let the group into the open folder `fd`, or keep it out, if the folder looks as we make them.

        Any other mode was the operator's choice, and the folder may serve others, too.
        """
        if stat.S_IMODE(os.fstat(fd).st_mode) in (0o700, 0o750):
            self.apply(fd, self.folder_mode())

    def apply(self, fd: int, mode: int) -> None:
        """Give the open file `fd` this group and exactly `mode`.

        At no instant may anybody open it who may open it neither before nor after: a new group comes
        with the rights of the group taken away first.
        """
        state = os.fstat(fd)
        if self.gid is not None and self.gid != state.st_gid:
            os.fchmod(fd, mode & 0o700)
            os.fchown(fd, -1, self.gid)
        elif stat.S_IMODE(state.st_mode) == mode:
            return
        os.fchmod(fd, mode)
