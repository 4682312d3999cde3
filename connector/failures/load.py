"""A verified load in a process with LMCache in it, as the process that makes things fail sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hypercache_compat.lmcache_versions import lmcache_process
from hypercache_compat.releases import LMCACHE_IN_ENVIRONMENT
from hypercache_compat.scenario_process import ScenarioProcess
from hypercache_compat.waiting import wait_until

KINDS = ("store", "load", "lookup", "delete")


class Load:
    """What goes on in the process; every method but `kill` asks it.

    Args:
        process: one that LMCache is or will be imported in.
        spec: the adapter, as LMCache's configuration describes it.
        settings: see `verified_load.Settings`.
    """

    def __init__(self, process: ScenarioProcess, spec: Mapping[str, object], **settings: object) -> None:
        self.process = process
        self._spec = spec
        self._settings = settings
        self._before: Counter[str] = Counter()
        self._wrong_before: list[str] = []

    def begin(self) -> None:
        """Create the adapter, begin, and wait until each kind succeeded."""
        self._ask("start", spec=self._spec, settings=self._settings)
        self.wait_for_all_kinds()

    def wait_for_all_kinds(self) -> None:
        """Until each kind succeeded once more."""
        self._ask("mark")
        wait_until(lambda: len(self._since_mark()) == len(KINDS), "each kind of operation succeeded")

    def proceed(self, futures: int = 40) -> None:
        """Until so many more futures completed, whatever came of them."""
        want = self._done() + futures
        wait_until(lambda: self._done() >= want, f"{futures} more futures completed")

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Meanwhile it stores ever more keys; at the end they are deleted."""
        self._ask("fill", filling=True)
        yield
        self._ask("fill", filling=False)
        wait_until(lambda: self.report()["fillers"] == 0, "the further keys were deleted")

    @contextmanager
    def stores_failing(self) -> Iterator[None]:
        """Raise AssertionError where no store failed meanwhile: then nothing went wrong that should have."""
        before = self._failed_stores()
        yield
        wait_until(lambda: self._failed_stores() > before, "a store failed")

    def healed_after_s(self, deadline_s: float) -> float | None:
        """How long from now on it takes until each kind succeeded again; None where it is longer."""
        self._ask("mark")
        try:
            wait_until(lambda: len(self._since_mark()) == len(KINDS), "all was well again", deadline_s)
        except AssertionError:
            return None
        return max(self._since_mark().values())

    def end(self) -> None:
        """Begin nothing more, and wait for what is on its way."""
        self._ask("end")

    def unsound_keys(self, deadline_s: float) -> list[str]:
        """The keys that can't be stored, found and loaded by then; after `end`."""
        unsound: list[str] = self._ask("heal", deadline_s=deadline_s)
        return unsound

    def close(self) -> None:
        """Close the adapter; the process can take another load."""
        self._ask("close")

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()

    def succeed_in(self, process: ScenarioProcess) -> None:
        """Kill the process and go on in another one, with the same keys; it knows nothing of them."""
        report = self.report()
        self.kill()
        self._before, self._wrong_before = Counter(report["counts"]), report["wrong"]
        self.process = process
        self._settings = {**self._settings, "first_version": 1 << 32}

    def report(self) -> dict[str, Any]:
        """All figures, see `verified_load.figures`."""
        report: dict[str, Any] = self._ask("figures")
        report["counts"] = self._before + Counter(report["counts"])
        report["wrong"] = self._wrong_before + report["wrong"]
        return report

    def counts(self) -> Counter[str]:
        """The counts of it."""
        counts: Counter[str] = self.report()["counts"]
        return counts

    def _done(self) -> int:
        counts = self.counts()
        return sum(counts[f"{kind} done"] for kind in KINDS) + counts["lost"]

    def _failed_stores(self) -> int:
        counts = self.counts()
        return counts["store done"] - counts["store good"]

    def _since_mark(self) -> dict[str, float]:
        since: dict[str, float] = self.report()["since_mark"]
        return since

    def _ask(self, what: str, **arguments: object) -> Any:
        return self.process.call(f"verified_load.{what}", **arguments)


def new_process() -> ScenarioProcess:
    """One that imports LMCache while others go on with their work."""
    process = lmcache_process(LMCACHE_IN_ENVIRONMENT)
    process.begin("adapter.version")
    return process


def imported(process: ScenarioProcess) -> ScenarioProcess:
    """The same, once it has."""
    process.result()
    return process
