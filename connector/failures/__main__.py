"""Makes one thing after another go wrong under a verified load, on HyperCache and on LMCache's own adapters.

    make failures
    python -m failures [--only WORD] [--system NAME] [--seed 1]

Prints a row for each scenario and system. Exit status 1 where, with HyperCache, a future was late or lost, a
load gave wrong bytes, or something did not heal in time; the others' rows are for comparison. What this
machine can't do is said.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from hypercache_compat.daemon_process import started_by
from hypercache_compat.forked import fork_daemon
from hypercache_compat.stopping import stoppable

from .run import Hosts, Row, run
from .scenarios import SCENARIOS, Scenario
from .systems import SYSTEMS, System

HEAD = """\
| scenario | system | futures | late or lost | loads right | missed | WRONG | healed after s |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, print rows as they come; the exit status."""
    options = _parsed(arguments)
    systems = [system for system in SYSTEMS if options.system in (None, system.name)]
    scenarios = [scenario for scenario in SCENARIOS if options.only in scenario.title]
    begun = time.monotonic()
    bad: list[str] = []
    hosts = Hosts()
    print(HEAD, flush=True)
    with started_by(fork_daemon), ExitStack() as held:
        held.callback(hosts.close)
        for scenario in scenarios:
            for system, row in _rows(scenario, systems, hosts, options.seed):
                print(row.markdown(), flush=True)
                for problem in row.problems:
                    print(f"{row.scenario}, {row.system}: {problem}", file=sys.stderr, flush=True)
                bad += [row.scenario] if system.fails_the_run and not row.is_good else []
            _print_others(scenario, systems)
    print(f"\n{len(scenarios)} scenarios in {time.monotonic() - begun:.0f} s, {len(bad)} failed.")
    for title in bad:
        print(f"FAILED: {title}")
    return 1 if bad else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD", help="scenarios with WORD in their title")
    parser.add_argument("--system", choices=[system.name for system in SYSTEMS], help="this one only")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random but the time (default: 1)")
    return parser.parse_args(arguments)


def _rows(
    scenario: Scenario, systems: Sequence[System], hosts: Hosts, seed: int
) -> Iterator[tuple[System, Row]]:
    """The rows of one scenario, as they come."""
    for system in systems:
        if system in scenario.applies_to and not scenario.needs:
            yield system, run(scenario, system, hosts, seed)


def _print_others(scenario: Scenario, systems: Sequence[System]) -> None:
    """Say where a scenario was not run, and why."""
    others = ", ".join(system.name for system in systems if system not in scenario.applies_to)
    if scenario.needs:
        print(f"| {scenario.title} | not run: that takes {scenario.needs} | | | | | | |", flush=True)
    elif others:
        print(f"| {scenario.title} | {others} | does not apply | | | | | |", flush=True)


if __name__ == "__main__":
    sys.exit(stoppable(main))
