"""Faults of stage, append and commit."""

from __future__ import annotations

from collections.abc import Callable

from ..altered_replies import Altered, Fields, OnReply
from .rules import (
    Fault,
    asked,
    chunks,
    each_with,
    having,
    in_replies,
    in_replies_anew,
    in_requests,
    refusing,
    when,
    without,
)


def _on_top(all_: list[Fields]) -> list[Fields]:
    place = {name: all_[0][name] for name in ("device", "offset")} if all_ else {}
    return [*all_[:-1], {**all_[-1], **place}] if all_ else all_


def _whole_layout() -> OnReply:
    """append_write gives the chunks of before, too."""
    before: list[Fields] = []

    def rule(_: Fields, reply: Fields) -> Fields:
        if reply.get("status") != "WRITESTAGED":
            return reply
        before.extend(reply["chunk_layout"])
        return {**reply, "chunk_layout": list(before)}

    return rule


def _same_blocks() -> OnReply:
    """Each staged write begins where the first one did."""
    first: list[Fields] = []

    def rule(_: Fields, reply: Fields) -> Fields:
        if reply.get("status") != "WRITESTAGED":
            return reply
        first.extend(reply["chunk_layout"][:1])
        place = {name: first[0][name] for name in ("device", "offset")}
        return {**reply, "chunk_layout": [{**reply["chunk_layout"][0], **place}, *reply["chunk_layout"][1:]]}

    return rule


def _packed() -> OnReply:
    """The second object begins in the block that the first one ends in, without a byte in common."""
    begun: list[Fields] = []

    def rule(_: Fields, reply: Fields) -> Fields:
        layout = reply.get("chunk_layout")
        if reply.get("status") != "WRITESTAGED" or not layout:
            return reply
        begun.append(layout[0])
        if len(begun) != 2:
            return reply
        first = begun[0]
        place = {"device": first["device"], "offset": first["offset"] + 512}
        return {**reply, "chunk_layout": [{**layout[0], **place}, *layout[1:]]}

    return rule


class _OwnWritesOnly(Altered):
    """Knows a staged write on the connection that staged it, and on no other."""

    def __init__(self) -> None:
        super().__init__(on_request=self._known)
        self._staged: set[str] = set()

    def _known(self, request: Fields) -> Fields:
        if request.get("action") == "stage_write":
            self._staged.add(request["uri"])
        is_foreign = request.get("action") in ("append_write", "commit_write")
        return refusing(request) if is_foreign and request["uri"] not in self._staged else request


def _commit_of_nothing(request: Fields, reply: Fields) -> Fields:
    refused = request.get("action") == "commit_write" and reply.get("error_code") == "NOT_STAGED"
    told = {"status": "WRITECOMMITTED", "object_size": 0, "sync_status": "COMMITTED"}
    return {**reply, **told} if refused else reply


def _staged_is_absent(_: Fields, reply: Fields) -> Fields:
    return (
        {"status": "MISS"} if (reply.get("status"), reply.get("sync_status")) == ("HIT", "STAGED") else reply
    )


def _empty_is_absent(_: Fields, reply: Fields) -> Fields:
    return {"status": "MISS"} if (reply.get("status"), reply.get("object_size")) == ("HIT", 0) else reply


def _cut_to_fit(request: Fields) -> Fields:
    return {**request, "size_bytes": min(request["size_bytes"], 1)}


def _small_letters_only(request: Fields) -> Fields:
    return refusing(request) if str(request.get("tier", "")).isupper() else request


def _elsewhere(all_: list[Fields]) -> list[Fields]:
    return [{**chunk, "offset": chunk["offset"] + 4096} for chunk in all_]


def _ending(ending: str) -> Callable[[list[Fields]], list[Fields]]:
    """Files have names with another ending."""
    return lambda all_: [{**each, "device": each["device"].removesuffix(".shm") + ending} for each in all_]


FAULTS: dict[str, Fault] = {
    "a chunk is dropped while staging": in_replies(
        "write.layouts-add-up", "were asked for", when("WRITESTAGED", chunks(lambda all_: all_[:-1]))
    ),
    "chunks lie on each other": in_replies(
        "write.layouts-add-up", "share bytes", when("WRITESTAGED", chunks(_on_top))
    ),
    "objects share a block": in_replies_anew("write.layouts-add-up", "share the 4096 bytes", _packed),
    "a chunk is too long": in_replies(
        "write.layouts-add-up",
        "4194304",
        when("WRITESTAGED", chunks(lambda all_: [{**chunk, "length": 1 << 23} for chunk in all_])),
    ),
    "a staged write looks committed": in_replies(
        "write.staged", "COMMITTED", when("WRITESTAGED", having(sync_status="COMMITTED"))
    ),
    "a staged write is not found": in_replies("write.staged-is-found", "MISS", _staged_is_absent),
    "append gives the whole layout": in_replies_anew("write.append", "only the new chunks", _whole_layout),
    "the commit's word is changed": in_replies(
        "write.commit", "'DONE'", when("WRITECOMMITTED", having(status="DONE"))
    ),
    "a number is a string": in_replies(
        "write.commit", "object_size", when("WRITECOMMITTED", having(object_size="10487680"))
    ),
    "an empty object is not found": in_replies("write.empty", "MISS", _empty_is_absent),
    "a commit of nothing succeeds": in_replies("write.never-staged", "not ERROR", _commit_of_nothing),
    "a second commit succeeds": in_replies("write.second-commit", "not ERROR", _commit_of_nothing),
    "a new version is written over the old one": in_replies_anew(
        "write.overwrite", "share bytes", _same_blocks
    ),
    "a write belongs to its connection": each_with("write.across-connections", "an error", _OwnWritesOnly),
    "a wrong sha256 is not looked at": in_requests(
        "write.wrong-sha256", "WRITECOMMITTED", asked("commit_write", without("sha256"))
    ),
    "a write that does not fit is cut": in_requests(
        "write.no-space", "WRITESTAGED", asked("stage_write", _cut_to_fit)
    ),
    "tiers are told apart by case": in_requests("write.tier-words", "tier 'NVME'", _small_letters_only),
    "RAM chunks share a file": in_replies(
        "write.ram-files",
        "share a file",
        when("WRITESTAGED", chunks(lambda all_: [{**each, "device": all_[0]["device"]} for each in all_])),
    ),
    "RAM files are for the client to make": in_replies(
        "write.ram-files", "is not there", when("WRITESTAGED", chunks(_ending(".new.shm")))
    ),
    "RAM files have any name": in_replies(
        "write.ram-files", "does not end in .shm", when("WRITESTAGED", chunks(_ending(".bin")))
    ),
    "locate names other blocks": in_replies(
        "write.bytes-come-back", "other bytes came back", when("HIT", chunks(_elsewhere))
    ),
}
