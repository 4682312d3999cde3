"""How many block look-ups hit under each eviction policy, and what the daemon's policies cost.

    python benchmarks/eviction.py TRACE [--part 1/2] [--sizes 2 5 10 20 40] [--full-blocks] [--through-cache]
    python benchmarks/eviction.py --made-up SEED [--requests 12000]
    python benchmarks/eviction.py --cost [--keys 1000000]

TRACE is a file of the form that the Mooncake project publishes (.jsonl or .jsonl.gz). A request asks for all
its blocks at once; what is missing is stored afterwards. Sizes are percent of the trace's distinct blocks.
With --through-cache each policy has the daemon's own cache around it, which takes about ten times as long
and gives the same figures. Times are processor time, and memory is what the policy takes beside the keys
themselves.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

from block_traces import Trace, TraceError, made_up, read_mooncake
from cache_replay import BLOCK_BYTES, lookups_through_a_cache
from reference_policies import Arc, Gdsf

from hypercache_daemon.core.eviction import EvictionPolicy, Lru
from hypercache_daemon.core.eviction_return_rate import ReturnRate

SIZES = (2.0, 5.0, 10.0, 20.0, 40.0)
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "LRU": lambda _: Lru(),
    "ARC": Arc,
    "GDSF": lambda _: Gdsf(),
    "return rate": lambda _: ReturnRate(),
}
SHIPPED: dict[str, Callable[[], EvictionPolicy]] = {"LRU": Lru, "return rate": ReturnRate}


@dataclass(frozen=True)
class Found:
    """Of all look-ups, how many found their block, and how many found all blocks before it too."""

    blocks: int
    usable: int


def lookups(
    policy: EvictionPolicy, trace: Trace, capacity: int
) -> Iterator[tuple[Sequence[str], list[bool]]]:
    """Each batch and which of its blocks it finds in a cache of so many blocks; what is missing is stored
    afterwards, as far as it fits."""
    here: set[str] = set()
    for batch in trace:
        yield batch, [block in here for block in batch]
        policy.touched(batch)
        missing = [block for block in dict.fromkeys(batch) if block not in here][:capacity]
        surplus = len(here) + len(missing) - capacity
        for victim in list(islice(policy.victims(), max(0, surplus))):
            policy.removed(victim)
            here.remove(victim)
        for block in missing:
            policy.inserted(block, BLOCK_BYTES)
            here.add(block)


def replay(policy: EvictionPolicy, trace: Trace, capacity: int, *, through_cache: bool = False) -> Found:
    """What the trace's look-ups find in a cache of so many blocks."""
    looks = lookups_through_a_cache if through_cache else lookups
    blocks = usable = 0
    for _, found in looks(policy, trace, capacity):
        blocks += sum(found)
        usable += sum(takewhile(bool, found))
    return Found(blocks, usable)


def print_hit_ratios(trace: Trace, sizes: Sequence[float], *, through_cache: bool) -> None:
    """The tables: policies and sizes."""
    asked = sum(map(len, trace))
    distinct = len({block for batch in trace for block in batch})
    print(f"{len(trace)} requests, {asked} look-ups of {distinct} distinct blocks")
    capacities = [max(1, int(distinct * size / 100)) for size in sizes]
    found = {
        name: [replay(make(each), trace, each, through_cache=through_cache) for each in capacities]
        for name, make in POLICIES.items()
    }
    _print_table("look-ups that hit", sizes, asked, {n: [f.blocks for f in fs] for n, fs in found.items()})
    _print_table("with all before", sizes, asked, {n: [f.usable for f in fs] for n, fs in found.items()})
    print(f"{'a cache without end':20}{1 - distinct / asked:10.4f}")


def _print_table(title: str, sizes: Sequence[float], asked: int, rows: Mapping[str, Sequence[int]]) -> None:
    print(f"{title:20}" + "".join(f"{size:>8g} %" for size in sizes))
    for name, counts in rows.items():
        print(f"{name:20}" + "".join(f"{count / asked:10.4f}" for count in counts))


