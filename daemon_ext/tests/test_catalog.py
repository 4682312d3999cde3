"""The catalog on real files: what comes back, what is refused, and what a failed transaction leaves."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from opened_catalogs import opened
from umasks import umask

from hypercache_daemon import catalog as catalog_module
from hypercache_daemon.catalog import Catalog, CatalogError
from hypercache_daemon.catalog_file import SCHEMA_VERSION
from hypercache_daemon.catalog_rows import AddHold, Change, Delete, DropHold, Put, Remember
from hypercache_daemon.core.extents import Extent, packed
from hypercache_daemon.core.objects import StoredObject, packed_checksums
from hypercache_daemon.core.records import STATES, stored_of
from hypercache_protocol.fields import Tier
from hypercache_protocol.states import SyncStatus

POOL = "p" * 32
WAY_OUT = "--format"


@contextmanager
def made(pool_id: str = POOL) -> Iterator[Path]:
    """The path of a new, empty catalog."""
    folder = Path(tempfile.mkdtemp(prefix="hc", dir="/dev/shm"))  # where a sync costs nothing
    try:
        Catalog.create(folder / "c.sqlite", pool_id, replace=False)
        yield folder / "c.sqlite"
    finally:
        shutil.rmtree(folder)


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[Catalog]:
    with opened(path, POOL) as catalog:
        async with trio.open_nursery() as nursery:
            await nursery.start(catalog.run)
            yield catalog
            nursery.cancel_scope.cancel()


def read(path: Path, pool_id: str = POOL) -> tuple[list[StoredObject], list[AddHold]]:
    """What a new start finds: objects in the order of their commits, holds in that of their ids."""
    with closing(Catalog.open(path, pool_id)) as catalog:
        found = [stored_of(uri, record) for uri, record in catalog.records().items()]
        holds = catalog.holds()
        with catalog.checked():
            objects = sorted(found, key=lambda stored: stored.generation)
    return objects, sorted(holds, key=lambda hold: (hold.hold_id, hold.part))


def an_object(uri: str = "u", generation: int = 1, **fields: object) -> StoredObject:
    values: dict[str, object] = {
        "tier": Tier.NVME,
        "size_bytes": 5,
        "packed_extents": packed([Extent(0, 4096, 5)]),
        "packed_checksums": None,
        "state": SyncStatus.LOCAL_ONLY,
    }
    return StoredObject(uri=uri, generation=generation, **{**values, **fields})


def many(count: int) -> list[StoredObject]:
    return [
        an_object(f"hypercache://object/{i:04}", i + 1, packed_extents=packed([Extent(i % 4, 4096 * i, 5)]))
        for i in range(count)
    ]


def filled(path: Path, objects: Sequence[StoredObject]) -> None:
    async def write() -> None:
        async with running(path) as catalog:
            await catalog.write([Put(stored) for stored in objects])

    trio.run(write)


# -- what comes back -----------------------------------------------------------------------------------

EXTENTS = st.lists(
    st.builds(Extent, st.integers(0, 2**64 - 1), st.integers(0, 2**62), st.integers(1, 4 << 20)), max_size=5
).map(packed)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
OBJECTS = st.builds(
    StoredObject,
    TEXT,
    st.sampled_from(Tier),
    st.integers(0, 2**46),
    EXTENTS,
    st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=5).map(packed_checksums),
    st.integers(0, 2**63 - 1),
    st.sampled_from(STATES),
    st.booleans(),
    st.none() | st.text("0123456789abcdef", min_size=64, max_size=64),
    st.booleans(),
)
HOLDS = st.builds(
    AddHold,
    TEXT,
    st.sampled_from(Tier),
    EXTENTS,
    writer=st.booleans(),
    part=st.integers(0, 1000),
    casual=st.just(True),
)


@settings(max_examples=25)
@given(
    st.lists(OBJECTS, max_size=8, unique_by=(lambda stored: stored.uri, lambda stored: stored.generation)),
    st.lists(HOLDS, max_size=8, unique_by=lambda hold: (hold.hold_id, hold.part)),
)
def test_every_field_comes_back_after_a_restart(objects: list[StoredObject], holds: list[AddHold]) -> None:
    async def write() -> None:
        async with running(path) as catalog:
            await catalog.write([Put(stored) for stored in objects])
            for hold in holds:
                await catalog.write([hold])

    with made() as path:
        trio.run(write)
        found, found_holds = read(path)
    assert sorted(found, key=lambda stored: stored.uri) == sorted(objects, key=lambda stored: stored.uri)
    assert found_holds == sorted(holds, key=lambda hold: (hold.hold_id, hold.part))


async def test_an_object_is_replaced_and_forgotten_by_its_uri() -> None:
    with made() as path:
        async with running(path) as catalog:
            await catalog.write([Put(an_object("a", 1)), Put(an_object("b", 2))])
            await catalog.write([Delete(1), Put(an_object("a", 3)), Delete(2)])
        objects, _ = read(path)
    assert objects == [an_object("a", 3)]


def test_an_upload_that_a_restart_cuts_off_is_to_be_done() -> None:
    with made() as path:
        filled(path, [an_object(state=SyncStatus.SYNCING_BACKEND)])
        assert read(path)[0] == [an_object(state=SyncStatus.COMMITTED)]


async def test_dropping_a_hold_drops_all_its_parts() -> None:
    parts = [AddHold("h", Tier.NVME, packed([Extent(0, 0, 1)]), writer=True, part=part) for part in range(3)]
    other = AddHold("i", Tier.NVME, b"", writer=False)
    with made() as path:
        async with running(path) as catalog:
            await catalog.write([*parts, other])
            await catalog.write([DropHold("h")])
        _, holds = read(path)
    assert holds == [other]


def test_the_epoch_grows_with_each_start() -> None:
    with made() as path:
        epochs = []
        for _ in range(4):
            with opened(path, POOL) as catalog:
                epochs.append(catalog.epoch)
    assert epochs == [1, 2, 3, 4]


# -- transactions --------------------------------------------------------------------------------------


async def test_64_writers_at_once_share_few_transactions() -> None:
    with made() as path:
        async with running(path) as catalog:
            async with trio.open_nursery() as writers:
                for number in range(64):
                    writers.start_soon(catalog.write, [Put(an_object(f"u{number}", number))])
            assert catalog.transactions <= 3
        objects, _ = read(path)
    assert len(objects) == 64


async def test_writes_and_posts_take_effect_in_the_order_in_which_they_were_handed_in() -> None:
    with made() as path:
        async with running(path) as catalog, trio.open_nursery() as writers:
            for number in range(1, 200):
                change = [Put(an_object("u", size_bytes=number))]
                if number % 3:
                    catalog.post(change)
                else:
                    writers.start_soon(catalog.write, change)
                    await trio.testing.wait_all_tasks_blocked()
        objects, _ = read(path)
    assert objects == [an_object("u", size_bytes=199)]


async def test_a_post_before_a_write_is_as_durable_as_the_write() -> None:
    with made() as path:
        async with running(path) as catalog:
            catalog.post([Put(an_object("posted", 1))])
            await catalog.write([Put(an_object("written", 2))])
            image = crash_image(path)
        assert {stored.uri for stored in read(image)[0]} == {"posted", "written"}


async def test_what_a_start_posts_is_durable_before_anybody_is_served() -> None:
    with made() as path, opened(path, POOL) as catalog:
        catalog.post([Put(an_object("posted"))])
        async with trio.open_nursery() as nursery:
            await nursery.start(catalog.run)
            image = crash_image(path)
            nursery.cancel_scope.cancel()
        assert [stored.uri for stored in read(image)[0]] == ["posted"]


async def test_a_failed_transaction_fails_its_writers_and_keeps_what_was_posted() -> None:
    with made() as path:
        async with running(path) as catalog:
            await catalog.write([Put(an_object("before", 1))])
            with no_file_may_grow():
                catalog.post([Put(an_object("posted", 2))])
                async with trio.open_nursery() as writers:
                    for number in range(3):
                        writers.start_soon(fails, catalog, [Put(big(f"refused{number}", 10 + number))])
            await catalog.write([Put(an_object("after", 3))])
        objects, _ = read(path)
    assert [stored.uri for stored in objects] == ["before", "posted", "after"]


async def test_what_was_posted_alone_and_failed_goes_before_the_next_write() -> None:
    with made() as path:
        async with running(path) as catalog:
            with no_file_may_grow():
                catalog.post([Put(big("u", 1))])
                await fails(catalog, [Put(an_object("refused", 2))])
            await catalog.write([Delete(1)])
        assert read(path)[0] == []


async def test_a_failed_transaction_drops_no_hold_of_a_row_that_others_share() -> None:
    chunks = [packed([Extent(0, number << 20, 4096)]) for number in range(4)]
    with made() as path:
        async with running(path) as catalog:
            await catalog.write([AddHold(f"{n}", Tier.NVME, chunks[n], writer=True) for n in range(4)])
            with no_file_may_grow():
                await fails(catalog, [DropHold("1"), Put(big("u", 1))])
                catalog.post([DropHold("2")])
                await fails(catalog, [Put(big("u", 1))])
            await catalog.write([DropHold("0")])
        (left,) = read(path)[1]
    assert sorted(left.extents) == [Extent(0, 1 << 20, 4096), Extent(0, 3 << 20, 4096)]


async def test_what_waits_when_the_daemon_stops_is_written() -> None:
    with made() as path:
        async with trio.open_nursery() as writers, running(path) as catalog:
            for number in range(5):
                writers.start_soon(catalog.write, [Put(an_object(f"u{number}", number))])
            await trio.testing.wait_all_tasks_blocked()
            catalog.post([Put(an_object("last", 9))])
        objects, _ = read(path)
    assert len(objects) == 6


async def test_a_write_after_the_end_fails_instead_of_waiting_for_ever() -> None:
    with made() as path:
        async with running(path) as catalog:
            pass
        with trio.fail_after(5), pytest.raises(CatalogError, match="stopping"):
            await catalog.write([Put(an_object())])


async def test_a_fault_in_a_transaction_reaches_those_who_wait_for_it() -> None:
    too_large = an_object(generation=1 << 70)  # fits in no record: a fault of the caller, not of the disk
    with made() as path, opened(path, POOL) as catalog:
        async with trio.open_nursery() as nursery:
            await nursery.start(ends_with_the_fault, catalog)
            with trio.fail_after(5), pytest.raises(CatalogError):
                await catalog.write([Put(too_large)])


async def ends_with_the_fault(catalog: Catalog, task_status: trio.TaskStatus[None]) -> None:
    with pytest.raises(struct.error):
        await catalog.run(task_status=task_status)


async def fails(catalog: Catalog, changes: Sequence[Change]) -> None:
    with pytest.raises(CatalogError, match="could not be written"):
        await catalog.write(changes)


def big(uri: str, generation: int) -> StoredObject:
    """An object whose row is larger than any page that the file may have left."""
    return an_object(uri, generation, packed_checksums=packed_checksums(range(100_000)))


@contextmanager
def no_file_may_grow() -> Iterator[None]:
    """As on a full file system: every write beyond the first 16 KiB of a file fails in the kernel."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- crashes -------------------------------------------------------------------------------------------


