"""What goes wrong while a load goes on: one function each, and the table of all.

A function makes it happen, lets the load meet it, and takes it away again. What LMCache has must heal after
that without being started anew; only the daemon may be.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from hypercache_compat import disks
from hypercache_compat.altered_replies import Fields
from hypercache_compat.loop_devices import lacks_for_loop_devices
from hypercache_compat.payloads import MIB
from hypercache_compat.raw_wire import Message
from hypercache_compat.waiting import wait_until

from . import meddling
from .load import Load, imported, new_process
from .meddling import KillAt, Rule
from .systems import (
    HYPERCACHE,
    NAMESPACE,
    RAW_BLOCK,
    STAGE_EXPIRY_S,
    SYSTEMS,
    TIMEOUT_S,
    Setup,
    Site,
    System,
)

ALONE = (HYPERCACHE,)
ON_DEVICES = (HYPERCACHE, RAW_BLOCK)
CAPACITY_BYTES = 9 * MIB
A_DAY_S = 86400.0
FEW_DESCRIPTORS = 4
"""These are always taken."""
CUT_TO = 16
"""One part in so many is left of what is truncated."""


@dataclass(frozen=True)
class Scenario:
    """One row of the table.

    Args:
        inject: makes it happen and takes it away.
        applies_to: where it can happen at all.
        needs: what this machine lacks for it, "" where nothing.
    """

    title: str
    inject: Callable[[Site, Load], None]
    setup: Setup = field(default_factory=Setup)
    applies_to: tuple[System, ...] = SYSTEMS
    needs: str = ""


def nothing(_: Site, load: Load) -> None:
    """For comparison."""
    load.proceed(100)


# -- the daemon's process ------------------------------------------------------------------------------


def kill_during(actions: tuple[str, ...], layouts: bool | None, site: Site, load: Load) -> None:
    """Twice: when the daemon is about to get such a request, and when it has answered one."""

    def is_it(request: Fields) -> bool:
        wanted = (
            layouts is None or request.get("action") == "locate" or bool(request.get("layouts")) == layouts
        )
        return request.get("action") in actions and wanted

    for at_reply in (False, True):
        kill = KillAt(is_it, site.daemon.pid)
        seen = {"reply": kill.at_reply} if at_reply else {"request": kill.at_request}
        with site.meddler.seeing(**seen):
            wait_until(kill.done.is_set, f"one of {', '.join(actions)} came by")
        site.daemon.kill()
        with load.stores_failing():
            load.proceed(20)
        site.daemon.start()
        load.wait_for_all_kinds()


def stop_for(seconds: float, site: Site, load: Load) -> None:
    os.kill(site.daemon.pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
        if seconds > TIMEOUT_S:
            with load.stores_failing():
                load.proceed()
    finally:
        os.kill(site.daemon.pid, signal.SIGCONT)


def restart(site: Site, _: Load) -> None:
    site.daemon.restart()


def stay_down(site: Site, load: Load) -> None:
    site.daemon.kill()
    with load.stores_failing():
        load.proceed(200)
    site.daemon.start()


def roll(site: Site, _: Load) -> None:
    for number in range(5):
        due = time.monotonic() + 1.0
        site.daemon.restart(crash=number % 2 == 0)
        time.sleep(max(0.0, due - time.monotonic()))


# -- the socket ----------------------------------------------------------------------------------------


def meddle(rule: Rule, site: Site, load: Load) -> None:
    with site.meddler.meddling(rule), load.stores_failing():
        load.proceed(80)


def cut_at_every_byte(site: Site, _: Load) -> None:
    meddler = site.meddler
    first = meddler.connections
    last = first + meddler.hello_bytes + 200  # the hello, and what comes after it
    with meddler.meddling(meddling.cut_at_every_byte(first)):
        wait_until(lambda: meddler.connections > last, "each byte had its connection", 60)


def delay_replies(site: Site, load: Load) -> None:
    over = threading.Event()
    try:
        meddle(meddling.delay(over, 1.5 * TIMEOUT_S), site, load)
    finally:
        over.set()


def take_every_connection(site: Site, load: Load) -> None:
    with ExitStack() as held:
        with site.meddler.meddling(meddling.hang_up):
            refused = False
            while not refused:
                taken = held.enter_context(site.daemon.connect())
                refused = taken.ask("ping")["status"] == "ERROR"
        load.proceed()


# -- devices -------------------------------------------------------------------------------------------


def truncate(site: Site, load: Load) -> None:
    cut = site.disks[:1] or site.files()
    sizes = {path: path.stat().st_size for path in cut}
    for path, size_bytes in sizes.items():
        os.truncate(path, size_bytes // CUT_TO)
    load.proceed()
    for path, size_bytes in sizes.items():
        if path.exists():
            os.truncate(path, size_bytes)
    put_back(site)


def remove(site: Site, load: Load) -> None:
    with disks.gone(site.disks[0] if site.disks else site.store / "files"):
        load.proceed()
        if site.daemon_process:
            wait_until(lambda: "FAILED" in uses(site), "the daemon noticed that the device is gone")
            load.proceed()
    put_back(site)


def unplug(site: Site, load: Load) -> None:
    """All reads of it fail (EIO). When it is back it has what it had then, not what was written since."""
    path = site.disks[0]
    data = path.read_bytes()
    os.truncate(path, 0)
    load.proceed(80)
    path.write_bytes(data)
    put_back(site)


def fail_writes(site: Site, load: Load) -> None:
    """Writes of blocks that were never written before fail (EIO on a loop device, ENOSPC in a folder)."""
    with disks.filled(site.store / "ballast"), load.stores_failing():
        load.proceed(120)
    put_back(site)


def uses(site: Site) -> list[str]:
    """What each device of the daemon's is good for."""
    return [device["use"] for device in site.status()["device_health"]]


