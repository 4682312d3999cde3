"""Which names of devices may be symbolic links: a daemon is given none but these, and a client follows none
but these."""

from __future__ import annotations

from pathlib import PurePosixPath

_DEV = PurePosixPath("/dev")
_SHM = _DEV / "shm"


def may_be_a_link(path: str) -> bool:
    """Whether what lies at this path may be a link to a block device: in /dev, where only root makes names
    (udev's of disks, LVM's of volumes), but for /dev/shm, where everybody does."""
    name = PurePosixPath(path)
    return name.is_relative_to(_DEV) and not name.is_relative_to(_SHM) and ".." not in name.parts
