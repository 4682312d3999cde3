"""The hello, with which wire 2 begins: one line, one answer, frozen for ever."""

from __future__ import annotations

from hypercache_protocol.batches import Hello, HelloReply
from hypercache_protocol.messages import Ping, PongReply
from hypercache_protocol.negotiation import parsed
from hypercache_protocol.versions import WIRE_2_0, features_of

from .checks import Bench, Check
from .shell import Fields, expect
from .transport import GREASE


def hello(bench: Bench) -> None:
    """A hello for 2.0 is answered on a line with version, limits and instance_id; then frames work."""
    connection, reply = bench.connect_framed()
    expect(bool(reply.instance_id), "the answer to hello has an empty instance_id")
    expect("2.0" in reply.versions, f"the answer to hello lists the versions {reply.versions}, without 2.0")
    for name, value in reply.limits.model_dump().items():
        expect(value > 0, f"the announced limit {name} is {value}")
    connection.get(Ping(), PongReply)


def hello_instance(bench: Bench) -> None:
    """hello and ping tell the same instance_id."""
    connection, reply = bench.connect_framed()
    pong = connection.get(Ping(), PongReply)
    expect(
        pong.instance_id == reply.instance_id,
        f"hello says instance_id {reply.instance_id!r} and ping says {pong.instance_id!r}",
    )


def hello_future(bench: Bench) -> None:
    """A hello for versions that do not exist yet is answered with the best that does."""
    for versions in (("9.7",), ("9.7", "2.0"), ("not a version", "2.0", "1.0"), ("2.9",)):
        reply = bench.connect().get(Hello(versions=versions), HelloReply)
        chosen = parsed(reply.version)
        expect(
            chosen is not None and WIRE_2_0 <= chosen < (9, 0),
            f"a hello for {', '.join(versions)} was answered with version {reply.version!r}",
        )


def hello_for_lines(bench: Bench) -> None:
    """A client that says it speaks wire 1 alone stays on wire 1."""
    connection = bench.connect()
    reply = connection.ask_fields(action="hello", versions=["1.0", "1.1"])
    expect(
        str(reply.get("version", "")).startswith("1."),
        f"a hello for 1.0 and 1.1 was answered with version {reply.get('version')!r}",
    )
    expect(connection.ask_fields(action="ping").get("status") == "PONG", "then a ping on a line got no PONG")


def hello_unknown(bench: Bench) -> None:
    """hello ignores unknown fields, and names the versions and features that the daemon does not know."""
    connection = bench.connect()
    asked: Fields = {"versions": ["2.0", "9.7"], "features": ["batches", "x_compat"], **GREASE}
    reply = connection.ask_fields(action="hello", **asked)
    expect(reply.get("status") == "HELLO", f"a hello with unknown fields got {reply}")
    unknown = set(reply.get("unknown", ()))
    expect(unknown >= {"9.7", "x_compat"}, f"unknown is {sorted(unknown)} and should name 9.7 and x_compat")


def all_features(bench: Bench) -> None:
    """hello lists every feature of wire 2.0."""
    _, reply = bench.connect_framed()
    missing = features_of(WIRE_2_0) - set(reply.features)
    expect(not missing, f"features lacks {', '.join(sorted(missing))}")


CHECKS = (
    Check(
        "hello",
        hello,
        "Clients cannot go on in wire 2. If they fall back they are slower: one exchange for each object.",
        WIRE_2_0,
    ),
    Check(
        "hello.instance",
        hello_instance,
        "Clients believe that the daemon was restarted whenever they ask, and drop all they kept.",
        WIRE_2_0,
    ),
    Check(
        "hello.future",
        hello_future,
        "Clients of later releases are not served as well as this daemon could, or not at all.",
        WIRE_2_0,
    ),
    Check(
        "hello.for-lines",
        hello_for_lines,
        "A client that was set to wire 1 is answered in frames, which it cannot read.",
        WIRE_2_0,
    ),
    Check(
        "hello.unknown",
        hello_unknown,
        "A client does not learn which of its features this daemon lacks.",
        WIRE_2_0,
    ),
    Check(
        "hello.all-features",
        all_features,
        "Parts of wire 2.0 are not there. Clients go without them: without batches a lookup, load or store "
        "of many objects costs one request for each.",
        WIRE_2_0,
        required=False,
    ),
)
