"""`hypercache-compat` as an operator runs it: a sound daemon passes, a fault is named with useful words."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hypercache_compat.altered_replies import Altered, Fields
from hypercache_compat.cli import main
from hypercache_compat.conformance.suite import CHECKS, PREFIX, Outcome, run
from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, running_daemon
from hypercache_compat.grease import FEATURE, greased
from hypercache_compat.raw_wire import RawConnection, fetch, store
from hypercache_compat.relay import FROM_CLIENT, relaying
from hypercache_compat.seeded_faults import FAULTS
from hypercache_compat.stub_daemon import stub_daemon
from hypercache_protocol.fields import MIB
from hypercache_protocol.versions import RELEASED, WireVersion

WHOLE_RUNS = (
    "a field is renamed",
    "a chunk is dropped",
    "replies are shifted by one",
    "a status word is changed",
    "a number is a string",
    "checksums are swapped",
    "the generation does not grow",
    "stage_id is ignored",
    "unknown fields are refused",
    "an unknown action ends the connection",
    "locate tells no sync_status",
    "a bitmap is off by one",
)
"""Faults that are looked for with the whole suite; the others with the check that is about them."""

Json = dict[str, Any]


def check(capsys: pytest.CaptureFixture[str], socket_path: str, *more: str) -> tuple[int, str]:
    """The exit status and what is printed."""
    status = main(["check", "--socket", socket_path, "--quiet", *more])
    return status, capsys.readouterr().out


def outcomes(report: Json) -> dict[str, str]:
    return {each["name"]: each["outcome"] for each in report["checks"]}


# -- sound daemons -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", list(map(str, RELEASED)))
def test_a_sound_daemon_passes_and_what_came_later_than_its_wire_is_not_offered(
    wire: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_daemon(DaemonOptions(extra=("--wire", wire))) as held:
        status, out = check(capsys, held.socket_path, "--format", "json")
    report = json.loads(out)
    absent = {
        each.name for each in CHECKS if str(each.since) > wire or each.empties_cache or each.needs_restart
    }
    assert outcomes(report) == {
        each.name: "not offered" if each.name in absent else "passed" for each in CHECKS
    }
    assert report["wire"] == wire
    assert report["left_behind"] == []
    assert status == 0


def test_a_daemon_without_the_c_unpacker_passes_and_takes_no_more_memory_over_hostile_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MSGPACK_PUREPYTHON", "1")
    usual = [each for each in CHECKS if each.name.startswith(("hello", "frames", "batches", "sessions"))]
    with running_daemon(DaemonOptions(new_interpreter=True)) as own:
        assert run(own.socket_path, checks=usual).conforms
        before_bytes = own.peak_memory_bytes()
        report = run(own.socket_path, checks=[each for each in CHECKS if each.name.startswith("hostile")])
        assert own.peak_memory_bytes() - before_bytes < 16 * MIB
    assert {each.outcome for each in report.results} == {Outcome.PASSED}


def test_a_daemon_that_answers_frames_in_another_order_passes(daemon: DaemonProcess) -> None:
    moved: list[int] = []

    def backwards(frames: list[bytes]) -> list[bytes]:
        moved.append(len(frames) - 1)
        return frames[::-1]

    path = str(daemon.folder / "f")
    with relaying(path, daemon.socket_path, lambda _: Altered(in_order=backwards)):
        report = run(path)
    assert [each for each in report.results if each.outcome is Outcome.FAILED] == []
    assert max(moved) > 10, "hardly anything was in another order"


def test_a_daemon_of_the_future_that_says_more_passes(daemon: DaemonProcess) -> None:
    path = str(daemon.folder / "f")
    with relaying(path, daemon.socket_path, lambda _: Altered(on_reply=lambda _, reply: greased(reply))):
        report = run(path)
    assert FEATURE in report.offer.features
    assert [each for each in report.results if each.outcome is Outcome.FAILED] == []


def test_a_wire_that_is_asked_for_and_not_spoken_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with running_daemon(DaemonOptions(extra=("--wire", "1.1"))) as held:
        assert main(["check", "--socket", held.socket_path, "--wire", "2.0"]) == 1
    out, progress = capsys.readouterr()
    assert progress.splitlines()[-1].endswith(" checks, 1 failed")
    assert "it speaks wire 1.1 and 2.0 was asked for" in out
    assert "check it with --wire 1.1" in out
    assert '2 > {"action": "hello", "versions": ["1.0"' in out
    assert '2 < {"status":"ERROR","error_message":"unknown action \'hello\'' in out


def test_nothing_later_than_the_wire_that_is_asked_for_is_checked(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = check(capsys, daemon.socket_path, "--wire", "1.0", "--format", "json")
    names = {each.name for each in CHECKS if each.since == WireVersion(1, 0)}
    assert outcomes(json.loads(out)).keys() == names | {"wire.spoken"}
    assert status == 0


def test_what_others_stored_is_untouched_and_nothing_stays(daemon: DaemonProcess, raw: RawConnection) -> None:
    uri, data = f"{PREFIX}of-somebody-else", b"kept" * 1000
    store(raw, uri, data)
    before = raw.ask("get_status")["objects"]
    said: list[bytes] = []
    with heard(daemon, said) as path:
        run(path)
    assert any(b"stage_many" in part for part in said), "the relay heard nothing of it"
    assert not any(b'"purge"' in part or b"\xa5purge" in part for part in said)
    whole = b"".join(said)
    uris = re.findall(rb'"uri": ?"([^"]*)', whole) + re.findall(rb"hypercache://[^/]*/", whole)
    assert {uri[: len(PREFIX)] for uri in uris} == {b"hypercache://hypercache-compat/"}, (
        "all names are its own"
    )
    assert raw.ask("get_status")["objects"] == before
    assert fetch(raw, uri) == data


class _Heard:
    def __init__(self, said: list[bytes]) -> None:
        self.said = said

    def passed(self, side: str, data: bytes) -> bytes:
        if side == FROM_CLIENT:
            self.said.append(data)
        return data


@contextmanager
def heard(daemon: DaemonProcess, said: list[bytes]) -> Iterator[str]:
    """A relay's socket; `said` gets what clients say."""
    path = str(daemon.folder / "h")
    with relaying(path, daemon.socket_path, lambda _: _Heard(said)):
        yield path


