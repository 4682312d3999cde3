"""What `get_status` reports: usage, states and counters, all of it measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from .device_health import DeviceHealth
from .flusher import Flusher
from .handlers import Handlers
from .ingest import Ingester
from .removal import Remover
from .scrub import Scrubber
from .server import Server
from .store import Store


def report(
    store: Store,
    handlers: Handlers,
    remover: Remover,
    flusher: Flusher,
    ingester: Ingester,
    scrubber: Scrubber,
    health: DeviceHealth,
    server: Server,
    uptime_s: Callable[[], float],
) -> dict[str, Any]:
    """One JSON object. Its keys may change from release to release; sizes are bytes."""
    cache = store.cache
    return {
        "daemon": handlers.identity.daemon,
        "instance_id": handlers.identity.instance_id,
        "wire": str(server.version),
        "uptime_s": round(uptime_s(), 3),
        "objects": len(cache),
        "max_objects": remover.max_objects,
        "objects_by_state": {state.value: count for state, count in cache.counts().items()},
        "pools": {
            tier.value: {
                **asdict(pool.usage()),
                "withheld_bytes": pool.withheld_bytes,
                "pinned_bytes": pool.pinned_bytes,
                "dirty_bytes": pool.dirty_bytes,
            }
            for tier, pool in cache.pools.items()
        },
        "capacities": {
            capacity.prefix: {
                "limit_bytes": capacity.limit_bytes,
                "objects": sum(capacity.counts.values()),
                "used_bytes": capacity.used_bytes,
                "staged_bytes": capacity.staged_bytes,
                "withheld_bytes": capacity.withheld_bytes,
                "pinned_bytes": capacity.pinned_bytes,
                "dirty_bytes": capacity.dirty_bytes,
            }
            for capacity in cache.capacities
        },
        "devices": list(store.device_paths.values()),
        "device_health": health.report(),
        "connections": {
            "open": len(server.connections),
            "accepted": server.accepted,
            "refused": server.refused,
            "forbidden": server.forbidden,
            "idle_closed": server.idle_closed,
            "failed_accepts": server.failed_accepts,
            "unknown_fields": server.unknown_fields,
        },
        "requests": dict(sorted(handlers.counters.items())),
        "evicted": {"objects": remover.evicted_objects, "bytes": remover.evicted_bytes},
        "backend": {
            "waiting": flusher.waiting,
            "uploaded_objects": flusher.uploaded_objects,
            "uploaded_bytes": flusher.uploaded_bytes,
            "failed_uploads": flusher.failed_uploads,
            "last_error": flusher.last_error,
            "ingested_objects": ingester.ingested_objects,
            "ingested_bytes": ingester.ingested_bytes,
        },
        "scrub": scrubber.report(),
        "catalog": {"transactions": store.catalog.transactions},
        "telemetry": handlers.telemetry.report(),
    }
