"""Stores that replace the same objects, loads, lookups, deletes, evictions and restarts of the daemon, all at
once and for long; every byte of every load is checked, and nothing may grow.

    make soak MINUTES=30
    python -m failures.soak [--minutes 30] [--per-second 40] [--seed 1]

Prints figures. Exit status 1 where a load was wrong, a future late or lost, or something grew by more than
the bound that is printed beside it. Warm-up is the first fifth of the time, and of each life of the daemon.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from hypercache_compat.daemon_process import started_by
from hypercache_compat.forked import fork_daemon
from hypercache_compat.payloads import MIB
from hypercache_compat.process_figures import cpu_seconds, open_descriptors, resident_bytes
from hypercache_compat.scenario_process import ScenarioProcess
from hypercache_compat.stopping import stoppable
from hypercache_compat.waiting import wait_until

from .load import KINDS, Load, imported, new_process
from .run import FUTURE_DEADLINE_S, HEAL_DEADLINE_S, a_folder
from .systems import HYPERCACHE, Setup, Site

KEYS = 48
SETUP = Setup(connector={"overwrite": True}, device_bytes=17 * MIB)
"""The keys together have 43 MiB and the devices room for 32, so that some are always being evicted."""
PER_SECOND = 40.0
RESTARTS = 8
LONGEST_LIFE_S = 180.0
SAMPLE_EVERY_S = 0.25
MORE_DESCRIPTORS = 16
"""A connection for each thread that asks the daemon, and the devices."""
CLIENT, DAEMON = "LMCache's process", "the daemon that grew most"
MORE_MIB = {CLIENT: 48, DAEMON: 16}
BLOCKS_AT_REST_S = 20.0
PARTS = ("free", "used", "staged", "quarantined")
"""Of a pool's blocks."""


@dataclass(frozen=True)
class Footprint:
    """What a process has at one moment; `cpu_s` is all that it used so far."""

    descriptors: int
    memory_bytes: int
    cpu_s: float


def footprint(pid: int) -> Footprint:
    """Of any process of this user's."""
    return Footprint(open_descriptors(pid), resident_bytes(pid), cpu_seconds(pid))


@dataclass(frozen=True)
class Growth:
    """How a figure went on after the warm-up: medians of the first and of the last fifth."""

    what: str
    first: float
    last: float
    most: float
    bound: float

    @property
    def is_good(self) -> bool:
        """Whether it did not grow by more than the bound."""
        return self.last - self.first <= self.bound


