"""What the catalog is told, and how objects and holds become rows and come back.

Every row carries a CRC-32 of its values: SQLite notices a torn page, but not a changed byte in a blob.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from hypercache_protocol.fields import Tier
from hypercache_protocol.states import SyncStatus

from .core.allocator import Extent
from .core.objects import StoredObject


@dataclass(frozen=True, slots=True)
class Put:
    """Write an object, over the one with its uri if there is one."""

    stored: StoredObject
    casual: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Forget an object."""

    uri: str
    casual: bool = False


@dataclass(frozen=True, slots=True)
class AddHold:
    """Blocks without an owner that must not be handed out. A power loss ends their writers and readers
    too, so this needs to survive no more than the daemon's own death: it is casual. A hold may come in
    parts, as a streamed write does."""

    hold_id: str
    tier: Tier
    extents: tuple[Extent, ...]
    writer: bool
    part: int = 0
    casual: bool = True


@dataclass(frozen=True, slots=True)
class DropHold:
    """The blocks of a hold are free, or have an owner."""

    hold_id: str
    casual: bool = True


Change = Put | Delete | AddHold | DropHold

OBJECT_COLUMNS = (
    "uri, generation, state, tier, size_bytes, pinned, announce_committed, extents, checksums, sha256, crc"
)
_TIERS = {tier.value: tier for tier in Tier}
_STATES = {state.value: state for state in SyncStatus}

HOLD_COLUMNS = "hold_id, part, tier, extents, writer, crc"


def object_row(stored: StoredObject) -> tuple[object, ...]:
    """An object's values, in the order of OBJECT_COLUMNS."""
    return (
        stored.uri,
        stored.generation,
        stored.state.value,
        stored.tier.value,
        stored.size_bytes,
        int(stored.pinned),
        int(stored.announce_committed),
        _packed(stored.extents),
        None if stored.checksums is None else array("I", stored.checksums).tobytes(),
        stored.sha256,
    )


def hold_row(hold: AddHold) -> tuple[object, ...]:
    """A hold's values, in the order of HOLD_COLUMNS."""
    return (hold.hold_id, hold.part, hold.tier.value, _packed(hold.extents), int(hold.writer))


def sealed(row: tuple[object, ...]) -> tuple[object, ...]:
    """The values and their CRC-32."""
    return (*row, zlib.crc32(msgpack.packb(row)))


def unsealed(row: Sequence[Any]) -> Sequence[Any]:
    """The values of a row that was sealed. ValueError where one is not what it was."""
    values = tuple(row[:-1])
    if zlib.crc32(msgpack.packb(values)) != row[-1]:
        raise ValueError(f"the row of {values[0]!r} is not as it was written")
    return values


def read_hold(row: Sequence[Any]) -> AddHold:
    """The hold whose values these are."""
    hold_id, part, tier, extents, writer = row
    return AddHold(hold_id, _TIERS[tier], _extents(extents), bool(writer), part)


def read_object(row: Sequence[Any]) -> StoredObject:
    """The object whose values these are."""
    uri, generation, state, tier, size_bytes, pinned, announce, extents, checksums, sha256 = row
    return StoredObject(
        uri,
        _TIERS[tier],
        size_bytes,
        _extents(extents),
        None if checksums is None else tuple(array("I", checksums)),
        generation,
        _STATES[state],
        bool(pinned),
        sha256,
        bool(announce),
    )


def _packed(extents: Sequence[Extent]) -> bytes:
    packed: bytes = msgpack.packb([(e.device, e.offset, e.length) for e in extents])
    return packed


def _extents(packed: bytes) -> tuple[Extent, ...]:
    return tuple([Extent(device, offset, length) for device, offset, length in msgpack.unpackb(packed)])
