"""Wire 1's transport: lines, their order, and what is no request."""

from __future__ import annotations

import json

from hypercache_protocol.fields import MIB
from hypercache_protocol.messages import CommitWrite, Evict, Locate, Ping, PongReply

from .checks import Bench, Check, stage
from .shell import Connection, Fields, expect

GREASE: Fields = {"x_compat_unknown": {"deep": [1, None, {"a": "b"}]}, "x_compat_flag": True}
_NO_REQUESTS = (
    b"this is not JSON",
    b'{"action":"ping"',
    b'["ping"]',
    b"42",
    b"",
    b'{"action":"ping","x":"\xff\xfe"}',
)
_MANY = 32


def _lives(connection: Connection, after: str) -> None:
    reply = connection.ask_fields(action="ping")
    expect(reply.get("status") == "PONG", f"after {after}, a ping on the same connection got {reply}")


def _is_error(reply: Fields, to: str) -> None:
    expect(reply.get("status") == "ERROR", f"{to} was answered with status {reply.get('status')!r}")
    sentence = reply.get("error_message")
    expect(isinstance(sentence, str) and bool(sentence), f"the error reply to {to} has no error_message")


def byte_by_byte(bench: Bench) -> None:
    """A request that arrives one byte at a time is answered."""
    connection = bench.connect()
    connection.send_byte_by_byte(b'{"action":"ping"}\n')
    expect(connection.read_fields().get("status") == "PONG", "the answer is no PONG")


def two_in_one_piece(bench: Bench) -> None:
    """Two requests that arrive in one piece are both answered, in their order."""
    connection = bench.connect()
    absent = json.dumps({"action": "locate", "uri": bench.uri("absent"), "auto_ingest": False}).encode()
    connection.send_bytes(b'{"action":"ping"}\n' + absent + b"\n")
    words = [connection.read_fields().get("status") for _ in range(2)]
    expect(words == ["PONG", "MISS"], f"a ping and a locate of nothing were answered with {words}")


def replies_in_order(bench: Bench) -> None:
    """Many requests sent at once are answered in their order, each with its own answer."""
    connection = bench.connect()
    uris = [bench.uri(f"size-{size}") for size in range(1, 9)]
    for size, uri in enumerate(uris, 1):
        stage(connection, uri, size)
    order = [*range(8), *reversed(range(8))]
    answers = connection.ask_all(Locate(uri=uris[index], auto_ingest=False) for index in order)
    for index, answer in zip(order, answers, strict=True):
        found = answer.fields.get("object_size")
        expect(found == index + 1, f"the answer about an object of {index + 1} bytes speaks of {found} bytes")


def nothing_unasked(bench: Bench) -> None:
    """A daemon sends one line for each request and never one that nobody asked for."""
    connection = bench.connect()
    for _ in range(3):
        connection.get(Ping(), PongReply)
    connection.end()
    rest = connection.read_rest(1.0)
    expect(not rest, f"{len(rest)} bytes came that answer no request")


def unknown_fields(bench: Bench) -> None:
    """Fields that the daemon does not know are ignored, on every action."""
    connection, uri = bench.connect(), bench.uri("greased")
    wanted = {
        "ping": "PONG",
        "stage_write": "WRITESTAGED",
        "append_write": "WRITESTAGED",
        "commit_write": "WRITECOMMITTED",
        "locate": "HIT",
        "pin": "PONG",
        "evict": "EVICTED",
    }
    size = {"size_bytes": 10}
    more: dict[str, Fields] = {
        "stage_write": {**size, "auto_flush_s3": False},
        "append_write": size,
        "locate": {"auto_ingest": False},
        "pin": {"pinned": False},
    }
    for action, word in wanted.items():
        about = {} if action == "ping" else {"uri": uri}
        reply = connection.ask_fields(action=action, **about, **more.get(action, {}), **GREASE)
        expect("error_message" not in reply, f"{action} with unknown fields got {reply}, not {word}")


def unknown_action(bench: Bench) -> None:
    """An action that the daemon does not know gets an error, and the connection lives."""
    connection, uri = bench.connect(), bench.uri("unknown")
    for action in ("x_compat_no_such_action", "", "PING"):
        _is_error(connection.ask_fields(action=action, uri=uri), f"the unknown action {action!r}")
        _lives(connection, f"the unknown action {action!r}")


def not_json(bench: Bench) -> None:
    """A line that is no JSON object gets an error, and the connection lives."""
    connection = bench.connect()
    for line in _NO_REQUESTS:
        connection.send_bytes(line + b"\n")
        _is_error(connection.read_fields(), f"the line {line!r}")
        _lives(connection, f"the line {line!r}")


