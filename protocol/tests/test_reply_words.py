"""Actions and status words: what each stands for, and what becomes of those that this side does not know."""

import json

import pytest

from hypercache_protocol.codecs.json_lines import decode_reply, decode_request
from hypercache_protocol.errors import ErrorCode, InvalidMessage
from hypercache_protocol.messages import (
    CommittedReply,
    CommitWrite,
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

CHUNK = {"device": "/dev/nvme0n1", "offset": 0, "length": 4096}
LAYOUT = {"object_size": 4096, "chunk_layout": [CHUNK]}


def reply_line(status: str, **fields: object) -> bytes:
    return json.dumps({"status": status, **fields}).encode()


# -- words ---------------------------------------------------------------------------------------------


def test_an_unknown_action_is_named_and_the_known_ones_are_listed() -> None:
    with pytest.raises(InvalidMessage, match="unknown action 'locat'; known are append_write, ") as caught:
        decode_request(b'{"action":"locat"}')
    assert caught.value.code is ErrorCode.UNKNOWN_ACTION


def test_a_long_unknown_action_is_cut() -> None:
    with pytest.raises(InvalidMessage) as caught:
        decode_request(b'{"action":"' + b"x" * 100_000 + b'"}')
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "line", [b"{}", b'{"action":null}', b'{"action":5}', b'{"action":["ping"]}', b'{"Action":"ping"}']
)
def test_a_request_without_an_action_says_so(line: bytes) -> None:
    with pytest.raises(InvalidMessage, match="needs a field 'action' that holds a string") as caught:
        decode_request(line)
    assert caught.value.code is ErrorCode.BAD_REQUEST


def test_actions_are_case_sensitive() -> None:
    with pytest.raises(InvalidMessage, match="unknown action 'PING'"):
        decode_request(b'{"action":"PING"}')


@pytest.mark.parametrize(
    ("request_", "line", "model"),
    [
        (
            StageWrite(uri="a", size_bytes=1),
            reply_line("WRITE_STAGED", **LAYOUT, sync_status="STAGED"),
            StagedReply,
        ),
        (
            CommitWrite(uri="a"),
            reply_line("WRITE_COMMITTED", object_size=1, sync_status="COMMITTED"),
            CommittedReply,
        ),
        (Evict(uri="a"), reply_line("PONG"), EvictedReply),
        (Evict(uri="a"), reply_line("OK"), EvictedReply),
        (Purge(), reply_line("PONG"), PurgedReply),
        (Purge(), reply_line("OK"), PurgedReply),
    ],
)
def test_a_status_that_old_clients_take_for_success_is_success(
    request_: Request, line: bytes, model: type[Reply]
) -> None:
    reply, unknown = decode_reply(line, request_)
    assert type(reply) is model
    assert unknown == 0


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (Locate(uri="a"), "INGESTED"),
        (Ingest(uri="a"), "MISS"),
        (Pin(uri="a"), "OK"),
        (Ping(), "pong"),
        (Locate(uri="a"), "hit"),
        (Evict(uri="a"), "PURGED"),
        (CommitWrite(uri="a"), "WRITESTAGED"),
        (Locate(uri="a"), "MOVED"),
        (Locate(uri="a"), ""),
        (
            RecordTelemetry(event_type="e", uri="a", object_size_bytes=1, duration_us=1, bandwidth_mbps=1),
            "OK",
        ),
    ],
)
def test_a_status_that_this_request_cannot_have_is_an_error_not_a_success(
    request_: Request, status: str
) -> None:
    reply, _ = decode_reply(reply_line(status, **LAYOUT, sync_status="STAGED"), request_)
    assert isinstance(reply, ErrorReply)
    assert request_.action in reply.error_message
    assert repr(status) in reply.error_message


def test_an_unknown_status_that_gives_a_reason_keeps_it() -> None:
    reply, unknown = decode_reply(reply_line("BUSY", error_message="try later", retry_s=3), Locate(uri="a"))
    assert reply == ErrorReply(error_message="try later")
    assert unknown == 1


def test_a_long_unknown_status_is_cut() -> None:
    reply, _ = decode_reply(reply_line("x" * 100_000), Locate(uri="a"))
    assert isinstance(reply, ErrorReply)
    assert len(reply.error_message) < 200


@pytest.mark.parametrize(
    "line", [b"{}", b'{"status":null}', b'{"status":5}', b'{"status":["HIT"]}', b'{"status":{}}']
)
@pytest.mark.parametrize(
    "request_", [Locate(uri="a"), Ping(), Pin(uri="a"), Purge()], ids=lambda one: one.action
)
def test_a_reply_without_a_status_is_no_success(line: bytes, request_: Request) -> None:
    with pytest.raises(InvalidMessage, match=f"reply to {request_.action} has no field 'status'"):
        decode_reply(line, request_)


