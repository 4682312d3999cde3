"""What the catalog is told, and how objects and holds become rows and come back.

Every row carries a CRC-32 of its values: SQLite notices a torn page, but not a changed byte in a blob.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgpack

from hypercache_protocol.checksum import crc32
from hypercache_protocol.fields import Tier

from .core.extents import Extent, unpacked
from .core.objects import StoredObject
from .core.records import generations_of, record_of


class Put(NamedTuple):
    """Write an object, over the one of its generation if there is one. One of another generation with its uri
    must be deleted with it: a catalog with two of one uri is damaged."""

    stored: StoredObject
    casual: bool = False


class Delete(NamedTuple):
    """Forget the object of this generation: never casual, for a row that comes back would find its blocks as
    their next owner left them."""

    generation: int
    casual: bool = False


class AddHold(NamedTuple):
    """Blocks without an owner that must not be handed out. A power loss ends their writers and readers
    too, so this needs to survive no more than the daemon's own death: it is casual. A hold may come in
    parts, as a streamed write does: 0 is what it began with, and no other part has that number."""

    hold_id: str
    tier: Tier
    packed_extents: bytes
    writer: bool
    part: int = 0
    casual: bool = True

    @property
    def extents(self) -> tuple[Extent, ...]:
        return unpacked(self.packed_extents)


class DropHold(NamedTuple):
    """The blocks of a hold are free, or have an owner."""

    hold_id: str
    casual: bool = True


class Remember(NamedTuple):
    """Keep a word for the daemons after this one, in the place of the one of that name."""

    name: str
    value: str
    casual: bool = True


Change = Put | Delete | AddHold | DropHold | Remember

OBJECT_COLUMNS = "generation, uri, record, crc"
_TIERS = {tier.value: tier for tier in Tier}

HOLD_COLUMNS = "hold_id, part, tier, extents, writer, crc"


def object_row(stored: StoredObject) -> tuple[object, ...]:
    """An object's row, in the order of OBJECT_COLUMNS."""
    record = record_of(stored)
    return (stored.generation, stored.uri, record, _record_crc(stored.uri, record))


def read_records(rows: Sequence[tuple[int, str, bytes, int]]) -> Iterable[tuple[str, bytes]]:
    """The uri and the record of each object. ValueError where a row is not as it was written."""
    generations, uris, records, crcs = zip(*rows, strict=True)
    # In C from end to end: a start does this for every object.
    seen = tuple(map(crc32, records, map(crc32, map(str.encode, uris))))
    if seen != crcs:
        raise _changed(next(uri for uri, crc, was in zip(uris, seen, crcs, strict=True) if crc != was))
    if generations_of(records) != generations:
        raise ValueError("a row has not the number of its object")
    return zip(uris, records, strict=True)


def hold_row(hold: AddHold) -> tuple[object, ...]:
    """A hold's row, in the order of HOLD_COLUMNS."""
    values = (hold.hold_id, hold.part, hold.tier.value, hold.packed_extents, int(hold.writer))
    return (*values, _values_crc(values))


def read_holds(rows: Sequence[tuple[Any, ...]]) -> list[AddHold]:
    """The holds of these rows. ValueError where a row is not as it was written."""
    for hold_id, *others, crc in rows:
        if _values_crc((hold_id, *others)) != crc:
            raise _changed(hold_id)
    return [
        AddHold(hold_id, _TIERS[tier], extents, bool(writer), part)
        for hold_id, part, tier, extents, writer, _ in rows
    ]


def _record_crc(uri: str, record: bytes) -> int:
    return crc32(record, crc32(uri.encode()))


def _values_crc(values: tuple[object, ...]) -> int:
    return crc32(msgpack.packb(values))


def _changed(name: str) -> ValueError:
    return ValueError(f"the row of {name!r} is not as it was written")