@dataclass
class Life:
    """The samples of one process."""

    whose: str
    samples: list[Footprint] = field(default_factory=list)

    def growth(self) -> list[Growth]:
        """Of its descriptors, and of its memory in MiB."""
        warm = self.samples[len(self.samples) // 5 :]
        return [
            _growth(f"{self.whose}: descriptors", [each.descriptors for each in warm], MORE_DESCRIPTORS),
            _growth(f"{self.whose}: MiB", [each.memory_bytes / MIB for each in warm], MORE_MIB[self.whose]),
        ]


def _growth(what: str, values: Sequence[float], bound: float) -> Growth:
    fifth = max(1, len(values) // 5)
    first, last = statistics.median(values[:fifth]), statistics.median(values[-fifth:])
    return Growth(what, first, last, max(values), bound)


@dataclass
class Result:
    """All figures of a soak."""

    seconds: float = 0.0
    restarts: int = 0
    futures: int = 0
    late_or_lost: int = 0
    right: int = 0
    missed: int = 0
    wrong: int = 0
    evictions: int = 0
    cpu_share: float = 0.0
    growth: list[Growth] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing was wrong, late or lost, and nothing grew."""
        return not self.problems and all(each.is_good for each in self.growth)

    def text(self) -> str:
        """For people."""
        lines = [
            f"{self.seconds:.0f} s; the daemon: {self.restarts} restarts, {self.evictions} evictions",
            f"futures: {self.futures}, {self.late_or_lost} late or lost",
            f"loads: {self.right} right, {self.missed} missed, {self.wrong} WRONG",
            f"CPU time of LMCache's process and the daemon: {self.cpu_share:.0%} of one core",
            "",
            "| after warm-up | first fifth | last fifth | most | may grow by |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {each.what} | {each.first:.0f} | {each.last:.0f} | {each.most:.0f} | {each.bound:.0f} |"
            for each in self.growth
        ]
        return "\n".join([*lines, *(f"FAILED: {each}" for each in self.problems)])


def soak(process: ScenarioProcess, seconds: float, per_second: float, seed: int) -> Result:
    """Go on for that long, with LMCache in `process`."""
    with a_folder() as folder, HYPERCACHE.ready(folder, SETUP) as site:
        before = footprint(process.pid)
        load = Load(
            process,
            site.spec,
            keys=KEYS,
            overwrite=True,
            per_second=per_second,
            deadline_s=FUTURE_DEADLINE_S,
            seed=seed,
        )
        load.begin()
        result = Result()
        _go_on(site, load, seconds, result)
        load.end()
        result.problems += [f"{key} could not be loaded" for key in load.unsound_keys(HEAL_DEADLINE_S)]
        _count(load, result)
        _check_blocks(site, result)
        load.close()
        check_closed(before.descriptors, footprint(process.pid).descriptors, result)
        return result


def check_closed(before: int, after: int, result: Result) -> None:
    """Of the descriptors that a process had before the adapter was made and after it was closed."""
    if after > before:
        result.problems.append(f"{after - before} descriptors are open still after the adapter was closed")


def _go_on(site: Site, load: Load, seconds: float, result: Result) -> None:
    begun = time.monotonic()
    life_s = min(LONGEST_LIFE_S, seconds / (RESTARTS + 1))
    client, daemons = Life(CLIENT), [Life(DAEMON)]
    restart_at = begun + life_s
    before = footprint(load.process.pid)
    while (now := time.monotonic()) < begun + seconds:
        client.samples.append(footprint(load.process.pid))
        daemons[-1].samples.append(footprint(site.daemon.pid))
        if now >= restart_at:
            _note(site, result)
            site.daemon.restart(crash=result.restarts % 2 == 0)
            result.restarts += 1
            daemons.append(Life(DAEMON, [footprint(site.daemon.pid)]))
            restart_at = time.monotonic() + life_s
        time.sleep(SAMPLE_EVERY_S)
    _note(site, result)
    result.seconds = time.monotonic() - begun
    used_s = client.samples[-1].cpu_s - before.cpu_s + sum(life.samples[-1].cpu_s for life in daemons)
    result.cpu_share = used_s / result.seconds
    result.growth = client.growth() + most_grown([life.growth() for life in daemons])


def most_grown(lives: Sequence[Sequence[Growth]]) -> list[Growth]:
    """Of each figure that one which grew most."""
    return [max(same, key=lambda growth: growth.last - growth.first) for same in zip(*lives, strict=True)]


def _note(site: Site, result: Result) -> None:
    """What the daemon that runs says of itself: evictions since it was started, and whose its blocks are."""
    status = site.status()
    result.evictions += int(status["evicted"]["objects"])
    pool = status["pools"]["nvme"]
    if sum(pool[f"{part}_bytes"] for part in PARTS) != pool["total_bytes"]:
        result.problems.append(f"{', '.join(PARTS)} are not the total: {pool}")


def _count(load: Load, result: Result) -> None:
    report = load.report()
    counts = report["counts"]
    result.futures = sum(counts[f"{kind} done"] for kind in KINDS) + counts["lost"]
    result.late_or_lost = counts["late"] + counts["lost"]
    result.right, result.missed, result.wrong = counts["right"], counts["load missed"], counts["wrong"]
    result.problems += [*report["wrong"], *report["problems"]]


def _check_blocks(site: Site, result: Result) -> None:
    """Nothing stays staged, and once everything is purged and has rested, all is free."""

    def pool() -> dict[str, int]:
        blocks: dict[str, int] = site.status()["pools"]["nvme"]
        return blocks

    def settles(holds: Callable[[], bool], what: str) -> None:
        try:
            wait_until(holds, what, BLOCKS_AT_REST_S)
        except AssertionError as error:
            result.problems.append(f"{error}: {pool()}")

    settles(lambda: pool()["staged_bytes"] == 0, "what was staged expired")
    with site.daemon.connect() as client:
        client.ask("purge")
    settles(lambda: pool()["free_bytes"] == pool()["total_bytes"], "all is free after a purge")


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak and print the figures; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30, help="how long (default: 30)")
    parser.add_argument(
        "--per-second",
        type=float,
        default=PER_SECOND,
        help=f"batches of each kind, at most (default: {PER_SECOND:g})",
    )
    parser.add_argument("--seed", type=int, default=1, help="of all that is random but the time (default: 1)")
    options = parser.parse_args(arguments)
    with started_by(fork_daemon), ExitStack() as held:
        process = new_process()
        held.callback(process.kill)
        result = soak(imported(process), options.minutes * 60, options.per_second, options.seed)
    print(result.text())
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(stoppable(main))
