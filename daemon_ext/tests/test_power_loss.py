"""What survives a power loss: what was synced, and nothing that was only written.

The catalog lies on a file system in a file, of which a copy has what was synced by then. That takes root;
elsewhere the same tests lose nothing and prove less, which is said once, and under CI=true it is a failure.
The devices lie in memory and lose nothing, unless a test says so, which is the worst case: a row that comes
back finds its blocks as their next owner left them.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from daemon_harness import MIB, Daemon, Message, eventually, pattern, running
from forked_daemons import DEADLINE_S, BlockingClient, Forks, checked_status, small_pool

from hypercache_compat import disks
from hypercache_compat.raw_wire import read_layout, write_layout
from hypercache_protocol.checksum import crc32

OLD, NEW = pattern(1, MIB), pattern(2, MIB)


# -- what is synced ------------------------------------------------------------------------------------


def syncs(daemon: Daemon) -> Callable[[], list[bool]]:
    """Of each transaction of the catalog from now on, whether it is synced before anybody is told."""
    statements: list[str] = []
    daemon.parts.store.catalog._connection.set_trace_callback(statements.append)
    return lambda: [words.endswith("FULL") for words in statements if "synchronous" in words]


@pytest.mark.parametrize(
    ("is_synced", "action", "fields"),
    [
        (True, "commit_write", {"uri": "staged"}),
        (False, "commit_write", {"uri": "staged", "local_only": True}),
        (True, "commit_write", {"uri": "here", "local_only": True}),  # its blocks change hands
        (True, "evict", {"uri": "here"}),
        (True, "purge", {}),
        (True, "pin", {"uri": "here", "pinned": True}),
        (False, "stage_write", {"uri": "more", "size_bytes": 5}),
    ],
)
async def test_what_a_power_loss_must_not_take_back_is_synced_and_nothing_else_is(
    short_dir: Path, is_synced: bool, action: str, fields: Message
) -> None:
    async with running(short_dir, quarantine_s=100) as daemon:
        client = await daemon.connect()
        await client.store("here", OLD)
        for uri in ("here", "staged"):
            await client.stage(uri, NEW)
        seen = syncs(daemon)
        assert (await client.ask(action, **fields))["status"] != "ERROR"
        assert seen() == [is_synced]


async def test_what_the_backend_has_is_synced_before_anybody_is_told(short_dir: Path) -> None:
    (short_dir / "backend").mkdir()
    async with running(short_dir, backend=f"file://{short_dir}/backend", quarantine_s=100) as daemon:
        client = await daemon.connect()
        await client.stage("hypercache://a", NEW)
        seen = syncs(daemon)
        await client.ask("commit_write", uri="hypercache://a")
        await eventually(lambda: daemon.parts.flusher.uploaded_objects)
        assert seen() == [True, True]


# -- what survives -------------------------------------------------------------------------------------


@dataclass
class Machine:
    """A folder whose part `state` may lose its power; it does where `loses`."""

    folder: Path
    loses: bool

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def lose_power(self) -> None:
        if self.loses:
            disks.lose_power(self.state, self.folder / "image")


@pytest.fixture(scope="module")
def may_lose_power(request: pytest.FixtureRequest) -> bool:
    lacking = disks.lacks_to_freeze()
    if lacking and os.environ.get("CI") == "true":
        pytest.fail(f"the tests of power losses cannot run here: they take {lacking}")
    if lacking:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\nnothing is lost in the tests of power losses: that takes {lacking}")
    return not lacking


@pytest.fixture
def machine(short_dir: Path, may_lose_power: bool, forks: Forks) -> Iterator[Machine]:
    made = Machine(short_dir, may_lose_power)
    made.state.mkdir()
    with disks.on_a_file(made.state, short_dir / "image", 64 * MIB) if may_lose_power else nullcontext():
        yield made
        forks.close()


def test_a_power_loss_takes_what_nobody_synced(machine: Machine) -> None:
    kept = 0
    for number in range(5):  # the machine may sync all its disks at any moment, for whoever asks it to
        file = machine.state / str(number)
        file.write_bytes(b"bytes")
        machine.lose_power()
        kept += file.exists() and file.read_bytes() == b"bytes"
    assert (kept < 5) == machine.loses


def store(client: BlockingClient, uri: str, data: bytes, *, local_only: bool = True) -> None:
    staged = client.ask("stage_write", uri=uri, size_bytes=len(data))
    write_layout(staged["chunk_layout"], data)
    assert client.ask("commit_write", uri=uri, local_only=local_only)["status"] == "WRITECOMMITTED"


def fetched(client: BlockingClient, uri: str) -> bytes | None:
    found = client.ask("locate", uri=uri)
    return read_layout(found["chunk_layout"]) if found["status"] == "HIT" else None


def commit_to_be_flushed(client: BlockingClient) -> None:
    store(client, "a", NEW, local_only=False)


def replace(client: BlockingClient) -> None:
    store(client, "a", NEW)


def evict(client: BlockingClient) -> None:
    assert client.ask("evict", uri="a")["status"] == "EVICTED"


def purge(client: BlockingClient) -> None:
    assert client.ask("purge")["status"] == "PURGED"


@pytest.mark.parametrize(
    ("last", "survives"),
    [(commit_to_be_flushed, NEW), (replace, NEW), (evict, None), (purge, None)],
)
def test_what_was_told_last_holds_after_a_power_loss(
    machine: Machine, forks: Forks, last: Callable[[BlockingClient], None], survives: bytes | None
) -> None:
    settings = ("--state-dir", str(machine.state), "--quarantine-s", "0", "--evict-above", "1")
    arguments = small_pool(machine.folder, *settings)
    daemon = forks.start(machine.folder, arguments)
    with daemon.connect() as client:
        store(client, "a", OLD)
        store(client, "durable", OLD, local_only=False)  # and all before it
        last(client)
        # Takes all that is free, so the blocks that "a" had before as well.
        free_bytes = checked_status(client)["pools"]["nvme"]["free_bytes"]
        store(client, "casual", pattern(3, free_bytes))
    daemon.kill()
    machine.lose_power()
    with forks.start(machine.folder, arguments).connect() as client:
        assert fetched(client, "a") == survives
        assert fetched(client, "durable") == (None if last is purge else OLD)
        casual = fetched(client, "casual")
        assert casual == pattern(3, free_bytes) or (casual is None and machine.loses)
        checked_status(client)


def sync(paths: set[str]) -> None:
    for path in paths:
        with open(path, "rb") as device:
            os.fdatasync(device)


@pytest.mark.parametrize("client_syncs", [True, False])
def test_the_first_commit_is_there_with_the_bytes_where_its_client_synced_them(
    machine: Machine, forks: Forks, client_syncs: bool
) -> None:
    arguments = [
        *("--pool-dir", str(machine.state / "pool"), "--pool-size", str(34 * MIB), "--devices", "2"),
        *("--ram-size", "0"),
    ]
    daemon = forks.start(machine.folder, arguments)
    with daemon.connect() as client:
        staged = client.ask("stage_write", uri="a", size_bytes=MIB)
        write_layout(staged["chunk_layout"], NEW)
        if client_syncs:
            sync({chunk["device"] for chunk in staged["chunk_layout"]})
        assert client.ask("commit_write", uri="a")["status"] == "WRITECOMMITTED"
    daemon.kill()
    machine.lose_power()
    with forks.start(machine.folder, arguments).connect() as client:
        assert fetched(client, "a") == NEW or not client_syncs
        assert checked_status(client)["objects"] == 1, "the pool is there, and the commit"


def test_what_was_fetched_has_its_bytes_after_a_power_loss_or_is_a_miss(
    machine: Machine, forks: Forks
) -> None:
    backend = machine.folder / "backend"
    backend.mkdir()
    (backend / "a").write_bytes(NEW)
    arguments = [
        *("--pool-dir", str(machine.state / "pool"), "--pool-size", str(34 * MIB), "--devices", "2"),
        *("--ram-size", "0", "--backend", str(backend)),
    ]
    daemon = forks.start(machine.folder, arguments)
    with daemon.connect() as client:
        assert fetched(client, "hypercache://a") == NEW
        store(client, "hypercache://durable", OLD, local_only=False)  # and all before it
    daemon.kill()
    machine.lose_power()
    with forks.start(machine.folder, arguments).connect() as client:
        found = client.ask("locate", uri="hypercache://a", auto_ingest=False)
        assert found["status"] == "MISS" or read_layout(found["chunk_layout"]) == NEW


def test_what_was_stored_before_an_orderly_stop_has_its_bytes_after_a_power_loss(
    machine: Machine, forks: Forks
) -> None:
    arguments = [
        *("--pool-dir", str(machine.state / "pool"), "--pool-size", str(34 * MIB), "--devices", "2"),
        *("--ram-size", "0"),
    ]
    daemon = forks.start(machine.folder, arguments)
    with daemon.connect() as client:
        store(client, "a", NEW)
    assert daemon.stop() == 0
    machine.lose_power()
    as_after_another_boot(machine.state / "pool" / "catalog.sqlite")
    with forks.start(machine.folder, arguments).connect() as client:
        assert fetched(client, "a") == NEW


# -- what never reached the devices ----------------------------------------------------------------------

KINDS: dict[str, Message] = {
    "local": {"auto_flush_s3": False},
    "pinned": {"auto_flush_s3": False, "pinned": True},
    "in memory": {"auto_flush_s3": False, "tier": "ram"},
    "verifiable": {"auto_flush_s3": False},
    "hypercache://synced": {},
    "dirty": {},
}
"""Of each uri what an old client stages it with; `verifiable` is committed with checksums."""


def store_each_kind(client: BlockingClient) -> dict[str, list[Message]]:
    """Returns each one's layout."""
    layouts = {}
    for uri, options in KINDS.items():
        staged = client.ask("stage_write", uri=uri, size_bytes=MIB, **options)
        layouts[uri] = staged["chunk_layout"]
        write_layout(layouts[uri], NEW)
        sums = {"chunk_checksums": [crc32(NEW)]} if uri == "verifiable" else {}
        assert client.ask("commit_write", uri=uri, **sums)["status"] == "WRITECOMMITTED"
    deadline = time.monotonic() + DEADLINE_S
    while client.ask("get_write_status", uri="hypercache://synced")["sync_status"] != "SYNCED_BACKEND":
        assert time.monotonic() < deadline
    return layouts


