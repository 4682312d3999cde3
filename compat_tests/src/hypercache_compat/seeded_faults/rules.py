"""What a seeded fault is, and the rules that many of them are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..altered_replies import Altered, Fields, OnReply, OnRequest
from ..relay import HangUp, Passage

Change = Callable[[Fields], Fields]


@dataclass(frozen=True)
class Fault:
    """`check` is the name of a check that must fail, and `words` are in what it says.

    `passages` makes, for one relay, what makes the passage of each of its connections: what the passages
    of one relay share is anew for the next.
    """

    check: str
    words: str
    passages: Callable[[], Callable[[int], Passage]]


def each_with(check: str, words: str, make: Callable[[], Passage]) -> Fault:
    """Each connection has a passage of its own, which knows nothing of the others."""
    return Fault(check, words, lambda: lambda _: make())


def in_replies(check: str, words: str, rule: OnReply) -> Fault:
    """Each reply is given as `rule` says."""
    return each_with(check, words, lambda: Altered(on_reply=rule))


def in_replies_anew(check: str, words: str, rule: Callable[[], OnReply]) -> Fault:
    """The same with a rule that remembers, made anew for each connection."""
    return each_with(check, words, lambda: Altered(on_reply=rule()))


def in_requests(check: str, words: str, rule: OnRequest) -> Fault:
    """The daemon gets each request as `rule` says."""
    return each_with(check, words, lambda: Altered(on_request=rule))


# -- which messages ------------------------------------------------------------------------------------


def when(status: str, change: Change, action: str | None = None) -> OnReply:
    """Change the replies of one status word, and of one action if it is given."""

    def rule(request: Fields, reply: Fields) -> Fields:
        meant = reply.get("status") == status and action in (None, request.get("action"))
        return change(dict(reply)) if meant else reply

    return rule


def asked(action: str, change: Change) -> OnRequest:
    """Change the requests of one action."""
    return lambda request: change(dict(request)) if request.get("action") == action else request


def hang_up_on(status: str) -> OnReply:
    """End the connection instead of such a reply."""

    def hang_up(reply: Fields) -> Fields:
        raise HangUp(reply)

    return when(status, hang_up)


# -- how they change -----------------------------------------------------------------------------------


def renamed(old: str, new: str) -> Change:
    return lambda fields: {new if name == old else name: value for name, value in fields.items()}


def without(gone: str) -> Change:
    return lambda fields: {name: value for name, value in fields.items() if name != gone}


def having(**more: object) -> Change:
    return lambda fields: {**fields, **more}


def refusing(fields: Fields) -> Fields:
    """A request that no daemon knows; or an error for a reply."""
    if "action" in fields:
        return {**fields, "action": "x_compat_refused"}
    return {**fields, "status": "ERROR", "error_message": "this daemon does not want to"}


def chunks(change: Callable[[list[Fields]], list[Fields]]) -> Change:
    return lambda reply: {**reply, "chunk_layout": change([dict(chunk) for chunk in reply["chunk_layout"]])}