def crash_image(path: Path) -> Path:
    """The files as a crash at this instant would leave them."""
    folder = path.parent / "image"
    folder.mkdir()
    for name in (path.name, f"{path.name}-wal"):
        shutil.copy(path.with_name(name), folder / name)
    return folder / path.name


async def test_a_log_that_was_cut_anywhere_gives_the_state_after_some_transaction() -> None:
    with made() as path:
        async with running(path) as catalog:
            for number in range(12):
                both = [an_object(uri, generation, size_bytes=number) for generation, uri in enumerate("ab")]
                await catalog.write([Put(stored) for stored in both])
            image = crash_image(path)
        log = image.with_name(f"{image.name}-wal")
        whole, database = log.read_bytes(), image.read_bytes()
        seen = []
        for length in [*range(0, len(whole), 1021), len(whole)]:
            image.write_bytes(database)
            log.write_bytes(whole[:length])
            objects, _ = read(image)
            assert len({stored.size_bytes for stored in objects}) <= 1, "half a transaction"
            seen.append(objects[0].size_bytes if objects else -1)
    assert seen == sorted(seen)
    assert set(seen) == set(range(-1, 12))


# -- what is refused -----------------------------------------------------------------------------------


def refusal(path: Path, pool_id: str = POOL) -> str:
    """Why the catalog is refused, be it at once or while it is read."""
    with pytest.raises(CatalogError) as caught:
        read(path, pool_id)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_missing_catalog_is_refused_with_the_way_out(tmp_path: Path) -> None:
    sentence = refusal(tmp_path / "c.sqlite")
    assert "missing" in sentence
    assert "--state-dir" in sentence
    assert WAY_OUT in sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", [0, 1, 15, 16, 100, 4096, 8192, 0.5, 0.9])
