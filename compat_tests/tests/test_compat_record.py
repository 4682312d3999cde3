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
from io import StringIO
from pathlib import Path

import msgpack
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
from hypercache_protocol.actions import ALL_REPLIES
from hypercache_protocol.batches import LayoutColumns
from hypercache_protocol.messages import Ping, PongReply
from hypercache_protocol.schema import field_rows, possible_replies

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


_PIECE = head_line("x") + '{"connection":%s,"from":"client","at_s":%s,"data":""}\n'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "not JSON",
        "[" * 100_000,
        '{"turns": [[1]]}',
        '{"turns": [[1e400, "client", ""]]}',
        head_line("x") + "{}\n",
        _PIECE % ("1e400", "1"),
        _PIECE % ("1", '"x"'),
        _PIECE % ("1", "[" * 100_000),
        '{"hypercache_capture": 9}\n',
    ],
    ids=lambda text: text[-40:],
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


def shown(data: bytes, *, is_framed: bool = False) -> list[str]:
    """What is shown of what a daemon said, without the head of each line."""
    pieces = [Captured(0, False, None, _HELLO)] * is_framed + [Captured(0, False, None, data)]
    lines = list(decoded(pieces))
    return [line.strip().removeprefix("0 < ") for line in lines[2 if is_framed else 0 :]]


def framed(fields: object, word: str = "OK") -> bytes:
    body = msgpack.packb([1, word, fields])
    return len(body).to_bytes(4, "big") + bytes(body)


def test_no_word_or_name_in_a_capture_is_a_command_for_a_terminal_or_a_line_of_its_own() -> None:
    odd = "\x1b[31m\x7f\r\n0 > forged"
    told = "\\x1b[31m\\x7f\\x0d\\x0a0 > forged"
    line = json.dumps({"status": odd, odd: {odd: 1}}).encode() + b"\n"
    assert shown(line) == [told, f"{told}:", f"{told}: 1"]
    assert shown(framed({odd: {odd: 1}}, odd), is_framed=True) == [f"#1 {told}", f"{told}:", f"{told}: 1"]


def test_a_line_without_its_word_says_so() -> None:
    assert shown(b'{"a":1}\n') == ["(no status)", "a: 1"]
    asked = decoded([Captured(0, True, None, b'{"a":">"}\n')])
    assert [line.strip() for line in asked] == ["0 > (no action)", 'a: ">"']


def test_every_column_is_shown_as_the_values_in_it() -> None:
    columns = {
        row.name
        for request in ALL_REPLIES
        for model in (request, *possible_replies(request), LayoutColumns)
        for row in field_rows(model)
        if row.kind == "bytes"
    }
    assert {"stored", "present", "path_tiers"} <= columns
    for name in columns:
        value = shown(framed({name: bytes(8)}), is_framed=True)[1]
        assert "bytes" not in value, f"{name} is shown as digits"
    assert (
        shown(framed({"sync_statuses": b"\x04\x63"}), is_framed=True)[1] == "sync_statuses: [LOCAL_ONLY, 99]"
    )


@pytest.mark.parametrize("depth", [100, 450, 1000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x81\x05", b"\x81\xc4\x01a"])
def test_what_is_nested_deep_is_shown_or_said_to_be_too_deep(opening: bytes, depth: int) -> None:
    body = b"\x93\x01\xa2OK\x81\xa1x" + opening * depth + b"\xc0"
    lines = shown(len(body).to_bytes(4, "big") + body, is_framed=True)
    assert lines[0] == "#1 OK"
    assert len(lines) < 50


@pytest.mark.parametrize(
    ("before", "after"), [(b"\x93\x01", b"\x80"), (b"\x93", b"\xa2OK\x80")], ids=["word", "id"]
)
@pytest.mark.parametrize("depth", [1, 450, 1000])
def test_a_word_or_an_id_that_is_none_is_shown_or_said_to_be_too_deep(
    before: bytes, after: bytes, depth: int
) -> None:
    body = before + b"\x91" * depth + b"\xc0" + after
    (line,) = shown(len(body).to_bytes(4, "big") + body, is_framed=True)
    assert ("[" if depth < 1000 else "too deep") in line
    assert len(line) < 300


_HELLO = b'{"status":"HELLO","version":"2.0"}\n'
_PARTS = st.sampled_from(
    [
        _HELLO,
        b'{"\\u001b[2J":"\\u007f"}\n',
        b'{"a":%s%s}\n' % (b"[" * 450, b"]" * 450),
        b"[" * 100_000 + b"\n",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x03\x93\x01",
        b"\n",
        b"[[",
        b'{"a":',
    ]
)


@settings(max_examples=100)
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


@pytest.mark.parametrize("listen", ["missing/folder", "x" * 120])
def test_a_socket_that_cannot_be_made_is_named_and_no_capture_is_begun(
    daemon: DaemonProcess, tmp_path: Path, listen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["record", "--to", daemon.socket_path, "--output", str(tmp_path / "c")]
    assert main([*words, "--listen", str(tmp_path / listen)]) == 2
    assert f"{tmp_path / listen} cannot be listened on: " in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_a_file_that_cannot_be_used_is_named_in_words(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["decode", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"hypercache-compat: {tmp_path / 'none'}: No such file or directory\n"
    (tmp_path / "kept").write_text("mine")
    words = ["record", "--to", daemon.socket_path, "--listen", str(daemon.folder / "free")]
    assert main([*words, "--output", str(tmp_path / "kept")]) == 2
    assert "kept is there already" in capsys.readouterr().err
    assert (tmp_path / "kept").read_text() == "mine"


def test_decode_reads_its_input_where_the_file_is_a_dash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = piece_line(Captured(0, True, 0.5, b'{"action":"ping","a":"%s"}\n' % (b"x" * 300)))
    for options, letters in (([], 199), (["--full"], 300)):
        monkeypatch.setattr(sys, "stdin", StringIO(head_line("d") + said))
        assert main(["decode", "-", *options]) == 0
        assert capsys.readouterr().out.count("x") == letters


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
