"""What a client says to a daemon first, and what it makes of the answer. Pure; connection.py says it.

Rules:
1. A daemon of wire 2 answers a hello. What an older one makes of it is unknown, so that one is asked by a
   ping, which each understands.
2. Only a daemon has an error code: an error without one may come from anything that listens there.
"""

from __future__ import annotations

from importlib.metadata import version as distribution_version

from hypercache_protocol import WIRE_1_0, WIRE_1_1, WireVersion
from hypercache_protocol.batches import Hello, HelloLimits
from hypercache_protocol.messages import ErrorReply, PongReply, Reply
from hypercache_protocol.negotiation import spoken
from hypercache_protocol.session import DEFAULT_LIMITS
from hypercache_protocol.versions import RELEASED, features_of

from .outcomes import DaemonUnavailable, Outcome

_OWN_VERSION = distribution_version("hypercache-ext")  # once: it reads files


def hello_of(version: WireVersion) -> Hello:
    """The hello of a client that speaks `version` at most."""
    return Hello(
        versions=spoken(version),
        features=tuple(sorted(features_of(version))),
        name="hypercache-connector",
        version=_OWN_VERSION,
    )


def within_own(announced: HelloLimits) -> HelloLimits:
    """The daemon's limits, as far as this side's session can go."""
    most = min(announced.max_request_bytes, DEFAULT_LIMITS.max_request_bytes)
    return announced.model_copy(update={"max_request_bytes": most})


def wire_of(reply: PongReply) -> WireVersion:
    """The wire of lines that a daemon speaks: one that has anything of 1.1 knows its fields."""
    return WIRE_1_1 if features_of(WIRE_1_1) & frozenset(reply.features or ()) else WIRE_1_0


def turned_away(reply: Reply) -> DaemonUnavailable:
    """What it means that a ping was not answered by a pong."""
    if isinstance(reply, ErrorReply) and reply.error_code:
        sentence = f"the daemon refuses: {reply.error_message}"
        return DaemonUnavailable(Outcome.TURNED_AWAY, sentence, reply.error_code)
    return DaemonUnavailable(Outcome.DAEMON_GARBLED, f"the daemon answered a ping with {reply!r}"[:200])


def what_is_missing(missing: frozenset[str], agreed: WireVersion, most: WireVersion) -> str:
    """A sentence that names both versions, and which side to change."""
    needed = next(version for version in RELEASED if missing <= features_of(version))
    words = ", ".join(sorted(missing))
    if most < needed:
        return f"this client is held to wire {most} and {words} need wire {needed}; give it a newer 'wire'"
    return f"the daemon lacks {words}; upgrade it to wire {needed} or newer (it speaks wire {agreed})"
