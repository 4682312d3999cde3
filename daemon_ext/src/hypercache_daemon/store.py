"""The cache together with what makes its decisions real: catalog, devices, RAM files, locks, clock."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from hypercache_protocol.checksum import crc32
from hypercache_protocol.fields import Tier
from hypercache_protocol.messages import ChunkLocation

from . import devices
from .access import DeviceError
from .catalog import Catalog
from .catalog_rows import AddHold, Change, DropHold
from .core.cache import Cache
from .core.extents import PACKED_BYTES, Extent
from .core.objects import Hold, StagedWrite, Times
from .direct_reads import read_direct
from .locks import UriLocks

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_RELEASED_TOGETHER = 64  # of each pool: about a millisecond of the event loop
_HASHING = 4  # threads: more would only take turns at the same disks and CPUs


@dataclass
class Store:
    """Shared by every part of the daemon that works on objects."""

    cache: Cache
    catalog: Catalog
    device_paths: dict[int, str]
    ram_files: devices.RamFiles | None
    times: Times
    descriptors: dict[int, int]
    """Of the devices that were claimed at the start."""
    clock: Callable[[], float] = trio.current_time
    locks: UriLocks = field(default_factory=UriLocks)
    hashing: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(_HASHING))
    suspect: Callable[[int, Exception], None] = lambda _device, _error: None
    """Told in a worker thread that the daemon's own I/O on a device failed, and how."""
    look: Callable[[int], None] = lambda _device: None
    """Raises OSError or DeviceError where a device is not in order, or another is in its place. Blocks."""

    def path(self, tier: Tier, device: int) -> str:
        """The file or device that a client opens for a chunk there."""
        if tier is Tier.NVME:
            return self.device_paths[device]
        assert self.ram_files is not None, "RAM chunks exist only with a RAM tier"
        return self.ram_files.path(device)

    def _own_path(self, tier: Tier, extent: Extent) -> str:
        """Where the daemon itself reads and writes a chunk: on the device that it claimed, wherever its path
        leads by now. Opened anew each time, since only some reads pass by the page cache."""
        descriptor = self.descriptors.get(extent.device) if tier is Tier.NVME else None
        return self.path(tier, extent.device) if descriptor is None else f"/proc/self/fd/{descriptor}"

    def layout(
        self, tier: Tier, extents: Sequence[Extent], checksums: Sequence[int] | None = None
    ) -> tuple[ChunkLocation, ...]:
        """The chunks as the wire shows them."""
        words = checksums if checksums is not None else [None] * len(extents)
        return tuple(
            ChunkLocation.trusted(
                device=self.path(tier, extent.device),
                offset=extent.offset,
                length=extent.length,
                tier=tier,
                checksum=checksum,
            )
            for extent, checksum in zip(extents, words, strict=True)
        )

    async def make_durable(self, changes: Sequence[Change]) -> None:
        """Write to the catalog; not cancelled half-way, so what follows it always happens.

        Raises:
            CatalogError: nothing was written.
        """
        with trio.CancelScope(shield=True):
            await self.catalog.write(changes)

    def release_due(self) -> bool:
        """Free some of the blocks whose quarantine is over; whether there may be more of them."""
        released = self.cache.release_due(self.clock(), _RELEASED_TOGETHER)
        if not released:
            return False
        self.catalog.post([DropHold(hold.hold_id) for hold in released])
        for hold in released:
            self.remove_ram_files(hold.tier, hold.extents)
        return True

    async def release_all_due(self) -> None:
        """Free all of them, while clients have their turns."""
        while self.release_due():
            await trio.lowlevel.checkpoint()

    def create_ram_files(self, tier: Tier, extents: Sequence[Extent]) -> None:
        """Make the files of new RAM chunks, ours and empty, so that no client has to. OSError: none is
        left."""
        if tier is not Tier.RAM or self.ram_files is None:
            return
        try:
            for extent in extents:
                self.ram_files.create(extent.device)
        except OSError:
            self.remove_ram_files(tier, extents)
            raise

    def remove_ram_files(self, tier: Tier, extents: Sequence[Extent]) -> None:
        """Remove the files of RAM chunks; a file that cannot be removed is logged and swept at the next
        start."""
        if tier is not Tier.RAM or self.ram_files is None:
            return
        try:
            self.ram_files.remove([extent.device for extent in extents])
        except OSError as error:
            log.warning("RAM files could not be removed: %s", error)

    # -- the bytes themselves: what blocks here belongs in a worker thread -----------------------------

    def pieces(self, tier: Tier, extents: Sequence[Extent]) -> Iterator[bytes]:
        """The bytes of an object, chunk by chunk. Blocks."""
        for extent in extents:
            with self._watched(tier, extent):
                piece = devices.read_chunk(self._own_path(tier, extent), extent.offset, extent.length)
            yield piece

    def write(self, tier: Tier, extent: Extent, data: bytes) -> None:
        """Fill a chunk. Blocks. OSError where it cannot be written."""
        with self._watched(tier, extent):
            devices.write_chunk(self._own_path(tier, extent), extent.offset, data)

    def crc32_of(self, tier: Tier, extent: Extent, crc: int = 0) -> int:
        """The CRC-32 of a chunk or of a piece of one, gone on with from `crc`. Blocks. OSError or
        DeviceError where it cannot be read."""
        with self._watched(tier, extent):
            data = read_direct(self._own_path(tier, extent), extent.offset, extent.length)
        return crc32(data, crc)

    def vouch(self, tier: Tier, extents: Sequence[Extent]) -> None:
        """Make sure that the paths of these chunks' devices still lead to the pool's own, before anything
        lasting is made of what was read or written: clients go by path, and since the last look another disk
        may be there. Blocks. OSError or DeviceError where one is not."""
        if tier is Tier.NVME:
            for extent in {extent.device: extent for extent in extents}.values():
                with self._watched(tier, extent):
                    self.look(extent.device)

    @contextmanager
    def _watched(self, tier: Tier, extent: Extent) -> Iterator[None]:
        """Have a device looked at where the body's I/O on it fails."""
        try:
            yield
        except (OSError, DeviceError) as error:
            if tier is Tier.NVME:
                self.suspect(extent.device, error)
            raise

    async def sha256_of(self, staged: StagedWrite) -> str:
        """The SHA-256 of what a staged write holds, in lower-case hex. OSError or DeviceError where it
        cannot be read."""

        def digest() -> str:
            hasher = hashlib.sha256()
            for piece in self.pieces(staged.tier, staged.extents):
                hasher.update(piece)
            return hasher.hexdigest()

        return await self._read_back(digest)

    async def wrong_chunks(self, staged: StagedWrite, checksums: Sequence[int]) -> list[int]:
        """The numbers of the chunks of a staged write that don't have these CRC-32s, one given for each.
        OSError or DeviceError where one cannot be read."""

        def compared() -> list[int]:
            chunks = enumerate(zip(staged.extents, checksums, strict=True))
            return [n for n, (extent, crc) in chunks if self.crc32_of(staged.tier, extent) != crc]

        return await self._read_back(compared)

    async def _read_back(self, read: Callable[[], _T]) -> _T:
        """What `read` returns, in a worker thread. If cancelled, which is when the daemon ends, it is left
        alone: a device that doesn't answer must not keep the daemon."""
        return await trio.to_thread.run_sync(read, limiter=self.hashing, abandon_on_cancel=True)


def hold_change(hold: Hold) -> AddHold:
    """The catalog's record of a hold."""
    return AddHold(hold.hold_id, hold.tier, hold.packed_extents, not hold.shortenable)


def writer_hold(staged: StagedWrite) -> AddHold:
    """The catalog's record of a new staged write's blocks: were the daemon to die, the writer may still be
    writing to them."""
    return AddHold(staged.stage_id, staged.tier, staged.packed_extents, True)


def appended_hold(staged: StagedWrite, first: int) -> AddHold:
    """The same for its blocks from number `first` on, which were appended: another part, even to what was
    empty."""
    appended = staged.packed_extents[PACKED_BYTES * first :]
    return AddHold(staged.stage_id, staged.tier, appended, True, part=first + 1)
