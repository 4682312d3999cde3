"""Staging, appending, committing: whose write a request means, and what a refused commit leaves."""

from __future__ import annotations

import hashlib
import stat
import zlib
from pathlib import Path

import pytest
import trio
from daemon_harness import CHUNK, MIB, Message, eventually, line, pattern, running
from umasks import umask

from hypercache_compat.raw_wire import read_layout, write_layout
from hypercache_protocol.fields import Tier

URI = "hypercache://a/b"
TIERS = pytest.mark.parametrize("tier", ["nvme", "ram"])


def places(reply: Message) -> set[tuple[str, int]]:
    return {(chunk["device"], chunk["offset"]) for chunk in reply["chunk_layout"]}


# -- whose write ---------------------------------------------------------------------------------------


@TIERS
async def test_two_writers_of_one_uri_share_nothing_and_each_commits_its_own(
    short_dir: Path, tier: str
) -> None:
    async with running(short_dir) as daemon:
        first, second = await daemon.connect(), await daemon.connect()
        one = await first.stage(URI, pattern(1, CHUNK + 7), tier=tier)
        two = await second.stage(URI, pattern(2, CHUNK + 7), tier=tier)
        assert not places(one) & places(two)
        assert one["stage_id"] != two["stage_id"]
        assert (await first.ask("commit_write", uri=URI))["status"] == "WRITECOMMITTED"
        assert await second.fetch(URI) == pattern(1, CHUNK + 7)
        assert (await second.ask("commit_write", uri=URI))["status"] == "WRITECOMMITTED"
        assert await first.fetch(URI) == pattern(2, CHUNK + 7)


