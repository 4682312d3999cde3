"""Objects as files under one local folder (or a mounted share).

Rules:

- Every descriptor is checked after it was opened: its real path (/proc/self/fd) must lie under the root's. So
  a symbolic link that stays inside works, one that leads out is refused, and swapping it meanwhile gains
  nothing. A file is opened without side effects (O_PATH) before it is known to be a regular file inside.
- A new object is written under a temporary name in its own folder (another folder may be another mount),
  synced, renamed, and the folder synced: readers see the old object or the new one, and what was confirmed
  survives a power loss. A crash may leave a `%tmp-…` file behind; nothing reads those.
- Nobody but the owner may read an object, and the group where the root's own mode lets the group.
- A local call cannot be interrupted: on a share whose server is gone it hangs as long as the mount does.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress

from .backend_names import TEMPORARY_PREFIX, StoreError

PIECE_BYTES = 4 * 1024 * 1024

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_SEGMENT_BYTES = 255
_MAX_PATH_BYTES = 4095

_log = logging.getLogger(__name__)


class LocalStore:
    """The objects under `folder`, an absolute path that must exist when it is used."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def fits(self, path: str) -> bool:
        encoded = path.encode()
        return len(encoded) <= _MAX_PATH_BYTES and all(
            len(segment) <= _MAX_SEGMENT_BYTES for segment in encoded.split(b"/")
        )

    def size_bytes(self, path: str) -> int | None:
        found = self._look(path)
        if found is None:
            return None
        with found:
            return os.fstat(found.number).st_size

    def download(self, path: str) -> tuple[int, Iterator[bytes]]:
        found = self._look(path)
        if found is None:
            raise FileNotFoundError
        with found:
            file = _Descriptor(os.open(f"/proc/self/fd/{found.number}", os.O_RDONLY | os.O_CLOEXEC))
        before = os.fstat(file.number)
        return before.st_size, _pieces(file, before)

    def upload(self, path: str, pieces: Iterable[bytes], _size_bytes: int) -> None:
        *folders, name = path.encode().split(b"/")
        with self._open_root() as root:
            mode = stat.S_IMODE(os.fstat(root.number).st_mode) & 0o070 | 0o700
            with self._make_folders(root, folders, mode) as folder:
                _write_whole(folder, name, pieces, mode & 0o660)

    def _open_root(self) -> _Descriptor:
        try:
            return _Descriptor(os.open(self._folder.encode(), _FOLDER))
        except FileNotFoundError:
            raise StoreError(f"the folder {self._folder} does not exist; create or mount it") from None

    def _look(self, path: str) -> _Descriptor | None:
        """A descriptor of the regular file at `path`; None where there is none."""
        with self._open_root() as root:
            try:
                found = _Descriptor(os.open(path.encode(), _LOOK, dir_fd=root.number))
            except (FileNotFoundError, NotADirectoryError):
                return None
            _check_inside(root, found)
            return found if stat.S_ISREG(os.fstat(found.number).st_mode) else None

    def _make_folders(self, root: _Descriptor, segments: list[bytes], mode: int) -> _Descriptor:
        current = _Descriptor(os.dup(root.number))
        for segment in segments:
            with current:
                deeper = _enter(current, segment, mode)
            _check_inside(root, deeper)
            current = deeper
        return current


class _Descriptor:
    """Owns a file descriptor; closed by `with`, or when nothing refers to it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> _Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def real_path(self) -> bytes:
        return os.readlink(b"/proc/self/fd/%d" % self.number)  # noqa: PTH115 - names are bytes here


def _check_inside(root: _Descriptor, found: _Descriptor) -> None:
    allowed = root.real_path().rstrip(b"/") + b"/"
    if not (found.real_path() + b"/").startswith(allowed):
        raise StoreError("a symbolic link leads out of the allowed folder")


def _enter(parent: _Descriptor, segment: bytes, mode: int) -> _Descriptor:
    with suppress(FileNotFoundError):
        return _Descriptor(os.open(segment, _FOLDER, dir_fd=parent.number))
    with suppress(FileExistsError):  # another upload was faster
        os.mkdir(segment, mode, dir_fd=parent.number)
    os.fsync(parent.number)
    return _Descriptor(os.open(segment, _FOLDER, dir_fd=parent.number))


def _write_whole(folder: _Descriptor, name: bytes, pieces: Iterable[bytes], mode: int) -> None:
    temporary = (TEMPORARY_PREFIX + secrets.token_hex(8)).encode()
    file = _Descriptor(os.open(temporary, _CREATE, mode, dir_fd=folder.number))
    try:
        with file:
            for piece in pieces:
                _write_all(file.number, piece)
            os.fsync(file.number)
        os.rename(temporary, name, src_dir_fd=folder.number, dst_dir_fd=folder.number)
    except BaseException:
        _remove(temporary, folder)
        raise
    os.fsync(folder.number)


def _write_all(number: int, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(number, rest) :]


def _remove(temporary: bytes, folder: _Descriptor) -> None:
    try:
        os.unlink(temporary, dir_fd=folder.number)
    except OSError as error:  # the upload's own error is the one to report
        _log.warning("the temporary file %s stays behind: %s", os.fsdecode(temporary), error.strerror)


def _pieces(file: _Descriptor, before: os.stat_result) -> Iterator[bytes]:
    offset = 0
    with file:
        while offset < before.st_size:
            piece = os.pread(file.number, min(PIECE_BYTES, before.st_size - offset), offset)
            offset += len(piece)
            # The last piece is held back until the file is known to be what it was.
            if not piece or (offset == before.st_size and _changed(before, os.fstat(file.number))):
                raise StoreError("it changed while it was read")
            yield piece


def _changed(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
