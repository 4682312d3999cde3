"""Whether all that was written has reached the devices when a daemon stops in order."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from daemon_harness import running

from hypercache_daemon import outages


async def test_devices_that_are_there_can_be_synced(tmp_path: Path) -> None:
    with (tmp_path / "device").open("wb") as device:
        assert await outages.reached_the_devices([device.fileno()])
    assert await outages.reached_the_devices([])


async def test_a_device_that_cannot_be_synced_is_told_with_what_follows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reading, writing = os.pipe()
    try:
        assert not await outages.reached_the_devices([writing])
    finally:
        os.close(reading)
        os.close(writing)
    assert "not synced ([Errno 22] Invalid argument): should the machine go down" in caplog.text


async def test_a_device_that_hangs_does_not_keep_the_daemon_from_its_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    back = threading.Event()
    monkeypatch.setattr(outages, "_LONGEST_SYNC_S", 0.05)
    monkeypatch.setattr(os, "fdatasync", lambda _: back.wait())
    try:
        assert not await outages.reached_the_devices([0])
    finally:
        back.set()
    assert "not synced (that takes longer than 0.05 s)" in caplog.text


@pytest.mark.parametrize("syncs", [True, False])
async def test_a_stop_is_in_order_only_where_the_devices_are_synced(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, syncs: bool
) -> None:
    def fdatasync(_: int) -> None:
        if not syncs:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with running(short_dir):
        monkeypatch.setattr(os, "fdatasync", fdatasync)
    with closing(sqlite3.connect(short_dir / "pool" / "catalog.sqlite")) as catalog:
        ((boot,),) = catalog.execute("SELECT value FROM meta WHERE name='runs in boot'")
    assert boot == ("" if syncs else Path("/proc/sys/kernel/random/boot_id").read_text().strip())
