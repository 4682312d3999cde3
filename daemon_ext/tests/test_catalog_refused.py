"""Which catalogs a start refuses, in which words, and that it leaves them as they are."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import trio
from catalogs_made import (
    POOL,
    an_object,
    crash_image,
    filled,
    made,
    many,
    no_file_may_grow,
    opened,
    read,
    running,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercache_daemon import catalog as catalog_module
from hypercache_daemon.catalog import Catalog, CatalogError
from hypercache_daemon.catalog_file import SCHEMA_VERSION
from hypercache_daemon.catalog_rows import AddHold, Put
from hypercache_daemon.core.extents import Extent, packed
from hypercache_protocol.fields import Tier

WAY_OUT = "--format"


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
        assert "another pool than the devices; give the --state-dir of theirs; or restore it" in refusal(path)


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
