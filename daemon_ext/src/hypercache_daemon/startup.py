"""Opening what a daemon needs, in an order in which nothing is lost: devices, catalog, RAM files, cache.

All of it is synchronous. Clients that connect meanwhile wait for their first reply.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hypercache_protocol.fields import Tier
from hypercache_protocol.states import DIRTY, EVICTABLE, SyncStatus
from hypercache_protocol.versions import WIRE_2_2

from . import devices, outages, presence_table
from .access import Access, DeviceError
from .catalog import Catalog, CatalogError
from .catalog_rows import AddHold, Change, Delete, DropHold
from .config import Config
from .core.allocator import Allocator
from .core.cache import Cache
from .core.capacities import Capacities, Capacity
from .core.eviction import EvictionPolicy, Lru
from .core.eviction_return_rate import ReturnRate
from .core.extents import end_on
from .core.objects import Hold, StoredObject, Times
from .core.pool import Pool
from .core.presence import PresenceWords
from .core.ram import RamAllocator
from .core.records import Columns, in_tier, of_tier, unverifiable
from .device_probe import Member, member_at
from .drain_file import DRAIN_FILE_NAME, devices_to_drain
from .presence_table import SharedTable

log = logging.getLogger(__name__)

CATALOG_NAME = "catalog.sqlite"
_SHM = Path("/dev/shm")
_NUMBERS_PER_START = 1 << 40
_BYTES_FOR_EACH_OBJECT = 1 << 20  # of KV caches most are larger; the table is larger for many small ones
_POLICIES: dict[str, type[EvictionPolicy]] = {"return-rate": ReturnRate, "lru": Lru}


@dataclass
class Opened:
    """Everything that was opened, ready to be served."""

    pool: devices.Pool
    catalog: Catalog
    ram_files: devices.RamFiles | None
    cache: Cache
    blocks: Allocator
    """Of the devices."""
    members: tuple[Member | None, ...]
    """The devices as they were found, in the pool's order; None where one is missing."""
    presence: SharedTable | None
    """What clients read instead of asking, where there is one."""

    def close(self) -> None:
        """Give the devices and the RAM tier back. The catalog closes itself."""
        if self.presence is not None:
            self.presence.close()
        if self.ram_files is not None:
            self.ram_files.close()
        self.pool.close()


def open_all(config: Config, access: Access, now: float) -> Opened:
    """Open devices, catalog and RAM tier and load the catalog.

    Raises:
        DeviceError, CatalogError: one of them is refused; the sentence names it and the way out.
    """
    with ExitStack() as held:
        pool = _open_pool(config, access)
        held.callback(pool.close)
        catalog = Catalog.open(_catalog_path(config), pool.pool_id)
        held.callback(catalog.close)
        ram_files = _open_ram(config, access, pool.pool_id)
        if ram_files is not None:
            held.callback(ram_files.close)
        opened = _load(config, pool, catalog, ram_files, now, held)
        held.pop_all()
        return opened


def _catalog_path(config: Config) -> Path:
    return config.catalog_dir / CATALOG_NAME


def _open_pool(config: Config, access: Access) -> devices.Pool:
    def prepare(pool_id: str) -> None:
        Catalog.create(_catalog_path(config), pool_id, replace=config.format)

    if config.pool_dir is not None:
        return devices.open_pool_dir(
            config.pool_dir,
            config.pool_size,
            config.devices,
            format=config.format,
            access=access,
            prepare=prepare,
        )
    paths = [str(Path(path).absolute()) for path in config.device]
    drained = devices_to_drain(config.catalog_dir / DRAIN_FILE_NAME, paths) or ()
    return devices.open_devices(
        paths, format=config.format, access=access, prepare=prepare, dispensable=drained
    )


