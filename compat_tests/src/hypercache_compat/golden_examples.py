"""The messages whose bytes are frozen: each request and reply plain, full, and at the edges of its fields.

Add examples freely; an example whose file exists must never change.
"""

from __future__ import annotations

from hypercache_protocol.batches import (
    FRAMED_REPLIES,
    MAX_BATCH,
    CommitMany,
    CommittedMany,
    EvictedMany,
    EvictMany,
    GetPresenceTable,
    Hello,
    HelloLimits,
    HelloReply,
    ItemError,
    LayoutColumns,
    LocatedMany,
    LocateMany,
    PresenceTableReply,
    StagedMany,
    StageMany,
)
from hypercache_protocol.errors import ErrorCode
from hypercache_protocol.fields import CHUNK_SIZE, MAX_OBJECT_BYTES, Tier
from hypercache_protocol.messages import (
    REQUESTS,
    AppendWrite,
    ChunkLocation,
    CommittedReply,
    CommitWrite,
    DeviceInfo,
    DevicesReply,
    ErrorReply,
    Evict,
    EvictedReply,
    GetDevices,
    GetStatus,
    GetWriteStatus,
    HitReply,
    Ingest,
    IngestedReply,
    Locate,
    MissReply,
    Pin,
    Ping,
    PongReply,
    Purge,
    PurgedReply,
    RecordTelemetry,
    Reply,
    Request,
    StagedReply,
    StageWrite,
    StatusReply,
    WriteStatusReply,
)
from hypercache_protocol.states import SyncStatus

URI = "hypercache://models/llama/model.safetensors"
ODD_URI = 's3://bücher/模型 "x"\\🚀\n'
DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
MOST = (1 << 63) - 1

CHUNKS = (
    ChunkLocation(device="/dev/nvme0n1", offset=1 << 30, length=CHUNK_SIZE),
    ChunkLocation(device="/dev/nvme1n1", offset=4096, length=1920),
)
RAM_CHUNKS = (ChunkLocation(device="/dev/shm/hypercache/0.shm", offset=0, length=1, tier=Tier.RAM),)
CHECKED_CHUNKS = (
    ChunkLocation(device="/dev/nvme0n1", offset=0, length=CHUNK_SIZE, checksum=0),
    ChunkLocation(device="/dev/nvme1n1", offset=1 << 62, length=1, checksum=0xFFFFFFFF),
)
SIZE = CHUNK_SIZE + 1920

# (action, name) -> request
REQUEST_EXAMPLES: dict[tuple[str, str], Request] = {
    ("ping", "plain"): Ping(),
    ("get_devices", "plain"): GetDevices(),
    ("locate", "plain"): Locate(uri=URI),
    ("locate", "full"): Locate(uri=URI, auto_ingest=False, pinned=True, tier=Tier.RAM),
    ("locate", "odd-uri"): Locate(uri=ODD_URI),
    ("ingest", "plain"): Ingest(uri=URI),
    ("ingest", "full"): Ingest(uri="file:///srv/a.bin", pinned=True, tier=Tier.NVME),
    ("pin", "plain"): Pin(uri=URI),
    ("pin", "unpin"): Pin(uri=URI, pinned=False),
    ("evict", "plain"): Evict(uri=URI),
    ("purge", "plain"): Purge(),
    ("get_status", "plain"): GetStatus(),
    ("stage_write", "plain"): StageWrite(uri=URI, size_bytes=SIZE),
    ("stage_write", "full"): StageWrite(
        uri=URI,
        size_bytes=MAX_OBJECT_BYTES,
        is_leader=True,
        auto_flush_s3=False,
        write_through=True,
        pinned=True,
        tier=Tier.RAM,
    ),
    ("stage_write", "empty"): StageWrite(uri=URI, size_bytes=0),
    ("append_write", "plain"): AppendWrite(uri=URI, size_bytes=1920),
    ("append_write", "tier"): AppendWrite(uri=URI, size_bytes=CHUNK_SIZE, tier=Tier.NVME),
    ("append_write", "full"): AppendWrite(uri=URI, size_bytes=1, tier=Tier.RAM, stage_id="0c6f-17"),
    ("commit_write", "plain"): CommitWrite(uri=URI),
    ("commit_write", "through"): CommitWrite(uri=URI, write_through=True, sha256=DIGEST),
    ("commit_write", "local-only"): CommitWrite(
        uri=URI, local_only=True, chunk_checksums=(0, 0xFFFFFFFF), stage_id="0c6f-17"
    ),
    ("commit_write", "not-local-only"): CommitWrite(uri=URI, local_only=False, chunk_checksums=()),
    ("get_write_status", "plain"): GetWriteStatus(uri=URI),
    ("record_telemetry", "plain"): RecordTelemetry(
        event_type="read", uri=URI, object_size_bytes=SIZE, duration_us=2100, bandwidth_mbps=6990.5
    ),
    ("record_telemetry", "full"): RecordTelemetry(
        event_type="write",
        uri=ODD_URI,
        object_size_bytes=MOST,
        duration_us=0,
        bandwidth_mbps=0,
        client_id="trainer-7",
        chunk_count=4,
        local_meta_us=1,
        remote_meta_us=2,
        local_ttfb_us=3,
        remote_ttfb_us=4,
        time_saved_ms=5,
        cpu_pct=12.25,
        status="FAILED",
    ),
}