def put_back(site: Site) -> None:
    """What an operator does who has repaired a device."""
    if not site.daemon_process:
        return
    os.kill(site.daemon.pid, signal.SIGHUP)
    wait_until(lambda: "FAILED" not in uses(site), "each device was put back")


# -- bytes ---------------------------------------------------------------------------------------------


def flip_bytes(site: Site, load: Load) -> None:
    """One byte in each object that is stored, and again."""
    chance = random.Random(1)
    for _ in range(3):
        for path, at in site.payloads():
            with changing(path) as file:
                place = at + chance.randrange(24, 4000)
                byte = os.pread(file, 1, place)
                if byte:
                    os.pwrite(file, bytes([byte[0] ^ 1 << chance.randrange(8)]), place)
        load.proceed(30)


def swap_blocks(site: Site, load: Load) -> None:
    """Objects get the first block of another one, and again."""
    for _ in range(3):
        found = site.payloads()
        for (path, at), (other, there) in zip(found[::2], found[1::2], strict=False):
            with changing(path) as file, changing(other) as source:
                block = os.pread(source, 4096, there)
                if block:
                    os.pwrite(file, block, at)
        load.proceed(30)


@contextmanager
def changing(path: os.PathLike[str]) -> Iterator[int]:
    """A descriptor of it, or of nothing where it was deleted meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        descriptor = os.open("/dev/null", os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# -- space ---------------------------------------------------------------------------------------------


def fill_pool(site: Site, load: Load) -> None:
    """Nothing more fits, and nothing may leave: a client stages all that there is."""
    if not site.daemon_process:
        with load.filling(), load.stores_failing():
            load.proceed(300)
        return
    with site.daemon.connect() as client:
        staged: list[str] = []
        reply: Message = {}
        while reply.get("status") != "ERROR":
            staged.append(f"hypercache://filler/{len(staged)}")
            reply = client.ask("stage_write", uri=staged[-1], size_bytes=MIB, tier="nvme")
        assert reply["error_code"] == "NO_SPACE", reply
        with load.stores_failing():
            load.proceed()
        for uri in staged:
            client.ask("evict", uri=uri)


def fill_catalog_disk(site: Site, load: Load) -> None:
    with disks.filled(site.daemon.state_folder / "ballast"), load.stores_failing():
        load.proceed(80)


def keep_within_capacity(site: Site, load: Load) -> None:
    for _ in range(5):
        load.proceed(40)
        (under,) = site.status()["capacities"].values()
        assert under["used_bytes"] + under["staged_bytes"] <= CAPACITY_BYTES, under


def purge(site: Site, load: Load) -> None:
    with site.daemon.connect() as client:
        for _ in range(5):
            assert client.ask("purge")["status"] != "ERROR"
            load.proceed(30)


# -- the rest ------------------------------------------------------------------------------------------


def kill_client(site: Site, load: Load) -> None:
    """LMCache's process ends while it stores; another one goes on with what it left."""
    successor = imported(new_process())
    if site.daemon_process:
        wait_until(lambda: staged_bytes(site) > 0, "something was being written")
    load.succeed_in(successor)
    if site.daemon_process:
        wait_until(lambda: staged_bytes(site) == 0, "what was staged expired", STAGE_EXPIRY_S + 5)
    load.begin()


def staged_bytes(site: Site) -> int:
    """What is staged and not committed."""
    return int(site.status()["pools"]["nvme"]["staged_bytes"])


def jump(seconds: float, site: Site, load: Load) -> None:
    assert site.clock is not None
    with site.daemon.connect() as client:
        client.ask("stage_write", uri="hypercache://old", size_bytes=MIB, tier="nvme")
        site.clock.jump_to(seconds)
        load.proceed(80)
        state = client.ask("get_write_status", uri="hypercache://old")
        assert (state.get("sync_status") == "STAGED") == (seconds < 0), f"the clock did not jump: {state}"
    site.clock.jump_to(0.0)


