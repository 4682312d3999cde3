"""Evict, purge, pin, eviction by policy, and what a full pool says."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from daemon_harness import CHUNK, MIB, Client, Message, eventually, line, pattern, running

from hypercache_daemon import removal
from hypercache_daemon.catalog_rows import Change, Delete
from hypercache_protocol.fields import Tier

URI = "hypercache://a/b"
TIERS = pytest.mark.parametrize("tier", ["nvme", "ram"])


async def present(client: Client, uris: list[str]) -> list[str]:
    found = [(uri, await client.ask("locate", uri=uri)) for uri in uris]
    return [uri for uri, reply in found if reply["status"] == "HIT"]


async def fill(client: Client, count: int, **fields: object) -> list[str]:
    """Objects of 4 MiB, oldest first."""
    uris = [f"object/{number}" for number in range(count)]
    for number, uri in enumerate(uris):
        await client.store(uri, pattern(number, CHUNK), **fields)
    return uris


# -- by clients ----------------------------------------------------------------------------------------


@TIERS
@pytest.mark.parametrize("pinned", [True, False])
async def test_evict_deletes_the_object_pinned_or_not_and_its_blocks_rest(
    short_dir: Path, tier: str, pinned: bool
) -> None:
    async with running(short_dir, quarantine_s=100) as daemon:
        client = await daemon.connect()
        await client.store(URI, pattern(1, MIB), tier=tier, pinned=pinned)
        assert await client.ask("evict", uri=URI) == {"status": "EVICTED"}
        assert await client.ask("evict", uri=URI) == {"status": "MISS"}
        assert (await client.ask("locate", uri=URI))["status"] == "MISS"
        pool = (await client.status())["pools"][tier]
        assert (pool["used_bytes"], pool["pinned_bytes"], pool["quarantined_bytes"]) == (0, 0, MIB)
        daemon.ahead_s = 101
        await eventually(lambda: daemon.parts.store.cache.pools[Tier(tier)].quarantined_bytes == 0)
        assert list((short_dir / "ram").iterdir()) == []


async def test_evict_of_what_is_not_there_is_a_miss(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        assert await (await daemon.connect()).ask("evict", uri=URI) == {"status": "MISS"}


async def test_evict_of_what_is_only_staged_drops_the_newest_write_and_keeps_its_blocks_long(
    short_dir: Path,
) -> None:
    async with running(short_dir, quarantine_s=1, stage_expiry_s=1000) as daemon:
        client = await daemon.connect()
        first = await client.stage(URI, pattern(1, MIB))
        second = await client.stage(URI, pattern(2, MIB))
        assert (await client.ask("evict", uri=URI))["status"] == "EVICTED"
        code, _ = await client.refusal("commit_write", uri=URI, stage_id=second["stage_id"])
        assert code == "STALE_STAGE"
        daemon.ahead_s = 900  # its writer may not know, and still write
        await client.ask("stage_write", uri="other", size_bytes=1)
        pool = (await client.status())["pools"]["nvme"]
        assert (pool["staged_bytes"], pool["quarantined_bytes"]) == (MIB + 4096, MIB)
        await client.ask("commit_write", uri=URI, stage_id=first["stage_id"], local_only=True)
        assert await client.fetch(URI) == pattern(1, MIB)


async def test_evict_takes_the_object_before_what_is_staged(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.store(URI, b"old")
        await client.stage(URI, b"new")
        assert (await client.ask("evict", uri=URI))["status"] == "EVICTED"
        assert (await client.ask("locate", uri=URI))["sync_status"] == "STAGED"
        await client.ask("commit_write", uri=URI)
        assert await client.fetch(URI) == b"new"


async def test_evict_gives_up_what_is_withheld_only_where_nothing_is_staged(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client, cache = await daemon.connect(), daemon.parts.store.cache
        await client.store(URI, b"the only copy", commit={})
        cache.withhold(URI)
        await client.stage(URI, b"given up by its writer")
        assert (await client.ask("get_write_status", uri=URI))["sync_status"] == "STAGED"
        assert (await client.ask("evict", uri=URI))["status"] == "EVICTED"
        assert cache.staged.newest(URI) is None
        cache.give_back(URI)
        assert await client.fetch(URI) == b"the only copy"
        cache.withhold(URI)
        assert (await client.ask("evict", uri=URI))["status"] == "EVICTED"
        assert cache.withheld() == []
        assert (await client.ask("evict", uri=URI))["status"] == "MISS"


async def test_purge_deletes_every_object_of_both_tiers_and_no_staged_write(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        for number in range(600):  # more than one batch
            uri, tier = f"u{number}", "ram" if number % 2 else "nvme"
            stage = line("stage_write", uri=uri, size_bytes=1, tier=tier)
            await client.send(stage + line("commit_write", uri=uri, local_only=number % 3 == 0))
            assert [(await client.receive())["status"] for _ in range(2)] == ["WRITESTAGED", "WRITECOMMITTED"]
        await client.ask("pin", uri="u1", pinned=True)
        await client.stage(URI, b"staged")
        assert (await client.status())["objects"] == 600
        assert await client.ask("purge") == {"status": "PURGED"}
        status = await client.status()
        assert status["objects"] == 0
        assert [pool["used_bytes"] for pool in status["pools"].values()] == [0, 0]
        assert [pool["pinned_bytes"] + pool["dirty_bytes"] for pool in status["pools"].values()] == [0, 0]
        assert (await client.ask("commit_write", uri=URI))["status"] == "WRITECOMMITTED"
        assert await client.fetch(URI) == b"staged"
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert (await client.status())["objects"] == 1
        assert await client.fetch(URI) == b"staged"


@pytest.mark.parametrize("action", ["evict", "commit_write"])
async def test_blocks_rest_from_the_moment_when_nobody_finds_them_however_long_the_catalog_took(
    short_dir: Path, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(short_dir, quarantine_s=100, quarantine_share=1.0) as daemon:
        client, pool = await daemon.connect(), daemon.parts.store.cache.pools[Tier.NVME]
        await client.store(URI, pattern(1, MIB))
        await client.stage(URI, b"new")
        write = daemon.parts.store.catalog.write

        async def take_long(changes: Sequence[Change]) -> None:
            daemon.ahead_s = 150  # readers find the old object all this time
            await write(changes)

        monkeypatch.setattr(daemon.parts.store.catalog, "write", take_long)
        await client.ask(action, uri=URI)
        daemon.ahead_s = 200
        daemon.parts.store.release_due()
        assert pool.quarantined_bytes == MIB
        daemon.ahead_s = 300
        daemon.parts.store.release_due()
        assert pool.quarantined_bytes == 0


@pytest.mark.parametrize(("share", "rests"), [(0.25, 8 * MIB), (0.5, 16 * MIB), (1.0, 20 * MIB)])
async def test_no_more_than_the_configured_share_of_a_pool_rests(
    short_dir: Path, share: float, rests: int
) -> None:
    async with running(short_dir, quarantine_s=100, quarantine_share=share) as daemon:
        client = await daemon.connect()
        for uri in await fill(client, 5):
            await client.ask("evict", uri=uri)
        daemon.parts.store.release_due()
        assert (await client.status())["pools"]["nvme"]["quarantined_bytes"] == rests


# -- pins ----------------------------------------------------------------------------------------------


async def test_a_pin_survives_a_restart_and_the_objects_replacement_until_it_is_taken_off(
    short_dir: Path,
) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.store(URI, pattern(1, MIB))
        assert await client.ask("pin", uri=URI, pinned=True) == {"status": "PONG"}
        assert await client.ask("pin", uri=URI, pinned=True) == {"status": "PONG"}
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert (await client.status())["pools"]["nvme"]["pinned_bytes"] == MIB
        await client.store(URI, pattern(2, 2 * MIB))
        assert (await client.status())["pools"]["nvme"]["pinned_bytes"] == 2 * MIB
        assert await client.ask("pin", uri=URI, pinned=False) == {"status": "PONG"}
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert (await client.status())["pools"]["nvme"]["pinned_bytes"] == 0
        assert await client.fetch(URI) == pattern(2, 2 * MIB)


async def test_stage_and_locate_pin_where_they_are_asked_to_and_locate_never_unpins(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.store("a", pattern(1, MIB), pinned=True)
        await client.store("b", pattern(2, MIB))
        assert (await client.ask("locate", uri="a", pinned=False))["status"] == "HIT"
        assert (await client.status())["pools"]["nvme"]["pinned_bytes"] == MIB
        for _ in range(2):
            hit = await client.ask("locate", uri="b", pinned=True)
            assert (hit["status"], hit["object_size"]) == ("HIT", MIB)
        assert (await client.status())["pools"]["nvme"]["pinned_bytes"] == 2 * MIB


# -- by policy -----------------------------------------------------------------------------------------


@TIERS
async def test_a_full_pool_drops_the_least_recently_used_that_it_may(short_dir: Path, tier: str) -> None:
    async with running(short_dir, pool_size=18 * MIB, devices=1, evict_above=1, evict_down_to=1) as daemon:
        client = await daemon.connect()
        total = (await client.status())["pools"][tier]["total_bytes"]
        assert total in (16 * MIB, 17 * MIB)
        uris = await fill(client, 4, tier=tier)
        await client.ask("pin", uri=uris[0], pinned=True)
        await client.ask("locate", uri=uris[1])
        await client.store("new", pattern(9, CHUNK), tier=tier)
        assert await present(client, uris) == [uris[0], uris[1], uris[3]]
        for uri in [uris[0], uris[1], uris[3]]:
            assert await client.fetch(uri) == pattern(int(uri[-1]), CHUNK)
        assert await client.fetch("new") == pattern(9, CHUNK)
        assert (await client.status())["evicted"] == {"objects": 1, "bytes": CHUNK}


async def test_a_pool_is_never_full_for_good_however_much_the_quarantine_keeps(short_dir: Path) -> None:
    # 32 MiB, a quarter of which may rest for longer than this test runs: each new object needs room that
    # an eviction gives only to the quarantine at first.
    settings = {"quarantine_s": 1000, "quarantine_share": 0.25, "evict_above": 1, "evict_down_to": 1}
    async with running(short_dir, **settings) as daemon:
        client = await daemon.connect()
        for number in range(30):
            await client.store(f"u{number}", pattern(number, MIB + 1 if number % 2 else 3 * MIB))
            assert await client.fetch(f"u{number}") == pattern(number, MIB + 1 if number % 2 else 3 * MIB)
        pool = (await client.status())["pools"]["nvme"]
        assert pool["quarantined_bytes"] <= 8 * MIB
        assert pool["used_bytes"] >= 16 * MIB, "no more was evicted than had to be"


async def test_many_writers_at_a_full_pool_all_get_room(short_dir: Path) -> None:
    async with running(short_dir, evict_above=1, evict_down_to=1, quarantine_share=0) as daemon:
        clients = [await daemon.connect() for _ in range(8)]
        await fill(clients[0], 8)
        failures: list[Message] = []

        async def write(number: int) -> None:
            for turn in range(4):
                uri = f"writer/{number}/{turn}"
                staged = await clients[number].ask("stage_write", uri=uri, size_bytes=2 * MIB)
                if staged["status"] == "ERROR":
                    failures.append(staged)
                    continue
                await clients[number].ask("commit_write", uri=uri, local_only=True)

        async with trio.open_nursery() as nursery:
            for number in range(len(clients)):
                nursery.start_soon(write, number)
        assert failures == []
        status = await clients[0].status()
        assert status["pools"]["nvme"]["used_bytes"] == 32 * MIB


async def test_eviction_passes_over_what_somebody_works_on(short_dir: Path) -> None:
    async with running(short_dir, evict_above=1, evict_down_to=1, quarantine_share=0) as daemon:
        client = await daemon.connect()
        uris = await fill(client, 8)
        async with daemon.parts.store.locks.hold(uris[0]):
            await client.store("new", pattern(9, CHUNK))
        assert await present(client, uris) == [uris[0], *uris[2:]]


async def test_above_its_high_watermark_a_pool_is_emptied_in_the_background_down_to_the_low_one(
    short_dir: Path,
) -> None:
    async with running(short_dir, evict_above=0.75, evict_down_to=0.5) as daemon:
        client = await daemon.connect()
        uris = await fill(client, 6)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert await present(client, uris) == uris, "at 75 % nothing happens yet"
        await client.store("more", b"x")
        await eventually(lambda: daemon.parts.remover.evicted_objects == 3)
        assert await present(client, uris) == uris[3:]
        pool = (await client.status())["pools"]["nvme"]
        assert pool["used_bytes"] == 3 * CHUNK + 4096


async def test_many_leave_some_at_a_time_so_that_clients_have_their_turns_between(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "_TOGETHER", 4)
    together: list[int] = []
    async with running(short_dir, evict_above=0.75, evict_down_to=0.0001) as daemon:
        write = daemon.parts.store.catalog.write

        async def noted(changes: Sequence[Change]) -> None:
            together.append(sum(isinstance(change, Delete) for change in changes))
            await write(changes)

        client = await daemon.connect()
        for number in range(9):
            await client.store(f"{number}", pattern(number, MIB))
        await client.store("large", bytes(12 * MIB), pinned=True)
        monkeypatch.setattr(daemon.parts.store.catalog, "write", noted)
        await client.store("one too many", bytes(4 * MIB), pinned=True)
        await eventually(lambda: daemon.parts.remover.evicted_objects == 9)
    assert [count for count in together if count] == [4, 4, 1]


async def test_a_background_eviction_that_cannot_be_written_down_evicts_nothing_and_ends_nothing(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(short_dir, evict_above=0.5, evict_down_to=0.5) as daemon:
        client = await daemon.connect()
        uris = [f"u{number}" for number in range(5)]
        for number, uri in enumerate(uris):
            await client.store(uri, pattern(number, CHUNK), pinned=True)
        with no_file_may_grow():
            cache = daemon.parts.store.cache
            for stored in cache.objects():  # unpinned, and nobody has noticed
                cache.apply_change(stored._replace(pinned=False))
            daemon.parts.remover.check_watermarks(uris)
            await eventually(lambda: "eviction from the nvme pool waits" in caplog.text)
            assert await present(client, uris) == uris
        daemon.parts.remover.check_watermarks(uris)
        await eventually(lambda: daemon.parts.remover.evicted_objects == 1)
        assert (await client.ask("ping"))["status"] == "PONG"


@contextmanager
def no_file_may_grow() -> Iterator[None]:
    """As on a full file system: every write beyond the first 4 KiB of a file fails in the kernel."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- nothing may be evicted ----------------------------------------------------------------------------