def test_a_catalog_that_was_cut_off_is_refused_and_left_as_it_is(left: float) -> None:
    with made() as path:
        filled(path, many(300))
        whole = path.read_bytes()
        cut = whole[: left if isinstance(left, int) else int(len(whole) * left)]
        path.write_bytes(cut)
        sentence = refusal(path)
        assert WAY_OUT in sentence
        assert path.read_bytes() == cut


@settings(max_examples=120)
@given(st.data())
def test_a_changed_byte_is_noticed_or_of_no_account(data: st.DataObject) -> None:
    image = bytearray(DAMAGE_IMAGE)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(image) - 1))
        image[position] ^= data.draw(st.integers(1, 255))
    with made() as path:
        path.write_bytes(image)
        with suppress(CatalogError):
            assert read(path) == (many(40), DAMAGE_HOLDS)


DAMAGE_HOLDS = [
    AddHold(f"{i:02x}", Tier.NVME, packed([Extent(1, i << 20, 4096)]), writer=bool(i % 2)) for i in range(20)
]


def _damage_image() -> bytes:
    async def write() -> None:
        async with running(path) as catalog:
            await catalog.write([*(Put(stored) for stored in many(40)), *DAMAGE_HOLDS])

    with made() as path:
        trio.run(write)
        return path.read_bytes()


