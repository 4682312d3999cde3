"""A check that fails, hangs or is stopped leaves nothing of its own in the cache, or says what it left."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from hypercache_compat.altered_replies import Altered, Fields
from hypercache_compat.cli import main
from hypercache_compat.conformance import suite
from hypercache_compat.conformance.checks import Bench, Check, store
from hypercache_compat.conformance.shell import Connection
from hypercache_compat.conformance.suite import CHECKS, Interrupted, run
from hypercache_compat.daemon_process import DaemonProcess, running_daemon
from hypercache_compat.raw_wire import RawConnection
from hypercache_compat.relay import FROM_DAEMON, relaying
from hypercache_compat.seeded_faults import FAULTS

DEADLINE_S = 30.0
MEANS = "This is only a test of how checks end."


class FallsSilent(Altered):
    """Keeps back what the daemon says once it has committed what a check about locate wrote."""

    def __init__(self, is_silent: threading.Event) -> None:
        super().__init__(on_reply=self._on_commit)
        self._is_silent = is_silent
        self._is_mine = False

    def _on_commit(self, request: Fields, reply: Fields) -> Fields:
        if request.get("action") == "commit_write" and "/locate.hit/" in request.get("uri", ""):
            self._is_mine = not self._is_silent.is_set()
            self._is_silent.set()
        return reply

    def passed(self, side: str, data: bytes) -> bytes:
        out = super().passed(side, data)
        return b"" if self._is_mine and side == FROM_DAEMON else out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_check_that_is_stopped_while_it_waits_removes_what_it_wrote(
    daemon: DaemonProcess, raw: RawConnection, number: signal.Signals
) -> None:
    before = raw.ask("get_status")["objects"]
    is_silent = threading.Event()
    path = str(daemon.folder / "silent")
    words = [sys.executable, "-m", "hypercache_compat.cli", "check", "--socket", path, "--timeout", "25"]
    with (
        relaying(path, daemon.socket_path, lambda _: FallsSilent(is_silent)),
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert is_silent.wait(DEADLINE_S)
        assert raw.ask("get_status")["objects"] == before + 1
        process.send_signal(number)
        out, said = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (130, "")
    assert said.endswith("hypercache-compat: stopped\n")
    assert raw.ask("get_status")["objects"] == before


def _stopped_amid(bench: Bench) -> None:
    """A check is stopped."""
    store(bench.connect(), bench.uri("mine"), 10)
    raise KeyboardInterrupt


STOPPED = [Check("stopped", _stopped_amid, MEANS)]


def _broken(bench: Bench) -> None:
    """A check has a fault of its own."""
    store(bench.connect(), bench.uri("mine"), 10)
    raise ValueError("this was not foreseen")


def test_a_check_with_a_fault_of_its_own_fails_in_words_and_leaves_nothing(
    daemon: DaemonProcess, raw: RawConnection
) -> None:
    before = raw.ask("get_status")["objects"]
    report = run(daemon.socket_path, checks=[Check("broken", _broken, MEANS)])
    assert [each.reason for each in report.results] == [
        "the check cannot go on: ValueError: this was not foreseen"
    ]
    assert not report.conforms
    assert report.left_behind == []
    assert raw.ask("get_status")["objects"] == before


def test_whatever_fails_nothing_stays(daemon: DaemonProcess, raw: RawConnection) -> None:
    before = raw.ask("get_status")["objects"]
    path = str(daemon.folder / "f")
    with relaying(path, daemon.socket_path, FAULTS["a status word is changed"].passages()):
        report = run(path, checks=[each for each in CHECKS if each.name == "pin"])
    assert not report.conforms
    assert report.left_behind == []
    assert raw.ask("get_status")["objects"] == before


def test_being_stopped_amid_the_cleaning_does_not_end_it(
    daemon: DaemonProcess, raw: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = raw.ask("get_status")["objects"]
    asked: list[str] = []
    remove = suite._remove

    def stopped_once(connection: Connection, uri: str) -> bool:
        asked.append(uri)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return remove(connection, uri)

    monkeypatch.setattr(suite, "_remove", stopped_once)
    with pytest.raises(Interrupted) as stop:
        run(daemon.socket_path, checks=STOPPED)
    assert stop.value.left_behind == []
    assert raw.ask("get_status")["objects"] == before


def test_what_a_stopped_run_leaves_is_told(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped_again(connection: Connection, uri: str) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "_remove", stopped_again)
    monkeypatch.setattr("hypercache_compat.cli.run", lambda path, **_: run(path, checks=STOPPED))
    assert main(["check", "--socket", daemon.socket_path, "--quiet"]) == 130
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == ["hypercache-compat: stopped", "Could not be removed, and is left in the cache:"]
    assert [line.endswith("/stopped/mine") for line in told[2:]] == [True]


def test_a_daemon_that_dies_amid_the_run_fails_the_rest_in_words() -> None:
    def dies(bench: Bench) -> None:
        """A daemon dies."""
        own.kill()

    with running_daemon() as own:
        checks = [Check("dies", dies, MEANS), *(each for each in CHECKS if each.name == "locate.hit")]
        report = run(own.socket_path, checks=checks)
    (_, after) = report.results
    assert after.reason.startswith("the connection broke: ")
    assert not report.conforms
