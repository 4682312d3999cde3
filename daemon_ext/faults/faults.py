"""The faults, one function each: inject it once while clients work, and check what they were told.

Each is the real thing: signals, file systems that are full or frozen, a folder that is gone, a byte that
changed on a device.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from forked_daemons import BlockingClient, ForkedDaemon, checked_status
from killed_daemon import KillAt
from random_clients import read_verified
from scene import Scene

from hypercache_compat import disks
from hypercache_compat.disks import filled, gone
from hypercache_compat.waiting import wait_until

STATE_DISK_BYTES = 32 << 20  # SQLite's log may have 16 MiB
BACKEND_DISK_BYTES = 64 << 20
MAY_MOUNT = not disks.lacks_to_mount()


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Args:
        prepared: makes what `inject` needs before the first daemon starts, and takes it away at the end.
        needs: what this machine lacks, "" where it can be injected.
        is_slow: takes seconds, so that only `make faults` injects it.
    """

    title: str
    inject: Callable[[Scene], None]
    prepared: Callable[[Scene], AbstractContextManager[object]] = nullcontext
    needs: str = ""
    is_slow: bool = False


# -- the process ---------------------------------------------------------------------------------------


def kill_at_random(scene: Scene) -> None:
    daemon = scene.start()
    with scene.clients_at_work(daemon):
        scene.pause()
        daemon.kill()
    scene.check_after_restart()


CATALOG_STEPS = (
    KillAt(0, event="c_call", calls=("execute",), caller="__exit__"),  # before a commit of SQLite's
    KillAt(0, event="c_return", calls=("execute",), caller="__exit__"),  # after it, before anybody knows
    KillAt(0, event="c_return", calls=("executemany",), caller="_apply"),  # amid a transaction
)


def kill_at_catalog_step(scene: Scene) -> None:
    step = scene.chance.choice(CATALOG_STEPS)
    after = scene.chance.randrange(10, 100)
    daemon = scene.start(KillAt(after, step.thread, step.event, step.calls, step.caller))
    with scene.clients_at_work(daemon):
        wait_until(daemon.ended, "the daemon came to that step")
    assert daemon.wait() == -signal.SIGKILL
    scene.check_after_restart()


def stop_and_go_on(scene: Scene) -> None:
    daemon = scene.start()
    with scene.clients_at_work(daemon):
        scene.pause()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            scene.random_time()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        scene.pause()
    scene.check(daemon)


# -- the catalog's disk --------------------------------------------------------------------------------


@contextmanager
def small_state_disk(scene: Scene) -> Iterator[None]:
    if not MAY_MOUNT:
        yield
        return
    with disks.in_memory(scene.state, STATE_DISK_BYTES):
        try:
            yield
        finally:
            scene.close()


@contextmanager
def full(scene: Scene, daemon: ForkedDaemon) -> Iterator[None]:
    """Nothing more can be written where the catalog lies; without a disk of its own, by this process."""
    if MAY_MOUNT:
        with filled(scene.state / "ballast"):
            yield
        return
    before = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, before)


def fill_catalog_disk(scene: Scene) -> None:
    daemon = scene.start()
    with scene.clients_at_work(daemon):
        scene.pause()
        refused = scene.refused
        with full(scene, daemon):
            wait_until(lambda: scene.refused > refused, "a request was refused")
            scene.random_time()
        scene.pause()
        daemon.kill()
    scene.check_after_restart()


# -- the backend ---------------------------------------------------------------------------------------


@contextmanager
def backend_disk(scene: Scene) -> Iterator[None]:
    with disks.on_a_file(scene.backend, scene.folder / "image", BACKEND_DISK_BYTES):
        try:
            yield
        finally:
            scene.close()


def hang_backend(scene: Scene) -> None:
    daemon = scene.start()
    with scene.clients_at_work(daemon):
        scene.pause()
        with disks.frozen(scene.backend):
            scene.pause()  # nobody waits for the backend
    scene.check_backend(daemon)
    scene.check(daemon)


def fail_backend(scene: Scene) -> None:
    daemon = scene.start()
    with daemon.connect() as client, scene.clients_at_work(daemon):
        scene.pause()
        failed = failed_uploads(client)
        with gone(scene.backend):
            wait_until(lambda: failed_uploads(client) > failed, "an upload failed")
            scene.pause()
    scene.check_backend(daemon)
    scene.check(daemon)


# -- the devices ---------------------------------------------------------------------------------------


def flip_a_byte(scene: Scene) -> None:
    daemon = scene.start()
    with scene.clients_at_work(daemon):
        scene.pause()
    ledger = scene.chance.choice([ledger for ledger in scene.ledgers if ledger.objects])
    uri = scene.chance.choice(sorted(ledger.objects))
    with daemon.connect() as client:
        chunk = scene.chance.choice(client.ask("locate", uri=uri)["chunk_layout"])
        position = chunk["offset"] + scene.chance.randrange(chunk["length"])
        with Path(chunk["device"]).open("r+b", buffering=0) as device:
            device.seek(position)
            byte = device.read(1)[0]
            device.seek(position)
            device.write(bytes([byte ^ 1 << scene.chance.randrange(8)]))
        ledger.uncertain[uri] = [None]  # never the bytes that it had: one of them is another now
        ledger.judge(uri, read_verified(client, uri))
        client.ask("evict", uri=uri)
    scene.check(daemon)


def lose_device(scene: Scene) -> None:
    daemon = scene.start()
    # The backend is gone as well, so that much is in none yet.
    with daemon.connect() as client, scene.misses_allowed(), gone(scene.backend):
        with scene.clients_at_work(daemon):
            scene.pause()
        device = Path(scene.chance.choice(checked_status(client)["devices"]))
        some = scene.ledgers[::2]  # what the others stored waits for the device
        with gone(device), scene.clients_at_work(daemon, some):
            wait_until(lambda: "FAILED" in uses(client), "the daemon noticed that the device is gone")
            scene.pause()
        os.kill(daemon.pid, signal.SIGHUP)
        wait_until(lambda: "FAILED" not in uses(client), "the device was put back")
    scene.check(daemon)
    scene.check_backend(daemon)


def failed_uploads(client: BlockingClient) -> int:
    return int(checked_status(client)["backend"]["failed_uploads"])


def uses(client: BlockingClient) -> list[str]:
    """What each device is good for."""
    return [device["use"] for device in checked_status(client)["device_health"]]


FAULTS = (
    Fault("SIGKILL at a random moment", kill_at_random),
    Fault("SIGKILL at a step of the catalog", kill_at_catalog_step),
    Fault("SIGSTOP, then SIGCONT", stop_and_go_on),
    Fault("the catalog's disk is full", fill_catalog_disk, small_state_disk),
    Fault("the backend hangs", hang_backend, backend_disk, disks.lacks_to_freeze()),
    Fault("the backend fails", fail_backend),
    Fault("a byte on a device flips", flip_a_byte),
    Fault("a device vanishes and comes back", lose_device, is_slow=True),
)
