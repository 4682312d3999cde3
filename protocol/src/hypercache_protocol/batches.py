"""Wire 2's own messages: the hello that begins it, requests for many uris at once, the presence table.

Uris are sent as a prefix and the rest of each, so what they share is sent once. Each uri has a result of
its own: a bit in a bitmap (bit i is the i-th uri; the lowest bit of a byte comes first), and where it was
refused an entry in `errors`. Columns are little-endian arrays in bytes (layout.py has their types).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import FailFast, Field, StrictStr

from .errors import ErrorCode
from .fields import Count, Flag, Since, SizeBytes, StageId, TierField, Word
from .messages import Message, Reply, Request, known_code
from .versions import WIRE_2_0, WIRE_2_1, WIRE_2_2, WireVersion

MAX_BATCH = 4096
"""The most uris that one request may name."""

Column = Annotated[bytes, Field(strict=True)]
Bitmap = Annotated[bytes, Field(strict=True)]
VersionWord = Annotated[StrictStr, Field(max_length=16)]
Suffixes = Annotated[tuple[StrictStr, ...], Field(max_length=MAX_BATCH), FailFast()]


# -- hello ---------------------------------------------------------------------------------------------


class Hello(Request):
    """A client's first line, where it speaks more than wire 1: the `versions` ("2.0") and `features` it
    has, its `name` and its own `version`. Sent and answered as a JSON line; frozen for ever."""

    since: ClassVar[WireVersion] = WIRE_2_0
    action: ClassVar[str] = "hello"
    versions: Annotated[tuple[VersionWord, ...], Field(max_length=64)]
    features: Annotated[tuple[Word, ...], Field(max_length=256)] = ()
    name: Word = ""
    version: Word = ""


class HelloLimits(Message):
    """What the daemon takes: bytes of one frame each way, requests in flight, uris in one request."""

    since: ClassVar[WireVersion] = WIRE_2_0
    max_request_bytes: Count
    max_reply_bytes: Count
    max_in_flight: Count
    max_batch: Count


class HelloReply(Reply):
    """Both sides go on in wire `version`: frames where its major is 2, lines where it is 1."""

    since: ClassVar[WireVersion] = WIRE_2_0
    status: ClassVar[str] = "HELLO"
    version: VersionWord
    versions: tuple[VersionWord, ...]
    features: tuple[StrictStr, ...]
    limits: HelloLimits
    devices: tuple[StrictStr, ...]
    instance_id: StrictStr
    daemon: StrictStr = ""
    unknown: tuple[StrictStr, ...] = ()


# -- batches -------------------------------------------------------------------------------------------


class ItemError(Message):
    """Why the uri at `index` was refused."""

    since: ClassVar[WireVersion] = WIRE_2_0
    index: Count
    error_message: StrictStr
    error_code: Annotated[ErrorCode | None, known_code] = None


class BatchRequest(Request):
    """Base of the requests that name many uris."""

    since: ClassVar[WireVersion] = WIRE_2_0
    prefix: StrictStr = ""
    suffixes: Suffixes

    def uris(self) -> list[str]:
        """The whole uris, in order."""
        prefix = self.prefix
        return [prefix + suffix for suffix in self.suffixes]


class LayoutColumns(Message):
    """Many layouts as columns. Per object: size in bytes, generation, sync status, number of chunks, and a
    bit that says whether its chunks have checksums. Per chunk: index of its path, offset and length in
    bytes, CRC-32."""

    since: ClassVar[WireVersion] = WIRE_2_0
    object_sizes: Column
    generations: Column
    sync_statuses: Column
    chunk_counts: Column
    checksummed: Bitmap
    paths: tuple[StrictStr, ...]
    path_tiers: Column
    chunk_paths: Column
    chunk_offsets: Column
    chunk_lengths: Column
    chunk_checksums: Column


class LocateMany(BatchRequest):
    """Which of these are here, and with `layouts` where they lie. Never fetches and never pins."""

    action: ClassVar[str] = "locate_many"
    layouts: Flag = False


class LocatedMany(Reply):
    """`present` has a bit for each uri that a locate would hit; `verifiable` for those of them that are
    committed and have checksums. `layouts` are those of the present ones, in order."""

    since: ClassVar[WireVersion] = WIRE_2_0
    status: ClassVar[str] = "LOCATED_MANY"
    present: Bitmap
    verifiable: Bitmap
    layouts: LayoutColumns | None = None


class StageMany(BatchRequest):
    """Reserve blocks for each uri; the options are those of stage_write and hold for all. With
    `unless_stored` not where an object of that very size is committed and has checksums."""

    action: ClassVar[str] = "stage_many"
    sizes: Annotated[tuple[SizeBytes, ...], Field(max_length=MAX_BATCH), FailFast()]
    is_leader: Flag = False
    auto_flush_s3: Flag = True
    write_through: Flag = False
    pinned: Flag = False
    tier: TierField | None = None
    unless_stored: Annotated[Flag | None, Since(WIRE_2_1, safe_to_drop=False)] = None


class StagedMany(Reply):
    """`stage_ids` and `layouts` are those of the uris whose bit in `done` is set, in order. `stored` has a
    bit for each uri for which nothing was staged because it is stored; a reply to `unless_stored` has it."""

    since: ClassVar[WireVersion] = WIRE_2_0
    status: ClassVar[str] = "STAGED_MANY"
    done: Bitmap
    stage_ids: tuple[StageId, ...]
    layouts: LayoutColumns
    errors: tuple[ItemError, ...] = ()
    stored: Annotated[Bitmap | None, Since(WIRE_2_1)] = None


class CommitMany(BatchRequest):
    """Commit each staged write. `checksums` are the CRC-32s of all chunks one after another and
    `checksum_counts` says how many belong to each uri; without them nothing can be verified later."""

    action: ClassVar[str] = "commit_many"
    stage_ids: Annotated[tuple[StageId, ...], Field(max_length=MAX_BATCH), FailFast()]
    local_only: Flag = False
    write_through: Flag = False
    checksum_counts: Column | None = None
    checksums: Column | None = None


class CommittedMany(Reply):
    """The columns are those of the uris whose bit in `done` is set, in order; sizes in bytes."""

    since: ClassVar[WireVersion] = WIRE_2_0
    status: ClassVar[str] = "COMMITTED_MANY"
    done: Bitmap
    object_sizes: Column
    generations: Column
    sync_statuses: Column
    errors: tuple[ItemError, ...] = ()


class EvictMany(BatchRequest):
    """Delete each object from the cache. What is named twice is evicted once, and both entries say so."""

    action: ClassVar[str] = "evict_many"


class EvictedMany(Reply):
    """A bit in `done` says that the object was here and is gone; neither bit nor error: it was absent."""

    since: ClassVar[WireVersion] = WIRE_2_0
    status: ClassVar[str] = "EVICTED_MANY"
    done: Bitmap
    errors: tuple[ItemError, ...] = ()


# -- the presence table --------------------------------------------------------------------------------


class GetPresenceTable(Request):
    """Share the presence table."""

    since: ClassVar[WireVersion] = WIRE_2_2
    action: ClassVar[str] = "get_presence_table"


class PresenceTableReply(Reply):
    """One descriptor comes with the first byte of this frame (SCM_RIGHTS): a sealed memfd that can only be
    read, of the size that `table_format`, `seed` and `buckets` make. Without it there is no table."""

    since: ClassVar[WireVersion] = WIRE_2_2
    status: ClassVar[str] = "PRESENCE_TABLE"
    table_format: Count
    seed: Count
    buckets: Count


FRAMED_REPLIES: dict[type[Request], tuple[type[Reply], ...]] = {
    LocateMany: (LocatedMany,),
    StageMany: (StagedMany,),
    CommitMany: (CommittedMany,),
    EvictMany: (EvictedMany,),
    GetPresenceTable: (PresenceTableReply,),
}
