"""Taking hold of the devices of a pool, so that nobody else writes to them while the daemon runs.

Rules:
- What something else uses (a mount, swap, dm, md, a loop device, another daemon) is refused always: no
  option overrides that.
- A block device is opened exclusively and stays open: the kernel then refuses mounts, swap and md on it,
  on its disk and on its partitions. Plain opens, which the clients make, are not disturbed.
- A file is locked with flock, and stays locked as long as it is open.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hypercache_protocol.device_paths import may_be_a_link
from hypercache_protocol.messages import DeviceInfo

from .access import Access, DeviceError, in_words, named
from .block_info import Host, number_of
from .core.extents import ALIGNMENT

RESERVED_BYTES = 1 << 20
"""At the front of each device: the superblock, and room for it to grow."""

MIN_DEVICE_BYTES = RESERVED_BYTES + (16 << 20)

HOST = Host()

Node = tuple[object, ...]


@dataclass(frozen=True)
class Claim:
    """One device in our hands: open as `fd`, nobody else's. `number` is None where it is a file."""

    path: str
    fd: int
    whole_bytes: int
    number: str | None

    @property
    def size_bytes(self) -> int:
        """The end of what can be used: whole pages."""
        return self.whole_bytes // ALIGNMENT * ALIGNMENT

    def info(self) -> DeviceInfo:
        """The facts that `get_devices` tells."""
        if self.number is not None:
            return HOST.describe_block(self.path, self.number, self.whole_bytes)
        return HOST.describe_file(self.path, number_of(os.fstat(self.fd).st_dev), self.whole_bytes)

    def partitions(self) -> str:
        """The names of the partitions that the kernel sees on it, or ""."""
        return ", ".join(HOST.partitions(self.number).values()) if self.number else ""


def claim_devices(paths: Sequence[str], held: ExitStack) -> tuple[Claim, ...]:
    """Take hold of the block devices or files that the operator gave; `held` lets go of them.

    Raises:
        DeviceError: one is missing, given twice, too small, a link outside of /dev, or used by something
            else.
    """
    states = [(path, _state(path)) for path in paths]
    _refuse_overlaps(states)
    for path, _ in states:
        _refuse_link(path)
    claims = tuple(claim(path, state, held) for path, state in states)
    for claimed in claims:
        _refuse_small(claimed)
    return claims


def claim(path: str, state: os.stat_result, held: ExitStack) -> Claim:
    """Take hold of one block device or file, whose `state` was read before; `held` lets go of it.

    Raises:
        DeviceError: something else uses it, it cannot be opened, or it is no device for a pool.
    """
    is_block = stat.S_ISBLK(state.st_mode)
    number = number_of(state.st_rdev) if is_block else None
    use = HOST.use_of_file(state) if number is None else HOST.use_of_block(number)
    if use is not None:
        raise DeviceError(f"{path} cannot be used, since {use}: free it, or give another device")
    fd = open_kept(path, os.O_RDWR | (os.O_EXCL if is_block else 0), held)
    if node_of(os.fstat(fd)) != node_of(state):
        raise DeviceError(f"{path} became another device while it was opened: start again")
    if number is None:
        lock(fd, path)
    else:
        _refuse_odd_block(path, number)
    return Claim(path, fd, os.lseek(fd, 0, os.SEEK_END), number)


def node_of(state: os.stat_result) -> Node:
    """What a path leads to, whatever other paths lead there."""
    if stat.S_ISBLK(state.st_mode):
        return ("block", number_of(state.st_rdev))
    # With the type: a number that a removed file leaves behind is soon another one's.
    return (stat.S_IFMT(state.st_mode), state.st_dev, state.st_ino)


def open_kept(path: str | Path, flags: int, held: ExitStack) -> int:
    """Open a device, a file or a folder; `held` closes it. DeviceError where it cannot be opened."""
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise DeviceError(_why_not_open(path, error)) from error
    held.callback(os.close, fd)
    return fd


