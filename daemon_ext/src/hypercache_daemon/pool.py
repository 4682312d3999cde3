"""From devices in hand to an open pool: read what is on them, check it or format it, let the clients in."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

from hypercache_protocol.messages import DeviceInfo

from .access import Access, DeviceError, named
from .claims import RESERVED_BYTES, Claim, give_access
from .signatures import find_signature
from .superblock import (
    START_ANEW,
    SUPERBLOCK_BYTES,
    Found,
    State,
    Superblock,
    check_pool,
    decode,
    encode,
)

_BLKRRPART = 0x125F  # ioctl: read the partition table again

_NONE: Mapping[int, str] = {}

Prepare = Callable[[str], None]
"""Called with the id of a pool that is being formatted, before the pool counts as formatted: what it made
durable (a catalog) is there whenever the pool is. If it raises or is killed, the format is unfinished, and
the next start calls it again with the same id."""


@dataclass(frozen=True)
class Device:
    """One device of the pool: clients open `path` and may use bytes RESERVED_BYTES to `size_bytes`.

    One that is `missing` has no size.
    """

    index: int
    path: str
    size_bytes: int
    info: DeviceInfo
    missing: bool = False
    fd: int | None = None
    """Open as long as the pool is."""


@dataclass(frozen=True)
class Pool:
    """Devices that are ours until `close`; `formatted` says that this start formatted them."""

    pool_id: str
    devices: tuple[Device, ...]
    formatted: bool
    held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    def close(self) -> None:
        """Let go of the devices."""
        self.held.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pool_id_to_format(found: Sequence[Found]) -> str:
    """The id for a pool that is to be made of these: of the format that was killed here, or a new one."""
    unfinished = {device.block.pool_id for device in found if device.block}
    return unfinished.pop() if len(unfinished) == 1 else uuid.uuid4().hex


def look(claim: Claim) -> Found:
    """What lies on a device.

    Raises:
        DeviceError: something that is not ours, or that is ours and damaged.
    """
    partitions = claim.partitions()
    if partitions:
        raise DeviceError(f"{claim.path} has partitions ({partitions}): give one of those, or {START_ANEW}")
    with named(claim.path, "read", "give another device"):
        front = os.pread(claim.fd, RESERVED_BYTES, 0)
        back = os.pread(claim.fd, RESERVED_BYTES, claim.whole_bytes - RESERVED_BYTES)
    block = decode(front[:SUPERBLOCK_BYTES], claim.path)
    if block is None:
        _refuse_data(claim, front, back)
    return Found(claim.path, claim.size_bytes, block)


def _refuse_data(claim: Claim, front: bytes, back: bytes) -> None:
    kind = find_signature(front, back, claim.whole_bytes)
    if kind is not None or front + back != bytes(2 * RESERVED_BYTES):
        what = f"something already ({kind})" if kind else "data of a kind unknown here"
        raise DeviceError(f"{claim.path} holds {what}: give another device, or {START_ANEW} and lose that")


def open_formatted(
    claims: Sequence[Claim],
    found: Sequence[Found],
    access: Access,
    held: ExitStack,
    left_out: Mapping[int, str] = _NONE,
) -> Pool:
    """The pool that these devices are, after a check that they are one; it owns what `held` holds.

    Args:
        left_out: the paths of those of its devices that are not among them, by their places.

    Raises:
        DeviceError: they are not one whole pool, or its clients cannot be let in.
    """
    check_pool(found, frozenset(left_out))
    pool_ids = [device.block.pool_id for device in found if device.block]
    opened = _opened(claims, pool_ids[0], access, held, formatted=False)
    if not left_out:
        return opened
    there = iter(opened.devices)
    return replace(
        opened,
        devices=tuple(
            _absent(index, left_out[index]) if index in left_out else replace(next(there), index=index)
            for index in range(len(claims) + len(left_out))
        ),
    )


def _absent(index: int, path: str) -> Device:
    facts = dict.fromkeys(("is_nvme", "is_virtual", "is_partition", "is_rotational"), False)
    return Device(index, path, 0, DeviceInfo(path=path, size_bytes=0, **facts), missing=True)


def format_pool(
    claims: Sequence[Claim], pool_id: str, access: Access, held: ExitStack, prepare: Prepare | None
) -> Pool:
    """Make a new, empty pool of these devices, whatever is on them; it owns what `held` holds.

    Raises:
        DeviceError: one of them cannot be written, or the clients cannot be let in.
        Exception: whatever `prepare` raises; the format is unfinished then.
    """
    blocks = [
        Superblock(pool_id, uuid.uuid4().hex, index, len(claims), claim.size_bytes, State.FORMATTING)
        for index, claim in enumerate(claims)
    ]
    for claim, block in zip(claims, blocks, strict=True):
        _wipe(claim, block)
    if prepare is not None:
        prepare(pool_id)
    for claim, block in zip(claims, blocks, strict=True):
        with named(claim.path, "format", "give another device"):
            write_all(claim.fd, 0, encode(replace(block, state=State.READY)))
            os.fsync(claim.fd)
    return _opened(claims, pool_id, access, held, formatted=True)


def _wipe(claim: Claim, block: Superblock) -> None:
    """Put a superblock in front and zeros where any other system would look for its own mark."""
    with named(claim.path, "format", "give another device"):
        write_all(claim.fd, 0, encode(block).ljust(RESERVED_BYTES, b"\0"))
        write_all(claim.fd, claim.whole_bytes - RESERVED_BYTES, bytes(RESERVED_BYTES))
        os.fsync(claim.fd)
    if claim.partitions():
        _forget_partitions(claim)


def _forget_partitions(claim: Claim) -> None:
    with suppress(OSError):  # some drivers refuse the request; what counts is whether they are gone
        fcntl.ioctl(claim.fd, _BLKRRPART)
    left = claim.partitions()
    if left:
        raise DeviceError(f"the kernel still shows {left} on {claim.path}: run partx -d {claim.path}")


def _opened(claims: Sequence[Claim], pool_id: str, access: Access, held: ExitStack, formatted: bool) -> Pool:
    for claim in claims:
        give_access(claim, access)
    devices = tuple(
        Device(index, claim.path, claim.size_bytes, claim.info(), fd=claim.fd)
        for index, claim in enumerate(claims)
    )
    return Pool(pool_id, devices, formatted, held.pop_all())


def write_all(fd: int, offset: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data` at `offset`; the kernel may take it in pieces."""
    left = memoryview(data).cast("B")
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written
