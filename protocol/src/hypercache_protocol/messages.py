"""Every request and reply, one frozen model each.

A field without a mark is wire 1.0. `Since(...)` names the version that brought an optional one. Unknown
fields are ignored here and counted by the codec.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, StrictStr, model_validator
from typing_extensions import Self

from .errors import ErrorCode
from .fields import (
    CHUNK_SIZE,
    ChunkLength,
    Count,
    Crc32,
    Flag,
    Generation,
    Int32,
    Number,
    Offset,
    Percent,
    Sha256,
    Since,
    SizeBytes,
    StageId,
    Tier,
    TierField,
    Uri,
    Word,
)
from .states import SyncStatus
from .versions import WIRE_1_0, WIRE_1_1, WireVersion

# On every list: a line that is wrong in each of half a million items costs one error, not half a million.
_FAIL_FAST = FailFast()
_V1_1 = Since(WIRE_1_1)
_V1_1_ESSENTIAL = Since(WIRE_1_1, safe_to_drop=False)


class Message(BaseModel):
    """Base of all messages: immutable; unknown fields are ignored. `since` is the wire that brought it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    since: ClassVar[WireVersion] = WIRE_1_0

    @classmethod
    def trusted(cls, **fields: Any) -> Self:
        """A message of values that are known to be right: nothing is checked, and it is several times
        quicker. Fields that are left out have their defaults; one without a default must be given."""
        message = cls.__new__(cls)
        # What pydantic's model_construct does, less the search for aliases.
        object.__setattr__(message, "__dict__", {**_in_order(cls), **fields})
        object.__setattr__(message, "__pydantic_fields_set__", set(fields))
        object.__setattr__(message, "__pydantic_extra__", None)
        object.__setattr__(message, "__pydantic_private__", None)
        return message


@cache
def _in_order(model: type[BaseModel]) -> dict[str, Any]:
    """Field name -> default, in the order in which the fields of `model` are written; `...` for none."""
    return {name: ... if info.is_required() else info.default for name, info in model.model_fields.items()}


# -- parts ---------------------------------------------------------------------------------------------


class ChunkLocation(Message):
    """Where one chunk of an object lies. `device` is a path that the client opens; `offset` and `length`
    are bytes. `checksum` is the CRC-32 of the chunk's `length` bytes, where the writer gave one."""

    device: StrictStr
    offset: Offset
    length: ChunkLength
    tier: TierField = Tier.NVME
    checksum: Annotated[Crc32 | None, _V1_1] = None


class DeviceInfo(Message):
    """One device of the pool, as `get_devices` lists it."""

    path: StrictStr
    is_nvme: Flag
    is_virtual: Flag
    is_partition: Flag
    is_rotational: Flag
    size_bytes: Count
    model: StrictStr | None = None
    existing_fs: StrictStr | None = None
    numa_node: Int32 | None = None


# -- requests ------------------------------------------------------------------------------------------


class Request(Message):
    """Base of all requests; `action` is the word on the wire."""

    action: ClassVar[str]


class Ping(Request):
    """Is the daemon there, and what does it speak?"""

    action: ClassVar[str] = "ping"


class GetDevices(Request):
    """List the pool's devices."""

    action: ClassVar[str] = "get_devices"


class Locate(Request):
    """Where does an object lie? On a miss with `auto_ingest`, fetch it from the place that the uri names.
    `pinned` true pins what is found; false changes nothing. `tier` says where an ingest puts it."""

    action: ClassVar[str] = "locate"
    uri: Uri
    auto_ingest: Flag = True
    pinned: Flag = False
    tier: TierField | None = None


class Ingest(Request):
    """Fetch an object from the place that its uri names, unless it is here already."""

    action: ClassVar[str] = "ingest"
    uri: Uri
    pinned: Flag = False
    tier: TierField | None = None


class Pin(Request):
    """Pin (never evicted by policy) or unpin an object."""

    action: ClassVar[str] = "pin"
    uri: Uri
    pinned: Flag = True


class Evict(Request):
    """Delete one object from the cache."""

    action: ClassVar[str] = "evict"
    uri: Uri


