"""Devices that fail or vanish under a running daemon: what goes, what waits, and what comes back."""

from __future__ import annotations

import hashlib
import logging
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from daemon_harness import CHUNK, cleared, eventually, line, no_checking, pattern, running
from gated_backend import GatedBackend
from two_devices import (
    FIRST,
    SECOND,
    SMALL,
    cut_off,
    fail,
    failed,
    paths,
    store_on,
    two_devices,
    uses,
    vanish,
    where,
)

from hypercache_daemon import device_clearing, device_health

pytestmark = pytest.mark.usefixtures("no_probes")


# -- a device fails ------------------------------------------------------------------------------------


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


@pytest.mark.usefixtures("probes")
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
        daemon.parts.health._clearing.evict = never
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
        daemon.parts.flusher.submit = lambda uri: None
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


@pytest.mark.usefixtures("probes")
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
        submit, daemon.parts.flusher.submit = daemon.parts.flusher.submit, lambda uri: None
        await store_on(client, daemon, FIRST, "hypercache://a", b"dirty", local_only=False)
        daemon.parts.flusher.submit = submit
        fail(daemon, FIRST)
        await cleared(daemon)
        await daemon.parts.health.look_again()
        await eventually(lambda: daemon.parts.flusher.uploaded_objects == 1)
        assert (short_dir / "backend" / "a").read_bytes() == b"dirty"
