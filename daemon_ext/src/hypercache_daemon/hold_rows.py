"""Which row of the catalog each hold lies in. Holds that come together share rows.

Rules:
1. A row costs the same for one hold as for fifty, and holds come and go with every object: their own rows
   took as long as all else of a commit.
2. Holds share a row only where they are of one tier and one kind. After a restart a row is one hold: all of
   it rests as long as the longest of them would have.
3. A shared row has an id that no hold has. All others have the ids of their holds: of one that comes alone or
   is large, of a part that was appended, of whatever a daemon before this one left.
4. What a transaction changed here is taken back where it fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from hypercache_protocol.fields import Tier

from .catalog_rows import AddHold

_MOST_BYTES = 1280  # of the packed chunks of a shared row: 64 chunks, since to drop one hold writes it anew


@dataclass(slots=True)
class _Shared:
    """A row, and the packed chunks of each hold that is still in it."""

    row_id: str
    tier: Tier
    writer: bool
    holds: dict[str, bytes]

    def as_hold(self) -> AddHold:
        return AddHold(self.row_id, self.tier, b"".join(self.holds.values()), self.writer)


class HoldRows:
    """The shared rows of this daemon's own holds."""

    def __init__(self) -> None:
        self._shared_by: dict[str, _Shared] = {}  # by the id of a hold
        self._in_parts: set[str] = set()
        self._new_in_parts: set[str] = set()
        self._added: list[str] = []
        self._dropped: list[tuple[str, _Shared | None, bytes]] = []

    def add(self, holds: Iterable[AddHold]) -> list[AddHold]:
        """The rows to write for these holds: new ones, and parts of some that are there."""
        rows: list[AddHold] = []
        for (tier, writer, is_part), alike in groupby(holds, _kind):
            for some in _cut(alike):
                if is_part:
                    self._note_parts(some)
                if is_part or len(some) == 1:
                    rows += some
                else:
                    rows.append(self._share(tier, writer, some))
        return rows

    def drop(self, hold_ids: Iterable[str]) -> tuple[list[str], list[AddHold]]:
        """The ids of the rows to delete, and after that the rows to write, so that nothing is left of these
        holds."""
        unneeded: list[str] = []
        changed: dict[str, _Shared] = {}
        for hold_id in hold_ids:
            shared = self._shared_by.pop(hold_id, None)
            if shared is not None:
                changed[shared.row_id] = shared
            self._dropped.append((hold_id, shared, b"" if shared is None else shared.holds.pop(hold_id)))
            if shared is None or hold_id in self._in_parts:
                unneeded.append(hold_id)
        unneeded += [row_id for row_id, shared in changed.items() if not shared.holds]
        return unneeded, [shared.as_hold() for shared in changed.values() if shared.holds]

    def keep(self) -> None:
        """All of that is durable."""
        self._in_parts.difference_update([hold_id for hold_id, _, _ in self._dropped])
        self._forget()

    def take_back(self) -> None:
        """Nothing has changed since the last `keep`."""
        for hold_id, shared, chunks in self._dropped:
            if shared is not None:
                shared.holds[hold_id] = chunks
                self._shared_by[hold_id] = shared
        for hold_id in self._added:
            del self._shared_by[hold_id]
        self._in_parts -= self._new_in_parts
        self._forget()

    def _forget(self) -> None:
        self._added.clear()
        self._dropped.clear()
        self._new_in_parts.clear()

    def _note_parts(self, parts: Sequence[AddHold]) -> None:
        self._new_in_parts |= {part.hold_id for part in parts} - self._in_parts
        self._in_parts |= self._new_in_parts

    def _share(self, tier: Tier, writer: bool, holds: Sequence[AddHold]) -> AddHold:
        shared = _Shared(
            f"{holds[0].hold_id}+", tier, writer, {it.hold_id: it.packed_extents for it in holds}
        )
        self._shared_by.update(dict.fromkeys(shared.holds, shared))
        self._added += shared.holds
        return shared.as_hold()


def _kind(hold: AddHold) -> tuple[Tier, bool, bool]:
    return hold.tier, hold.writer, hold.part > 0


def _cut(holds: Iterable[AddHold]) -> Iterator[list[AddHold]]:
    """The same in groups for a row each."""
    some: list[AddHold] = []
    size_bytes = 0
    for hold in holds:
        size_bytes += len(hold.packed_extents)
        if some and size_bytes > _MOST_BYTES:
            yield some
            some, size_bytes = [], len(hold.packed_extents)
        some.append(hold)
    yield some
