"""Does a device still answer, and is it the one that the daemon began with? Blocks: for worker threads."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from .access import DeviceError, named
from .claims import Node, node_of
from .core.extents import ALIGNMENT
from .direct_reads import read_direct
from .superblock import SUPERBLOCK_BYTES, Superblock, decode

_NOT_ITS_FAULT = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EINTR,
        errno.EAGAIN,
        errno.EACCES,
        errno.EPERM,
        errno.ENOSPC,  # of the file system below a device file
        errno.EDQUOT,
    }
)


@dataclass(frozen=True)
class Member:
    """A device of the pool as it was when the daemon took hold of it."""

    path: str
    superblock: Superblock
    node: Node


def member_at(path: str) -> Member:
    """What is at `path` now, which the pool was just opened with.

    Raises:
        DeviceError: it failed since then.
    """
    with named(path, "read", "give another device"):
        superblock = _superblock_at(path)
        assert superblock is not None, "the pool was opened with it"
        return Member(path, superblock, node_of(Path(path).stat()))


def is_its_fault(error: Exception) -> bool:
    """False where an error says something of the daemon or the machine, and nothing of the device."""
    if isinstance(error, OSError):
        return error.errno not in _NOT_ITS_FAULT
    return isinstance(error, DeviceError)


def check(member: Member) -> None:
    """Read the first and the last page of a device, which has to be the very one and no copy of it.

    Raises:
        OSError, DeviceError: it is not in order; or, where `is_its_fault` says so, that cannot be told.
    """
    is_whole = _superblock_at(member.path) == member.superblock
    is_copy = node_of(Path(member.path).stat()) != member.node
    if is_copy:  # put there between the two looks, maybe
        is_whole = _superblock_at(member.path) == member.superblock
    if not is_whole:
        raise DeviceError("another device, or one that was formatted anew, is in its place")
    if is_copy:
        # Clients may have the one before open still and would go on writing to it; a restart ends that.
        raise DeviceError("another node or file with the same content is in its place, which takes a restart")
    read_direct(member.path, member.superblock.size_bytes - ALIGNMENT, ALIGNMENT)


def in_short(error: Exception) -> str:
    """An error of I/O in words."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _superblock_at(path: str) -> Superblock | None:
    return decode(read_direct(path, 0, SUPERBLOCK_BYTES), path)
