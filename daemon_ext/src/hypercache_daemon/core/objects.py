"""What the cache keeps: objects, staged writes, and blocks held back from reuse. Plain data."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

from hypercache_protocol.fields import Tier
from hypercache_protocol.states import SyncStatus

from .extents import PACKED_BYTES, Extent, allocated_in, rounded_up, unpacked

CHECKSUM_BYTES = 4
"""Of each CRC-32 among packed ones."""


@dataclass(frozen=True)
class Times:
    """How long blocks rest, in seconds."""

    quarantine_s: float = 10.0
    stage_expiry_s: float = 3600.0


class StoredObject(NamedTuple):
    """A committed object, as small as it can be: what it has of chunks is packed, and unpacked at each call.
    (A tuple is made in a quarter of the time that a frozen dataclass takes.)

    `checksums` has one CRC-32 per extent, or is None where the writer gave none.

    `announced` is what `sync_status` says of it: an old client that asked for no flush never heard of
    LOCAL_ONLY and is told COMMITTED.
    """

    uri: str
    tier: Tier
    size_bytes: int
    packed_extents: bytes
    packed_checksums: bytes | None
    generation: int
    state: SyncStatus
    pinned: bool = False
    sha256: str | None = None
    announce_committed: bool = False

    @property
    def extents(self) -> tuple[Extent, ...]:
        return unpacked(self.packed_extents)

    @property
    def checksums(self) -> tuple[int, ...] | None:
        return None if self.packed_checksums is None else unpacked_checksums(self.packed_checksums)

    @property
    def is_verifiable(self) -> bool:
        """Whether it has checksums."""
        return self.packed_checksums is not None

    @property
    def announced(self) -> SyncStatus:
        if self.announce_committed and self.state is SyncStatus.LOCAL_ONLY:
            return SyncStatus.COMMITTED
        return self.state

    @property
    def allocated_bytes(self) -> int:
        return allocated_in(self.packed_extents)


def packed_checksums(checksums: Sequence[int] | None) -> bytes | None:
    """One CRC-32 after the other, as a StoredObject keeps them."""
    return None if checksums is None else array("I", checksums).tobytes()


def unpacked_checksums(data: bytes) -> tuple[int, ...]:
    """The CRC-32s that were packed."""
    return tuple(array("I", data))


@dataclass(frozen=True, slots=True)
class StageOptions:
    """What a stage_write asks for beside its size."""

    auto_flush: bool
    write_through: bool
    pinned: bool


@dataclass(slots=True)
class StagedWrite:
    """Blocks that one writer fills. It belongs to nobody until it commits.

    `connection_id` is None where the daemon itself writes, an ingest: clients neither find nor drop such a
    write, and it doesn't expire. `overtaken`: another write of its uri was committed since it began.
    """

    stage_id: str
    uri: str
    tier: Tier
    connection_id: int | None
    auto_flush: bool
    write_through: bool
    pinned: bool
    touched_at: float
    packed_extents: bytes
    size_bytes: int
    overtaken: bool = False

    # What a locate says of it where nothing is committed.
    generation: ClassVar[int] = 0
    packed_checksums: ClassVar[bytes | None] = None
    announced: ClassVar[SyncStatus] = SyncStatus.STAGED

    @property
    def extents(self) -> tuple[Extent, ...]:
        return unpacked(self.packed_extents)

    def extents_from(self, first: int) -> tuple[Extent, ...]:
        """Its chunks from number `first` on: who appends many pieces doesn't wait for all before."""
        return unpacked(self.packed_extents[PACKED_BYTES * first :])

    @property
    def chunk_count(self) -> int:
        return len(self.packed_extents) // PACKED_BYTES


class Hold(NamedTuple):
    """Blocks without an owner that are not free yet: somebody may still read or write them.

    `shortenable` holds may end early where too much of the pool is quarantined; those of writers that
    may still be writing may not. The chunks are packed: an eviction makes many holds at once, and what the
    garbage collector must look at holds up everybody.
    """

    hold_id: str
    tier: Tier
    packed_extents: bytes
    release_at: float
    shortenable: bool

    @property
    def extents(self) -> tuple[Extent, ...]:
        return unpacked(self.packed_extents)

    @property
    def allocated_bytes(self) -> int:
        return allocated_in(self.packed_extents)


@dataclass(frozen=True)
class NoSpace:
    """A request that does not fit, and why: every figure in bytes."""

    wanted_bytes: int
    tier: Tier
    total_bytes: int
    free_bytes: int
    staged_bytes: int
    quarantined_bytes: int
    pinned_bytes: int
    dirty_bytes: int
    withheld_bytes: int

    def sentence(self) -> str:
        """What the client is told."""
        withheld = _withheld(self.withheld_bytes)
        return (
            f"no space for {self.wanted_bytes} bytes in the {self.tier.value} pool of {self.total_bytes}: "
            f"free {self.free_bytes}, pinned {self.pinned_bytes}, not yet in a backend {self.dirty_bytes}, "
            f"staged {self.staged_bytes}, quarantined {self.quarantined_bytes}{withheld}"
        )


@dataclass(frozen=True)
class OverCapacity:
    """A request that would bring what lies under a prefix above its limit: every figure in bytes."""

    wanted_bytes: int
    prefix: str
    limit_bytes: int
    used_bytes: int
    staged_bytes: int
    pinned_bytes: int
    dirty_bytes: int
    withheld_bytes: int

    def sentence(self) -> str:
        """What the client is told."""
        withheld = _withheld(self.withheld_bytes)
        return (
            f"no space for {self.wanted_bytes} bytes under {self.prefix}, whose --capacity is "
            f"{self.limit_bytes}: used {self.used_bytes} (pinned {self.pinned_bytes}, not yet in a backend "
            f"{self.dirty_bytes}), staged {self.staged_bytes}{withheld}; evict or unpin some of it, or "
            "ask for a higher limit"
        )


def _withheld(size_bytes: int) -> str:
    return f", on devices that failed {size_bytes}" if size_bytes else ""


NoRoom: TypeAlias = NoSpace | OverCapacity
"""Why a request does not fit."""


@dataclass(frozen=True)
class Usage:
    """One pool in bytes: free + used + staged + quarantined == total."""

    total_bytes: int
    free_bytes: int
    used_bytes: int
    staged_bytes: int
    quarantined_bytes: int


def allocated_bytes(extents: Sequence[Extent]) -> int:
    """What the extents take of their pool, in bytes."""
    return sum([rounded_up(extent.length) for extent in extents])