_DEVICE = DeviceInfo(
    path="/dev/nvme0n1",
    is_nvme=True,
    is_virtual=False,
    is_partition=False,
    is_rotational=False,
    size_bytes=1 << 40,
    model="Micron 7450",
    existing_fs="ext4",
    numa_node=-1,
)
_BARE_DEVICE = DeviceInfo(
    path="/srv/pool/device-0",
    is_nvme=False,
    is_virtual=True,
    is_partition=True,
    is_rotational=True,
    size_bytes=0,
)
_HIT = HitReply(object_size=SIZE, chunk_layout=CHUNKS)
_FULL_HIT = HitReply(
    object_size=SIZE, chunk_layout=CHECKED_CHUNKS, sync_status=SyncStatus.LOCAL_ONLY, generation=MOST
)
_STAGED = StagedReply(object_size=SIZE, chunk_layout=CHUNKS, sync_status=SyncStatus.STAGED)
_FULL_STAGED = StagedReply(
    object_size=SIZE, chunk_layout=RAM_CHUNKS, sync_status=SyncStatus.STAGED, stage_id="0c6f-17"
)
_ERROR = ErrorReply(error_message='no „space“: 4096 bytes wanted\n"nvme"')

# (action that is answered, name) -> reply
REPLY_EXAMPLES: dict[tuple[str, str], Reply] = {
    ("ping", "pong"): PongReply(),
    ("ping", "full-pong"): PongReply(
        wire=(1, 2), daemon="hypercached 1.1.0", instance_id="5f0c-1", features=("local_only", "stage_id")
    ),
    ("pin", "pong"): PongReply(),
    ("record_telemetry", "pong"): PongReply(),
    ("get_devices", "none"): DevicesReply(devices=()),
    ("get_devices", "two"): DevicesReply(devices=(_DEVICE, _BARE_DEVICE)),
    ("locate", "hit"): _HIT,
    ("locate", "empty-hit"): HitReply(object_size=0, chunk_layout=()),
    ("locate", "ram-hit"): HitReply(object_size=1, chunk_size=1, chunk_layout=RAM_CHUNKS),
    ("locate", "full-hit"): _FULL_HIT,
    ("locate", "staged-hit"): HitReply(
        object_size=SIZE, chunk_layout=CHUNKS, sync_status=SyncStatus.STAGED, generation=0
    ),
    ("locate", "miss"): MissReply(),
    ("ingest", "hit"): _HIT,
    ("ingest", "full-hit"): _FULL_HIT,
    ("ingest", "ingested"): IngestedReply(object_size=SIZE, chunk_layout=CHUNKS),
    ("ingest", "full-ingested"): IngestedReply(
        object_size=SIZE, chunk_layout=CHECKED_CHUNKS, sync_status=SyncStatus.SYNCED_BACKEND, generation=1
    ),
    ("evict", "evicted"): EvictedReply(),
    ("evict", "miss"): MissReply(),
    ("purge", "purged"): PurgedReply(),
    ("get_status", "status"): StatusReply.model_validate(
        {"used_bytes": 1 << 40, "ratio": 0.5, "pools": [{"tier": "nvme", "devices": None}], "ok": True}
    ),
    ("stage_write", "staged"): _STAGED,
    ("stage_write", "full-staged"): _FULL_STAGED,
    ("append_write", "staged"): _STAGED,
    ("append_write", "full-staged"): _FULL_STAGED,
    ("commit_write", "committed"): CommittedReply(object_size=SIZE, sync_status=SyncStatus.COMMITTED),
    ("commit_write", "full-committed"): CommittedReply(
        object_size=MAX_OBJECT_BYTES, sync_status=SyncStatus.LOCAL_ONLY, generation=2
    ),
    ("get_write_status", "syncing"): WriteStatusReply(
        sync_status=SyncStatus.SYNCING_BACKEND, sync_progress_percent=12.5
    ),
    ("get_write_status", "synced"): WriteStatusReply(
        sync_status=SyncStatus.SYNCED_BACKEND, sync_progress_percent=100
    ),
    **{(action, "error"): _ERROR for action in REQUESTS},
    **{
        ("locate", f"error-{code.value.lower()}"): ErrorReply(error_message="no", error_code=code)
        for code in ErrorCode
    },
}

