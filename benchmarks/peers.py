"""Who is compared: each peer as LMCache's JSON describes it, ready on storage of its own.

Every peer runs with the defaults of LMCache or of HyperCache, but for O_DIRECT, which all use where the
storage takes it. fio is no adapter of LMCache's: it shows what the devices give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from bench_host import BenchHost, Host
from fio import FioHost, is_installed
from storages import Storage

from hypercache_compat.daemon_process import DaemonOptions, running_daemon
from hypercache_compat.lmcache_versions import connector_spec, files_spec, raw_block_spec

Spec = Mapping[str, object]


@dataclass(frozen=True)
class Room:
    """What a peer gets: so much storage for objects of one size."""

    storage: Storage
    size_bytes: int
    object_bytes: int


@dataclass(frozen=True)
class Peer:
    """One of those compared.

    Args:
        moves_bytes: False for the floor, which can't give back what it never took.
        looks_up: False for fio, which has nothing to look up.
        host: starts what the figures come from; it is given a file for its log.
    """

    name: str
    ready: Callable[[Room], AbstractContextManager[Spec]]
    moves_bytes: bool = True
    looks_up: bool = True
    host: Callable[[Path], AbstractContextManager[Host]] = BenchHost


@contextmanager
def _floor(_: Room) -> Iterator[Spec]:
    yield {
        "type": "native_plugin",
        "module_path": "instant_connector",
        "class_name": "InstantConnector",
        "adapter_params": {},
    }


def hypercache(device_count: int) -> Callable[[Room], AbstractContextManager[Spec]]:
    @contextmanager
    def ready(room: Room) -> Iterator[Spec]:
        with room.storage.devices(device_count, room.size_bytes) as devices:
            options = DaemonOptions(devices=devices, ram_size="0", extra=("--log-level", "warning"))
            with running_daemon(options) as daemon:
                direct_io = "on" if room.storage.direct else "off"
                yield connector_spec(daemon.socket_path, "benchmark/revision-1/bf16", direct_io=direct_io)

    return ready


def _raw_block(engine: str) -> Callable[[Room], AbstractContextManager[Spec]]:
    @contextmanager
    def ready(room: Room) -> Iterator[Spec]:
        with room.storage.devices(1, room.size_bytes) as (device,):
            yield raw_block_spec(device, room.object_bytes, direct=room.storage.direct, engine=engine)

    return ready


def _folder_of_files(kind: str) -> Callable[[Room], AbstractContextManager[Spec]]:
    @contextmanager
    def ready(room: Room) -> Iterator[Spec]:
        with room.storage.folder(room.size_bytes) as folder:
            yield files_spec(kind, folder, direct=room.storage.direct)

    return ready


def _fio(device_count: int) -> Callable[[Room], AbstractContextManager[Spec]]:
    @contextmanager
    def ready(room: Room) -> Iterator[Spec]:
        with room.storage.devices(device_count, room.size_bytes) as devices:
            yield {"type": "fio", "devices": devices, "direct": room.storage.direct}

    return ready


def _on_devices(count: int) -> tuple[Peer, ...]:
    """HyperCache and, where it is installed, fio on so many devices."""
    name = "" if count == DEVICES else f", {count} device{'s' if count > 1 else ''}"
    ours = Peer(f"HyperCache{name}", hypercache(count))
    fio = Peer(f"fio{name}", _fio(count), looks_up=False, host=lambda _: nullcontext(FioHost()))
    return (ours, fio) if is_installed() else (ours,)


DEVICES = 4
"""That HyperCache and fio have unless it is said otherwise; all others take one."""

FLOOR = Peer("floor", _floor, moves_bytes=False)
ADAPTERS = (
    Peer("raw_block posix", _raw_block("posix")),
    Peer("raw_block io_uring", _raw_block("io_uring")),
    Peer("fs_native", _folder_of_files("fs_native")),
    Peer("fs", _folder_of_files("fs")),
)
QUICK = (FLOOR, *_on_devices(DEVICES), *ADAPTERS)
EVERYBODY = (*QUICK, *_on_devices(2), *_on_devices(1))
