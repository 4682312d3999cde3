"""What `make safety` does in every cell, in one of them; and that it would see a careless connector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
from safety import run as command
from safety.check import Check, Failed
from safety.checks import CHECKS
from safety.report import markdown, table
from safety.run import SHORT, sentence, with_its_fault
from safety.scene import Cell, Scene, scene

from hypercache_compat.lmcache_scenarios.connector_faults import FAULTS
from hypercache_compat.scenario_process import ScenarioProcess

PAGE = Path(__file__).parents[2] / "docs" / "safety.md"
QUICK = [check for check in CHECKS if not check.is_long]
SEEN = ("sizes-sector", "wrong-size", "key-percent", "staged", "swap-blocks", "stale-layout", "local-only")
"""Checks that are shown to fail here; `make safety ARGS=--prove` shows it of all."""


@pytest.fixture(scope="module")
def where(lmcaches: dict[str, ScenarioProcess]) -> Iterator[Scene]:
    """One daemon and one process with LMCache for all."""

    def other() -> ScenarioProcess:
        raise AssertionError("a second process is for checks that take long")

    with scene(SHORT, lmcaches[SHORT.lmcache], other) as made:
        yield made


def named(check: Check) -> str:
    return check.name


@pytest.mark.parametrize("check", QUICK, ids=named)
def test_it_holds(check: Check, where: Scene) -> None:
    assert sentence(check, where) == ""


@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in SEEN], ids=named)
def test_it_fails_on_a_connector_with_its_fault(check: Check, where: Scene) -> None:
    assert with_its_fault(check, where) == ""


def test_a_check_that_does_not_see_its_fault_is_told(where: Scene) -> None:
    blind = Check("blind", "none", lambda _: None, "Nothing.", "loads say yes")
    assert with_its_fault(blind, where) == "did not see that loads say yes"


# -- the table -------------------------------------------------------------------------------------------


def test_there_are_enough_checks_with_a_name_of_their_own_and_a_fault_that_there_is() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert len(QUICK) >= 40
    assert {check.fault for check in CHECKS} == set(FAULTS)
    assert {check.name for check in CHECKS} >= set(SEEN)


def test_the_page_lists_every_check_and_no_other() -> None:
    listed = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert "\n".join(listed) == markdown(CHECKS)


def test_the_list_is_printed_for_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert capsys.readouterr().out == markdown(CHECKS) + "\n"


# -- the command -----------------------------------------------------------------------------------------


def fail(_: Scene) -> None:
    raise Failed("a wrong byte was given as right")


def break_off(_: Scene) -> None:
    raise OSError("the device is on fire")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda _: None, ""),
        (fail, "a wrong byte was given as right"),
        (break_off, "broke off with OSError: the device is on fire"),
    ],
    ids=["holds", "fails", "breaks off"],
)
def test_a_failure_has_its_sentence_and_makes_the_status_1(
    run: Callable[[Scene], None],
    words: str,
    where: Scene,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trick = Check("a-trick", "none", run, "Nothing.", "loads say yes")

    def in_place(
        _cell: object, checks: Sequence[Check], _processes: object, do: command.Run
    ) -> Iterator[object]:
        yield from ((check, do(check, where)) for check in checks)

    monkeypatch.setattr(command, "CHECKS", (trick,))
    monkeypatch.setattr(command, "run_cell", in_place)
    assert command.main(["--short"]) == bool(words)
    output = capsys.readouterr().out
    assert f"a-trick  {'FAILED' if words else 'passed'}\n" in output
    assert (f"a-trick ({SHORT}): {words}\n" in output) == bool(words)
    assert f"{int(not words)} passed, {int(bool(words))} failed" in output
    assert "\033" not in output  # for nobody looks at it on a terminal


def test_on_a_terminal_failures_are_red() -> None:
    shown = table([CHECKS[0]], [SHORT], {(CHECKS[0], SHORT): "it broke"}, colours=True)
    assert "\033[31mFAILED\033[0m" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "no-such-check"], "there is no check no-such-check; there are sizes-small, "),
        (["--short", "--devices", "4"], "leave it out, or --lmcache, --devices and --tier"),
    ],
    ids=["unknown check", "two choices of cells"],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(options)
    assert words in " ".join(capsys.readouterr().err.split())


def test_without_options_each_release_meets_each_number_of_devices_in_each_tier(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, int, str]] = []

    def noted(
        cell: Cell, checks: Sequence[Check], _processes: object, _run: command.Run
    ) -> Iterator[tuple[Check, str]]:
        ran.append((cell.lmcache, cell.devices, cell.tier))
        yield from ((check, "") for check in checks)

    monkeypatch.setattr(command, "run_cell", noted)
    assert command.main([]) == 0
    assert ran == list(product(("0.5.5", "0.5.6"), (1, 2, 4), ("nvme", "ram")))
    assert f"{12 * len(CHECKS)} passed, 0 failed" in capsys.readouterr().out


def test_a_check_that_is_named_runs_however_long_it_takes() -> None:
    named_one = command.parsed(["--short", "--only", "batch-10000"])
    assert [check.name for check in command.chosen(named_one)] == ["batch-10000"]
    assert command.chosen(command.parsed(["--short"])) == QUICK
    assert command.chosen(command.parsed([])) == list(CHECKS)
