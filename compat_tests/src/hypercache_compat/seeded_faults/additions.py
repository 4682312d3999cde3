"""Faults in what wire 1.1 added."""

from __future__ import annotations

from itertools import count

from ..altered_replies import Fields, OnReply
from .rules import Fault, asked, chunks, having, in_replies, in_replies_anew, in_requests, when, without

_instances = count()


def _instance_per_connection() -> OnReply:
    instance_id = f"instance {next(_instances)}"
    return lambda _, reply: {**reply, "instance_id": instance_id} if "instance_id" in reply else reply


def falling_generation() -> OnReply:
    """Each generation of a connection is lower than the one before."""
    numbers = count(1 << 40, -1)
    return lambda _, reply: {**reply, "generation": next(numbers)} if "generation" in reply else reply


def _next_generation(hit: Fields) -> Fields:
    return {**hit, "generation": hit["generation"] + 1}


def _fewer_features(pong: Fields) -> Fields:
    return {**pong, "features": [word for word in pong["features"] if word != "generation"]}


def _swapped_checksums(all_: list[Fields]) -> list[Fields]:
    words = [chunk.get("checksum") for chunk in all_]
    return [{**chunk, "checksum": word} for chunk, word in zip(all_, reversed(words), strict=True)]


FAULTS: dict[str, Fault] = {
    "ping lacks its instance_id": in_replies(
        "ping.fields", "instance_id", when("PONG", without("instance_id"))
    ),
    "instance_id is another on each connection": in_replies_anew(
        "ping.fields", "instance_id differs from connection to connection", _instance_per_connection
    ),
    "a feature is not there": in_replies(
        "ping.all-features", "lacks generation", when("PONG", _fewer_features, "ping")
    ),
    "local_only is told as COMMITTED": in_replies(
        "local-only", "not LOCAL_ONLY", when("HIT", having(sync_status="COMMITTED"))
    ),
    "a contradiction is carried out": in_requests(
        "local-only.contradiction", "not ERROR", asked("commit_write", without("write_through"))
    ),
    "checksums are swapped": in_replies(
        "checksums.come-back", "locate gives the checksums", when("HIT", chunks(_swapped_checksums))
    ),
    "checksums are made up": in_replies(
        "checksums.none",
        "the commit gave none",
        when("HIT", chunks(lambda all_: [{**chunk, "checksum": 0} for chunk in all_])),
    ),
    "checksums are not looked at": in_requests(
        "checksums.wrong",
        "chunk_checksums [] for 3 chunks",
        asked("commit_write", without("chunk_checksums")),
    ),
    "stage_id is not told": in_replies(
        "stage-id.told", "has no stage_id", when("WRITESTAGED", without("stage_id"))
    ),
    "a commit takes the newest write": in_requests(
        "stage-id.chooses",
        "the commit of a staged write of 10 bytes",
        asked("commit_write", without("stage_id")),
    ),
    "stage_id is ignored": in_requests("stage-id.stale", "not ERROR", without("stage_id")),
    "locate tells no sync_status": in_replies(
        "sync-status.told", "before the commit", when("HIT", without("sync_status"))
    ),
    "the generation does not grow": in_replies_anew("generation.grows", "after", falling_generation),
    "locate tells another generation": in_replies(
        "generation.located", "locate says generation", when("HIT", _next_generation)
    ),
    "errors have no codes": in_replies(
        "error.codes", "error_code None", when("ERROR", without("error_code"))
    ),
}
