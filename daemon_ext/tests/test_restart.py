"""What a daemon finds of the one before it, after an orderly stop. (The crashes are in test_kill_sweep.)"""

from __future__ import annotations

import gc
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from daemon_harness import CHUNK, MIB, Client, Message, eventually, pattern, running
from frames import framed, layouts_of

from hypercache_compat.raw_wire import write_layout
from hypercache_daemon.access import DeviceError
from hypercache_daemon.catalog import CatalogError
from hypercache_daemon.catalog_rows import object_row
from hypercache_daemon.core.extents import Extent, packed
from hypercache_daemon.core.objects import StoredObject
from hypercache_protocol.checksum import crc32
from hypercache_protocol.fields import Tier
from hypercache_protocol.states import SyncStatus

URI = "hypercache://a/b"


def places(reply: Message) -> set[tuple[str, int]]:
    return {(chunk["device"], chunk["offset"]) for chunk in reply["chunk_layout"]}


def ram_files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "ram").iterdir()}


async def test_objects_of_both_tiers_come_back_as_they_were(short_dir: Path) -> None:
    layouts = []
    for _ in range(3):
        async with running(short_dir) as daemon:
            client = await daemon.connect()
            if not layouts:
                await client.store("nvme", pattern(1, CHUNK + 5), commit={"chunk_checksums": [1, 2]})
                await client.store("ram", pattern(2, CHUNK + 5), tier="ram", pinned=True)
            layouts.append([await client.ask("locate", uri=uri) for uri in ("nvme", "ram")])
            assert await client.fetch("nvme") == pattern(1, CHUNK + 5)
            assert await client.fetch("ram") == pattern(2, CHUNK + 5)
    assert layouts[0] == layouts[1] == layouts[2]


async def test_generations_and_stage_ids_of_a_new_start_are_new(short_dir: Path) -> None:
    generations = []
    for _ in range(3):
        async with running(short_dir) as daemon:
            client = await daemon.connect()
            generations.append((await client.store(URI, b"bytes"))["generation"])
            await client.ask("evict", uri=URI)
            staged = await client.stage("other", b"bytes")
    assert generations == sorted(set(generations))
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert (await client.ask("locate", uri="other"))["status"] == "MISS"
        code, sentence = await client.refusal("commit_write", uri="other", stage_id=staged["stage_id"])
        assert code == "STALE_STAGE"
        assert "restarted" in sentence


@pytest.mark.parametrize("how", ["formatted", "older catalog"])
@pytest.mark.parametrize("tier", ["nvme", "ram"])
async def test_who_staged_in_a_start_that_the_catalog_forgot_gets_nobody_elses_write(
    short_dir: Path, how: str, tier: str
) -> None:
    async with running(short_dir):
        pass
    shutil.copytree(short_dir / "pool", short_dir / "older")
    if how == "formatted":
        async with running(short_dir, format=True) as daemon:
            staged = await (await daemon.connect()).stage(URI, b"mine ", tier=tier)
    else:
        async with running(short_dir) as daemon:
            staged = await (await daemon.connect()).stage(URI, b"mine ", tier=tier)
        for path in (short_dir / "older").glob("catalog*"):
            shutil.copy(path, short_dir / "pool")
    async with running(short_dir, format=how == "formatted") as daemon:
        client, other = await daemon.connect(), await daemon.connect()
        theirs = await other.ask("stage_write", uri=URI, size_bytes=5, tier=tier)
        if tier == "ram":
            assert not places(theirs) & places(staged), "what is still written would be theirs"
        code, _ = await client.refusal("commit_write", uri=URI, stage_id=staged["stage_id"])
        assert code == "STALE_STAGE"
        write_layout(theirs["chunk_layout"], b"their")
        await other.ask("commit_write", uri=URI, stage_id=theirs["stage_id"], local_only=True)
        assert await client.fetch(URI) == b"their"