def as_after_another_boot(catalog: Path) -> None:
    """Have the catalog say that the daemon before ran in another boot of the machine, if it ran to no end."""
    with closing(sqlite3.connect(catalog)) as connection, connection:
        connection.execute("UPDATE meta SET value='another' WHERE name='runs in boot' AND value!=''")


@pytest.mark.parametrize(
    ("ends", "boots", "there"),
    [
        ("killed", True, {"verifiable", "dirty"}),
        ("killed", False, set(KINDS)),
        ("stopped", True, set(KINDS)),
    ],
)
def test_what_nobody_can_verify_is_not_served_where_the_machine_went_down_under_the_daemon(
    short_dir: Path, forks: Forks, ends: str, boots: bool, there: set[str]
) -> None:
    (short_dir / "backend").mkdir()
    settings = ("--backend", str(short_dir / "backend"), "--state-dir", str(short_dir / "state"))
    arguments = small_pool(short_dir, *settings)
    daemon = forks.start(short_dir, arguments)
    with daemon.connect() as client:
        layouts = store_each_kind(client)
    if ends == "killed":
        daemon.kill()
    else:
        assert daemon.stop() == 0
    if boots:
        as_after_another_boot(short_dir / "state" / "catalog.sqlite")
    for _ in range(2):  # for good
        with forks.start(short_dir, arguments).connect() as client:
            found = {
                uri for uri in KINDS if client.ask("locate", uri=uri, auto_ingest=False)["status"] == "HIT"
            }
            assert found == there
            assert checked_status(client)["pools"]["nvme"]["used_bytes"] == MIB * len(there - {"in memory"})
            assert all(read_layout(layouts[uri]) == NEW for uri in there)
