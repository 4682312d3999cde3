"""What one connection, or one request under way, may cost another: nothing.

A daemon may answer frames in any order and at any time, so nothing here asks for an order of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from hypercache_protocol.messages import CommitWrite, Ping, PongReply
from hypercache_protocol.versions import WIRE_2_0

from .checks import ODD_SIZE, Bench, Check, stage
from .frames import answers_by_id, ends, frame
from .shell import CheckFailed, Connection, Fields, expect

_NOT_THEIRS = "0" * 64
"""The SHA-256 of no bytes that anybody has; to find that out the daemon must read them all."""

_TURNS = 8
_AHEAD = 64
_UNREAD = 2000


@dataclass(frozen=True)
class _Asked:
    """One request in a frame, and the word and size that its reply must have."""

    action: str
    word: str
    fields: Fields = field(default_factory=dict)
    size_bytes: int | None = None

    def frame(self, request_id: int) -> bytes:
        return frame([request_id, self.action, self.fields])

    def check(self, request_id: int, word: str, fields: Fields) -> None:
        found = fields.get("object_size")
        of = f" of an object of {found} bytes" if found is not None else ""
        wanted = f" of an object of {self.size_bytes} bytes" if self.size_bytes is not None else ""
        expect(
            (word, found) == (self.word, self.size_bytes),
            f"{self.action} under the id {request_id} was answered with {word}{of}, not {self.word}{wanted}",
        )


def _located(uri: str, size_bytes: int) -> _Asked:
    return _Asked("locate", "HIT", {"uri": uri, "auto_ingest": False}, size_bytes)


def _slow(lines: Connection, uri: str) -> _Asked:
    """A commit that takes its time and is refused: its SHA-256 is compared with 9 MiB."""
    stage(lines, uri, ODD_SIZE)
    return _Asked("commit_write", "ERROR", {"uri": uri, "sha256": _NOT_THEIRS})


def any_order(bench: Bench) -> None:
    """Requests of all kinds under way at once are answered under their own ids, in whatever order."""
    lines, (connection, _) = bench.connect(), bench.connect_framed()
    uris = [bench.uri(f"size-{size}") for size in range(1, 5)]
    for size, uri in enumerate(uris, 1):
        stage(lines, uri, size)
    absent, new = bench.uri("absent"), bench.uri("new")
    asked = [
        _slow(lines, bench.uri("slow")),
        *(_located(uri, size) for size, uri in enumerate(uris, 1)),
        _Asked("ping", "PONG"),
        _Asked("locate", "MISS", {"uri": absent, "auto_ingest": False}),
        _Asked("x_compat_no_such_action", "ERROR"),
        _Asked("stage_write", "WRITESTAGED", {"uri": new, "size_bytes": 9, "auto_flush_s3": False}, 9),
        _Asked("pin", "ERROR", {"uri": absent}),
        *(_located(uri, size) for size, uri in reversed([*enumerate(uris, 1)])),
    ]
    by_id = {900 - number: each for number, each in enumerate(asked)}
    connection.send_bytes(b"".join(each.frame(request_id) for request_id, each in by_id.items()))
    answers = answers_by_id(connection, len(by_id))
    for request_id, each in by_id.items():
        expect(request_id in answers, f"{each.action} under the id {request_id} got no answer")
        each.check(request_id, *answers[request_id])


def given_up(bench: Bench) -> None:
    """What a client asked for and did not wait for reaches no other: each connection has its own answers."""
    given_up_uri, wanted_uri = bench.uri("given-up"), bench.uri("wanted")
    first = bench.connect()
    stage(first, given_up_uri, 1)
    stage(first, wanted_uri, 2)
    for _ in range(_TURNS):
        gone = bench.connect()
        about = {"action": "locate", "uri": given_up_uri, "auto_ingest": False}
        gone.ask_fields(**about)
        gone.send_bytes((json.dumps(about).encode() + b"\n") * _AHEAD)
        gone.close()
        connection = bench.connect()
        found = connection.ask_fields(action="locate", uri=wanted_uri, auto_ingest=False)
        size = found.get("object_size")
        expect(size is not None, "the answer to locate has no object_size, which tells whose answer it is")
        expect(size == 2, f"the answer about an object of 2 bytes speaks of an object of {size} bytes")
        connection.end()
        rest = connection.read_rest(1.0)
        expect(not rest, f"{len(rest)} bytes came after it that answer no request of this connection")


def given_up_in_frames(bench: Bench) -> None:
    """A request in a frame that is given up is answered under its own id, and no later one in its place."""
    lines, (connection, _) = bench.connect(), bench.connect_framed()
    uris = [bench.uri(f"size-{size}") for size in range(1, _TURNS + 1)]
    for size, uri in enumerate(uris, 1):
        stage(lines, uri, size)
    under_way = {1: _slow(lines, bench.uri("slow"))}
    connection.send_bytes(under_way[1].frame(1))
    for request_id, (size, uri) in enumerate(enumerate(uris, 1), 2):
        under_way[request_id] = _located(uri, size)
        connection.send_bytes(under_way[request_id].frame(request_id))
        while request_id in under_way:
            _take_answer(connection, under_way)
    while under_way:
        _take_answer(connection, under_way)
    ends(connection, "the end of a connection whose requests were all answered")


def _take_answer(connection: Connection, under_way: dict[int, _Asked]) -> None:
    request_id, word, fields = connection.read_frame()
    expect(request_id in under_way, f"{word} came under the id {request_id}, which no open request has")
    under_way.pop(request_id).check(request_id, word, fields)


def broken_off(bench: Bench) -> None:
    """A connection that breaks off amid a frame asked for nothing, and disturbs no other."""
    bystander, _ = bench.connect_framed()
    uri = bench.uri("broken-off")
    # What is read last of it is a single byte, which a reader into a used buffer might find there.
    whole = frame([1, "stage_write", {"uri": uri, "size_bytes": 10, "auto_flush_s3": False}])
    for cut in (2, 4, len(whole) // 2, len(whole) - 1):
        what = f"a frame of which {cut} of {len(whole)} bytes came"
        polite, rude = (bench.connect_framed()[0] for _ in range(2))
        for connection in (polite, rude):
            connection.send_bytes(whole[:cut])
        rude.close()
        ends(polite, what)
        _goes_on(bystander, what)
    bench.connect().refused(CommitWrite(uri=uri))


def unread(bench: Bench) -> None:
    """A client that asks and does not read its replies holds up no other."""
    bystander, deaf = bench.connect(), bench.connect()
    deaf.send_bytes(b'{"action":"get_status"}\n' * _UNREAD)
    deaf.wait_for_answer()
    for other in [bystander] * _TURNS + [bench.connect()]:
        _goes_on(other, "requests whose replies nobody reads")


def _goes_on(bystander: Connection, after: str) -> None:
    try:
        bystander.get(Ping(), PongReply)
    except CheckFailed as error:
        raise CheckFailed(f"after {after}, a ping on another connection failed: {error}") from error


CHECKS = (
    Check(
        "sessions.given-up",
        given_up,
        "A client gets the answer to what another one asked, after that one went away. It would load another "
        "object's bytes. Do not run this daemon.",
    ),
    Check(
        "sessions.unread",
        unread,
        "One client that hangs takes the service from all others.",
    ),
    Check(
        "sessions.any-order",
        any_order,
        "A request that takes long gets its answer mixed up with those of faster ones: a client would load "
        "another object's bytes. Do not run this daemon.",
        WIRE_2_0,
    ),
    Check(
        "sessions.given-up-in-frames",
        given_up_in_frames,
        "After a request that a client gave up, the next ones get wrong answers: a client would load another "
        "object's bytes. Do not run this daemon.",
        WIRE_2_0,
    ),
    Check(
        "sessions.broken-off",
        broken_off,
        "A client that dies while it sends costs others their connections, or what it had not finished "
        "sending is carried out.",
        WIRE_2_0,
    ),
)
