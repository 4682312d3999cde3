"""Which requests each wire carries, and the replies that each may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from .batches import FRAMED_REPLIES, Hello, HelloReply
from .messages import REPLIES, ErrorReply, Reply, Request
from .versions import WIRE_2_0, WireVersion

ALL_REPLIES: dict[type[Request], tuple[type[Reply], ...]] = {
    **REPLIES,
    Hello: (HelloReply,),
    **FRAMED_REPLIES,
}
"""Request -> the replies, beside ErrorReply, that it may have; on any wire."""

_EVERY_REPLY = frozenset({ErrorReply, *(reply for replies in ALL_REPLIES.values() for reply in replies)})


def check_request(request: object) -> None:
    """Nothing, where it is a request of any wire.

    Raises:
        TypeError: it is not.
    """
    if type(request) not in ALL_REPLIES:  # isinstance takes ten times as long with pydantic's models
        raise TypeError(f"give a request such as Ping(), of hypercache_protocol, not {request!r}"[:200])


def check_reply(reply: object) -> None:
    """Nothing, where it is a reply of any wire.

    Raises:
        TypeError: it is not.
    """
    if type(reply) not in _EVERY_REPLY:
        raise TypeError(f"give a reply such as PongReply(), of hypercache_protocol, not {reply!r}"[:200])


@cache
def actions_on_lines(version: WireVersion) -> Mapping[str, type[Request]]:
    """Action -> request, of those that a side held to `version` takes as a line."""
    return _by_action([*REPLIES, *((Hello,) if version >= WIRE_2_0 else ())])


@cache
def actions_in_frames(version: WireVersion) -> Mapping[str, type[Request]]:
    """Action -> request, of those that a side held to `version` takes in a frame."""
    return _by_action([*REPLIES, *(request for request in FRAMED_REPLIES if request.since <= version)])


def _by_action(requests: Iterable[type[Request]]) -> dict[str, type[Request]]:
    return {request.action: request for request in requests}
