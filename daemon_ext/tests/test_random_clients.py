"""Many clients at once doing anything at random, on a small pool with a backend that fails at times.

No reader ever gets a byte that was not committed under the uri; the figures add up at every moment; and in
the end the catalog says exactly what the cache does, before and after a restart.
"""

from __future__ import annotations

import random
import sqlite3
import zlib
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from daemon_harness import CHUNK, MIB, Client, Daemon, Message, eventually, running
from gated_backend import GatedBackend

from hypercache_compat.raw_wire import read_layout
from hypercache_daemon.catalog import Catalog
from hypercache_daemon.core.objects import StoredObject
from hypercache_daemon.core.records import stored_of
from hypercache_protocol.states import SyncStatus

URIS = [f"hypercache://random/{number}" for number in range(12)]
SIZES = [0, 1, 5000, 65536, MIB, CHUNK + 1]


class RandomClient:
    """Does one random thing after the other; each byte that it writes tells of which uri it is."""

    def __init__(self, client: Client, number: int, seed: int) -> None:
        self.client = client
        self.chance = random.Random(f"{seed}/{number}")
        self.number = number
        self.writes = 0
        self.outcomes: list[str] = []

    async def run(self, turns: int) -> None:
        actions = [self.write, self.read, self.pin, self.evict, self.stage_and_leave, self.look]
        for _ in range(turns):
            action = self.chance.choices(actions, weights=[8, 8, 1, 2, 1, 2])[0]
            await action(self.chance.choice(URIS))

    def data_for(self, uri: str) -> bytes:
        self.writes += 1
        return bytes([URIS.index(uri) << 4 | self.writes & 15]) * self.chance.choice(SIZES)

    async def write(self, uri: str) -> None:
        data = self.data_for(uri)
        tier = self.chance.choice(["nvme", "ram"])
        staged = await self.client.ask("stage_write", uri=uri, size_bytes=len(data), tier=tier)
        if staged["status"] == "ERROR":
            self.outcomes.append(staged["error_code"])
            return
        layout = staged["chunk_layout"]
        write_pieces(layout, data)
        if self.chance.random() < 0.2:
            more = self.data_for(uri)[:5000]
            added = await self.client.ask(
                "append_write", uri=uri, size_bytes=len(more), stage_id=staged["stage_id"]
            )
            if added["status"] != "ERROR":
                write_pieces(added["chunk_layout"], more)
                layout, data = layout + added["chunk_layout"], data + more
        commit: Message = {"chunk_checksums": checksums(layout, data), "stage_id": staged["stage_id"]}
        kind = self.chance.choice(["local_only", "write_through", ""])
        reply = await self.client.ask("commit_write", uri=uri, **commit, **({kind: True} if kind else {}))
        is_gone = "did not reach the backend" in reply.get("error_message", "")
        self.outcomes.append("GONE" if is_gone else reply.get("error_code", reply["status"]))

    async def read(self, uri: str) -> None:
        pinned = self.chance.random() < 0.1
        found = await self.client.ask(
            "locate", uri=uri, auto_ingest=self.chance.random() < 0.7, pinned=pinned
        )
        self.outcomes.append(found.get("error_code", found["status"]))
        if found["status"] == "HIT" and found["sync_status"] != "STAGED":
            check_whole(uri, found)

    async def pin(self, uri: str) -> None:
        await self.client.ask("pin", uri=uri, pinned=self.chance.random() < 0.2)

    async def evict(self, uri: str) -> None:
        await self.client.ask("evict", uri=uri)

    async def stage_and_leave(self, uri: str) -> None:
        await self.client.ask("stage_write", uri=uri, size_bytes=self.chance.choice(SIZES))

    async def look(self, uri: str) -> None:
        await self.client.status()
        await self.client.ask("get_write_status", uri=uri)


def write_pieces(layout: list[Message], data: bytes) -> None:
    position = 0
    for chunk in layout:
        with Path(chunk["device"]).open("r+b") as device:
            device.seek(chunk["offset"])
            device.write(data[position : position + chunk["length"]])
        position += chunk["length"]


def checksums(layout: list[Message], data: bytes) -> list[int]:
    sums, position = [], 0
    for chunk in layout:
        sums.append(zlib.crc32(data[position : position + chunk["length"]]))
        position += chunk["length"]
    return sums


