"""The files and block devices that layouts name: opened with care, kept open, dropped when in doubt.

Rules:
1. A path comes from the daemon. It is opened only as an absolute path, creating nothing, and used only if it
   turns out to be a regular file or a block device. A link at its end is followed only in /dev, where root
   alone makes them, and only to a block device.
2. Descriptors of devices are kept; those of RAM files are not, since each chunk's file vanishes with it.
3. A descriptor is closed when its last user lets go of it, never under a running transfer: its number
   could by then belong to another file.
4. What was opened before the daemon changed (`forget_all`) is not kept after it.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from hypercache_protocol import Tier
from hypercache_protocol.device_paths import may_be_a_link

from . import direct_io
from .config import DirectIo
from .direct_io import ALIGNMENT, Part
from .outcomes import Counters, ThrottledLog

# O_NONBLOCK: opening a named pipe by mistake must not wait for its other end. Files ignore it.
_SAFE = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
COUNTS = "transfers"
"""The group of counters for how chunks were moved."""


class DeviceRefused(OSError):
    """A path in a layout is nothing that this connector reads or writes."""


class OpenFile:
    """An open descriptor, closed with its last reference."""

    __slots__ = ("fd",)

    def __init__(self, path: str, flags: int) -> None:
        self.fd = -1
        self.fd = os.open(path, flags | _SAFE)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Device:
    """One open device: through the page cache, and past it where that is wanted and possible."""

    plain: OpenFile
    direct: OpenFile | None


class Devices:
    """Reads and writes chunks by path, over descriptors that it keeps."""

    def __init__(self, mode: DirectIo, counters: Counters, log: ThrottledLog) -> None:
        self._mode = mode
        self._counters = counters
        self._log = log
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, bool], Device] = {}
        self._refusing_direct: set[str] = set()
        self._epoch = 0

    def read(self, path: str, tier: Tier, part: Part, offset: int) -> int:
        """Fill `part` from `offset` of `path`. Returns the bytes read, fewer where the file ends early.

        Raises:
            OSError: it cannot be opened or read.
        """
        if tier is Tier.RAM:
            file = _open_checked(path, os.O_RDONLY)  # the name keeps it open until the end
            return direct_io.read(file.fd, part, offset)
        return self._move(path, part, offset, writable=False)

    def write(self, path: str, tier: Tier, part: Part, offset: int) -> int:
        """Write `part` at `offset` of `path`, which must exist. Returns the bytes written.

        Raises:
            OSError: it cannot be opened or written.
        """
        if tier is Tier.RAM:
            file = _open_checked(path, os.O_WRONLY)
            return direct_io.write(file.fd, part, offset)
        return self._move(path, part, offset, writable=True)

    def needs_alignment(self, path: str) -> bool:
        """Whether only page-aligned memory moves from and to the device `path` without a copy. That may be
        said of one that was not opened yet, too."""
        device = self._kept.get((path, False)) or self._kept.get((path, True))
        return device is None or device.direct is not None

    def read_run(self, path: str, parts: Sequence[Part], offset: int) -> bool:
        """Fill all parts, of whole blocks, with what lies in a row from `offset` of the device `path` on.
        Where it could not be done in one call this is False, and nothing is known of any part."""
        return self._move_run(os.preadv, path, parts, offset, writable=False)

    def write_run(self, path: str, parts: Sequence[Part], offset: int) -> bool:
        """Write all parts, of whole blocks, in a row from `offset` of the device `path`. False as above."""
        return self._move_run(os.pwritev, path, parts, offset, writable=True)

    def forget(self, path: str) -> None:
        """Open `path` anew at its next use: it may be another file by now."""
        with self._lock:
            self._epoch += 1
            self._kept.pop((path, False), None)
            self._kept.pop((path, True), None)
            self._refusing_direct.discard(path)

    def forget_all(self) -> None:
        """Open everything anew: another daemon may have other files under the same names."""
        with self._lock:
            self._epoch += 1
            self._kept.clear()
            self._refusing_direct.clear()

    def refusing_direct(self) -> list[str]:
        """The devices that were to be used directly and whose file system refused."""
        with self._lock:
            return sorted(self._refusing_direct)

    # -- one transfer ------------------------------------------------------------------------------------

    def _move(self, path: str, part: Part, offset: int, *, writable: bool) -> int:
        # Read without the lock: one dictionary look-up is atomic.
        device = self._kept.get((path, writable)) or self._open(path, writable)
        if device.direct is not None and offset % ALIGNMENT == 0:
            moved = self._move_directly(device.direct, path, part, offset, writable)
            if moved is not None:
                return moved
        self._count_buffered(path, device, 1)
        return (direct_io.write if writable else direct_io.read)(device.plain.fd, part, offset)

    def _move_run(
        self, move: direct_io.Vectored, path: str, parts: Sequence[Part], offset: int, *, writable: bool
    ) -> bool:
        views = [part.view for part in parts]
        try:
            device = self._kept.get((path, writable)) or self._open(path, writable)
            moved = move((device.direct or device.plain).fd, views, offset)
        except OSError:  # the chunks are moved one by one now, and what ails them comes out there
            return False
        if moved != sum(map(len, views)):
            return False
        if device.direct is not None:
            self._counters.add(COUNTS, "direct", len(parts))
        else:
            self._count_buffered(path, device, len(parts))
        return True

    def _count_buffered(self, path: str, device: Device, chunk_count: int) -> None:
        if device.direct is not None or path in self._refusing_direct:
            self._counters.add(COUNTS, "fallback", chunk_count)
        self._counters.add(COUNTS, "buffered", chunk_count)

    def _move_directly(
        self, file: OpenFile, path: str, part: Part, offset: int, writable: bool
    ) -> int | None:
        """The bytes moved, or None where direct transfers are refused here."""
        try:
            moved = (direct_io.write_direct if writable else direct_io.read_direct)(file.fd, part, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._note_refusal(path)
            return None
        self._counters.add(COUNTS, "direct" if direct_io.is_aligned(part) else "bounced")
        return moved

    # -- descriptors -------------------------------------------------------------------------------------

    def _open(self, path: str, writable: bool) -> Device:
        epoch = self._epoch
        flags = os.O_RDWR if writable else os.O_RDONLY
        plain = _open_checked(path, flags)
        device = Device(plain, self._open_directly(path, flags) if self._wants_direct(plain) else None)
        with self._lock:
            # Opened before a `forget` and finished after it, it may be the very file to be forgotten.
            return self._kept.setdefault((path, writable), device) if epoch == self._epoch else device

    def _wants_direct(self, file: OpenFile) -> bool:
        if self._mode is DirectIo.AUTO:
            return stat.S_ISBLK(os.fstat(file.fd).st_mode)
        return self._mode is DirectIo.ON

    def _open_directly(self, path: str, flags: int) -> OpenFile | None:
        try:
            return _open_checked(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._note_refusal(path)
            return None

    def _note_refusal(self, path: str) -> None:
        with self._lock:
            self._refusing_direct.add(path)
            for key in ((path, False), (path, True)):
                if key in self._kept:
                    self._kept[key] = Device(self._kept[key].plain, None)
        self._log.note(f"direct {path}", "%s refuses O_DIRECT; its transfers go through the page cache", path)


def check_access(path: str) -> None:
    """See that `path` can be opened for loads and stores.

    Raises:
        OSError: it can't; PermissionError where this process may not.
    """
    _open_checked(path, os.O_RDWR)


def _open_checked(path: str, flags: int) -> OpenFile:
    if not PurePosixPath(path).is_absolute():
        raise DeviceRefused(errno.EINVAL, "a layout names a device without an absolute path", path)
    follows = may_be_a_link(path)
    try:
        opened = OpenFile(path, flags if follows else flags | os.O_NOFOLLOW)
    except ValueError as error:  # a NUL, or what no file name can hold
        raise DeviceRefused(errno.ENOENT, f"a layout names no possible path ({error})", path) from None
    mode = os.fstat(opened.fd).st_mode
    if not (stat.S_ISBLK(mode) or (stat.S_ISREG(mode) and not follows)):
        raise DeviceRefused(errno.ENODEV, "a layout names neither a regular file nor a block device", path)
    return opened
