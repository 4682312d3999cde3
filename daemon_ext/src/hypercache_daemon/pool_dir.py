"""A pool in files that the daemon makes: --pool-dir.

Rules:
- A file's name holds the first digits of its pool's id: `device-0-1f3a9c04.hc`. Clients of wire 1 keep a
  descriptor per path for ever, so a new pool under an old name would give them the old pool's bytes.
- A file is made under another name (`….hc.new`) and gets its own when it has its full size, so that a
  device file that is there is whole.
- The folder is locked as long as the pool is open.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from .access import Access, DeviceError, in_words, named
from .claims import MIN_DEVICE_BYTES, Claim, claim, lock, open_kept
from .core.extents import ALIGNMENT
from .pool import Pool, Prepare, format_pool, look, open_formatted, pool_id_to_format
from .superblock import START_ANEW, Found, is_unused

_DEVICE_FILE = re.compile(r"device-([0-9]+)-[0-9a-f]{8}\.hc")
_UNFINISHED_FILE = re.compile(r"device-[0-9]+-[0-9a-f]{8}\.hc\.new")


def open_pool_dir(
    pool_dir: Path,
    size_bytes: int,
    count: int,
    *,
    format: bool = False,
    access: Access,
    prepare: Prepare | None = None,
) -> Pool:
    """The pool of `count` device files in `pool_dir`, made and formatted where there is none yet.

    Args:
        size_bytes: of all devices together; each gets an even share in whole pages.
        format: start a new, empty pool whatever is there; a pool that is in use is refused even so.
        prepare: see Prepare.

    Raises:
        DeviceError: the numbers differ from those of the pool that is there, the file system has no room,
            a file is missing or damaged, or the pool is in use.
    """
    share_bytes = _share(size_bytes, count)
    folder = pool_dir.absolute()
    with ExitStack() as held:
        folder_fd = _open_folder(folder, access, held)
        files = held.enter_context(ExitStack())
        claims = _claim_files(folder, files)
        found = [] if format else [_look(claim) for claim in claims]
        if not is_unused(found):
            _refuse_other_numbers(folder, found, share_bytes, count)
            return open_formatted(claims, found, access, held)
        _check_room(folder_fd, folder, share_bytes * count, claims)
        _remove_files(folder)
        files.close()
        pool_id = pool_id_to_format(found)
        claims = _make_files(folder, folder_fd, share_bytes, count, pool_id, files)
        return format_pool(claims, pool_id, access, held, prepare)


def _share(size_bytes: int, count: int) -> int:
    if count < 1:
        raise DeviceError(f"a pool has at least one device, not {count}: give another --devices")
    share_bytes = size_bytes // count // ALIGNMENT * ALIGNMENT
    if share_bytes < MIN_DEVICE_BYTES:
        all_of_it, least = in_words(size_bytes), in_words(MIN_DEVICE_BYTES)
        raise DeviceError(
            f"{all_of_it} is too small for {count} devices, which need {least} each: give a larger"
            " --pool-size or fewer --devices"
        )
    return share_bytes


def _open_folder(folder: Path, access: Access, held: ExitStack) -> int:
    with named(folder, "make the pool folder", "give another --pool-dir"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = open_kept(folder, os.O_RDONLY | os.O_DIRECTORY, held)
    state = os.fstat(fd)
    if state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX:
        raise DeviceError(f"everybody may replace files in the pool folder {folder}: run chmod o-w {folder}")
    lock(fd, folder)
    if state.st_uid == os.geteuid():
        with named(folder, "set the group and mode of", "run hypercached as a member of that group"):
            access.apply_to_folder(fd)
    return fd


def _claim_files(folder: Path, files: ExitStack) -> tuple[Claim, ...]:
    claims = []
    for path in sorted(_matching(folder, _DEVICE_FILE), key=_index):
        state = path.lstat()
        if not stat.S_ISREG(state.st_mode):
            raise DeviceError(f"{path} is no regular file: remove it, or give another --pool-dir")
        claims.append(claim(str(path), state, files))
    return tuple(claims)


def _look(claimed: Claim) -> Found:
    if claimed.whole_bytes < MIN_DEVICE_BYTES:
        raise DeviceError(
            f"{claimed.path} was cut off (it has {in_words(claimed.whole_bytes)}): restore it from a copy,"
            f" or {START_ANEW}"
        )
    return look(claimed)


def _refuse_other_numbers(folder: Path, found: Sequence[Found], share_bytes: int, count: int) -> None:
    block = next(device.block for device in found if device.block)
    if (block.count, block.size_bytes) != (count, share_bytes):
        raise DeviceError(
            f"the pool in {folder} has {block.count} devices of {in_words(block.size_bytes)}, not {count} of"
            f" {in_words(share_bytes)}: start with --pool-size {block.count * block.size_bytes} --devices"
            f" {block.count} to keep it, or {START_ANEW}"
        )


def _check_room(folder_fd: int, folder: Path, needed_bytes: int, replaced: Sequence[Claim]) -> None:
    state = os.fstatvfs(folder_fd)
    free_bytes = state.f_bavail * state.f_frsize
    free_bytes += sum(os.fstat(old.fd).st_blocks * 512 for old in replaced)
    if needed_bytes > free_bytes:
        raise DeviceError(
            f"the pool needs {in_words(needed_bytes)} but the file system of {folder} has"
            f" {in_words(free_bytes)} free: give a smaller --pool-size or another --pool-dir"
        )


def _remove_files(folder: Path) -> None:
    for pattern in (_DEVICE_FILE, _UNFINISHED_FILE):
        for path in _matching(folder, pattern):
            with named(path, "remove", "give another --pool-dir"):
                path.unlink()


def _make_files(
    folder: Path, folder_fd: int, share_bytes: int, count: int, pool_id: str, files: ExitStack
) -> tuple[Claim, ...]:
    paths = [folder / f"device-{index}-{pool_id[:8]}.hc" for index in range(count)]
    try:
        for path in paths:
            _make_file(path, share_bytes)
        os.fsync(folder_fd)
    except OSError as error:
        _remove_files(folder)
        raise DeviceError(
            f"cannot make {count} device files of {in_words(share_bytes)} in {folder}: {error.strerror}: give"
            " a smaller --pool-size or another --pool-dir"
        ) from error
    return tuple(claim(str(path), path.lstat(), files) for path in paths)


def _make_file(path: Path, size_bytes: int) -> None:
    unfinished = path.with_name(f"{path.name}.new")
    fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)  # a umask may have taken our own rights
        os.posix_fallocate(fd, 0, size_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)
    unfinished.rename(path)


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)]


def _index(path: Path) -> tuple[int, str]:
    number = path.name.split("-")[1]
    return int(number), path.name
