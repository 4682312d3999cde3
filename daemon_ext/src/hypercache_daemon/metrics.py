"""What `get_status` reports, as Prometheus wants it: one table says which figure has which name.

Rules:
1. A metric takes its value from the report, so that the two can't differ; what the report has and the table
   has not is named in NOT_SHOWN, which a test sees to.
2. Names and units are Prometheus's: bytes and seconds, `_total` for what only grows.
3. A key that differs from daemon to daemon (a tier, a prefix, a device) is a label. So is a word: its sample
   is 1, and the label says which word it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Path = tuple[str, ...]
"""The keys that lead to a figure in the report. An entry of a list is known by its `path`."""


class Kind(Enum):
    """How a figure behaves; a word is text, and no figure."""

    COUNTER = "counter"
    GAUGE = "gauge"
    WORD = "word"


@dataclass(frozen=True)
class Row:
    """One metric.

    Args:
        path: the keys of the report down to it, with "/" between them; `{label}` stands for any key, or for
            any part of one, and names the label that says which.
        scale: what the figure is multiplied by.
    """

    path: str
    name: str
    kind: Kind
    help: str
    scale: float = 1

    @cached_property
    def keys(self) -> tuple[re.Pattern[str], ...]:
        """What each key on the way must be."""
        return tuple(
            re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.*)", re.escape(key)), re.DOTALL)
            for key in self.path.split("/")
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """Their names."""
        found = re.findall(r"\{(\w+)\}", self.path)
        return (*found, self.path.rpartition("/")[2]) if self.kind is Kind.WORD else tuple(found)

    def labels_at(self, path: Path, value: object) -> tuple[str, ...] | None:
        """The labels' values for what lies at `path`; None where it is no figure of this row."""
        if len(path) != len(self.keys):
            return None
        found: list[str] = []
        for pattern, key in zip(self.keys, path, strict=True):
            match = pattern.fullmatch(key)
            if match is None:
                return None
            found += match.groups()
        return (*found, str(value)) if self.kind is Kind.WORD else tuple(found)

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        """The metric without a sample."""
        family = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        return family(f"hypercache_{self.name}", self.help, labels=self.labels)


_C, _G, _W = Kind.COUNTER, Kind.GAUGE, Kind.WORD

