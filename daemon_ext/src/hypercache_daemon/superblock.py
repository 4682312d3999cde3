"""The 4,096 bytes at the front of every device that say which pool it belongs to.

Rules:
- Magic at 0, version at 8, CRC-32 in the last four bytes: these three places never move, in any version.
- A format writes FORMATTING to every device, makes that durable, and only then writes READY. No pool is
  served before that, so a set that holds a FORMATTING device never held an object and may be formatted
  again without being asked; that is how a format that was killed goes on.
- Anything else that is not one whole pool, in order, is refused: nothing is guessed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from hypercache_protocol.checksum import crc32

from .access import DeviceError, in_words

SUPERBLOCK_BYTES = 4096
SUPERBLOCK_VERSION = 1
MAGIC = b"\x89HCPOOL\n"

# magic, version, state, pool id, device id, index, count, size in bytes; little-endian, no padding
_FIELDS = struct.Struct("<8sII16s16sIIQ")
_VERSION = struct.Struct("<I")
_CRC = struct.Struct("<I")
_CRC_AT = SUPERBLOCK_BYTES - _CRC.size

START_ANEW = "pass --format to start a new, empty pool"


class State(IntEnum):
    """How far the format came."""

    FORMATTING = 1
    READY = 2


@dataclass(frozen=True)
class Superblock:
    """One device's place in its pool. `pool_id` and `device_id` are UUIDs in 32 hex digits."""

    pool_id: str
    device_id: str
    index: int
    count: int
    size_bytes: int
    state: State = State.READY


@dataclass(frozen=True)
class Found:
    """What lies at the front of one device: its superblock, or None where the device is blank."""

    path: str
    size_bytes: int
    block: Superblock | None


def encode(block: Superblock) -> bytes:
    """The superblock as it lies on the device: 4,096 bytes."""
    pool, device = bytes.fromhex(block.pool_id), bytes.fromhex(block.device_id)
    numbers = (block.index, block.count, block.size_bytes)
    fields = _FIELDS.pack(MAGIC, SUPERBLOCK_VERSION, block.state, pool, device, *numbers)
    body = fields.ljust(_CRC_AT, b"\0")
    return body + _CRC.pack(crc32(body))


def decode(data: bytes, path: str) -> Superblock | None:
    """The superblock that `data` (4,096 bytes) holds, or None where it is none of ours.

    Raises:
        DeviceError: it is ours, but damaged, or of a version that this daemon does not know.
    """
    if not data.startswith(MAGIC):
        return None
    (version,) = _VERSION.unpack_from(data, len(MAGIC))
    if version > SUPERBLOCK_VERSION:
        raise DeviceError(
            f"{path} was formatted by a newer hypercached (superblock version {version}, and this one knows"
            f" {SUPERBLOCK_VERSION}): start that one, or {START_ANEW}"
        )
    if _CRC.unpack_from(data, _CRC_AT) != (crc32(data[:_CRC_AT]),):
        raise DeviceError(
            f"the superblock of {path} is damaged (its checksum is wrong): restore the device from a copy,"
            f" or {START_ANEW}"
        )
    return _unpack(data, path)


def _unpack(data: bytes, path: str) -> Superblock:
    _, version, state, pool, device, index, count, size_bytes = _FIELDS.unpack_from(data)
    if version != SUPERBLOCK_VERSION or state not in State.__members__.values():
        raise DeviceError(
            f"the superblock of {path} makes no sense (version {version}, state {state}): restore the device"
            f" from a copy, or {START_ANEW}"
        )
    return Superblock(pool.hex(), device.hex(), index, count, size_bytes, State(state))


def is_unused(found: Sequence[Found]) -> bool:
    """Do these devices hold nothing yet: all blank, or all in the middle of one format?"""
    blocks = [device.block for device in found]
    states = {block.state if block else None for block in blocks}
    if State.READY not in states:
        return True
    one_pool = len({block.pool_id for block in blocks if block}) == 1
    return State.FORMATTING in states and None not in states and one_pool


def check_pool(found: Sequence[Found], left_out: Places = frozenset()) -> None:
    """Make sure that these devices are one whole pool in its order.

    Args:
        left_out: the places, counted from 0, of devices that are not among `found` and need not be.

    Raises:
        DeviceError: names the device that does not fit, and the way out.
    """
    members = [(device, _block_of(device, found)) for device in found]
    for check in _CHECKS:
        for problem in check(members, left_out):
            raise DeviceError(problem)


_Members = Sequence[tuple[Found, Superblock]]
Places = frozenset[int]


def _block_of(device: Found, found: Sequence[Found]) -> Superblock:
    if device.block is not None:
        return device.block
    other = next(other for other in found if other.block)
    raise DeviceError(
        f"{device.path} is blank, while {other.path} belongs to a pool: give the device that belongs there,"
        f" or {START_ANEW}"
    )


def _strangers(members: _Members, _: Places) -> Iterable[str]:
    first, expected = members[0]
    for device, block in members:
        if block.pool_id != expected.pool_id:
            yield (
                f"{device.path} belongs to pool {block.pool_id}, but {first.path} to pool {expected.pool_id}:"
                f" give the devices of one pool, or {START_ANEW}"
            )


def _copies(members: _Members, _: Places) -> Iterable[str]:
    seen: dict[int, str] = {}
    for device, block in members:
        if block.index in seen:
            yield (
                f"{device.path} is a copy of {seen[block.index]} (both say device {block.index} of the pool):"
                f" leave one of them out, or {START_ANEW}"
            )
        seen[block.index] = device.path


def _missing(members: _Members, left_out: Places) -> Iterable[str]:
    (first, block) = members[0]
    absent = sorted(set(range(block.count)) - {member.index for _, member in members} - left_out)
    if absent:
        numbers = ", ".join(map(str, absent))
        yield (
            f"the pool of {first.path} has {block.count} devices and number {numbers} of it is missing"
            f" (counted from 0): bring it back, or {START_ANEW}"
        )


def _swapped(members: _Members, left_out: Places) -> Iterable[str]:
    places = [place for place in range(len(members) + len(left_out)) if place not in left_out]
    for place, (device, block) in zip(places, members, strict=True):
        if block.index != place:
            order = ", ".join(path for _, path in sorted((b.index, d.path) for d, b in members))
            yield (
                f"{device.path} is device {block.index} of its pool but was given in place {place}: give them"
                f" in this order: {order}"
            )


def _resized(members: _Members, _: Places) -> Iterable[str]:
    for device, block in members:
        if block.size_bytes != device.size_bytes:
            was, now = in_words(block.size_bytes), in_words(device.size_bytes)
            yield (
                f"{device.path} has {now} but had {was} ({block.size_bytes} bytes) when it was formatted:"
                f" give it that size again, or {START_ANEW}"
            )


# In the order in which they explain most: a device of another pool is missing, too.
_CHECKS: tuple[Callable[[_Members, Places], Iterable[str]], ...] = (
    _strangers,
    _copies,
    _missing,
    _swapped,
    _resized,
)