def wrong_values(bench: Bench) -> None:
    """A field that is missing or of another type gets an error, and nothing is staged."""
    connection, uri = bench.connect(), bench.uri("wrong")
    wrong: list[Fields] = [{}, *({"size_bytes": value} for value in ("10", -1, 10.5, True, None, 1 << 62))]
    for fields in wrong:
        reply = connection.ask_fields(action="stage_write", uri=uri, auto_flush_s3=False, **fields)
        _is_error(reply, f"stage_write with {fields or 'no size_bytes'}")
    for action in ("locate", "evict", "commit_write"):
        _is_error(connection.ask_fields(action=action), f"{action} without a uri")
    connection.refused(CommitWrite(uri=uri))


def longest_line(bench: Bench) -> None:
    """A request of exactly 1,048,576 bytes is read."""
    connection = bench.connect()
    head = b'{"action":"ping","x":"'
    connection.send_bytes(head + b"x" * (MIB - len(head) - 2) + b'"}\n')
    expect(connection.read_fields().get("status") == "PONG", "the answer is no PONG")


def overlong_line(bench: Bench) -> None:
    """A longer request is refused and its connection closed; other connections go on."""
    bystander, connection = bench.connect(), bench.connect()
    head = b'{"action":"ping","x":"'
    connection.send_bytes(head + b"x" * (MIB - len(head) - 1) + b'"}\n')
    _is_error(connection.read_fields(), "a line of 1 MiB and one byte")
    expect(connection.read_body() is None, "the connection was not closed after an overlong line")
    _lives(bystander, "an overlong line on another connection")


def half_request(bench: Bench) -> None:
    """Half a request and then the end of the connection asks for nothing."""
    connection, uri = bench.connect(), bench.uri("half")
    half = {"action": "stage_write", "uri": uri, "size_bytes": 10, "auto_flush_s3": False}
    connection.send_bytes(json.dumps(half).encode())
    connection.end()
    expect(not connection.read_rest(1.0), "half a request was answered")
    bench.connect().refused(CommitWrite(uri=uri))


def many_connections(bench: Bench) -> None:
    """Many connections at once are served, each with its own answers."""
    uri = bench.uri("shared")
    connections = [bench.connect() for _ in range(_MANY)]
    for connection in connections:
        connection.send_fields(action="ping")
    for connection in reversed(connections):
        expect(connection.read_fields().get("status") == "PONG", "one of them got no PONG")
    stage(connections[0], uri, 1)
    connections[-1].ask(Evict(uri=uri))


CHECKS = (
    Check(
        "transport.byte-by-byte",
        byte_by_byte,
        "The daemon takes each read from the socket for a whole request. Clients will hang or get errors "
        "whenever the system cuts what they send, which it may do at any time.",
    ),
    Check(
        "transport.two-in-one-piece",
        two_in_one_piece,
        "The daemon drops or mixes up requests that arrive together. Clients that send ahead will wait "
        "for ever, or read a wrong answer.",
    ),
    Check(
        "transport.replies-in-order",
        replies_in_order,
        "Replies are shifted: a client reads the answer about another object. It would load another "
        "object's bytes. Do not run this daemon.",
    ),
    Check(
        "transport.nothing-unasked",
        nothing_unasked,
        "The daemon sends lines that nobody asked for. A client of 0.9 takes such a line for the answer "
        "to its next request, and from then on every answer is one off.",
    ),
    Check(
        "transport.unknown-fields",
        unknown_fields,
        "The daemon refuses requests with fields that it does not know. Newer clients send such fields, so "
        "no client can be upgraded before this daemon is.",
    ),
    Check(
        "transport.unknown-action",
        unknown_action,
        "The daemon does not survive an action that it does not know. A newer client asks for one on every "
        "new connection (hello) and needs an error and a living connection to fall back to wire 1.",
    ),
    Check(
        "transport.not-json",
        not_json,
        "One damaged request costs the whole connection, or is not answered at all: what the client sent "
        "after it is lost with it.",
    ),
    Check(
        "transport.wrong-values",
        wrong_values,
        "The daemon takes values of wrong types or sizes. A fault in one client then reserves or commits "
        "something that nobody meant.",
    ),
    Check(
        "transport.longest-line",
        longest_line,
        "Requests that are allowed are refused: long names and commits of large objects (one checksum for "
        "each 4 MiB) will fail.",
    ),
    Check(
        "transport.overlong-line",
        overlong_line,
        "Requests have no limit, or the limit is not told. One broken client can fill the daemon's memory.",
    ),
    Check(
        "transport.half-request",
        half_request,
        "What a client had not finished writing when it died is carried out.",
    ),
    Check(
        "transport.many-connections",
        many_connections,
        "The daemon does not serve 32 clients at once. Every worker of a training or serving job has a "
        "connection of its own.",
    ),
)