TABLE = (
    Row("daemon", "daemon_info", _W, "Name and version of the daemon."),
    Row("instance_id", "instance_info", _W, "Differs at every start of the daemon."),
    Row("wire", "wire_info", _W, "The newest wire version that it speaks."),
    Row("uptime_s", "uptime_seconds", _G, "Time since the daemon was ready."),
    Row("objects", "objects", _G, "Committed objects that can be found."),
    Row("max_objects", "objects_limit", _G, "Objects and staged writes that may be kept at once."),
    Row("objects_by_state/{state}", "state_objects", _G, "Objects, and staged writes, in each state."),
    Row("pools/{tier}/total_bytes", "pool_size_bytes", _G, "All of a pool."),
    Row("pools/{tier}/free_bytes", "pool_free_bytes", _G, "What can be had at once."),
    Row("pools/{tier}/used_bytes", "pool_used_bytes", _G, "What committed objects take."),
    Row("pools/{tier}/staged_bytes", "pool_staged_bytes", _G, "What staged writes take."),
    Row("pools/{tier}/quarantined_bytes", "pool_quarantined_bytes", _G, "Blocks that rest before reuse."),
    Row("pools/{tier}/withheld_bytes", "pool_withheld_bytes", _G, "Objects that wait for a failed device."),
    Row("pools/{tier}/pinned_bytes", "pool_pinned_bytes", _G, "What pinned objects take."),
    Row("pools/{tier}/dirty_bytes", "pool_dirty_bytes", _G, "What no backend has yet."),
    Row("capacities/{prefix}/limit_bytes", "capacity_limit_bytes", _G, "What may lie under a prefix."),
    Row("capacities/{prefix}/objects", "capacity_objects", _G, "Objects under a prefix."),
    Row("capacities/{prefix}/used_bytes", "capacity_used_bytes", _G, "What objects under it take."),
    Row("capacities/{prefix}/staged_bytes", "capacity_staged_bytes", _G, "What staged writes under it take."),
    Row("capacities/{prefix}/withheld_bytes", "capacity_withheld_bytes", _G, "What waits for a device."),
    Row("capacities/{prefix}/pinned_bytes", "capacity_pinned_bytes", _G, "What is pinned under it."),
    Row("capacities/{prefix}/dirty_bytes", "capacity_dirty_bytes", _G, "What no backend has yet under it."),
    Row("device_health/{device}/use", "device_use", _W, "IN_USE, DRAINING, DRAINED or FAILED."),
    Row("device_health/{device}/allocated_bytes", "device_allocated_bytes", _G, "Blocks that are not free."),
    Row("connections/open", "connections", _G, "Clients that are connected."),
    Row("connections/accepted", "connections_accepted", _C, "Clients that were let in."),
    Row("connections/refused", "connections_refused", _C, "Turned away at --max-connections."),
    Row("connections/forbidden", "connections_forbidden", _C, "Turned away by --allow."),
    Row("connections/idle_closed", "connections_idle_closed", _C, "Closed after --idle-timeout-s."),
    Row("connections/failed_accepts", "connections_failed_accepts", _C, "Tries without a file descriptor."),
    Row(
        "connections/unknown_fields", "connections_unknown_fields", _C, "Fields that are not known, ignored."
    ),
    Row("requests/{action}.{status}", "requests", _C, "Requests by what was asked and answered."),
    Row("evicted/objects", "evicted_objects", _C, "Objects that left to make room."),
    Row("evicted/bytes", "evicted_bytes", _C, "What these took."),
    Row("backend/waiting", "backend_waiting_objects", _G, "Uploads that have not begun."),
    Row("backend/uploaded_objects", "backend_uploaded_objects", _C, "Uploads that the backend confirmed."),
    Row("backend/uploaded_bytes", "backend_uploaded_bytes", _C, "What these held."),
    Row("backend/failed_uploads", "backend_failed_uploads", _C, "Uploads that failed; they are retried."),
    Row("backend/ingested_objects", "backend_ingested_objects", _C, "Objects fetched from a backend."),
    Row("backend/ingested_bytes", "backend_ingested_bytes", _C, "What these held."),
    Row("scrub/rounds", "scrub_rounds", _C, "Rounds through all objects that ended."),
    Row("scrub/objects", "scrub_read_objects", _C, "Objects that were read whole."),
    Row("scrub/bytes", "scrub_read_bytes", _C, "Bytes that were read."),
    Row("scrub/unreadable_objects", "scrub_unreadable_objects", _C, "Objects whose reading failed."),
    Row("scrub/corrupt_objects", "scrub_corrupt_objects", _C, "Corrupt objects that were dropped."),
    Row("scrub/corrupt_dirty_objects", "scrub_corrupt_dirty_objects", _C, "Those that no backend had."),
    Row("scrub/corrupt_pinned_objects", "scrub_corrupt_pinned_objects", _C, "Those that were pinned."),
    Row("catalog/transactions", "catalog_transactions", _C, "Transactions that were written."),
    Row("telemetry/{event}/events", "client_events", _C, "What clients reported of their own transfers."),
    Row("telemetry/{event}/object_size_bytes", "client_object_bytes", _C, "Sizes of what they moved."),
    Row("telemetry/{event}/duration_us", "client_duration_seconds", _C, "Time that it took them.", 1e-6),
    Row("telemetry/{event}/chunk_count", "client_chunks", _C, "Chunks that they moved."),
    Row("telemetry/{event}/time_saved_ms", "client_time_saved_seconds", _C, "Time saved, they say.", 1e-3),
    Row("telemetry/{event}/failures", "client_failures", _C, "Transfers that failed."),
)

NOT_SHOWN = frozenset({"device_health/path", "device_health/failure", "backend/last_error"})
"""Sentences, which no graph can show, and what is a label already."""


def leaves(report: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every figure and word of a report, and where it lies."""
    for key, value in report.items():
        path = (*above, key)
        if isinstance(value, Mapping):
            yield from leaves(value, path)
        elif isinstance(value, list):
            for entry in value:
                if isinstance(entry, Mapping):
                    yield from leaves(entry, (*path, entry["path"]))
        else:
            yield path, value


def exposition(report: Mapping[str, Any]) -> bytes:
    """The report in Prometheus's text format, version 0.0.4."""
    return generate_latest(_Report(report))


class _Report(Collector):
    def __init__(self, report: Mapping[str, Any]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        for row in TABLE:
            family = row.family()
            top = row.path.partition("/")[0]
            for path, value in leaves({top: self._report[top]} if top in self._report else {}):
                labels = row.labels_at(path, value)
                if labels is not None:
                    family.add_metric(labels, 1 if row.kind is Kind.WORD else value * row.scale)
            yield family
