"""Catalogs of every released schema, frozen: each later build must open them and find all that is in them.

A new schema takes three steps, and a test here fails until each is made: raise SCHEMA_VERSION, enter in
`_MIGRATIONS` (catalog_file.py) what makes it of the one before, and freeze a catalog of it (the test says
how).
"""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio
from catalogs_made import opened

from hypercache_daemon import catalog_file
from hypercache_daemon.catalog import Catalog, CatalogError
from hypercache_daemon.catalog_file import SCHEMA_VERSION
from hypercache_daemon.catalog_rows import AddHold, Change, Put, Remember
from hypercache_daemon.core.extents import Extent, packed
from hypercache_daemon.core.objects import StoredObject, packed_checksums
from hypercache_daemon.core.records import stored_of
from hypercache_protocol.fields import Tier
from hypercache_protocol.states import SyncStatus

FOLDER = Path(__file__).parent / "catalogs"
FROZEN = {
    2: "8adebf69be36b51ae074515e1260cda3143c2a1c923df3ff39a2de527d442d5a",
    3: "b71548163f0fd3dab4178eb73e6c5e26b1607855ddc857fcf0d6063582106da2",
}
"""Schema -> SHA-256 of its catalog, so that an edit of one shows in review as two edits."""

POOL = "0123456789abcdef" * 2
CHUNK = 4 << 20

OBJECTS = [
    StoredObject(
        "hypercache://lmcache/v1/a%2Fb/model@0000002a@0@00c0ffee",
        Tier.NVME,
        14 << 20,
        packed([*(Extent(n, (n + 1) << 20, CHUNK) for n in range(3)), Extent(3, 1 << 20, 2 << 20)]),
        packed_checksums([0, 1, 0xFFFFFFFF, 0xCBF43926]),
        1 << 40 | 1,
        SyncStatus.LOCAL_ONLY,
    ),
    StoredObject(
        "s3://bucket/key",
        Tier.NVME,
        5,
        packed([Extent(0, 1 << 30, 5)]),
        None,
        1 << 40 | 2,
        SyncStatus.COMMITTED,
        pinned=True,
        sha256="2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
    ),
    StoredObject(
        "hypercache://kv_cache/\u00e9.kv",
        Tier.RAM,
        4096,
        packed([Extent(1 << 40, 0, 4096)]),
        None,
        1 << 40 | 3,
        SyncStatus.LOCAL_ONLY,
        announce_committed=True,
    ),
    StoredObject(
        "file:///empty",
        Tier.NVME,
        0,
        packed([]),
        packed_checksums([]),
        1 << 40 | 4,
        SyncStatus.SYNCED_BACKEND,
    ),
]
HOLDS = [
    AddHold("10000000005", Tier.NVME, packed([Extent(1, 1 << 33, CHUNK)]), writer=True),
    AddHold("10000000005", Tier.NVME, packed([Extent(2, 1 << 33, 1)]), writer=True, part=1),
    AddHold("10000000006", Tier.RAM, packed([Extent((1 << 40) + 1, 0, 7)]), writer=False),
]
WORD = Remember("failed devices", '{"1": "it was missing"}')