def check_whole(uri: str, found: Message) -> None:
    """Every chunk is what its writer said, and was written for this uri."""
    for chunk in found["chunk_layout"]:
        data = read_layout([chunk])
        assert zlib.crc32(data) == chunk["checksum"], f"wrong bytes of {uri}"
        own = bytes(URIS.index(uri) << 4 | low for low in range(16))
        assert not data.translate(None, own), "another's bytes"


@pytest.mark.parametrize("seed", range(3))
async def test_random_clients_get_no_wrong_byte_and_leave_everything_in_order(
    short_dir: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    backend = GatedBackend(short_dir / "backend")
    # A located object may be read for a second after it left; a pool that is full of such says NO_SPACE.
    settings = {"quarantine_s": 1.0, "quarantine_share": 1.0, "evict_above": 0.6, "evict_down_to": 0.4}
    async with running(short_dir, own_backend=backend, pool_size=66 * MIB, **settings) as daemon:
        daemon.parts.flusher.first_delay_s = 0.01
        clients = [RandomClient(await daemon.connect(), number, seed) for number in range(6)]
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(client.run, 80)
            nursery.start_soon(fail_at_times, backend, random.Random(seed))
            nursery.start_soon(purge_once, await daemon.connect(), daemon)
            await eventually(lambda: all(len(client.outcomes) > 20 for client in clients))
            backend.failures = 0
        outcomes = {outcome for client in clients for outcome in client.outcomes}
        assert {"WRITECOMMITTED", "HIT"} <= outcomes
        refusals = {
            "NO_SPACE",
            "BACKEND_FAILED",
            "STALE_STAGE",
            "GONE",
        }  # the last: evicted before its upload
        assert outcomes <= {"WRITECOMMITTED", "HIT", "MISS", *refusals}
        await eventually(lambda: settled(daemon), "the end of all uploads")
        no_block_twice(daemon)
    kept = as_in_catalog(daemon)
    with closing(Catalog.open(short_dir / "pool" / "catalog.sqlite", pool_id(short_dir))) as catalog:
        assert [stored_of(uri, record) for uri, record in sorted(catalog.records().items())] == kept
    async with running(short_dir, own_backend=backend, pool_size=66 * MIB, **settings) as daemon:
        assert as_in_catalog(daemon) == kept
        no_block_twice(daemon)
        client = await daemon.connect()
        assert (await client.status())["objects_by_state"]["STAGED"] == 0
        for uri in URIS:
            found = await client.ask("locate", uri=uri)
            if found["status"] == "HIT":
                check_whole(uri, found)
    assert "Traceback" not in caplog.text


async def fail_at_times(backend: GatedBackend, chance: random.Random) -> None:
    for _ in range(10):
        backend.failures = chance.choice([0, 1, 2])
        await trio.sleep(0.02)
    backend.failures = 0


async def purge_once(client: Client, daemon: Daemon) -> None:
    await eventually(lambda: daemon.parts.handlers.counters["commit_write.WRITECOMMITTED"] > 60)
    await client.ask("purge")


def settled(daemon: Daemon) -> bool:
    dirty = (SyncStatus.COMMITTED, SyncStatus.SYNCING_BACKEND)
    return not any(stored.state in dirty for stored in daemon.parts.store.cache.objects())


def as_in_catalog(daemon: Daemon) -> list[StoredObject]:
    return sorted(daemon.parts.store.cache.objects(), key=lambda stored: stored.uri)


def no_block_twice(daemon: Daemon) -> None:
    """Of the objects, by looking at them; of all owners together, by the sum."""
    taken = sorted(
        (stored.tier.value, extent.device, extent.offset, extent.offset + extent.allocated_bytes)
        for stored in daemon.parts.store.cache.objects()
        for extent in stored.extents
    )
    for (tier, device, _, end), (next_tier, next_device, start, _) in pairwise(taken):
        assert (tier, device) != (next_tier, next_device) or end <= start
    for pool in daemon.parts.store.cache.pools.values():
        usage = pool.usage()
        assert usage.total_bytes == (
            usage.free_bytes + usage.used_bytes + usage.staged_bytes + usage.quarantined_bytes
        )


def pool_id(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "pool" / "catalog.sqlite")) as connection:
        return str(connection.execute("SELECT value FROM meta WHERE name='pool_id'").fetchone()[0])
