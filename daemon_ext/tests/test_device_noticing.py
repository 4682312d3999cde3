"""How it is noticed that a device is not in order, and that it alone is to blame."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from daemon_harness import MIB, Client, Daemon, eventually, line, pattern, running
from gated_backend import GatedBackend
from two_devices import FIRST, SECOND, SMALL, cut_off, failed, paths, store_on, two_devices, where

from hypercache_daemon import device_health
from hypercache_daemon.access import DeviceError
from hypercache_daemon.device_probe import in_short, is_its_fault

pytestmark = pytest.mark.usefixtures("no_probes")

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


@pytest.mark.usefixtures("probes")
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


@pytest.mark.usefixtures("probes")
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
