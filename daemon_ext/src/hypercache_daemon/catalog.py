"""The catalog: what survives a restart, in one SQLite file.

Rules:
1. Changes are written in the order they were handed in, in one thread; those that wait together share one
   transaction (group commit).
2. `write` returns after its changes are durable: against SIGKILL always, against power loss where any of
   them is not `casual`. `post` only promises the order.
3. A transaction that fails changed nothing and fails each `write` in it; posted changes are kept and go
   first in the next one.
4. A catalog that is torn, newer than this program or another pool's is refused, never repaired or replaced.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import trio

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

log = logging.getLogger(__name__)

SCHEMA_VERSION = 2
_MIGRATIONS: dict[int, tuple[str, ...]] = {}
"""For each schema that was released before the present one: the statements that make the next one of it. A
new schema needs an entry here, and a frozen catalog in tests/catalogs/ beside those of all others."""

_ROWS_TOGETHER = 500  # few enough to stay in the processor's cache from one step to the next
_Made = TypeVar("_Made")

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE objects (
    uri TEXT PRIMARY KEY, record BLOB NOT NULL, crc INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE holds (
    hold_id TEXT NOT NULL, part INTEGER NOT NULL, tier TEXT NOT NULL, extents BLOB NOT NULL,
    writer INTEGER NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (hold_id, part)
) WITHOUT ROWID;
"""

_PRAGMAS = {
    "journal_mode": "WAL",
    "temp_store": "MEMORY",
    "wal_autocheckpoint": "4000",  # pages: a checkpoint costs two fsyncs, so not after each transaction
    "busy_timeout": "0",  # nobody else may use this file
    "locking_mode": "EXCLUSIVE",
}


class CatalogError(Exception):
    """The catalog cannot be used or written; the sentence says what to do."""


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
        self._queue: list[_Entry] = []
        self._wake = trio.Event()
        self._closed = False
        self._hold_rows = HoldRows()
        self._thread = trio.CapacityLimiter(1)  # its own: no slow disk or backend may take it

    # -- opening, before Trio runs anything else -------------------------------------------------------

    @staticmethod
    def create(path: Path, pool_id: str, *, replace: bool) -> None:
        """Make the empty catalog of a new pool, durably.

        Args:
            replace: give up the catalog that lies there.

        Raises:
            CatalogError: there is one and it may not be replaced, or the folder cannot be used.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not replace and path.exists() and not _was_never_opened(path):
                raise CatalogError(
                    f"the catalog {path} exists although the devices are blank; it belongs to another pool: "
                    "give another --state-dir, or start with --format to replace it"
                )
            _create(path, pool_id)
        except OSError as error:
            raise CatalogError(f"the catalog {path} cannot be made: {error.strerror}") from error

    @classmethod
    def open(cls, path: Path, pool_id: str) -> Catalog:
        """Open the catalog of the pool `pool_id`.

        Raises:
            CatalogError: it is missing, torn, another pool's, newer, or in use.
        """
        _check_is_database(path)
        with _opened(path) as connection:
            _check(connection, path, pool_id)
            epoch = int(_meta(connection, "epoch")) + 1
            with _transaction(connection, durable=True):
                _migrate(connection)
                connection.execute("UPDATE meta SET value=? WHERE name='epoch'", (str(epoch),))
            remembered = dict(connection.execute("SELECT name, value FROM meta"))
            return cls(connection, path, epoch, remembered)

    def records(self) -> dict[str, bytes]:
        """The record of every object by uri, in no promised order."""
        found: dict[str, bytes] = {}
        for group in self._read(f"SELECT {OBJECT_COLUMNS} FROM objects", read_records):
            found.update(group)
        return found

    def holds(self) -> list[AddHold]:
        """Every hold that a daemon before this one left."""
        return list(chain.from_iterable(self._read(f"SELECT {HOLD_COLUMNS} FROM holds", read_holds)))

    def _read(self, query: str, made_of: Callable[[list[Any]], _Made]) -> Iterator[_Made]:
        """What `made_of` makes of the rows, some hundred at a time."""
        try:
            cursor = self._connection.execute(query)
            while rows := cursor.fetchmany(_ROWS_TOGETHER):
                yield made_of(rows)
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            raise CatalogError(f"the catalog {self.path} is damaged: {error}; {_WAY_OUT}") from error

    # -- reading while it is written -------------------------------------------------------------------

    async def uris_after(self, uri: str, count: int) -> list[str]:
        """The next `count` uris of objects beyond `uri`, in the order of their bytes; what was handed in and
        is not written yet may be missing.

        Raises:
            CatalogError: it cannot be read.
        """
        try:
            return await trio.to_thread.run_sync(self._uris_after, uri, count, limiter=self._thread)
        except sqlite3.Error as error:
            raise CatalogError(f"the catalog {self.path} could not be read: {error}") from error

    def _uris_after(self, uri: str, count: int) -> list[str]:
        query = "SELECT uri FROM objects WHERE uri > ? ORDER BY uri LIMIT ?"
        return [uri for (uri,) in self._connection.execute(query, (uri, count))]

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
        """Write what is handed in until cancelled, then write what is left and close the file."""
        try:
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
        self._connection.close()

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
            with _transaction(self._connection, durable=durable):
                for statement, rows in _steps(changes, self._hold_rows):
                    self._connection.executemany(statement, rows)
        except BaseException:
            self._hold_rows.take_back()
            raise
        self._hold_rows.keep()
        self.transactions += 1


_WAY_OUT = "restore it from a backup, or start with --format to give up every object of this pool"
_MAGIC = b"SQLite format 3\0"


def _check_is_database(path: Path) -> None:
    """Refuse what SQLite must not even open: it would make a catalog of an empty file."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except FileNotFoundError:
        raise CatalogError(
            f"the catalog {path} is missing although the devices are in use; give the --state-dir that it "
            f"lies in; or {_WAY_OUT}"
        ) from None
    except OSError as error:
        raise CatalogError(f"the catalog {path} cannot be read: {error.strerror}") from error
    if magic != _MAGIC:
        raise CatalogError(f"the catalog {path} is damaged (it is no SQLite file); {_WAY_OUT}")


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The database, set up; closed where the body fails, and SQLite's complaints put into words."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise CatalogError(f"the catalog {path} cannot be opened: {error}") from error
    try:
        for name, value in _PRAGMAS.items():
            connection.execute(f"PRAGMA {name}={value}")
        yield connection
    except (sqlite3.Error, ValueError) as error:
        connection.close()
        if "locked" in str(error):
            raise CatalogError(f"the catalog {path} is in use by another process; stop that first") from error
        if any(word in str(error) for word in ("full", "I/O")):
            raise CatalogError(
                f"the catalog {path} cannot be written: {error}; make room on its disk, or see why it fails, "
                "and start again: nothing in the catalog was changed"
            ) from error
        raise CatalogError(f"the catalog {path} cannot be used: {error}; {_WAY_OUT}") from error
    except BaseException:
        connection.close()
        raise