def exhaust_daemons_descriptors(site: Site, load: Load) -> None:
    with few_descriptors(site.daemon.pid):
        cut_connections(site, load)
        with load.stores_failing():
            load.proceed()


def exhaust_clients_descriptors(site: Site, load: Load) -> None:
    """Where connections were cut stores must fail meanwhile; raw_block needs nothing more than it has."""
    with few_descriptors(load.process.pid):
        cut_connections(site, load)
        with load.stores_failing() if site.daemon_process else nullcontext():
            load.proceed()


def cut_connections(site: Site, load: Load) -> None:
    """New ones are needed after that. Of those that have none, nothing is cut."""
    with site.meddler.meddling(meddling.hang_up):
        load.proceed(20)


@contextmanager
def few_descriptors(pid: int) -> Iterator[None]:
    """The process can open nothing more meanwhile: those that it may have are taken."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


_LOOPS = lacks_for_loop_devices()
_MOUNTS = disks.lacks_to_mount()
_RELAYED = Setup(relayed=True)


def _daemon(
    title: str, inject: Callable[[Site, Load], None], setup: Setup = _RELAYED, needs: str = ""
) -> Scenario:
    return Scenario(title, inject, setup, ALONE, needs)


SCENARIOS = (
    Scenario("nothing goes wrong", nothing),
    _daemon("SIGKILL of the daemon during loads", partial(kill_during, ("locate", "locate_many"), True)),
    _daemon("SIGKILL of the daemon during stores", partial(kill_during, ("stage_write", "stage_many"), None)),
    _daemon(
        "SIGKILL of the daemon during lookups",
        partial(kill_during, ("locate_many",), False),
        Setup(("--presence-table-size", "0"), relayed=True),  # with a table nothing is asked
    ),
    _daemon(
        "SIGKILL of the daemon during commits", partial(kill_during, ("commit_write", "commit_many"), None)
    ),
    _daemon("SIGKILL of the daemon during deletes", partial(kill_during, ("evict", "evict_many"), None)),
    _daemon("SIGSTOP for half a deadline, then SIGCONT", partial(stop_for, TIMEOUT_S / 2), Setup()),
    _daemon("SIGSTOP for three deadlines, then SIGCONT", partial(stop_for, 3 * TIMEOUT_S), Setup()),
    _daemon("restart of the daemon", restart, Setup()),
    _daemon("the daemon stays down for a while", stay_down, Setup()),
    _daemon("rolling restart every second", roll, Setup()),
    _daemon("connection reset at every byte of a reply", cut_at_every_byte),
    _daemon("half replies", partial(meddle, meddling.halve)),
    _daemon("garbage for replies", partial(meddle, meddling.garble(random.Random(1)))),
    _daemon("late replies", delay_replies),
    _daemon(
        "every connection of the daemon is taken",
        take_every_connection,
        Setup(("--max-connections", "24"), relayed=True),
    ),
    Scenario("a device is truncated", truncate),
    Scenario("a device is removed", remove),
    Scenario("a device is unplugged, and forgets", unplug, Setup(loop=True), ON_DEVICES, _LOOPS),
    Scenario(
        "a device fails to write",
        fail_writes,
        Setup(loop=True, store_bytes=200 * MIB),
        needs=_LOOPS or _MOUNTS,
    ),
    Scenario("a byte flips in each object", flip_bytes),
    Scenario("objects get blocks of others", swap_blocks),
    Scenario("the pool is full", fill_pool, Setup(store_bytes=200 * MIB), needs=_MOUNTS),
    _daemon("the catalog's disk is full", fill_catalog_disk, Setup(state_bytes=32 * MIB), _MOUNTS),
    _daemon(
        "a capacity limit below what is stored",
        keep_within_capacity,
        Setup(("--capacity", f"hypercache://lmcache/v1/{NAMESPACE}={CAPACITY_BYTES}")),
    ),
    _daemon("everything is purged, again and again", purge, Setup()),
    Scenario("LMCache's process is killed while it stores", kill_client),
    _daemon("the daemon's clock jumps a day ahead and back", partial(jump, A_DAY_S), Setup(jumping=True)),
    _daemon("the daemon's clock jumps a day back and ahead", partial(jump, -A_DAY_S), Setup(jumping=True)),
    _daemon("the daemon has no descriptors left", exhaust_daemons_descriptors),
    Scenario("LMCache's process has no descriptors left", exhaust_clients_descriptors, _RELAYED),
)
"""Where one applies to HyperCache alone, the others have nothing of that kind that could fail."""
