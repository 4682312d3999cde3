"""The catalog's file: how it is made, what of it is refused, and how it is changed whole or not at all."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from .core.records import generations_of

SCHEMA_VERSION = 3

# In the order of commits: what is committed or evicted together lies on the same pages. In that of uris each
# object changed a page of its own.
_OBJECTS = """
CREATE TABLE objects (
    generation INTEGER PRIMARY KEY, uri TEXT NOT NULL, record BLOB NOT NULL, crc INTEGER NOT NULL
);
"""
_MIGRATIONS: dict[int, tuple[str, ...]] = {
    2: (
        "ALTER TABLE objects RENAME TO objects_by_uri",
        _OBJECTS,
        "INSERT INTO objects SELECT generation_of(record) AS generation, uri, record, crc"
        " FROM objects_by_uri ORDER BY generation",
        "DROP TABLE objects_by_uri",
    )
}
"""For each schema that was released before the present one: the statements that make the next one of it. A
new schema needs an entry here, and a frozen catalog in tests/catalogs/ beside those of all others."""

_READ_AHEAD_BYTES = 128 << 10
"""Linux's own usual window: of more at a time it would read no more than that."""

_SCHEMA = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
{_OBJECTS.strip()}
CREATE TABLE holds (
    hold_id TEXT NOT NULL, part INTEGER NOT NULL, tier TEXT NOT NULL, extents BLOB NOT NULL,
    writer INTEGER NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (hold_id, part)
) WITHOUT ROWID;
"""

_PRAGMAS = {
    "temp_store": "MEMORY",
    "wal_autocheckpoint": "4000",  # pages: a checkpoint costs two fsyncs, so not after each transaction
    "busy_timeout": "0",  # nobody else may use this file
    "locking_mode": "EXCLUSIVE",
}


class CatalogError(Exception):
    """The catalog cannot be used or written; the sentence says what to do."""


WAY_OUT = (
    "restore it from a backup and start once with --forget-unverifiable, or start with --format to give up "
    "every object of this pool"
)
_MAGIC = b"SQLite format 3\0"

_READERS_LOCK = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, (1 << 30) + 2, 510, 0)
"""What every reader of an SQLite file holds, as part of its format: a shared lock on these bytes."""


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
        raise CatalogError(
            f"the catalog {path} cannot be made: {error.strerror}; give another --state-dir, or make room "
            "there"
        ) from error


@contextmanager
def opened(path: Path, pool_id: str) -> Iterator[sqlite3.Connection]:
    """The catalog of the pool `pool_id`, in the present schema; closed where the body fails. Its pages are
    not checked yet, unless it had to be migrated.

    Raises:
        CatalogError: it is missing, no catalog, another pool's, newer, or in use; or SQLite says so in the
            body.
    """
    _check_is_database(path)
    with _database(path) as connection:
        _check_owner(connection, path, pool_id)
        if int(meta(connection, "schema")) < SCHEMA_VERSION:
            check_pages(connection, path)
            # Whoever counts the start ends this transaction: a start that is refused has changed nothing, and
            # the build before this one still reads what is there.
            _begin(connection, durable=True)
            _migrate(connection)
        yield connection


def _check_is_database(path: Path) -> None:
    """Refuse what SQLite must not even open: it would make a catalog of an empty file."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
            _read_ahead(file.fileno())
    except FileNotFoundError:
        raise CatalogError(
            f"the catalog {path} is missing although the devices are in use; give the --state-dir that it "
            f"lies in; or {WAY_OUT}"
        ) from None
    except OSError as error:
        raise CatalogError(f"the catalog {path} cannot be read: {error.strerror}") from error
    if magic != _MAGIC:
        raise CatalogError(f"the catalog {path} is damaged (it is no SQLite file); {WAY_OUT}")


def _read_ahead(fd: int) -> None:
    """Have the kernel read the whole file in order. SQLite asks for a page only when it comes to it, and then
    waits for it."""
    for start in range(0, os.fstat(fd).st_size, _READ_AHEAD_BYTES):
        os.posix_fadvise(fd, start, _READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)


@contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    """The database, set up; closed where the body fails, and SQLite's complaints put into words."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise CatalogError(f"the catalog {path} cannot be opened: {error}") from error
    with in_words(path), ExitStack() as held:
        held.callback(close_unchanged, connection, path)
        connection.execute("PRAGMA schema_version")  # read before it is locked: `close_unchanged` needs that
        for name, value in _PRAGMAS.items():
            connection.execute(f"PRAGMA {name}={value}")
        connection.create_function("generation_of", 1, _generation_of, deterministic=True)  # for migrations
        yield connection
        held.pop_all()


def write_ahead(connection: sqlite3.Connection) -> None:
    """Have a catalog that was checked, and written if it must be, write changes to a log from now on. That
    writes to its file where a backup was restored which doesn't: so not before. `sqlite3.OperationalError`
    where it cannot be had."""
    (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError(f"it stays in journal mode {mode!r}")


def close_unchanged(connection: sqlite3.Connection, path: Path) -> None:
    """Close a catalog, which may be torn if it was only read: SQLite must not write the log that a kill left
    into the file and remove it, as it does where it is alone with them."""
    log = _beside(path, "-wal")
    if not (log.exists() and log.stat().st_size):
        connection.close()
        return
    with path.open("rb") as reader:
        with suppress(BlockingIOError):  # what was written is whole, and locked for good
            # The lock is this open file's: those of a process never stand in its own way.
            fcntl.fcntl(reader, fcntl.F_OFD_SETLK, _READERS_LOCK)
        connection.close()


@contextmanager
def in_words(path: Path, kept: str = "nothing in the catalog was changed") -> Iterator[None]:
    """SQLite's complaints in the body as a CatalogError that says what to do about them.

    Args:
        kept: what is true where the body cannot write.
    """
    try:
        yield
    except (sqlite3.Error, ValueError) as error:
        if "locked" in str(error):
            raise CatalogError(f"the catalog {path} is in use by another process; stop that first") from error
        if any(word in str(error) for word in ("full", "I/O")):
            raise CatalogError(
                f"the catalog {path} cannot be written: {error}; make room on its disk, or see why it fails, "
                f"and start again: {kept}"
            ) from error
        raise CatalogError(f"the catalog {path} cannot be used: {error}; {WAY_OUT}") from error


def _create(path: Path, pool_id: str) -> None:
    """Make the file under another name and move it to its place, so that a catalog that is there is whole."""
    unfinished = path.with_name(f"{path.name}.new")
    _remove(unfinished)
    unfinished.touch(mode=0o600, exist_ok=False)
    with _database(unfinished) as connection:
        write_ahead(connection)
        with transaction(connection, durable=True):
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
        _beside(path, suffix).unlink(missing_ok=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _was_never_opened(path: Path) -> bool:
    """True where a format was cut off right after it had made this catalog: nothing is lost with it."""
    try:
        _check_is_database(path)
        with _database(path) as connection:
            never = int(meta(connection, "epoch")) == 0
            close_unchanged(connection, path)
            return never
    except CatalogError:
        return False


def meta(connection: sqlite3.Connection, name: str) -> str:
    """A word that the catalog says of itself. `sqlite3.DatabaseError` where it doesn't."""
    row = connection.execute("SELECT value FROM meta WHERE name=?", (name,)).fetchone()
    if row is None:
        raise sqlite3.DatabaseError(f"it has no {name!r}")
    return str(row[0])


def _check_owner(connection: sqlite3.Connection, path: Path, pool_id: str) -> None:
    """Refuse what is another pool's, or another build's."""
    schema = int(meta(connection, "schema"))
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
    if meta(connection, "pool_id") != pool_id:
        raise CatalogError(
            f"the catalog {path} belongs to another pool than the devices; give the --state-dir of theirs; "
            f"or {WAY_OUT}"
        )


def check_pages(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse what is torn, with a CatalogError. All of it is one call into SQLite, so other threads go on
    meanwhile."""
    with in_words(path):
        (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        raise CatalogError(f"the catalog {path} is damaged ({problem}); {WAY_OUT}")


def _generation_of(record: bytes) -> int:
    return generations_of((record,))[0]


def _migrate(connection: sqlite3.Connection) -> None:
    """Make the present schema of the one that is there, in the transaction that is open."""
    for schema in range(int(meta(connection, "schema")), SCHEMA_VERSION):
        for statement in _MIGRATIONS[schema]:
            connection.execute(statement)
        connection.execute("UPDATE meta SET value=? WHERE name='schema'", (str(schema + 1),))


def _begin(connection: sqlite3.Connection, *, durable: bool) -> None:
    # FULL syncs the log at each commit; NORMAL leaves that to the next checkpoint or FULL commit.
    connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
    connection.execute("BEGIN IMMEDIATE")


class transaction:
    """One transaction: committed at the end of the block, rolled back where it raises. `begun`: it goes on
    with what a migration began."""

    def __init__(self, connection: sqlite3.Connection, *, durable: bool, begun: bool = False) -> None:
        self._connection = connection
        self._durable = durable
        self._begun = begun

    def __enter__(self) -> None:
        if not self._begun:
            _begin(self._connection, durable=self._durable)

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
