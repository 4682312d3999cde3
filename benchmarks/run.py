"""Every benchmark in one run, side by side.

    python benchmarks/run.py                        quick: a few minutes on a quiet machine
    python benchmarks/run.py --rounds 9             long: more rounds, one and two devices too, allocator
    python benchmarks/run.py --rounds 9 --record    and write what was measured to docs/benchmarks

Parts (choose with --part, repeated; all by default):
    adapters   HyperCache's connector against LMCache's raw_block, fs_native and fs, and fio on its devices:
               lookup, store, load, loads while stores run
    daemon     what each request costs the daemon
    protocol   what encoding and decoding cost
    allocator  waste, fragmentation and speed of the allocator (long form only, unless chosen)

Exit status 1 where a byte was wrong or a peer failed; slow is no failure.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import adapters
import aims
import daemon_requests
import fio
import hung_neighbours
import report
from peers import EVERYBODY, QUICK
from storages import ROOT, in_memory, on_disk

from hypercache_compat.stopping import stoppable

QUICK_ROUNDS = 3
PARTS = ("adapters", "daemon", "protocol", "allocator")
RECORD = ROOT / "docs" / "benchmarks"


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, help=f"rounds in which all take turns (default: {QUICK_ROUNDS})")
    add("--part", action="append", choices=PARTS, help="run this part only; may be repeated")
    add("--storage", choices=("ram", "disk", "all"), default="all")
    add("--workload", default="", metavar="WORD", help="only the workloads with WORD in their name")
    add("--disk-folder", type=Path, help="where on the disk (default: .cache of the work tree)")
    add("--record", action="store_true", help=f"write to {RECORD.relative_to(ROOT)}")
    return parser.parse_args()


def chosen_parts(arguments: argparse.Namespace) -> list[str]:
    """The parts to run: the allocator's takes long, so it must be wanted."""
    if arguments.part:
        return [part for part in PARTS if part in arguments.part]
    return [part for part in PARTS if part != "allocator" or arguments.rounds is not None]


def measure_adapters(arguments: argparse.Namespace) -> adapters.Result:
    """The adapters' figures, with progress on standard error."""
    storages = [in_memory()] if arguments.storage != "disk" else []
    storages += [on_disk(arguments.disk_folder)] if arguments.storage != "ram" else []
    peers = QUICK if arguments.rounds is None else EVERYBODY
    if not fio.is_installed():
        print(fio.ABSENT, file=sys.stderr)
    begun = time.monotonic()

    def show(line: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {line}", file=sys.stderr, flush=True)

    return adapters.measure(storages, peers, arguments.rounds or QUICK_ROUNDS, arguments.workload, show)


def run_script(name: str) -> None:
    """Run a part that prints its own table."""
    subprocess.run([sys.executable, str(Path(__file__).with_name(name))], check=True)


def main() -> int:
    """Run the parts, print, record; gives the exit status."""
    arguments = parsed()
    parts = chosen_parts(arguments)
    about: dict[str, Any] = {
        "machine": report.machine(),
        "command": " ".join(["benchmarks/run.py", *sys.argv[1:]]),
        "load_average_before": report.load_average(),
    }
    texts, failures = [], []
    if "adapters" in parts:
        result = measure_adapters(arguments)
        about["adapters"], failures = result.figures, result.failures
        texts += [report.tables(result.figures), aims.table(result.figures)]
    if "daemon" in parts:
        costs = daemon_requests.measure(2048)
        about["daemon"] = {name: asdict(cost) for name, cost in costs.items()}
        texts.append(daemon_requests.table(costs))
        waits = hung_neighbours.measure(500)
        about["hung_neighbours"] = {name: asdict(each) for name, each in waits.items()}
        texts.append(hung_neighbours.table(waits))
    about["load_average_after"] = report.load_average()
    text = "\n\n".join(filter(None, [headline(about), *texts]))
    print(f"\n{text}\n")
    for part, script in (("protocol", "protocol_codec.py"), ("allocator", "allocator.py")):
        if part in parts:
            print(f"== {part} ==", flush=True)
            run_script(script)
    for failure in failures:
        print(f"FAILED: {failure}")
    if arguments.record and not failures:
        report.record(RECORD, "latest", about, text)
    return 1 if failures else 0


def headline(about: dict[str, Any]) -> str:
    """Where and how, in one paragraph."""
    machine = about["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"`{about['command']}` on {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}, {platform.python_implementation()} {machine['python']}; {versions}. "
        f"Load average {about['load_average_before']} before, {about['load_average_after']} after."
    )


if __name__ == "__main__":
    sys.exit(stoppable(main))
