"""What `make failures` and `make soak` do, for some seconds; and that both would see what they look for.

The soak lasts SOAK_SECONDS, 8 unless CI wants more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import failures.__main__ as command
import pytest
from failures import soak
from failures.load import KINDS, Load
from failures.run import Hosts, Row, run
from failures.scenarios import SCENARIOS, Scenario
from failures.systems import FS_NATIVE, HYPERCACHE, SYSTEMS, Setup, Site, System

from hypercache_compat.stopping import STOPPED
from hypercache_compat.waiting import wait_until

SOAK_S = float(os.environ.get("SOAK_SECONDS", "8"))
SOAK_PER_SECOND = 12.0
"""So slow that beside other tests it takes a fifth of a core."""

QUICK = [
    "SIGKILL of the daemon during commits",
    "SIGSTOP for half a deadline, then SIGCONT",
    "a byte flips in each object",
    "the catalog's disk is full",
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """LMCache is imported once for all tests here."""
    made = Hosts()
    yield made
    made.close()


def scenario(title: str) -> Scenario:
    return next(each for each in SCENARIOS if each.title == title)


@pytest.mark.parametrize("title", QUICK)
def test_hypercache_fails_no_future_gives_no_wrong_byte_and_heals(title: str, hosts: Hosts) -> None:
    if scenario(title).needs:  # said by `make failures` too
        title = "nothing goes wrong"
    row = run(scenario(title), HYPERCACHE, hosts, seed=3, around=10)
    assert row.is_good, row
    assert row.right > 0


def test_wrong_bytes_are_seen_where_they_are_loaded_as_good(hosts: Hosts) -> None:
    row = run(
        scenario("a byte flips in each object"), FS_NATIVE, hosts, seed=3, heal_deadline_s=0.5, around=10
    )
    assert row.wrong > 0
    assert row.healed_s is None
    assert not row.is_good
    assert any("no version as a whole" in problem for problem in row.problems)


@pytest.mark.parametrize(
    ("fault", "count"),
    [("forgets", "lost"), ("repeats", "twice"), ("delays", "late"), ("flips", "wrong"), ("keeps", "wrong")],
)
def test_what_a_connector_does_wrong_is_counted(fault: str, count: str, hosts: Hosts) -> None:
    spec = {
        "type": "native_plugin",
        "module_path": "hypercache_compat.unreliable_connector",
        "class_name": "UnreliableConnector",
        "adapter_params": {"fault": fault},
    }
    load = Load(hosts.take(), spec, deadline_s=0.2, keys=6)
    load.begin()
    wait_until(lambda: load.counts()[count] > 0, f"a load that is {count} was counted")
    load.end()
    report = load.report()
    load.close()
    hosts.give_back(load.process)
    assert report["problems"] or report["wrong"]
    assert report["counts"]["right"] > 0


def test_a_scenario_that_breaks_off_is_a_row_with_a_problem(hosts: Hosts) -> None:
    def ready(folder: Path, setup: Setup) -> AbstractContextManager[Site]:
        (folder / "daemon.log").write_text("last words")
        raise RuntimeError("no disks")

    row = run(scenario("nothing goes wrong"), System("broken", ready), hosts, seed=3)
    assert "no disks" in row.problems[0]
    assert "last words" in row.problems[0]
    assert row.markdown() == "| nothing goes wrong | broken | broke off | | | | | |"


_STOPPED = """
import runpy, signal, sys
import failures.run
from failures.systems import Setup
from hypercache_compat.loop_devices import can_make_loop_devices

def run(scenario, system, hosts, seed):
    with failures.run.a_folder() as folder:
        with system.ready(folder, Setup(loop=can_make_loop_devices())) as site:
            print(folder, site.daemon.pid, *site.daemon.options.devices, flush=True)
            signal.pause()

