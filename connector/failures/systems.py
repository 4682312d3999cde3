"""Who is put to the test, each on disks of its own in memory: HyperCache, LMCache's raw_block and fs_native.

Every disk is a file, or a loop device over one, in one folder; so a scenario can cut, fill, corrupt or take
away what any of them stores on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hypercache_compat import disks
from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, started_by
from hypercache_compat.lmcache_versions import connector_spec, files_spec, raw_block_spec
from hypercache_compat.loop_devices import loop_device
from hypercache_compat.payloads import MARK, MIB
from hypercache_compat.raw_wire import Message
from hypercache_compat.relay import relaying

from .jumping_clock import JumpingClock
from .meddling import Meddler

NAMESPACE = "failures"
TIMEOUT_S = 1.0
TRANSFER_TIMEOUT_S = 3.0
STAGE_EXPIRY_S = 3
RAW_BLOCK_BYTES = 160 * MIB
LARGEST_OBJECT_BYTES = 4 * MIB + 4096


@dataclass(frozen=True)
class Setup:
    """What a scenario needs.

    Args:
        daemon: further arguments of hypercached.
        connector: further parameters of HyperCache's connector.
        device_bytes: the size of each of HyperCache's two devices.
        loop: block devices instead of files (root).
        relayed: a relay between connector and daemon.
        state_bytes: a disk of this size for the catalog (root).
        store_bytes: a disk of this size for what is stored, whose files have holes (root).
        jumping: a clock of the daemon's that can be set.
    """

    daemon: tuple[str, ...] = ()
    connector: dict[str, object] = field(default_factory=dict)
    device_bytes: int = 48 * MIB
    loop: bool = False
    relayed: bool = False
    state_bytes: int = 0
    store_bytes: int = 0
    jumping: bool = False


@dataclass
class Site:
    """One system, ready.

    Args:
        spec: what LMCache's configuration says of it.
        store: the folder with all that is stored.
        disks: the files that are its disks; none where it keeps files in the folder.
    """

    spec: dict[str, object]
    store: Path
    disks: list[Path] = field(default_factory=list)
    daemon_process: DaemonProcess | None = None
    meddler: Meddler = field(default_factory=Meddler)
    clock: JumpingClock | None = None

    @property
    def daemon(self) -> DaemonProcess:
        """The daemon, in scenarios for those that have one."""
        assert self.daemon_process is not None
        return self.daemon_process

    def status(self) -> Message:
        """The daemon's get_status."""
        with self.daemon.connect() as connection:
            return connection.ask("get_status")

    def files(self) -> list[Path]:
        """All files with stored bytes."""
        return self.disks or [path for path in self.store.rglob("*") if path.is_file()]

    def payloads(self) -> list[tuple[Path, int]]:
        """Where payloads begin, of those now stored and of older ones."""
        return [(path, at) for path in self.files() for at in _marks(path)]


def _marks(path: Path) -> list[int]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:  # deleted meanwhile
        return []
    found, at = [], data.find(MARK)
    while at >= 0:
        found.append(at)
        at = data.find(MARK, at + 1)
    return found


Ready = Callable[[Path, Setup], AbstractContextManager[Site]]


@dataclass(frozen=True)
class System:
    """One of those compared. `fails_the_run`: wrong bytes are a failure and no mere figure."""

    name: str
    ready: Ready
    fails_the_run: bool = False


@contextmanager
def _hypercache(folder: Path, setup: Setup) -> Iterator[Site]:
    with ExitStack() as held:
        store, files = _store(folder, setup, 2 * [setup.device_bytes], held)
        devices = [held.enter_context(loop_device(path)) if setup.loop else str(path) for path in files]
        state = folder / "state"
        state.mkdir()
        if setup.state_bytes:
            held.enter_context(disks.in_memory(state, setup.state_bytes))
        extra = ("--stage-expiry-s", str(STAGE_EXPIRY_S), "--quarantine-s", "0.5", *setup.daemon)
        options = DaemonOptions(devices=tuple(devices), ram_size="0", extra=extra)
        daemon = DaemonProcess(folder, folder / "ram", options)
        clock = JumpingClock(folder / "clock") if setup.jumping else None
        if clock:
            held.enter_context(started_by(clock.starter()))
        held.callback(lambda: daemon.is_running() and daemon.kill())
        daemon.start()
        meddler, path = Meddler(), daemon.socket_path
        if setup.relayed:
            path = str(folder / "r")
            held.enter_context(relaying(path, daemon.socket_path, meddler.passage))
        spec = connector_spec(
            path,
            NAMESPACE,
            timeout_s=TIMEOUT_S,
            transfer_timeout_s=TRANSFER_TIMEOUT_S,
            probe_interval_s=0.2,
            close_timeout_s=5.0,
            **setup.connector,
        )
        yield Site(spec, store, files, daemon, meddler, clock)


@contextmanager
def _raw_block(folder: Path, setup: Setup) -> Iterator[Site]:
    with ExitStack() as held:
        store, (file,) = _store(folder, setup, [RAW_BLOCK_BYTES], held)
        device = held.enter_context(loop_device(file)) if setup.loop else str(file)
        yield Site(raw_block_spec(device, LARGEST_OBJECT_BYTES, direct=setup.loop), store, [file])


@contextmanager
def _fs_native(folder: Path, setup: Setup) -> Iterator[Site]:
    with ExitStack() as held:
        store, _ = _store(folder, setup, [], held)
        files = store / "files"
        files.mkdir()
        yield Site(files_spec("fs_native", files, direct=False), store)


def _store(folder: Path, setup: Setup, sizes: list[int], held: ExitStack) -> tuple[Path, list[Path]]:
    store = folder / "store"
    store.mkdir()
    if setup.store_bytes:
        held.enter_context(disks.in_memory(store, setup.store_bytes))
    files = [store / f"disk-{number}" for number in range(len(sizes))]
    for file, size_bytes in zip(files, sizes, strict=True):
        file.touch()
        os.truncate(file, size_bytes)
    return store, files


HYPERCACHE = System("HyperCache", _hypercache, fails_the_run=True)
RAW_BLOCK = System("raw_block", _raw_block)
FS_NATIVE = System("fs_native", _fs_native)
SYSTEMS = (HYPERCACHE, RAW_BLOCK, FS_NATIVE)