def test_nothing_reaches_a_backend(tmp_path: Path) -> None:
    with running_daemon(DaemonOptions(backend=tmp_path.as_uri())) as own:
        report = run(own.socket_path)
        assert own.stop() == 0
    assert report.conforms, [each for each in report.results if each.is_fatal]
    assert list(tmp_path.iterdir()) == []


def test_devices_that_cannot_be_opened_are_no_failure(daemon: DaemonProcess) -> None:
    def elsewhere(_: Fields, reply: Fields) -> Fields:
        return json.loads(json.dumps(reply).replace(str(daemon.folder), "/nowhere")) if reply else reply

    path = str(daemon.folder / "f")
    (about,) = [each for each in CHECKS if each.name == "write.bytes-come-back"]
    with relaying(path, daemon.socket_path, lambda _: Altered(on_reply=elsewhere)):
        (result,) = run(path, checks=[about]).results
    assert result.outcome is Outcome.NOT_OFFERED
    assert result.reason.startswith("/nowhere/pool/device-")


def test_purge_is_checked_only_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with running_daemon() as own, own.connect() as raw:
        store(raw, "hypercache://purged", b"x")
        status, out = check(capsys, own.socket_path, "--wire", "1.0", "--with-purge", "--format", "json")
        assert raw.ask("locate", uri="hypercache://purged", auto_ingest=False)["status"] == "MISS"
    assert outcomes(json.loads(out))["purge"] == "passed"
    assert status == 0