failures.run.run = run
sys.argv[1:] = ["--system", "HyperCache"]
runpy.run_module("failures", run_name="__main__")
"""


def test_a_run_that_is_stopped_leaves_no_daemon_no_device_and_no_folder() -> None:
    path = os.pathsep.join(sys.path)
    words = [sys.executable, "-c", _STOPPED]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    ) as made:
        assert made.stdout is not None
        first = next(line for line in made.stdout if line.startswith("/"))
        folder, daemon, *devices = first.split()
        made.terminate()
    assert made.returncode == STOPPED
    assert not Path(folder).exists()
    assert not Path("/proc", daemon).exists()
    for device in devices:
        backing = Path("/sys/block", Path(device).name, "loop/backing_file")
        assert not (backing.exists() and folder in backing.read_text())


@pytest.mark.timeout(SOAK_S + 120)
def test_a_soak_finds_nothing_wrong_and_nothing_that_grows(hosts: Hosts) -> None:
    process = hosts.take()
    result = soak.soak(process, SOAK_S, SOAK_PER_SECOND, seed=3)
    hosts.give_back(process)
    print(result.text())
    assert result.is_good, result.text()
    assert result.restarts >= 2
    assert result.evictions > 0
    assert result.right > 0


# -- what they would say -------------------------------------------------------------------------------

GOOD = Row("a trick", "HyperCache", futures=9, right=5, missed=1, healed_s=0.25)


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, wrong=1),
        replace(GOOD, late=1),
        replace(GOOD, lost=1),
        replace(GOOD, healed_s=None),
        replace(GOOD, problems=("a future completed twice",)),
    ],
    ids=["wrong", "late", "lost", "not healed", "a problem"],
)
def test_each_thing_that_must_not_be_makes_a_row_bad(bad: Row) -> None:
    assert GOOD.is_good
    assert not bad.is_good


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_only_hypercaches_bad_rows_fail_the_run(
    system: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made_up(scenario: Scenario, ran: object, hosts: Hosts, seed: int) -> Row:
        return replace(GOOD, system="x", wrong=int(ran is system))

    tricks = (
        Scenario("a trick", lambda site, load: None),
        Scenario("our own", lambda site, load: None, applies_to=(HYPERCACHE,)),
        Scenario("an earthquake", lambda site, load: None, needs="a planet"),
    )
    monkeypatch.setattr(command, "run", made_up)
    monkeypatch.setattr(command, "SCENARIOS", tricks)
    assert command.main([]) == int(system is HYPERCACHE)
    output = capsys.readouterr().out
    assert "| a trick | x | 9 | 0 | 5 | 1 | **1** | 0.25 |" in output
    assert "| our own | raw_block, fs_native | does not apply |" in output
    assert "| an earthquake | not run: that takes a planet |" in output


def test_scenarios_are_many_and_have_names_of_their_own() -> None:
    assert len({each.title for each in SCENARIOS}) == len(SCENARIOS) >= 26
    assert set(QUICK) <= {each.title for each in SCENARIOS}
    assert len(KINDS) == 4


@pytest.mark.parametrize(("last", "is_good"), [(10, True), (10 + soak.MORE_DESCRIPTORS, True), (99, False)])
def test_growth_beyond_the_bound_is_seen(last: int, is_good: bool) -> None:
    warm_up = [soak.Footprint(0, 0, 0.0)] * 2
    life = soak.Life(soak.DAEMON, [*warm_up, *[soak.Footprint(10, 1, 0.0)] * 4])
    life.samples += [soak.Footprint(last, 1, 0.0)] * 4
    descriptors, memory = life.growth()
    assert (descriptors.first, descriptors.last, descriptors.most) == (10, last, last)
    assert descriptors.is_good == is_good
    assert soak.Result(growth=[descriptors, memory]).is_good == is_good
    assert soak.most_grown([[descriptors], [soak.Growth("more", 0, 500, 500, 1)]])[0].what == "more"


def test_a_footprint_is_that_of_the_process_that_was_named() -> None:
    before = soak.footprint(os.getpid())
    with open(os.devnull), open(os.devnull):
        assert soak.footprint(os.getpid()).descriptors == before.descriptors + 2
    assert before.memory_bytes > 1 << 20
    assert before.cpu_s > 0
