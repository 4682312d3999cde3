"""Faults of a daemon in which one connection, or one request under way, disturbs another."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgpack

from ..altered_replies import ID, Altered, Fields, OnReply
from ..relay import FROM_CLIENT, HangUp, Passage
from .rules import Fault, each_with, in_replies

_HEADER = struct.Struct(">I")
_FULL = 1000


def _ids_in_order(frames: list[bytes]) -> list[bytes]:
    """Replies in another order than their ids, which stay where they were."""
    bodies = [msgpack.unpackb(frame[_HEADER.size :]) for frame in frames]
    moved = zip(bodies, reversed(bodies), strict=True)
    packed = [bytes(msgpack.packb([own[0], *other[1:]])) for own, other in moved]
    return [_HEADER.pack(len(body)) + body for body in packed]


def _answers_of_the_gone() -> Callable[[int], Passage]:
    """The last locate of a connection is answered again on the next one, in place of what that asked."""
    kept: dict[int, Fields] = {}

    def rule_of(number: int) -> OnReply:
        def rule(_: Fields, reply: Fields) -> Fields:
            if reply.get("status") != "HIT" or ID in reply:
                return reply
            kept[number] = reply
            return kept.pop(number - 1, reply)

        return rule

    return lambda number: Altered(on_reply=rule_of(number))


def _late_under_the_next_id(request: Fields, reply: Fields) -> Fields:
    """A commit that took its time is answered as if it were the request after it."""
    is_late = ID in reply and "sha256" in request
    return {**reply, ID: reply[ID] + 1} if is_late else reply


class _Cut(Altered):
    """Notes where its client has left off amid a frame."""

    def _is_cut(self) -> bool:
        return self._framed and bool(self._rest[FROM_CLIENT])


class _FallsWithOthers(_Cut):
    """Hangs up once another client has left off amid a frame."""

    def __init__(self, cut: set[_FallsWithOthers]) -> None:
        super().__init__()
        self._cut = cut

    def passed(self, side: str, data: bytes) -> bytes:
        out = super().passed(side, data)
        if self._is_cut():
            self._cut.add(self)
        if self._cut - {self}:
            raise HangUp("another connection broke off")
        return out


class _FillsUp(_Cut):
    """Carries out a frame that lacks its last byte, as a reader into a used buffer would."""

    def passed(self, side: str, data: bytes) -> bytes:
        out = super().passed(side, data)
        if side == FROM_CLIENT and self._is_cut() and self._lacks_one_byte():
            out += super().passed(side, msgpack.packb(False))
        return out

    def _lacks_one_byte(self) -> bool:
        rest = self._rest[FROM_CLIENT]
        return len(rest) > _HEADER.size and _HEADER.unpack_from(rest)[0] == len(rest) - _HEADER.size + 1


class _FallsWithTheDeaf(Altered):
    """Hangs up once another client has asked for more than it reads."""

    def __init__(self, asked: dict[_FallsWithTheDeaf, int]) -> None:
        super().__init__()
        self._counts = asked
        asked[self] = 0

    def passed(self, side: str, data: bytes) -> bytes:
        if side == FROM_CLIENT:
            self._counts[self] += data.count(b"get_status")
        if any(count > _FULL for other, count in list(self._counts.items()) if other is not self):
            raise HangUp("another client does not read")
        return super().passed(side, data)


def _falls_with_others() -> Callable[[int], Passage]:
    cut: set[_FallsWithOthers] = set()
    return lambda _: _FallsWithOthers(cut)


def _falls_with_the_deaf() -> Callable[[int], Passage]:
    asked: dict[_FallsWithTheDeaf, int] = {}
    return lambda _: _FallsWithTheDeaf(asked)


FAULTS: dict[str, Fault] = {
    "replies out of order have the ids of the order": each_with(
        "sessions.any-order", "was answered with", lambda: Altered(in_order=_ids_in_order)
    ),
    "a reply that nobody read goes to the next connection": Fault(
        "sessions.given-up", "speaks of an object of 1 bytes", _answers_of_the_gone
    ),
    "a late reply has the id of the request after it": in_replies(
        "sessions.given-up-in-frames", "under the id 2", _late_under_the_next_id
    ),
    "a connection that broke off takes others with it": Fault(
        "sessions.broken-off", "on another connection", _falls_with_others
    ),
    "a frame that was cut short is carried out": each_with(
        "sessions.broken-off", "was answered with WRITESTAGED", _FillsUp
    ),
    "a client that does not read takes others with it": Fault(
        "sessions.unread", "on another connection", _falls_with_the_deaf
    ),
}
