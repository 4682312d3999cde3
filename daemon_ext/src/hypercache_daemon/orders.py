"""What Stager and Committer are asked for: many uris at once; a request for one is a batch of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypercache_protocol.fields import Tier

from .core.objects import StagedWrite, StageOptions


@dataclass(frozen=True)
class StageOrder:
    """Writes that are to be staged alike, each of `sizes_bytes`.

    `tier` None leaves the choice to the daemon. `connection_id` None is the daemon itself.
    """

    uris: Sequence[str]
    sizes_bytes: Sequence[int]
    options: StageOptions
    tier: Tier | None
    connection_id: int | None


@dataclass(frozen=True)
class CommitOrder:
    """Staged writes that are to be committed alike.

    Of each uri the id of its staged write (None: the connection's newest, else the newest of all) and its
    CRC-32s, packed as a StoredObject keeps them. A `sha256` is that of a single object.
    """

    uris: Sequence[str]
    stage_ids: Sequence[str | None]
    checksums: Sequence[bytes | None]
    local_only: bool
    write_through: bool
    connection_id: int
    sha256: str | None = None

    def is_through(self, staged: StagedWrite) -> bool:
        """Whether this staged write is to be in the backend before the reply."""
        return self.write_through or staged.write_through
