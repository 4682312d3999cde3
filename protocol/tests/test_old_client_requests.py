"""The requests of hypercache-io 0.9.0, byte for byte as its json.dumps writes them."""

import json

import pytest

from hypercache_protocol.codecs.json_lines import decode_request, encode_request
from hypercache_protocol.fields import Tier
from hypercache_protocol.messages import (
    REPLIES,
    AppendWrite,
    CommitWrite,
    Evict,
    GetDevices,
    GetStatus,
    GetWriteStatus,
    Ingest,
    Locate,
    Pin,
    Ping,
    Purge,
    RecordTelemetry,
    Request,
    StageWrite,
)
from hypercache_protocol.versions import WIRE_1_0, WIRE_1_1, WireVersion

URI = "hypercache://m/a"
DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

LINES = [
    (rb'{"action": "ping"}', Ping()),
    (rb'{"action": "get_devices"}', GetDevices()),
    (
        rb'{"action": "locate", "uri": "hypercache://m/a", "auto_ingest": true, "pinned": false}',
        Locate(uri=URI, auto_ingest=True, pinned=False),
    ),
    (
        rb'{"action": "locate", "uri": "hypercache://m/a", "auto_ingest": false, "pinned": true, '
        rb'"tier": "ram"}',
        Locate(uri=URI, auto_ingest=False, pinned=True, tier=Tier.RAM),
    ),
    (
        rb'{"action": "locate", "uri": "s3://b\u00fccher/\u6a21\u578b \"x\"\\\ud83d\ude80", '
        rb'"auto_ingest": true, "pinned": false}',
        Locate(uri='s3://bücher/模型 "x"\\🚀', auto_ingest=True, pinned=False),
    ),
    (
        rb'{"action": "ingest", "uri": "file:///srv/a.bin", "pinned": false}',
        Ingest(uri="file:///srv/a.bin", pinned=False),
    ),
    (
        rb'{"action": "ingest", "uri": "nfs://host/a.bin", "pinned": true, "tier": "nvme"}',
        Ingest(uri="nfs://host/a.bin", pinned=True, tier=Tier.NVME),
    ),
    (
        rb'{"action": "pin", "uri": "hypercache://m/a", "pinned": false}',
        Pin(uri=URI, pinned=False),
    ),
    (rb'{"action": "evict", "uri": "hypercache://m/a"}', Evict(uri=URI)),
    (rb'{"action": "purge"}', Purge()),
    (rb'{"action": "get_status"}', GetStatus()),
    (
        rb'{"action": "stage_write", "uri": "hypercache://kv_cache/k", "size_bytes": 1920, '
        rb'"is_leader": false, "auto_flush_s3": false, "write_through": false, '
        rb'"pinned": false, "tier": "ram"}',
        StageWrite(
            uri="hypercache://kv_cache/k",
            size_bytes=1920,
            is_leader=False,
            auto_flush_s3=False,
            write_through=False,
            pinned=False,
            tier=Tier.RAM,
        ),
    ),
    (
        rb'{"action": "stage_write", "uri": "hypercache://m/a", "size_bytes": 0, "is_leader": true, '
        rb'"auto_flush_s3": true, "write_through": true, "pinned": true}',
        StageWrite(
            uri=URI, size_bytes=0, is_leader=True, auto_flush_s3=True, write_through=True, pinned=True
        ),
    ),
    (
        rb'{"action": "append_write", "uri": "hypercache://m/a", "size_bytes": 4194304}',
        AppendWrite(uri=URI, size_bytes=4194304),
    ),
    (
        rb'{"action": "append_write", "uri": "hypercache://m/a", "size_bytes": 1, "tier": "nvme"}',
        AppendWrite(uri=URI, size_bytes=1, tier=Tier.NVME),
    ),
    (
        rb'{"action": "commit_write", "uri": "hypercache://m/a", "write_through": false}',
        CommitWrite(uri=URI, write_through=False),
    ),
    (
        rb'{"action": "commit_write", "uri": "hypercache://m/a", "write_through": true, '
        rb'"sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"}',
        CommitWrite(uri=URI, write_through=True, sha256=DIGEST),
    ),
    (
        rb'{"action": "get_write_status", "uri": "hypercache://m/a"}',
        GetWriteStatus(uri=URI),
    ),
    (
        rb'{"action": "record_telemetry", "event_type": "read", "uri": "hypercache://m/a", '
        rb'"object_size_bytes": 14680064, "duration_us": 2100, "bandwidth_mbps": 6990.506666666667, '
        rb'"client_id": "python_benchmark", "chunk_count": 1, "local_meta_us": 0, "remote_meta_us": 0, '
        rb'"local_ttfb_us": 0, "remote_ttfb_us": 0, "time_saved_ms": 0, "cpu_pct": 0.0, "status": "OK"}',
        RecordTelemetry(
            event_type="read",
            uri=URI,
            object_size_bytes=14680064,
            duration_us=2100,
            bandwidth_mbps=6990.506666666667,
        ),
    ),
]


@pytest.mark.parametrize("version", [WIRE_1_0, WIRE_1_1], ids=str)
@pytest.mark.parametrize(("line", "request_"), LINES, ids=[line[:40].decode() for line, _ in LINES])
def test_a_request_of_0_9_0_is_read_whole(line: bytes, request_: Request, version: WireVersion) -> None:
    assert decode_request(line, version) == (request_, 0)


@pytest.mark.parametrize(("line", "request_"), LINES, ids=[line[:40].decode() for line, _ in LINES])
def test_the_same_request_sent_to_an_old_daemon_says_the_same(line: bytes, request_: Request) -> None:
    assert json.loads(encode_request(request_, WIRE_1_0)) == json.loads(line)
    # and the line is what the old client's own json.dumps makes of it
    assert json.dumps(json.loads(line)).encode() == line


def test_every_action_of_0_9_0_is_among_them() -> None:
    assert {type(request) for _, request in LINES} == set(REPLIES)