# -- wire 2 --------------------------------------------------------------------------------------------

_PREFIX = "hypercache://models/llama/"
_REFUSED = (
    ItemError(index=1, error_message="no „space“", error_code=ErrorCode.NO_SPACE),
    ItemError(index=MAX_BATCH - 1, error_message=""),
)
# Written out and not packed by the code that this freezes: two objects, of two chunks and of one.
_COLUMNS = LayoutColumns(
    object_sizes=bytes.fromhex("8007400000000000 0100000000000000"),
    generations=bytes.fromhex("0300000000000000 ffffffffffffff7f"),
    sync_statuses=bytes.fromhex("04 03"),
    chunk_counts=bytes.fromhex("02000000 01000000"),
    checksummed=bytes.fromhex("01"),
    paths=("/dev/nvme0n1", "/dev/nvme1n1", "/dev/shm/hypercache/0.shm"),
    path_tiers=bytes.fromhex("00 00 01"),
    chunk_paths=bytes.fromhex("00000000 01000000 02000000"),
    chunk_offsets=bytes.fromhex("0000004000000000 0010000000000000 0000000000000040"),
    chunk_lengths=bytes.fromhex("00004000 80070000 01000000"),
    chunk_checksums=bytes.fromhex("00000000 ffffffff 00000000"),
)
_NO_COLUMNS = LayoutColumns(**dict.fromkeys(LayoutColumns.model_fields.keys() - {"paths"}, b""), paths=())
_LIMITS = HelloLimits(
    max_request_bytes=1 << 20, max_reply_bytes=1 << 26, max_in_flight=64, max_batch=MAX_BATCH
)