def part_of(trace: Trace, part: str) -> Trace:
    """Of "2/3" the second third, by requests.

    Raises:
        TraceError: it is not of this form.
    """
    number, slash, count = part.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise TraceError(f"--part {part}: expected a form like 1/2, the first half")
    size = -(-len(trace) // int(count))
    return trace[size * (int(number) - 1) : size * int(number)]


# -- cost ----------------------------------------------------------------------------------------------


def print_costs(count: int) -> None:
    """Nanoseconds for each key, and bytes, of the daemon's policies that hold `count` keys."""
    names = [f"hypercache://lmcache/v1/model/{number:064x}" for number in range(2 * count)]
    print(f"{count} keys{'':21}" + "".join(f"{name:>14}" for name in SHIPPED))
    columns = [costs(make, names[:count], names[count:]) for make in SHIPPED.values()]
    for row in columns[0]:
        print(f"{row:34}" + "".join(f"{column[row]:14.0f}" for column in columns))


def costs(make: Callable[[], EvictionPolicy], keys: Sequence[str], others: Sequence[str]) -> dict[str, float]:
    """Row -> figure, for one policy."""
    policy = make()
    figures = {"inserted, ns a key": nanoseconds(lambda: fill(policy, keys), len(keys))}
    for size in (64, 512):
        looked_up = filled(make, keys)
        # A lookup brings names of its own, equal to those that the daemon has.
        starts = random.Random(1).sample(
            range(0, len(keys) - size, size), min(40_000, len(keys) // 2) // size
        )
        chains = [["".join(key) for key in keys[start : start + size]] for start in starts]
        figures[f"touched, {size} at once, ns a key"] = touch(looked_up, chains)
        figures[f"{size}: the same chains again"] = touch(looked_up, chains)
        figures[f"{size}: one half of each, then the other"] = touch(
            looked_up, [half for chain in chains for half in (chain[: size // 2], chain[size // 2 :])]
        )
        figures[f"{size}: every second key of each"] = touch(looked_up, [chain[::2] for chain in chains])
    named: list[str] = []
    figures["victims, 512 at once, ns a key"] = nanoseconds(
        lambda: named.extend(islice(policy.victims(), 512)), 512
    )
    figures["removed, then another inserted, ns"] = nanoseconds(lambda: replace(policy, others), len(others))
    figures["memory, bytes a key"] = memory_bytes(lambda: filled(make, keys)) / len(keys)
    figures["the same, each asked for alone"] = memory_bytes(lambda: asked_alone(make, keys)) / len(keys)
    figures["the same, after all were replaced"] = memory_bytes(lambda: replaced(make, keys, others)) / len(
        keys
    )
    return figures


def nanoseconds(work: Callable[[], object], count: int) -> float:
    """Processor time of `work` for each of `count`."""
    begun = time.process_time()
    work()
    return (time.process_time() - begun) / count * 1e9


def fill(policy: EvictionPolicy, keys: Sequence[str]) -> None:
    """Insert all."""
    for key in keys:
        policy.inserted(key, BLOCK_BYTES)


def touch(policy: EvictionPolicy, batches: Sequence[Sequence[str]]) -> float:
    """Nanoseconds for each key of the batches."""

    def work() -> None:
        for batch in batches:
            policy.touched(batch)

    return nanoseconds(work, sum(map(len, batches)))


def replace(policy: EvictionPolicy, others: Sequence[str]) -> None:
    """Evict and insert in turns, 512 keys each, as the daemon does between its watermarks."""
    for start in range(0, len(others), 512):
        part = others[start : start + 512]
        for victim in list(islice(policy.victims(), len(part))):
            policy.removed(victim)
        fill(policy, part)


def filled(make: Callable[[], EvictionPolicy], keys: Sequence[str]) -> EvictionPolicy:
    """A policy that has them all."""
    policy = make()
    fill(policy, keys)
    return policy


def asked_alone(make: Callable[[], EvictionPolicy], keys: Sequence[str]) -> EvictionPolicy:
    """A policy that has them all, after a look-up for each."""
    policy = filled(make, keys)
    touch(policy, [[key] for key in keys])
    return policy


def replaced(
    make: Callable[[], EvictionPolicy], keys: Sequence[str], others: Sequence[str]
) -> EvictionPolicy:
    """A policy that had `keys` and has `others`."""
    policy = filled(make, keys)
    replace(policy, others)
    return policy


def memory_bytes(build: Callable[[], EvictionPolicy]) -> float:
    """What the policy takes that `build` makes."""
    tracemalloc.start()
    try:
        policy = build()
        return tracemalloc.get_traced_memory()[0] if policy else 0
    finally:
        tracemalloc.stop()


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("trace", nargs="?", type=Path, help="file of a recorded trace")
    source.add_argument("--made-up", type=int, metavar="SEED", help="a made-up trace instead")
    source.add_argument("--cost", action="store_true", help="time and memory instead of hits")
    parser.add_argument("--part", default="1/1", help="1/2: only the first half of the requests")
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=SIZES, help="percent of the distinct blocks"
    )
    parser.add_argument(
        "--full-blocks",
        action="store_true",
        help="leave out each request's last block, as a store of full ones",
    )
    parser.add_argument(
        "--through-cache", action="store_true", help="with the daemon's own cache around each policy"
    )
    parser.add_argument("--requests", type=int, default=12_000, help="length of a made-up trace")
    parser.add_argument("--keys", type=int, default=1_000_000, help="keys that a policy holds, for --cost")
    arguments = parser.parse_args()
    if arguments.cost:
        print_costs(arguments.keys)
        return
    try:
        made = arguments.made_up is not None
        trace = made_up(arguments.made_up, arguments.requests) if made else read_mooncake(arguments.trace)
        if arguments.full_blocks:
            trace = [batch[:-1] for batch in trace if len(batch) > 1]
        some = part_of(trace, arguments.part)
        print_hit_ratios(some, arguments.sizes, through_cache=arguments.through_cache)
    except TraceError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
