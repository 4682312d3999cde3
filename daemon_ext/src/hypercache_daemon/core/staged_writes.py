"""What is staged: which write a request means, and which ones nobody touches any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .objects import StagedWrite

_MOST_DROPPED = 1024
"""Of what is remembered of dropped writes: megabytes at most, and far more than are ever asked for."""


@dataclass(frozen=True)
class NotStaged:
    """No staged write fits the request. `stale`: its stage_id is no longer valid; `dropped`: it names none,
    and what its connection staged last under the uri was dropped."""

    uri: str
    stale: bool
    dropped: bool = False


class StagedWrites:
    """All staged writes, oldest first; clients find none of the daemon itself, which fetches.

    Rule: who lost a write does not get another in its place. It would commit what somebody else has filled
    by half, or what it gave up itself before, as the one that it has just filled.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, StagedWrite] = {}
        self._of_clients: dict[str, list[StagedWrite]] = {}  # by uri, oldest first
        self._own: dict[str, list[StagedWrite]] = {}  # the same
        # By connection and uri, oldest first: whose newest was dropped, and who has not staged it again.
        self._dropped: dict[tuple[int | None, str], None] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[StagedWrite]:
        return iter(self._by_id.values())

    @property
    def has_of_clients(self) -> bool:
        """Whether clients have writes that are not committed."""
        return bool(self._of_clients)

    def of(self, uri: str) -> list[StagedWrite]:
        """What is staged under a uri, by clients and by the daemon itself."""
        return [*self._of_clients.get(uri, ()), *self._own.get(uri, ())]

    def own_of(self, uri: str) -> Sequence[StagedWrite]:
        """What the daemon itself has staged under a uri."""
        return self._own.get(uri, ())

    def newest(self, uri: str) -> StagedWrite | None:
        """What clients wrote last under a uri and have not committed."""
        writes = self._of_clients.get(uri)
        return writes[-1] if writes else None

    def find(self, uri: str, connection_id: int, stage_id: str | None) -> StagedWrite | NotStaged:
        """The write that an append or a commit means: the one named, else the connection's newest of that
        uri, else the newest of all. NotStaged where there is none such, or the connection's newest was
        dropped."""
        if stage_id is not None:
            named = self._by_id.get(stage_id)
            if named is None or named.uri != uri or named.connection_id is None:
                return NotStaged(uri, stale=True)
            return named
        if (connection_id, uri) in self._dropped:
            return NotStaged(uri, stale=False, dropped=True)
        writes = self._of_clients.get(uri, [])
        own = [staged for staged in writes if staged.connection_id == connection_id]
        candidates = own or writes
        return candidates[-1] if candidates else NotStaged(uri, stale=False)

    def untouched_since(self, deadline: float) -> Iterator[StagedWrite]:
        """Those of clients that nobody touched after `deadline`."""
        for staged in self._by_id.values():
            if staged.touched_at <= deadline and staged.connection_id is not None:
                yield staged

    def add(self, fresh: Sequence[StagedWrite]) -> None:
        """These are the newest from now on, the last of them newest of all."""
        for staged in fresh:
            self._by_id[staged.stage_id] = staged
            self._like(staged).setdefault(staged.uri, []).append(staged)
            if self._dropped:
                self._dropped.pop((staged.connection_id, staged.uri), None)

    def drop(self, staged: StagedWrite) -> None:
        """It is nobody's any more, and its writer may not know."""
        if staged.connection_id is not None and self._is_newest_of_its_connection(staged):
            self._dropped[staged.connection_id, staged.uri] = None
            if len(self._dropped) > _MOST_DROPPED:
                del self._dropped[next(iter(self._dropped))]
        self.remove(staged)

    def remove(self, staged: StagedWrite) -> None:
        """It is committed, or no client has heard of it."""
        del self._by_id[staged.stage_id]
        by_uri = self._like(staged)
        writes = by_uri[staged.uri]
        writes.remove(staged)
        if not writes:
            del by_uri[staged.uri]

    def _is_newest_of_its_connection(self, staged: StagedWrite) -> bool:
        writes = self._of_clients[staged.uri]
        return staged is next(it for it in reversed(writes) if it.connection_id == staged.connection_id)

    def _like(self, staged: StagedWrite) -> dict[str, list[StagedWrite]]:
        return self._own if staged.connection_id is None else self._of_clients
