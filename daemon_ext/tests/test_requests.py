"""Every action over a real socket: what it answers, and the sentence it refuses with."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from daemon_harness import CHUNK, MIB, Client, Daemon, line, pattern, running

from hypercache_compat.raw_wire import read_layout, write_layout
from hypercache_daemon.connection import ConnectionLimits
from hypercache_daemon.core.objects import packed_checksums
from hypercache_daemon.handlers import _AT_ONCE, _WAITING
from hypercache_protocol.actions import ALL_REPLIES
from hypercache_protocol.session import Limits
from hypercache_protocol.versions import LATEST, RELEASED

EVERY_WIRE = pytest.mark.parametrize("wire", list(map(str, RELEASED)))
URI = "hypercache://a/b"
TELEMETRY = {
    "event_type": "load",
    "uri": URI,
    "object_size_bytes": 1000,
    "duration_us": 10,
    "bandwidth_mbps": 2.5,
}


def test_each_action_of_the_protocol_has_a_handler() -> None:
    assert _AT_ONCE.keys() | _WAITING.keys() == ALL_REPLIES.keys()


# -- the thirteen actions ------------------------------------------------------------------------------


async def test_ping_tells_what_the_daemon_speaks_and_a_new_id_at_every_start(short_dir: Path) -> None:
    replies = []
    for _ in range(2):
        async with running(short_dir) as daemon:
            client = await daemon.connect()
            replies += [await client.ask("ping"), await client.ask("ping")]
    assert all(reply["status"] == "PONG" and reply["wire"] == [1, 2] for reply in replies)
    assert {"local_only", "chunk_checksums", "stage_id", "frames", "batches"} <= set(replies[0]["features"])
    assert replies[0]["daemon"].startswith("hypercached ")
    ids = [reply["instance_id"] for reply in replies]
    assert ids[0] == ids[1] != ids[2] == ids[3]


async def test_get_devices_lists_the_files_of_the_pool(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        reply = await (await daemon.connect()).ask("get_devices")
    assert reply["status"] == "OK"
    paths = [Path(device["path"]) for device in reply["devices"]]
    assert [path.parent for path in paths] == [short_dir / "pool"] * 2
    assert [device["size_bytes"] for device in reply["devices"]] == [17 * MIB] * 2
    assert [path.stat().st_size for path in paths] == [17 * MIB] * 2


async def test_an_object_goes_in_and_comes_out_on_either_tier(short_dir: Path) -> None:
    data = pattern(1, 2 * CHUNK + 5000)
    sums = [zlib.crc32(data[start : start + CHUNK]) for start in (0, CHUNK, 2 * CHUNK)]
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        for tier in ("nvme", "ram"):
            staged = await client.stage(URI + tier, data, tier=tier)
            assert (staged["object_size"], staged["chunk_size"]) == (len(data), CHUNK)
            assert staged["sync_status"] == "STAGED"
            assert [chunk["length"] for chunk in staged["chunk_layout"]] == [CHUNK, CHUNK, 5000]
            assert {chunk["tier"] for chunk in staged["chunk_layout"]} == {tier}
            commit = await client.ask("commit_write", uri=URI + tier, chunk_checksums=sums, local_only=True)
            assert commit["status"] == "WRITECOMMITTED"
            assert (commit["object_size"], commit["sync_status"]) == (len(data), "LOCAL_ONLY")
            found = await client.ask("locate", uri=URI + tier)
            assert (found["status"], found["object_size"]) == ("HIT", len(data))
            assert (found["sync_status"], found["generation"]) == ("LOCAL_ONLY", commit["generation"])
            assert [chunk["checksum"] for chunk in found["chunk_layout"]] == sums
            assert read_layout(found["chunk_layout"]) == data


async def test_chunks_lie_on_different_devices_and_the_next_object_starts_on_another(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        first, second = [await client.ask("stage_write", uri=uri, size_bytes=CHUNK + 1) for uri in ("a", "b")]
    devices = [[chunk["device"] for chunk in reply["chunk_layout"]] for reply in (first, second)]
    assert len(set(devices[0])) == len(set(devices[1])) == 2
    assert devices[0][0] != devices[1][0]


async def test_an_empty_object_is_an_object(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        for tier in ("nvme", "ram"):
            await client.store(tier, b"", tier=tier)
            found = await client.ask("locate", uri=tier)
            assert (found["status"], found["object_size"], found["chunk_layout"]) == ("HIT", 0, [])
            assert (await client.ask("evict", uri=tier))["status"] == "EVICTED"


async def test_locate_of_what_is_nowhere_is_a_miss(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert await client.ask("locate", uri="s3://bucket/x") == {"status": "MISS"}
        assert await client.ask("locate", uri="s3://bucket/x", pinned=True) == {"status": "MISS"}


async def test_locate_of_what_is_only_staged_says_so(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        staged = await client.stage(URI, b"first")
        found = await client.ask("locate", uri=URI)
        assert found == {
            "status": "HIT",
            "object_size": 5,
            "chunk_size": CHUNK,
            "chunk_layout": staged["chunk_layout"],
            "sync_status": "STAGED",
        }
        await client.ask("commit_write", uri=URI, local_only=True)
        await client.stage(URI, b"second")
        assert (await client.ask("locate", uri=URI))["sync_status"] == "LOCAL_ONLY"
        assert await client.fetch(URI) == b"first", "what was committed, until the next commit"


async def test_get_write_status_follows_an_object(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        assert (await client.refusal("get_write_status", uri=URI))[0] == "NOT_FOUND"
        await client.stage(URI, b"bytes")
        reply = await client.ask("get_write_status", uri=URI)
        assert reply == {"status": "OK", "sync_status": "STAGED", "sync_progress_percent": 0.0}
        await client.ask("commit_write", uri=URI)
        reply = await client.ask("get_write_status", uri=URI)
        assert reply == {"status": "OK", "sync_status": "COMMITTED", "sync_progress_percent": 0.0}
        await client.store("local", b"bytes")
        reply = await client.ask("get_write_status", uri="local")
        assert reply == {"status": "OK", "sync_status": "LOCAL_ONLY", "sync_progress_percent": 100.0}


async def test_an_old_client_that_asked_for_no_flush_never_hears_of_local_only(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        reply = await client.store(URI, b"bytes", commit={}, auto_flush_s3=False)
        assert reply["sync_status"] == "COMMITTED"
        assert (await client.ask("locate", uri=URI))["sync_status"] == "COMMITTED"
        status = await client.status()
        assert status["objects_by_state"]["LOCAL_ONLY"] == 1, "but it may be evicted all the same"


async def test_record_telemetry_adds_up_by_kind_and_the_kinds_are_bounded(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        for _ in range(2):
            assert await client.ask("record_telemetry", **TELEMETRY) == {"status": "PONG"}
        await client.ask("record_telemetry", **{**TELEMETRY, "status": "TIMEOUT"})
        await client.ask("record_telemetry", **{**TELEMETRY, "object_size_bytes": 2**63 - 1})
        load = (await client.status())["telemetry"]["load"]
        assert load == {
            "events": 4,
            "object_size_bytes": 3000 + 2**63 - 1,
            "duration_us": 40,
            "chunk_count": 4,
            "time_saved_ms": 0,
            "failures": 1,
        }
        for number in range(100):
            await client.ask("record_telemetry", **{**TELEMETRY, "event_type": f"kind {number}" + "x" * 999})
        kinds = (await client.status())["telemetry"]
        assert len(kinds) == 65
        assert max(map(len, kinds)) <= 64
        assert kinds["(other)"]["events"] == 37


async def test_get_status_counts_what_happened(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client, other = await daemon.connect(), await daemon.connect()
        await other.ask("ping")
        assert (await client.status())["connections"] == {
            "open": 2,
            "accepted": 2,
            "refused": 0,
            "forbidden": 0,
            "idle_closed": 0,
            "failed_accepts": 0,
            "unknown_fields": 0,
        }
        await client.store("a", pattern(1, MIB), pinned=True)
        await client.store("b", pattern(2, MIB), commit={})
        await client.stage("c", pattern(3, 5000))
        await other.ask("locate", uri="none")
        status = await client.status()
        assert status["objects"] == 2
        assert status["objects_by_state"] == {
            "STAGED": 1,
            "COMMITTED": 1,
            "LOCAL_ONLY": 1,
            "SYNCING_BACKEND": 0,
            "SYNCED_BACKEND": 0,
        }
        nvme = status["pools"]["nvme"]
        assert nvme["total_bytes"] == 32 * MIB
        assert (nvme["used_bytes"], nvme["staged_bytes"]) == (2 * MIB, 8192)
        assert (nvme["pinned_bytes"], nvme["dirty_bytes"]) == (MIB, MIB)
        assert status["requests"]["stage_write.WRITESTAGED"] == 3
        assert status["requests"]["locate.MISS"] == 1
        assert status["wire"] == str(LATEST)
        assert status["catalog"]["transactions"] >= 5


async def test_what_happened_to_a_request_is_counted_however_it_ended(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.refusal("commit_write", uri=URI)
        await client.refusal("get_write_status", uri=URI)
        requests = (await client.status())["requests"]
        assert requests == {"commit_write.ERROR": 1, "get_write_status.ERROR": 1}


# -- old and new ---------------------------------------------------------------------------------------

NEW_FIELDS = {"wire", "daemon", "instance_id", "features", "stage_id", "generation", "error_code", "checksum"}


async def test_a_daemon_held_to_wire_1_0_shows_no_later_field_and_ignores_those_of_requests(
    short_dir: Path,
) -> None:
    async with running(short_dir, wire="1.0") as daemon:
        client = await daemon.connect()
        replies = [await client.ask("ping"), await client.ask("get_devices")]
        await client.stage(URI, b"12345")
        replies.append(await client.ask("stage_write", uri=URI, size_bytes=5))
        write_layout(replies[-1]["chunk_layout"], b"newer")
        replies.append(await client.ask("append_write", uri=URI, size_bytes=1, stage_id="no such"))
        write_layout(replies[-1]["chunk_layout"], b"!")
        # A contradiction, a wrong count and a stale id on wire 1.1; on 1.0 none of them was ever read.
        extra = {"local_only": True, "chunk_checksums": [1] * 9, "stage_id": "no such"}
        replies.append(await client.ask("commit_write", uri=URI, **extra))
        assert replies[-1] == {"status": "WRITECOMMITTED", "object_size": 6, "sync_status": "COMMITTED"}
        replies.append(await client.ask("locate", uri=URI))
        assert set(replies[-1]) == {"status", "object_size", "chunk_size", "chunk_layout"}
        assert read_layout(replies[-1]["chunk_layout"]) == b"newer!"
        replies.append(await client.ask("get_write_status", uri=URI))
        replies.append(await client.ask("commit_write", uri="nothing staged"))
        assert set(replies[-1]) == {"status", "error_message"}
        replies.append(await client.ask("evict", uri=URI))
    found = {name for reply in replies for name in names(reply)}
    assert not found & NEW_FIELDS


def names(value: object) -> set[str]:
    """Every field name in a reply, in its lists too."""
    match value:
        case dict():
            return set(value).union(*(names(item) for item in value.values()))
        case list():
            return set().union(*(names(item) for item in value))
        case _:
            return set()


@EVERY_WIRE
async def test_unknown_fields_change_nothing(short_dir: Path, wire: str) -> None:
    grease = {"grease": {"deep": [1, 2, None]}, "": 0, "version": "9.9"}
    async with running(short_dir, wire=wire) as daemon:
        client = await daemon.connect()
        staged = await client.ask("stage_write", uri=URI, size_bytes=3, **grease)
        write_layout(staged["chunk_layout"], b"abc")
        assert (await client.ask("commit_write", uri=URI, **grease))["status"] == "WRITECOMMITTED"
        assert (await client.ask("locate", uri=URI, **grease))["status"] == "HIT"
        assert (await client.ask("pin", uri=URI, pinned=True, **grease))["status"] == "PONG"
        assert daemon.parts.server.unknown_fields == 4 * len(grease)
        await client.aclose()
        other = await daemon.connect()
        await other.ask("ping", novel=1)
        assert (await other.status())["connections"]["unknown_fields"] == 4 * len(grease) + 1


# -- bad input -----------------------------------------------------------------------------------------

BAD: list[tuple[bytes | dict[str, Any], str, str]] = [
    (b"\n", "BAD_REQUEST", "not JSON"),
    (b"\xff\xfe\x00\n", "BAD_REQUEST", "not JSON"),
    (b'{"action": "ping"\n', "BAD_REQUEST", "not JSON"),
    (b'{"action": "stage_write", "uri": "a", "size_bytes": NaN}\n', "BAD_REQUEST", "not JSON"),
    (b"[" * 5000 + b"]" * 5000 + b"\n", "BAD_REQUEST", "not JSON"),
    (b"[]\n", "BAD_REQUEST", "JSON object, not list"),
    (b"null\n", "BAD_REQUEST", "JSON object, not NoneType"),
    (b'"ping"\n', "BAD_REQUEST", "JSON object, not str"),
    ({}, "BAD_REQUEST", "'action'"),
    ({"action": 1}, "BAD_REQUEST", "'action'"),
    ({"action": "PING"}, "UNKNOWN_ACTION", "'PING'"),
    ({"action": "x" * 1000}, "UNKNOWN_ACTION", "x" * 63),
    ({"action": "locate"}, "BAD_REQUEST", "'uri' is missing"),
    ({"action": "locate", "uri": 5}, "BAD_REQUEST", "uri"),
    ({"action": "locate", "uri": None}, "BAD_REQUEST", "uri"),
    ({"action": "locate", "uri": ""}, "BAD_REQUEST", "uri"),
    ({"action": "locate", "uri": "a\0b"}, "BAD_REQUEST", "NUL"),
    ({"action": "locate", "uri": "\ud800"}, "BAD_REQUEST", ""),
    ({"action": "locate", "uri": "u" * 8193}, "BAD_REQUEST", "8192"),
    ({"action": "locate", "uri": "a", "pinned": 1}, "BAD_REQUEST", "pinned"),
    ({"action": "locate", "uri": "a", "auto_ingest": "yes"}, "BAD_REQUEST", "auto_ingest"),
    ({"action": "locate", "uri": "a", "tier": "tape"}, "BAD_REQUEST", "tier"),
    ({"action": "stage_write", "uri": "a"}, "BAD_REQUEST", "'size_bytes' is missing"),
    ({"action": "stage_write", "uri": "a", "size_bytes": -1}, "BAD_REQUEST", "size_bytes"),
    ({"action": "stage_write", "uri": "a", "size_bytes": 1.5}, "BAD_REQUEST", "size_bytes"),
    ({"action": "stage_write", "uri": "a", "size_bytes": "5"}, "BAD_REQUEST", "size_bytes"),
    ({"action": "stage_write", "uri": "a", "size_bytes": True}, "BAD_REQUEST", "size_bytes"),
    ({"action": "stage_write", "uri": "a", "size_bytes": 1 << 80}, "BAD_REQUEST", "size_bytes"),
    ({"action": "stage_write", "uri": "a", "size_bytes": (1 << 46) + 1}, "BAD_REQUEST", "size_bytes"),
    ({"action": "stage_write", "uri": "a", "size_bytes": 1 << 46}, "NO_SPACE", "70368744177664"),
    ({"action": "stage_write", "uri": "a", "size_bytes": 5, "tier": 7}, "BAD_REQUEST", "tier"),
    ({"action": "append_write", "uri": "a", "size_bytes": 5}, "NOT_STAGED", "call stage_write first"),
    ({"action": "append_write", "uri": URI, "size_bytes": -5}, "BAD_REQUEST", "size_bytes"),
    ({"action": "append_write", "uri": URI, "size_bytes": 1 << 46}, "NO_SPACE", "no space"),
    ({"action": "append_write", "uri": URI, "size_bytes": 1, "stage_id": "x"}, "STALE_STAGE", "x"),
    ({"action": "commit_write", "uri": "a"}, "NOT_STAGED", "call stage_write first"),
    ({"action": "commit_write", "uri": URI, "sha256": "abc"}, "BAD_REQUEST", "sha256"),
    ({"action": "commit_write", "uri": URI, "local_only": "no"}, "BAD_REQUEST", "local_only"),
    ({"action": "commit_write", "uri": URI, "stage_id": ""}, "BAD_REQUEST", "stage_id"),
    ({"action": "commit_write", "uri": URI, "chunk_checksums": [1, 2]}, "BAD_REQUEST", "2 entries"),
    ({"action": "commit_write", "uri": URI, "chunk_checksums": []}, "BAD_REQUEST", "0 entries"),
    ({"action": "commit_write", "uri": URI, "chunk_checksums": [-1]}, "BAD_REQUEST", "chunk_checksums[0]"),
    ({"action": "commit_write", "uri": URI, "chunk_checksums": [1 << 32]}, "BAD_REQUEST", "checksums[0]"),
    ({"action": "commit_write", "uri": URI, "chunk_checksums": ["1"]}, "BAD_REQUEST", "chunk_checksums[0]"),
    ({"action": "commit_write", "uri": URI, "chunk_checksums": 5}, "BAD_REQUEST", "must be a list"),
    ({"action": "commit_write", "uri": URI, "write_through": True}, "NO_BACKEND", "--backend"),
    (
        {"action": "stage_write", "uri": "a", "size_bytes": 1, "write_through": True},
        "NO_BACKEND",
        "--backend",
    ),
    ({"action": "ingest", "uri": "file:///etc/passwd"}, "NO_BACKEND", "--ingest-prefix"),
    ({"action": "pin", "uri": "a"}, "NOT_FOUND", "not in the cache"),
    ({"action": "record_telemetry", **TELEMETRY, "duration_us": -1}, "BAD_REQUEST", "duration_us"),
    ({"action": "record_telemetry", **TELEMETRY, "bandwidth_mbps": -1.0}, "BAD_REQUEST", "bandwidth_mbps"),
    ({"action": "record_telemetry", "uri": "a"}, "BAD_REQUEST", "is missing"),
]


async def test_bad_input_is_refused_in_words_and_neither_object_nor_stage_nor_connection_is_lost(
    short_dir: Path,
) -> None:
    async with running(short_dir) as daemon:
        client, bystander = await daemon.connect(), await daemon.connect()
        await client.store("kept", b"kept")
        await client.stage(URI, b"staged")
        before = (await bystander.status())["pools"]
        for request, code, words in BAD:
            data = request if isinstance(request, bytes) else json.dumps(request).encode() + b"\n"
            await client.send(data)
            reply = await client.receive()
            assert reply["status"] == "ERROR", request
            assert reply["error_code"] == code, (request, reply)
            assert words in reply["error_message"], (request, reply)
            assert len(reply["error_message"]) < 1000
        assert (await bystander.status())["pools"] == before
        assert await client.fetch("kept") == b"kept"
        assert (await client.ask("commit_write", uri=URI, local_only=True))["status"] == "WRITECOMMITTED"
        assert await bystander.fetch(URI) == b"staged"


async def test_a_reply_that_no_line_can_carry_becomes_an_error_and_the_connection_lives(
    short_dir: Path,
) -> None:
    limits = ConnectionLimits(Limits(max_reply_bytes=2000))
    async with running(short_dir, limits=limits) as daemon:
        client = await daemon.connect()
        await client.stage(URI, b"a", tier="ram")  # one more chunk with each append
        for _ in range(20):
            reply = await client.ask("append_write", uri=URI, size_bytes=1)
            assert reply["status"] == "WRITESTAGED"
        code, sentence = await client.refusal("locate", uri=URI)
        assert code == "INTERNAL"
        assert "2000" in sentence
        assert (await client.ask("ping"))["status"] == "PONG"


async def test_a_fault_in_one_request_is_an_error_and_in_the_log(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.store(URI, b"bytes")
        await client.store("other", b"other")
        break_layout(daemon, URI)
        code, sentence = await client.refusal("locate", uri=URI)
        assert (code, "its log" in sentence) == ("INTERNAL", True)
        code, sentence = await client.refusal("locate", uri=URI, pinned=True)
        assert (code, "its log" in sentence) == ("INTERNAL", True)
        assert caplog.text.count("Traceback") == 2
        stager, daemon.parts.handlers.stager = daemon.parts.handlers.stager, None
        assert (await client.refusal("stage_write", uri=URI, size_bytes=1))[0] == "INTERNAL"
        daemon.parts.handlers.stager = stager
        assert caplog.text.count("Traceback") == 3
        assert await client.fetch("other") == b"other"


def break_layout(daemon: Daemon, uri: str) -> None:
    """Leaves the object with more checksums than chunks, which no request can bring about."""
    cache = daemon.parts.store.cache
    stored = cache.get(uri)
    assert stored is not None
    cache.apply_change(stored._replace(packed_checksums=packed_checksums((1, 2, 3))))


async def test_many_requests_in_one_piece_are_answered_in_order(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        uris = [f"u{number}" for number in range(50)]
        requests = [line("stage_write", uri=uri, size_bytes=1) for uri in uris]
        requests += [line("commit_write", uri=uri, local_only=True) for uri in uris]
        requests += [line("get_write_status", uri=uri) for uri in [*uris, "none"]]
        await client.send(b"".join(requests))
        replies = await take(client, len(requests))
        words = ["WRITESTAGED"] * 50 + ["WRITECOMMITTED"] * 50 + ["OK"] * 50 + ["ERROR"]
        assert [reply["status"] for reply in replies] == words


async def take(client: Client, count: int) -> list[dict[str, Any]]:
    return [await client.receive() for _ in range(count)]