class _transaction:
    """One transaction: committed at the end of the block, rolled back where it raises."""

    def __init__(self, connection: sqlite3.Connection, *, durable: bool) -> None:
        self._connection = connection
        # FULL syncs the log at each commit; NORMAL leaves that to the next checkpoint or FULL commit.
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            try:
                self._connection.execute("COMMIT")
            except sqlite3.Error:
                self._roll_back()
                raise
        else:
            self._roll_back()

    def _roll_back(self) -> None:
        # SQLite rolls back by itself on some errors; a second time would be an error of its own.
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


def _create(path: Path, pool_id: str) -> None:
    """Make the file under another name and move it to its place, so that a catalog that is there is whole."""
    unfinished = path.with_name(f"{path.name}.new")
    _remove(unfinished)
    unfinished.touch(mode=0o600, exist_ok=False)
    with _opened(unfinished) as connection:
        with _transaction(connection, durable=True):
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            rows = {"schema": str(SCHEMA_VERSION), "pool_id": pool_id, "epoch": "0"}
            connection.executemany("INSERT INTO meta VALUES (?, ?)", rows.items())
        connection.close()
    _remove(path)  # its log first of all: SQLite would take it for that of the new file
    unfinished.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove(path: Path) -> None:
    for suffix in ("-wal", "-shm", ""):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _was_never_opened(path: Path) -> bool:
    """True where a format was cut off right after it had made this catalog: nothing is lost with it."""
    try:
        _check_is_database(path)
        with _opened(path) as connection:
            never = int(_meta(connection, "epoch")) == 0
            connection.close()
            return never
    except CatalogError:
        return False


def _meta(connection: sqlite3.Connection, name: str) -> str:
    row = connection.execute("SELECT value FROM meta WHERE name=?", (name,)).fetchone()
    if row is None:
        raise sqlite3.DatabaseError(f"it has no {name!r}")
    return str(row[0])


def _check(connection: sqlite3.Connection, path: Path, pool_id: str) -> None:
    schema = int(_meta(connection, "schema"))
    if schema > SCHEMA_VERSION:
        raise CatalogError(
            f"the catalog {path} has schema {schema} and this release knows up to {SCHEMA_VERSION}: "
            f"it was written by a newer hypercached; start that one"
        )
    if schema < min(_MIGRATIONS, default=SCHEMA_VERSION):
        raise CatalogError(
            f"the catalog {path} has schema {schema}, of a build that was never released; start with "
            "--format to give up every object of this pool"
        )
    if _meta(connection, "pool_id") != pool_id:
        raise CatalogError(f"the catalog {path} belongs to another pool than the devices; {_WAY_OUT}")
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise CatalogError(f"the catalog {path} is damaged ({problem}); {_WAY_OUT}")


def _migrate(connection: sqlite3.Connection) -> None:
    """Make the present schema of the one that is there, in the transaction that is open."""
    for schema in range(int(_meta(connection, "schema")), SCHEMA_VERSION):
        for statement in _MIGRATIONS[schema]:
            connection.execute(statement)
        connection.execute("UPDATE meta SET value=? WHERE name='schema'", (str(schema + 1),))


_PUT = f"INSERT OR REPLACE INTO objects ({OBJECT_COLUMNS}) VALUES (?, ?, ?)"
_DELETE = "DELETE FROM objects WHERE uri=?"
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
    Delete: lambda deletes, _: [(_DELETE, [(delete.uri,) for delete in deletes])],
    AddHold: lambda adds, holds: [(_ADD_HOLD, map(hold_row, holds.add(adds)))],
    DropHold: _drop_holds,
    Remember: lambda words, _: [(_REMEMBER, [(word.name, word.value) for word in words])],
}
