"""The catalog: what survives a restart, in one SQLite file.

Rules:
1. Changes are written in the order they were handed in, in one thread; those that wait together share one
   transaction (group commit).
2. `write` returns after its changes are durable: against SIGKILL always, against power loss where any of
   them is not `casual`. `post` only promises the order.
3. A transaction that fails changed nothing and fails each `write` in it; posted changes are kept and go
   first in the next one.
4. A catalog that is torn, newer than this program or another pool's is refused, never repaired or replaced.
5. Nothing is written before every page was checked: `checked` is that border. What is refused keeps its log,
   too.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import trio

from .catalog_file import (
    WAY_OUT,
    CatalogError,
    check_pages,
    close_unchanged,
    create,
    in_words,
    meta,
    opened,
    transaction,
    write_ahead,
)
from .catalog_rows import (
    HOLD_COLUMNS,
    OBJECT_COLUMNS,
    AddHold,
    Change,
    Delete,
    DropHold,
    Put,
    Remember,
    hold_row,
    object_row,
    read_holds,
    read_records,
)
from .hold_rows import HoldRows

__all__ = ["Catalog", "CatalogError"]

log = logging.getLogger(__name__)

_ROWS_TOGETHER = 500  # few enough to stay in the processor's cache from one step to the next
_Made = TypeVar("_Made")


class _Entry:
    """Changes that wait for their transaction, in order; `posted` ones have nobody who waits for them."""

    def __init__(self, changes: Sequence[Change], *, posted: bool) -> None:
        self.changes = changes
        self.posted = posted
        self.done = trio.Event()
        self.error: str | None = None


class Catalog:
    """The open catalog. `run` must be running for `write` to return."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, epoch: int, remembered: dict[str, str]
    ) -> None:
        self.path = path
        self.remembered = remembered
        """What the daemon before this one was to `Remember`, by name."""
        self.epoch = epoch
        """The number of this start of the daemon: grows by one each time."""
        self.transactions = 0
        self._connection = connection
        self._is_checked = False
        self._queue: list[_Entry] = []
        self._wake = trio.Event()
        self._closed = False
        self._hold_rows = HoldRows()
        self._thread = trio.CapacityLimiter(1)  # its own: no slow disk or backend may take it

    # -- opening, before Trio runs anything else -------------------------------------------------------

    create = staticmethod(create)

    @classmethod
    def open(cls, path: Path, pool_id: str) -> Catalog:
        """Open the catalog of the pool `pool_id`, for reading until it is `checked`.

        Raises:
            CatalogError: it is missing, no catalog, another pool's, newer, or in use.
        """
        with opened(path, pool_id) as connection:
            epoch = int(meta(connection, "epoch")) + 1
            remembered = dict(connection.execute("SELECT name, value FROM meta"))
            return cls(connection, path, epoch, remembered)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Have every page checked in a thread while the body goes on without the catalog; then count this
        start, durably. From then on the catalog may be written.

        Raises:
            CatalogError: it is torn, whatever the body raised, or cannot be written.
        """
        with ThreadPoolExecutor(1, "catalog check") as thread:
            check = thread.submit(check_pages, self._connection, self.path)
            try:
                yield
            finally:
                check.result()
        begun = self._connection.in_transaction  # by a migration
        with in_words(self.path), transaction(self._connection, durable=True, begun=begun):
            self._connection.execute("UPDATE meta SET value=? WHERE name='epoch'", (str(self.epoch),))
        with in_words(self.path, kept="every object in the catalog is as it was"):
            write_ahead(self._connection)
        self._is_checked = True

    def records(self) -> dict[str, bytes]:
        """The record of every object by uri, in no promised order.

        Raises:
            CatalogError: what is there is not what was written.
        """
        found: dict[str, bytes] = {}
        count = 0
        for rows, group in self._read(f"SELECT {OBJECT_COLUMNS} FROM objects", _counted_records):
            found.update(group)
            count += rows
        if len(found) != count:
            raise CatalogError(f"the catalog {self.path} is damaged: two objects have one uri; {WAY_OUT}")
        return found

    def holds(self) -> list[AddHold]:
        """Every hold that a daemon before this one left.

        Raises:
            CatalogError: as for `records`.
        """
        return list(chain.from_iterable(self._read(f"SELECT {HOLD_COLUMNS} FROM holds", read_holds)))

    def _read(self, query: str, made_of: Callable[[list[Any]], _Made]) -> Iterator[_Made]:
        """What `made_of` makes of the rows, some hundred at a time."""
        try:
            cursor = self._connection.execute(query)
            while rows := cursor.fetchmany(_ROWS_TOGETHER):
                yield made_of(rows)
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            check_pages(self._connection, self.path)  # which says where, if it is more than a row
            raise CatalogError(f"the catalog {self.path} is damaged: {error}; {WAY_OUT}") from error

    # -- reading while it is written -------------------------------------------------------------------

    async def uris_between(self, after: int, last: int, count: int) -> list[tuple[int, str]]:
        """Generation and uri of the first `count` objects whose generation is beyond `after` and at most
        `last`, in their order; what was handed in and is not written yet may be missing.

        Raises:
            CatalogError: it cannot be read.
        """
        try:
            return await trio.to_thread.run_sync(self._uris_between, after, last, count, limiter=self._thread)
        except sqlite3.Error as error:
            raise CatalogError(f"the catalog {self.path} could not be read: {error}") from error

    def _uris_between(self, after: int, last: int, count: int) -> list[tuple[int, str]]:
        query = (
            "SELECT generation, uri FROM objects WHERE generation > ? AND generation <= ?"
            " ORDER BY generation LIMIT ?"
        )
        return self._connection.execute(query, (after, last, count)).fetchall()

    # -- writing ---------------------------------------------------------------------------------------

    async def write(self, changes: Sequence[Change]) -> None:
        """Make the changes durable, all or none.

        Raises:
            CatalogError: they were not made.

        If cancelled: they may have been made or not.
        """
        entry = self._enter(changes, posted=False)
        await entry.done.wait()
        if entry.error is not None:
            raise CatalogError(entry.error)

    def post(self, changes: Sequence[Change]) -> None:
        """Have the changes made before any that is handed in later."""
        self._enter(changes, posted=True)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write what is handed in until cancelled, then write what is left and close the file. It is started
        once that is written which was handed in before: objects that a start gives up may not come back."""
        assert self._is_checked, "nothing is written to what may be torn"
        try:
            await self._write_waiting()
            task_status.started()
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                await self._write_waiting()
        finally:
            self._closed = True
            with trio.CancelScope(shield=True):
                await self._write_waiting()
                await trio.to_thread.run_sync(self._connection.close, limiter=self._thread)

    def close(self) -> None:
        """Close the file without `run` having run."""
        close_unchanged(self._connection, self.path)

    def _enter(self, changes: Sequence[Change], *, posted: bool) -> _Entry:
        entry = _Entry(changes, posted=posted)
        if self._closed:
            entry.error = f"the catalog {self.path} is closed: the daemon is stopping"
            entry.done.set()
            return entry
        self._queue.append(entry)
        self._wake.set()
        return entry

    async def _write_waiting(self) -> None:
        entries, self._queue = self._queue, []
        error: str | None = f"the catalog {self.path} could not be written"
        try:
            # Whoever waits for these entries would wait for ever if they were given up half-way.
            with trio.CancelScope(shield=True):
                changes = [change for entry in entries for change in entry.changes]
                await trio.to_thread.run_sync(self._apply, changes, limiter=self._thread)
            error = None
        except sqlite3.Error as problem:
            error = f"the catalog {self.path} could not be written: {problem}"
            log.error("%s", error)
            self._queue[:0] = [entry for entry in entries if entry.posted]
        finally:
            for entry in entries:
                entry.error = error
                entry.done.set()

    def _apply(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        durable = not all(change.casual for change in changes)
        try:
            with transaction(self._connection, durable=durable):
                for statement, rows in _steps(changes, self._hold_rows):
                    self._connection.executemany(statement, rows)
        except BaseException:  # whatever ended the transaction, the file has nothing of it
            self._hold_rows.take_back()
            raise
        self._hold_rows.keep()
        self.transactions += 1


def _counted_records(rows: list[Any]) -> tuple[int, Iterable[tuple[str, bytes]]]:
    return len(rows), read_records(rows)


_PUT = f"INSERT OR REPLACE INTO objects ({OBJECT_COLUMNS}) VALUES (?, ?, ?, ?)"
_DELETE = "DELETE FROM objects WHERE generation=?"
_ADD_HOLD = f"INSERT OR REPLACE INTO holds ({HOLD_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)"
_DROP_HOLD = "DELETE FROM holds WHERE hold_id=?"
_REMEMBER = "INSERT OR REPLACE INTO meta VALUES (?, ?)"

_Step: TypeAlias = tuple[str, Iterable[tuple[object, ...]]]
"""A statement, and the rows that it is for."""


def _steps(changes: Iterable[Change], holds: HoldRows) -> Iterator[_Step]:
    """What makes these changes, in their order: those of one kind that come together are one step."""
    for kind, alike in groupby(changes, type):
        yield from _STEPS[kind](alike, holds)


def _drop_holds(drops: Iterable[DropHold], holds: HoldRows) -> Iterator[_Step]:
    unneeded, changed = holds.drop(drop.hold_id for drop in drops)
    yield _DROP_HOLD, [(row_id,) for row_id in unneeded]
    yield _ADD_HOLD, map(hold_row, changed)


_STEPS: dict[type[Change], Callable[[Iterator[Any], HoldRows], Iterable[_Step]]] = {
    Put: lambda puts, _: [(_PUT, [object_row(put.stored) for put in puts])],
    Delete: lambda deletes, _: [(_DELETE, [(delete.generation,) for delete in deletes])],
    AddHold: lambda adds, holds: [(_ADD_HOLD, map(hold_row, holds.add(adds)))],
    DropHold: _drop_holds,
    Remember: lambda words, _: [(_REMEMBER, [(word.name, word.value) for word in words])],
}
