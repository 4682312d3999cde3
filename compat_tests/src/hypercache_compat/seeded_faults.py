"""Faults that a daemon could have, made by a relay that alters what is said, and which check sees each."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count

from .altered_replies import ID, Altered, Fields, HangUp, OnReply, OnRequest
from .fault import Fault
from .seeded_session_faults import SESSION_FAULTS

_LAYOUTS = ("HIT", "INGESTED", "WRITESTAGED")
_KNOWN = {"action", "uri", "size_bytes", "auto_flush_s3", "auto_ingest", "pinned", "tier", ID}


def _reply(check: str, words: str, rule: OnReply) -> Fault:
    return _reply_anew(check, words, lambda: rule)


def _reply_anew(check: str, words: str, rule: Callable[[], OnReply]) -> Fault:
    """A rule that remembers, made anew for each connection."""
    return Fault(check, words, lambda: lambda _: Altered(on_reply=rule()))


def _request(check: str, words: str, rule: OnRequest) -> Fault:
    return Fault(check, words, lambda: lambda _: Altered(on_request=rule))


def _when(status: str, change: Callable[[Fields], Fields], action: str | None = None) -> OnReply:
    """Change the replies of one status word, and of one action if it is given."""

    def rule(request: Fields, reply: Fields) -> Fields:
        meant = reply.get("status") == status and action in (None, request.get("action"))
        return change(dict(reply)) if meant else reply

    return rule


def _renamed(old: str, new: str) -> Callable[[Fields], Fields]:
    return lambda reply: {new if name == old else name: value for name, value in reply.items()}


def _without(gone: str) -> Callable[[Fields], Fields]:
    return lambda reply: {name: value for name, value in reply.items() if name != gone}


def _with(**fields: object) -> Callable[[Fields], Fields]:
    return lambda reply: {**reply, **fields}


def _chunks(change: Callable[[list[Fields]], list[Fields]]) -> Callable[[Fields], Fields]:
    return lambda reply: {**reply, "chunk_layout": change([dict(chunk) for chunk in reply["chunk_layout"]])}


# -- rules with more to say ----------------------------------------------------------------------------


def _shifted() -> OnReply:
    """Each locate is answered with the hit before it."""
    kept: list[Fields] = []

    def rule(_: Fields, reply: Fields) -> Fields:
        if reply.get("status") != "HIT" or ID in reply:
            return reply
        kept.append(reply)
        return dict(kept[-2]) if len(kept) > 1 else reply

    return rule


def _crossed_ids() -> OnReply:
    """Hits in frames carry each other's ids."""
    ids: list[int] = []

    def rule(_: Fields, reply: Fields) -> Fields:
        if ID not in reply or reply.get("status") != "HIT":
            return reply
        ids.append(reply[ID])
        return {**reply, ID: ids[-2]} if len(ids) == 2 else reply

    return rule


def _whole_layout() -> OnReply:
    """append_write gives the chunks of before, too."""
    chunks: list[Fields] = []

    def rule(_: Fields, reply: Fields) -> Fields:
        if reply.get("status") != "WRITESTAGED":
            return reply
        chunks.extend(reply["chunk_layout"])
        return {**reply, "chunk_layout": list(chunks)}

    return rule


def _falling_generation() -> OnReply:
    numbers = count(1 << 40, -1)
    return lambda _, reply: {**reply, "generation": next(numbers)} if "generation" in reply else reply


_instances = count()


def _instance_per_connection() -> OnReply:
    instance_id = f"instance {next(_instances)}"
    return lambda _, reply: {**reply, "instance_id": instance_id} if "instance_id" in reply else reply


def _refuse_unknown_fields(request: Fields) -> Fields:
    is_strict = request.get("action") in ("locate", "evict", "pin") and not request.keys() <= _KNOWN
    return {**request, "action": "refused"} if is_strict else request


def _hang_up_on_unknown_action(request: Fields, reply: Fields) -> Fields:
    if "unknown action" in reply.get("error_message", ""):
        raise HangUp(request)
    return reply


def _ignore_stage_id(request: Fields) -> Fields:
    return _without("stage_id")(request) if "stage_id" in request else request


def _keep_everything(request: Fields) -> Fields:
    """Evict asks for nothing, and its PONG passes for a success."""
    return {**_without("uri")(request), "action": "ping"} if request.get("action") == "evict" else request


def _count_any_checksums(request: Fields) -> Fields:
    wrong = request.get("action") == "commit_write" and "chunk_checksums" in request
    return _without("chunk_checksums")(request) if wrong else request


def _commit_of_nothing(request: Fields, reply: Fields) -> Fields:
    refused = request.get("action") == "commit_write" and reply.get("error_code") == "NOT_STAGED"
    told = {"status": "WRITECOMMITTED", "object_size": 0, "sync_status": "COMMITTED"}
    return {**reply, **told} if refused else reply


def _moved_bits(reply: Fields) -> Fields:
    bits = int.from_bytes(reply["present"], "little") >> 1
    return {**reply, "present": bits.to_bytes(len(reply["present"]), "little")}


def _moved_checksums(reply: Fields) -> Fields:
    layouts = reply.get("layouts")
    if not layouts:
        return reply
    words = layouts["chunk_checksums"]
    return {**reply, "layouts": {**layouts, "chunk_checksums": words[4:] + words[:4]}}


def _greedy_limits(reply: Fields) -> Fields:
    limits = reply["limits"]
    return {**reply, "limits": {**limits, "max_batch": limits["max_batch"] * 2}}


def _blind_to_the_future(request: Fields, reply: Fields) -> Fields:
    asked = json.dumps(request.get("versions", []))
    return {**reply, "version": "1.0"} if reply.get("status") == "HELLO" and "9.7" in asked else reply


