"""Who leaves first in a running daemon, whose small pool a scan goes through."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_harness import MIB, pattern, running
from frames import FrameClient, bits, framed

OBJECT = MIB // 4
HOT = [f"hot/{number}" for number in range(4)]


async def look(client: FrameClient, uris: list[str]) -> list[bool]:
    located = await client.ask("locate_many", suffixes=uris)
    return bits(located["present"], len(uris))


async def serve(client: FrameClient, uris: list[str]) -> None:
    """Look a batch up, and store all of it where it is missing."""
    if not all(await look(client, uris)):
        await client.store({uri: pattern(7, OBJECT) for uri in uris})


@pytest.mark.parametrize(("settings", "survivors"), [({}, HOT), ({"eviction": "lru"}, [])])
async def test_a_scan_takes_what_is_used_under_lru_only(
    short_dir: Path, settings: dict[str, str], survivors: list[str]
) -> None:
    async with running(short_dir, pool_size=17 * MIB, devices=1, ram_size=0, **settings) as daemon:
        client = await framed(daemon)
        for _ in range(12):
            await serve(client, HOT)
        for number in range(50):  # three times what the pool holds
            await serve(client, [f"scan/{number}/{block}" for block in range(4)])
        present = await look(client, HOT)
        assert [uri for uri, is_here in zip(HOT, present, strict=True) if is_here] == survivors
        assert (await client.ask("get_status"))["evicted"]["objects"] > 120
