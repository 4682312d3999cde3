"""A block trace through the daemon's own cache: its objects, blocks and pool, and what it tells a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from block_traces import Trace

from hypercache_daemon.core.allocator import Allocator
from hypercache_daemon.core.cache import Cache
from hypercache_daemon.core.eviction import EvictionPolicy
from hypercache_daemon.core.objects import StageOptions, Times
from hypercache_daemon.core.pool import Pool
from hypercache_protocol.fields import Tier
from hypercache_protocol.states import StateEvent

BLOCK_BYTES = 4096
_OPTIONS = StageOptions(auto_flush=False, write_through=False, pinned=False)
_NOW = 0.0
_ALL = 1 << 40


def lookups_through_a_cache(
    policy: EvictionPolicy, trace: Trace, capacity: int
) -> Iterator[tuple[Sequence[str], list[bool]]]:
    """Each batch and which of its blocks it finds in a pool of so many blocks, without a quarantine; what is
    missing is stored afterwards, as far as it fits."""
    pool = Pool(Tier.NVME, Allocator({0: capacity * BLOCK_BYTES}, 0), policy, quarantine_share=0)
    cache = Cache({Tier.NVME: pool}, last_number=1, times=Times(quarantine_s=0))
    for batch in trace:
        yield batch, [stored is not None for stored in cache.locate(batch)]
        missing = [block for block in dict.fromkeys(batch) if cache.get(block) is None][:capacity]
        _make_room(cache, pool, len(missing) * BLOCK_BYTES)
        _store(cache, missing)


def _make_room(cache: Cache, pool: Pool, wanted_bytes: int) -> None:
    victims = cache.victims(pool, pool.missing_bytes(wanted_bytes), lambda _: True, most=_ALL)
    cache.apply_removes([stored.uri for stored in victims], _NOW)
    cache.release_due(_NOW, most=_ALL)


def _store(cache: Cache, blocks: Sequence[str]) -> None:
    sizes = [BLOCK_BYTES] * len(blocks)
    staged = cache.stage_all(blocks, sizes, Tier.NVME, 1, _OPTIONS, _NOW)
    assert staged is not None, "room was made for it"
    planned = [(each, cache.plan_commit(each, StateEvent.COMMIT_LOCAL_ONLY)) for each in staged]
    cache.apply_commits(planned, _NOW)
