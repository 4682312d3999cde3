"""`hypercache-compat record` keeps every byte, and `decode` shows it, whatever it is."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercache_compat.capture import Captured, decoded, head_line, piece_line, read_capture
from hypercache_compat.cli import main
from hypercache_compat.conformance.checks import Bench
from hypercache_compat.conformance.suite import CHECKS
from hypercache_compat.daemon_process import DaemonProcess
from hypercache_compat.raw_wire import RawConnection
from hypercache_compat.recording import Recorder
from hypercache_protocol.messages import Ping, PongReply

DEADLINE_S = 30.0


@contextmanager
def recording(daemon: DaemonProcess, capture: Path) -> Iterator[str]:
    """`hypercache-compat record` in a process of its own, ended as by Ctrl-C."""
    listen = str(daemon.folder / "rec")
    words = [sys.executable, "-m", "hypercache_compat.cli", "record", "--listen", listen]
    words += ["--to", daemon.socket_path, "--output", str(capture)]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "recording" in process.stderr.readline()
        try:
            yield listen
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
            assert process.wait(DEADLINE_S) == 0, rest


def test_a_recording_has_every_byte_of_both_sides_per_connection(
    daemon: DaemonProcess, tmp_path: Path, uri: str
) -> None:
    capture = tmp_path / "c"
    sent = b'{"action": "ping" }\n{"action":"ping"}\nnot JSON\n'
    with recording(daemon, capture) as path:
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        with RawConnection(path) as first, RawConnection(path) as second:
            first.send(sent)
            answers = [first.receive_line() for _ in range(3)]
            second.ask("locate", uri=uri, auto_ingest=False)
    assert not os.path.lexists(path)
    assert stat.S_IMODE(capture.stat().st_mode) == 0o600
    pieces = list(read_capture(capture.read_text()))
    assert said_by(pieces, 0, True) == sent
    assert said_by(pieces, 0, False) == b"".join(line + b"\n" for line in answers)
    assert json.loads(said_by(pieces, 1, True))["uri"] == uri


def said_by(pieces: list[Captured], connection: int, is_from_client: bool) -> bytes:
    whose = (connection, is_from_client)
    return b"".join(each.data for each in pieces if (each.connection, each.is_from_client) == whose)


def test_a_recording_of_wire_2_is_decoded(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = tmp_path / "c"
    with recording(daemon, capture) as path:
        bench = Bench(path, DEADLINE_S, "hypercache://decoded/")
        next(each for each in CHECKS if each.name == "batches.presence").run(bench)
        connection, _ = bench.connect_framed()
        connection.get(Ping(), PongReply)
        bench.close()
    assert main(["decode", str(capture)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.endswith("> hello") for line in lines)
    assert any(line.endswith("< HELLO") for line in lines)
    assert any("> #2 locate_many" in line for line in lines)
    assert "present: 1001100010100000 (bit 0 first)" in lines
    assert 'prefix: "hypercache://decoded/many-"' in lines
    assert not any("no frame" in line or "no JSON" in line or "unfinished" in line for line in lines)


def test_a_frozen_transcript_is_decoded(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[1] / "transcripts" / "hypercache-io-0.9.0"
    assert main(["decode", str(folder / "pin.json")]) == 0
    out = capsys.readouterr().out
    assert "0 > stage_write" in out
    assert "0 < WRITECOMMITTED" in out


@pytest.mark.parametrize(
    "text", ["", "{}", "not JSON", '{"turns": [[1]]}', head_line("x") + "{}\n", '{"hypercache_capture": 9}\n']
)
def test_what_is_no_capture_is_status_2_and_a_sentence(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c").write_text(text)
    assert main(["decode", str(tmp_path / "c")]) == 2
    assert capsys.readouterr().err.startswith("hypercache-compat: ")


def test_a_capture_that_was_cut_short_is_decoded_up_to_there() -> None:
    lines = [piece_line(Captured(3, True, 0.5, b'{"action":"ping"}\n{"ac')) for _ in range(2)]
    text = head_line("d") + lines[0] + lines[1][:20]
    assert list(decoded(read_capture(text))) == [
        "  0.500000 s  3 > ping",
        "connection 3: 4 bytes of an unfinished message of the client",
    ]


_HELLO = b'{"status":"HELLO","version":"2.0"}\n'
_PARTS = st.sampled_from(
    [_HELLO, b"[" * 100_000 + b"\n", b"\xff\xff\xff\xff", b"\x00\x00\x00\x03\x93\x01", b"\n", b"[[", b'{"a":']
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=40) | _PARTS), max_size=12))
def test_whatever_was_recorded_is_decoded(said: list[tuple[bool, bytes]]) -> None:
    pieces = [Captured(0, side, 0.0, data) for side, data in said]
    text = head_line("d") + "".join(map(piece_line, pieces))
    assert list(read_capture(text)) == pieces
    for line in decoded(pieces):
        assert line.isprintable()


def test_a_socket_that_is_there_is_not_taken(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").touch()
    words = ["record", "--to", daemon.socket_path, "--output", str(tmp_path / "c"), "--listen"]
    assert main([*words, str(tmp_path / "here")]) == 2
    assert "here is there already" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
    words[2] = str(tmp_path / "nobody")
    assert main([*words, str(tmp_path / "free")]) == 2
    assert "no daemon answers" in capsys.readouterr().err


def connected(path: str) -> RawConnection:
    """A connection, as soon as somebody listens."""
    last_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < last_s:
        with suppress(OSError):
            return RawConnection(path)
        time.sleep(0.01)
    raise TimeoutError(f"nobody listens on {path}")


@pytest.mark.timeout(60)
def test_a_recording_that_cannot_go_on_ends_at_once_and_says_why(
    daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("this cannot be noted")

    heard: list[bytes] = []

    def ping() -> None:
        with connected(path) as connection:
            connection.send(b'{"action":"ping"}\n')
            heard.append(connection.receive_line())

    monkeypatch.setattr(Recorder, "note", fail)
    path = str(daemon.folder / "ends")
    client = threading.Thread(target=ping)
    client.start()
    with pytest.raises(ValueError, match="this cannot be noted"):
        main(["record", "--to", daemon.socket_path, "--output", str(tmp_path / "c"), "--listen", path])
    client.join(DEADLINE_S)
    assert heard == [b""]
    assert not os.path.lexists(path)
