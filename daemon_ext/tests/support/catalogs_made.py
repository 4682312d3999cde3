"""Catalogs on real files, and what a start finds in them."""

from __future__ import annotations

import resource
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import trio

from hypercache_daemon.catalog import Catalog
from hypercache_daemon.catalog_rows import AddHold, Put
from hypercache_daemon.core.extents import Extent, packed
from hypercache_daemon.core.objects import StoredObject
from hypercache_daemon.core.records import stored_of
from hypercache_protocol.fields import Tier
from hypercache_protocol.states import SyncStatus

POOL = "p" * 32


@contextmanager
def opened(path: Path, pool_id: str) -> Iterator[Catalog]:
    """A catalog that may be written."""
    with closing(Catalog.open(path, pool_id)) as catalog:
        with catalog.checked():
            pass
        yield catalog


@contextmanager
def made(pool_id: str = POOL) -> Iterator[Path]:
    """The path of a new, empty catalog."""
    folder = Path(tempfile.mkdtemp(prefix="hc", dir="/dev/shm"))  # where a sync costs nothing
    try:
        Catalog.create(folder / "c.sqlite", pool_id, replace=False)
        yield folder / "c.sqlite"
    finally:
        shutil.rmtree(folder)


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[Catalog]:
    with opened(path, POOL) as catalog:
        async with trio.open_nursery() as nursery:
            await nursery.start(catalog.run)
            yield catalog
            nursery.cancel_scope.cancel()


def read(path: Path, pool_id: str = POOL) -> tuple[list[StoredObject], list[AddHold]]:
    """What a new start finds: objects in the order of their commits, holds in that of their ids."""
    with closing(Catalog.open(path, pool_id)) as catalog:
        found = [stored_of(uri, record) for uri, record in catalog.records().items()]
        holds = catalog.holds()
        with catalog.checked():
            objects = sorted(found, key=lambda stored: stored.generation)
    return objects, sorted(holds, key=lambda hold: (hold.hold_id, hold.part))


def an_object(uri: str = "u", generation: int = 1, **fields: object) -> StoredObject:
    values: dict[str, object] = {
        "tier": Tier.NVME,
        "size_bytes": 5,
        "packed_extents": packed([Extent(0, 4096, 5)]),
        "packed_checksums": None,
        "state": SyncStatus.LOCAL_ONLY,
    }
    return StoredObject(uri=uri, generation=generation, **{**values, **fields})


def many(count: int) -> list[StoredObject]:
    return [
        an_object(f"hypercache://object/{i:04}", i + 1, packed_extents=packed([Extent(i % 4, 4096 * i, 5)]))
        for i in range(count)
    ]


def filled(path: Path, objects: Sequence[StoredObject]) -> None:
    async def write() -> None:
        async with running(path) as catalog:
            await catalog.write([Put(stored) for stored in objects])

    trio.run(write)


@contextmanager
def no_file_may_grow() -> Iterator[None]:
    """As on a full file system: every write beyond the first 16 KiB of a file fails in the kernel."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def crash_image(path: Path) -> Path:
    """The files as a crash at this instant would leave them."""
    folder = path.parent / "image"
    folder.mkdir()
    for name in (path.name, f"{path.name}-wal"):
        shutil.copy(path.with_name(name), folder / name)
    return folder / path.name