DAMAGE_IMAGE = _damage_image()


def test_a_page_that_forgets_one_of_its_rows_is_refused() -> None:
    leaf, page_size = 0x0D, 4096
    with made() as path:
        filled(path, many(100))
        whole = path.read_bytes()
        starts = [start for start in range(page_size, len(whole), page_size) if whole[start] == leaf]
        crowded = [start for start in starts if cells(whole, start) > 5]
        assert crowded
        for start in crowded:
            forgetful = bytearray(whole)
            forgetful[start + 3 : start + 5] = (cells(whole, start) - 1).to_bytes(2, "big")
            path.write_bytes(forgetful)
            assert "damaged" in refusal(path)
            assert path.read_bytes() == forgetful


def test_two_objects_of_one_uri_are_refused() -> None:
    with made() as path:
        filled(path, [an_object("u", 1), an_object("u", 2)])
        assert "two objects have one uri" in refusal(path)


def test_what_is_torn_is_told_by_its_page_also_where_reading_fails_before_the_check() -> None:
    with made() as path:
        filled(path, many(300))
        tear_last_page(path)
        with closing(Catalog.open(path, POOL)) as catalog, pytest.raises(CatalogError) as caught:
            catalog.records()
        assert f"Page {path.stat().st_size // 4096}: " in str(caught.value)
        assert WAY_OUT in str(caught.value)


def test_what_is_torn_outranks_whatever_else_is_wrong() -> None:
    refused = pytest.raises(CatalogError, match="Main freelist")
    with torn() as path, closing(Catalog.open(path, POOL)) as catalog, refused, catalog.checked():
        raise ValueError("the devices are others")


def test_what_is_torn_is_neither_counted_as_a_start_nor_written() -> None:
    with torn() as path:
        before = path.read_bytes()
        with closing(Catalog.open(path, POOL)) as catalog:
            with suppress(CatalogError), catalog.checked():
                pass
            assert path.read_bytes() == before
            with pytest.raises(AssertionError, match="may be torn"):
                trio.run(run_cancelled, catalog)


async def test_what_is_refused_keeps_the_log_that_a_kill_left() -> None:
    with made() as path:
        async with running(path) as catalog:
            await catalog.write([Put(stored) for stored in many(300)])
        async with running(path) as catalog:
            await catalog.write([Put(an_object("a", 0))])  # the last page stays as it is
            killed = crash_image(path)
        whole = files_of(killed)
        assert len(whole) == 2
        assert "another pool" in refusal(killed, "q" * 32)
        with pytest.raises(CatalogError, match="exists"):
            Catalog.create(killed, POOL, replace=False)
        assert files_of(killed) == whole
        tear_last_page(killed)
        torn = files_of(killed)
        assert "damaged" in refusal(killed)
        assert files_of(killed) == torn
        for file, data in whole.items():
            file.write_bytes(data)
        assert len(read(killed)[0]) == 301


