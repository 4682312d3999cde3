"""What a client waits while a device fails, and everything with a chunk on it is withheld and evicted.

    python benchmarks/failing_device.py [--objects 200000] [--large-share 0.5]

Fills a pool of sparse device files and its catalog as start.py does, starts the real hypercached on them, and
spoils the superblock of the first device, which the daemon notices by itself. Until it has evicted what may
be, a client asks for one thing after the other, with a pause of a millisecond. The second column is promised
to stay under 50 ms; the last one is the longest that anybody waited.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import start
from hung_neighbours import PAUSE_S, PROMISED_MS, Neighbour, Waits, summed_up

from hypercache_compat.daemon_process import daemon_command

DEADLINE_S = 300.0
QUIET_S = 5.0
CLEARED = "objects with a chunk on"
"""What the log says once it is done."""


@contextmanager
def running(pool: start.Pool) -> Iterator[Neighbour]:
    """A client of a daemon on that pool."""
    with pool.log_path.open("ab") as log:
        command = daemon_command(*pool.arguments, "--scrub-mib-s", "0")
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            pool.ping(process)
            yield Neighbour(pool.socket_path)
        finally:
            process.terminate()
            process.wait()


def waits(client: Neighbour, is_over: Callable[[], bool]) -> Waits:
    """What the replies took, until it is over."""
    took: list[float] = []
    deadline = time.monotonic() + DEADLINE_S
    while not is_over():
        assert time.monotonic() < deadline, f"not over within {DEADLINE_S} s"
        action, fields = ("locate", {"uri": "none://here"}) if len(took) % 2 else ("ping", {})
        begun = time.perf_counter()
        client.ask(action, **fields)
        took.append((time.perf_counter() - begun) * 1e3)
        time.sleep(PAUSE_S)
    return summed_up(took)


def measure(pool: start.Pool) -> dict[str, Waits]:
    """The waits before the device fails and while it is cleared."""
    with running(pool) as client, pool.log_path.open() as log:
        quiet_until = time.monotonic() + QUIET_S
        before = waits(client, lambda: time.monotonic() > quiet_until)
        with pool.devices[0].open("r+b") as device:
            device.write(bytes(4096))
        lines: list[str] = []

        def cleared() -> bool:
            lines.extend(log)
            return any(CLEARED in line for line in lines)

        return {"nothing fails": before, "a device fails": waits(client, cleared)}


def main() -> None:
    """Fill, fail, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--objects", type=int, default=200_000)
    add("--large-share", type=float, default=0.5, help="share of objects of 14 MiB (default: 0.5)")
    add("--folder", type=Path, default=Path("/tmp"), help="where the files go (default: /tmp)")
    arguments = parser.parse_args()
    with start.filled(arguments.objects, arguments.large_share, arguments.folder) as pool:
        print(f"| while | p50 ms | p99 ms (promised: {PROMISED_MS:g}) | most ms |")
        print("| --- | ---: | ---: | ---: |")
        for name, each in measure(pool).items():
            print(f"| {name} | {each.p50_ms:.2f} | {each.p99_ms:.2f} | {each.most_ms:.2f} |")
        print(pool.log_path.read_text().splitlines()[-1])


if __name__ == "__main__":
    main()
