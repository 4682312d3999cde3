"""The committed objects by uri; what was loaded and not asked for yet is still a record.

Most of a million objects that a start finds are not asked for soon, and some never: to make each of them at
once would take most of the start, and keep twice the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from hypercache_protocol.states import SyncStatus

from .objects import StoredObject
from .presence import PresenceWords
from .records import has_checksums, state_of, stored_of


class ObjectTable:
    """Behaves as if every object were made already."""

    def __init__(self) -> None:
        self._objects: dict[str, StoredObject | bytes] = {}
        self._may_hold_records = False  # spares a lookup of many keys a look at each in vain
        self._published: PresenceWords | None = None

    def __len__(self) -> int:
        return len(self._objects)

    def uris(self) -> list[str]:
        """The uris, in no promised order."""
        return list(self._objects)

    def load(self, records: dict[str, bytes], verifiable: npt.NDArray[np.bool_]) -> None:
        """Take all objects of a catalog into an empty table; `verifiable` says which have checksums. The dict
        itself becomes the table: a copy would be as large again."""
        assert not self._objects, "loaded before anything is here"
        if self._published is not None:
            self._published.load(list(records), verifiable)
        self._objects = cast("dict[str, StoredObject | bytes]", records)
        self._may_hold_records = bool(records)

    def publish(self, words: PresenceWords) -> None:
        """Keep in `words`, which are empty yet, which objects are here from now on: before any is."""
        assert not self._objects, "published before anything is here"
        self._published = words

    def get(self, uri: str) -> StoredObject | None:
        """The object of this uri."""
        found = self._objects.get(uri)
        if isinstance(found, bytes):
            found = self._objects[uri] = stored_of(uri, found)
        return found

    def peek(self, uri: str) -> StoredObject | None:
        """The object of this uri, made for the caller alone: who goes through all of them would otherwise
        have all of them kept."""
        found = self._objects.get(uri)
        return stored_of(uri, found) if isinstance(found, bytes) else found

    def many(self, uris: Sequence[str]) -> list[StoredObject | None]:
        """The objects of these uris, in their order."""
        found = list(map(self._objects.get, uris))  # in C: a lookup of many keys spends its time here
        if self._may_hold_records and bytes in set(map(type, found)):
            return list(map(self.get, uris))
        return found  # type: ignore[return-value] # no record is among them

    def put(self, objects: Sequence[StoredObject]) -> list[StoredObject | None]:
        """These, all of different uris, in the place of the objects with their uris; returns those that there
        were. Whoever looks finds one of the two."""
        uris = [stored.uri for stored in objects]
        before = list(map(self._objects.get, uris))
        self._objects.update(zip(uris, objects, strict=True))
        self._publish(uris, before, objects)
        return _all_made(uris, before)

    def pop(self, uris: Sequence[str]) -> list[StoredObject | None]:
        """The objects of these uris, all different, which are no longer here."""
        found = [self._objects.pop(uri, None) for uri in uris]
        self._publish(uris, found, [None] * len(uris))
        return _all_made(uris, found)

    def hand_over(self, uri: str, to: ObjectTable) -> None:
        """Move the object of this uri, which must be here, into another table; a record stays a record."""
        found = self._objects.pop(uri)
        self._publish([uri], [found], [None])
        to._may_hold_records |= self._may_hold_records
        to._objects[uri] = found
        to._publish([uri], [None], [found])

    def values(self) -> Iterator[StoredObject]:
        """Every object of this moment; none of them is kept for it."""
        for uri, found in tuple(self._objects.items()):
            yield stored_of(uri, found) if isinstance(found, bytes) else found

    def in_state(self, state: SyncStatus) -> list[str]:
        """The uris of the objects in `state`."""
        return [
            uri
            for uri, found in self._objects.items()
            if (state_of(found) if isinstance(found, bytes) else found.state) is state
        ]

    # -- whatever changes what is here -------------------------------------------------------------------

    def _publish(self, uris: Sequence[str], before: Sequence[_Kept], now: Sequence[_Kept]) -> None:
        if self._published is not None:
            self._published.change(uris, map(_is_verifiable, before), map(_is_verifiable, now))


_Kept: TypeAlias = StoredObject | bytes | None


def _is_verifiable(found: _Kept) -> bool | None:
    if found is None:
        return None
    return has_checksums(found) if isinstance(found, bytes) else found.is_verifiable


def _all_made(uris: Sequence[str], found: list[StoredObject | bytes | None]) -> list[StoredObject | None]:
    return [stored_of(uri, it) if isinstance(it, bytes) else it for uri, it in zip(uris, found, strict=True)]