def lock(fd: int, path: str | Path) -> None:
    """Lock an open file or folder against every other daemon, for as long as `fd` is open. DeviceError where
    another one has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DeviceError(
            f"{path} is in use by another hypercached: stop that one first, or give another place"
        ) from None


def give_access(claimed: Claim, access: Access) -> None:
    """Let the clients in, and nobody else.

    A file gets exactly what `access` says. A block device's node belongs to the administrator: it is
    changed only where a group is configured, and refused where everybody may open it.

    Raises:
        DeviceError: everybody may open it, or its group cannot be set.
    """
    state = os.fstat(claimed.fd)
    is_file = claimed.number is None
    if (is_file or access.gid is not None) and os.geteuid() in (0, state.st_uid):
        with named(claimed.path, "set the group and mode of", "run hypercached as a member of that group"):
            access.apply(claimed.fd, access.mode())
    elif state.st_mode & 0o006:
        raise DeviceError(f"everybody on this host may open {claimed.path}: run chmod o= {claimed.path}")


def _state(path: str) -> os.stat_result:
    try:
        state = Path(path).stat()
    except FileNotFoundError:
        raise DeviceError(
            f"{path} does not exist: give a block device, or a file that exists (--pool-dir makes its own); "
            "to start a pool without one of its devices, name it in the file drain beside the catalog"
        ) from None
    except OSError as error:
        raise DeviceError(_why_not_open(path, error)) from error
    if not (stat.S_ISBLK(state.st_mode) or stat.S_ISREG(state.st_mode)):
        raise DeviceError(f"{path} is neither a block device nor a regular file: give one of those")
    return state


def _why_not_open(path: str | Path, error: OSError) -> str:
    if error.errno == errno.EBUSY:
        return (
            f"{path} is in use by another program (a hypercached, or a mount that cannot be seen from here):"
            " stop that one first, or give another device"
        )
    return f"cannot open {path}: {error.strerror}: give one that the daemon's user may read and write"


def _refuse_overlaps(states: Sequence[tuple[str, os.stat_result]]) -> None:
    given: dict[Node, str] = {}
    for path, state in states:
        if node_of(state) in given:
            raise DeviceError(f"{path} and {given[node_of(state)]} are the same device: give it once")
        given[node_of(state)] = path
    for path, state in states:
        disk = HOST.disk_of(number_of(state.st_rdev)) if stat.S_ISBLK(state.st_mode) else None
        whole = given.get(("block", disk))
        if whole is not None:
            raise DeviceError(f"{path} is a partition of {whole}, which is given too: give one of the two")


def _refuse_link(path: str) -> None:
    # Connectors don't follow it: whoever may write to its folder could have it lead to any file of theirs.
    if Path(path).is_symlink() and not may_be_a_link(path):
        raise DeviceError(
            f"{path} is a symbolic link, which clients follow only in /dev: give what it leads to,"
            f" {os.path.realpath(path)}"
        )


def _refuse_odd_block(path: str, number: str) -> None:
    if HOST.is_read_only(number):
        raise DeviceError(f"{path} is read-only: run blockdev --setrw {path}, or give another device")
    block_bytes = HOST.logical_block_bytes(number)
    if block_bytes > ALIGNMENT:
        raise DeviceError(
            f"{path} has blocks of {block_bytes} bytes and at most {ALIGNMENT} work: give another device"
        )
    # Clients of wire 1 map what has /shm in its name, and a block device cannot be mapped whole.
    if "/shm" in path or path.endswith(".shm"):
        raise DeviceError(f'{path} has "/shm" in it, which clients take for memory: give another path to it')


def _refuse_small(claimed: Claim) -> None:
    if claimed.whole_bytes < MIN_DEVICE_BYTES:
        has, least = in_words(claimed.whole_bytes), in_words(MIN_DEVICE_BYTES)
        raise DeviceError(f"{claimed.path} is too small, it has {has}: give a device of at least {least}")
