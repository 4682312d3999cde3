"""What the catalog is told, and how objects and holds become rows and come back.

Every row carries a CRC-32 of its values: SQLite notices a torn page, but not a changed byte in a blob.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from hypercache_protocol.fields import Tier
from hypercache_protocol.states import SyncStatus

from .core.extents import Extent, packed, unpacked
from .core.objects import StoredObject, stored_objects


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
        stored.packed_extents,
        stored.packed_checksums,
        stored.sha256,
    )


def hold_row(hold: AddHold) -> tuple[object, ...]:
    """A hold's values, in the order of HOLD_COLUMNS."""
    return (hold.hold_id, hold.part, hold.tier.value, packed(hold.extents), int(hold.writer))


def sealed(row: tuple[object, ...]) -> tuple[object, ...]:
    """The values and their CRC-32."""
    return (*row, zlib.crc32(msgpack.packb(row)))


def check_seals(rows: Sequence[tuple[Any, ...]]) -> None:
    """ValueError where a row is not as it was sealed; it names the first of them."""
    pack = msgpack.Packer().pack
    seals = [zlib.crc32(pack(row[:-1])) for row in rows]
    for row, seal in zip(rows, seals, strict=True):
        if row[-1] != seal:
            raise ValueError(f"the row of {row[0]!r} is not as it was written")


def read_holds(rows: Sequence[tuple[Any, ...]]) -> list[AddHold]:
    """The holds of these rows."""
    return [
        AddHold(hold_id, _TIERS[tier], unpacked(extents), bool(writer), part)
        for hold_id, part, tier, extents, writer, _ in rows
    ]


def read_objects(rows: Sequence[tuple[Any, ...]]) -> list[StoredObject]:
    """The objects of these rows."""
    columns = zip(*rows, strict=True)
    uri, generation, state, tier, size_bytes, pinned, announce, extents, checksums, sha256, _ = columns
    return stored_objects(
        (
            uri,
            map(_TIERS.__getitem__, tier),
            size_bytes,
            extents,
            checksums,
            generation,
            map(_STATES.__getitem__, state),
            map(bool, pinned),
            sha256,
            map(bool, announce),
        )
    )