def restored(path: Path) -> Path:
    """A backup of the catalog as SQLite makes it, which no longer says that it has a log."""
    backup = path.with_name("backup")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM INTO ?", (str(backup),))
    backup.replace(path)
    return path


def untouched(_: Path) -> None:
    pass


def tear_last_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))


def unsound(path: Path) -> None:
    """Its rows can all be read, and its list of free pages is wrong."""
    with path.open("r+b") as file:
        file.seek(36)
        file.write((1).to_bytes(4, "big"))


@pytest.mark.parametrize(
    ("damage", "pool_id", "words"),
    [(tear_last_page, POOL, "damaged"), (unsound, POOL, "freelist"), (untouched, "q" * 32, "another pool")],
    ids=["torn", "unsound", "another pool"],
)
def test_a_restored_backup_that_is_refused_is_not_written(
    damage: Callable[[Path], None], pool_id: str, words: str
) -> None:
    with made() as path:
        filled(path, many(300))
        damage(restored(path))
        before = files_of(path)
        assert words in refusal(path, pool_id)
        assert files_of(path) == before


def test_a_restored_backup_is_read_and_written_like_any_other() -> None:
    with made() as path:
        filled(path, many(3))
        filled(restored(path), [an_object("a", 9)])
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert [stored.uri for stored in read(path)[0]][-1] == "a"
        assert len(read(path)[0]) == 4


def files_of(path: Path) -> dict[Path, bytes]:
    """The file and its log; what else SQLite makes there it can make anew."""
    return {file: file.read_bytes() for file in path.parent.iterdir() if not file.name.endswith("-shm")}


async def run_cancelled(catalog: Catalog) -> None:
    with trio.move_on_after(0):
        await catalog.run()


@contextmanager
def torn() -> Iterator[Path]:
    """A catalog whose rows can all be read, and whose list of free pages is wrong."""
    with made() as path:
        filled(path, many(3))
        unsound(path)
        yield path


def test_the_pages_are_checked_while_the_start_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object) -> None:
        assert is_going_on.wait(5), "the check held up the start"

    is_going_on = threading.Event()
    monkeypatch.setattr(catalog_module, "check_pages", wait)
    with made() as path, closing(Catalog.open(path, POOL)) as catalog, catalog.checked():
        is_going_on.set()


