"""What the allocator wastes, how far it fragments, and how fast it is.

    python benchmarks/allocator.py [--operations 1000000] [--seed 1]

Waste: of what was taken from the devices, the share that holds no byte of an object. Fragmentation: of the
whole 4 MiB chunks that the free space could hold, the share that cannot be had in one piece. Times are
processor time.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hypercache_daemon.core.allocator import Allocator
from hypercache_daemon.core.extents import EXTENT_COLUMNS, Extent, packed
from hypercache_protocol.fields import CHUNK_SIZE, KIB, MIB

GIB = 1024 * MIB
SUPERBLOCK_BYTES = MIB
FULL = 0.95
"""The share of the pool that is taken while the random operations run."""

SizeOf = Callable[[random.Random], int]
LOADS: dict[str, SizeOf] = {
    "14 MiB": lambda _: 14 * MIB,
    "256 KiB": lambda _: 256 * KIB,
    "14 MiB and 256 KiB, half each": lambda dice: dice.choice((14 * MIB, 256 * KIB)),
    "14 MiB and 256 KiB, give or take 10 %": lambda dice: int(
        dice.choice((14 * MIB, 256 * KIB)) * dice.uniform(0.9, 1.1)
    ),
    "1 byte to 64 MiB, all orders alike": lambda dice: int(2 ** dice.uniform(0, 26)),
}


@dataclass
class Churn:
    """A pool kept nearly full by objects of random size that come and go in random order."""

    dice: random.Random
    size_of: SizeOf
    allocator: Allocator
    objects: list[tuple[Extent, ...]] = field(default_factory=list)
    chunks: int = 0
    fewest_chunks: int = 0
    worst_fragmentation: float = 0.0

    def run(self, operations: int) -> None:
        """So many allocations and releases."""
        spare_bytes = self.allocator.total_bytes * (1 - FULL)
        for number in range(operations):
            if self.allocator.free_bytes < spare_bytes:
                self.release_one()
            else:
                self.allocate_one()
            if number % 1000 == 0:
                self.worst_fragmentation = max(self.worst_fragmentation, self.allocator.fragmentation())

    def allocate_one(self) -> None:
        """One more object, if it fits."""
        size_bytes = self.size_of(self.dice)
        extents = self.allocator.allocate(size_bytes)
        if extents:
            self.objects.append(extents)
            self.chunks += len(extents)
            self.fewest_chunks += -(-size_bytes // CHUNK_SIZE)

    def release_one(self) -> None:
        """One object less."""
        chosen = self.dice.randrange(len(self.objects))
        self.objects[chosen], self.objects[-1] = self.objects[-1], self.objects[chosen]
        self.allocator.release(self.objects.pop())

    def waste(self) -> float:
        """Of what is taken now, the share that holds nothing."""
        held = sum(extent.length for extents in self.objects for extent in extents)
        return 1 - held / (self.allocator.total_bytes - self.allocator.free_bytes)


def pool(device_bytes: int) -> Allocator:
    """Four equal devices."""
    return Allocator(dict.fromkeys(range(4), device_bytes), SUPERBLOCK_BYTES)


def print_churn(operations: int, seed: int) -> None:
    """Waste and fragmentation of a full pool of 64 GiB, after so many operations on each load."""
    print(f"{operations} random operations, a pool of 64 GiB kept {FULL:.0%} full")
    print(
        f"{'objects':40}{'waste':>8}{'fragmentation':>15}{'worst':>8}{'chunks over fewest':>20}{'µs each':>9}"
    )
    for name, size_of in LOADS.items():
        churn = Churn(random.Random(seed), size_of, pool(16 * GIB))
        begun = time.process_time()
        churn.run(operations)
        each_us = (time.process_time() - begun) / operations * 1e6
        over = churn.chunks / churn.fewest_chunks - 1
        print(
            f"{name:40}{churn.waste():8.2%}{churn.allocator.fragmentation():15.1%}"
            f"{churn.worst_fragmentation:8.1%}{over:20.2%}{each_us:9.1f}"
        )


def print_filled() -> None:
    """What is left when a pool is filled to the last object."""
    for size_bytes in (14 * MIB, 256 * KIB):
        allocator = pool(16 * GIB)
        count = 0
        while allocator.allocate(size_bytes):
            count += 1
        unused = 1 - count * size_bytes / allocator.total_bytes
        print(f"filled with {count} objects of {size_bytes // KIB} KiB: {unused:.2%} of the pool unused")


def print_speed(rounds: int = 7, pairs: int = 5000) -> None:
    """Pairs of allocate and release, the best of several rounds."""
    for size_bytes in (14 * MIB, 256 * KIB):
        allocator = pool(1024 * GIB)
        best_s = float("inf")
        for _ in range(rounds):
            begun = time.process_time()
            for _ in range(pairs):
                allocator.release(allocator.allocate(size_bytes) or ())
            best_s = min(best_s, time.process_time() - begun)
        print(f"{size_bytes // KIB} KiB: {pairs / best_s:,.0f} pairs of allocate and release a second")


def print_million(seed: int) -> None:
    """A million objects loaded as at a start, in random order: the time, and the allocator's own memory."""
    allocator = pool(64 * GIB)
    objects = [packed(allocator.allocate(256 * KIB) or ()) for _ in range(1_000_000)]
    random.Random(seed).shuffle(objects)
    chunks = np.frombuffer(b"".join(objects), EXTENT_COLUMNS)
    begun = time.process_time()
    pool(64 * GIB).load(chunks)
    seconds = time.process_time() - begun
    tracemalloc.start()
    reloaded = pool(64 * GIB)
    reloaded.load(chunks)
    taken = 1 - reloaded.free_bytes / reloaded.total_bytes
    now, most = (size_bytes / MIB for size_bytes in tracemalloc.get_traced_memory())
    print(f"a million objects of 256 KiB loaded in {seconds:.1f} s, which takes {taken:.0%} of the pool")
    print(f"memory of the allocator: {now:.1f} MiB then, {most:.1f} MiB at most meanwhile")


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print_churn(arguments.operations, arguments.seed)
    print_filled()
    print_speed()
    print_million(arguments.seed)


if __name__ == "__main__":
    main()
