"""What a check is, what it gets to work with, and the steps that many of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypercache_protocol.batches import Hello, HelloReply
from hypercache_protocol.fields import CHUNK_SIZE, MIB, Tier
from hypercache_protocol.messages import (
    ChunkLocation,
    CommittedReply,
    CommitWrite,
    HitReply,
    Locate,
    StagedReply,
    StageWrite,
)
from hypercache_protocol.states import SyncStatus
from hypercache_protocol.versions import WIRE_1_0, WIRE_2_0, WireVersion

from .shell import Connection, Exchange, expect

BLOCK_BYTES = 4096
"""What is written at once by clients that write past the page cache."""

ODD_SIZE = 2 * CHUNK_SIZE + MIB + 1920
"""Bytes of an object of three chunks, the last one of an odd length."""


Restart = Callable[[], None]
"""Restarts the daemon and returns once it answers again; raises CheckFailed where it does not."""


@dataclass(frozen=True)
class Offer:
    """What the daemon says of itself: the newest wire, its features, and its name."""

    version: WireVersion
    features: frozenset[str] = frozenset()
    daemon: str = ""


class Bench:
    """What one check works with: connections that are closed after it, and uris that are removed."""

    def __init__(
        self, socket_path: str, timeout_s: float, prefix: str, restart: Restart | None = None
    ) -> None:
        self.exchange = Exchange()
        self.uris: list[str] = []
        self._socket_path = socket_path
        self._timeout_s = timeout_s
        self._prefix = prefix
        self._restart = restart
        self._connections = 0
        self._open = ExitStack()

    def connect(self) -> Connection:
        """A new connection, on wire 1."""
        self._connections += 1
        connection = Connection(self._socket_path, self._timeout_s, self.exchange, self._connections)
        return self._open.enter_context(connection)

    def connect_apart(self) -> Connection:
        """A connection whose bytes are not kept; the caller closes it."""
        return Connection(self._socket_path, self._timeout_s, Exchange(), 0)

    def connect_framed(self, version: WireVersion = WIRE_2_0) -> tuple[Connection, HelloReply]:
        """A new connection that went on in wire 2, and what the daemon said to the hello."""
        connection = self.connect()
        return connection, connection.go_framed(Hello(versions=(str(version),), name="hypercache-compat"))

    def uri(self, name: str) -> str:
        """A uri that only this check uses."""
        uri = f"{self._prefix}{name}"
        self.uris.append(uri)
        return uri

    def restart(self) -> None:
        """Restart the daemon; every connection to it is dead then."""
        assert self._restart is not None, "a check that needs a restart is not run without one"
        self._restart()

    def close(self) -> None:
        """Close every connection."""
        self._open.close()


@dataclass(frozen=True)
class Check:
    """One thing that a daemon must do, or should (`required` False).

    `means` says what it means for the people who run the daemon when it fails. `feature` is the word that
    a daemon lists where it has this. `empties_cache` and `needs_restart` mark what may only run with the
    operator's word.
    """

    name: str
    run: Callable[[Bench], None]
    means: str
    since: WireVersion = WIRE_1_0
    required: bool = True
    feature: str | None = None
    empties_cache: bool = False
    needs_restart: bool = False

    @property
    def what(self) -> str:
        """What is checked, in one sentence."""
        return " ".join((self.run.__doc__ or "").split())


@dataclass
class Stored:
    """One object that a check wrote."""

    uri: str
    staged: StagedReply
    committed: CommittedReply
    chunks: tuple[ChunkLocation, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = self.staged.chunk_layout


def stage(connection: Connection, uri: str, size_bytes: int, tier: Tier | None = None) -> StagedReply:
    """A staged write of `size_bytes` whose layout adds up. It is never flushed to a backend."""
    request = StageWrite(uri=uri, size_bytes=size_bytes, auto_flush_s3=False, tier=tier)
    reply = connection.get(request, StagedReply)
    check_layout("stage_write", reply.chunk_layout, size_bytes)
    expect(
        reply.object_size == size_bytes,
        f"stage_write of {size_bytes} bytes says object_size {reply.object_size}",
    )
    return reply


def store(connection: Connection, uri: str, size_bytes: int, **commit: Any) -> Stored:
    """A staged and committed object, of whatever bytes its blocks hold."""
    staged = stage(connection, uri, size_bytes)
    committed = connection.get(CommitWrite(uri=uri, **commit), CommittedReply)
    return Stored(uri, staged, committed)


def store_checked(connection: Connection, uri: str) -> None:
    """A committed object of ODD_SIZE with checksums, which are not those of its bytes."""
    chunks = stage(connection, uri, ODD_SIZE).chunk_layout
    words = tuple(range(len(chunks)))
    connection.get(CommitWrite(uri=uri, chunk_checksums=words, local_only=True), CommittedReply)


def locate(connection: Connection, uri: str) -> HitReply:
    """The hit that a locate of `uri` must be."""
    return connection.get(Locate(uri=uri, auto_ingest=False), HitReply)


def check_layout(action: str, chunks: Sequence[ChunkLocation], size_bytes: int) -> None:
    """Nothing where the chunks together are `size_bytes` long, at most 4 MiB each, and lie apart.

    Raises:
        CheckFailed: they are not. Longer chunks never come this far: the models refuse them.
    """
    total = sum(chunk.length for chunk in chunks)
    expect(
        total == size_bytes,
        f"{action}: the {len(chunks)} chunks hold {total} bytes together and {size_bytes} were asked for",
    )
    check_apart(action, chunks)


def check_apart(action: str, chunks: Sequence[ChunkLocation]) -> None:
    """Nothing where no two chunks share a byte, nor what a client may fill up with zeros behind one.

    Raises:
        CheckFailed: two do.
    """
    spans = sorted((chunk.device, chunk.offset, chunk.offset + chunk.length) for chunk in chunks)
    for (device, offset, end), (next_device, start, _) in pairwise(spans):
        if device != next_device:
            continue
        expect(end <= start, f"{action}: two chunks share bytes of {device} at {start}")
        expect(
            _written_up_to(offset, end) <= start,
            f"{action}: a chunk that ends at {end} of {device} and one that begins at {start} share the "
            f"{BLOCK_BYTES} bytes that some clients write at once",
        )


def _written_up_to(offset: int, end: int) -> int:
    """Where a write of these bytes ends: who writes past the page cache fills the last block with zeros."""
    return end if offset % BLOCK_BYTES else -(-end // BLOCK_BYTES) * BLOCK_BYTES


def places(chunks: Sequence[ChunkLocation]) -> list[tuple[str, int, int]]:
    """Device, offset and length of each chunk, in order."""
    return [(chunk.device, chunk.offset, chunk.length) for chunk in chunks]


def check_places(what: str, found: Sequence[ChunkLocation], wanted: Sequence[ChunkLocation]) -> None:
    """Nothing where both name the same places in the same order.

    Raises:
        CheckFailed: they differ.
    """
    expect(len(found) == len(wanted), f"{what} has {len(found)} chunks and {len(wanted)} were staged")
    for index, (got, want) in enumerate(zip(places(found), places(wanted), strict=True)):
        expect(got == want, f"{what}: chunk {index} lies at {got} and was staged at {want}")


def word(status: SyncStatus | None) -> str:
    """A sync status as the wire has it."""
    return "nothing that is known" if status is None else status.value
