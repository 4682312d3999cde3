"""Which requests each wire carries, and the replies that each may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from .batches import FRAMED_REPLIES, Hello, HelloReply
from .messages import REPLIES, Reply, Request
from .versions import WIRE_2_0, WireVersion

ALL_REPLIES: dict[type[Request], tuple[type[Reply], ...]] = {
    **REPLIES,
    Hello: (HelloReply,),
    **FRAMED_REPLIES,
}
"""Request -> the replies, beside ErrorReply, that it may have; on any wire."""


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