@pytest.mark.parametrize("status", ["OK", "DEVICES", "WRITESTATUS", "", None])
def test_where_old_clients_look_at_no_status_any_will_do(status: str | None) -> None:
    said = {} if status is None else {"status": status}
    line = json.dumps({**said, "devices": []}).encode()
    assert decode_reply(line, GetDevices()) == (DevicesReply(devices=()), 0)
    line = json.dumps({**said, "sync_status": "COMMITTED", "sync_progress_percent": 0.0}).encode()
    assert decode_reply(line, GetWriteStatus(uri="a"))[0] == WriteStatusReply(
        sync_status=SyncStatus.COMMITTED, sync_progress_percent=0
    )
    assert decode_reply(json.dumps({**said, "used": 1}).encode(), GetStatus()) == (StatusReply(used=1), 0)


@pytest.mark.parametrize(
    "request_", [GetDevices(), GetStatus(), GetWriteStatus(uri="a")], ids=lambda one: one.action
)
@pytest.mark.parametrize("status", ["ERROR", "NOT_TODAY"])
def test_a_refusal_is_an_error_even_where_any_status_will_do(request_: Request, status: str) -> None:
    reply, _ = decode_reply(reply_line(status, error_message="no"), request_)
    assert reply == ErrorReply(error_message="no")


@pytest.mark.parametrize("request_", [GetDevices(), GetWriteStatus(uri="a")], ids=lambda one: one.action)
def test_a_strange_status_without_the_fields_of_the_reply_is_an_error(request_: Request) -> None:
    reply, _ = decode_reply(reply_line("UNSUPPORTED"), request_)
    assert type(reply) is ErrorReply
    with pytest.raises(InvalidMessage, match="has no field 'status'"):
        decode_reply(b"{}", request_)


# -- errors and states that this side does not know ----------------------------------------------------


@pytest.mark.parametrize(
    "code", ["FULL_MOON", "", "__class__", "bad_request", 5, None, True, [], ["NO_SPACE"], {}, 1.5]
)
def test_an_error_code_that_is_not_on_the_list_reads_as_none(code: object) -> None:
    reply, unknown = decode_reply(reply_line("ERROR", error_message="no", error_code=code), Ping())
    assert reply == ErrorReply(error_message="no", error_code=None)
    assert unknown == 0


@pytest.mark.parametrize("code", ErrorCode)
def test_each_error_code_of_the_list_is_read(code: ErrorCode) -> None:
    reply, _ = decode_reply(reply_line("ERROR", error_message="no", error_code=code.value), Ping())
    assert reply == ErrorReply(error_message="no", error_code=code)


@pytest.mark.parametrize(
    "said", [{}, {"error_message": None}, {"error_message": 5}, {"error_message": ["a"]}]
)
def test_an_error_without_a_sentence_is_still_an_error(said: dict[str, object]) -> None:
    reply, _ = decode_reply(reply_line("ERROR", **said), Locate(uri="a"))
    assert type(reply) is ErrorReply
    assert reply.error_message == "the daemon answered locate with 'ERROR' and no reason"


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (Locate(uri="a"), reply_line("HIT", **LAYOUT, sync_status="REPLICATED")),
        (Ingest(uri="a"), reply_line("INGESTED", **LAYOUT, sync_status="REPLICATED")),
        (StageWrite(uri="a", size_bytes=1), reply_line("WRITESTAGED", **LAYOUT, sync_status="REPLICATED")),
        (CommitWrite(uri="a"), reply_line("WRITECOMMITTED", object_size=1, sync_status="REPLICATED")),
        (GetWriteStatus(uri="a"), reply_line("OK", sync_status="REPLICATED", sync_progress_percent=5)),
    ],
)
def test_a_state_that_a_newer_daemon_may_have_reads_as_none(request_: Request, line: bytes) -> None:
    reply, unknown = decode_reply(line, request_)
    assert isinstance(reply, HitReply | StagedReply | CommittedReply | WriteStatusReply)
    assert reply.sync_status is None
    assert unknown == 0


def test_an_ingested_reply_is_a_hit_too() -> None:
    reply, _ = decode_reply(reply_line("INGESTED", **LAYOUT), Ingest(uri="a"))
    assert type(reply) is IngestedReply
    assert isinstance(reply, HitReply)


def test_a_miss_needs_no_fields() -> None:
    assert decode_reply(b'{"status":"MISS"}', Locate(uri="a")) == (MissReply(), 0)
