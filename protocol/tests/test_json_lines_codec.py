"""The JSON-lines codec: what goes in comes out, and each version sees its own fields only."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hypercache_protocol.actions import ALL_REPLIES
from hypercache_protocol.codecs.json_lines import decode_reply, decode_request, encode_reply, encode_request
from hypercache_protocol.errors import InvalidMessage, LocalProtocolError
from hypercache_protocol.fields import Tier
from hypercache_protocol.messages import (
    REPLIES,
    ChunkLocation,
    CommitWrite,
    DeviceInfo,
    DevicesReply,
    GetDevices,
    GetStatus,
    HitReply,
    Locate,
    Message,
    Ping,
    Reply,
    Request,
    StatusReply,
)
from hypercache_protocol.schema import held_models, newer_fields, possible_replies, since_marks
from hypercache_protocol.states import SyncStatus
from hypercache_protocol.testing import exchanges, messages_of, requests
from hypercache_protocol.versions import WIRE_1_0, WireVersion

CHUNK = {"device": "/dev/nvme0n1", "offset": 0, "length": 4096}
LAYOUT = {"object_size": 4096, "chunk_layout": [CHUNK]}


def reply_line(status: str, **fields: object) -> bytes:
    return json.dumps({"status": status, **fields}).encode()


# -- round trips ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", REPLIES, ids=lambda model: model.action)
@given(data=st.data())
def test_every_request_comes_back_as_it_went(model: type[Request], data: st.DataObject) -> None:
    request = data.draw(messages_of(model))
    assert decode_request(encode_request(request)) == (request, 0)


@given(exchanges())
def test_every_reply_comes_back_as_it_went(exchange: tuple[Request, Reply]) -> None:
    request, reply = exchange
    decoded, unknown = decode_reply(encode_reply(reply), request)
    assert (type(decoded), decoded, unknown) == (type(reply), reply, 0)


@given(exchanges())
def test_a_message_is_one_line_of_json_that_says_its_word_first(exchange: tuple[Request, Reply]) -> None:
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


def test_what_is_not_said_is_left_out() -> None:
    assert encode_request(Ping()) == b'{"action":"ping"}\n'
    assert (
        encode_request(Locate(uri="a"))
        == b'{"action":"locate","uri":"a","auto_ingest":true,"pinned":false}\n'
    )


def test_a_tier_is_read_in_any_case_and_written_in_lower_case() -> None:
    request, _ = decode_request(b'{"action":"locate","uri":"a","tier":"RAM"}')
    assert request == Locate(uri="a", tier=Tier.RAM)
    assert b'"tier":"ram"' in encode_request(request)


def test_a_chunk_without_a_tier_lies_on_nvme() -> None:
    reply, _ = decode_reply(reply_line("HIT", **LAYOUT), Locate(uri="a"))
    assert isinstance(reply, HitReply)
    assert reply.chunk_layout[0].tier is Tier.NVME


# -- versions ------------------------------------------------------------------------------------------

WITH_CHECKSUM = HitReply(
    object_size=4096,
    chunk_layout=(ChunkLocation(**CHUNK, checksum=7),),
    sync_status=SyncStatus.COMMITTED,
    generation=3,
)


def test_a_reply_to_1_0_leaves_out_what_came_later_in_the_chunks_too() -> None:
    assert json.loads(encode_reply(WITH_CHECKSUM, WIRE_1_0)) == {
        "status": "HIT",
        "object_size": 4096,
        "chunk_size": 4194304,
        "chunk_layout": [{**CHUNK, "tier": "nvme"}],
    }


def test_a_side_held_to_1_0_counts_what_came_later_as_unknown_in_the_chunks_too() -> None:
    reply, unknown = decode_reply(encode_reply(WITH_CHECKSUM), Locate(uri="a"), WIRE_1_0)
    assert isinstance(reply, HitReply)
    assert (reply.sync_status, reply.generation, reply.chunk_layout[0].checksum) == (None, None, None)
    assert unknown == 3


@pytest.mark.parametrize(
    "fields",
    [{"local_only": True}, {"local_only": False}, {"stage_id": "s"}, {"stage_id": "s", "local_only": True}],
)
def test_a_field_that_may_not_be_dropped_is_not_sent_to_1_0(fields: dict[str, Any]) -> None:
    request = CommitWrite(uri="a", **fields)
    with pytest.raises(LocalProtocolError, match=r"(local_only|stage_id) needs wire 1\.1 .* wire 1\.0"):
        encode_request(request, WIRE_1_0)


def test_checksums_are_dropped_for_1_0() -> None:
    line = encode_request(CommitWrite(uri="a", chunk_checksums=(1, 2)), WIRE_1_0)
    assert json.loads(line) == {"action": "commit_write", "uri": "a", "write_through": False}


def test_a_daemon_held_to_1_0_commits_without_what_it_does_not_know() -> None:
    line = encode_request(CommitWrite(uri="a", chunk_checksums=(1,), local_only=True, stage_id="s"))
    assert decode_request(line, WIRE_1_0) == (CommitWrite(uri="a"), 3)


@pytest.mark.parametrize("wrong", [5, "s", [], {}, None, [1, {}]])
def test_a_wrong_value_in_a_field_that_1_0_does_not_know_is_no_fault_to_it(wrong: object) -> None:
    line = json.dumps(
        {"action": "commit_write", "uri": "a", "local_only": wrong, "chunk_checksums": wrong}
    ).encode()
    assert decode_request(line, WIRE_1_0) == (CommitWrite(uri="a"), 2)


@given(exchanges(WIRE_1_0))
def test_a_message_without_newer_fields_is_the_same_bytes_on_1_0_and_1_1(
    exchange: tuple[Request, Reply],
) -> None:
    request, reply = exchange
    assert encode_request(request, WIRE_1_0) == encode_request(request)
    assert encode_reply(reply, WIRE_1_0) == encode_reply(reply)


@given(exchanges())
def test_a_1_0_client_reads_every_reply_of_a_1_1_daemon(exchange: tuple[Request, Reply]) -> None:
    request, reply = exchange
    decoded, _ = decode_reply(encode_reply(reply), request, WIRE_1_0)
    assert type(decoded) is type(reply)
    assert not newer_fields(type(decoded), WIRE_1_0).keys() & decoded.model_fields_set


@given(requests())
def test_a_1_0_daemon_reads_every_request_of_a_1_1_client(request_: Request) -> None:
    decoded, _ = decode_request(encode_request(request_), WIRE_1_0)
    assert type(decoded) is type(request_)
    assert not newer_fields(type(decoded), WIRE_1_0).keys() & decoded.model_fields_set


def parts_of(model: type[Message]) -> set[type[Message]]:
    """The models inside `model`, and those inside them."""
    held = {inner.model for inner in held_models(model).values()}
    return held.union(*map(parts_of, held))


def test_every_later_field_of_a_reply_or_inside_a_message_may_be_dropped() -> None:
    # The encoders rely on it: a daemon cannot refuse to answer an old client, and of a request only the
    # fields at the top are looked at before it is sent.
    replies = {reply for request in ALL_REPLIES for reply in possible_replies(request)}
    models = replies.union(*map(parts_of, [*replies, *ALL_REPLIES]))
    marks = {(model, name): mark for model in models for name, mark in since_marks(model).items()}
    assert (HitReply, "generation") in marks
    assert (ChunkLocation, "checksum") in marks
    assert [key for key, mark in marks.items() if not mark.safe_to_drop] == []


def test_a_model_inside_a_message_that_has_nothing_newer_goes_whole_to_an_old_peer() -> None:
    device = DeviceInfo(
        path="/d", is_nvme=True, is_virtual=False, is_partition=False, is_rotational=False, size_bytes=1
    )
    reply = DevicesReply(devices=(device,))
    assert encode_reply(reply, WIRE_1_0) == encode_reply(reply)


# -- unknown fields ------------------------------------------------------------------------------------


def test_unknown_fields_are_counted_at_the_top_and_in_each_chunk() -> None:
    layout = [{**CHUNK, "a": 1}, {**CHUNK, "b": None, "c": []}, CHUNK]
    line = reply_line("HIT", object_size=1, chunk_layout=layout, x=1, y={"z": 2})
    reply, unknown = decode_reply(line, Locate(uri="a"))
    assert isinstance(reply, HitReply)
    assert len(reply.chunk_layout) == 3
    assert unknown == 2 + 3


def test_unknown_fields_of_devices_are_counted() -> None:
    device = {
        "path": "/dev/nvme0n1",
        **dict.fromkeys(("is_nvme", "is_virtual", "is_partition", "is_rotational"), False),
        "size_bytes": 1,
    }
    line = reply_line("OK", devices=[{**device, "serial": "s"}, device])
    assert decode_reply(line, GetDevices())[1] == 1


def test_nothing_in_a_status_reply_is_unknown() -> None:
    line = reply_line("OK", anything={"goes": [1, None]}, x=1.5)
    assert decode_reply(line, GetStatus()) == (StatusReply(anything={"goes": [1, None]}, x=1.5), 0)


@pytest.mark.parametrize(
    "layout", [{}, {"a": CHUNK}, "abc", 5, None, True, [5], ["abc"], [None], [[]], [[CHUNK]], [{}]]
)
@pytest.mark.parametrize("version", [WIRE_1_0, (1, 1)], ids=["1.0", "1.1"])
def test_a_layout_that_is_no_list_of_chunks_is_an_invalid_message(
    layout: object, version: WireVersion
) -> None:
    line = reply_line("HIT", object_size=1, chunk_layout=layout, x=1)
    with pytest.raises(InvalidMessage, match="chunk_layout"):
        decode_reply(line, Locate(uri="a"), version)


# -- what cannot be written ----------------------------------------------------------------------------


def test_a_status_reply_may_not_hide_its_own_word() -> None:
    with pytest.raises(ValueError, match="'status' is the word of the reply itself"):
        StatusReply(status="fine")


@pytest.mark.parametrize("value", ["\ud800", b"\xff", object()], ids=["surrogate", "bytes", "object"])
def test_a_status_reply_that_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(LocalProtocolError, match="OK cannot be written as JSON"):
        encode_reply(StatusReply(value=value))


@example(uri="\ud800")
@given(st.text(st.characters(categories=["Cs"]), min_size=1))
def test_half_a_surrogate_pair_is_no_uri(uri: str) -> None:
    with pytest.raises(ValueError, match="string"):
        Locate(uri=uri)