class Purge(Request):
    """Delete every object from the cache."""

    action: ClassVar[str] = "purge"


class GetStatus(Request):
    """Usage, limits and counters, for people and monitoring."""

    action: ClassVar[str] = "get_status"


class StageWrite(Request):
    """Reserve blocks for an object of `size_bytes`; the client writes them and then commits.

    `auto_flush_s3` false means that no backend ever gets it. `is_leader` is recorded and changes nothing.
    """

    action: ClassVar[str] = "stage_write"
    uri: Uri
    size_bytes: SizeBytes
    is_leader: Flag = False
    auto_flush_s3: Flag = True
    write_through: Flag = False
    pinned: Flag = False
    tier: TierField | None = None


class AppendWrite(Request):
    """Reserve `size_bytes` more for a staged write; the reply holds only the new chunks."""

    action: ClassVar[str] = "append_write"
    uri: Uri
    size_bytes: SizeBytes
    tier: TierField | None = None
    stage_id: Annotated[StageId | None, _V1_1_ESSENTIAL] = None


class CommitWrite(Request):
    """Make a staged write the object that `uri` names.

    `chunk_checksums` has one CRC-32 per chunk, in layout order, and may be dropped for an old daemon: the
    object is then unverifiable, which its readers see. `local_only` and `stage_id` may not.
    """

    action: ClassVar[str] = "commit_write"
    uri: Uri
    write_through: Flag = False
    sha256: Sha256 | None = None
    local_only: Annotated[Flag | None, _V1_1_ESSENTIAL] = None
    chunk_checksums: Annotated[tuple[Crc32, ...] | None, _FAIL_FAST, _V1_1] = None
    stage_id: Annotated[StageId | None, _V1_1_ESSENTIAL] = None


class GetWriteStatus(Request):
    """How far is an object on its way to the backend?"""

    action: ClassVar[str] = "get_write_status"
    uri: Uri


class RecordTelemetry(Request):
    """One measurement of a client's transfer, for the daemon's counters."""

    action: ClassVar[str] = "record_telemetry"
    event_type: Word
    uri: Word
    object_size_bytes: Count
    duration_us: Count
    bandwidth_mbps: Number
    client_id: Word = "python_benchmark"
    chunk_count: Count = 1
    local_meta_us: Count = 0
    remote_meta_us: Count = 0
    local_ttfb_us: Count = 0
    remote_ttfb_us: Count = 0
    time_saved_ms: Count = 0
    cpu_pct: Number = 0.0
    status: Word = "OK"


# -- replies -------------------------------------------------------------------------------------------


class Reply(Message):
    """Base of all replies; `status` is the word on the wire."""

    status: ClassVar[str]


class PongReply(Reply):
    """Yes. To a ping it also says what the daemon speaks and which start of the process answers."""

    status: ClassVar[str] = "PONG"
    wire: Annotated[tuple[Count, ...] | None, _FAIL_FAST, _V1_1] = None
    daemon: Annotated[StrictStr | None, _V1_1] = None
    instance_id: Annotated[StrictStr | None, _V1_1] = None
    features: Annotated[tuple[StrictStr, ...] | None, _FAIL_FAST, _V1_1] = None


class DevicesReply(Reply):
    """The pool's devices."""

    status: ClassVar[str] = "OK"
    devices: Annotated[tuple[DeviceInfo, ...], _FAIL_FAST]


class _LayoutReply(Reply):
    object_size: SizeBytes
    chunk_size: Count = CHUNK_SIZE
    chunk_layout: Annotated[tuple[ChunkLocation, ...], _FAIL_FAST]


def _known_status(value: object) -> object:
    # A newer daemon may have states that this side lacks, and old clients ignore words that they do not know.
    return None if isinstance(value, str) and value not in SyncStatus.__members__ else value


_KNOWN_STATUS = BeforeValidator(_known_status)


