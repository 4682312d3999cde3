"""What `status()` says, on the metrics page of the process: LMCache's own, where LMCache runs the connector.

Rules:
1. prometheus_client is used where it is installed, as it is with LMCache; without it there is no page.
2. Connectors of one namespace are added up: Prometheus knows no two samples with the same labels.
3. A forked child begins anew: its parent's connectors are not there, and their locks may be held for ever.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

OPERATIONS = ("lookups", "loads", "stores", "deletes")
"""The groups of counters that count keys by what became of them."""

_FAMILIES = {
    "keys": ("counter", "Keys by what became of them.", ("operation", "outcome")),
    "events": ("counter", "What else is counted; in the group bytes these are bytes.", ("group", "name")),
    "now": ("gauge", "As things are now; 1 is yes.", ("group", "name")),
}
"""Name -> its kind, its help, its labels beside the namespace."""

Figure = tuple[str, tuple[str, str], int]
"""Name of the family, values of its labels, value."""


class Source(Protocol):
    """Whose figures are shown."""

    @property
    def namespace(self) -> str: ...

    def status(self) -> dict[str, Any]: ...


def figures(status: Mapping[str, Any]) -> Iterator[Figure]:
    """Every number and every yes or no in a status; its words and lists are for people."""
    for group, value in status.items():
        family = "keys" if group in OPERATIONS else "now" if group in ("daemon", "waiting") else "events"
        if isinstance(value, int):
            yield "now", (group, ""), value
        elif isinstance(value, Mapping):
            yield from ((family, (group, name), one) for name, one in value.items() if isinstance(one, int))


class Page:
    """Collects the figures of all that are shown."""

    def __init__(self) -> None:
        self._is_registered = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()
        self._lock = threading.Lock()

    def show(self, source: Source) -> None:
        """Have the figures of `source` on the page, until it is hidden or gone."""
        with self._lock:
            self._sources.add(source)
            self._is_registered = self._is_registered or _registered(self)

    def hide(self, source: Source) -> None:
        """Take them off the page; a second time does nothing."""
        with self._lock:
            self._sources.discard(source)

    def describe(self) -> Iterable[Metric]:
        """Nothing: without this the page would be collected to find out what is on it."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every family, as things are now."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        totals = self._totals()
        for name, (kind, text, labels) in _FAMILIES.items():
            family = kinds[kind](f"hypercache_connector_{name}", text, labels=("namespace", *labels))
            for values, total in totals[name].items():
                family.add_metric(values, total)
            yield family

    def _totals(self) -> dict[str, Counter[tuple[str, ...]]]:
        totals: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in _FAMILIES}
        with self._lock:
            sources = list(self._sources)
        for source in sources:
            for name, (group, what), value in figures(source.status()):
                totals[name][source.namespace, group, what] += value
        return totals


def _registered(page: Page) -> bool:
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return False
    REGISTRY.register(page)
    return True


PAGE = Page()
"""This process's."""
