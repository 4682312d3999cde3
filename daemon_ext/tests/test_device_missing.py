"""A start without a device that the operator drained: the others serve, and nothing that waits is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chunk_tables import table_of
from daemon_harness import CHUNK, MIB, Client, Daemon, cleared, pattern, running

from hypercache_daemon.access import DeviceError
from hypercache_daemon.core.extents import Extent, end_on
from hypercache_daemon.superblock import Found, Superblock, check_pool

COUNT = 3
SMALL = 4096


def made(folder: Path) -> list[str]:
    """Blank files for a pool."""
    paths = [folder / f"disk-{index}" for index in range(COUNT)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(20 * MIB)
    return [str(path) for path in paths]


def daemon_on(folder: Path, disks: list[str], **settings: Any) -> Any:
    return running(folder, pool_dir=None, device=disks, state_dir=folder / "state", **settings)


def drained(folder: Path, *disks: str) -> None:
    (folder / "state").mkdir(exist_ok=True)
    (folder / "state" / "drain").write_text("\n".join(disks))


async def uses(client: Client) -> list[str]:
    return [device["use"] for device in (await client.status())["device_health"]]


async def filled(folder: Path, disks: list[str]) -> dict[str, bytes]:
    """Objects of one chunk that are dirty, on one device after the other, and a clean one on all."""
    objects = {f"dirty/{number}": pattern(number, SMALL) for number in range(2 * COUNT)}
    async with daemon_on(folder, disks) as daemon:
        client = await daemon.connect()
        for uri, data in objects.items():
            await client.store(uri, data, {})
        await client.store("clean", pattern(9, COUNT * CHUNK))
        lies_on = [await device_of(client, uri) for uri in objects]
    assert lies_on == disks * 2
    return objects


async def device_of(client: Client, uri: str) -> str:
    found = await client.ask("locate", uri=uri, auto_ingest=False)
    return str(found["chunk_layout"][0]["device"])


def gone(path: Path) -> None:
    path.unlink()


def blank(path: Path) -> None:
    os.truncate(path, 0)
    os.truncate(path, 20 * MIB)


def cut_off(path: Path) -> None:
    os.truncate(path, MIB)


def full_of_something(path: Path) -> None:
    path.write_bytes(b"something" * (20 * MIB // 9))


DAMAGES = [gone, blank, cut_off, full_of_something]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("index", [0, 2], ids=["first", "last"])
async def test_the_pool_opens_without_it_and_it_comes_back_with_what_waited(
    short_dir: Path, damage: Callable[[Path], None], index: int, caplog: pytest.LogCaptureFixture
) -> None:
    disks = made(short_dir)
    objects = await filled(short_dir, disks)
    shutil.copy(disks[index], short_dir / "kept")
    damage(Path(disks[index]))
    with pytest.raises(DeviceError, match=disks[index]):
        async with daemon_on(short_dir, disks):
            pass

    drained(short_dir, disks[index])
    async with daemon_on(short_dir, disks) as daemon:
        client = await daemon.connect()
        await cleared(daemon)
        assert [use == "FAILED" for use in await uses(client)] == [place == index for place in range(COUNT)]
        assert await found(client, objects) == {
            uri: data for place, (uri, data) in enumerate(objects.items()) if place % COUNT != index
        }
        assert await client.fetch("clean") is None
        for number in range(COUNT):
            await client.store(f"new/{number}", pattern(number, SMALL))
            assert await device_of(client, f"new/{number}") != disks[index]
        listed = (await client.ask("get_devices"))["devices"]
        assert [device["path"] for device in listed] == [disk for disk in disks if disk != disks[index]]
        await daemon.parts.health.look_again()
        assert (await uses(client))[index] == "FAILED"
        assert "start it again with the device in place" in caplog.text

    shutil.move(short_dir / "kept", disks[index])
    drained(short_dir)
    async with daemon_on(short_dir, disks) as daemon:
        client = await daemon.connect()
        assert (await uses(client))[index] == "FAILED", "until the operator says so"
        await daemon.parts.health.look_again()
        assert await uses(client) == ["IN_USE"] * COUNT
        assert await found(client, objects) == objects
        assert await client.fetch("clean") is None
        assert await client.fetch("new/0") == pattern(0, SMALL)


async def found(client: Client, objects: dict[str, bytes]) -> dict[str, bytes]:
    fetched = {uri: await client.fetch(uri) for uri in objects}
    return {uri: data for uri, data in fetched.items() if data is not None}


async def test_blocks_that_rest_on_it_rest_on(short_dir: Path) -> None:
    disks = made(short_dir)
    async with daemon_on(short_dir, disks) as daemon:
        client = await daemon.connect()
        await client.stage("staged", pattern(1, COUNT * CHUNK))
    Path(disks[1]).unlink()
    drained(short_dir, disks[1])
    async with daemon_on(short_dir, disks) as daemon:
        quarantined = (await (await daemon.connect()).status())["pools"]["nvme"]["quarantined_bytes"]
        assert quarantined == COUNT * CHUNK
        assert allocated(daemon) == [CHUNK] * COUNT


def allocated(daemon: Daemon) -> list[int]:
    return [device["allocated_bytes"] for device in daemon.parts.health.report()]


async def test_a_drained_device_that_is_there_is_part_of_the_pool(short_dir: Path) -> None:
    disks = made(short_dir)
    objects = await filled(short_dir, disks)
    drained(short_dir, disks[0])
    async with daemon_on(short_dir, disks) as daemon:
        client = await daemon.connect()
        assert await uses(client) == ["DRAINING", "IN_USE", "IN_USE"]
        assert await found(client, objects) == objects


async def test_a_device_of_another_pool_in_its_place_is_refused_all_the_same(short_dir: Path) -> None:
    disks = made(short_dir)
    await filled(short_dir, disks)
    (short_dir / "other").mkdir()
    others = made(short_dir / "other")
    async with daemon_on(short_dir / "other", others):
        pass
    shutil.copy(others[1], disks[1])
    drained(short_dir, disks[1])
    with pytest.raises(DeviceError, match=f"{disks[1]} belongs to pool"):
        async with daemon_on(short_dir, disks):
            pass


async def test_no_pool_is_made_without_a_device(short_dir: Path) -> None:
    disks = made(short_dir)
    Path(disks[1]).unlink()
    drained(short_dir, disks[1])
    with pytest.raises(DeviceError, match=f"{disks[1]} cannot be left out: the others are no pool yet"):
        async with daemon_on(short_dir, disks):
            pass
    assert not any(Path(disks[0]).read_bytes()), "nothing was formatted"
    with pytest.raises(DeviceError, match=f"{disks[1]} does not exist.*the file drain beside"):
        async with daemon_on(short_dir, disks, format=True):
            pass


# -- the rules behind it -------------------------------------------------------------------------------


def members(*indexes: int, count: int = 4) -> list[Found]:
    return [
        Found(f"/dev/d{i}", 20 * MIB, Superblock("p" * 32, f"{i:032x}", i, count, 20 * MIB)) for i in indexes
    ]


@pytest.mark.parametrize(
    ("indexes", "left_out"), [((1, 2, 3), {0}), ((0, 1, 2), {3}), ((0, 2), {1, 3}), ((0, 1, 2, 3), set())]
)
def test_a_pool_may_lack_what_was_left_out(indexes: tuple[int, ...], left_out: set[int]) -> None:
    check_pool(members(*indexes), frozenset(left_out))


@pytest.mark.parametrize(
    ("indexes", "left_out", "problem"),
    [
        ((1, 2), {0}, "number 3 of it is missing"),
        ((0, 2, 1), {3}, "is device 2 of its pool but was given in place 1"),
        ((0, 1, 2), {1}, "number 3 of it is missing"),
        ((0, 1, 2, 3), {1}, "is device 1 of its pool but was given in place 2"),
    ],
)
def test_and_nothing_else(indexes: tuple[int, ...], left_out: set[int], problem: str) -> None:
    with pytest.raises(DeviceError, match=problem):
        check_pool(members(*indexes), frozenset(left_out))


def test_the_end_of_the_last_chunk_on_a_device_is_found() -> None:
    chunks = table_of([Extent(0, 8 * MIB, 5), Extent(1, 64 * MIB, 4096), Extent(0, 4 * MIB, 4 * MIB)])
    assert end_on(chunks, 0) == 8 * MIB + 4096
    assert end_on(chunks, 1) == 64 * MIB + 4096
    assert end_on(chunks, 2) == 0
    assert end_on(np.zeros(0, chunks.dtype), 0) == 0
