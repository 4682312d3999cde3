"""What `make failures` and `make soak` do, for some seconds; and that both would see what they look for.

The soak lasts SOAK_SECONDS, 8 unless CI wants more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import failures.__main__ as command
import pytest
from failures import soak
from failures.load import KINDS, Load
from failures.run import Hosts, Row, run
from failures.run import _row as row_of
from failures.scenarios import SCENARIOS, Scenario
from failures.systems import FS_NATIVE, HYPERCACHE, SYSTEMS, Setup, Site, System

from hypercache_compat.daemon_process import DaemonProcess
from hypercache_compat.raw_wire import Message
from hypercache_compat.stopping import STOPPED
from hypercache_compat.waiting import wait_until

SOAK_S = float(os.environ.get("SOAK_SECONDS", "8"))
SOAK_PER_SECOND = 12.0
"""So slow that beside other tests it takes a fifth of a core."""

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
README = Path(__file__).parents[1] / "README.md"
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


class EndedLoad:
    """What is told of a load once it has ended: its counts then, those that come while its keys are stored,
    found and loaded once more, and the keys with which that can't be done."""

    def __init__(self, counts: Mapping[str, int], more: Mapping[str, int], unsound: Sequence[str]) -> None:
        self._counts, self._more, self._unsound = Counter({"load done": 2, **counts}), more, unsound

    def end(self) -> None:
        pass

    def report(self) -> dict[str, Any]:
        return {"counts": self._counts, "wrong": ["k: another byte"] * self._counts["wrong"], "problems": []}

    def unsound_keys(self, _deadline_s: float) -> list[str]:
        return list(self._unsound)

    def counts(self) -> Counter[str]:
        return self._counts + Counter(self._more)


@pytest.mark.parametrize(
    ("counts", "more", "unsound", "problems"),
    [
        ({"right": 2}, {}, [], ()),
        ({"wrong": 1}, {}, [], ("k: another byte",)),
        ({"twice": 1}, {}, [], ("a future completed twice",)),
        ({}, {"wrong": 1}, [], ("1 were wrong afterwards",)),
        ({}, {"late": 2}, [], ("2 were late afterwards",)),
        ({}, {"lost": 1}, [], ("1 were lost afterwards",)),
        ({}, {}, ["k"], ("k could not be stored, found and loaded afterwards",)),
    ],
    ids=["fine", "wrong", "twice", "wrong afterwards", "late", "lost", "a key that does not heal"],
)
def test_what_a_load_tells_is_in_its_row_and_in_a_soak_s_problems(
    counts: Mapping[str, int], more: Mapping[str, int], unsound: list[str], problems: tuple[str, ...]
) -> None:
    load = cast(Load, EndedLoad(counts, more, unsound))
    row = row_of(SCENARIOS[0], HYPERCACHE, load, 0.25, 1.0)
    assert row.problems == problems
    assert row.is_good == (not problems)
    assert (row.futures, row.healed_s) == (2, None if unsound else 0.25)
    result = soak.Result()
    soak._count(load, result)
    assert result.is_good == (not counts.get("wrong"))
    assert (result.futures, result.right, result.wrong) == (2, row.right, row.wrong)


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


def test_the_page_has_a_row_of_each_scenario_with_each_system_that_it_applies_to() -> None:
    table = [
        [cell.strip() for cell in line.split("|")[1:4]]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ") and line.count("|") == 9
    ]
    rows = table[2:]  # below the head
    shown = {title: [row for row in rows if row[0] == title] for title, *_ in rows}
    assert list(shown) == [each.title for each in SCENARIOS]
    assert f"{len(SCENARIOS)} scenarios in " in PAGE.read_text()
    assert f" in {len(SCENARIOS)} scenarios under a load" in README.read_text()
    for each in SCENARIOS:
        ran = [system for system, futures in (row[1:] for row in shown[each.title]) if futures.isdecimal()]
        assert ran == [system.name for system in each.applies_to]
        others = [system.name for system in SYSTEMS if system not in each.applies_to]
        left_out = [row[1:] for row in shown[each.title] if not row[2].isdecimal()]
        assert left_out == ([[", ".join(others), "does not apply"]] if others else [])


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


def pool_with(**parts_bytes: int) -> Site:
    """A site whose daemon says that the blocks of its pool are whose these bytes are, of 10."""
    pool = {f"{part}_bytes": parts_bytes.get(part, 0) for part in soak.PARTS} | {"total_bytes": 10}

    class Told(Site):
        def status(self) -> Message:
            return {"evicted": {"objects": 2}, "pools": {"nvme": pool}}

    daemon = SimpleNamespace(connect=lambda: nullcontext(SimpleNamespace(ask=lambda action: {})))
    return Told({}, Path(), daemon_process=cast(DaemonProcess, daemon))


@pytest.mark.parametrize(("used", "problems"), [(7, 0), (6, 1), (8, 1)], ids=["right", "lost", "twice"])
def test_blocks_that_do_not_add_up_are_a_problem_of_the_soak(used: int, problems: int) -> None:
    result = soak.Result()
    soak._note(pool_with(free=1, used=used, staged=1, quarantined=1), result)
    assert result.evictions == 2
    assert len(result.problems) == problems


@pytest.mark.parametrize(
    ("parts_bytes", "words"),
    [
        ({"free": 10}, []),
        ({"free": 9, "used": 1}, ["all is free after a purge"]),
        ({"free": 9, "staged": 1}, ["what was staged expired", "all is free after a purge"]),
    ],
    ids=["nothing left", "an object that no purge takes", "a staged write that never expires"],
)
def test_blocks_that_never_come_free_are_a_problem_of_the_soak(
    parts_bytes: dict[str, int], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "BLOCKS_AT_REST_S", 0.02)
    result = soak.Result()
    soak._check_blocks(pool_with(**parts_bytes), result)
    assert len(result.problems) == len(words)
    assert all(word in problem for word, problem in zip(words, result.problems, strict=True))
    assert result.is_good == (not words)


@pytest.mark.parametrize(("left", "problems"), [(0, 0), (-2, 0), (1, 1)])
def test_a_descriptor_that_stays_open_is_a_problem_of_the_soak(left: int, problems: int) -> None:
    result = soak.Result()
    soak.check_closed(20, 20 + left, result)
    assert len(result.problems) == problems


def test_a_footprint_is_that_of_the_process_that_was_named() -> None:
    before = soak.footprint(os.getpid())
    with open(os.devnull), open(os.devnull):
        assert soak.footprint(os.getpid()).descriptors == before.descriptors + 2
    assert before.memory_bytes > 1 << 20
    assert before.cpu_s > 0
