"""Wire 2: frames, and the limits that the hello announced."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgpack

from hypercache_protocol.codecs.msgpack_frames import NOBODY
from hypercache_protocol.messages import (
    AppendWrite,
    CommittedReply,
    CommitWrite,
    DevicesReply,
    ErrorReply,
    Evict,
    EvictedReply,
    GetDevices,
    GetStatus,
    GetWriteStatus,
    HitReply,
    Ingest,
    Locate,
    MissReply,
    Pin,
    Ping,
    PongReply,
    RecordTelemetry,
    Reply,
    Request,
    StagedReply,
    StageWrite,
    StatusReply,
    WriteStatusReply,
)
from hypercache_protocol.versions import WIRE_2_0

from .checks import ODD_SIZE, Bench, Check, locate, stage
from .shell import Connection, Fields, NotOffered, expect
from .transport import GREASE

_MOST_TRIED = 1 << 16
_IDS = (7, 3, 1 << 40, 1, 900, 1 << 53, 2)


# -- frames --------------------------------------------------------------------------------------------


def actions_in_frames(bench: Bench) -> None:
    """Every action of wire 1 has the same answers in frames."""
    connection, _ = bench.connect_framed()
    uri, absent = bench.uri("framed"), bench.uri("absent")
    _answers(
        connection,
        (Ping(), PongReply),
        (GetDevices(), DevicesReply),
        (GetStatus(), StatusReply),
        (Locate(uri=uri, auto_ingest=False), MissReply),
        (StageWrite(uri=uri, size_bytes=ODD_SIZE, auto_flush_s3=False), StagedReply),
        (AppendWrite(uri=uri, size_bytes=1), StagedReply),
        (CommitWrite(uri=uri, local_only=True), CommittedReply),
        (Locate(uri=uri, auto_ingest=False), HitReply),
        (Ingest(uri=uri), HitReply),
        (GetWriteStatus(uri=uri), WriteStatusReply),
        (Pin(uri=uri), PongReply),
        (Pin(uri=uri, pinned=False), PongReply),
        (_telemetry(uri), PongReply),
        (CommitWrite(uri=absent), ErrorReply),
        (Pin(uri=absent), ErrorReply),
        (Evict(uri=uri), EvictedReply),
        (Evict(uri=uri), MissReply),
    )


def _answers(connection: Connection, *wanted: tuple[Request, type[Reply]]) -> None:
    for request, kind in wanted:
        connection.get(request, kind)


def _telemetry(uri: str) -> RecordTelemetry:
    return RecordTelemetry(event_type="read", uri=uri, object_size_bytes=1, duration_us=1, bandwidth_mbps=1.5)


def both_wires_agree(bench: Bench) -> None:
    """locate tells the same of one object on either wire."""
    lines, (frames, _) = bench.connect(), bench.connect_framed()
    uri = bench.uri("both")
    words = tuple(range(1, len(stage(lines, uri, ODD_SIZE).chunk_layout) + 1))
    lines.get(CommitWrite(uri=uri, local_only=True, chunk_checksums=words), CommittedReply)
    one, other = locate(lines, uri), locate(frames, uri)
    for name in type(one).model_fields:
        expect(
            getattr(one, name) == getattr(other, name),
            f"{name} is {getattr(one, name)!r} on wire 1 and {getattr(other, name)!r} on wire 2",
        )


def ids(bench: Bench) -> None:
    """Each reply carries the id of its own request, whatever the ids are and in whatever order it comes."""
    lines, (connection, _) = bench.connect(), bench.connect_framed()
    uris = [bench.uri(f"size-{size}") for size in range(1, len(_IDS) + 1)]
    for size, uri in enumerate(uris, 1):
        stage(lines, uri, size)
    frames = [
        frame([request_id, "locate", {"uri": uri, "auto_ingest": False}])
        for request_id, uri in zip(_IDS, uris, strict=True)
    ]
    connection.send_bytes(b"".join(frames))
    answers = answers_by_id(connection, len(_IDS))
    found = {request_id: fields.get("object_size") for request_id, (_, fields) in answers.items()}
    wanted = {request_id: size for size, request_id in enumerate(_IDS, 1)}
    expect(found == wanted, f"object sizes by id are {found} and should be {wanted}")


def answers_by_id(connection: Connection, count: int) -> dict[int, tuple[str, Fields]]:
    """The words and fields of the next `count` frames, in whatever order they come.

    Raises:
        CheckFailed: two have one id.
    """
    found: dict[int, tuple[str, Fields]] = {}
    for _ in range(count):
        request_id, word, fields = connection.read_frame()
        expect(request_id not in found, f"the id {request_id} was answered twice")
        found[request_id] = word, fields
    return found


def byte_by_byte(bench: Bench) -> None:
    """A frame that arrives one byte at a time is answered."""
    connection, _ = bench.connect_framed()
    connection.send_byte_by_byte(frame([5, "ping", {}]))
    expect(connection.read_frame()[:2] == (5, "PONG"), "the answer is no PONG to that id")


def refusals(bench: Bench) -> None:
    """A frame whose action or fields are wrong fails that request alone; unknown fields are ignored."""
    connection, _ = bench.connect_framed()
    uri = bench.uri("wrong")
    sent: list[tuple[list[object], str]] = [
        ([11, "x_compat_no_such_action", {}], "ERROR"),
        ([12, "stage_write", {"uri": uri, "size_bytes": "10"}], "ERROR"),
        ([13, "stage_write", {"uri": uri}], "ERROR"),
        ([14, "locate", {"uri": uri, "auto_ingest": False, **GREASE}], "MISS"),
        ([15, "ping", GREASE], "PONG"),
    ]
    for envelope, word in sent:
        connection.send_bytes(frame(envelope))
        request_id, found, fields = connection.read_frame()
        expect(
            (request_id, found) == (envelope[0], word),
            f"{envelope} was answered with {found} under the id {request_id}: {fields}",
        )


def unknown_fields(bench: Bench) -> None:
    """Fields that the daemon does not know are ignored in frames too, and in batches."""
    connection, _ = bench.connect_framed()
    uri = bench.uri("greased")
    one: Fields = {"uri": uri}
    many: Fields = {"prefix": uri[:-1], "suffixes": [uri[-1]]}
    sizes = {"sizes": [10], "auto_flush_s3": False}
    stage_ids = {"stage_ids": _greased(connection, "stage_many", {**many, **sizes}).get("stage_ids")}
    _greased(connection, "commit_many", {**many, **stage_ids, "local_only": True})
    _greased(connection, "locate_many", {**many, "layouts": True})
    _greased(connection, "evict_many", many)
    _greased(connection, "stage_write", {**one, "size_bytes": 10, "auto_flush_s3": False})
    for action, more in (
        ("append_write", {"size_bytes": 1}),
        ("commit_write", {}),
        ("pin", {}),
        ("evict", {}),
    ):
        _greased(connection, action, {**one, **more})


def _greased(connection: Connection, action: str, fields: Fields) -> Fields:
    connection.send_bytes(frame([1, action, {**fields, **GREASE}]))
    _, word, reply = connection.read_frame()
    expect(word != "ERROR", f"{action} with unknown fields got {word}: {reply.get('error_message')}")
    return reply


# -- limits --------------------------------------------------------------------------------------------


def batch_limit(bench: Bench) -> None:
    """A batch of as many uris as announced is answered; one more is an error, and the connection lives."""
    connection, reply = bench.connect_framed()
    most = reply.limits.max_batch
    if most > _MOST_TRIED:
        raise NotOffered(f"a batch of {most} uris is more than this check makes")
    prefix = bench.uri("m")
    for request_id, (count, wanted) in enumerate(((most, "LOCATED_MANY"), (most + 1, "ERROR")), 100):
        fields = {"prefix": prefix, "suffixes": [str(number) for number in range(count)]}
        connection.send_bytes(frame([request_id, "locate_many", fields]))
        found = connection.read_frame()
        expect(
            found[:2] == (request_id, wanted),
            f"{count} uris were answered with {found[1]}, not {wanted}; announced is max_batch {most}",
        )
    connection.send_bytes(frame([200, "ping", {}]))
    expect(connection.read_frame()[1] == "PONG", "after too large a batch a ping got no PONG")


def in_flight_limit(bench: Bench) -> None:
    """As many requests as announced, and more, may be sent before the first reply is read."""
    connection, reply = bench.connect_framed()
    count = min(reply.limits.max_in_flight * 2, 2048)
    uri = bench.uri("flying")
    requests = [Ping() if number % 2 else Locate(uri=uri, auto_ingest=False) for number in range(count)]
    answers = connection.ask_all(requests)
    words = [answer.reply.status for answer in answers]
    wanted = ["PONG" if number % 2 else "MISS" for number in range(count)]
    expect(words == wanted, f"{count} requests at once were not each answered with their own answer")


def frame_limit(bench: Bench) -> None:
    """A frame of the announced length is read; a longer one ends its connection, and no other."""
    bystander, _ = bench.connect_framed()
    connection, reply = bench.connect_framed()
    body = _padded_ping(reply.limits.max_request_bytes)
    connection.send_bytes(struct.pack(">I", len(body)) + body)
    expect(connection.read_frame()[:2] == (1, "PONG"), f"a frame of {len(body)} bytes got no PONG")
    connection.send_bytes(struct.pack(">I", len(body) + 1) + b"\x93")
    ends(connection, "a frame of one byte more than announced")
    bystander.get(Ping(), PongReply)


def _padded_ping(size_bytes: int) -> bytes:
    bare = len(packed([1, "ping", {"x": b""}]))
    # The head of bytes that long takes three bytes more than the head of none.
    for head in (3, 1, 0):
        body = packed([1, "ping", {"x": b"x" * (size_bytes - bare - head)}])
        if len(body) == size_bytes:
            return body
    return body


def ends(connection: Connection, what: str) -> None:
    """Nothing where all that is still said is an error under the id of nobody, and then the daemon closes.

    Raises:
        CheckFailed: `what` was answered otherwise, or the connection stays open.
    """
    connection.end()
    while connection.has_more():
        request_id, word, _ = connection.read_frame()
        expect((request_id, word) == (NOBODY, "ERROR"), f"{what} was answered with {word} to id {request_id}")


def frame(envelope: Sequence[object]) -> bytes:
    """Any envelope, right or wrong, as a frame."""
    body = packed(envelope)
    return struct.pack(">I", len(body)) + body


def packed(value: object) -> bytes:
    """Any value as msgpack."""
    body: bytes = msgpack.packb(value)
    return body


CHECKS = (
    Check(
        "frames.actions",
        actions_in_frames,
        "An action works on wire 1 and not on wire 2: clients that negotiate the newer wire are worse off.",
        WIRE_2_0,
    ),
    Check(
        "frames.agree-with-lines",
        both_wires_agree,
        "Clients of different releases are told different things about one object.",
        WIRE_2_0,
    ),
    Check(
        "frames.ids",
        ids,
        "Replies are given to the wrong requests: a client would load another object's bytes. Do not run "
        "this daemon.",
        WIRE_2_0,
    ),
    Check(
        "frames.byte-by-byte",
        byte_by_byte,
        "The daemon takes each read from the socket for a whole frame; clients will hang or be cut off.",
        WIRE_2_0,
    ),
    Check(
        "frames.refusals",
        refusals,
        "One wrong request costs others on its connection their answers, or newer clients are refused for "
        "fields that they may send.",
        WIRE_2_0,
    ),
    Check(
        "frames.unknown-fields",
        unknown_fields,
        "The daemon refuses requests with fields that it does not know. Newer clients send such fields, so "
        "no client can be upgraded before this daemon is.",
        WIRE_2_0,
    ),
    Check(
        "limits.batch",
        batch_limit,
        "Clients fill batches up to the announced limit, and those fail; or there is no limit at all.",
        WIRE_2_0,
    ),
    Check(
        "limits.in-flight",
        in_flight_limit,
        "Clients that keep many requests under way hang, or get answers of others.",
        WIRE_2_0,
    ),
    Check(
        "limits.frame",
        frame_limit,
        "Requests that the daemon says it takes are refused, or longer ones are not.",
        WIRE_2_0,
    ),
)
