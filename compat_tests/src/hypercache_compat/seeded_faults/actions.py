"""Faults of the actions that write nothing."""

from __future__ import annotations

from ..altered_replies import Fields
from .rules import (
    Fault,
    asked,
    chunks,
    having,
    in_replies,
    in_requests,
    refusing,
    renamed,
    when,
    without,
)

_NOTHING = {"object_size": 0, "chunk_layout": ()}


def _devices_lack_a_field(_: Fields, reply: Fields) -> Fields:
    if "instance_id" in reply or "devices" not in reply:
        return reply
    return {**reply, "devices": [without("is_nvme")(device) for device in reply["devices"]]}


def _keep_everything(request: Fields) -> Fields:
    """Asks for nothing, and the PONG passes for a success."""
    return {**without("uri")(request), "action": "ping"}


def _letters_of_one_case(request: Fields) -> Fields:
    return {**request, "uri": request["uri"].lower()} if "uri" in request else request


FAULTS: dict[str, Fault] = {
    "a ping gets another word": in_replies("ping", "'ALIVE'", when("PONG", having(status="ALIVE"), "ping")),
    "a device lacks a field": in_replies("get_devices", "is_nvme", _devices_lack_a_field),
    "the status is refused": in_requests("get_status", "an error", asked("get_status", refusing)),
    "a miss is told as an error": in_replies("locate.miss", "not MISS", when("MISS", refusing, "locate")),
    "a field is renamed": in_replies(
        "locate.hit", "'object_size' is missing", when("HIT", renamed("object_size", "size"))
    ),
    "a field of a chunk is renamed": in_replies(
        "locate.hit",
        "chunk_layout[0].offset",
        when("HIT", chunks(lambda all_: [renamed("offset", "position")(chunk) for chunk in all_])),
    ),
    "a chunk is dropped": in_replies(
        "locate.hit", "2 chunks and 3 were staged", when("HIT", chunks(lambda all_: all_[:-1]))
    ),
    "chunks are out of order": in_replies(
        "locate.hit", "chunk 0 lies at", when("HIT", chunks(lambda all_: all_[::-1]))
    ),
    "names are told apart without regard to case": in_requests(
        "locate.odd-names", "was written with", _letters_of_one_case
    ),
    "ingest gives another layout": in_replies(
        "ingest.hit", "0 chunks and 1 were staged", when("HIT", having(**_NOTHING), "ingest")
    ),
    "a failed ingest is told as a success": in_replies(
        "ingest.error", "INGESTED", when("ERROR", having(status="INGESTED", **_NOTHING), "ingest")
    ),
    "a status word is changed": in_replies("pin", "'PINNED'", when("PONG", having(status="PINNED"), "pin")),
    "a pin of nothing succeeds": in_replies("pin.error", "PONG", when("ERROR", having(status="PONG"), "pin")),
    "evict removes nothing": in_requests("evict", "HIT", asked("evict", _keep_everything)),
    "an evict of nothing succeeds": in_replies(
        "evict.miss", "EVICTED", when("MISS", having(status="EVICTED"), "evict")
    ),
    "the progress has another name": in_replies(
        "write-status",
        "sync_progress_percent",
        when("OK", renamed("sync_progress_percent", "progress"), "get_write_status"),
    ),
    "what is not here is being uploaded": in_replies(
        "write-status.error",
        "answered with OK",
        when(
            "ERROR",
            lambda _: {"status": "OK", "sync_status": "COMMITTED", "sync_progress_percent": 0},
            "get_write_status",
        ),
    ),
    "telemetry is refused": in_requests("telemetry", "an error", asked("record_telemetry", refusing)),
    "telemetry without figures is counted": in_replies(
        "telemetry.error", "PONG", when("ERROR", having(status="PONG"), "record_telemetry")
    ),
    "an error has no sentence": in_replies(
        "error.shape", "no error_message", when("ERROR", without("error_message"))
    ),
    "purge removes nothing": in_requests("purge", "HIT", asked("purge", _keep_everything)),
}
