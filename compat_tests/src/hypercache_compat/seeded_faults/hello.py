"""Faults of the hello."""

from __future__ import annotations

import json

from ..altered_replies import Fields
from .rules import Fault, asked, having, in_replies, in_requests, when


def _no_batches(hello: Fields) -> Fields:
    return {**hello, "limits": {**hello["limits"], "max_batch": 0}}


def _without_batches(hello: Fields) -> Fields:
    return {**hello, "features": [word for word in hello["features"] if word != "batches"]}


def _blind_to_the_future(request: Fields, reply: Fields) -> Fields:
    asked_for = json.dumps(request.get("versions", []))
    return {**reply, "version": "1.0"} if reply.get("status") == "HELLO" and "9.7" in asked_for else reply


def _always_frames(hello: Fields) -> Fields:
    return {**hello, "versions": [*hello["versions"], "2.0"]}


FAULTS: dict[str, Fault] = {
    "a limit is 0": in_replies("hello", "the announced limit max_batch is 0", when("HELLO", _no_batches)),
    "hello tells another instance_id than ping": in_replies(
        "hello.instance", "hello says instance_id 'x'", when("HELLO", having(instance_id="x"))
    ),
    "later versions are not understood": in_replies("hello.future", "9.7", _blind_to_the_future),
    "frames are spoken with whoever says hello": in_requests(
        "hello.for-lines", "with version '2.0'", asked("hello", _always_frames)
    ),
    "hello lists no batches": in_replies(
        "hello.all-features", "features lacks batches", when("HELLO", _without_batches)
    ),
    "hello does not tell what is unknown": in_replies(
        "hello.unknown", "should name 9.7 and x_compat", when("HELLO", having(unknown=[]))
    ),
}