def test_the_whole_file_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def advise(_: int, start: int, size_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.append(range(start, start + size_bytes))

    asked: list[range] = []
    monkeypatch.setattr(os, "posix_fadvise", advise)
    with made() as path:
        filled(path, many(3000))
        size_bytes = path.stat().st_size
        asked.clear()
        read(path)
    assert len(asked) > 1, "of more at a time Linux reads no more than its window"
    assert [pages.start for pages in asked[1:]] == [pages.stop for pages in asked[:-1]]
    assert asked[0].start == 0
    assert asked[-1].stop >= size_bytes


def test_a_start_that_fails_is_not_counted() -> None:
    with made() as path:
        with closing(Catalog.open(path, POOL)) as catalog, suppress(ValueError), catalog.checked():
            raise ValueError("the devices are others")
        with opened(path, POOL) as catalog:
            assert catalog.epoch == 1


@pytest.mark.parametrize(
    ("step", "sentence", "epoch"),
    [
        ("transaction", "nothing in the catalog was changed", 1),
        ("write_ahead", "every object in the catalog is as it was", 2),
    ],
)
def test_a_start_that_cannot_write_says_what_was_changed(
    step: str, sentence: str, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with made() as path:
        monkeypatch.setattr(catalog_module, step, fail)
        refused = pytest.raises(CatalogError, match=f"cannot be written: disk I/O error; .*: {sentence}$")
        with closing(Catalog.open(path, POOL)) as catalog, refused, catalog.checked():
            pass
        monkeypatch.undo()
        with opened(path, POOL) as catalog:
            assert catalog.epoch == epoch


def cells(database: bytes, page_start: int) -> int:
    return int.from_bytes(database[page_start + 3 : page_start + 5], "big")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE objects SET record=(SELECT record FROM objects WHERE uri LIKE '%1') WHERE uri LIKE '%2'",
        "UPDATE objects SET record=(SELECT record FROM objects WHERE uri LIKE '%1'),"
        " crc=(SELECT crc FROM objects WHERE uri LIKE '%1') WHERE uri LIKE '%2'",
        "UPDATE objects SET record=substr(record, 1, 20) WHERE uri LIKE '%2'",
        "UPDATE objects SET record=CAST(record || x'00' AS BLOB) WHERE uri LIKE '%2'",
        "UPDATE objects SET record=x'' WHERE uri LIKE '%2'",
        "UPDATE objects SET record='text' WHERE uri LIKE '%2'",
        "UPDATE objects SET record=7 WHERE uri LIKE '%2'",
        "UPDATE objects SET uri='hypercache://object/another' WHERE uri LIKE '%2'",
        "UPDATE objects SET generation=7 WHERE uri LIKE '%2'",
        "UPDATE objects SET crc=0 WHERE uri LIKE '%2'",
        "UPDATE objects SET crc='text' WHERE uri LIKE '%2'",
        "UPDATE holds SET writer=2",
        "DELETE FROM meta WHERE name='schema'",
        "UPDATE meta SET value='x' WHERE name='epoch'",
        "UPDATE meta SET value='1.5' WHERE name='schema'",
        "DROP TABLE holds",
        "DROP TABLE meta",
    ],
)
def test_a_row_that_somebody_changed_is_refused(statement: str) -> None:
    async def write() -> None:
        async with running(path) as catalog:
            await catalog.write([*(Put(stored) for stored in many(3)), *DAMAGE_HOLDS])

    with made() as path:
        trio.run(write)
        change(path, statement)
        assert WAY_OUT in refusal(path)


def test_a_catalog_of_a_newer_release_is_refused_and_left_as_it_is() -> None:
    with made() as path:
        filled(path, many(3))
        change(path, f"UPDATE meta SET value='{SCHEMA_VERSION + 1}' WHERE name='schema'")
        before = path.read_bytes()
        sentence = refusal(path)
        assert f"schema {SCHEMA_VERSION + 1}" in sentence
        assert "newer hypercached" in sentence
        assert path.read_bytes() == before


def test_a_catalog_of_a_build_that_was_never_released_is_refused_with_the_way_out() -> None:
    with made() as path:
        change(path, "UPDATE meta SET value='1' WHERE name='schema'")
        sentence = refusal(path)
        assert "schema 1" in sentence
        assert WAY_OUT in sentence


@pytest.mark.parametrize("damaged", [0, 1, 499, 500, 501, 1199])
def test_one_changed_row_among_many_is_refused_by_its_name(damaged: int) -> None:
    with made() as path:
        filled(path, many(1200))
        change(path, f"UPDATE objects SET record=zeroblob(48) WHERE uri LIKE '%/{damaged:04}'")
        assert f"'hypercache://object/{damaged:04}' is not as it was written" in refusal(path)


def test_more_objects_than_are_read_together_all_come_back() -> None:
    with made() as path:
        filled(path, many(1200))
        assert read(path)[0] == many(1200)


def test_a_catalog_of_another_pool_is_refused() -> None:
    with made("q" * 32) as path:
        assert "another pool" in refusal(path)


def test_a_file_that_is_no_catalog_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    path.write_bytes(b"these are my holiday notes" * 100)
    assert "no SQLite file" in refusal(path)
    assert path.read_bytes() == b"these are my holiday notes" * 100


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE songs (title)")
    assert WAY_OUT in refusal(path)


def test_a_folder_in_the_place_of_the_catalog_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.sqlite").mkdir()
    assert "cannot be read" in refusal(tmp_path / "c.sqlite")


HOLDER = """
import sys
from pathlib import Path
from hypercache_daemon.catalog import Catalog
catalog = Catalog.open(Path(sys.argv[1]), sys.argv[2])
print("open", flush=True)
sys.stdin.read()
"""


async def test_a_disk_without_room_is_no_reason_to_give_up_what_is_in_the_catalog() -> None:
    with made() as path:
        async with running(path) as catalog:
            await catalog.write([Put(an_object("u", 1))])
        with no_file_may_grow():
            sentence = refusal(path)
        assert "make room on its disk" in sentence
        assert WAY_OUT not in sentence
        assert [stored.uri for stored in read(path)[0]] == ["u"]


