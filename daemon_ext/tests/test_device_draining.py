"""Devices that the operator drains under a running daemon."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import trio
from daemon_harness import CHUNK, Daemon, cleared, eventually, pattern, running
from two_devices import FIRST, SECOND, SMALL, fail, paths, store_on, two_devices, uses, where

from hypercache_daemon import device_health, device_probe
from hypercache_daemon.access import DeviceError
from hypercache_daemon.superblock import Superblock

pytestmark = pytest.mark.usefixtures("no_probes")


async def drain(daemon: Daemon, *lines: object) -> None:
    (daemon.config.catalog_dir / "drain").write_text("".join(f"{line}\n" for line in lines))
    await daemon.parts.health.look_again()
    await cleared(daemon)


async def test_a_drained_device_gets_nothing_new_and_loses_what_may_go(short_dir: Path) -> None:
    (short_dir / "backend").mkdir()
    async with two_devices(short_dir, backend=f"file://{short_dir}/backend") as (daemon, client):
        submit, daemon.parts.flusher.submit = daemon.parts.flusher.submit, lambda uri: None
        await store_on(client, daemon, FIRST, "hypercache://dirty", b"dirty", local_only=False)
        await store_on(client, daemon, FIRST, "pinned", b"pinned")
        await client.ask("pin", uri="pinned", pinned=True)
        await client.stage("staged", pattern(4, CHUNK + SMALL))
        await drain(daemon, "# a remark", "", f"{paths(daemon)[FIRST]}  # slow")
        assert await uses(client) == ["DRAINING", "IN_USE"]
        assert [await client.fetch(uri) for uri in ("one", "both")] == [None, None]
        assert await client.fetch("hypercache://dirty") == b"dirty", "it goes on serving"
        assert await client.fetch("pinned") == b"pinned"
        assert (await client.ask("commit_write", uri="staged", local_only=True))["status"] == "WRITECOMMITTED"
        for number in range(3):
            await client.store(f"new/{number}", pattern(number, SMALL))
            assert await where(client, f"new/{number}") == {str(paths(daemon)[SECOND])}
        assert len((await client.ask("get_devices"))["devices"]) == 2

        daemon.parts.flusher.submit = submit
        submit("hypercache://dirty")
        await eventually(lambda: daemon.parts.flusher.uploaded_objects == 1)
        await client.ask("pin", uri="pinned", pinned=False)
        await cleared(daemon)
        assert await uses(client) == ["DRAINED", "IN_USE"]
        for uri in ("hypercache://dirty", "pinned", "staged"):
            assert await client.fetch(uri) is None
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert await uses(client) == ["DRAINED", "IN_USE"], "that holds after a restart"
        assert await client.fetch("new/0") == pattern(0, SMALL)
        await drain(daemon)
        assert await uses(client) == ["IN_USE", "IN_USE"]
        await store_on(client, daemon, FIRST, "one")


async def test_a_drained_device_is_looked_at_again_and_again_until_nothing_is_on_it(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_health, "_CLEAR_EVERY_S", 0.02)
    async with two_devices(short_dir) as (daemon, client):
        await client.ask("pin", uri="one", pinned=True)
        await drain(daemon, str(paths(daemon)[FIRST]))
        assert await uses(client) == ["DRAINING", "IN_USE"]
        await client.ask("pin", uri="one", pinned=False)

        async def is_drained() -> bool:
            return await uses(client) == ["DRAINED", "IN_USE"]

        await eventually(is_drained)
        assert await client.fetch("two") == pattern(2, SMALL)


async def test_nobody_waits_for_what_is_drained_because_another_object_is_busy(short_dir: Path) -> None:
    async with two_devices(short_dir) as (daemon, client):
        await store_on(client, daemon, FIRST, "zzz")
        async with trio.open_nursery() as nursery, daemon.parts.store.locks.hold("zzz"):
            nursery.start_soon(drain, daemon, paths(daemon)[FIRST])
            await eventually(lambda: daemon.parts.store.locks._queues)
            assert daemon.parts.store.cache.get("one") is None, "it has left"
            assert (await client.ask("stage_write", uri="one", size_bytes=1))["status"] == "WRITESTAGED"
        assert daemon.parts.store.cache.get("zzz") is None


@pytest.mark.parametrize("text", ["/dev/nowhere\n", "{first}\n/dev/nowhere\n", b"\xff\xfe"], ids=repr)
async def test_a_drain_file_that_makes_no_sense_changes_nothing(
    short_dir: Path, text: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_devices(short_dir) as (daemon, client):
        await drain(daemon, paths(daemon)[SECOND])
        file = daemon.config.catalog_dir / "drain"
        content = text if isinstance(text, bytes) else text.format(first=paths(daemon)[FIRST]).encode()
        file.write_bytes(content)
        await daemon.parts.health.look_again()
        assert await uses(client) == ["IN_USE", "DRAINED"]
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "so nothing changes" in record.message
    assert ("/dev/nowhere" in record.message) is isinstance(text, str)


async def test_a_device_may_fail_while_it_is_drained(short_dir: Path) -> None:
    async with two_devices(short_dir) as (daemon, client):
        await store_on(client, daemon, FIRST, "dirty", b"dirty", local_only=False)
        await drain(daemon, paths(daemon)[FIRST])
        assert await client.fetch("dirty") == b"dirty"
        fail(daemon, FIRST)
        await cleared(daemon)
        assert await client.fetch("dirty") is None
        await daemon.parts.health.look_again()
        assert await uses(client) == ["DRAINING", "IN_USE"]
        assert await client.fetch("dirty") == b"dirty"


async def test_what_is_on_a_device_is_withheld_at_once_though_its_drain_is_slow(short_dir: Path) -> None:
    async with two_devices(short_dir) as (daemon, client):
        await store_on(client, daemon, FIRST, "dirty", b"dirty", local_only=False)
        drop, begun = daemon.parts.remover.drop, trio.Event()

        async def slow(*_: object) -> list[Any]:
            begun.set()
            await trio.sleep_forever()
            return []

        daemon.parts.remover.drop = slow
        (daemon.config.catalog_dir / "drain").write_text(str(paths(daemon)[FIRST]))
        await daemon.parts.health.look_again()
        await begun.wait()
        daemon.parts.remover.drop = drop
        fail(daemon, FIRST)
        await eventually(lambda: daemon.parts.store.cache.get("dirty") is None)
        assert await client.fetch("two") == pattern(2, SMALL)


def test_what_is_put_in_its_place_between_two_looks_is_not_called_a_copy(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = short_dir / "device"
    path.write_bytes(bytes(4096))
    block = Superblock("0" * 32, "1" * 32, 0, 1, 4096)
    member = device_probe.Member(str(path), block, device_probe.node_of(short_dir.stat()))
    seen = iter([block, None])
    monkeypatch.setattr(device_probe, "_superblock_at", lambda _: next(seen))
    with pytest.raises(DeviceError, match="another device, or one that was formatted anew"):
        device_probe.check(member)
