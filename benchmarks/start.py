"""How long a start takes with many objects in the catalog, how much memory, and where the time goes.

    python benchmarks/start.py [--objects 1000000] [--starts 3] [--large-share 0.5] [--profile]
                               [--daemon-argument=--eviction=lru]

Fills a pool of sparse device files and its catalog through the daemon's own code, then starts the real
hypercached on them: from the fork to the reply to a ping, with the most memory that it has had by then. The
profile is of the load alone, in this process; profiling makes it about twice as slow. No payload is written.
Everything lies in a folder of its own, which is removed afterwards.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import hashlib
import pstats
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import trio

from hypercache_compat.daemon_process import daemon_command
from hypercache_compat.process_figures import cpu_seconds, peak_bytes
from hypercache_compat.raw_wire import RawConnection
from hypercache_daemon.access import Access
from hypercache_daemon.catalog_rows import Put
from hypercache_daemon.config import parse
from hypercache_daemon.core.extents import Extent, packed
from hypercache_daemon.core.objects import StoredObject, packed_checksums
from hypercache_daemon.startup import Opened, open_all
from hypercache_protocol.fields import KIB, MIB, Tier
from hypercache_protocol.states import SyncStatus

DEVICES = 4
LARGE_BYTES = 14 * MIB
SMALL_BYTES = 256 * KIB
PINNED_SHARE = 0.01
SPARE = 1.05
"""How much larger than its objects the pool is."""
STATES = (SyncStatus.LOCAL_ONLY, SyncStatus.SYNCED_BACKEND, SyncStatus.COMMITTED)
STATE_WEIGHTS = (0.80, 0.15, 0.05)
TOGETHER = 20_000
"""Objects in one transaction."""
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Start:
    """One start of the daemon."""

    seconds: float
    peak_bytes: int
    cpu_s: float


class Pool:
    """The sparse devices, the catalog, and how a daemon is started on them."""

    def __init__(self, folder: Path, objects: int, large_share: float) -> None:
        self.objects = objects
        self._large_share = large_share
        self.socket_path = str(folder / "s")
        self.log_path = folder / "daemon.log"
        self.catalog_path = folder / "state" / "catalog.sqlite"
        self.devices = [folder / f"device-{number}" for number in range(DEVICES)]
        mean_bytes = LARGE_BYTES * large_share + SMALL_BYTES * (1 - large_share)
        device_bytes = int(objects * mean_bytes * SPARE / DEVICES) // MIB * MIB + 64 * MIB
        for device in self.devices:
            device.touch(mode=0o600)
            with device.open("r+b") as file:
                file.truncate(device_bytes)
        self.pool_bytes = device_bytes * DEVICES
        self.arguments = ["--socket", self.socket_path, "--state-dir", str(folder / "state")]
        self.arguments += ["--ram-size", "0"]
        self.arguments += [word for device in self.devices for word in ("--device", str(device))]

    def open(self) -> Opened:
        """What the daemon does before it answers: devices, catalog, load."""
        return open_all(parse(self.arguments), Access(None), 0.0)

    async def fill(self) -> None:
        """Objects in the catalog, in an order of commits that is not the order on the devices."""
        opened = self.open()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(opened.catalog.run)
                waiting = self._stored(opened)
                while changes := [Put(stored) for stored in islice(waiting, TOGETHER)]:
                    await opened.catalog.write(changes)
                nursery.cancel_scope.cancel()
        finally:
            opened.close()

    def _stored(self, opened: Opened) -> Iterator[StoredObject]:
        dice = random.Random(1)
        blocks = opened.cache.pools[Tier.NVME].blocks
        generations = list(range(1, self.objects + 1))
        dice.shuffle(generations)
        for generation in generations:
            size_bytes = LARGE_BYTES if dice.random() < self._large_share else SMALL_BYTES
            extents = blocks.allocate(size_bytes)
            assert extents is not None, "the pool was made large enough"
            yield self._object(dice, generation, size_bytes, extents)

    def _object(
        self, dice: random.Random, generation: int, size_bytes: int, extents: tuple[Extent, ...]
    ) -> StoredObject:
        key = hashlib.sha256(str(generation).encode()).hexdigest()
        return StoredObject(
            f"hypercache://lmcache/v1/default/Qwen%2FQwen2.5-7B-Instruct@00000000@0@{key}",
            Tier.NVME,
            size_bytes,
            packed(extents),
            packed_checksums([dice.getrandbits(32) for _ in extents]),
            generation,
            dice.choices(STATES, STATE_WEIGHTS)[0],
            pinned=dice.random() < PINNED_SHARE,
        )

    def start(self, more_arguments: Sequence[str]) -> Start:
        """Start the daemon, ping it, stop it."""
        with self.log_path.open("ab") as log:
            begun = time.perf_counter()
            process = subprocess.Popen(
                daemon_command(*self.arguments, *more_arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            try:
                self.ping(process)
                seconds = time.perf_counter() - begun
                start = Start(seconds, peak_bytes(process.pid), cpu_seconds(process.pid))
            finally:
                process.terminate()
                process.wait()
        return start

    def ping(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise SystemExit(f"hypercached ended:\n{self.log_path.read_text()}")
            try:
                with RawConnection(self.socket_path, DEADLINE_S) as connection:
                    assert connection.ask("ping")["status"] == "PONG"
                    return
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.01)  # it has not bound its socket yet
        raise SystemExit(f"hypercached did not answer in {DEADLINE_S} s:\n{self.log_path.read_text()}")


@contextmanager
def filled(objects: int, large_share: float, parent: Path) -> Iterator[Pool]:
    """A pool with so many objects; it is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hc", dir=parent))
    try:
        pool = Pool(folder, objects, large_share)
        begun = time.perf_counter()
        trio.run(pool.fill)
        catalog_mib = pool.catalog_path.stat().st_size / MIB
        print(
            f"{objects} objects, {large_share:.0%} of them of 14 MiB and the rest of 256 KiB, in a pool of "
            f"{pool.pool_bytes / 2**40:.2f} TiB: catalog of {catalog_mib:.0f} MiB, written in "
            f"{time.perf_counter() - begun:.0f} s"
        )
        yield pool
    finally:
        shutil.rmtree(folder)


