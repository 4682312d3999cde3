"""The catalog on real files: what comes back, and what a failed transaction or a crash leaves."""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable, Sequence
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
from umasks import umask

from hypercache_daemon.catalog import Catalog, CatalogError
from hypercache_daemon.catalog_rows import AddHold, Change, Delete, DropHold, Put, Remember
from hypercache_daemon.core.extents import Extent, packed
from hypercache_daemon.core.objects import StoredObject, packed_checksums
from hypercache_daemon.core.records import STATES
from hypercache_protocol.fields import Tier
from hypercache_protocol.states import SyncStatus

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


# -- crashes -------------------------------------------------------------------------------------------


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
        assert "--format" in str(caught.value)
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
    with pytest.raises(CatalogError, match=rf"{path} (exists|cannot be made).*give another --state-dir"):
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
