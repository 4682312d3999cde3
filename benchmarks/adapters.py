"""HyperCache's connector side by side with LMCache's own adapters: lookup, store and load.

Rules:
1. Every figure comes from LMCache's own runner, by `lmcache bench l2 … --no-skip-verify`.
2. In each round every peer has its turn at a workload before the next workload comes, and the order changes
   from round to round. So what else the machine does meets all alike.
3. Each turn has fresh storage and fresh objects, and warm-up rounds that don't count.
4. A turn in which a key failed or a byte was wrong gives no figure; it is shown, and the run fails.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench_host import BenchHost, BenchRun
from peers import MIB, Peer, Room
from storages import Storage

from hypercache_compat.lmcache_bench import BenchSize


@dataclass(frozen=True)
class Step:
    """One run of LMCache's benchmark, and which of its operations give which measure."""

    size: BenchSize
    measures: Mapping[str, str]


@dataclass(frozen=True)
class Workload:
    """Steps that a peer goes through on one storage. The first one stores; the others may find it."""

    name: str
    steps: tuple[Step, ...]

    def size_bytes(self) -> int:
        """Storage that suffices for every peer, with its own records and a pool that is not full."""
        size = self.steps[0].size
        payload = size.keys * size.in_flight * (size.rounds + size.warmup_rounds) * self.object_bytes()
        slot_headers = payload * 4096 // self.object_bytes()
        return int((payload + slot_headers) * 1.15) + 128 * MIB

    def object_bytes(self) -> int:
        """The size of the objects."""
        return self.steps[0].size.kib_per_key * 1024


@dataclass(frozen=True)
class Turn:
    """One peer, one workload, one storage, once."""

    storage: Storage
    workload: Workload
    peer: Peer

    def __str__(self) -> str:
        return f"{self.storage.name}, {self.workload.name}: {self.peer.name}"


Figures = dict[str, dict[str, dict[str, list[float]]]]
"""By storage, measure and peer. Lookups in microseconds a key, store and load in GB/s."""


@dataclass
class Result:
    """Everything that was measured, and what went wrong."""

    figures: Figures = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, turn: Turn, measure: str, values: Sequence[float]) -> None:
        """More figures of one peer."""
        by_measure = self.figures.setdefault(turn.storage.name, {})
        by_measure.setdefault(measure, {}).setdefault(turn.peer.name, []).extend(values)


def _lookups(in_flight: int, rounds: int, repeats: int) -> Workload:
    """Objects are stored once and looked up in several runs, so that few need to be stored."""
    stored = BenchSize(64, 4, rounds, warmup_rounds=1, in_flight=in_flight, hit_rate=1.0)
    hits = replace(stored, only="lookup")
    misses = replace(hits, hit_rate=0.0)
    words = f"64 keys, {in_flight} in flight"
    looks = (
        Step(hits, {"Lookup": f"lookup, {words}, hits"}),
        Step(misses, {"Lookup": f"lookup, {words}, misses"}),
    )
    return Workload(f"lookup of {words}", (Step(stored, {}), *looks * repeats))


def _objects(mib: int, keys: int, rounds: int) -> Workload:
    size = BenchSize(keys, mib * 1024, rounds, warmup_rounds=1, hit_rate=1.0)
    measures = {"Store": f"store, {mib} MiB", "Load": f"load, {mib} MiB"}
    return Workload(f"{keys} objects of {mib} MiB", (Step(size, measures),))


IN_MEMORY = (
    _lookups(in_flight=1, rounds=20, repeats=2),
    _lookups(in_flight=64, rounds=1, repeats=3),
    _objects(4, keys=64, rounds=3),
    _objects(14, keys=16, rounds=3),
)
ON_DISK = (_objects(4, keys=8, rounds=6), _objects(14, keys=4, rounds=6))
"""Lookups move nothing, so the disk would not tell. It is slow, so the batches are small; and what one takes
varies by two, so there are more of them."""


def turns(storages: Sequence[Storage], peers: Sequence[Peer], number: int, word: str) -> Iterator[Turn]:
    """The turns of round `number`, those of one workload one after the other."""
    start = number % len(peers)
    for storage in storages:
        for workload in IN_MEMORY if storage.in_memory else ON_DISK:
            if word in workload.name:
                for peer in [*peers[start:], *peers[:start]]:
                    if peer.moves_bytes or storage.in_memory:
                        yield Turn(storage, workload, peer)


def take(turn: Turn, host: BenchHost, result: Result) -> None:
    """Have the peer do the workload, and note the figures or what went wrong."""
    room = Room(turn.storage, turn.workload.size_bytes(), turn.workload.object_bytes())
    with turn.peer.ready(room) as spec:
        for step in turn.workload.steps:
            run = host.run(spec, step.size, verify=turn.peer.moves_bytes and step.size.only is None)
            problem = problem_of(run, step.size, turn.peer)
            if problem is not None:
                result.failures.append(f"{turn}: {problem}\n{run.output[-1500:]}")
                return
            for operation, measure in step.measures.items():
                result.add(turn, measure, values(run, operation, step.size))


def problem_of(run: BenchRun, size: BenchSize, peer: Peer) -> str | None:
    """Why the run gives no figures, or None where it does."""
    if run.exit_status != 0:
        return f"lmcache bench l2 ended with {run.exit_status}"
    keys = size.keys * size.in_flight
    for operation, rounds in run.rounds.items():
        if len(rounds.seconds) != size.rounds + size.warmup_rounds:
            return f"{operation} timed out"
        want = keys * size.hit_rate if operation == "Lookup" else keys
        if peer.moves_bytes and any(count != want for count in rounds.succeeded):
            return f"{operation} succeeded for {min(rounds.succeeded)} of {want:g} keys"
    return None


def values(run: BenchRun, operation: str, size: BenchSize) -> list[float]:
    """The measured rounds, in the measure's unit."""
    seconds = run.rounds[operation].seconds[size.warmup_rounds :]
    keys = size.keys * size.in_flight
    if operation == "Lookup":
        return [each / keys * 1e6 for each in seconds]
    return [keys * size.kib_per_key * 1024 / each / 1e9 for each in seconds]


def measure(
    storages: Sequence[Storage],
    peers: Sequence[Peer],
    rounds: int,
    word: str = "",
    show: Callable[[str], None] = lambda _: None,
) -> Result:
    """All turns of all rounds.

    Args:
        word: leaves out the workloads whose name lacks it.
        show: is told what comes next.
    """
    result = Result()
    with tempfile.TemporaryDirectory(prefix="hc") as folder, ExitStack() as stack:
        show(f"importing LMCache in {len(peers)} processes, one for each peer")
        hosts = {peer: stack.enter_context(BenchHost(Path(folder, "log"))) for peer in peers}
        for number in range(rounds):
            for turn in turns(storages, peers, number, word):
                show(f"round {number + 1} of {rounds}, {turn}")
                take(turn, hosts[turn.peer], result)
    return result
