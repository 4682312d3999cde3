"""The JSON-lines codec: what goes in comes out, and each version sees its own fields only."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hypercache_protocol.codecs.json_lines import decode_reply, decode_request, encode_reply, encode_request
from hypercache_protocol.errors import ErrorCode, InvalidMessage, LocalProtocolError
from hypercache_protocol.fields import Tier
from hypercache_protocol.messages import (
    REPLIES,
    ChunkLocation,
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
    StagedReply,
    StageWrite,
    StatusReply,
    WriteStatusReply,
)
from hypercache_protocol.schema import newer_fields
from hypercache_protocol.states import SyncStatus
from hypercache_protocol.testing import exchanges, messages_of, requests
from hypercache_protocol.versions import WIRE_1_0

CHUNK = {"device": "/dev/nvme0n1", "offset": 0, "length": 4096}
LAYOUT = {"object_size": 4096, "chunk_layout": [CHUNK]}


def reply_line(status: str, **fields: object) -> bytes:
    return json.dumps({"status": status, **fields}).encode()


# -- round trips ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", REPLIES, ids=lambda model: model.action)
@given(data=st.data())
def test_every_request_comes_back_as_it_went(model, data):
    request = data.draw(messages_of(model))
    assert decode_request(encode_request(request)) == (request, 0)


@given(exchanges())
def test_every_reply_comes_back_as_it_went(exchange):
    request, reply = exchange
    decoded, unknown = decode_reply(encode_reply(reply), request)
    assert (type(decoded), decoded, unknown) == (type(reply), reply, 0)


@given(exchanges())
def test_a_message_is_one_line_of_json_that_says_its_word_first(exchange):
    request, reply = exchange
    for line, key, word in [
        (encode_request(request), "action", request.action),
        (encode_reply(reply), "status", reply.status),
    ]:
        assert line.startswith(f'{{"{key}":"{word}"'.encode())
        assert line.index(b"\n") == len(line) - 1
        # A telemetry request has a field of its own called status, which the word must not hide.
        pairs = json.loads(line, object_pairs_hook=list)
        assert len({name for name, _ in pairs}) == len(pairs)


def test_what_is_not_said_is_left_out():
    assert encode_request(Ping()) == b'{"action":"ping"}\n'
    assert (
        encode_request(Locate(uri="a"))
        == b'{"action":"locate","uri":"a","auto_ingest":true,"pinned":false}\n'
    )


def test_a_tier_is_read_in_any_case_and_written_in_lower_case():
    request, _ = decode_request(b'{"action":"locate","uri":"a","tier":"RAM"}')
    assert request.tier is Tier.RAM
    assert b'"tier":"ram"' in encode_request(request)


def test_a_chunk_without_a_tier_lies_on_nvme():
    reply, _ = decode_reply(reply_line("HIT", **LAYOUT), Locate(uri="a"))
    assert reply.chunk_layout[0].tier is Tier.NVME


# -- versions ------------------------------------------------------------------------------------------

WITH_CHECKSUM = HitReply(
    object_size=4096,
    chunk_layout=(ChunkLocation(**CHUNK, checksum=7),),
    sync_status=SyncStatus.COMMITTED,
    generation=3,
)


def test_a_reply_to_1_0_leaves_out_what_came_later_in_the_chunks_too():
    assert json.loads(encode_reply(WITH_CHECKSUM, WIRE_1_0)) == {
        "status": "HIT",
        "object_size": 4096,
        "chunk_size": 4194304,
        "chunk_layout": [{**CHUNK, "tier": "nvme"}],
    }


def test_a_side_held_to_1_0_counts_what_came_later_as_unknown_in_the_chunks_too():
    reply, unknown = decode_reply(encode_reply(WITH_CHECKSUM), Locate(uri="a"), WIRE_1_0)
    assert (reply.sync_status, reply.generation, reply.chunk_layout[0].checksum) == (None, None, None)
    assert unknown == 3


@pytest.mark.parametrize(
    "fields",
    [{"local_only": True}, {"local_only": False}, {"stage_id": "s"}, {"stage_id": "s", "local_only": True}],
)
def test_a_field_that_may_not_be_dropped_is_not_sent_to_1_0(fields):
    request = CommitWrite(uri="a", **fields)
    with pytest.raises(LocalProtocolError, match=r"(local_only|stage_id) needs wire 1\.1 .* wire 1\.0"):
        encode_request(request, WIRE_1_0)


def test_checksums_are_dropped_for_1_0():
    line = encode_request(CommitWrite(uri="a", chunk_checksums=(1, 2)), WIRE_1_0)
    assert json.loads(line) == {"action": "commit_write", "uri": "a", "write_through": False}


def test_a_daemon_held_to_1_0_commits_without_what_it_does_not_know():
    line = encode_request(CommitWrite(uri="a", chunk_checksums=(1,), local_only=True, stage_id="s"))
    assert decode_request(line, WIRE_1_0) == (CommitWrite(uri="a"), 3)


@pytest.mark.parametrize("wrong", [5, "s", [], {}, None, [1, {}]])
def test_a_wrong_value_in_a_field_that_1_0_does_not_know_is_no_fault_to_it(wrong):
    line = json.dumps(
        {"action": "commit_write", "uri": "a", "local_only": wrong, "chunk_checksums": wrong}
    ).encode()
    assert decode_request(line, WIRE_1_0) == (CommitWrite(uri="a"), 2)


@given(exchanges(WIRE_1_0))
def test_a_message_without_newer_fields_is_the_same_bytes_on_1_0_and_1_1(exchange):
    request, reply = exchange
    assert encode_request(request, WIRE_1_0) == encode_request(request)
    assert encode_reply(reply, WIRE_1_0) == encode_reply(reply)


@given(exchanges())
def test_a_1_0_client_reads_every_reply_of_a_1_1_daemon(exchange):
    request, reply = exchange
    decoded, _ = decode_reply(encode_reply(reply), request, WIRE_1_0)
    assert type(decoded) is type(reply)
    assert not newer_fields(type(decoded), WIRE_1_0).keys() & decoded.model_fields_set


@given(requests())
def test_a_1_0_daemon_reads_every_request_of_a_1_1_client(request_):
    decoded, _ = decode_request(encode_request(request_), WIRE_1_0)
    assert type(decoded) is type(request_)
    assert not newer_fields(type(decoded), WIRE_1_0).keys() & decoded.model_fields_set


def test_every_newer_field_of_a_reply_may_be_dropped():
    # encode_reply relies on it: a daemon cannot refuse to answer an old client.
    replies = {reply for replies in REPLIES.values() for reply in replies} | {ErrorReply, ChunkLocation}
    marks = [mark for reply in replies for mark in newer_fields(reply, WIRE_1_0).values()]
    assert marks
    assert all(mark.safe_to_drop for mark in marks)


# -- unknown fields ------------------------------------------------------------------------------------


def test_unknown_fields_are_counted_at_the_top_and_in_each_chunk():
    layout = [{**CHUNK, "a": 1}, {**CHUNK, "b": None, "c": []}, CHUNK]
    line = reply_line("HIT", object_size=1, chunk_layout=layout, x=1, y={"z": 2})
    reply, unknown = decode_reply(line, Locate(uri="a"))
    assert len(reply.chunk_layout) == 3
    assert unknown == 2 + 3


def test_unknown_fields_of_devices_are_counted():
    device = {
        "path": "/dev/nvme0n1",
        **dict.fromkeys(("is_nvme", "is_virtual", "is_partition", "is_rotational"), False),
        "size_bytes": 1,
    }
    line = reply_line("OK", devices=[{**device, "serial": "s"}, device])
    assert decode_reply(line, GetDevices())[1] == 1


def test_nothing_in_a_status_reply_is_unknown():
    line = reply_line("OK", anything={"goes": [1, None]}, x=1.5)
    assert decode_reply(line, GetStatus()) == (StatusReply(anything={"goes": [1, None]}, x=1.5), 0)


@pytest.mark.parametrize(
    "layout", [{}, {"a": CHUNK}, "abc", 5, None, True, [5], ["abc"], [None], [[]], [[CHUNK]], [{}]]
)
@pytest.mark.parametrize("version", [WIRE_1_0, (1, 1)], ids=["1.0", "1.1"])
def test_a_layout_that_is_no_list_of_chunks_is_an_invalid_message(layout, version):
    line = reply_line("HIT", object_size=1, chunk_layout=layout, x=1)
    with pytest.raises(InvalidMessage, match="chunk_layout"):
        decode_reply(line, Locate(uri="a"), version)


# -- words ---------------------------------------------------------------------------------------------


def test_an_unknown_action_is_named_and_the_known_ones_are_listed():
    with pytest.raises(InvalidMessage, match="unknown action 'locat'; known are append_write, ") as caught:
        decode_request(b'{"action":"locat"}')
    assert caught.value.code is ErrorCode.UNKNOWN_ACTION


def test_a_long_unknown_action_is_cut():
    with pytest.raises(InvalidMessage) as caught:
        decode_request(b'{"action":"' + b"x" * 100_000 + b'"}')
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "line", [b"{}", b'{"action":null}', b'{"action":5}', b'{"action":["ping"]}', b'{"Action":"ping"}']
)
def test_a_request_without_an_action_says_so(line):
    with pytest.raises(InvalidMessage, match="needs a field 'action' that holds a string") as caught:
        decode_request(line)
    assert caught.value.code is ErrorCode.BAD_REQUEST


def test_actions_are_case_sensitive():
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
def test_a_status_that_old_clients_take_for_success_is_success(request_, line, model):
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
        (RecordTelemetry.model_construct(), "OK"),
    ],
)
def test_a_status_that_this_request_cannot_have_is_an_error_not_a_success(request_, status):
    reply, _ = decode_reply(reply_line(status, **LAYOUT, sync_status="STAGED"), request_)
    assert type(reply) is ErrorReply
    assert request_.action in reply.error_message
    assert repr(status) in reply.error_message


def test_an_unknown_status_that_gives_a_reason_keeps_it():
    reply, unknown = decode_reply(reply_line("BUSY", error_message="try later", retry_s=3), Locate(uri="a"))
    assert reply == ErrorReply(error_message="try later")
    assert unknown == 1


def test_a_long_unknown_status_is_cut():
    reply, _ = decode_reply(reply_line("x" * 100_000), Locate(uri="a"))
    assert len(reply.error_message) < 200


@pytest.mark.parametrize(
    "line", [b"{}", b'{"status":null}', b'{"status":5}', b'{"status":["HIT"]}', b'{"status":{}}']
)
@pytest.mark.parametrize(
    "request_", [Locate(uri="a"), Ping(), Pin(uri="a"), Purge()], ids=lambda one: one.action
)
def test_a_reply_without_a_status_is_no_success(line, request_):
    with pytest.raises(InvalidMessage, match=f"reply to {request_.action} has no field 'status'"):
        decode_reply(line, request_)


@pytest.mark.parametrize("status", ["OK", "DEVICES", "WRITESTATUS", "", None])
def test_where_old_clients_look_at_no_status_any_will_do(status):
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
def test_a_refusal_is_an_error_even_where_any_status_will_do(request_, status):
    reply, _ = decode_reply(reply_line(status, error_message="no"), request_)
    assert reply == ErrorReply(error_message="no")


@pytest.mark.parametrize("request_", [GetDevices(), GetWriteStatus(uri="a")], ids=lambda one: one.action)
def test_a_strange_status_without_the_fields_of_the_reply_is_an_error(request_):
    reply, _ = decode_reply(reply_line("UNSUPPORTED"), request_)
    assert type(reply) is ErrorReply
    with pytest.raises(InvalidMessage, match="has no field 'status'"):
        decode_reply(b"{}", request_)


# -- errors and states that this side does not know ----------------------------------------------------


@pytest.mark.parametrize(
    "code", ["FULL_MOON", "", "__class__", "bad_request", 5, None, True, [], ["NO_SPACE"], {}, 1.5]
)
def test_an_error_code_that_is_not_on_the_list_reads_as_none(code):
    reply, unknown = decode_reply(reply_line("ERROR", error_message="no", error_code=code), Ping())
    assert reply == ErrorReply(error_message="no", error_code=None)
    assert unknown == 0


@pytest.mark.parametrize("code", ErrorCode)
def test_each_error_code_of_the_list_is_read(code):
    reply, _ = decode_reply(reply_line("ERROR", error_message="no", error_code=code.value), Ping())
    assert reply.error_code is code


@pytest.mark.parametrize(
    "said", [{}, {"error_message": None}, {"error_message": 5}, {"error_message": ["a"]}]
)
def test_an_error_without_a_sentence_is_still_an_error(said):
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
def test_a_state_that_a_newer_daemon_may_have_reads_as_none(request_, line):
    reply, unknown = decode_reply(line, request_)
    assert type(reply) is not ErrorReply
    assert reply.sync_status is None
    assert unknown == 0


def test_an_ingested_reply_is_a_hit_too():
    reply, _ = decode_reply(reply_line("INGESTED", **LAYOUT), Ingest(uri="a"))
    assert type(reply) is IngestedReply
    assert isinstance(reply, HitReply)


def test_a_miss_needs_no_fields():
    assert decode_reply(b'{"status":"MISS"}', Locate(uri="a")) == (MissReply(), 0)


# -- what cannot be written ----------------------------------------------------------------------------


def test_a_status_reply_may_not_hide_its_own_word():
    with pytest.raises(ValueError, match="'status' is the word of the reply itself"):
        StatusReply(status="fine")


@pytest.mark.parametrize("value", ["\ud800", b"\xff", object()], ids=["surrogate", "bytes", "object"])
def test_a_status_reply_that_is_not_json_is_refused(value):
    with pytest.raises(LocalProtocolError, match="OK cannot be written as JSON"):
        encode_reply(StatusReply(value=value))


@example(uri="\ud800")
@given(st.text(st.characters(categories=["Cs"]), min_size=1))
def test_half_a_surrogate_pair_is_no_uri(uri):
    with pytest.raises(ValueError, match="string"):
        Locate(uri=uri)
