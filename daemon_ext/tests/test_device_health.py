"""Devices that fail, vanish or are drained under a running daemon: what goes, what waits, what goes on."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sqlite3
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from daemon_harness import (
    CHUNK,
    MIB,
    Client,
    Daemon,
    cleared,
    eventually,
    line,
    no_checking,
    pattern,
    running,
)
from gated_backend import GatedBackend

from hypercache_daemon import device_clearing, device_health, device_probe
from hypercache_daemon.access import DeviceError
from hypercache_daemon.device_probe import in_short, is_its_fault
from hypercache_daemon.superblock import Superblock

SMALL = 4096
FIRST, SECOND = 0, 1


@pytest.fixture(autouse=True)
def _no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are looked at when a test says so."""
    monkeypatch.setattr(device_health, "_PROBE_EVERY_S", 3600.0)


@pytest.fixture
def _probes(_no_probes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are looked at all the time."""
    monkeypatch.setattr(device_health, "_PROBE_EVERY_S", 0.01)


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


# -- a device fails ------------------------------------------------------------------------------------


def cut_off(path: Path) -> None:
    os.truncate(path, MIB)


def vanish(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def swap_for_a_blank_one(path: Path) -> None:
    other = path.with_name("other")
    with other.open("wb") as file:
        file.truncate(path.stat().st_size)
    other.rename(path)


def swap_for_another_one(path: Path) -> None:
    (neighbour,) = [it for it in path.parent.glob("device-*.hc") if it != path]
    other = path.with_name("other")
    shutil.copy(neighbour, other)
    other.rename(path)


def overwrite_its_front(path: Path) -> None:
    with path.open("r+b") as device:
        device.write(b"X" * 16)


DAMAGES = {
    cut_off: "was cut off",
    vanish: "No such file",
    swap_for_a_blank_one: "another device, or one that was formatted anew, is in its place",
    swap_for_another_one: "another device, or one that was formatted anew, is in its place",
    overwrite_its_front: "another device, or one that was formatted anew, is in its place",
}


@pytest.mark.usefixtures("_probes")
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
async def test_a_device_that_is_not_in_order_is_noticed_and_the_rest_goes_on(
    short_dir: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    async with two_devices(short_dir) as (daemon, client):
        damage(paths(daemon)[FIRST])
        await failed(daemon, FIRST)
        assert [await client.fetch(uri) for uri in ("one", "both")] == [None, None]
        assert await client.fetch("two") == pattern(2, SMALL)
        for number in range(4):
            await client.store(f"new/{number}", pattern(number, SMALL))
            assert await where(client, f"new/{number}") == {str(paths(daemon)[SECOND])}
        status = await client.status()
        assert DAMAGES[damage] in status["device_health"][FIRST]["failure"]
        assert await uses(client) == ["FAILED", "IN_USE"]
        listed = (await client.ask("get_devices"))["devices"]
        assert [device["path"] for device in listed] == [str(paths(daemon)[SECOND])]
        await eventually(lambda: daemon.parts.health.report()[FIRST]["allocated_bytes"] == 0)
        used = (await client.status())["pools"]["nvme"]
        assert used["used_bytes"] == 5 * SMALL, "the other half of what lay on both is free again"
    (message,) = [record.message for record in caplog.records if "FAILED" in record.message]
    assert str(paths(daemon)[FIRST]) in message
    assert DAMAGES[damage] in message
    assert "send SIGHUP" in message


async def test_what_no_backend_has_or_is_pinned_waits_and_comes_back_with_the_device(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, device_health.__name__)
    async with two_devices(short_dir) as (daemon, client):
        await store_on(client, daemon, FIRST, "dirty", b"dirty", local_only=False)
        await client.ask("pin", uri="both", pinned=True)
        path = paths(daemon)[FIRST]
        vanish(path)
        fail(daemon, FIRST)
        await cleared(daemon)
        for uri in ("one", "both", "dirty"):
            assert await client.fetch(uri) is None
        assert (await client.refusal("pin", uri="dirty", pinned=True))[0] == "NOT_FOUND"
        assert (await client.refusal("get_write_status", uri="dirty"))[0] == "NOT_FOUND"
        status = await client.status()
        assert status["objects"] == 1
        assert status["pools"]["nvme"]["withheld_bytes"] == SMALL + (CHUNK + SMALL)
        await daemon.parts.health.look_again()
        assert await uses(client) == ["FAILED", "IN_USE"], "it is not back yet"
        path.with_name("elsewhere").rename(path)
        await daemon.parts.health.look_again()
        assert await uses(client) == ["IN_USE", "IN_USE"]
        assert await client.fetch("dirty") == b"dirty"
        assert await client.fetch("both") == pattern(3, CHUNK + SMALL)
        assert await client.fetch("one") is None, "it was evicted"
        assert (await client.status())["pools"]["nvme"]["withheld_bytes"] == 0
        await store_on(client, daemon, FIRST, "new")
    said = [record.message for record in caplog.records if record.name == device_health.__name__]
    assert f"1 objects with a chunk on {path} were evicted, and 2 wait for it" in said[1]
    assert all(uri in said[1] for uri in ("dirty", "both"))
    assert said[2].startswith(f"{path} stays out of use: No such file")
    assert said[3] == f"{path} is in order again, and 2 objects that waited for it"


async def test_a_failed_device_stays_out_of_use_over_restarts_until_the_operator_says_so(
    short_dir: Path,
) -> None:
    async with two_devices(short_dir) as (daemon, client):
        await store_on(client, daemon, FIRST, "dirty", b"dirty", local_only=False)
        fail(daemon, FIRST)
        await cleared(daemon)
    for _ in range(2):
        async with running(short_dir) as daemon:
            client = await daemon.connect()
            assert await uses(client) == ["FAILED", "IN_USE"]
            assert (await client.status())["device_health"][FIRST]["failure"] == "Input/output error"
            for uri in ("one", "both", "dirty"):
                assert await client.fetch(uri) is None
            assert await client.fetch("two") == pattern(2, SMALL)
            for number in range(3):
                await client.store("new", pattern(number, SMALL))
                assert await where(client, "new") == {str(paths(daemon)[SECOND])}
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await daemon.parts.health.look_again()
        assert await client.fetch("dirty") == b"dirty"
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert await uses(client) == ["IN_USE", "IN_USE"]
        assert await client.fetch("dirty") == b"dirty"
        assert await client.fetch("one") is None


async def test_a_daemon_that_ends_before_the_evictions_leaves_nothing_to_be_found(short_dir: Path) -> None:
    async with two_devices(short_dir) as (daemon, _):
        daemon.parts.health._clearing.evict = never  # type: ignore[method-assign]
        fail(daemon, FIRST)
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert await client.fetch("one") is None
        await cleared(daemon)
        await daemon.parts.health.look_again()
        assert await client.fetch("one") is None, "it was evicted at last"
        assert await client.fetch("two") == pattern(2, SMALL)


async def never(*_: object) -> int:
    raise RuntimeError("the daemon dies here")


async def test_a_staged_write_on_a_failed_device_begins_anew(short_dir: Path) -> None:
    async with two_devices(short_dir) as (daemon, client):
        staged = await client.stage("both", pattern(4, CHUNK + SMALL))
        fail(daemon, FIRST)
        await cleared(daemon)
        code, sentence = await client.refusal("commit_write", uri="both", stage_id=staged["stage_id"])
        assert code == "STALE_STAGE"
        assert "stage it again" in sentence
        assert (await client.refusal("append_write", uri="both", size_bytes=5))[0] == "NOT_STAGED"
        await client.store("both", pattern(4, CHUNK + SMALL))
        assert await where(client, "both") == {str(paths(daemon)[SECOND])}
        assert await client.fetch("both") == pattern(4, CHUNK + SMALL)


async def test_what_is_fetched_onto_a_device_that_fails_meanwhile_is_not_committed(short_dir: Path) -> None:
    backend = GatedBackend(short_dir / "backend", piece_bytes=SMALL)
    (backend.folder / "a").write_bytes(pattern(4, CHUNK + SMALL))
    backend.between.clear()
    try:
        async with two_devices(short_dir, own_backend=backend) as (daemon, client):
            await client.send(line("locate", uri="hypercache://a"))
            await eventually(lambda: len(daemon.parts.store.cache.staged))
            fail(daemon, FIRST)
            await cleared(daemon)
            backend.between.set()
            assert (await client.receive())["status"] == "MISS"
            assert (await client.ask("locate", uri="hypercache://a"))["status"] == "HIT"
            assert await where(client, "hypercache://a") == {str(paths(daemon)[SECOND])}
    finally:
        backend.close()


async def test_a_commit_under_way_does_not_slip_through(short_dir: Path) -> None:
    async with two_devices(short_dir) as (daemon, client):
        data = pattern(4, CHUNK + SMALL)
        await client.stage("both", data)
        with no_checking(daemon):
            await client.send(line("commit_write", uri="both", sha256=hashlib.sha256(data).hexdigest()))
            await eventually(lambda: not daemon.parts.store.locks.is_free("both"))
            fail(daemon, FIRST)
            other = await daemon.connect()
            await eventually(lambda: daemon.parts.store.cache.get("one") is None)
            assert await other.fetch("two") == pattern(2, SMALL), "nobody else waits"
        assert (await client.receive())["status"] == "WRITECOMMITTED", "it was read back just now"
        await cleared(daemon)
        assert await client.fetch("both") is None
        await daemon.parts.health.look_again()
        assert await client.fetch("both") == data


@pytest.mark.parametrize("ending", ["evict", "purge", "replace"])
async def test_what_waits_can_be_removed_and_replaced_and_never_comes_back_then(
    short_dir: Path, ending: str
) -> None:
    async with two_devices(short_dir) as (daemon, client):
        await store_on(client, daemon, FIRST, "dirty", b"dirty", local_only=False)
        fail(daemon, FIRST)
        await cleared(daemon)
        if ending == "evict":
            assert (await client.ask("evict", uri="dirty"))["status"] == "EVICTED"
        elif ending == "purge":
            assert (await client.ask("purge"))["status"] == "PURGED"
        else:
            await client.store("dirty", b"newer")
        expected = b"newer" if ending == "replace" else None
        await daemon.parts.health.look_again()
        assert await client.fetch("dirty") == expected
        assert (await client.status())["pools"]["nvme"]["withheld_bytes"] == 0
    async with running(short_dir) as daemon:
        assert await (await daemon.connect()).fetch("dirty") == expected


async def test_the_blocks_of_what_waited_rest_over_a_restart_once_it_is_replaced(short_dir: Path) -> None:
    async with two_devices(short_dir, quarantine_s=1000) as (daemon, client):
        await store_on(client, daemon, FIRST, "dirty", b"dirty", local_only=False)
        fail(daemon, FIRST)
        await cleared(daemon)
        waiting = daemon.parts.store.cache.withheld_at("dirty")
        assert waiting is not None
        await client.store("dirty", b"newer")
    with closing(sqlite3.connect(short_dir / "pool" / "catalog.sqlite")) as catalog:
        holds = {hold_id for (hold_id,) in catalog.execute("SELECT hold_id FROM holds")}
    assert f"{waiting.generation:x}" in holds


async def test_nothing_older_is_fetched_for_what_waits(short_dir: Path) -> None:
    backend = GatedBackend(short_dir / "backend")
    (backend.folder / "a").write_bytes(b"older")
    uri = "hypercache://a"
    async with two_devices(short_dir, own_backend=backend) as (daemon, client):
        daemon.parts.flusher.submit = lambda uri: None  # type: ignore[method-assign]
        await store_on(client, daemon, FIRST, uri, b"newer", local_only=False)
        fail(daemon, FIRST)
        await cleared(daemon)
        assert (await client.ask("locate", uri=uri))["status"] == "MISS"
        assert backend.downloads == []
        await daemon.parts.health.look_again()
        assert await client.fetch(uri) == b"newer"


async def test_what_the_backend_has_is_fetched_again_onto_the_others(short_dir: Path) -> None:
    (short_dir / "backend").mkdir()
    uri = "hypercache://a"
    async with two_devices(short_dir, backend=f"file://{short_dir}/backend") as (daemon, client):
        await store_on(client, daemon, FIRST, uri, b"bytes", local_only=False)
        await eventually(lambda: daemon.parts.flusher.uploaded_objects == 1)
        fail(daemon, FIRST)
        await cleared(daemon)
        assert (await client.ask("locate", uri=uri))["status"] == "HIT"
        assert await where(client, uri) == {str(paths(daemon)[SECOND])}
        assert await client.fetch(uri) == b"bytes"


# -- how it is noticed ---------------------------------------------------------------------------------


STAGED = "hypercache://staged"


async def scrubbed(daemon: Daemon, _: Client) -> None:
    await daemon.parts.scrubber.round()


async def verified(daemon: Daemon, client: Client) -> None:
    answer = await client.ask("commit_write", uri=STAGED, chunk_checksums=[0])
    assert answer["error_code"] == "UNAVAILABLE"


async def flushed(daemon: Daemon, client: Client) -> None:
    assert (await client.ask("commit_write", uri=STAGED))["status"] == "WRITECOMMITTED"
    await eventually(lambda: daemon.parts.flusher.failed_uploads)


async def fetched(daemon: Daemon, client: Client) -> None:
    answers = [await client.ask("locate", uri=f"hypercache://{number}") for number in range(2)]
    assert "BACKEND_FAILED" in [answer.get("error_code") for answer in answers]


@pytest.mark.parametrize("noticed", [scrubbed, verified, flushed, fetched], ids=lambda it: it.__name__)
async def test_any_input_or_output_of_the_daemon_notices(
    short_dir: Path, noticed: Callable[[Daemon, Client], Any]
) -> None:
    (short_dir / "backend").mkdir()
    for number in range(2):
        (short_dir / "backend" / str(number)).write_bytes(b"to be fetched")
    settings = {
        "backend": f"file://{short_dir}/backend",
        "verify_on_commit": True,
        "scrub_mib_s": 100_000,
    }
    async with running(short_dir, **settings) as daemon:
        client = await daemon.connect()
        await store_on(client, daemon, FIRST, "one", pattern(1, SMALL))
        await store_on(client, daemon, SECOND, "two", pattern(2, SMALL))
        await client.stage(STAGED, b"bytes")
        assert await where(client, STAGED) == {str(paths(daemon)[FIRST])}
        cut_off(paths(daemon)[FIRST])
        await noticed(daemon, client)
        await failed(daemon, FIRST)
        assert await client.fetch("one") is None
        assert await client.fetch("two") == pattern(2, SMALL)


async def test_the_scrub_reads_the_pools_own_disk_whatever_has_its_name(short_dir: Path) -> None:
    async with two_devices(short_dir, scrub_mib_s=100_000) as (daemon, client):
        await store_on(client, daemon, FIRST, "dirty", b"dirty", local_only=False)
        await client.ask("pin", uri="one", pinned=True)
        with swapped(paths(daemon)[FIRST]):
            await daemon.parts.scrubber.round()
            assert (await client.status())["scrub"]["objects"] == 3, "all that have checksums"
        assert await client.fetch("dirty") == b"dirty"
        assert await client.fetch("one") == pattern(1, SMALL)
        assert (await client.status())["scrub"]["corrupt_objects"] == 0


async def test_what_a_write_back_reads_from_another_disk_never_reaches_the_backend(short_dir: Path) -> None:
    backend = GatedBackend(short_dir / "backend")
    backend.gate.clear()
    uri = "hypercache://old"
    try:
        async with two_devices(short_dir, own_backend=backend) as (daemon, client):
            daemon.parts.flusher.first_delay_s = 0.01
            await store_on(client, daemon, FIRST, uri, b"dirty", local_only=False, chunk_checksums=None)
            await eventually(lambda: backend.under_way == 1)
            with swapped(paths(daemon)[FIRST]):
                backend.gate.set()
                await failed(daemon, FIRST)
                await eventually(lambda: daemon.parts.flusher.failed_uploads)
                assert not (backend.folder / "old").exists()
            await daemon.parts.health.look_again()
            await eventually(lambda: daemon.parts.flusher.uploaded_objects)
            assert (backend.folder / "old").read_bytes() == b"dirty"
    finally:
        backend.close()


async def test_what_is_written_back_is_read_from_the_pools_own_disk_whatever_has_its_name(
    short_dir: Path,
) -> None:
    backend = GatedBackend(short_dir / "backend")
    backend.gate.clear()
    try:
        async with two_devices(short_dir, own_backend=backend) as (daemon, client):
            uri = "hypercache://own"
            await store_on(client, daemon, FIRST, uri, b"own", local_only=False, chunk_checksums=None)
            await eventually(lambda: backend.under_way == 1)
            look, back = daemon.parts.store.look, ExitStack()

            def looks_once_it_is_back(index: int) -> None:
                back.close()
                look(index)

            daemon.parts.store.look = looks_once_it_is_back
            back.enter_context(swapped(paths(daemon)[FIRST]))
            backend.gate.set()
            await eventually(lambda: daemon.parts.flusher.uploaded_objects)
            assert (backend.folder / "own").read_bytes() == b"own"
    finally:
        backend.close()


@pytest.mark.parametrize("is_written", [False, True], ids=["before it is written", "once it is written"])
async def test_what_is_fetched_onto_another_disk_is_not_committed(short_dir: Path, is_written: bool) -> None:
    backend = GatedBackend(short_dir / "backend")
    (backend.folder / "a").write_bytes(pattern(4, SMALL))
    (backend.between if is_written else backend.gate).clear()
    try:
        async with running(short_dir, own_backend=backend, devices=1, pool_size=17 * MIB) as daemon:
            client = await daemon.connect()
            path = paths(daemon)[FIRST]
            await client.send(line("locate", uri="hypercache://a"))
            await eventually(lambda: backend.downloads)
            await eventually(lambda: (pattern(4, SMALL) in path.read_bytes()) is is_written)
            with swapped(path):
                backend.close()
                assert (await client.receive())["error_code"] == "BACKEND_FAILED"
                assert not any(path.read_bytes()), "nothing was written to it"
            await failed(daemon, FIRST)
            assert await client.fetch("hypercache://a") is None
    finally:
        backend.close()


@contextmanager
def swapped(path: Path) -> Iterator[None]:
    """Another disk has that name."""
    kept = path.with_name("kept")
    path.rename(kept)
    with path.open("wb") as other:
        other.truncate(kept.stat().st_size)
    try:
        yield
    finally:
        kept.replace(path)


@pytest.mark.usefixtures("_probes")
async def test_a_device_that_does_not_answer_has_failed_and_nobody_waits_for_it(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    really = device_health.check

    def hangs(member: Any) -> None:
        if member.path.endswith("-hang"):
            released.wait()
        really(member)

    monkeypatch.setattr(device_health, "_ANSWER_WITHIN_S", 0.2)
    monkeypatch.setattr(device_health, "check", hangs)
    try:
        async with two_devices(short_dir) as (daemon, client):
            hanging = daemon.parts.health._devices[FIRST]
            hanging.member = type(hanging.member)(
                hanging.path + "-hang", hanging.member.superblock, hanging.member.node
            )
            await failed(daemon, FIRST)
            failure = (await client.status())["device_health"][FIRST]["failure"]
            assert failure == "it does not answer within 0.2 s"
            assert await client.fetch("two") == pattern(2, SMALL)
    finally:
        released.set()


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (OSError(5, "Input/output error"), True),
        (OSError(6, "No such device or address"), True),
        (OSError(61, "No data available"), True),
        (FileNotFoundError(2, "No such file or directory"), True),
        (OSError(24, "Too many open files"), False),
        (OSError(23, "Too many open files in system"), False),
        (OSError(12, "Cannot allocate memory"), False),
        (PermissionError(13, "Permission denied"), False),
        (OSError(28, "No space left on device"), False),
        (OSError(122, "Disk quota exceeded"), False),
        (DeviceError("it was cut off"), True),
        (RuntimeError("can't start new thread"), False),
    ],
    ids=str,
)
async def test_a_device_answers_for_its_own_faults_alone(
    short_dir: Path, error: Exception, fault: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_its_fault(error) is fault
    async with running(short_dir) as daemon:
        await trio.to_thread.run_sync(daemon.parts.store.suspect, FIRST, error)
        await eventually(lambda: any(in_short(error) in record.message for record in caplog.records))
        assert (daemon.parts.health.report()[FIRST]["failure"] is not None) is fault


@pytest.mark.usefixtures("_probes")
@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), RuntimeError("can't start new thread")], ids=str
)
async def test_a_doubt_is_told_once_and_again_when_it_comes_again(
    short_dir: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really, failing, looks = device_health.check, [True], [0]

    def sometimes(member: Any) -> None:
        looks[0] += 1
        if failing[0]:
            raise error
        really(member)

    async def looked_at(times: int) -> None:
        until = looks[0] + times
        await eventually(lambda: looks[0] > until)

    monkeypatch.setattr(device_health, "check", sometimes)
    async with running(short_dir):
        for _ in range(2):
            failing[0] = True
            await looked_at(10)
            failing[0] = False
            await looked_at(10)
    told = [record.message for record in caplog.records if "cannot be told" in record.message]
    assert len(told) == 2 * 2, "for each device, each time"


# -- back again ----------------------------------------------------------------------------------------


async def test_what_is_deleted_while_others_are_given_back_stays_so(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_clearing, "_LOOKED_AT_TOGETHER", 1)
    async with two_devices(short_dir) as (daemon, client):
        for uri in ("kept", "deleted"):
            await store_on(client, daemon, FIRST, uri, b"dirty", local_only=False)
        fail(daemon, FIRST)
        await cleared(daemon)
        cache = daemon.parts.store.cache
        give_back = cache.give_back

        def and_delete_the_other(uri: str) -> Any:
            cache.apply_removes(["deleted"], 0)
            return give_back(uri)

        monkeypatch.setattr(cache, "give_back", and_delete_the_other)
        await daemon.parts.health.look_again()
        assert await client.fetch("kept") == b"dirty"
        assert await client.fetch("deleted") is None
        assert (await client.status())["pools"]["nvme"]["withheld_bytes"] == 0
    assert "fault of the daemon" not in caplog.text


async def test_a_copy_takes_a_restart_since_clients_have_the_one_before_open(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_devices(short_dir) as (daemon, client):
        await store_on(client, daemon, FIRST, "dirty", b"dirty", local_only=False)
        path = paths(daemon)[FIRST]
        vanish(path)
        fail(daemon, FIRST)
        await cleared(daemon)
        shutil.copy(path.with_name("elsewhere"), path)
        await daemon.parts.health.look_again()
        assert await uses(client) == ["FAILED", "IN_USE"]
        told = (await client.ask("ping"))["instance_id"]
    assert (
        f"{path} stays out of use: another node or file with the same content is in its place" in caplog.text
    )
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert (await client.ask("ping"))["instance_id"] != told
        await daemon.parts.health.look_again()
        assert await uses(client) == ["IN_USE", "IN_USE"]
        assert await client.fetch("dirty") == b"dirty"


async def test_what_waits_without_checksums_can_be_given_up_where_a_copy_has_not_its_bytes(
    short_dir: Path,
) -> None:
    async with two_devices(short_dir) as (daemon, client):
        choices = {"local_only": False}
        await store_on(client, daemon, FIRST, "verifiable", b"dirty", **choices)
        await store_on(client, daemon, FIRST, "old client's", b"dirty", **choices, chunk_checksums=None)
        fail(daemon, FIRST)
        await cleared(daemon)
    async with running(short_dir, forget_unverifiable=True) as daemon:
        client = await daemon.connect()
        await daemon.parts.health.look_again()
        assert await client.fetch("verifiable") == b"dirty"
        assert await client.fetch("old client's") is None


@pytest.mark.parametrize("is_back", [False, True], ids=["withheld", "put back"])
@pytest.mark.parametrize("failures", [0, 1], ids=["ends well", "fails"])
async def test_an_upload_that_is_under_way_when_its_device_fails_ends_as_it_does(
    short_dir: Path, is_back: bool, failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    backend = GatedBackend(short_dir / "backend")
    backend.gate.clear()
    backend.failures = failures
    uri = "hypercache://a"
    try:
        async with two_devices(short_dir, own_backend=backend) as (daemon, client):
            daemon.parts.flusher.first_delay_s = 0.01
            await store_on(client, daemon, FIRST, uri, b"dirty", local_only=False)
            await eventually(lambda: backend.under_way == 1)
            fail(daemon, FIRST)
            await cleared(daemon)
            assert daemon.parts.store.cache.withheld() == [uri]
            if is_back:
                await daemon.parts.health.look_again()
            backend.gate.set()
            flusher = daemon.parts.flusher
            await eventually(lambda: (flusher.failed_uploads, flusher.uploaded_objects) != (0, 0))
            await cleared(daemon)
            if not is_back:
                assert len(daemon.parts.store.cache.withheld()) == failures, (
                    "what the backend has was evicted"
                )
                assert (await client.ask("locate", uri=uri))["status"] == ("MISS" if failures else "HIT")
                await daemon.parts.health.look_again()
            await eventually(lambda: flusher.uploaded_objects == 1)
            found = await client.ask("locate", uri=uri)
            assert (found["status"], found["sync_status"]) == ("HIT", "SYNCED_BACKEND")
            assert flusher.failed_uploads == failures
            assert len(backend.uploads) == 1 + failures
    finally:
        backend.close()
    assert "fault of the daemon" not in caplog.text


@pytest.mark.usefixtures("_probes")
async def test_a_copy_under_a_running_daemon_is_noticed_and_the_original_may_come_back(
    short_dir: Path,
) -> None:
    async with two_devices(short_dir) as (daemon, client):
        await store_on(client, daemon, FIRST, "dirty", b"dirty", local_only=False)
        path = paths(daemon)[FIRST]
        shutil.copy(path, path.with_name("copy"))
        vanish(path)
        path.with_name("copy").rename(path)
        await failed(daemon, FIRST)
        path.with_name("elsewhere").replace(path)
        await daemon.parts.health.look_again()
        assert await uses(client) == ["IN_USE", "IN_USE"]
        assert await client.fetch("dirty") == b"dirty"


async def test_what_lies_on_two_failed_devices_waits_for_both(short_dir: Path) -> None:
    async with two_devices(short_dir) as (daemon, client):
        await client.ask("pin", uri="both", pinned=True)
        fail(daemon, FIRST)
        fail(daemon, SECOND)
        await cleared(daemon)
        assert (await client.refusal("stage_write", uri="new", size_bytes=1))[0] == "NO_SPACE"
        elsewhere = paths(daemon)[SECOND].with_name("elsewhere")
        paths(daemon)[SECOND].rename(elsewhere)
        await daemon.parts.health.look_again()
        assert await uses(client) == ["IN_USE", "FAILED"]
        assert await client.fetch("both") is None
        elsewhere.rename(paths(daemon)[SECOND])
        await daemon.parts.health.look_again()
        assert await client.fetch("both") == pattern(3, CHUNK + SMALL)


async def test_what_waited_goes_on_to_the_backend(short_dir: Path) -> None:
    (short_dir / "backend").mkdir()
    async with two_devices(short_dir, backend=f"file://{short_dir}/backend") as (daemon, client):
        submit, daemon.parts.flusher.submit = daemon.parts.flusher.submit, lambda uri: None  # type: ignore[method-assign]
        await store_on(client, daemon, FIRST, "hypercache://a", b"dirty", local_only=False)
        daemon.parts.flusher.submit = submit  # type: ignore[method-assign]
        fail(daemon, FIRST)
        await cleared(daemon)
        await daemon.parts.health.look_again()
        await eventually(lambda: daemon.parts.flusher.uploaded_objects == 1)
        assert (short_dir / "backend" / "a").read_bytes() == b"dirty"


# -- draining ------------------------------------------------------------------------------------------


async def drain(daemon: Daemon, *lines: object) -> None:
    (daemon.config.catalog_dir / "drain").write_text("".join(f"{line}\n" for line in lines))
    await daemon.parts.health.look_again()
    await cleared(daemon)


async def test_a_drained_device_gets_nothing_new_and_loses_what_may_go(short_dir: Path) -> None:
    (short_dir / "backend").mkdir()
    async with two_devices(short_dir, backend=f"file://{short_dir}/backend") as (daemon, client):
        submit, daemon.parts.flusher.submit = daemon.parts.flusher.submit, lambda uri: None  # type: ignore[method-assign]
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

        daemon.parts.flusher.submit = submit  # type: ignore[method-assign]
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

        daemon.parts.remover.drop = slow  # type: ignore[method-assign]
        (daemon.config.catalog_dir / "drain").write_text(str(paths(daemon)[FIRST]))
        await daemon.parts.health.look_again()
        await begun.wait()
        daemon.parts.remover.drop = drop  # type: ignore[method-assign]
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