def print_starts(pool: Pool, starts: int, more_arguments: Sequence[str]) -> None:
    """Each start, and the median."""
    done = []
    for number in range(1, starts + 1):
        start = pool.start(more_arguments)
        done.append(start)
        print(
            f"start {number}: {start.seconds:.2f} s until it answers a ping, CPU {start.cpu_s:.2f} s; "
            f"peak RSS {start.peak_bytes / MIB:.0f} MiB",
            flush=True,
        )
    seconds = [start.seconds for start in done]
    most = max(start.peak_bytes for start in done)
    print(
        f"median {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), "
        f"{statistics.median(seconds) / pool.objects * 1e6:.1f} µs an object; peak RSS {most / MIB:.0f} MiB, "
        f"{most / pool.objects:.0f} bytes an object with the interpreter"
    )


def print_profile(pool: Pool) -> None:
    """Where the load spends its time, by function and without what it calls."""
    gc.disable()  # as the daemon does
    profile = cProfile.Profile()
    opened = profile.runcall(pool.open)
    opened.close()
    opened.catalog.close()
    gc.enable()
    stats = pstats.Stats(profile, stream=sys.stdout).strip_dirs()
    stats.sort_stats("tottime").print_stats(18)
    stats.sort_stats("cumulative").print_stats(18)


def main() -> None:
    """Fill, start, profile."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--objects", type=int, default=1_000_000)
    add("--starts", type=int, default=3)
    add("--large-share", type=float, default=0.5, help="share of objects of 14 MiB (default: 0.5)")
    add("--folder", type=Path, default=Path("/tmp"), help="where the files go (default: /tmp)")
    add("--daemon-argument", action="append", default=[], help="one more for hypercached; may be repeated")
    add("--profile", action="store_true", help="show where the time goes")
    arguments = parser.parse_args()
    with filled(arguments.objects, arguments.large_share, arguments.folder) as pool:
        print_starts(pool, arguments.starts, arguments.daemon_argument)
        if arguments.profile:
            print_profile(pool)


if __name__ == "__main__":
    main()