def thawed(schema: int, path: Path) -> Path:
    """The frozen catalog of that schema, as a file."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((FOLDER / f"schema-{schema}.sql").read_text("utf-8"))
    return path


def contents(path: Path) -> dict[str, Any]:
    """Every table with its definition and its rows."""
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
        return {name: (sql, connection.execute(f"SELECT * FROM {name}").fetchall()) for name, sql in tables}


def made_now(path: Path) -> Path:
    """A catalog with all of the above, as this build makes it."""

    async def write() -> None:
        with opened(path, POOL) as catalog:
            async with trio.open_nursery() as nursery:
                await nursery.start(catalog.run)
                puts: list[Change] = [Put(stored) for stored in OBJECTS]
                await catalog.write([*puts, *HOLDS, WORD])
                nursery.cancel_scope.cancel()

    Catalog.create(path, POOL, replace=False)
    trio.run(write)
    return path


def statements(path: Path) -> str:
    """A catalog as text."""
    with closing(sqlite3.connect(path)) as connection:
        return "\n".join(connection.iterdump()) + "\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c.sqlite"


def test_each_released_schema_has_a_frozen_catalog_that_nobody_edited() -> None:
    oldest = min(catalog_file._MIGRATIONS, default=SCHEMA_VERSION)
    assert list(FROZEN) == list(range(oldest, SCHEMA_VERSION + 1)), "freeze a catalog of the new schema"
    for schema, digest in FROZEN.items():
        assert hashlib.sha256((FOLDER / f"schema-{schema}.sql").read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("schema", FROZEN)
def test_everything_in_a_frozen_catalog_is_found(path: Path, schema: int) -> None:
    thawed(schema, path)
    with opened(path, POOL) as catalog:
        found = [stored_of(uri, record) for uri, record in catalog.records().items()]
        assert sorted(found, key=lambda stored: stored.generation) == OBJECTS
        assert sorted(catalog.holds(), key=lambda hold: (hold.hold_id, hold.part)) == HOLDS
        assert catalog.remembered[WORD.name] == WORD.value
        assert catalog.epoch == 2
    assert contents(path)["meta"][1].count(("schema", str(SCHEMA_VERSION))) == 1


def test_what_this_build_writes_is_what_was_frozen_of_its_schema(path: Path, tmp_path: Path) -> None:
    now = made_now(path)
    frozen = thawed(SCHEMA_VERSION, tmp_path / "frozen.sqlite")
    assert contents(now) == contents(frozen), (
        "the schema, or a row's format, is another one: raise SCHEMA_VERSION, enter a migration, and freeze "
        f"this in {FOLDER}:\n{statements(now)}"
    )


# -- a schema to come ------------------------------------------------------------------------------------


@pytest.fixture
def next_schema(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[str, ...]]:
    """What the build after this one may enter."""
    migrations = {SCHEMA_VERSION: ("CREATE TABLE more (x)", "INSERT INTO more VALUES (1)")}
    monkeypatch.setattr(catalog_file, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    monkeypatch.setattr(catalog_file, "_MIGRATIONS", migrations)
    return migrations


def test_a_migration_is_made_once_and_loses_nothing(path: Path, next_schema: object) -> None:
    thawed(SCHEMA_VERSION, path)
    for epoch in (2, 3):
        with opened(path, POOL) as catalog:
            assert len(catalog.records()) == len(OBJECTS)
            assert catalog.epoch == epoch
    assert contents(path)["more"][1] == [(1,)]
    assert ("schema", str(SCHEMA_VERSION + 1)) in contents(path)["meta"][1]


def test_a_start_that_is_refused_after_the_migration_leaves_the_old_schema(
    path: Path, next_schema: object
) -> None:
    thawed(SCHEMA_VERSION, path)
    before = contents(path)
    with closing(Catalog.open(path, POOL)) as catalog:
        assert len(catalog.records()) == len(OBJECTS)
        with pytest.raises(ValueError, match="devices"), catalog.checked():
            raise ValueError("the devices are others")
    assert contents(path) == before


def test_a_migration_that_fails_changes_nothing(path: Path, next_schema: dict[int, tuple[str, ...]]) -> None:
    next_schema[SCHEMA_VERSION] += ("INSERT INTO nowhere VALUES (1)",)
    thawed(SCHEMA_VERSION, path)
    before = contents(path)
    with pytest.raises(CatalogError, match="nowhere"):
        Catalog.open(path, POOL)
    assert contents(path) == before


def test_what_is_torn_is_not_migrated(path: Path, next_schema: object) -> None:
    thawed(SCHEMA_VERSION, path)
    with path.open("r+b") as file:
        file.seek(36)  # how many pages are free, which are none
        file.write((1).to_bytes(4, "big"))
    before = contents(path)
    with pytest.raises(CatalogError, match="Main freelist"):
        Catalog.open(path, POOL)
    assert contents(path) == before


def test_what_was_never_released_is_refused_by_later_builds_too(path: Path, next_schema: object) -> None:
    thawed(SCHEMA_VERSION, path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE meta SET value='1' WHERE name='schema'")
        connection.commit()
    with pytest.raises(CatalogError, match="never released"):
        Catalog.open(path, POOL)
