"""What the connector's threads bring: each number of them in turn, in one process, on one daemon.

    python benchmarks/connector_threads.py [--rounds N]

In each round each value of a parameter has its turn, with eight batches handed over at once, as LMCache does
for eight requests; all else has its default. Figures are medians of times, by that of the default: below
1 is faster. Lookups are of a connector that looks for seals, since others take no thread for them.
"""

from __future__ import annotations

import argparse
import itertools
import select
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from peers import DEVICES, Room, hypercache
from report import row
from storages import in_memory

from hypercache_connector import HyperCacheConnector
from hypercache_connector.config import Config
from hypercache_protocol.fields import KIB, MIB

BATCHES = 8
WARM_UP = 2
WAIT_S = 60.0


@dataclass(frozen=True)
class Shape:
    """What a batch has."""

    name: str
    keys: int
    object_bytes: int


LARGE = Shape("4 of 14 MiB", 4, 14 * MIB)
SMALL = Shape("16 of 256 KiB", 16, 256 * KIB)
TINY = Shape("64 keys", 64, 4 * KIB)

Keys = list[str]


class Batches:
    """Eight batches of one shape, each with memory of its own. Each way gives the seconds that it took.

    Args:
        connector: stores the batches that stay, and deletes all.
    """

    def __init__(self, shape: Shape, connector: HyperCacheConnector) -> None:
        self._shape = shape
        self._connector = connector
        size = BATCHES * shape.keys * shape.object_bytes
        memory = np.empty(size + 4096, np.uint8)
        memory = memory[-memory.ctypes.data % 4096 :][:size]
        memory[:] = np.resize(np.arange(251, dtype=np.uint8), size)
        views = [memoryview(each) for each in memory.reshape(-1, shape.object_bytes)]
        self._views = [views[start : start + shape.keys] for start in range(0, len(views), shape.keys)]
        self._names = itertools.count()
        self._stored = self._fresh()
        self._store(connector, self._stored)

    def load(self, connector: HyperCacheConnector) -> float:
        """Load all that stay."""
        return _timed(connector, connector.submit_batch_get, zip(self._stored, self._views, strict=True))

    def look_up(self, connector: HyperCacheConnector) -> float:
        """Look up all that stay."""
        return _timed(connector, connector.submit_batch_exists, zip(self._stored))

    def store(self, connector: HyperCacheConnector) -> float:
        """Store others, which are deleted afterwards."""
        fresh = self._fresh()
        try:
            return self._store(connector, fresh)
        finally:
            self._delete(fresh)

    def close(self) -> None:
        """Delete those that stay."""
        self._delete(self._stored)

    def _fresh(self) -> list[Keys]:
        return [[f"{self._shape.name}/{next(self._names)}" for _ in views] for views in self._views]

    def _store(self, connector: HyperCacheConnector, batches: Sequence[Keys]) -> float:
        return _timed(connector, connector.submit_batch_set, zip(batches, self._views, strict=True))

    def _delete(self, batches: Sequence[Keys]) -> None:
        _timed(self._connector, self._connector.submit_batch_delete, zip(batches))


def _timed(connector: HyperCacheConnector, submit: Callable[..., int], batches: Iterator[Any]) -> float:
    poller = select.poll()
    poller.register(connector.event_fd(), select.POLLIN)
    began = time.perf_counter()
    under_way = {submit(*batch) for batch in batches}
    while under_way:
        if not poller.poll(WAIT_S * 1000):
            raise SystemExit(f"nothing ended in {WAIT_S:g} s")
        for done in connector.drain_completions():
            if not done.ok or not all(done.result_bools or [True]):
                raise SystemExit(f"a batch failed: {done.error}")
            under_way.remove(done.future_id)
    return time.perf_counter() - began


@dataclass(frozen=True)
class Parameter:
    """Which values are tried, in which way, and with which batches.

    Args:
        seals: whether seals are looked for, without which lookups take no thread.
    """

    values: tuple[int, ...]
    way: Callable[[Batches, HyperCacheConnector], float]
    shapes: tuple[Shape, ...] = (LARGE, SMALL)
    seals: bool = False


PARAMETERS = {
    "load_threads": Parameter((1, 2, 4, 8, 16), Batches.load),
    "store_threads": Parameter((1, 2, 4, 8, 16), Batches.store),
    "lookup_threads": Parameter((1, 2, 4, 8), Batches.look_up, (TINY,), seals=True),
    "read_workers": Parameter((4, 8, 16, 32), Batches.load),
    "write_workers": Parameter((4, 8, 16, 32), Batches.store),
}


@contextmanager
def _connectors(params: Mapping[str, Any], name: str) -> Iterator[dict[int, HyperCacheConnector]]:
    """One for each value of the parameter."""
    parameter = PARAMETERS[name]
    with ExitStack() as stack:
        made = {}
        for value in parameter.values:
            made[value] = HyperCacheConnector(
                **{**params, "seal_for_old_daemons": parameter.seals, name: value}
            )
            stack.callback(made[value].close)
        yield made


def _measured(params: Mapping[str, Any], name: str, shape: Shape, rounds: int) -> dict[int, float]:
    """The median of the seconds that each value took."""
    with (
        _connectors(params, name) as connectors,
        closing(Batches(shape, connectors[_default(name)])) as batches,
    ):
        times: dict[int, list[float]] = {value: [] for value in connectors}
        for number in range(WARM_UP + rounds):
            for value in sorted(connectors, reverse=bool(number % 2)):
                times[value].append(PARAMETERS[name].way(batches, connectors[value]))
    return {value: statistics.median(each[WARM_UP:]) for value, each in times.items()}


def _default(name: str) -> int:
    return int(Config.model_fields[name].default)


def _rows(params: Mapping[str, Any], rounds: int) -> Iterator[str]:
    yield row(["parameter", "a batch", "default", "takes ms", "by it"])
    yield row(["---", "---", "---:", "---:", "---"])
    for name, parameter in PARAMETERS.items():
        for shape in parameter.shapes:
            medians = _measured(params, name, shape, rounds)
            own = medians[_default(name)]
            by = ", ".join(f"{value}: {median / own:.2f}" for value, median in medians.items())
            yield row([f"`{name}`", shape.name, f"{_default(name)}", f"{own * 1e3:.1f}", by])


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each value (default: %(default)s)")
    rounds = parser.parse_args().rounds
    room = Room(in_memory(), 4 * BATCHES * LARGE.keys * LARGE.object_bytes, LARGE.object_bytes)
    with hypercache(DEVICES)(room) as spec:
        params = spec["adapter_params"]
        assert isinstance(params, Mapping)
        for line in _rows(params, rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