@TIERS
async def test_where_nothing_may_be_evicted_the_refusal_comes_at_once_and_says_what_takes_the_space(
    short_dir: Path, tier: str
) -> None:
    async with running(short_dir, pool_size=18 * MIB, devices=1, quarantine_s=100) as daemon:
        client, other = await daemon.connect(), await daemon.connect()
        await client.store("pinned", pattern(1, CHUNK), tier=tier, pinned=True)
        await client.store("dirty", pattern(2, CHUNK), tier=tier, commit={})
        await client.stage("staged", pattern(3, CHUNK), tier=tier)
        await client.store("gone", pattern(4, 5000), tier=tier)
        await client.ask("evict", uri="gone")
        pool = (await client.status())["pools"][tier]
        started = time.monotonic()
        for _ in range(20):  # in all of which a wait of a quarter of a second each would show
            code, sentence = await client.refusal("stage_write", uri="new", size_bytes=2 * CHUNK, tier=tier)
        assert time.monotonic() - started < 5
        assert code == "NO_SPACE"
        figures = dict(re.findall(r"(free|pinned|not yet in a backend|staged|quarantined) (\d+)", sentence))
        assert {name: int(number) for name, number in figures.items()} == {
            "free": pool["free_bytes"],
            "pinned": CHUNK,
            "not yet in a backend": CHUNK,
            "staged": CHUNK,
            "quarantined": 8192,
        }
        assert tier in sentence
        assert (await other.ask("ping"))["status"] == "PONG"
        for uri, number in (("pinned", 1), ("dirty", 2)):
            assert await other.fetch(uri) == pattern(number, CHUNK)
        assert (await other.ask("commit_write", uri="staged"))["status"] == "WRITECOMMITTED"


