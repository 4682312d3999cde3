"""The daemon's devices: what other modules may use.

Everything here blocks: call it at start-up or from a worker thread. Nothing is formatted over data unless
the operator said so, and nothing that is in use is touched at all (superblock.py and claims.py have the
rules). `Pool` and `RamFiles` hold and lock what they are made of until they are closed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from .access import Access, DeviceError
from .claims import MIN_DEVICE_BYTES, RESERVED_BYTES, claim_devices
from .direct_reads import cut_off
from .pool import (
    Pool,
    Prepare,
    format_pool,
    look,
    open_formatted,
    pool_id_to_format,
    write_all,
)
from .pool_dir import open_pool_dir
from .ram_files import RamFiles
from .superblock import is_unused

__all__ = [
    "MIN_DEVICE_BYTES",
    "RESERVED_BYTES",
    "Access",
    "DeviceError",
    "Pool",
    "RamFiles",
    "open_devices",
    "open_pool_dir",
    "read_chunk",
    "write_chunk",
]

log = logging.getLogger(__name__)


def open_devices(
    paths: Sequence[str],
    *,
    format: bool = False,
    access: Access,
    prepare: Prepare | None = None,
    dispensable: Collection[str] = (),
) -> Pool:
    """The pool of the given block devices or files, formatted where all of them are blank.

    Args:
        paths: in the pool's order.
        format: start a new, empty pool whatever is on them; a device that is in use is refused even so.
        prepare: see Prepare.
        dispensable: those of them (absolute) without which a pool is opened where they are missing, blank or
            cannot be used.

    Raises:
        DeviceError: they are not one whole pool, hold something else, or one of them cannot be used.
    """
    if not paths:
        raise DeviceError("a pool has at least one device: give --device or --pool-dir")
    places = dict(enumerate(str(Path(path).absolute()) for path in paths))
    left_out = {
        place: path
        for place, path in places.items()
        if path in dispensable and not format and not _is_usable(path)
    }
    with ExitStack() as held:
        claims = claim_devices([path for place, path in places.items() if place not in left_out], held)
        found = [] if format else [look(claim) for claim in claims]
        if left_out and is_unused(found):
            raise DeviceError(
                f"{', '.join(left_out.values())} cannot be left out: the others are no pool yet"
            )
        if is_unused(found):
            return format_pool(claims, pool_id_to_format(found), access, held, prepare)
        return open_formatted(claims, found, access, held, left_out)


def _is_usable(path: str) -> bool:
    try:
        with ExitStack() as tried:
            (claimed,) = claim_devices([path], tried)
            if look(claimed).block is not None:
                return True
        log.error("%s is drained and left out: it is blank", path)
    except DeviceError as error:
        log.error("%s is drained and left out: %s", path, error)
    return False


def read_chunk(path: str, offset: int, length: int) -> bytes:
    """Exactly `length` bytes of a device or a RAM file.

    Raises:
        OSError: the device failed or is gone.
        DeviceError: it ends before that.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        data = os.pread(fd, length, offset)
        while len(data) < length:
            piece = os.pread(fd, length - len(data), offset + len(data))
            if not piece:
                raise cut_off(fd, offset + length)
            data += piece
    finally:
        os.close(fd)
    return data


def write_chunk(path: str, offset: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data` to a device or to a RAM file that exists, durably: what is committed afterwards may
    outlive a power loss, and not all who read it look at checksums.

    Raises:
        OSError: the device failed, is full or is gone.
    """
    fd = os.open(path, os.O_RDWR | os.O_DSYNC)  # which waits for these bytes alone, unlike a sync
    try:
        write_all(fd, offset, data)
    finally:
        os.close(fd)