# -- faulty daemons ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE_RUNS)
def test_a_fault_ends_with_status_1_and_the_check_that_it_breaks_says_so(
    daemon: DaemonProcess, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = FAULTS[name]
    path = str(daemon.folder / "f")
    with relaying(path, daemon.socket_path, fault.passages()):
        status, out = check(capsys, path, "--format", "json", "--timeout", "5")
    report = json.loads(out)
    failed = {each["name"]: each for each in report["checks"] if each["outcome"] == "failed"}
    assert fault.words in failed[fault.check]["seen"]
    assert failed[fault.check]["means"] == next(each.means for each in CHECKS if each.name == fault.check)
    assert {piece["from"] for piece in failed[fault.check]["exchange"]} == {"client", "daemon"}
    assert len(failed) < len(CHECKS) // 2, "so much fails that nothing is named"
    assert not report["conforms"]
    assert status == 1


@pytest.mark.parametrize("name", sorted(FAULTS.keys() - set(WHOLE_RUNS)))
def test_a_fault_is_named_by_the_check_for_it(daemon: DaemonProcess, name: str) -> None:
    fault = FAULTS[name]
    path = str(daemon.folder / "f")
    (about,) = [each for each in CHECKS if each.name == fault.check]
    with relaying(path, daemon.socket_path, fault.passages()):
        report = run(path, checks=[about], timeout_s=5.0, may_purge=True, restart=daemon.restart)
    (result,) = report.results
    assert result.outcome is Outcome.FAILED
    assert fault.words in result.reason
    assert report.conforms is not about.required


def test_each_check_has_a_fault_that_it_names() -> None:
    assert {fault.check for fault in FAULTS.values()} == {each.name for each in CHECKS}


def test_what_a_daemon_does_not_remove_is_told(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(daemon.folder / "f")
    with relaying(path, daemon.socket_path, FAULTS["evict removes nothing"].passages()):
        _, out = check(capsys, path, "--wire", "1.0")
    assert "Could not be removed, and is left in the cache:\n  hypercache://hypercache-compat/" in out


# -- no daemon -----------------------------------------------------------------------------------------


def test_no_daemon_is_status_2_and_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--socket", str(tmp_path / "none")]) == 2
    assert "none cannot be connected to: No such file or directory" in capsys.readouterr().err


def test_a_daemon_that_lets_nobody_in_is_status_2_and_its_own_words(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    def turn_away(peer: socket.socket) -> None:
        peer.sendall(b'{"status":"ERROR","error_message":"not you\\u001b[31m"}\n')
        peer.shutdown(socket.SHUT_WR)

    path = str(daemon.folder / "away")
    with stub_daemon(path, turn_away):
        assert main(["check", "--socket", path, "--quiet"]) == 2
    out, error = capsys.readouterr()
    assert (out, error) == (
        "",
        f"hypercache-compat: {path} does not let this client in: not you\\x1b[31m\n",
    )


def test_what_never_answers_is_given_up(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(daemon.folder / "mute")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(path)
        mute.listen()
        assert main(["check", "--socket", path, "--timeout", "0.2"]) == 2
    assert "does not answer a ping: no answer came within 0.2 s" in capsys.readouterr().err


def test_a_daemon_that_trickles_its_answer_is_late_all_the_same(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    def trickle(peer: socket.socket) -> None:
        never = threading.Event()
        while not never.wait(0.05):
            peer.sendall(b" ")

    path = str(daemon.folder / "slow")
    with stub_daemon(path, trickle):
        assert main(["check", "--socket", path, "--timeout", "0.5"]) == 2
    assert "no answer came within 0.5 s" in capsys.readouterr().err


def test_a_daemon_that_answers_everything_with_pong_fails_and_the_run_ends(daemon: DaemonProcess) -> None:
    path = str(daemon.folder / "pong")
    with stub_daemon(path, lambda peer: peer.sendall(b'{"status":"PONG"}\n')):
        report = run(path, timeout_s=5.0)
    passed = {each.check.name for each in report.results if each.outcome is Outcome.PASSED}
    assert "ping" in passed
    assert not passed & {"locate.hit", "write.commit", "transport.replies-in-order", "error.shape"}


# -- the checks themselves -----------------------------------------------------------------------------


def test_every_check_has_a_name_of_its_own_and_an_explanation() -> None:
    assert len({each.name for each in CHECKS}) == len(CHECKS)
    for each in CHECKS:
        assert each.what.endswith("."), each.name
        assert len(each.means) > 30, each.name