async def test_blocks_that_somebody_may_still_write_or_read_rest_anew(short_dir: Path) -> None:
    settings = {"stage_expiry_s": 1000, "quarantine_s": 100, "quarantine_share": 1}
    async with running(short_dir, **settings) as daemon:
        client = await daemon.connect()
        taken = places(await client.stage("staged", pattern(1, 5 * MIB)))
        await client.store(URI, pattern(2, 3 * MIB))
        taken |= places(await client.ask("locate", uri=URI))
        await client.ask("evict", uri=URI)
    async with running(short_dir, **settings) as daemon:
        client = await daemon.connect()
        pool = (await client.status())["pools"]["nvme"]
        assert (pool["free_bytes"], pool["quarantined_bytes"]) == (24 * MIB, 8 * MIB)
        rest = await client.ask("stage_write", uri="rest", size_bytes=24 * MIB)
        assert not places(rest) & taken
        daemon.ahead_s = 101
        await eventually(lambda: daemon.parts.store.cache.pools["nvme"].quarantined_bytes == 5 * MIB)
        daemon.ahead_s = 900
        assert (await client.refusal("stage_write", uri="more", size_bytes=4 * MIB))[0] == "NO_SPACE"
        daemon.ahead_s = 1100
        assert (await client.ask("stage_write", uri="more", size_bytes=8 * MIB))["status"] == "WRITESTAGED"
    async with running(short_dir, **settings) as daemon:
        status = await (await daemon.connect()).status()
        assert status["pools"]["nvme"]["quarantined_bytes"] == 32 * MIB, "the holds of both starts, once each"


@pytest.mark.parametrize("how", ["evicted", "purged", "replaced", "replaced in a batch"])
async def test_what_readers_may_still_read_rests_over_a_restart_however_it_left(
    short_dir: Path, how: str
) -> None:
    settings = {"quarantine_s": 100, "quarantine_share": 1}
    async with running(short_dir, **settings) as daemon:
        client = await daemon.connect()
        await client.store(URI, pattern(1, 3 * MIB))
        taken = places(await client.ask("locate", uri=URI))
        match how:
            case "evicted":
                await client.ask("evict", uri=URI)
            case "purged":
                await client.ask("purge")
            case "replaced":
                await client.store(URI, b"")
            case _:
                await (await framed(daemon)).store({URI: b"", "other": b""})
    async with running(short_dir, **settings) as daemon:
        client = await daemon.connect()
        pool = (await client.status())["pools"]["nvme"]
        assert (pool["used_bytes"], pool["quarantined_bytes"]) == (0, 3 * MIB)
        rest = await client.ask("stage_write", uri="rest", size_bytes=pool["free_bytes"])
        assert not places(rest) & taken


@pytest.mark.parametrize("committed", [0, 1, 5, 8])
async def test_of_a_batch_what_nobody_committed_rests_and_the_rest_is_there(
    short_dir: Path, committed: int
) -> None:
    settings = {"stage_expiry_s": 1000, "quarantine_share": 1}
    uris = [f"u{number}" for number in range(8)]
    async with running(short_dir, **settings) as daemon:
        client = await framed(daemon)
        staged = await client.ask("stage_many", suffixes=uris, sizes=[5000] * 8)
        layouts = layouts_of(staged["layouts"])
        for uri, layout in zip(uris, layouts, strict=True):
            write_layout(layout["chunk_layout"], uri.encode().ljust(5000))
        ids = staged["stage_ids"][:committed]
        reply = await client.ask("commit_many", suffixes=uris[:committed], stage_ids=ids, local_only=True)
        assert reply["errors"] == []
    async with running(short_dir, **settings) as daemon:
        client = await framed(daemon)
        pool = (await client.ask("get_status"))["pools"]["nvme"]
        assert (pool["used_bytes"], pool["quarantined_bytes"]) == (8192 * committed, 8192 * (8 - committed))
        rest = await client.ask("stage_many", suffixes=["rest"], sizes=[pool["free_bytes"]])
        assert not places(layouts_of(rest["layouts"])[0]) & set.union(*map(places, layouts))
        found = [await client.fetch(uri) for uri in uris]
        assert found == [uri.encode().ljust(5000) if uri in uris[:committed] else None for uri in uris]
        daemon.ahead_s = 1001
        await eventually(lambda: daemon.parts.store.cache.pools["nvme"].quarantined_bytes == 0)


