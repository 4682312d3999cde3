"""Whatever a client sends: an error with a sentence, the connection alive, nothing lost, nobody disturbed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress

import pytest

from hypercache_compat.daemon_process import DaemonProcess
from hypercache_compat.payloads import MIB, payload
from hypercache_compat.raw_wire import RawConnection, fetch, store, write_layout

LINE_LIMIT = MIB
WITNESS = "hypercache://witness"


def _request(action: str, **fields: object) -> bytes:
    return json.dumps({"action": action, **fields}).encode()


def _stage(**fields: object) -> bytes:
    return _request("stage_write", **({"uri": "x", "size_bytes": 10} | fields))


NOT_JSON = {
    "random bytes": b"\x00\xff\xfe\x80 garbage",
    "half an object": b'{"action":"ping"',
    "not UTF-8": b'{"action":"ping","x":"\xff"}',
    "an empty line": b"",
    "two objects": b'{"action":"ping"}{"action":"ping"}',
    "a python literal": b"{'action': 'ping'}",
    "NaN": b'{"action":"stage_write","uri":"x","size_bytes":NaN}',
    "deep nesting": b"[" * 100_000,
}
NOT_AN_OBJECT = {
    "a list": b'["ping"]',
    "a string": b'"ping"',
    "a number": b"42",
    "null": b"null",
    "true": b"true",
}
NO_SUCH_ACTION = {
    "unknown": _request("format_all_disks"),
    "empty": _request(""),
    "missing": b'{"uri":"x"}',
    "a number": b'{"action":7}',
    "a list": b'{"action":["ping"]}',
    "another case": _request("PING"),
    "very long": _request("p" * 100_000),
}
WRONG_FIELDS = {
    "missing uri": _request("locate"),
    "missing size": _request("stage_write", uri="x"),
    "uri a number": _request("locate", uri=5),
    "uri null": _request("evict", uri=None),
    "uri empty": _request("locate", uri=""),
    "uri empty to stage": _stage(uri=""),
    "uri too long": _request("locate", uri="u" * 100_000),
    "uri with NUL": _request("locate", uri="a\0b"),
    "uri half a character": b'{"action":"locate","uri":"\\ud800"}',
    "size negative": _stage(size_bytes=-1),
    "size a fraction": _stage(size_bytes=10.5),
    "size a whole fraction": _stage(size_bytes=10.0),
    "size absurd": _stage(size_bytes=10**30),
    "size above 64 TiB": _stage(size_bytes=(1 << 46) + 1),
    "size above the pool": _stage(size_bytes=1 << 45),
    "size a string": _stage(size_bytes="10"),
    "size a bool": _stage(size_bytes=True),
    "size null": _stage(size_bytes=None),
    "append negative": _request("append_write", uri="x", size_bytes=-5),
    "tier unknown": _stage(tier="tape"),
    "tier a number": _stage(tier=1),
    "flag a string": _stage(pinned="yes"),
    "flag a number": _request("locate", uri="x", auto_ingest=1),
    "sha256 short": _request("commit_write", uri="x", sha256="abc"),
    "checksums a string": _request("commit_write", uri="x", chunk_checksums="1"),
    "telemetry bare": _request("record_telemetry"),
    "telemetry negative": _request(
        "record_telemetry", event_type="r", uri="x", object_size_bytes=-1, duration_us=0, bandwidth_mbps=0
    ),
    "telemetry infinite": b'{"action":"record_telemetry","event_type":"r","uri":"x","object_size_bytes":1,'
    b'"duration_us":0,"bandwidth_mbps":1e999}',
}
NEVER_STAGED = {
    "commit": _request("commit_write", uri="never"),
    "commit with checksums": _request("commit_write", uri="never", chunk_checksums=[1], local_only=True),
    "append": _request("append_write", uri="never", size_bytes=10),
    "commit of a strange stage": _request("commit_write", uri="never", stage_id="nobody"),
    "pin": _request("pin", uri="never", pinned=True),
    "write status": _request("get_write_status", uri="never"),
}
ALL = {
    f"{kind}: {name}": line
    for kind, lines in (
        ("not JSON", NOT_JSON),
        ("not an object", NOT_AN_OBJECT),
        ("action", NO_SUCH_ACTION),
        ("field", WRONG_FIELDS),
        ("never staged", NEVER_STAGED),
    )
    for name, line in lines.items()
}


@pytest.fixture(autouse=True)
def nothing_is_lost(daemon: DaemonProcess) -> Iterator[None]:
    """An object written before and a connection opened before are as they were after each test."""
    data = payload(WITNESS, 5 * MIB)
    with daemon.connect() as bystander:
        assert store(bystander, WITNESS, data)["status"] == "WRITECOMMITTED"
        yield
        assert bystander.ask("ping")["status"] == "PONG"
        assert fetch(bystander, WITNESS) == data


@pytest.mark.parametrize("line", ALL.values(), ids=ALL.keys())
def test_the_answer_is_an_error_with_a_sentence_and_the_connection_lives(
    raw: RawConnection, line: bytes
) -> None:
    raw.send(line + b"\n")
    reply = raw.receive()
    assert reply["status"] == "ERROR"
    assert 10 < len(reply["error_message"]) < 1000
    assert raw.ask("ping")["status"] == "PONG"


def test_wrong_lines_among_right_ones_keep_their_places(raw: RawConnection) -> None:
    lines = [part for bad in ALL.values() for part in (bad, _request("ping"))]
    raw.send(b"".join(line + b"\n" for line in lines))
    assert [raw.receive()["status"] for _ in lines] == ["ERROR", "PONG"] * len(ALL)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (_stage(size_bytes=-1), "size_bytes"),
        (_request("stage_write", uri="x"), "size_bytes"),
        (_stage(tier="tape"), "tier"),
        (_request("locate", uri=""), "uri"),
        (_request("format_all_disks"), "format_all_disks"),
        (_request("commit_write", uri="never"), "never"),
        (_request("append_write", uri="never", size_bytes=1), "never"),
    ],
)
def test_the_sentence_names_what_is_wrong(raw: RawConnection, line: bytes, named: str) -> None:
    raw.send(line + b"\n")
    assert named in raw.receive()["error_message"]


def test_a_second_commit_is_an_error_and_the_first_stands(raw: RawConnection, uri: str) -> None:
    data = payload(uri, 5 * MIB)
    assert store(raw, uri, data)["status"] == "WRITECOMMITTED"
    assert raw.ask("commit_write", uri=uri)["status"] == "ERROR"
    assert fetch(raw, uri) == data


@pytest.mark.parametrize(
    "wrong",
    [[], [1], [1, 2, 3], [1, -1], [1, 1 << 32], [1, 2.5], [1, "2"], [1, None], {"0": 1}, 7],
    ids=repr,
)
def test_a_wrong_checksum_list_is_an_error_and_the_staged_write_stays(
    raw: RawConnection, uri: str, wrong: object
) -> None:
    data = payload(uri, 5 * MIB)
    staged = raw.ask("stage_write", uri=uri, size_bytes=len(data))
    write_layout(staged["chunk_layout"], data)
    reply = raw.ask("commit_write", uri=uri, chunk_checksums=wrong)
    assert reply["status"] == "ERROR"
    assert "chunk_checksums" in reply["error_message"]
    assert raw.ask("get_write_status", uri=uri)["sync_status"] == "STAGED"
    assert raw.ask("commit_write", uri=uri)["status"] == "WRITECOMMITTED"
    assert fetch(raw, uri) == data


def test_local_only_and_write_through_is_a_contradiction_and_the_staged_write_stays(
    raw: RawConnection, uri: str
) -> None:
    raw.ask("stage_write", uri=uri, size_bytes=10)
    assert raw.ask("commit_write", uri=uri, local_only=True, write_through=True)["status"] == "ERROR"
    assert raw.ask("commit_write", uri=uri, local_only=True)["sync_status"] == "LOCAL_ONLY"


def test_a_stale_stage_id_is_refused_and_the_newer_write_is_untouched(raw: RawConnection, uri: str) -> None:
    first = raw.ask("stage_write", uri=uri, size_bytes=10)
    assert raw.ask("commit_write", uri=uri, stage_id=first["stage_id"])["status"] == "WRITECOMMITTED"
    second = raw.ask("stage_write", uri=uri, size_bytes=20)
    write_layout(second["chunk_layout"], b"n" * 20)
    assert raw.ask("commit_write", uri=uri, stage_id=first["stage_id"])["status"] == "ERROR"
    assert raw.ask("commit_write", uri=uri, stage_id=second["stage_id"])["status"] == "WRITECOMMITTED"
    assert fetch(raw, uri) == b"n" * 20


def test_a_line_at_the_limit_is_read_and_one_byte_more_is_an_error_and_the_end(
    daemon: DaemonProcess, raw: RawConnection
) -> None:
    head = b'{"action":"ping","filler":"'
    raw.send(head + b"x" * (LINE_LIMIT - len(head) - 2) + b'"}\n')
    assert raw.receive()["status"] == "PONG"
    with daemon.connect() as other:
        other.send(head + b"x" * (LINE_LIMIT - len(head) - 1) + b'"}\n')
        reply = other.receive()
        assert reply["status"] == "ERROR"
        assert str(LINE_LIMIT) in reply["error_message"]
        assert other.receive_line() == b""


def test_an_endless_line_costs_the_daemon_no_memory(daemon: DaemonProcess) -> None:
    before = daemon.peak_memory_bytes()
    with daemon.connect() as endless:
        with suppress(ConnectionError):  # the daemon stops reading long before all of it is sent
            for _ in range(300):
                endless.send(b"x" * MIB)
        reply = json.loads(endless.receive_line() or b"{}")
        assert reply.get("status", "ERROR") == "ERROR"
        assert endless.receive_line() == b""
    assert daemon.peak_memory_bytes() - before < 16 * MIB


def test_many_half_lines_at_once_cost_what_the_limit_allows(daemon: DaemonProcess) -> None:
    before = daemon.peak_memory_bytes()
    connections = [daemon.connect() for _ in range(20)]
    try:
        for connection in connections:
            connection.send(b"x" * (LINE_LIMIT // 2))
        assert connections[-1].ask is not None
        for connection in connections:
            connection.send(b"\n")
            assert connection.receive()["status"] == "ERROR"
    finally:
        for connection in connections:
            connection.close()
    assert daemon.peak_memory_bytes() - before < 20 * 3 * MIB


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_a_request_may_come_in_pieces_of_any_size(raw: RawConnection, piece: int) -> None:
    line = _request("locate", uri="hypercache://absent", auto_ingest=False) + b"\n"
    for start in range(0, len(line), piece):
        raw.send(line[start : start + piece])
    assert raw.receive()["status"] == "MISS"


def test_half_a_request_and_then_nothing_asks_for_nothing(daemon: DaemonProcess, uri: str) -> None:
    with daemon.connect() as connection:
        connection.send(_stage(uri=uri))
        connection.end()
        assert connection.receive_line() == b""
    with daemon.connect() as connection:
        assert connection.ask("commit_write", uri=uri)["status"] == "ERROR"


def test_what_is_asked_before_the_end_is_answered(daemon: DaemonProcess) -> None:
    with daemon.connect() as connection:
        connection.send(_request("ping") + b"\n" + _request("purg"))
        connection.end()
        assert connection.receive()["status"] == "PONG"
        assert connection.receive_line() == b""


def test_unknown_fields_are_ignored_on_every_action(raw: RawConnection, uri: str) -> None:
    grease = {"zz_new": {"deep": [1, None]}, "": 1, "status": "HIT"}
    known = {"uri": uri, "size_bytes": 10, **grease}
    assert raw.ask("ping", **grease)["status"] == "PONG"
    assert raw.ask("stage_write", **known)["status"] == "WRITESTAGED"
    assert raw.ask("append_write", **known)["object_size"] == 20
    assert raw.ask("commit_write", **known)["status"] == "WRITECOMMITTED"
    assert raw.ask("locate", **known)["object_size"] == 20
    assert raw.ask("evict", **known)["status"] == "EVICTED"
