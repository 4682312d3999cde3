"""The folder of the socket: who may change it may put a socket of his own there, and be taken for the daemon.

Rules:
1. The folder itself belongs to the daemon's user or root, and nobody else may make files in it, unless its
   sticky bit keeps them from taking away what is not theirs. Anything else is refused.
2. Of the folders above, one in which others may move things is only warned of: it may be there for reasons
   that are not the daemon's, as volumes of containers are.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MADE_UNDER = 0o022  # others may look into folders that are made here: the socket has a mode of its own


def make(folder: Path) -> None:
    """Make the folder and those above it where they are missing, whatever the umask: for the daemon's user
    to change and for others to pass through. OSError: it cannot be made."""
    before = os.umask(_MADE_UNDER)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(before)


def weakness(folder: Path) -> str | None:
    """Why others could replace what lies in the folder, in words; None where they could not.

    Raises:
        OSError: the folder cannot be looked at.
    """
    state = folder.stat()
    if state.st_uid not in (0, os.geteuid()):
        return f"the folder {folder} belongs to user {state.st_uid}, who may replace the socket in it"
    if state.st_mode & _OTHERS_WRITE and not state.st_mode & stat.S_ISVTX:
        whose = "everybody" if state.st_mode & stat.S_IWOTH else f"group {state.st_gid}"
        return f"{whose} may write to the folder {folder} and so may replace the socket in it"
    return None


def warn_of_folders_above(folder: Path) -> None:
    """Log each folder above in which others could move the next one away."""
    for above in _folders_above(folder):
        if reason := weakness(above):
            log.warning("%s, or what leads to it; choose another --socket, or change that folder", reason)


def _folders_above(folder: Path) -> Iterator[Path]:
    """Those of the path as it is written, and of where its links lead."""
    absolute = folder.absolute()
    yield from dict.fromkeys((*absolute.parents, *absolute.resolve().parents))
