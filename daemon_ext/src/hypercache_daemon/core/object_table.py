"""The committed objects by uri; what was loaded and not asked for yet is still a record.

Most of a million objects that a start finds are not asked for soon, and some never: to make each of them at
once would take most of the start, and keep twice the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

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

    def put(self, stored: StoredObject) -> StoredObject | None:
        """`stored` in the place of the object with its uri; returns that, if there is one. Whoever
        looks finds one of the two."""
        before = self._set(stored.uri, stored)
        return stored_of(stored.uri, before) if isinstance(before, bytes) else before

    def pop(self, uri: str) -> StoredObject | None:
        """The object of this uri, which is no longer here."""
        found = self._taken(uri)
        return stored_of(uri, found) if isinstance(found, bytes) else found

    def hand_over(self, uri: str, to: ObjectTable) -> None:
        """Move the object of this uri, which must be here, into another table; a record stays a record."""
        found = self._taken(uri)
        assert found is not None, "what is handed over must be here"
        to._may_hold_records |= self._may_hold_records
        to._set(uri, found)

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

    def _set(self, uri: str, now: StoredObject | bytes) -> StoredObject | bytes | None:
        """Returns what was there."""
        before = self._objects.get(uri)
        if self._published is not None:
            self._published.change(
                uri, None if before is None else _is_verifiable(before), _is_verifiable(now)
            )
        self._objects[uri] = now
        return before

    def _taken(self, uri: str) -> StoredObject | bytes | None:
        found = self._objects.pop(uri, None)
        if found is not None and self._published is not None:
            self._published.change(uri, _is_verifiable(found), None)
        return found


def _is_verifiable(found: StoredObject | bytes) -> bool:
    return has_checksums(found) if isinstance(found, bytes) else found.is_verifiable
