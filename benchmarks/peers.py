"""Who is compared: each peer as LMCache's JSON describes it, ready on storage of its own.

Every peer runs with the defaults of LMCache or of HyperCache, but for O_DIRECT, which all use where the
storage takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from storages import Storage

from hypercache_compat.daemon_process import DaemonOptions, running_daemon
from hypercache_compat.lmcache_versions import connector_spec, files_spec, raw_block_spec

KIB = 1024
MIB = 1024 * KIB

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
    """

    name: str
    ready: Callable[[Room], AbstractContextManager[Spec]]
    moves_bytes: bool = True


@contextmanager
def _floor(_: Room) -> Iterator[Spec]:
    yield {
        "type": "native_plugin",
        "module_path": "instant_connector",
        "class_name": "InstantConnector",
        "adapter_params": {},
    }


def _hypercache(device_count: int) -> Callable[[Room], AbstractContextManager[Spec]]:
    @contextmanager
    def ready(room: Room) -> Iterator[Spec]:
        with room.storage.devices(device_count, room.size_bytes) as devices:
            options = DaemonOptions(devices=devices, ram_size="0", extra=("--log-level", "warning"))
            with running_daemon(options) as daemon:
                spec = connector_spec(daemon.socket_path, "benchmark/revision-1/bf16")
                direct_io = "on" if room.storage.direct else "off"
                params = {**_params(spec), "direct_io": direct_io}
                yield {**spec, "adapter_params": params}

    return ready


def _params(spec: Spec) -> Mapping[str, object]:
    params = spec["adapter_params"]
    assert isinstance(params, Mapping)
    return params


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


FLOOR = Peer("floor", _floor, moves_bytes=False)
HYPERCACHE = Peer("HyperCache", _hypercache(4))
HYPERCACHE_ONE_DEVICE = Peer("HyperCache, 1 device", _hypercache(1))
OTHERS = (
    Peer("raw_block posix", _raw_block("posix")),
    Peer("raw_block io_uring", _raw_block("io_uring")),
    Peer("fs_native", _folder_of_files("fs_native")),
    Peer("fs", _folder_of_files("fs")),
)
EVERYBODY = (FLOOR, HYPERCACHE, HYPERCACHE_ONE_DEVICE, *OTHERS)
