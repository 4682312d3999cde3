"""Loads alone, stores alone and both together, each kept busy all the time, on any of LMCache's adapters.

Runs in the process that has LMCache in it (lmcache_host.py). LMCache's own benchmark runs one operation after
the other, so this one speaks to the adapters itself, in the same way.

Rules:
1. Each direction always has the same number of batches under way: when one ends the next is submitted.
2. A rate counts the batches that ended in the window, over the time until the last of them did.
3. Stores take fresh keys, loads go round those that were stored before anything is timed; what was loaded
   last is compared with what was stored.
"""

from __future__ import annotations

import argparse
import itertools
import math
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.cli.commands.bench.l2_adapter_bench.data import (
    create_l1_memory_desc,
    make_aligned_tensor,
    make_memory_objects,
    make_object_keys,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.platform import consume_fd
from traffic import LOAD_ALONE, LOAD_BESIDE, STORE_ALONE, STORE_BESIDE, Rates, Traffic

WAIT_S = 60.0
"""After so long without any completion an adapter is taken for stuck."""

Batch = tuple[list[Any], list[Any]]
"""Keys, and the memory of each."""


class TrafficFailed(RuntimeError):
    """An adapter failed a key, gave back a wrong byte, or got stuck."""


@dataclass
class Stream:
    """One direction: what it submits, and when its batches ended.

    Args:
        submit: begins a batch and gives the id of its task.
        finished: takes the ids under way; gives those that ended, and whether all of their keys succeeded.
        batches: what is submitted; where it ends the stream runs dry.
    """

    name: str
    event_fd: int
    submit: Callable[[list[Any], list[Any]], int]
    finished: Callable[[Sequence[int]], Mapping[int, bool]]
    batches: Iterator[Batch]
    under_way: set[int] = field(default_factory=set)
    began_s: float = 0.0
    ended_s: list[float] = field(default_factory=list)

    def begin(self) -> bool:
        """Submit the next batch; False where there is none."""
        batch = next(self.batches, None)
        if batch is not None:
            self.under_way.add(self.submit(*batch))
        return batch is not None

    def take(self, now_s: float) -> int:
        """Note what ended. Returns how many batches did.

        Raises:
            TrafficFailed: a key of them failed.
        """
        done = self.finished(sorted(self.under_way))
        if not all(done.values()):
            raise TrafficFailed(f"a {self.name} failed")
        self.under_way -= set(done)
        self.ended_s += [now_s] * len(done)
        return len(done)

    def rate(self, batch_bytes: int) -> float:
        """GB/s."""
        if not self.ended_s:
            raise TrafficFailed(f"no {self.name} ended in the window: give it more time")
        return len(self.ended_s) * batch_bytes / (self.ended_s[-1] - self.began_s) / 1e9


def run_streams(streams: Sequence[Stream], in_flight: int, window_s: float) -> None:
    """Keep all busy until the window ends or one runs dry; then wait for what is under way."""
    began_s = time.perf_counter()
    for stream in streams:
        stream.began_s = began_s
    busy = all(stream.begin() for stream in streams for _ in range(in_flight))
    while busy:
        for stream in _ready(streams):
            for _ in range(stream.take(time.perf_counter())):
                busy = stream.begin() and busy
        unsaid = not all(stream.ended_s for stream in streams)  # a slow one has time for one batch at least
        busy = busy and (unsaid or time.perf_counter() < began_s + window_s)
    counted = [len(stream.ended_s) for stream in streams]
    while left := [stream for stream in streams if stream.under_way]:
        for stream in _ready(left):
            stream.take(time.perf_counter())
    for stream, count in zip(streams, counted, strict=True):
        del stream.ended_s[count:]


def _ready(streams: Sequence[Stream]) -> list[Stream]:
    poller = select.poll()
    for stream in streams:
        poller.register(stream.event_fd, select.POLLIN)
    ready = {fd for fd, _ in poller.poll(WAIT_S * 1000)}
    if not ready:
        raise TrafficFailed(f"nothing ended in {WAIT_S:g} s")
    for fd in ready:
        consume_fd(fd)
    return [stream for stream in streams if stream.event_fd in ready]


class TrafficBench:
    """One adapter under traffic."""

    def __init__(self, adapter: Any, buffer: Any, traffic: Traffic) -> None:
        self._adapter = adapter
        self._traffic = traffic
        size = traffic.object_bytes
        self._sources = make_memory_objects(buffer, traffic.loaded, size, 0)
        self._targets = make_memory_objects(
            buffer, traffic.loaded, size, traffic.loaded * size, fill_offset=128
        )
        self._fresh = itertools.count(traffic.loaded, traffic.keys)

    def rates(self) -> Rates:
        """Everything in turn: fill, loads alone, stores alone, both."""
        traffic = self._traffic
        fill = self._stores(range(0, traffic.loaded, traffic.keys))
        run_streams([fill], traffic.in_flight, math.inf)
        load_alone, store_alone = self._loads(), self._stores(self._fresh_places())
        self._run([load_alone])
        self._run([store_alone])
        load, store = self._loads(), self._stores(self._fresh_places())
        self._run([load, store])
        self._verify()
        named = {LOAD_ALONE: load_alone, STORE_ALONE: store_alone, LOAD_BESIDE: load, STORE_BESIDE: store}
        return {name: stream.rate(traffic.batch_bytes) for name, stream in named.items()}

    def _run(self, streams: Sequence[Stream]) -> None:
        run_streams(streams, self._traffic.in_flight, self._traffic.window_s)

    def _fresh_places(self) -> Iterator[int]:
        return itertools.islice(self._fresh, self._traffic.store_batches)

    def _batches(self, places: Iterator[int] | range, memory: Sequence[Any]) -> Iterator[Batch]:
        """A batch of keys from each place on, with memory that goes round."""
        keys = self._traffic.keys
        for place in places:
            start = place % self._traffic.loaded
            yield make_object_keys(keys, key_offset=place), list(memory[start : start + keys])

    def _loads(self) -> Stream:
        adapter = self._adapter
        places = itertools.cycle(range(0, self._traffic.loaded, self._traffic.keys))

        def finished(ids: Sequence[int]) -> dict[int, bool]:
            results = {each: adapter.query_load_result(each) for each in ids}
            wanted = self._traffic.keys
            return {
                each: result.popcount() == wanted for each, result in results.items() if result is not None
            }

        return Stream(
            "load",
            adapter.get_load_event_fd(),
            adapter.submit_load_task,
            finished,
            self._batches(places, self._targets),
        )

    def _stores(self, places: Iterator[int] | range) -> Stream:
        adapter = self._adapter

        def finished(_: Sequence[int]) -> dict[int, bool]:
            done = adapter.pop_completed_store_tasks()
            return {each: result.is_successful() for each, result in done.items()}

        return Stream(
            "store",
            adapter.get_store_event_fd(),
            adapter.submit_store_task,
            finished,
            self._batches(places, self._sources),
        )

    def _verify(self) -> None:
        for number, (source, target) in enumerate(zip(self._sources, self._targets, strict=True)):
            if not bool((source.raw_data == target.raw_data).all()):
                raise TrafficFailed(f"object {number} was loaded wrong")


def rates(spec: str, traffic: Traffic) -> Rates:
    """Those of the adapter that the JSON `spec` describes, which is created and closed here.

    Raises:
        TrafficFailed: it failed a key, gave back a wrong byte, or got stuck.
    """
    config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec])).adapters[0]
    buffer = make_aligned_tensor(2 * traffic.loaded * traffic.object_bytes, 4096)
    adapter = create_l2_adapter(config, l1_memory_desc=create_l1_memory_desc(buffer, align_bytes=4096))
    try:
        return TrafficBench(adapter, buffer, traffic).rates()
    finally:
        adapter.close()