async def test_without_a_backend_what_was_to_be_flushed_leaves_only_where_the_operator_says_so(
    short_dir: Path,
) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        for number in range(8):
            await client.store(f"{number}", pattern(number, CHUNK), commit={}, pinned=number == 0)
        code, sentence = await client.refusal("stage_write", uri="new", size_bytes=CHUNK)
        assert code == "NO_SPACE"
        assert "there is no backend, and without --evict-unflushed" in sentence
    async with running(short_dir, evict_unflushed=True, evict_above=1.0, evict_down_to=1.0) as daemon:
        client = await daemon.connect()
        await client.store("new", pattern(9, CHUNK), commit={})
        assert await client.fetch("0") == pattern(0, CHUNK), "it is pinned"
        assert await client.fetch("1") is None
        assert (await client.ask("locate", uri="2"))["sync_status"] == "COMMITTED"
        code, sentence = await client.refusal("stage_write", uri="more", size_bytes=32 * MIB)
        assert "--evict-unflushed" not in sentence
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert (await client.refusal("stage_write", uri="more", size_bytes=CHUNK))[0] == "NO_SPACE"


async def test_nothing_is_evicted_for_a_write_that_could_never_fit(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        uris = await fill(client, 4)
        await client.ask("pin", uri=uris[0])
        for size in (33 * MIB, 29 * MIB):  # more than the pool, more than the pool without what is pinned
            assert (await client.refusal("stage_write", uri="new", size_bytes=size))[0] == "NO_SPACE"
            assert await present(client, uris) == uris
        assert (await client.ask("stage_write", uri="new", size_bytes=28 * MIB))["status"] == "WRITESTAGED"
        assert await present(client, uris) == uris[:1]


async def test_dirty_objects_stay_without_a_backend_however_full_the_pool(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        uris = await fill(client, 8, commit={})
        assert (await client.refusal("stage_write", uri="new", size_bytes=1))[0] == "NO_SPACE"
        assert await present(client, uris) == uris
        assert (await client.status())["evicted"]["objects"] == 0
