"""What `hypercache-compat check` prints: for people and programs, whatever the daemon said."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from xml.etree import ElementTree as Xml

import pytest

from hypercache_compat.altered_replies import Altered, Fields
from hypercache_compat.cli import Progress, has_colours, main
from hypercache_compat.conformance.report import as_json, as_junit, as_markdown, as_table, painted
from hypercache_compat.conformance.suite import CHECKS, Outcome, Report, Result, run
from hypercache_compat.daemon_process import DaemonProcess
from hypercache_compat.relay import relaying
from hypercache_compat.seeded_faults import FAULTS
from hypercache_compat.stub_daemon import stub_daemon
from hypercache_protocol.versions import WireVersion

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def faulty_report(daemon: DaemonProcess) -> Report:
    """A report with failures in it."""
    path = str(daemon.folder / "r")
    with relaying(path, daemon.socket_path, FAULTS["a field is renamed"].passages()):
        return run(path, wanted=WireVersion(1, 0))


def test_the_table_shows_what_was_seen_what_it_means_and_the_bytes(faulty_report: Report) -> None:
    table = as_table(faulty_report)
    part = table.split("\nlocate.hit failed\n")[1].split("\n\n")[0]
    assert "seen      the reply to locate: the field 'object_size' is missing; no client can read" in part
    assert "the check ends here" in part
    assert "Do not run this daemon" in " ".join(part.split())
    assert '1 > {"action":"locate"' in part
    assert '1 < {"status": "HIT"' in part
    assert "The daemon does not conform: " in table


def test_junit_is_xml_that_counts_what_failed(faulty_report: Report) -> None:
    suite = Xml.fromstring(as_junit(faulty_report))
    failures = suite.findall("testcase/failure")
    assert len(failures) == int(suite.attrib["failures"]) > 0
    assert len(suite.findall("testcase")) == int(suite.attrib["tests"])
    assert any("'object_size' is missing" in failure.attrib["message"] for failure in failures)
    assert any("Do not run this daemon" in " ".join((failure.text or "").split()) for failure in failures)


def test_every_format_has_the_words_and_the_bytes_of_each_failure(faulty_report: Report) -> None:
    failed = [each for each in faulty_report.results if each.outcome is Outcome.FAILED]
    texts = [as_table(faulty_report), as_markdown(faulty_report)]
    texts += [_junit_text(faulty_report), _json_text(faulty_report)]
    for text in texts:
        joined = " ".join(text.split())
        for each in failed:
            assert each.reason in joined
            assert each.check.means in joined
        assert '{"status": "HIT"' in joined, "the bytes of the daemon"


def _junit_text(report: Report) -> str:
    suite = Xml.fromstring(as_junit(report))
    return " ".join(each.text or "" for kind in ("failure", "skipped") for each in suite.iter(kind))


def _json_text(report: Report) -> str:
    failed = [each for each in json.loads(as_json(report))["checks"] if each["outcome"] == "failed"]
    pieces = [piece["bytes"] for each in failed for piece in each["exchange"]]
    return " ".join([*(each["seen"] + " " + each["means"] for each in failed), *pieces])


def test_markdown_has_a_row_for_each_check(faulty_report: Report) -> None:
    text = as_markdown(faulty_report)
    for each in faulty_report.results:
        assert f"| {each.check.name} | {each.check.since} |" in text
    assert "## locate.hit\n" in text


def test_what_is_not_required_fails_and_the_daemon_conforms_all_the_same(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(daemon.folder / "f")
    with relaying(path, daemon.socket_path, lambda _: Altered(on_reply=_without_codes)):
        assert main(["check", "--socket", path, "--wire", "1.1", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "error.codes failed (not required)" in out
    assert "The daemon conforms: " in out


def _without_codes(_: Fields, reply: Fields) -> Fields:
    return {name: value for name, value in reply.items() if name != "error_code"}


def test_colours_are_for_terminals_only(daemon: DaemonProcess, faulty_report: Report) -> None:
    words = [sys.executable, "-m", "hypercache_compat.cli", "check", "--socket", daemon.socket_path]
    words += ["--wire", "1.0"]
    piped = subprocess.run(words, capture_output=True, timeout=DEADLINE_S, check=True)
    assert b"\x1b" not in piped.stdout + piped.stderr
    assert b"checks, 0 failed" in piped.stderr
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    assert b"\x1b[32m" in on_terminal(words, environment | {"TERM": "xterm"})
    assert b"\x1b[32m" not in on_terminal(words, environment | {"TERM": "xterm", "NO_COLOR": "1"})
    assert "\x1b[31m" in as_table(faulty_report, painted)


class Terminal(StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


def shown(stream: StringIO, *, is_quiet: bool = False) -> str:
    """What is written of the progress of 20 checks, of which the second fails."""
    with Progress(stream, is_quiet=is_quiet) as progress:
        for number, check in enumerate(CHECKS[:20], 1):
            outcome = Outcome.FAILED if number == 2 else Outcome.PASSED
            progress.show(number, 20, Result(check, outcome))
    return stream.getvalue()


def test_progress_is_one_line_on_a_terminal_and_a_line_a_tenth_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    tenths = [f"{number} of 20 checks, 1 failed" for number in range(2, 21, 2)]
    assert shown(StringIO()).splitlines() == tenths
    steps = shown(Terminal()).split("\r\x1b[K")
    assert len(steps) == 22, "what was there before is written over 20 times, and at last wiped away"
    assert steps[2] == f"2 of 20 checks, 1 failed: {CHECKS[1].name}"
    assert (steps[0], steps[-1]) == ("", "")
    assert shown(Terminal(), is_quiet=True) == shown(StringIO(), is_quiet=True) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert shown(Terminal()).splitlines() == tenths


@pytest.mark.parametrize(
    ("term", "no_color", "has"), [("xterm", "", True), ("xterm", "1", False), ("dumb", "", False)]
)
def test_a_terminal_has_colours_unless_it_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, term: str, no_color: str, has: bool
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_color)
    assert has_colours(Terminal()) is has
    assert not has_colours(StringIO())


def on_terminal(words: list[str], environment: dict[str, str]) -> bytes:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.DEVNULL, env=environment
    ):
        os.close(theirs)
        out = b""
        try:
            while data := os.read(ours, 65536):
                out += data
        except OSError:  # how a terminal says that its other end is closed
            pass
        finally:
            os.close(ours)
    return out


# -- what a daemon says is not trusted -----------------------------------------------------------------

ODD = "\x1b[31m é 漢 | ``` \x00 \u202e]]> <b>"
"""What a terminal, Markdown or XML would take for more than letters."""

ODDER = f"{ODD} \ud800"
"""The same, and what UTF-8 has no bytes for: wire 1's readers refuse it, but not that of the first ping."""