async def test_a_commit_from_another_connection_takes_the_newest_write(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        writers = [await daemon.connect() for _ in range(3)]
        for number, writer in enumerate(writers):
            await writer.stage(URI, pattern(number, 5000))
        stranger = await daemon.connect()
        for expected in (2, 1, 0):
            await stranger.ask("commit_write", uri=URI, local_only=True)
            assert await stranger.fetch(URI) == pattern(expected, 5000)
        assert (await stranger.refusal("commit_write", uri=URI))[0] == "NOT_STAGED"


async def test_who_lost_a_write_gets_no_other_in_its_place(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client, other = await daemon.connect(), await daemon.connect()
        await client.stage(URI, b"given up before")
        await client.stage(URI, b"lost")
        await other.ask("evict", uri=URI)
        theirs = await other.stage(URI, b"half of what")
        for request in ({"action": "append_write", "size_bytes": 1}, {"action": "commit_write"}):
            code, sentence = await client.refusal(**request, uri=URI)
            assert (code, "this connection staged" in sentence) == ("NOT_STAGED", True)
        await other.ask("commit_write", uri=URI, stage_id=theirs["stage_id"], local_only=True)
        assert await client.fetch(URI) == b"half of what"
        await client.store(URI, b"staged anew")
        assert await other.fetch(URI) == b"staged anew"


async def test_who_lost_an_older_write_goes_on_with_the_newer_one(short_dir: Path) -> None:
    async with running(short_dir, stage_expiry_s=100) as daemon:
        client = await daemon.connect()
        await client.stage(URI, b"older")
        daemon.ahead_s = 60
        await client.stage(URI, b"newer")
        daemon.ahead_s = 120
        await eventually(lambda: len(daemon.parts.store.cache.staged) == 1)
        assert (await client.ask("commit_write", uri=URI))["status"] == "WRITECOMMITTED"
        assert await client.fetch(URI) == b"newer"


async def test_stage_append_and_commit_may_come_from_three_connections_one_after_the_other(
    short_dir: Path,
) -> None:
    async with running(short_dir) as daemon:
        one = await daemon.connect()
        await one.stage(URI, b"a" * 1920)
        await one.aclose()
        two = await daemon.connect()
        added = await two.ask("append_write", uri=URI, size_bytes=CHUNK + 1)
        write_layout(added["chunk_layout"], b"b" * (CHUNK + 1))
        await two.aclose()
        three = await daemon.connect()
        reply = await three.ask("commit_write", uri=URI)
        assert reply["object_size"] == 1920 + CHUNK + 1
        assert await three.fetch(URI) == b"a" * 1920 + b"b" * (CHUNK + 1)


async def test_a_stage_id_names_one_write_among_many(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        staged = [await client.stage(URI, pattern(number, 100)) for number in range(3)]
        appended = await client.ask("append_write", uri=URI, size_bytes=3, stage_id=staged[0]["stage_id"])
        assert appended["stage_id"] == staged[0]["stage_id"]
        write_layout(appended["chunk_layout"], b"end")
        await client.ask("commit_write", uri=URI, stage_id=staged[0]["stage_id"], local_only=True)
        assert await client.fetch(URI) == pattern(0, 100) + b"end"
        await client.ask("commit_write", uri=URI, stage_id=staged[1]["stage_id"], local_only=True)
        assert await client.fetch(URI) == pattern(1, 100)


async def test_a_stale_stage_id_is_refused_and_newer_writes_are_untouched(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        old = await client.stage(URI, b"old")
        await client.ask("commit_write", uri=URI, local_only=True)
        newer = await client.stage(URI, b"newer")
        for action in ("append_write", "commit_write"):
            fields = {"size_bytes": 5} if action == "append_write" else {}
            code, sentence = await client.refusal(action, uri=URI, stage_id=old["stage_id"], **fields)
            assert code == "STALE_STAGE"
            assert old["stage_id"] in sentence
        code, _ = await client.refusal("commit_write", uri="other", stage_id=newer["stage_id"])
        assert code == "STALE_STAGE", "it names a write of another uri"
        assert await client.fetch(URI) == b"old"
        assert (await client.ask("commit_write", uri=URI, stage_id=newer["stage_id"]))["object_size"] == 5
        assert await client.fetch(URI) == b"newer"


async def test_a_second_commit_is_refused_and_changes_nothing(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        first = await client.store(URI, b"bytes")
        code, sentence = await client.refusal("commit_write", uri=URI)
        assert (code, URI in sentence) == ("NOT_STAGED", True)
        assert (await client.ask("locate", uri=URI))["generation"] == first["generation"]


# -- appending -----------------------------------------------------------------------------------------


@TIERS
async def test_an_append_answers_with_only_the_new_chunks_and_the_whole_size(
    short_dir: Path, tier: str
) -> None:
    pieces = [pattern(number, size) for number, size in enumerate([1920, CHUNK, CHUNK + 5, 0, 1])]
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        replies = [await client.stage(URI, pieces[0], tier=tier)]
        for piece in pieces[1:]:
            reply = await client.ask("append_write", uri=URI, size_bytes=len(piece), tier=tier)
            write_layout(reply["chunk_layout"], piece)
            replies.append(reply)
        sizes = [sum(map(len, pieces[: count + 1])) for count in range(len(pieces))]
        assert [reply["object_size"] for reply in replies] == sizes
        assert [len(reply["chunk_layout"]) for reply in replies] == [1, 1, 2, 0, 1]
        patched = b"patched!" + pieces[0][8:]
        write_layout(replies[0]["chunk_layout"], patched)  # in place, as zip headers are
        await client.ask("commit_write", uri=URI, chunk_checksums=[1, 2, 3, 4, 5])
        found = await client.ask("locate", uri=URI)
        assert [chunk["checksum"] for chunk in found["chunk_layout"]] == [1, 2, 3, 4, 5]
        assert read_layout(found["chunk_layout"]) == patched + b"".join(pieces[1:])


async def test_an_append_in_another_tier_is_a_contradiction(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.stage(URI, b"abc", tier="ram")
        code, sentence = await client.refusal("append_write", uri=URI, size_bytes=1, tier="nvme")
        assert code == "CONTRADICTION"
        assert "ram" in sentence
        assert (await client.ask("append_write", uri=URI, size_bytes=1))["object_size"] == 4


async def test_an_append_that_does_not_fit_leaves_the_write_as_it_was(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.stage(URI, b"abc")
        assert (await client.refusal("append_write", uri=URI, size_bytes=40 * MIB))[0] == "NO_SPACE"
        reply = await client.ask("commit_write", uri=URI)
        assert reply["object_size"] == 3
        assert await client.fetch(URI) == b"abc"


# -- what a commit checks ------------------------------------------------------------------------------


@TIERS
async def test_a_sha256_is_verified_against_the_bytes_on_the_device(short_dir: Path, tier: str) -> None:
    data = pattern(1, CHUNK + 100)
    digest = hashlib.sha256(data).hexdigest()
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        staged = await client.stage(URI, data[:-1] + b"X", tier=tier)
        code, sentence = await client.refusal("commit_write", uri=URI, sha256=digest)
        assert code == "CHECKSUM_MISMATCH"
        assert digest in sentence
        assert (await client.ask("locate", uri=URI))["sync_status"] == "STAGED", "the staged write stays"
        write_layout(staged["chunk_layout"], data)
        reply = await client.ask("commit_write", uri=URI, sha256=digest.upper())
        assert reply["status"] == "WRITECOMMITTED"


async def test_a_sha256_of_blocks_that_cannot_be_read_is_refused_and_the_stage_stays(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        staged = await client.ask("stage_write", uri=URI, size_bytes=5, tier="ram")  # and writes nothing
        code, sentence = await client.refusal("commit_write", uri=URI, sha256="0" * 64)
        assert code == "UNAVAILABLE"
        assert staged["chunk_layout"][0]["device"] in sentence
        Path(staged["chunk_layout"][0]["device"]).unlink()
        assert (await client.refusal("commit_write", uri=URI, sha256="0" * 64))[0] == "UNAVAILABLE"
        write_layout(staged["chunk_layout"], b"bytes")
        digest = hashlib.sha256(b"bytes").hexdigest()
        assert (await client.ask("commit_write", uri=URI, sha256=digest))["status"] == "WRITECOMMITTED"


async def test_a_long_sha256_check_holds_up_nobody_else(short_dir: Path) -> None:
    async with running(short_dir, pool_size=130 * MIB) as daemon:
        hasher, other = await daemon.connect(), await daemon.connect()
        await hasher.ask("stage_write", uri=URI, size_bytes=100 * MIB)
        await hasher.send(line("commit_write", uri=URI, sha256="0" * 64))
        await eventually(lambda: daemon.parts.store.hashing.borrowed_tokens == 1)
        await other.store("other", b"bytes")
        assert daemon.parts.store.hashing.borrowed_tokens == 1, "the check is still going on"
        assert (await hasher.receive())["error_code"] == "CHECKSUM_MISMATCH"


@pytest.mark.parametrize("at_stage", [True, False])
async def test_local_only_and_write_through_contradict_and_the_stage_stays(
    short_dir: Path, at_stage: bool
) -> None:
    (short_dir / "backend").mkdir()
    async with running(short_dir, backend=str(short_dir / "backend")) as daemon:
        client = await daemon.connect()
        await client.stage(URI, b"bytes", write_through=at_stage)
        again = {} if at_stage else {"write_through": True}
        code, sentence = await client.refusal("commit_write", uri=URI, local_only=True, **again)
        assert code == "CONTRADICTION"
        assert "local_only" in sentence
        assert (await client.ask("locate", uri=URI))["sync_status"] == "STAGED"
        reply = await client.ask("commit_write", uri=URI, write_through=True)
        assert reply["sync_status"] == "SYNCED_BACKEND"
        assert (short_dir / "backend" / "a" / "b").read_bytes() == b"bytes"


async def test_checksums_are_kept_with_the_object_across_a_restart(short_dir: Path) -> None:
    data = pattern(3, CHUNK + 1)
    sums = [zlib.crc32(data[:CHUNK]), zlib.crc32(data[CHUNK:])]
    for _ in range(2):
        async with running(short_dir) as daemon:
            client = await daemon.connect()
            if await client.fetch(URI) is None:
                await client.store(URI, data, commit={"chunk_checksums": sums, "local_only": True})
            found = await client.ask("locate", uri=URI)
            assert [chunk["checksum"] for chunk in found["chunk_layout"]] == sums


async def test_an_object_without_checksums_shows_none(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.store(URI, b"bytes")
        assert set((await client.ask("locate", uri=URI))["chunk_layout"][0]) == {
            "device",
            "offset",
            "length",
            "tier",
        }


async def test_64_clients_that_commit_at_once_cost_few_transactions(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        clients = [await daemon.connect() for _ in range(64)]
        uris = [f"u{number}" for number in range(64)]
        for uri, client in zip(uris, clients, strict=True):
            await client.stage(uri, b"bytes")
        store = daemon.parts.store
        before = store.catalog.transactions
        async with store.catalog._thread:  # a disk that takes its time
            for uri, client in zip(uris, clients, strict=True):
                await client.send(line("commit_write", uri=uri))
            await eventually(lambda: not any(map(store.locks.is_free, uris)))
        assert {(await client.receive())["status"] for client in clients} == {"WRITECOMMITTED"}
        assert store.catalog.transactions - before <= 2


# -- replacing -----------------------------------------------------------------------------------------


async def test_a_commit_swaps_the_object_whole_and_its_old_blocks_rest(short_dir: Path) -> None:
    async with running(short_dir, quarantine_s=1000) as daemon:
        client = await daemon.connect()
        first = await client.store(URI, pattern(1, MIB))
        old = await client.ask("locate", uri=URI)
        await client.stage(URI, pattern(2, 2 * MIB))
        assert await client.fetch(URI) == pattern(1, MIB), "readers see the old one until the commit"
        second = await client.ask("commit_write", uri=URI, local_only=True)
        assert second["generation"] > first["generation"]
        new = await client.ask("locate", uri=URI)
        assert not places(old) & places(new)
        assert await client.fetch(URI) == pattern(2, 2 * MIB)
        assert read_layout(old["chunk_layout"]) == pattern(1, MIB), "who reads on reads the old one whole"
        nvme = (await client.status())["pools"]["nvme"]
        assert (nvme["used_bytes"], nvme["quarantined_bytes"]) == (2 * MIB, MIB)


async def test_readers_see_the_old_or_the_new_object_and_never_a_mix(short_dir: Path) -> None:
    size_bytes, rounds = 3 * 4096, 30
    async with running(short_dir, quarantine_s=1000, quarantine_share=1) as daemon:
        writer, reader = await daemon.connect(), await daemon.connect()
        await writer.store(URI, bytes([0]) * size_bytes)
        seen: list[int] = []

        async def write() -> None:
            for number in range(1, rounds):
                await writer.store(URI, bytes([number]) * size_bytes)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            while not seen or seen[-1] < rounds - 1:
                data = await reader.fetch(URI)
                assert data is not None
                assert len(set(data)) == 1, "a mix"
                seen.append(data[0])
        assert seen == sorted(seen)


async def test_an_object_may_move_to_the_other_tier_by_being_replaced(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        for number, tier in enumerate(["nvme", "ram", "nvme"]):
            await client.store(URI, pattern(number, MIB), tier=tier)
            assert await client.fetch(URI) == pattern(number, MIB)
            pools = (await client.status())["pools"]
            assert pools[tier]["used_bytes"] == MIB
            assert sum(pool["used_bytes"] for pool in pools.values()) == MIB
        await eventually(lambda: not list((short_dir / "ram").iterdir()), "the removal of the RAM file")


# -- staged writes that nobody finishes ----------------------------------------------------------------


@TIERS
async def test_a_staged_write_that_nobody_touches_expires_and_its_blocks_rest(
    short_dir: Path, tier: str
) -> None:
    async with running(short_dir, stage_expiry_s=100, quarantine_s=50) as daemon:
        client = await daemon.connect()
        staged = await client.stage(URI, pattern(1, MIB), tier=tier)
        daemon.ahead_s = 99
        assert (await client.ask("append_write", uri=URI, size_bytes=1))["status"] == "WRITESTAGED"
        daemon.ahead_s = 150  # 51 s after the append: alive
        await trio.testing.wait_all_tasks_blocked()
        assert (await client.ask("locate", uri=URI))["sync_status"] == "STAGED"
        daemon.ahead_s = 200
        await eventually(lambda: daemon.parts.store.cache.staged.newest(URI) is None)
        pool = (await client.status())["pools"][tier]
        assert (pool["staged_bytes"], pool["quarantined_bytes"]) == (0, MIB + 4096)
        code, _ = await client.refusal("commit_write", uri=URI, stage_id=staged["stage_id"])
        assert code == "STALE_STAGE"
        daemon.ahead_s = 251
        await eventually(lambda: daemon.parts.store.cache.pools[Tier(tier)].quarantined_bytes == 0)
        assert (await client.status())["pools"][tier]["quarantined_bytes"] == 0


async def test_a_write_that_is_being_committed_does_not_expire_under_it(short_dir: Path) -> None:
    data = bytes(24 * MIB)
    async with running(short_dir, stage_expiry_s=100) as daemon:
        client = await daemon.connect()
        await client.ask("stage_write", uri=URI, size_bytes=len(data))
        store = daemon.parts.store
        async with store.hashing:  # one of four: no thread is taken
            await client.send(line("commit_write", uri=URI, sha256=hashlib.sha256(data).hexdigest()))
            await eventually(lambda: not store.locks.is_free(URI))
            daemon.ahead_s = 1000
            assert store.cache.expired(store.clock(), store.locks.is_free) == []
        assert (await client.receive())["status"] == "WRITECOMMITTED"


# -- the RAM tier --------------------------------------------------------------------------------------


async def test_ram_files_are_made_by_the_daemon_for_its_group_only(short_dir: Path) -> None:
    with umask(0):
        async with running(short_dir) as daemon:
            client = await daemon.connect()
            staged = await client.ask("stage_write", uri="../../etc/passwd", size_bytes=5, tier="ram")
            device = Path(staged["chunk_layout"][0]["device"])
            assert device.parent == short_dir / "ram"
            assert stat.S_IMODE(device.stat().st_mode) == 0o600


async def test_with_the_ram_tier_off_its_users_are_served_from_the_devices(short_dir: Path) -> None:
    async with running(short_dir, ram_size=0) as daemon:
        client = await daemon.connect()
        staged = await client.stage(URI, b"bytes", tier="ram")
        assert {chunk["tier"] for chunk in staged["chunk_layout"]} == {"nvme"}
        more = await client.ask("append_write", uri=URI, size_bytes=1, tier="ram")
        write_layout(more["chunk_layout"], b"!")
        await client.ask("commit_write", uri=URI)
        assert await client.fetch(URI) == b"bytes!"
        assert list((await client.status())["pools"]) == ["nvme"]


async def test_a_ram_file_that_cannot_be_made_is_an_error_and_nothing_stays_staged(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        first = await client.ask("stage_write", uri=URI, size_bytes=1, tier="ram")
        name = Path(first["chunk_layout"][0]["device"])
        taken = name.with_name(f"{int(name.stem, 16) + 2:016x}.shm")
        taken.write_bytes(b"in the way")  # of the second of two chunks
        code, _ = await client.refusal("stage_write", uri="two", size_bytes=CHUNK + 1, tier="ram")
        assert code == "UNAVAILABLE"
        assert (await client.status())["pools"]["ram"]["staged_bytes"] == 4096
        assert (await client.ask("stage_write", uri="two", size_bytes=1, tier="ram"))[
            "status"
        ] == "WRITESTAGED"
