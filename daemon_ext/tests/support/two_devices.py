"""A daemon with two devices of which one gets into trouble, and how it is seen."""

from __future__ import annotations

import os
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from daemon_harness import CHUNK, MIB, Client, Daemon, cleared, eventually, pattern, running

SMALL = 4096
FIRST, SECOND = 0, 1


def paths(daemon: Daemon) -> list[Path]:
    return [Path(path) for path in daemon.parts.store.device_paths.values()]


async def uses(client: Client) -> list[str]:
    return [device["use"] for device in (await client.status())["device_health"]]


async def failed(daemon: Daemon, *indexes: int) -> None:
    """Wait until these devices are known to have failed and what was on them is seen to."""
    health = daemon.parts.health
    await eventually(
        lambda: {index for index, it in enumerate(health.report()) if it["failure"]} == {*indexes}
    )
    await cleared(daemon)


def fail(daemon: Daemon, index: int) -> None:
    """As if the daemon's own I/O had failed."""
    daemon.parts.health._judge(daemon.parts.health._devices[index], OSError(5, "Input/output error"))


async def store_on(
    client: Client, daemon: Daemon, device: int, uri: str, data: bytes = b"bytes", **commit: object
) -> None:
    """An object of one chunk on that device: devices take turns."""
    choices = {"chunk_checksums": [zlib.crc32(data)], "local_only": True, **commit}
    for number in range(2):
        staged = await client.stage(uri, data)
        if staged["chunk_layout"][0]["device"] == str(paths(daemon)[device]):
            assert (await client.ask("commit_write", uri=uri, **choices))["status"] == "WRITECOMMITTED"
            return
        assert (await client.ask("evict", uri=uri))["status"] == "EVICTED", number
    raise AssertionError("no turn of this device's")


async def where(client: Client, uri: str) -> set[str]:
    found = await client.ask("locate", uri=uri, auto_ingest=False)
    return {chunk["device"] for chunk in found["chunk_layout"]}


@asynccontextmanager
async def two_devices(folder: Path, **settings: Any) -> AsyncIterator[tuple[Daemon, Client]]:
    """A daemon with "one" on its first device, "two" on its second and "both" on both."""
    async with running(folder, **settings) as daemon:
        client = await daemon.connect()
        await store_on(client, daemon, FIRST, "one", pattern(1, SMALL))
        await store_on(client, daemon, SECOND, "two", pattern(2, SMALL))
        await client.store("both", pattern(3, CHUNK + SMALL))
        yield daemon, client


def cut_off(path: Path) -> None:
    os.truncate(path, MIB)


def vanish(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
