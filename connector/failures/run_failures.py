"""Makes one thing after another go wrong under a verified load, on HyperCache and on LMCache's own adapters.

    make failures
    python connector/failures/run_failures.py [--only WORD] [--system NAME] [--seed 1]

Prints a row for each scenario and system. Exit status 1 where, with HyperCache, a future was late or lost, a
load gave wrong bytes, or something did not heal in time; the others' rows are for comparison. What this
machine can't do is said.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from load import KINDS, Load, imported, new_process
from scenarios import SCENARIOS, Scenario
from systems import SYSTEMS, System

from hypercache_compat.daemon_process import started_by
from hypercache_compat.forked import fork_daemon
from hypercache_compat.scenario_process import ScenarioProcess

FUTURE_DEADLINE_S = 8.0
"""Two or three exchanges with the daemon and one transfer (see systems.py), and some room."""
HEAL_DEADLINE_S = 15.0


@dataclass(frozen=True)
class Row:
    """What came of a scenario with one system."""

    scenario: str
    system: str
    futures: int = 0
    late: int = 0
    lost: int = 0
    right: int = 0
    missed: int = 0
    wrong: int = 0
    slowest_s: float = 0.0
    healed_s: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether it is all that is promised."""
        return not (self.late or self.lost or self.wrong or self.problems) and self.healed_s is not None

    def markdown(self) -> str:
        """A line of the table."""
        if not self.futures:
            return f"| {self.scenario} | {self.system} | broke off | | | | | |"
        healed = "no" if self.healed_s is None else f"{self.healed_s:.2f}"
        wrong = f"**{self.wrong}**" if self.wrong else "0"
        figures = (self.futures, self.late + self.lost, self.right, self.missed, wrong, healed)
        return f"| {self.scenario} | {self.system} | {' | '.join(map(str, figures))} |"


HEAD = """\
| scenario | system | futures | late or lost | loads right | missed | WRONG | healed after s |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


@contextmanager
def a_folder() -> Iterator[Path]:
    """Short, in memory, and gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hc", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Hosts:
    """A process with LMCache in it for whoever needs one; one that hangs or died is replaced."""

    def __init__(self) -> None:
        self._free: list[ScenarioProcess] = []

    def take(self) -> ScenarioProcess:
        """One that has it imported."""
        return self._free.pop() if self._free else imported(new_process())

    def give_back(self, process: ScenarioProcess) -> None:
        """It can be used again."""
        self._free.append(process)

    def close(self) -> None:
        """End all that were given back."""
        for process in self._free:
            process.kill()


def run(scenario: Scenario, system: System, hosts: Hosts, seed: int) -> Row:
    """One row; it has a problem where the scenario broke off."""
    load: Load | None = None
    with a_folder() as folder, ExitStack() as held:
        try:
            site = held.enter_context(system.ready(folder, scenario.setup))
            load = Load(
                hosts.take(), site.spec, deadline_s=FUTURE_DEADLINE_S, seed=seed, blind=system.fails_the_run
            )
            load.begin()
            scenario.inject(site, load)
            healed_s = load.healed_after_s(HEAL_DEADLINE_S)
            load.end()
            unsound = load.unsound_keys(HEAL_DEADLINE_S)
            row = row_of(scenario, system, load, healed_s, unsound)
            load.close()
        except Exception:  # noqa: BLE001 - the boundary of a row: whatever it is, it is told, and the rest goes on
            if load is not None:
                load.kill()
            log = (folder / "daemon.log").read_text()[-2000:] if (folder / "daemon.log").exists() else ""
            return Row(scenario.title, system.name, problems=(f"{traceback.format_exc()}\n{log}",))
    hosts.give_back(load.process)
    return row


def row_of(
    scenario: Scenario, system: System, load: Load, healed_s: float | None, unsound: Sequence[str]
) -> Row:
    """The row for what the load counted."""
    report = load.report()
    counts = report["counts"]
    problems = [*report["wrong"], *report["problems"]]
    problems += [f"{key} could not be stored, found and loaded afterwards" for key in unsound]
    problems += ["a future completed twice"] if counts["twice"] else []
    return Row(
        scenario.title,
        system.name,
        futures=sum(counts[f"{kind} done"] for kind in KINDS) + counts["lost"],
        late=counts["late"],
        lost=counts["lost"],
        right=counts["right"],
        missed=counts["load missed"],
        wrong=counts["wrong"],
        slowest_s=report["slowest_s"],
        healed_s=None if unsound else healed_s,
        problems=tuple(problems),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, print rows as they come; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD", help="scenarios with WORD in their title")
    parser.add_argument("--system", choices=[system.name for system in SYSTEMS], help="this one only")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random but the time (default: 1)")
    options = parser.parse_args(arguments)
    systems = [system for system in SYSTEMS if options.system in (None, system.name)]
    scenarios = [scenario for scenario in SCENARIOS if options.only in scenario.title]
    begun = time.monotonic()
    bad: list[Row] = []
    hosts = Hosts()
    print(HEAD, flush=True)
    with started_by(fork_daemon), ExitStack() as held:
        held.callback(hosts.close)
        for scenario in scenarios:
            for row in rows(scenario, systems, hosts, options.seed):
                print(row.markdown(), flush=True)
                for problem in row.problems:
                    print(f"{row.scenario}, {row.system}: {problem}", file=sys.stderr, flush=True)
                is_ours = any(system.name == row.system and system.fails_the_run for system in SYSTEMS)
                bad += [row] if is_ours and not row.is_good else []
            print_others(scenario, systems)
    print(f"\n{len(scenarios)} scenarios in {time.monotonic() - begun:.0f} s, {len(bad)} failed.")
    for row in bad:
        print(f"FAILED: {row.scenario}")
    return 1 if bad else 0


def rows(scenario: Scenario, systems: Sequence[System], hosts: Hosts, seed: int) -> Iterator[Row]:
    """The rows of one scenario, as they come."""
    if not scenario.needs:
        for system in systems:
            if system in scenario.applies_to:
                yield run(scenario, system, hosts, seed)


def print_others(scenario: Scenario, systems: Sequence[System]) -> None:
    """Say where a scenario was not run, and why."""
    if scenario.needs:
        print(f"| {scenario.title} | not run: that takes {scenario.needs} | | | | | | |", flush=True)
        return
    others = [system.name for system in systems if system not in scenario.applies_to]
    if others:
        print(f"| {scenario.title} | {', '.join(others)} | does not apply | | | | | |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
