"""HyperCache's connector side by side with LMCache's own adapters: lookup, store, load, and both at once.

Rules:
1. What is done alone comes from LMCache's own runner, by `lmcache bench l2 … --no-skip-verify`. It never does
   two things at once: those figures come from traffic on the same adapters. fio answers for itself.
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
from typing import Protocol

from bench_host import BenchRun, Host
from peers import Peer, Room, Spec
from storages import Storage
from traffic import SHARES, Traffic

from hypercache_compat.lmcache_bench import BenchSize
from hypercache_protocol.fields import KIB, MIB

GIB = 1024 * MIB


class TurnFailed(Exception):
    """A step gave no figures; the message says why."""


Values = dict[str, list[float]]
"""What was measured, by measure."""


class Step(Protocol):
    """Something that a peer does."""

    def stored_bytes(self) -> int:
        """The bytes of all that it stores."""

    def figures(self, peer: Peer, spec: Spec, host: Host) -> Values:
        """Have the peer do it.

        Raises:
            TurnFailed: it went wrong.
        """


@dataclass(frozen=True)
class BenchStep:
    """One run of LMCache's benchmark, and which of its operations give which measure."""

    size: BenchSize
    measures: Mapping[str, str]

    def stored_bytes(self) -> int:
        size = self.size
        return size.kib_per_key * 1024 * size.keys * size.in_flight * (size.rounds + size.warmup_rounds)

    def figures(self, peer: Peer, spec: Spec, host: Host) -> Values:
        run = host.run(spec, self.size, verify=peer.moves_bytes and self.size.only is None)
        problem = problem_of(run, self.size, peer)
        if problem is not None:
            raise TurnFailed(f"{problem}\n{run.output[-1500:]}")
        return {name: values(run, operation, self.size) for operation, name in self.measures.items()}


@dataclass(frozen=True)
class TrafficStep:
    """Loads and stores, alone and together."""

    traffic: Traffic
    words: str

    def stored_bytes(self) -> int:
        return self.traffic.stored_bytes

    def figures(self, peer: Peer, spec: Spec, host: Host) -> Values:
        del peer  # all that take part move bytes, and these are compared
        rates = host.traffic(spec, self.traffic)
        if isinstance(rates, str):
            raise TurnFailed(rates)
        shares = {f"{name}, of alone": rates[name] / rates[alone] for name, alone in SHARES.items()}
        return {f"{name}, {self.words}": [value] for name, value in {**rates, **shares}.items()}


@dataclass(frozen=True)
class Workload:
    """Steps that a peer goes through on one storage. The first one stores; the others may find it."""

    name: str
    object_bytes: int
    steps: tuple[Step, ...]
    takes: Callable[[Peer], bool] = lambda _: True
    """Who can do it."""

    def size_bytes(self) -> int:
        """Storage that suffices for every peer, with its own records and a pool that is not full."""
        payload = self.steps[0].stored_bytes()
        slot_headers = payload * 4096 // self.object_bytes
        return int((payload + slot_headers) * 1.15) + 128 * MIB


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
        BenchStep(hits, {"Lookup": f"lookup, {words}, hits"}),
        BenchStep(misses, {"Lookup": f"lookup, {words}, misses"}),
    )
    steps = (BenchStep(stored, {}), *looks * repeats)
    return Workload(f"lookup of {words}", 4 * KIB, steps, takes=lambda peer: peer.looks_up)


def _objects(object_bytes: int, keys: int, rounds: int) -> Workload:
    size = BenchSize(keys, object_bytes // KIB, rounds, warmup_rounds=1, hit_rate=1.0)
    words = _words(object_bytes)
    measures = {"Store": f"store, {words}", "Load": f"load, {words}"}
    return Workload(f"{keys} objects of {words}", object_bytes, (BenchStep(size, measures),))


def _traffic(object_bytes: int, keys: int) -> Workload:
    """Batches of so many keys, two of them under way in each direction."""
    batches = GIB // (object_bytes * keys)
    traffic = Traffic(object_bytes, keys, 2, loaded=4 * keys, store_batches=batches, window_s=1.0)
    words = _words(object_bytes)
    step = TrafficStep(traffic, words)
    return Workload(f"traffic of {words}", object_bytes, (step,), takes=lambda peer: peer.moves_bytes)


def _words(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // KIB} KiB"


IN_MEMORY = (
    _lookups(in_flight=1, rounds=60, repeats=2),
    _lookups(in_flight=64, rounds=3, repeats=2),
    _objects(256 * KIB, keys=256, rounds=3),
    _objects(4 * MIB, keys=64, rounds=3),
    _objects(14 * MIB, keys=16, rounds=3),
    _traffic(14 * MIB, keys=4),
)
ON_DISK = (_objects(4 * MIB, keys=8, rounds=6), _objects(14 * MIB, keys=4, rounds=6))
"""Lookups move nothing, so the disk would not tell. It is slow, so the batches are small; and what one takes
varies by two, so there are more of them."""


def turns(storages: Sequence[Storage], peers: Sequence[Peer], number: int, word: str) -> Iterator[Turn]:
    """The turns of round `number`, those of one workload one after the other."""
    start = number % len(peers)
    for storage in storages:
        for workload in IN_MEMORY if storage.in_memory else ON_DISK:
            if word in workload.name:
                for peer in [*peers[start:], *peers[:start]]:
                    if workload.takes(peer) and (peer.moves_bytes or storage.in_memory):
                        yield Turn(storage, workload, peer)


def take(turn: Turn, host: Host, result: Result) -> None:
    """Have the peer do the workload, and note the figures or what went wrong."""
    room = Room(turn.storage, turn.workload.size_bytes(), turn.workload.object_bytes)
    with turn.peer.ready(room) as spec:
        for step in turn.workload.steps:
            try:
                figures = step.figures(turn.peer, spec, host)
            except TurnFailed as error:
                result.failures.append(f"{turn}: {error}")
                return
            for measure, values in figures.items():
                result.add(turn, measure, values)


def problem_of(run: BenchRun, size: BenchSize, peer: Peer) -> str | None:
    """Why the run gives no figures, or None where it does."""
    if run.exit_status != 0:
        return f"the benchmark ended with {run.exit_status}"
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
        show(f"importing LMCache, in a process for each of {len(peers)} peers")
        hosts = {peer: stack.enter_context(peer.host(Path(folder, "log"))) for peer in peers}
        for number in range(rounds):
            for turn in turns(storages, peers, number, word):
                show(f"round {number + 1} of {rounds}, {turn}")
                take(turn, hosts[turn.peer], result)
    return result