def _load(
    config: Config,
    pool: devices.Pool,
    catalog: Catalog,
    ram_files: devices.RamFiles | None,
    now: float,
    held: ExitStack,
) -> Opened:
    records = catalog.records()
    holds = catalog.holds()
    with catalog.checked():
        went_down = outages.went_down(catalog.remembered)
        in_ram = of_tier(records, Tier.RAM)
        lost = _taken_out(records, in_ram if went_down else _lost_objects(ram_files, in_ram))
        # Whose blocks they are by now an older catalog cannot know.
        given_up = _taken_out(records, unverifiable(records) if config.forget_unverifiable else [])
        doubtful = _taken_out(records, _doubtful(records) if went_down else [])
        blocks = Allocator(_sizes(pool, records, holds), devices.RESERVED_BYTES)
        first_number = _first_number(catalog.epoch)
        pools = _pools(config, blocks, first_number, ram_files)
        cache = Cache(pools, first_number, _times(config), _capacities(config))
        presence = _published(config, cache, len(records))
        if presence is not None:
            held.callback(presence.close)
        _fill(cache, catalog, records, [hold for hold in holds if hold.tier is Tier.NVME], now, config)
    # Only from here on is anything changed: the catalog was not torn, and fits the devices.
    if ram_files is not None:
        ram_files.sweep(_serials(stored for stored in in_ram if stored.uri in records))
    # Files that no object owns are gone now, and their names never come again: nothing to hold back.
    _begin(catalog, [*lost, *given_up, *doubtful], [hold for hold in holds if hold.tier is Tier.RAM])
    _log_what_is_here(len(records), lost)
    if went_down:
        sentence = "the machine went down under the daemon before: gave up %d objects without checksums, "
        log.warning(sentence + "whose bytes may not have reached the devices", len(doubtful))
    if config.forget_unverifiable:
        sentence = "--forget-unverifiable: gave up %d objects without checksums, %d of them in no backend yet"
        log.warning(sentence, len(given_up), _count_dirty(given_up))
    members = tuple(None if device.missing else member_at(device.path) for device in pool.devices)
    return Opened(pool, catalog, ram_files, cache, blocks, members, presence)


def _doubtful(records: dict[str, bytes]) -> Sequence[StoredObject]:
    """What has no checksums, and can be done without: of what is dirty this may be the only copy."""
    return [stored for stored in unverifiable(records) if stored.state not in DIRTY]


def _taken_out(records: dict[str, bytes], objects: Sequence[StoredObject]) -> Sequence[StoredObject]:
    """The objects, whose records are gone."""
    for stored in objects:
        del records[stored.uri]
    return objects


def _log_what_is_here(loaded: int, lost: Sequence[StoredObject]) -> None:
    log.info("loaded %d objects; %d are lost with their RAM files", loaded, len(lost))
    if dirty := _count_dirty(lost):
        log.warning("%d of the lost objects were in no backend yet", dirty)


def _published(config: Config, cache: Cache, loaded: int) -> SharedTable | None:
    """The table in which the cache is to keep what is here, with room for `loaded` objects and more."""
    if config.wire_version < WIRE_2_2:
        return None
    in_pools = sum(pool.blocks.total_bytes for pool in cache.pools.values()) // _BYTES_FOR_EACH_OBJECT
    expected = min(max(2 * loaded, in_pools), config.max_objects)
    table = presence_table.made(presence_table.geometry_for(expected, config.presence_table_size))
    if table is not None:
        cache.publish(PresenceWords(table.view))
    return table


def _sizes(pool: devices.Pool, records: dict[str, bytes], holds: Sequence[AddHold]) -> dict[int, int]:
    """Each device's size in bytes, or what is known of it where it is missing."""
    return {
        device.index: _end_of_chunks(records, holds, device.index) if device.missing else device.size_bytes
        for device in pool.devices
    }


def _end_of_chunks(records: dict[str, bytes], holds: Sequence[AddHold], index: int) -> int:
    """How much of a device that is missing, in bytes, has an owner; how large it is nobody knows."""
    columns = Columns(records.values())
    chunks = columns.chunks(in_tier(columns.heads, Tier.NVME))
    held = [extent for hold in holds if hold.tier is Tier.NVME for extent in hold.extents]
    of_holds = [extent.offset + extent.allocated_bytes for extent in held if extent.device == index]
    return max(end_on(chunks, index), *of_holds, 0)


def _times(config: Config) -> Times:
    return Times(config.quarantine_s, config.stage_expiry_s)


