"""Faults of the presence table."""

from __future__ import annotations

from ..altered_replies import Fields
from .rules import Fault, in_replies, when


def _other_seed(reply: Fields) -> Fields:
    return {**reply, "seed": reply["seed"] ^ 1}


FAULTS: dict[str, Fault] = {
    "the words of the table are of another seed": in_replies(
        "presence.table", "calls an object that is checked absent", when("PRESENCE_TABLE", _other_seed)
    ),
}
