"""`hypercache-compat check --restart-with`: what a restart keeps and forgets, with the operator's command."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hypercache_compat.cli import main
from hypercache_compat.conformance.restarts import restart_with
from hypercache_compat.conformance.shell import CheckFailed
from hypercache_compat.conformance.suite import CHECKS
from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, running_daemon

DEADLINE_S = 30.0


@contextmanager
def supervised(daemon: DaemonProcess, pid_file: Path) -> Iterator[str]:
    """The daemon is started again whenever it ends, as an init system would; gives a command that ends it."""
    is_over = threading.Event()

    def supervise() -> None:
        while not is_over.wait(0.02):
            if not daemon.is_running():
                daemon.start()
                pid_file.write_text(str(daemon.pid))

    pid_file.write_text(str(daemon.pid))
    thread = threading.Thread(target=supervise)
    thread.start()
    try:
        # Until the supervisor has noted the new process a signal goes to the old one, and is repeated.
        yield f"until kill -TERM $(cat {pid_file}); do sleep 0.05; done"
    finally:
        is_over.set()
        thread.join(DEADLINE_S)


@pytest.mark.parametrize("wire", ["1.0", "2.0"])
def test_a_restart_with_the_operators_command_passes(
    wire: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        running_daemon(DaemonOptions(extra=("--wire", wire))) as own,
        supervised(own, tmp_path / "pid") as command,
    ):
        words = ["--wire", wire, "--quiet", "--format", "json", "--restart-with", command]
        status = main(["check", "--socket", own.socket_path, *words])
        pid = own.pid
    report = json.loads(capsys.readouterr().out)
    asked = {each.name for each in CHECKS if each.needs_restart and str(each.since) <= wire}
    assert {each["name"]: each["outcome"] for each in report["checks"] if each["name"] in asked} == (
        dict.fromkeys(asked, "passed")
    )
    assert report["left_behind"] == []
    assert status == 0
    assert (tmp_path / "pid").read_text() == str(pid), "it runs under the supervisor to the end"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("true", "'true' did not end the daemon: a connection to it is still open"),
        ("echo no rights >&2; exit 3", "ended with status 3: no rights"),
        ("exit 4", "'exit 4' ended with status 4: it said nothing"),
        ("exec sleep 30", "did not end within 0.3 s"),
    ],
)
def test_a_command_that_restarts_nothing_is_told(daemon: DaemonProcess, command: str, told: str) -> None:
    with pytest.raises(CheckFailed) as failure:
        restart_with(command, daemon.socket_path, timeout_s=0.3)
    assert told in str(failure.value)
    assert str(failure.value).endswith("the check ends here, and what a restart does was not seen")


def test_a_daemon_that_does_not_come_back_is_told() -> None:
    with (
        running_daemon() as own,
        pytest.raises(CheckFailed, match="no daemon answered within 1 s after 'kill"),
    ):
        restart_with(f"kill -KILL {own.pid}", own.socket_path, timeout_s=1.0)
