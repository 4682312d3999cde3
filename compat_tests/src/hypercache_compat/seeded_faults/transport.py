"""Faults of lines, their order and their limits."""

from __future__ import annotations

from collections.abc import Callable

from ..altered_replies import Altered, Fields, OnReply
from ..relay import FROM_CLIENT, FROM_DAEMON, HangUp, Passage
from .rules import (
    Fault,
    asked,
    each_with,
    hang_up_on,
    in_replies,
    in_replies_anew,
    in_requests,
    without,
)

_KNOWN = {"action", "uri", "size_bytes", "auto_flush_s3", "auto_ingest", "pinned", "tier", "#id"}
_LONG = 1 << 19


class _ReadIsLine:
    """Takes each read for a whole line."""

    def passed(self, side: str, data: bytes) -> bytes:
        is_cut = side == FROM_CLIENT and not data.endswith(b"\n")
        return data + b"\n" if is_cut else data


class _FirstLineOnly:
    """Looks at the first line of each read and hangs up over more."""

    def passed(self, side: str, data: bytes) -> bytes:
        if side == FROM_CLIENT and data.count(b"\n") > 1:
            raise HangUp("one thing at a time")
        return data


class _Talkative:
    """Says something unasked with its third answer."""

    def __init__(self) -> None:
        self._answers = 0

    def passed(self, side: str, data: bytes) -> bytes:
        self._answers += side == FROM_DAEMON
        return data + b'{"status":"PONG"}\n' if self._answers == 3 and side == FROM_DAEMON else data


class _OneOfMany:
    """A daemon that has no place for it."""

    def passed(self, _: str, __: bytes) -> bytes:
        raise HangUp("too many connections")


def _few_places() -> Callable[[int], Passage]:
    return lambda number: Altered() if number < 20 else _OneOfMany()


def _shifted() -> OnReply:
    """Each locate is answered with the hit before it."""
    kept: list[Fields] = []

    def rule(_: Fields, reply: Fields) -> Fields:
        if reply.get("status") != "HIT":
            return reply
        kept.append(reply)
        return dict(kept[-2]) if len(kept) > 1 else reply

    return rule


def _refuse_unknown_fields(request: Fields) -> Fields:
    is_strict = request.get("action") in ("locate", "evict", "pin") and not request.keys() <= _KNOWN
    return {**request, "action": "refused"} if is_strict else request


def _hang_up_on_unknown_action(request: Fields, reply: Fields) -> Fields:
    if "unknown action" in reply.get("error_message", ""):
        raise HangUp(request)
    return reply


def _hang_up_on_no_object(request: Fields, reply: Fields) -> Fields:
    return hang_up_on("ERROR")(request, reply) if not request else reply


def _any_number(request: Fields) -> Fields:
    size = request.get("size_bytes")
    return {**request, "size_bytes": int(size)} if isinstance(size, str) else request


def _refuse_long(request: Fields, reply: Fields) -> Fields:
    is_long = len(request.get("x", "")) > _LONG
    return {**reply, "status": "ERROR", "error_message": "too long"} if is_long else reply


FAULTS: dict[str, Fault] = {
    "each read is taken for a line": each_with("transport.byte-by-byte", "no PONG", _ReadIsLine),
    "only the first line of a read is looked at": each_with(
        "transport.two-in-one-piece", "closed the connection", _FirstLineOnly
    ),
    "replies are shifted by one": in_replies_anew("transport.replies-in-order", "speaks of", _shifted),
    "a line comes that nobody asked for": each_with(
        "transport.nothing-unasked", "bytes came that answer no request", _Talkative
    ),
    "unknown fields are refused": in_requests(
        "transport.unknown-fields", "locate with unknown fields", _refuse_unknown_fields
    ),
    "an unknown action ends the connection": in_replies(
        "transport.unknown-action", "closed the connection", _hang_up_on_unknown_action
    ),
    "what is no JSON ends the connection": in_replies(
        "transport.not-json", "closed the connection", _hang_up_on_no_object
    ),
    "a number may be a string": in_requests(
        "transport.wrong-values", "stage_write with {'size_bytes': '10'}", _any_number
    ),
    "a line of 1 MiB is too long": in_replies("transport.longest-line", "no PONG", _refuse_long),
    "no line is too long": in_requests(
        "transport.overlong-line", "was answered with status 'PONG'", asked("ping", without("x"))
    ),
    "half a line is carried out": each_with(
        "transport.half-request", "half a request was answered", _ReadIsLine
    ),
    "there are few places for connections": Fault(
        "transport.many-connections", "closed the connection", _few_places
    ),
}