def test_a_catalog_that_another_process_has_open_is_refused_until_that_ends() -> None:
    with made() as path:
        command = [sys.executable, "-c", HOLDER, str(path), POOL]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"open\n"
            sentence = refusal(path)
            assert "in use by another process" in sentence
            assert WAY_OUT not in sentence, "nobody should format a pool that is at work"
            holder.kill()
            holder.wait(10)
            assert read(path) == ([], [])


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(statement).rowcount != 0


# -- making --------------------------------------------------------------------------------------------


async def test_nobody_else_may_read_the_catalog_whatever_the_umask(short_dir: Path) -> None:
    path = short_dir / "state" / "c.sqlite"
    with umask(0):
        Catalog.create(path, POOL, replace=False)
        async with running(path) as catalog:
            await catalog.write([Put(an_object())])
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes["c.sqlite"] == 0o600
    assert modes["c.sqlite-wal"] == 0o600
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_catalog_is_never_made_over_another() -> None:
    with made() as path:
        filled(path, many(3))
        with pytest.raises(CatalogError, match="exists although the devices are blank") as caught:
            Catalog.create(path, POOL, replace=False)
        assert WAY_OUT in str(caught.value)
        assert read(path)[0] == many(3)


def test_a_catalog_that_may_be_replaced_leaves_nothing_of_the_old_one() -> None:
    with made() as path:
        filled(path, many(3))
        path.with_name("c.sqlite-wal").write_bytes(b"old log")
        Catalog.create(path, "q" * 32, replace=True)
        with opened(path, "q" * 32) as catalog:
            assert (catalog.records(), catalog.epoch) == ({}, 1)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_a_place_where_no_catalog_can_be_made_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x")
    path = tmp_path / "x" / "c.sqlite" if (tmp_path / "x").is_file() else tmp_path / "x"
    with pytest.raises(CatalogError, match=str(path)):
        Catalog.create(path, POOL, replace=False)


def test_a_catalog_that_no_daemon_ever_opened_is_no_obstacle_to_a_new_pool() -> None:
    with made("q" * 32) as path:
        Catalog.create(path, POOL, replace=False)
        assert read(path) == ([], [])


def test_what_a_cut_off_start_left_of_a_catalog_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "c.sqlite.new").write_bytes(b"half")
    (tmp_path / "c.sqlite.new-wal").write_bytes(b"half")
    Catalog.create(tmp_path / "c.sqlite", POOL, replace=False)
    assert read(tmp_path / "c.sqlite") == ([], [])
    assert [file.name for file in tmp_path.iterdir()] == ["c.sqlite"]


async def test_uris_come_in_the_order_of_their_commits_from_anywhere_on() -> None:
    with made() as path:
        async with running(path) as catalog:
            names = [stored.uri for stored in many(5)]
            await catalog.write([Put(stored) for stored in reversed(many(5))])
            found = list(enumerate(names, 1))
            assert await catalog.uris_between(0, 9, 3) == found[:3]
            assert await catalog.uris_between(3, 9, 3) == found[3:]
            assert await catalog.uris_between(1, 3, 3) == found[1:3]
            await catalog.write([Delete(3)])
            assert await catalog.uris_between(3, 9, 1) == found[3:4], "even if that one is gone"
            assert await catalog.uris_between(5, 9, 3) == []


def test_what_is_to_be_remembered_is_there_for_the_next_start() -> None:
    async def write() -> None:
        async with running(path) as catalog:
            assert "word" not in catalog.remembered
            await catalog.write([Remember("word", "first"), Remember("other", "")])
            catalog.post([Remember("word", "last")])

    with made() as path:
        trio.run(write)
        for _ in range(2):
            with opened(path, POOL) as catalog:
                assert (catalog.remembered["word"], catalog.remembered["other"]) == ("last", "")


def test_a_catalog_that_cannot_be_read_any_more_says_so() -> None:
    async def ask() -> None:
        async with running(path) as catalog:
            catalog._connection.execute("DROP TABLE objects")
            with pytest.raises(CatalogError, match="could not be read: no such table"):
                await catalog.uris_between(0, 9, 1)

    with made() as path:
        trio.run(ask)
