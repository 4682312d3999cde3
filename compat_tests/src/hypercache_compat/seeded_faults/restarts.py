"""Faults of a daemon that was restarted; the relay before it goes on."""

from __future__ import annotations

from .additions import falling_generation
from .rules import Fault, asked, having, in_replies, in_replies_anew, in_requests, when, without

FAULTS: dict[str, Fault] = {
    "a restart loses what was committed": in_replies(
        "restart.committed", "not HIT", when("HIT", having(status="MISS"))
    ),
    "a restart is not told": in_replies(
        "restart.instance", "before and after", when("PONG", having(instance_id="always"))
    ),
    "a write of before a restart commits a newer one": in_requests(
        "restart.staged", "not ERROR", asked("commit_write", without("stage_id"))
    ),
    "generations begin anew": in_replies_anew("restart.generation", "and was", falling_generation),
}
