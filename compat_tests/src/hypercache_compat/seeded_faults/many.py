"""Faults of batches: what belongs to one name is told of another."""

from __future__ import annotations

from ..altered_replies import Fields
from .rules import Change, Fault, in_replies, when


def _moved_bits(name: str) -> Change:
    def change(reply: Fields) -> Fields:
        bits = int.from_bytes(reply[name], "little") >> 1
        return {**reply, name: bits.to_bytes(len(reply[name]), "little")}

    return change


def _moved_column(name: str, width_bytes: int) -> Change:
    def change(reply: Fields) -> Fields:
        return {**reply, name: reply[name][width_bytes:] + reply[name][:width_bytes]}

    return change


def _of_layouts(change: Change) -> Change:
    return lambda reply: {**reply, "layouts": change(reply["layouts"])} if reply.get("layouts") else reply


def _one_place(layouts: Fields) -> Fields:
    """All chunks lie where the first does."""
    repeated = {}
    for name, width_bytes in (("chunk_offsets", 8), ("chunk_paths", 4)):
        column = layouts[name]
        repeated[name] = column[:width_bytes] * (len(column) // width_bytes)
    return {**layouts, **repeated}


def _blames_the_next(reply: Fields) -> Fields:
    return {**reply, "errors": [{**error, "index": error["index"] + 1} for error in reply["errors"]]}


FAULTS: dict[str, Fault] = {
    "objects that are staged together share blocks": in_replies(
        "batches.stage", "share bytes", when("STAGED_MANY", _of_layouts(_one_place))
    ),
    "sizes in a batch belong to the next name": in_replies(
        "batches.commit",
        "commit_many says the sizes",
        when("COMMITTED_MANY", _moved_column("object_sizes", 8)),
    ),
    "an error in a batch blames the next name": in_replies(
        "batches.own-results", "only that at 2 was wrong", when("COMMITTED_MANY", _blames_the_next)
    ),
    "a bitmap is off by one": in_replies(
        "batches.presence", "present has the bits", when("LOCATED_MANY", _moved_bits("present"))
    ),
    "a column is off by one": in_replies(
        "batches.agree-with-singles",
        "checksums of uri 0",
        when("LOCATED_MANY", _of_layouts(_moved_column("chunk_checksums", 4))),
    ),
    "what is stored is told of the name before it": in_replies(
        "batches.unless-stored",
        "stored has the bits",
        when(
            "STAGED_MANY",
            lambda reply: _moved_bits("stored")(reply) if reply.get("stored") is not None else reply,
        ),
    ),
    "what is evicted is told of the name before it": in_replies(
        "batches.evict", "done has the bits", when("EVICTED_MANY", _moved_bits("done"))
    ),
}
