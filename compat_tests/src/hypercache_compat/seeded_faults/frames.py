"""Faults of frames and of the announced limits."""

from __future__ import annotations

from ..altered_replies import ID, Altered, Fields, OnReply
from ..relay import FROM_CLIENT, HangUp
from .rules import (
    Change,
    Fault,
    each_with,
    in_replies,
    in_replies_anew,
    in_requests,
    refusing,
    when,
)

_FEW = 100


class _ReadIsFrame(Altered):
    """Takes each read for a whole frame, and gives up over a part of one."""

    def passed(self, side: str, data: bytes) -> bytes:
        out = super().passed(side, data)
        if side == FROM_CLIENT and self._framed and self._rest[FROM_CLIENT]:
            raise HangUp("that is no frame")
        return out


def _crossed_ids() -> OnReply:
    """Hits in frames carry each other's ids."""
    ids: list[int] = []

    def rule(_: Fields, reply: Fields) -> Fields:
        if ID not in reply or reply.get("status") != "HIT":
            return reply
        ids.append(reply[ID])
        return {**reply, ID: ids[-2]} if len(ids) == 2 else reply

    return rule


def _tired() -> OnReply:
    """Hangs up after so many answers."""
    answers: list[Fields] = []

    def rule(_: Fields, reply: Fields) -> Fields:
        answers.append(reply)
        if len(answers) > _FEW:
            raise HangUp("enough")
        return reply

    return rule


def _no_devices_in_frames(request: Fields) -> Fields:
    return refusing(request) if request.get("action") == "get_devices" and ID in request else request


def _other_in_frames(hit: Fields) -> Fields:
    return {**hit, "generation": hit["generation"] + 1} if ID in hit else hit


def _hang_up_on_wrong_frame(_: Fields, reply: Fields) -> Fields:
    if ID in reply and reply.get("status") == "ERROR":
        raise HangUp("that was wrong")
    return reply


def _strict_about_batches(request: Fields) -> Fields:
    is_batch = str(request.get("action")).endswith("_many")
    return refusing(request) if is_batch and "x_compat_flag" in request else request


def _twice(limit: str) -> Change:
    return lambda hello: {**hello, "limits": {**hello["limits"], limit: hello["limits"][limit] * 2}}


FAULTS: dict[str, Fault] = {
    "an action is not there in frames": in_requests(
        "frames.actions", "get_devices was answered with an error", _no_devices_in_frames
    ),
    "frames tell another generation": in_replies(
        "frames.agree-with-lines", "on wire 1 and", when("HIT", _other_in_frames)
    ),
    "replies in frames have each other's ids": in_replies_anew("frames.ids", "answered twice", _crossed_ids),
    "each read is taken for a frame": each_with(
        "frames.byte-by-byte", "does not take what is sent", _ReadIsFrame
    ),
    "a wrong request in a frame ends the connection": in_replies(
        "frames.refusals", "closed the connection", _hang_up_on_wrong_frame
    ),
    "unknown fields of batches are refused": in_requests(
        "frames.unknown-fields", "stage_many with unknown fields", _strict_about_batches
    ),
    "the announced batch is too large": in_replies(
        "limits.batch", "were answered with ERROR", when("HELLO", _twice("max_batch"))
    ),
    "too few requests may be under way": in_replies_anew("limits.in-flight", "closed the connection", _tired),
    "the announced frame is too large": in_replies(
        "limits.frame", "got no PONG", when("HELLO", _twice("max_request_bytes"))
    ),
}