REQUEST_EXAMPLES |= {
    ("hello", "plain"): Hello(versions=("2.0",)),
    ("hello", "full"): Hello(
        versions=("1.0", "1.1", "2.0"),
        features=("batches", "frames", "generation"),
        name="hypercache-connector",
        version="2.0.1",
    ),
    ("locate_many", "plain"): LocateMany(suffixes=(URI,)),
    ("locate_many", "full"): LocateMany(prefix=_PREFIX, suffixes=("a", ODD_URI, ""), layouts=True),
    ("locate_many", "none"): LocateMany(suffixes=()),
    ("stage_many", "plain"): StageMany(suffixes=(URI,), sizes=(SIZE,)),
    ("stage_many", "full"): StageMany(
        prefix=_PREFIX,
        suffixes=("a", "b"),
        sizes=(0, MAX_OBJECT_BYTES),
        is_leader=True,
        auto_flush_s3=False,
        write_through=True,
        pinned=True,
        tier=Tier.RAM,
    ),
    ("stage_many", "unless-stored"): StageMany(
        prefix=_PREFIX, suffixes=("a", "b", "c"), sizes=(1, 1, 1), unless_stored=True
    ),
    ("stage_many", "even-if-stored"): StageMany(suffixes=(URI,), sizes=(SIZE,), unless_stored=False),
    ("commit_many", "plain"): CommitMany(suffixes=(URI,), stage_ids=("0c6f-17",)),
    ("commit_many", "full"): CommitMany(
        prefix=_PREFIX,
        suffixes=("a", "b"),
        stage_ids=("0c6f-17", "0c6f-18"),
        local_only=True,
        write_through=False,
        checksum_counts=bytes.fromhex("02000000 01000000"),
        checksums=bytes.fromhex("00000000 ffffffff 01000000"),
    ),
    ("get_presence_table", "plain"): GetPresenceTable(),
    ("evict_many", "plain"): EvictMany(suffixes=(URI,)),
    ("evict_many", "full"): EvictMany(prefix=_PREFIX, suffixes=("a", "b")),
}

REPLY_EXAMPLES |= {
    ("hello", "plain"): HelloReply(
        version="1.1", versions=("1.0", "1.1"), features=(), limits=_LIMITS, devices=(), instance_id="5f0c-1"
    ),
    ("hello", "full"): HelloReply(
        version="2.0",
        versions=("1.0", "1.1", "2.0"),
        features=("batches", "frames"),
        limits=_LIMITS,
        devices=("/dev/nvme0n1", "/dev/nvme1n1"),
        instance_id="5f0c-1",
        daemon="hypercached 2.0.0",
        unknown=("3.0", "teleport"),
    ),
    ("locate_many", "plain"): LocatedMany(present=b"\x05", verifiable=b"\x01"),
    ("locate_many", "full"): LocatedMany(present=b"\x05\x00", verifiable=b"\x01\x00", layouts=_COLUMNS),
    ("locate_many", "none"): LocatedMany(present=b"", verifiable=b"", layouts=_NO_COLUMNS),
    ("stage_many", "stored"): StagedMany(
        done=b"\x04", stage_ids=("0c6f-17",), layouts=_NO_COLUMNS, errors=_REFUSED[:1], stored=b"\x01"
    ),
    ("stage_many", "plain"): StagedMany(done=b"\x00", stage_ids=(), layouts=_NO_COLUMNS),
    ("stage_many", "full"): StagedMany(
        done=b"\x05", stage_ids=("0c6f-17", "0c6f-18"), layouts=_COLUMNS, errors=_REFUSED
    ),
    ("commit_many", "plain"): CommittedMany(
        done=b"\x00", object_sizes=b"", generations=b"", sync_statuses=b""
    ),
    ("commit_many", "full"): CommittedMany(
        done=b"\x05",
        object_sizes=bytes.fromhex("8007400000000000 0100000000000000"),
        generations=bytes.fromhex("0300000000000000 ffffffffffffff7f"),
        sync_statuses=bytes.fromhex("04 01"),
        errors=_REFUSED,
    ),
    ("get_presence_table", "plain"): PresenceTableReply(table_format=1, seed=(1 << 63) - 1, buckets=8192),
    ("evict_many", "plain"): EvictedMany(done=b"\xff\x01"),
    ("evict_many", "full"): EvictedMany(done=b"\x05", errors=_REFUSED),
    **{(action, "error"): _ERROR for action in ("hello", *(request.action for request in FRAMED_REPLIES))},
}
