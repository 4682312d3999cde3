"""One scenario with one system: the row that it gives, and the processes that it takes."""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypercache_compat.scenario_process import ScenarioProcess

from .load import KINDS, Load, imported, new_process
from .scenarios import Scenario
from .systems import System

FUTURE_DEADLINE_S = 8.0
"""Two or three exchanges with the daemon and one transfer (see systems.py), and some room."""
HEAL_DEADLINE_S = 15.0
AROUND = 80
"""How many futures complete before something goes wrong, and again after it has healed."""


@dataclass(frozen=True)
class Row:
    """What came of a scenario with one system. `problems` are what must not be, in words."""

    scenario: str
    system: str
    futures: int = 0
    late: int = 0
    lost: int = 0
    right: int = 0
    missed: int = 0
    wrong: int = 0
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


class Hosts:
    """A process with LMCache in it for whoever needs one; importing LMCache takes seconds."""

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


@contextmanager
def a_folder() -> Iterator[Path]:
    """Short, in memory, and gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hc", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(
    scenario: Scenario,
    system: System,
    hosts: Hosts,
    seed: int,
    *,
    heal_deadline_s: float = HEAL_DEADLINE_S,
    around: int = AROUND,
) -> Row:
    """The row; it has a problem where the scenario broke off."""
    with a_folder() as folder, ExitStack() as held:
        load: Load | None = None
        try:
            site = held.enter_context(system.ready(folder, scenario.setup))
            # The others are read as LMCache does it: what is not locked may be replaced while it is read.
            blind = system.fails_the_run
            load = Load(hosts.take(), site.spec, deadline_s=FUTURE_DEADLINE_S, seed=seed, blind=blind)
            load.begin()
            load.proceed(around)
            scenario.inject(site, load)
            healed_s = load.healed_after_s(heal_deadline_s)
            load.proceed(around)
            row = _row(scenario, system, load, healed_s, heal_deadline_s)
            load.close()
        except BaseException as error:  # Ctrl-C too: the load must not go on alone
            if load is not None:
                load.kill()
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            return Row(scenario.title, system.name, problems=(f"{traceback.format_exc()}\n{_log(folder)}",))
    hosts.give_back(load.process)
    return row


def _row(
    scenario: Scenario, system: System, load: Load, healed_s: float | None, heal_deadline_s: float
) -> Row:
    load.end()
    report = load.report()
    unsound = load.unsound_keys(heal_deadline_s)
    counts, counts_in_the_end = report["counts"], load.counts()
    problems = [*report["wrong"], *report["problems"]]
    problems += [f"{key} could not be stored, found and loaded afterwards" for key in unsound]
    problems += ["a future completed twice"] if counts["twice"] else []
    for what in ("wrong", "late", "lost"):
        more = counts_in_the_end[what] - counts[what]
        problems += [f"{more} were {what} afterwards"] if more else []
    return Row(
        scenario.title,
        system.name,
        futures=sum(counts[f"{kind} done"] for kind in KINDS) + counts["lost"],
        late=counts["late"],
        lost=counts["lost"],
        right=counts["right"],
        missed=counts["load missed"],
        wrong=counts["wrong"],
        healed_s=None if unsound else healed_s,
        problems=tuple(problems),
    )


def _log(folder: Path) -> str:
    log = folder / "daemon.log"
    return log.read_text()[-2000:] if log.exists() else ""