@pytest.fixture(scope="module")
def odd_socket(daemon: DaemonProcess) -> Iterator[str]:
    """Where each request is answered with an error of odd letters."""
    path = str(daemon.folder / "odd")
    line = json.dumps({"status": "ERROR", "error_message": ODD, "daemon": ODD}).encode() + b"\n"
    with stub_daemon(path, lambda peer: peer.sendall(line)):
        yield path


@pytest.fixture(scope="module")
def odd_report(odd_socket: str) -> Report:
    report = run(odd_socket, timeout_s=0.5)
    assert report.offer.daemon == ODD
    return replace(report, offer=replace(report.offer, daemon=ODDER))


def test_no_command_for_a_terminal_reaches_one(odd_report: Report) -> None:
    for text in (as_table(odd_report), as_markdown(odd_report), as_junit(odd_report), as_json(odd_report)):
        assert [letter for letter in text if not (letter.isprintable() or letter == "\n")] == []
    assert "\\x1b[31m" in as_table(odd_report)


def test_json_and_xml_are_whole_whatever_a_daemon_says(odd_report: Report) -> None:
    told = json.loads(as_json(odd_report))
    assert told["daemon"] == ODDER
    assert any(ODD in each.get("seen", "") for each in told["checks"])
    suite = Xml.fromstring(as_junit(odd_report))
    assert any("\\x1b[31m" in failure.attrib["message"] for failure in suite.iter("failure"))


def test_bytes_end_no_block_of_markdown(odd_report: Report) -> None:
    lines = as_markdown(odd_report).splitlines()
    fences = [line for line in lines if line.startswith("```")]
    failed = sum(each.outcome is Outcome.FAILED for each in odd_report.results)
    assert len(fences) == 2 * failed


@pytest.mark.parametrize("form", ["table", "json", "junit", "markdown"])
def test_a_report_is_written_whatever_letters_the_output_has(odd_socket: str, form: str) -> None:
    words = [sys.executable, "-m", "hypercache_compat.cli", "check", "--socket", odd_socket]
    words += ["--wire", "1.0", "--timeout", "0.5", "--quiet", "--format", form]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(words, capture_output=True, timeout=DEADLINE_S, check=False, env=environment)
    assert (ended.returncode, ended.stderr) == (1, b"")
    assert ended.stdout.isascii()
    if form == "junit":
        assert any("é 漢" in each.get("message", "") for each in Xml.fromstring(ended.stdout).iter("failure"))


@pytest.mark.parametrize("command", [[], ["check"], ["decode"], ["record"]])
def test_help_is_there(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: hypercache-compat" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_that_is_none_is_refused_in_words(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "--socket", "/nowhere", f"--timeout={word}"])
    assert ended.value.code == 2
    assert f"must be a number of seconds above 0, not '{word}'" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--with", "--restart=true"])
def test_what_costs_others_something_is_not_guessed_from_its_beginning(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "--socket", "/nowhere", word])
    assert ended.value.code == 2
    assert word in capsys.readouterr().err
