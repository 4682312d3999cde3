"""Frames that no honest client sends: each ends its own connection, with a reason, and no other."""

from __future__ import annotations

import struct

import msgpack

from hypercache_protocol.messages import Ping, PongReply
from hypercache_protocol.versions import WIRE_2_0

from .checks import Bench, Check
from .frames import ends, packed


def hostile_length(bench: Bench) -> None:
    """A frame that claims 4 GiB ends its connection with a reason, and disturbs no other."""
    _ended_by(bench, b"\xff\xff\xff\xff" + b"x" * 64, "a frame that claims 4 GiB")


def hostile_bodies(bench: Bench) -> None:
    """A body that is no [id, word, fields] ends its connection, and disturbs no other."""
    for what, body in _HOSTILE.items():
        _ended_by(bench, struct.pack(">I", len(body)) + body, what)


def _ended_by(bench: Bench, data: bytes, what: str) -> None:
    bystander, _ = bench.connect_framed()
    connection, _ = bench.connect_framed()
    connection.send_bytes(data)
    ends(connection, what)
    bystander.get(Ping(), PongReply)
    bench.connect().get(Ping(), PongReply)


_HOSTILE: dict[str, bytes] = {
    "an empty body": b"",
    "a body of random bytes": b"\xc1\xc1\xc1\xc1",
    "bytes after the list": packed([1, "ping", {}]) + b"\x00",
    "a list cut short": packed([1, "ping", {"x": "y" * 40}])[:-20],
    "a map": packed({"id": 1}),
    "a list of two": packed([1, "ping"]),
    "an id that is a word": packed(["1", "ping", {}]),
    "a negative id": packed([-1, "ping", {}]),
    "the id 0": packed([0, "ping", {}]),
    "an id above 2**53": packed([(1 << 53) + 1, "ping", {}]),
    "an id that is true": packed([True, "ping", {}]),
    "an id with a fraction": packed([1.5, "ping", {}]),
    "a key that is a number": packed([1, "ping", {1: 2}]),
    "an extension type": packed([1, "ping", {"x": msgpack.ExtType(5, b"y")}]),
    "lists in lists, 2000 deep": b"\x93\x01\xa4ping\x81\xa1x" + b"\x91" * 2000 + b"\x90",
    "an array that claims 4 billion items": b"\x93\x01\xa4ping\x81\xa1x\xdd\xff\xff\xff\xff",
}

CHECKS = (
    Check(
        "hostile.length",
        hostile_length,
        "One broken client can take the daemon's memory, or its service from others.",
        WIRE_2_0,
    ),
    Check(
        "hostile.bodies",
        hostile_bodies,
        "One broken client can disturb others, or is answered as if it had asked something.",
        WIRE_2_0,
    ),
)