async def test_after_a_restart_the_oldest_commits_leave_first(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        for number in (5, 2, 7, 0, 1, 3, 4, 6):
            await client.store(f"u{number}", pattern(number, CHUNK))
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.stage("new", pattern(9, 2 * CHUNK))
        missing = [uri for uri in [f"u{n}" for n in range(8)] if await client.fetch(uri) is None]
        assert missing == ["u2", "u5"]


# -- the RAM tier --------------------------------------------------------------------------------------


async def store_in_ram(client: Client) -> dict[str, list[Path]]:
    """Three objects of two chunks each; gives the files of each."""
    files = {}
    for number, uri in enumerate(("a", "b", "c")):
        await client.store(uri, pattern(number, CHUNK + 5), tier="ram")
        found = await client.ask("locate", uri=uri)
        files[uri] = [Path(chunk["device"]) for chunk in found["chunk_layout"]]
    return files


async def test_a_ram_object_that_lost_a_file_is_a_miss_and_frees_the_others(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        files = await store_in_ram(await daemon.connect())
    files["a"][1].unlink()
    os.truncate(files["b"][0], 100)
    for _ in range(2):
        async with running(short_dir) as daemon:
            client = await daemon.connect()
            assert [await client.fetch(uri) for uri in ("a", "b")] == [None, None]
            assert await client.fetch("c") == pattern(2, CHUNK + 5)
            assert (await client.status())["pools"]["ram"]["used_bytes"] == CHUNK + 4096
            assert ram_files(short_dir) == {path.name for path in files["c"]}
            again = await client.stage("a", b"bytes", tier="ram")
            assert not places(again) & {(str(path), 0) for paths in files.values() for path in paths}


async def test_after_a_reboot_all_of_the_ram_tier_is_gone_and_the_rest_is_there(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await store_in_ram(client)
        await client.store("d", b"dirty", commit={}, tier="ram")
        await client.store("nvme", b"bytes")
    for path in (short_dir / "ram").iterdir():
        path.unlink()
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        status = await client.status()
        assert status["objects"] == 1
        assert status["pools"]["ram"]["free_bytes"] == 16 * MIB
        assert await client.fetch("nvme") == b"bytes"
    assert "1 of the lost objects were in no backend yet" in caplog.text


async def test_files_of_ram_writes_that_were_never_committed_are_swept(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.store("kept", b"bytes", tier="ram")
        kept = ram_files(short_dir)
        await client.stage(URI, pattern(1, CHUNK + 5), tier="ram")
        await client.stage("gone", b"bytes", tier="ram")
        await client.ask("evict", uri="gone")
        assert len(ram_files(short_dir)) == 4
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert ram_files(short_dir) == kept
        pool = (await client.status())["pools"]["ram"]
        assert (pool["used_bytes"], pool["free_bytes"]) == (4096, 16 * MIB - 4096)


async def test_a_ram_tier_that_shrank_keeps_its_objects_and_takes_no_more_until_some_left(
    short_dir: Path,
) -> None:
    async with running(short_dir) as daemon:
        await store_in_ram(await daemon.connect())
    async with running(short_dir, ram_size=6 * MIB, evict_above=1, evict_down_to=1) as daemon:
        client = await daemon.connect()
        pool = (await client.status())["pools"]["ram"]
        assert pool["total_bytes"] == pool["used_bytes"] == 3 * (CHUNK + 4096)
        assert await client.fetch("a") == pattern(0, CHUNK + 5)
        await client.store("new", b"bytes", tier="ram")
        here = [uri for uri in ("a", "b", "c") if await client.fetch(uri) is not None]
        assert here == ["a"], "the one that was just read"
        assert (await client.status())["pools"]["ram"]["total_bytes"] == 6 * MIB


async def test_with_the_ram_tier_turned_off_its_objects_are_misses(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await store_in_ram(client)
        await client.store("nvme", b"bytes")
    async with running(short_dir, ram_size=0) as daemon:
        client = await daemon.connect()
        assert (await client.status())["objects"] == 1
        assert await client.fetch("a") is None


async def test_a_ram_size_that_the_machine_has_not_is_refused_where_it_was_asked_for(short_dir: Path) -> None:
    with pytest.raises(
        DeviceError, match=r"--ram-size .* room for .* bytes; ask for less, or give another --ram-dir"
    ):
        async with running(short_dir, ram_size=1 << 60):
            pass
    async with running(short_dir) as daemon:
        assert (await (await daemon.connect()).ask("ping"))["status"] == "PONG"


async def test_a_ram_size_is_not_refused_for_what_the_tier_itself_has_taken(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tight(fd: int) -> os.statvfs_result:
        taken = sum(path.stat().st_blocks * 512 for path in (short_dir / "ram").iterdir())
        free = (16 * MIB - taken) // 4096
        return os.statvfs_result((4096, 4096, 4096, free, free, 7, 7, 7, 0, 255))

    async with running(short_dir) as daemon:
        await store_in_ram(await daemon.connect())
    monkeypatch.setattr(os, "fstatvfs", tight)
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert (await client.status())["pools"]["ram"]["total_bytes"] == 16 * MIB
        assert await client.fetch("a") == pattern(0, CHUNK + 5)


# -- what is refused -----------------------------------------------------------------------------------


def rubbish(catalog: Path) -> None:
    catalog.write_bytes(b"rubbish")


def torn(catalog: Path) -> None:
    """Every row is there still, and the list of free pages tells of one that there isn't."""
    with catalog.open("r+b") as file:
        file.seek(36)
        file.write((1).to_bytes(4, "big"))


def of_other_devices(catalog: Path) -> None:
    """Sound, and says that a chunk lies beyond the end of its device."""
    chunk = packed([Extent(0, 1 << 40, 5)])
    beyond = StoredObject("beyond", Tier.NVME, 5, chunk, None, 1, SyncStatus.LOCAL_ONLY)
    with closing(sqlite3.connect(catalog)) as connection, connection:
        connection.execute("INSERT INTO objects VALUES (?, ?, ?, ?)", object_row(beyond))


@pytest.mark.parametrize("damage", [rubbish, torn, of_other_devices], ids=lambda damage: damage.__name__)
async def test_a_start_that_is_refused_changes_nothing_and_lets_go_of_everything(
    short_dir: Path, damage: Callable[[Path], None]
) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.store(URI, b"bytes")
        await client.store("ram", b"bytes", tier="ram")
    swept_later = short_dir / "ram" / f"{1 << 60:016x}.shm"
    swept_later.touch()
    catalog = short_dir / "pool" / "catalog.sqlite"
    whole = catalog.read_bytes()
    damage(catalog)
    before = files_in(short_dir), open_files()
    with pytest.raises(CatalogError, match=r"damaged|does not fit the devices"):
        async with running(short_dir):
            pass
    assert (files_in(short_dir), open_files()) == before
    catalog.write_bytes(whole)
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert [await client.fetch(uri) for uri in (URI, "ram")] == [b"bytes"] * 2
        assert not swept_later.exists()


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def open_files() -> list[str]:
    """What this process has open, without what only waits to be collected."""
    gc.collect()
    links = map(os.path.realpath, Path("/proc/self/fd").iterdir())
    return sorted(link for link in links if not link.startswith("/proc/"))


# -- a catalog that is older than what lies on the devices -------------------------------------------------


async def test_after_an_older_catalog_was_restored_nothing_without_checksums_need_be_served(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, others = pattern(1, MIB), pattern(2, MIB)
    folder, copy = short_dir / "state", short_dir / "copy"
    settings = {"state_dir": folder, "quarantine_s": 0.0}
    async with running(short_dir, **settings) as daemon:
        client = await daemon.connect()
        await client.store("an old client's", data, commit={"local_only": False})
        await client.store("verifiable", data, commit={"chunk_checksums": [crc32(data)]})
    shutil.copytree(folder, copy)
    async with running(short_dir, **settings) as daemon:
        client = await daemon.connect()
        place = places(await client.ask("locate", uri="an old client's"))
        await client.ask("evict", uri="an old client's")
        assert places(await client.stage("another's", others)) == place
    shutil.rmtree(folder)
    copy.rename(folder)
    async with running(short_dir, **settings, forget_unverifiable=True) as daemon:
        await require_only_verifiable(await daemon.connect(), data)
    assert "gave up 1 objects without checksums, 1 of them in no backend" in caplog.text
    async with running(short_dir, **settings) as daemon:  # for good
        await require_only_verifiable(await daemon.connect(), data)
    async with running(short_dir, **settings, forget_unverifiable=True):
        assert "gave up 0 objects without checksums" in caplog.text, "who asked for it is told so"


async def require_only_verifiable(client: Client, data: bytes) -> None:
    assert (await client.ask("locate", uri="an old client's"))["status"] == "MISS"
    assert await client.fetch("verifiable") == data
    pool = (await client.status())["pools"]["nvme"]
    assert pool["used_bytes"] == MIB
    assert pool["free_bytes"] == pool["total_bytes"] - MIB