def _first_number(epoch: int) -> int:
    """Where generations, stage ids and the names of RAM files begin: above those of all starts before. Where
    in the epoch is left to chance, for after a format or with an older catalog it may not be the first start
    of that number: who still has a stage id or a layout of the other one must not get what is another's."""
    return epoch * _NUMBERS_PER_START + secrets.randbelow(_NUMBERS_PER_START // 2)


def _pools(
    config: Config, blocks: Allocator, first_number: int, ram_files: devices.RamFiles | None
) -> dict[Tier, Pool]:
    share = config.quarantine_share if config.quarantine_s > 0 else 0.0
    policy = _POLICIES[config.eviction]
    pools = {Tier.NVME: Pool(Tier.NVME, blocks, policy(), share, _evictable(config))}
    if ram_files is not None:
        ram = RamAllocator(_ram_budget(config, ram_files), first_number)
        pools[Tier.RAM] = Pool(Tier.RAM, ram, policy(), share, _evictable(config))
    return pools


def _evictable(config: Config) -> Set[SyncStatus]:
    return EVICTABLE | {SyncStatus.COMMITTED} if config.evict_unflushed else EVICTABLE


def _capacities(config: Config) -> Capacities:
    policy = _POLICIES[config.eviction]
    evictable = _evictable(config)
    limits = config.capacities.items()
    return Capacities(Capacity(prefix, limit, policy(), evictable) for prefix, limit in limits)


def _fill(
    cache: Cache,
    catalog: Catalog,
    records: dict[str, bytes],
    holds: Iterable[AddHold],
    now: float,
    config: Config,
) -> None:
    try:
        cache.load(records)
        for hold in holds:
            cache.load_hold(_restarted(hold, now, config))
    except ValueError as error:
        raise CatalogError(
            f"the catalog {catalog.path} does not fit the devices: {error}; restore the catalog that belongs "
            "to them, or start with --format to give up every object of this pool"
        ) from error


def _restarted(hold: AddHold, now: float, config: Config) -> Hold:
    """A hold as it goes on after a restart. Its time starts anew: clocks don't survive, and a writer that
    knows nothing of the restart may go on as long as a staged write lives."""
    rest_s = config.stage_expiry_s if hold.writer else config.quarantine_s
    return Hold(hold.hold_id, hold.tier, hold.packed_extents, now + rest_s, shortenable=not hold.writer)


# -- the RAM tier --------------------------------------------------------------------------------------


def _open_ram(config: Config, access: Access, pool_id: str) -> devices.RamFiles | None:
    if config.ram_size == 0:
        return None
    return devices.RamFiles(config.ram_dir or _SHM / f"hypercache-{pool_id[:12]}", access)


def _ram_budget(config: Config, ram_files: devices.RamFiles) -> int:
    """The budget; a default that the machine has no room for shrinks, a wish that it has not is refused."""
    room_bytes = ram_files.room_bytes()
    if config.ram_size <= room_bytes:
        return int(config.ram_size)
    if config.ram_size_was_given:
        raise DeviceError(
            f"--ram-size {config.ram_size.human_readable()}: {ram_files.folder} has room for "
            f"{room_bytes} bytes; ask for less, or give another --ram-dir"
        )
    budget_bytes = room_bytes // 2
    log.warning("the RAM tier has %d bytes: %s has no more to give", budget_bytes, ram_files.folder)
    return budget_bytes


def _lost_objects(
    ram_files: devices.RamFiles | None, in_ram: Sequence[StoredObject]
) -> Sequence[StoredObject]:
    """The RAM objects whose files are gone: all of them after a reboot, or without a RAM tier."""
    if ram_files is None:
        return in_ram
    gone = ram_files.lost({extent.device: extent.length for stored in in_ram for extent in stored.extents})
    return [stored for stored in in_ram if any(extent.device in gone for extent in stored.extents)]


def _count_dirty(objects: Iterable[StoredObject]) -> int:
    return sum(stored.state in DIRTY for stored in objects)


def _serials(in_ram: Iterable[StoredObject]) -> Set[int]:
    return {extent.device for stored in in_ram for extent in stored.extents}


def _begin(catalog: Catalog, lost: Iterable[StoredObject], ram_holds: Iterable[AddHold]) -> None:
    changes: list[Change] = [Delete(stored.generation) for stored in lost]
    changes += [DropHold(hold.hold_id) for hold in ram_holds]
    catalog.post([*changes, outages.begun()])