def _on_top(chunks: list[Fields]) -> list[Fields]:
    place = {name: chunks[0][name] for name in ("device", "offset")} if chunks else {}
    return [*chunks[:-1], {**chunks[-1], **place}] if chunks else chunks


def _swapped_checksums(chunks: list[Fields]) -> list[Fields]:
    words = [chunk.get("checksum") for chunk in chunks]
    return [{**chunk, "checksum": word} for chunk, word in zip(chunks, reversed(words), strict=True)]


FAULTS: dict[str, Fault] = {
    "a field is renamed": _reply(
        "locate.hit", "'object_size' is missing", _when("HIT", _renamed("object_size", "size"))
    ),
    "a field of a chunk is renamed": _reply(
        "locate.hit",
        "chunk_layout[0].offset",
        _when("HIT", _chunks(lambda chunks: [_renamed("offset", "position")(chunk) for chunk in chunks])),
    ),
    "a device lacks a field": _reply(
        "get_devices",
        "is_nvme",
        lambda _, reply: (
            {**reply, "devices": [_without("is_nvme")(device) for device in reply["devices"]]}
            if "instance_id" not in reply and "devices" in reply
            else reply
        ),
    ),
    "a chunk is dropped": _reply(
        "locate.hit", "2 chunks and 3 were staged", _when("HIT", _chunks(lambda chunks: chunks[:-1]))
    ),
    "a chunk is dropped while staging": _reply(
        "write.layouts-add-up", "were asked for", _when("WRITESTAGED", _chunks(lambda chunks: chunks[:-1]))
    ),
    "chunks lie on each other": _reply(
        "write.layouts-add-up", "share bytes", _when("WRITESTAGED", _chunks(_on_top))
    ),
    "a chunk is too long": _reply(
        "write.layouts-add-up",
        "4194304",
        _when("WRITESTAGED", _chunks(lambda chunks: [{**chunk, "length": 1 << 23} for chunk in chunks])),
    ),
    "chunks are out of order": _reply(
        "locate.hit", "chunk 0 lies at", _when("HIT", _chunks(lambda chunks: chunks[::-1]))
    ),
    "replies are shifted by one": _reply_anew("transport.replies-in-order", "speaks of", _shifted),
    "a status word is changed": _reply("pin", "'PINNED'", _when("PONG", _with(status="PINNED"), "pin")),
    "the commit's word is changed": _reply(
        "write.commit", "'DONE'", _when("WRITECOMMITTED", _with(status="DONE"))
    ),
    "a number is a string": _reply(
        "write.commit", "object_size", _when("WRITECOMMITTED", _with(object_size="10487680"))
    ),
    "an error has no sentence": _reply(
        "error.shape", "no error_message", _when("ERROR", _without("error_message"))
    ),
    "a miss is told as an error": _reply(
        "locate.miss", "not MISS", _when("MISS", _with(status="ERROR", error_message="no"), "locate")
    ),
    "evict removes nothing": _request("evict", "HIT", _keep_everything),
    "append gives the whole layout": _reply_anew("write.append", "only the new chunks", _whole_layout),
    "a commit of nothing succeeds": _reply("write.never-staged", "not ERROR", _commit_of_nothing),
    "unknown fields are refused": _request(
        "transport.unknown-fields", "locate with unknown fields", _refuse_unknown_fields
    ),
    "an unknown action ends the connection": _reply(
        "transport.unknown-action", "closed the connection", _hang_up_on_unknown_action
    ),
    "ping lacks its instance_id": _reply(
        "ping.fields", "instance_id", _when("PONG", _without("instance_id"))
    ),
    "instance_id is another on each connection": _reply_anew(
        "ping.fields", "instance_id differs from connection to connection", _instance_per_connection
    ),
    "hello tells another instance_id than ping": _reply(
        "hello.instance", "hello says instance_id 'x'", _when("HELLO", _with(instance_id="x"))
    ),
    "local_only is told as COMMITTED": _reply(
        "local-only", "not LOCAL_ONLY", _when("HIT", _with(sync_status="COMMITTED"))
    ),
    "checksums are swapped": _reply(
        "checksums.come-back", "locate gives the checksums", _when("HIT", _chunks(_swapped_checksums))
    ),
    "checksums are not looked at": _request(
        "checksums.wrong", "chunk_checksums [] for 3 chunks", _count_any_checksums
    ),
    "stage_id is ignored": _request("stage-id.stale", "not ERROR", _ignore_stage_id),
    "stage_id is not told": _reply(
        "stage-id.told", "has no stage_id", _when("WRITESTAGED", _without("stage_id"))
    ),
    "locate tells no sync_status": _reply(
        "sync-status.told", "before the commit", _when("HIT", _without("sync_status"))
    ),
    "the generation does not grow": _reply_anew("generation.grows", "after", _falling_generation),
    "later versions are not understood": _reply("hello.future", "9.7", _blind_to_the_future),
    "replies in frames have each other's ids": _reply_anew("frames.ids", "answered twice", _crossed_ids),
    "the announced batch is too large": _reply(
        "limits.batch", "were answered with ERROR", _when("HELLO", _greedy_limits)
    ),
    "a bitmap is off by one": _reply(
        "batches.presence", "present has the bits", _when("LOCATED_MANY", _moved_bits)
    ),
    "a column is off by one": _reply(
        "batches.agree-with-singles", "checksums of uri 0", _when("LOCATED_MANY", _moved_checksums)
    ),
    **SESSION_FAULTS,
}
"""What is wrong -> how, and which check says so."""
