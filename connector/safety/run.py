"""Runs the safety suite.

Each check goes through the adapter that LMCache makes of its JSON, in a process with LMCache in it, to a
daemon on 1, 2 or 4 devices: loop devices where this is root, else plain files. The exit status is 0 only if
all passed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

from hypercache_compat.daemon_process import started_by
from hypercache_compat.forked import fork_daemon
from hypercache_compat.lmcache_versions import lmcache_process
from hypercache_compat.releases import LMCACHE_IN_ENVIRONMENT, LMCACHE_VERSIONS
from hypercache_compat.scenario_process import ScenarioProcess

from .check import Check, Failed
from .checks import CHECKS
from .places import kind
from .report import has_colours, markdown, table
from .scene import Cell, Scene, scene

DEVICES = (1, 2, 4)
TIERS = ("nvme", "ram")
BROKE_OFF = "broke off"
SHORT = Cell(LMCACHE_IN_ENVIRONMENT, devices=2, tier="nvme")

Run = Callable[[Check, Scene], str]
"""Runs a check; gives the sentence of what failed, or ""."""


class Processes(dict[str, ScenarioProcess]):
    """A process for each release of LMCache, begun when it is first asked for: its import takes seconds.

    Args:
        logs: a folder for what they print.
    """

    def __init__(self, logs: Path) -> None:
        super().__init__()
        self._logs = logs

    def __missing__(self, version: str) -> ScenarioProcess:
        self[version] = lmcache_process(version, self._logs / version)
        return self[version]

    def log_tails(self) -> str:
        """The ends of what they printed."""
        return "\n".join(
            f"LMCache {log.name}: …{log.read_text()[-2000:]}" for log in sorted(self._logs.iterdir())
        )

    def other_than(self, version: str) -> ScenarioProcess:
        """Another release's."""
        return self[next(other for other in LMCACHE_VERSIONS if other != version)]


def sentence(check: Check, where: Scene) -> str:
    """Run a check; "" if it holds, else what does not."""
    try:
        try:
            check.run(where)
        finally:
            where.asked("purge")
    except Failed as failed:
        return str(failed)
    except Exception as error:  # noqa: BLE001 - boundary: the other checks go on, and the table tells
        return f"{BROKE_OFF} with {type(error).__name__}: {str(error).strip()[-2000:]}"
    return ""


def with_its_fault(check: Check, where: Scene) -> str:
    """Run a check on a connector with the check's fault; "" if it fails, as it must."""
    where.lmcache.call("connector_faults.put_in", fault=check.fault)
    try:
        said = sentence(check, where)
    finally:
        where.lmcache.call("connector_faults.take_out")
    if not said or said.startswith(BROKE_OFF):
        return f"did not see that {check.fault}{said and ': '}{said}"
    return ""


def run_cell(
    cell: Cell, checks: Sequence[Check], processes: Processes, run: Run = sentence
) -> Iterator[tuple[Check, str]]:
    """Run the checks of one column; gives each with what failed."""
    with scene(cell, processes[cell.lmcache], partial(processes.other_than, cell.lmcache)) as where:
        for check in checks:
            yield check, run(check, where)


@contextmanager
def lmcaches() -> Iterator[Processes]:
    """Processes that end with the block, and daemons that start with everything imported."""
    with started_by(fork_daemon), tempfile.TemporaryDirectory(prefix="hc") as logs:
        processes = Processes(Path(logs))
        try:
            yield processes
        finally:
            for process in processes.values():
                process.kill()


def run_all(cells: Sequence[Cell], checks: Sequence[Check], run: Run) -> dict[tuple[Check, Cell], str]:
    """Run every check in every cell, with a mark for each as it ends."""
    results = {}
    with lmcaches() as processes:
        for cell in cells:
            print(f"{cell!s:32}", end=" ", flush=True)
            start = time.monotonic()
            for check, failure in run_cell(cell, checks, processes, run):
                results[check, cell] = failure
                print("F" if failure else ".", end="", flush=True)
            print(f" {time.monotonic() - start:.1f} s", flush=True)
        if any(results.values()):
            print(f"\nWhat LMCache and the connector said last:\n{processes.log_tails()}")
    return results


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; an unknown check is an error that names the known ones."""
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(prog="python -m safety", description=__doc__)
    parser.add_argument("--only", metavar="NAME", action="append", help="this check; give it again for more")
    parser.add_argument(
        "--lmcache", choices=LMCACHE_VERSIONS, action="append", help="this release (default: each)"
    )
    parser.add_argument(
        "--devices", type=int, choices=DEVICES, action="append", help="so many devices (default: each)"
    )
    parser.add_argument("--tier", choices=TIERS, action="append", help="this tier (default: both)")
    parser.add_argument("--short", action="store_true", help=f"only {SHORT}, and no check that takes long")
    parser.add_argument(
        "--prove", action="store_true", help="give the connector each check's fault, which it must see"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the table of docs/safety.md, and run nothing"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.only or () if name not in names]
    if unknown:
        parser.error(f"there is no check {', '.join(unknown)}; there are {', '.join(names)}")
    if options.short and (options.lmcache or options.devices or options.tier):
        parser.error(f"--short runs {SHORT}: leave it out, or --lmcache, --devices and --tier")
    return options


def chosen(options: argparse.Namespace) -> list[Check]:
    """The checks to run; those that are named, however long they take."""
    return [
        check
        for check in CHECKS
        if (check.name in options.only if options.only else not (options.short and check.is_long))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the options say; the exit status."""
    options = parsed(arguments)
    if options.list:
        print(markdown(CHECKS))
        return 0
    checks, cells = chosen(options), [SHORT]
    if not options.short:
        choices = (options.lmcache or LMCACHE_VERSIONS, options.devices or DEVICES, options.tier or TIERS)
        cells = [Cell(*choice) for choice in product(*choices)]
    print(f"{len(checks)} checks in {len(cells)} cells, on {kind()}", flush=True)
    results = run_all(cells, checks, with_its_fault if options.prove else sentence)
    print("\n" + table(checks, cells, results, colours=has_colours()))
    failed = sum(bool(failure) for failure in results.values())
    print(f"\n{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0