class HitReply(_LayoutReply):
    """The object is here. `sync_status` STAGED says that nothing was ever committed under this uri; None
    says that the daemon told no state, or one that this side does not know."""

    status: ClassVar[str] = "HIT"
    sync_status: Annotated[SyncStatus | None, _KNOWN_STATUS, _V1_1] = None
    generation: Annotated[Generation | None, _V1_1] = None


class IngestedReply(HitReply):
    """The object was fetched just now and is here."""

    status: ClassVar[str] = "INGESTED"


class MissReply(Reply):
    """The object is not here."""

    status: ClassVar[str] = "MISS"


class EvictedReply(Reply):
    """The object was here and is gone."""

    status: ClassVar[str] = "EVICTED"


class PurgedReply(Reply):
    """Every object is gone."""

    status: ClassVar[str] = "PURGED"


class StatusReply(Reply):
    """Usage and counters: any JSON object; its keys may change from release to release."""

    model_config = ConfigDict(frozen=True, extra="allow")

    status: ClassVar[str] = "OK"

    @model_validator(mode="after")
    def _keeps_the_reply_word(self) -> StatusReply:
        if "status" in (self.model_extra or ()):
            raise ValueError("'status' is the word of the reply itself; name the field otherwise")
        return self


class StagedReply(_LayoutReply):
    """Blocks are reserved; write to `chunk_layout`, then commit. `object_size` is the whole staged size."""

    status: ClassVar[str] = "WRITESTAGED"
    sync_status: Annotated[SyncStatus | None, _KNOWN_STATUS]
    stage_id: Annotated[StageId | None, _V1_1] = None


class CommittedReply(Reply):
    """The object is committed and survives a restart of the daemon."""

    status: ClassVar[str] = "WRITECOMMITTED"
    object_size: SizeBytes
    sync_status: Annotated[SyncStatus | None, _KNOWN_STATUS]
    generation: Annotated[Generation | None, _V1_1] = None


class WriteStatusReply(Reply):
    """Where the object stands; `sync_progress_percent` is 0 to 100."""

    status: ClassVar[str] = "OK"
    sync_status: Annotated[SyncStatus | None, _KNOWN_STATUS]
    sync_progress_percent: Percent


def _known_word(value: object) -> object:
    # A newer daemon may have words that this list lacks; the sentence beside it says enough.
    return value if isinstance(value, str) and value in ErrorCode.__members__ else None


known_code = BeforeValidator(_known_word)
"""On a field for an error code: a word this list lacks is as good as none."""


class ErrorReply(Reply):
    """The request was not carried out. `error_message` is a sentence for people."""

    status: ClassVar[str] = "ERROR"
    error_message: StrictStr
    error_code: Annotated[ErrorCode | None, known_code, _V1_1] = None


# -- tables --------------------------------------------------------------------------------------------

REPLIES: dict[type[Request], tuple[type[Reply], ...]] = {
    Ping: (PongReply,),
    GetDevices: (DevicesReply,),
    Locate: (HitReply, MissReply),
    Ingest: (IngestedReply, HitReply),
    Pin: (PongReply,),
    Evict: (EvictedReply, MissReply),
    Purge: (PurgedReply,),
    GetStatus: (StatusReply,),
    StageWrite: (StagedReply,),
    AppendWrite: (StagedReply,),
    CommitWrite: (CommittedReply,),
    GetWriteStatus: (WriteStatusReply,),
    RecordTelemetry: (PongReply,),
}
"""Request -> the replies, beside ErrorReply, that it may have on wire 1."""

REQUESTS: dict[str, type[Request]] = {request.action: request for request in REPLIES}

# Other spellings that old clients take for the same answer, so other daemons may send them.
STATUS_ALIASES: dict[type[Reply], tuple[str, ...]] = {
    StagedReply: ("WRITE_STAGED",),
    CommittedReply: ("WRITE_COMMITTED",),
    EvictedReply: ("PONG", "OK"),
    PurgedReply: ("PONG", "OK"),
}

# Old clients never look at the status of these replies, so other daemons may send any word, or none.
STATUS_FREE: frozenset[type[Request]] = frozenset({GetDevices, GetStatus, GetWriteStatus})
