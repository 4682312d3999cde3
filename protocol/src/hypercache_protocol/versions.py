"""Wire versions and features: what each version brought, and nothing that does I/O."""

from __future__ import annotations

from typing import NamedTuple


class WireVersion(NamedTuple):
    """A wire version; versions with one `major` share a codec and understand each other."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


WIRE_1_0 = WireVersion(1, 0)
WIRE_1_1 = WireVersion(1, 1)
WIRE_2_0 = WireVersion(2, 0)
WIRE_2_1 = WireVersion(2, 1)
WIRE_2_2 = WireVersion(2, 2)

RELEASED = (WIRE_1_0, WIRE_1_1, WIRE_2_0, WIRE_2_1, WIRE_2_2)
LATEST = RELEASED[-1]

# What a version can do beyond the one before it, in the words a ping reply carries.
FEATURES: dict[WireVersion, frozenset[str]] = {
    WIRE_1_0: frozenset(),
    WIRE_1_1: frozenset({"local_only", "chunk_checksums", "stage_id", "sync_status", "generation"}),
    WIRE_2_0: frozenset({"frames", "batches"}),
    WIRE_2_1: frozenset({"unless_stored"}),
    WIRE_2_2: frozenset({"presence_table"}),
}


def features_of(version: WireVersion) -> frozenset[str]:
    """Every feature that a peer of `version` has."""
    return frozenset().union(*(words for since, words in FEATURES.items() if since <= version))


def majors_up_to(version: WireVersion) -> tuple[int, ...]:
    """The wire majors that a daemon held to `version` speaks, for the `wire` field of its ping reply."""
    return tuple(sorted({released.major for released in RELEASED if released <= version}))
