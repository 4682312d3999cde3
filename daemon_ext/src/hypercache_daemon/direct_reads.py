"""Bytes from a device itself, where it lets us.

A buffered read is answered from the kernel's memory, which says nothing of the device, and pushes out what
others want to find there. So the page cache is passed by (O_DIRECT), except on file systems without that.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from .access import DeviceError

_PAGE = mmap.PAGESIZE
_SECTOR = 512  # the least that a read past the page cache moves


def read_direct(path: str, offset: int, length: int) -> bytes:
    """Exactly `length` bytes (at least 1) at `offset`, a multiple of 4,096. Blocks, so call it in a worker
    thread.

    Raises:
        OSError: the device failed or is gone.
        DeviceError: it ends before that.
    """
    fd = _opened(path)
    try:
        with mmap.mmap(-1, -(-length // _PAGE) * _PAGE) as buffer, memoryview(buffer) as view:
            got = 0
            while got < length:
                with view[got:] as rest:
                    count = os.preadv(fd, [rest], offset + got)
                got += count
                if got < length and (count == 0 or got % _SECTOR):
                    raise cut_off(fd, offset + length)
            return bytes(view[:length])
    finally:
        os.close(fd)


def cut_off(fd: int, end: int) -> DeviceError:
    """Says that what is open as `fd` ends before byte `end`; it is named as the kernel knows it, for it may
    have been opened by its descriptor."""
    return DeviceError(f"{Path(f'/proc/self/fd/{fd}').readlink()} was cut off: it ends before byte {end}")


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which says that this file system has no such reads
            raise
        return os.open(path, os.O_RDONLY)
