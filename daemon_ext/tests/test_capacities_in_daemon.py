"""Limits per prefix in a running daemon: counted exactly, kept by evicting what is under the prefix and
nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from daemon_harness import CHUNK, MIB, Client, Daemon, Message, eventually, pattern, running
from frames import bits, framed

from hypercache_daemon.core.eviction import EvictionPolicy
from hypercache_protocol.fields import Tier

limited = partial(running, evict_above=1.0, evict_down_to=1.0)
"""A daemon that evicts only where room is wanted, so that a prefix can be full."""

A, B = "hypercache://a/", "hypercache://b/"


async def present(client: Client, *uris: str) -> list[str]:
    return [uri for uri in uris if await client.fetch(uri) is not None]


async def usage(client: Client, prefix: str = A) -> tuple[int, int, int]:
    """Objects, used and staged MiB."""
    entry = (await client.status())["capacities"][prefix]
    return entry["objects"], entry["used_bytes"] // MIB, entry["staged_bytes"] // MIB


async def test_without_limits_there_is_no_figure(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        assert (await (await daemon.connect()).status())["capacities"] == {}


async def test_a_prefix_at_its_limit_evicts_the_coldest_of_its_own_and_no_other(
    short_dir: Path,
) -> None:
    async with limited(short_dir, capacity=(f"{A}=4MiB",)) as daemon:
        client = await daemon.connect()
        for uri in ("other", B + "cold", A + "1", A + "2", A + "3", A + "4"):
            await client.store(uri, pattern(1, MIB), tier="ram" if uri.endswith("2") else "nvme")
        assert await usage(client) == (4, 4, 0)
        await client.ask("locate", uri=A + "1")
        await client.store(A + "new", pattern(5, 2 * MIB))
        rest = (A + "1", A + "2", A + "3", A + "4", A + "new", "other", B + "cold")
        assert await present(client, *rest) == [A + "1", A + "4", A + "new", "other", B + "cold"]
        assert await usage(client) == (3, 4, 0)
        assert (await client.status())["evicted"] == {"objects": 2, "bytes": 2 * MIB}


async def test_a_prefix_above_its_watermark_loses_its_coldest_before_anybody_wants_room(
    short_dir: Path,
) -> None:
    settings = {"evict_above": 0.5, "evict_down_to": 0.25}
    async with running(short_dir, capacity=(f"{A}=8MiB", f"{B}=8MiB"), **settings) as daemon:
        client = await daemon.connect()
        await client.store(B + "other", pattern(0, MIB))
        uris = [f"{A}{number}" for number in range(4)]
        for number, uri in enumerate(uris):
            await client.store(uri, pattern(number, MIB))
        assert await present(client, *uris) == uris, "half of it is no reason"
        await client.store(A + "more", b"x")
        await eventually(lambda: daemon.parts.remover.evicted_objects == 3)
        assert await present(client, *uris, A + "more", B + "other") == [uris[3], A + "more", B + "other"]
        assert (await usage(client))[:2] == (2, 1)


async def test_objects_of_others_are_not_even_looked_at(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walked(_: EvictionPolicy) -> Iterator[str]:
        raise AssertionError("the objects of all others were walked over")

    async with limited(short_dir, capacity=(f"{A}=1MiB",)) as daemon:
        client = await daemon.connect()
        await client.store(A + "1", pattern(1, MIB))
        for pool in daemon.parts.store.cache.pools.values():
            monkeypatch.setattr(pool.policy, "victims", walked.__get__(pool.policy))
        await client.store(A + "2", pattern(2, MIB))
        assert await present(client, A + "1", A + "2") == [A + "2"]


async def test_where_nothing_of_its_own_may_go_a_stage_is_refused_in_words_at_once(short_dir: Path) -> None:
    async with limited(short_dir, capacity=(f"{A}=4MiB",)) as daemon:
        client = await daemon.connect()
        await client.store(B + "free to go", pattern(1, MIB))
        await client.store(A + "pinned", pattern(1, MIB), pinned=True)
        await client.store(A + "dirty", pattern(2, MIB), commit={})
        await client.store(A + "evictable", pattern(3, MIB))
        await client.stage(A + "staged", pattern(4, MIB))
        code, sentence = await client.refusal("stage_write", uri=A + "new", size_bytes=MIB + 1)
        assert code == "NO_SPACE"
        assert sentence == (
            f"no space for {MIB + 1} bytes under {A}, whose --capacity is {4 * MIB}: used {3 * MIB} (pinned "
            f"{MIB}, not yet in a backend {MIB}), staged {MIB}; evict or unpin some of it, or ask for a "
            "higher limit; there is no backend, and without --evict-unflushed what is not yet in one stays "
            "until a client evicts it"
        )
        assert await present(client, A + "evictable", B + "free to go") == [A + "evictable", B + "free to go"]
        await client.store(A + "new", pattern(5, MIB))
        assert await present(client, A + "evictable", A + "new") == [A + "new"]


@pytest.mark.parametrize("request_of", [{"size_bytes": 17 * MIB, "tier": "ram"}, {"size_bytes": 19 * MIB}])
async def test_nothing_is_evicted_for_what_the_pool_or_another_prefix_could_never_hold(
    short_dir: Path, request_of: Message
) -> None:
    inner = A + "in/"
    async with limited(short_dir, capacity=(f"{A}=18MiB", f"{inner}=20MiB")) as daemon:
        client = await daemon.connect()
        uris = [inner + str(number) for number in range(4)]
        for number, uri in enumerate(uris):
            await client.store(uri, pattern(number, 4 * MIB))
        assert (await client.refusal("stage_write", uri=inner + "big", **request_of))[0] == "NO_SPACE"
        assert await present(client, *uris) == uris


async def test_what_is_appended_counts_and_may_be_refused(short_dir: Path) -> None:
    async with limited(short_dir, capacity=(f"{A}=3MiB",)) as daemon:
        client = await daemon.connect()
        await client.store(A + "old", pattern(1, MIB))
        await client.stage(A + "new", pattern(2, MIB))
        reply = await client.ask("append_write", uri=A + "new", size_bytes=2 * MIB)
        assert reply["status"] == "WRITESTAGED"
        assert await usage(client) == (0, 0, 3)
        code, sentence = await client.refusal("append_write", uri=A + "new", size_bytes=1)
        assert code == "NO_SPACE"
        assert A in sentence
        assert await usage(client) == (0, 0, 3)


async def test_nested_prefixes_both_count_and_each_makes_room_among_its_own(short_dir: Path) -> None:
    inner = A + "in/"
    async with limited(short_dir, capacity=(f"{A}=4MiB", f"{inner}=2MiB")) as daemon:
        client = await daemon.connect()
        for uri in (A + "1", A + "2", inner + "1", inner + "2"):
            await client.store(uri, pattern(1, MIB))
        assert (await usage(client), await usage(client, inner)) == ((4, 4, 0), (2, 2, 0))
        await client.store(inner + "3", pattern(2, MIB))
        everything = (A + "1", A + "2", inner + "1", inner + "2", inner + "3")
        assert await present(client, *everything) == [A + "1", A + "2", inner + "2", inner + "3"]
        await client.store(A + "3", pattern(2, 3 * MIB))
        assert await present(client, *everything, A + "3") == [inner + "3", A + "3"]
        assert (await usage(client), await usage(client, inner)) == ((2, 4, 0), (1, 1, 0))


async def test_many_nested_prefixes_that_are_all_full_are_no_reason_to_refuse(short_dir: Path) -> None:
    nested = [A + "x/" * depth for depth in range(8)]
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        for prefix in nested:
            await client.store(prefix + "1", pattern(1, MIB))
            await client.store(prefix + "2", pattern(2, MIB))
    limits = tuple(f"{prefix}={MIB * (8 - depth)}" for depth, prefix in enumerate(nested))
    async with limited(short_dir, capacity=limits) as daemon:  # now each must give up one of its own
        client = await daemon.connect()
        await client.store(nested[-1] + "new", pattern(9, MIB))
        for depth, prefix in enumerate(nested):
            assert await usage(client, prefix) == (8 - depth, 8 - depth, 0)


async def test_of_a_batch_what_fits_is_staged_and_the_rest_refused(short_dir: Path) -> None:
    async with limited(short_dir, capacity=(f"{A}=3MiB",)) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        await old.store(A + "old", pattern(1, 2 * MIB))
        names = [A + "1", A + "2", A + "3", A + "4", B + "1"]
        staged = await client.ask("stage_many", suffixes=names, sizes=[MIB] * 5)
        assert bits(staged["done"], 5) == [True, True, True, False, True]
        assert [(error["index"], error["error_code"]) for error in staged["errors"]] == [(3, "NO_SPACE")]
        assert await usage(old) == (0, 0, 3)


async def test_a_batch_evicts_no_more_than_the_pool_could_hold_of_it(short_dir: Path) -> None:
    async with limited(short_dir, capacity=(f"{A}=16MiB",)) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        for number in range(20):
            await old.store(f"{B}{number}", pattern(number, MIB), pinned=True)
        for number in range(8):  # the pool of 32 MiB could hold these 8 and 4 more
            await old.store(f"{A}{number}", pattern(number, MIB))
        in_ram = [f"{A}ram{number}" for number in range(8)]
        for uri in in_ram:
            await old.store(uri, pattern(1, MIB), tier="ram")
        names = [f"{A}new{number}" for number in range(4)]
        staged = await client.ask("stage_many", suffixes=names, sizes=[4 * MIB] * 4)
        assert bits(staged["done"], 4) == [True, True, True, False]
        assert await present(old, *in_ram) == in_ram[4:]


# -- counted exactly -----------------------------------------------------------------------------------


async def everything_that_changes_it(client: Client, daemon: Daemon) -> None:
    await client.store(A + "1", pattern(1, MIB))
    await client.store(A + "1", pattern(2, 2 * MIB), tier="ram")  # replaced
    assert await usage(client) == (1, 2, 0)
    await client.store(A + "2", pattern(3, CHUNK + 1), pinned=True)
    await client.store(A + "3", pattern(4, 3 * MIB), commit={})
    await client.stage(A + "4", pattern(5, MIB))
    entry = (await client.status())["capacities"][A]
    assert entry == {
        "limit_bytes": 32 * MIB,
        "objects": 3,
        "used_bytes": 9 * MIB + 4096,
        "staged_bytes": MIB,
        "withheld_bytes": 0,
        "pinned_bytes": CHUNK + 4096,
        "dirty_bytes": 3 * MIB,
    }
    await client.ask("evict", uri=A + "4")  # the staged write
    await client.ask("evict", uri=A + "2")
    await client.stage(A + "5", pattern(6, MIB))
    assert await usage(client) == (2, 5, 1)
    daemon.ahead_s += 2000

    async def expired() -> bool:
        return (await usage(client))[2] == 0

    await eventually(expired)
    await client.stage(A + "6", pattern(7, MIB))
    assert await usage(client) == (2, 5, 1)


async def test_what_counts_is_exact_after_every_change_and_after_a_restart(short_dir: Path) -> None:
    settings = {"capacity": (f"{A}=32MiB",), "stage_expiry_s": 1000}
    async with limited(short_dir, **settings) as daemon:
        await everything_that_changes_it(await daemon.connect(), daemon)
    async with limited(short_dir, **settings) as daemon:
        client = await daemon.connect()
        entry = (await client.status())["capacities"][A]
        assert (entry["objects"], entry["used_bytes"], entry["staged_bytes"]) == (2, 5 * MIB, 0)
        assert (entry["dirty_bytes"], entry["pinned_bytes"]) == (3 * MIB, 0)
        await client.ask("purge")
        assert await usage(client) == (0, 0, 0)


async def test_a_lower_limit_after_a_restart_holds_from_the_next_stage_on_the_oldest_leave(
    short_dir: Path,
) -> None:
    uris = [A + str(number) for number in range(5)]
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        for number, uri in enumerate(uris):
            await client.store(uri, pattern(1, MIB), tier="ram" if number == 1 else "nvme")
    async with limited(short_dir, capacity=(f"{A}=3MiB",)) as daemon:
        client = await daemon.connect()
        assert await usage(client) == (5, 5, 0)
        await client.stage(A + "new", pattern(2, MIB))
        assert await present(client, *uris) == uris[3:]
        assert daemon.parts.store.cache.pools[Tier.RAM].used_bytes == 0


async def test_what_waits_for_a_failed_device_counts(short_dir: Path) -> None:
    async with limited(short_dir, capacity=(f"{A}=2MiB",)) as daemon:
        client = await daemon.connect()
        await client.store(A + "1", pattern(1, 2 * MIB), commit={})
        daemon.parts.store.cache.withhold(A + "1")
        assert await usage(client) == (0, 0, 0)
        assert (await client.status())["capacities"][A]["withheld_bytes"] == 2 * MIB
        code, sentence = await client.refusal("stage_write", uri=A + "2", size_bytes=MIB)
        assert code == "NO_SPACE"
        assert f"staged 0, on devices that failed {2 * MIB}; evict" in sentence
        daemon.parts.store.cache.give_back(A + "1")
        assert await usage(client) == (1, 2, 0)
        assert (await client.status())["capacities"][A]["withheld_bytes"] == 0
        assert (await client.ask("evict", uri=A + "1"))["status"] == "EVICTED"
        await client.store(A + "2", pattern(2, 2 * MIB))


async def test_what_is_fetched_from_the_backend_counts(short_dir: Path) -> None:
    (short_dir / "backend" / "a").mkdir(parents=True)
    for name in "123":
        (short_dir / "backend" / "a" / name).write_bytes(pattern(int(name), MIB))
    async with limited(short_dir, capacity=(f"{A}=2MiB",), backend=f"file://{short_dir}/backend") as daemon:
        client = await daemon.connect()
        for name in "123":
            assert (await client.ask("locate", uri=A + name))["status"] == "HIT"
        assert await usage(client) == (2, 2, 0)
        assert await present(client, A + "1", A + "2", A + "3") == [A + "2", A + "3"]
