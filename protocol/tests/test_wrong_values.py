"""Every field of every message refuses what it does not hold, in a sentence that names it."""

import json
import re
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from hypercache_protocol.codecs.json_lines import decode_reply, decode_request, encode_reply, encode_request
from hypercache_protocol.errors import ErrorCode, InvalidMessage
from hypercache_protocol.fields import CHUNK_SIZE, MAX_OBJECT_BYTES, MAX_URI_BYTES
from hypercache_protocol.messages import (
    REPLIES,
    AppendWrite,
    ChunkLocation,
    CommittedReply,
    CommitWrite,
    DeviceInfo,
    DevicesReply,
    Evict,
    EvictedReply,
    GetDevices,
    GetStatus,
    GetWriteStatus,
    HitReply,
    Ingest,
    IngestedReply,
    Locate,
    Message,
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
from hypercache_protocol.schema import FieldRow, field_rows

CHUNK = ChunkLocation(device="/dev/nvme0n1", offset=0, length=4096, tier="ram", checksum=1)
DEVICE = DeviceInfo(
    path="/dev/nvme0n1",
    is_nvme=True,
    is_virtual=False,
    is_partition=False,
    is_rotational=False,
    size_bytes=1,
    model="m",
    existing_fs="ext4",
    numa_node=0,
)
REQUESTS = [
    Ping(),
    GetDevices(),
    Locate(uri="a", tier="ram"),
    Ingest(uri="a", tier="ram"),
    Pin(uri="a"),
    Evict(uri="a"),
    Purge(),
    GetStatus(),
    StageWrite(uri="a", size_bytes=1, tier="ram"),
    AppendWrite(uri="a", size_bytes=1, tier="ram", stage_id="s"),
    CommitWrite(uri="a", sha256="0" * 64, local_only=False, chunk_checksums=(1,), stage_id="s"),
    GetWriteStatus(uri="a"),
    RecordTelemetry(event_type="e", uri="a", object_size_bytes=1, duration_us=1, bandwidth_mbps=1.5),
]
_HIT = {"object_size": 1, "chunk_layout": (CHUNK,), "sync_status": "COMMITTED", "generation": 1}
_STAGED = {"object_size": 1, "chunk_layout": (CHUNK,), "sync_status": "STAGED", "stage_id": "s"}
ANSWERS = [
    (Ping(), PongReply(wire=(1,), daemon="d", instance_id="i", features=("f",))),
    (GetDevices(), DevicesReply(devices=(DEVICE,))),
    (Locate(uri="a"), HitReply(**_HIT)),
    (Locate(uri="a"), MissReply()),
    (Ingest(uri="a"), IngestedReply(**_HIT)),
    (Evict(uri="a"), EvictedReply()),
    (Purge(), PurgedReply()),
    (GetStatus(), StatusReply()),
    (StageWrite(uri="a", size_bytes=1), StagedReply(**_STAGED)),
    (CommitWrite(uri="a"), CommittedReply(object_size=1, sync_status="COMMITTED", generation=1)),
    (GetWriteStatus(uri="a"), WriteStatusReply(sync_status="COMMITTED", sync_progress_percent=5)),
]

# JSON texts that are no value of a kind; the last column's are none of any.
_NOT = {
    "boolean": ["0", "1", '"true"', '""', "0.0"],
    "integer": [
        '"5"',
        "true",
        "false",
        "4096.0",
        "5.5",
        "1e3",
        "1e400",
        "-0.0",
        "9" * 30,
        "9" * 4300,
        "-" + "9" * 30,
    ],
    "number": ['"5"', "true", "-1", "-0.5", "1e400", "9" * 400],
    "string": ["5", "true", "5.0"],
    "list": ['"abc"', "5", "true", "0.5"],
}
_NEVER = ["[[]]", "{}", '{"a":1}']


def wrong_texts(row: FieldRow) -> list[str]:
    """JSON texts that the field of `row` must refuse."""
    kind, _, item = row.kind.partition(" of ")
    texts = [*_NOT[kind], *_NEVER]
    if not item:
        texts.append("[]")
    if item in _NOT:
        texts += [f"[{text}]" for text in _NOT[item]] + ["[null]"]
    elif item:
        texts += ["[null]", "[5]", '["a"]', "[[]]", "[{}]"]
    # A state that is null reads as one that this side does not know.
    if row.name != "sync_status" and (row.required or row.default is not None):
        texts.append("null")
    return texts


def bounds(model: type[Message], name: str) -> list[str]:
    """JSON texts just beyond what the field holds."""
    schema = model.model_json_schema()["properties"][name]
    schema = next((choice for choice in schema.get("anyOf", [schema]) if choice != {"type": "null"}), schema)
    texts = []
    if "minimum" in schema:
        texts.append(json.dumps(schema["minimum"] - 1))
    if "maximum" in schema:
        texts.append(json.dumps(schema["maximum"] + 1))
    if "minLength" in schema:
        texts.append(json.dumps("x" * (schema["minLength"] - 1)))
    if "maxLength" in schema:
        texts.append(json.dumps("x" * (schema["maxLength"] + 1)))
    return texts


def with_value(line: bytes, name: str, text: str, inside: str | None = None) -> bytes:
    """The line with the JSON `text` for the value of the field `name`, of each item of `inside` if given."""
    fields = json.loads(line)
    for place in fields[inside] if inside else [fields]:
        assert name in place, "each field must be set, or nothing is tested"
        place[name] = "\0here"
    return json.dumps(fields).replace('"\\u0000here"', text).encode()


def refusal(decode: Callable[[bytes], object], line: bytes) -> str:
    with pytest.raises(InvalidMessage) as caught:
        decode(line)
    assert caught.value.code is ErrorCode.BAD_REQUEST
    assert len(caught.value.message) < 300
    return caught.value.message.replace("the field '", "")


def fields_of(*messages: tuple[Any, ...]) -> list[Any]:
    """Each message with each of its fields, and a name for the pair."""
    return [
        pytest.param(*given, row, id=f"{type(given[-1]).__name__}-{row.name}")
        for given in messages
        for row in field_rows(type(given[-1]))
    ]


@pytest.mark.parametrize(("request_", "row"), fields_of(*((request,) for request in REQUESTS)))
def test_a_wrong_value_in_a_request_is_refused_by_its_field_s_name(request_: Request, row: FieldRow) -> None:
    for text in wrong_texts(row) + bounds(type(request_), row.name):
        line = with_value(encode_request(request_), row.name, text)
        assert refusal(decode_request, line).startswith(f"{request_.action}: {row.name}"), text


@pytest.mark.parametrize(("request_", "reply", "row"), fields_of(*ANSWERS))
def test_a_wrong_value_in_a_reply_is_refused_by_its_field_s_name(
    request_: Request, reply: Reply, row: FieldRow
) -> None:
    for text in wrong_texts(row) + bounds(type(reply), row.name):
        line = with_value(encode_reply(reply), row.name, text)
        said = refusal(lambda line: decode_reply(line, request_), line)
        assert said.startswith(f"the reply to {request_.action}: {row.name}"), text


ITEMS = [
    (Locate(uri="a"), ANSWERS[2][1], "chunk_layout", CHUNK),
    (GetDevices(), ANSWERS[1][1], "devices", DEVICE),
]


@pytest.mark.parametrize(("request_", "reply", "field", "item", "row"), fields_of(*ITEMS))
def test_a_wrong_value_in_an_item_is_refused_by_its_place(
    request_: Request, reply: Reply, field: str, item: Message, row: FieldRow
) -> None:
    for text in wrong_texts(row) + bounds(type(item), row.name):
        line = with_value(encode_reply(reply), row.name, text, inside=field)
        said = refusal(lambda line: decode_reply(line, request_), line)
        assert said.startswith(f"the reply to {request_.action}: {field}[0].{row.name}"), text


def test_every_field_of_every_message_is_in_these_cases() -> None:
    assert {type(request) for request in REQUESTS} == set(REPLIES)
    assert {type(reply) for _, reply in ANSWERS} == set(chain.from_iterable(REPLIES.values()))


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.action)
def test_a_missing_field_is_named(request_: Request) -> None:
    for row in field_rows(type(request_)):
        fields = json.loads(encode_request(request_))
        if row.required:
            del fields[row.name]
            with pytest.raises(
                InvalidMessage, match=f"^{request_.action}: the field '{row.name}' is missing$"
            ):
                decode_request(json.dumps(fields).encode())


def silenced(message: Request | Reply, line: bytes) -> tuple[list[str], bytes]:
    """The fields of `message` that need not be said, and its line with null for each of them."""
    silent = [row.name for row in field_rows(type(message)) if not row.required and row.default is None]
    return silent, json.dumps(json.loads(line) | dict.fromkeys(silent)).encode()


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.action)
def test_null_in_a_request_says_nothing_where_nothing_need_be_said(request_: Request) -> None:
    silent, line = silenced(request_, encode_request(request_))
    request, unknown = decode_request(line)
    assert [getattr(request, name) for name in silent] == [None] * len(silent)
    assert unknown == 0


@pytest.mark.parametrize(("request_", "reply"), ANSWERS, ids=lambda one: type(one).__name__)
def test_null_in_a_reply_says_nothing_where_nothing_need_be_said(request_: Request, reply: Reply) -> None:
    silent, line = silenced(reply, encode_reply(reply))
    answer, unknown = decode_reply(line, request_)
    assert [getattr(answer, name) for name in silent] == [None] * len(silent)
    assert unknown == 0


# -- the edges of what is allowed ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "uri", ["u", "u" * MAX_URI_BYTES, "ü" * (MAX_URI_BYTES // 2), " ", "\n", "\x7f", "\U0010ffff", "../.."]
)
def test_a_uri_is_any_string_up_to_its_limit(uri: str) -> None:
    request = Locate(uri=uri)
    assert decode_request(encode_request(request)) == (request, 0)


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("", "at least 1 character"),
        ("u" * (MAX_URI_BYTES + 1), "at most 8192 bytes long, not 8193"),
        ("ü" * (MAX_URI_BYTES // 2 + 1), "at most 8192 bytes long, not 8194"),
        ("a\0b", "must not hold a NUL character"),
        ("\0", "must not hold a NUL character"),
    ],
)
def test_a_uri_beyond_its_limits_is_refused(uri: str, why: str) -> None:
    with pytest.raises(InvalidMessage, match=f"^locate: uri: .*{why}"):
        decode_request(json.dumps({"action": "locate", "uri": uri}).encode())


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, CHUNK_SIZE + 1, MAX_OBJECT_BYTES])
def test_sizes_within_the_limit_are_taken_as_they_are(size_bytes: int) -> None:
    line = f'{{"action":"stage_write","uri":"a","size_bytes":{size_bytes}}}'.encode()
    assert decode_request(line)[0] == StageWrite(uri="a", size_bytes=size_bytes)


# By hand, since the cases above take each bound from the model itself.
@pytest.mark.parametrize(
    ("request_", "reply", "name", "least", "most"),
    [
        (Locate(uri="a"), ANSWERS[2][1], "checksum", 0, 4294967295),
        (Locate(uri="a"), ANSWERS[2][1], "length", 1, 4194304),
        (Locate(uri="a"), ANSWERS[2][1], "offset", 0, 4611686018427387904),
        (GetDevices(), ANSWERS[1][1], "size_bytes", 0, 9223372036854775807),
        (GetDevices(), ANSWERS[1][1], "numa_node", -2147483648, 2147483647),
    ],
)
def test_a_number_in_an_item_is_taken_up_to_its_bounds(
    request_: Request, reply: Reply, name: str, least: int, most: int
) -> None:
    field = "devices" if isinstance(request_, GetDevices) else "chunk_layout"
    for value in (least, most):
        decode_reply(with_value(encode_reply(reply), name, str(value), inside=field), request_)
    for value in (least - 1, most + 1):
        with pytest.raises(InvalidMessage, match=name):
            decode_reply(with_value(encode_reply(reply), name, str(value), inside=field), request_)


@pytest.mark.parametrize(
    ("name", "text", "taken"),
    [
        ("chunk_checksums", "[0, 4294967295]", True),
        ("chunk_checksums", "[4294967296]", False),
        ("chunk_checksums", "[-1]", False),
        ("stage_id", json.dumps("s" * 64), True),
        ("stage_id", json.dumps("s" * 65), False),
        ("stage_id", '""', False),
    ],
)
def test_a_commit_is_taken_up_to_the_bounds_of_its_fields(name: str, text: str, taken: bool) -> None:
    line = with_value(encode_request(REQUESTS[10]), name, text)
    if taken:
        assert decode_request(line)[1] == 0
    else:
        with pytest.raises(InvalidMessage, match=name):
            decode_request(line)


def test_a_whole_number_is_taken_where_a_number_is_wanted() -> None:
    line = with_value(encode_request(REQUESTS[-1]), "bandwidth_mbps", "100")
    request, _ = decode_request(line)
    assert isinstance(request, RecordTelemetry)
    assert request.bandwidth_mbps == 100.0


@pytest.mark.parametrize("sha256", ["0" * 63, "0" * 65, "g" * 64, "0" * 64 + "\n", "sha256:" + "0" * 57, ""])
def test_a_sha256_that_is_none_is_refused(sha256: str) -> None:
    with pytest.raises(InvalidMessage, match=r"^commit_write: sha256: "):
        decode_request(json.dumps({"action": "commit_write", "uri": "a", "sha256": sha256}).encode())


@pytest.mark.parametrize("tier", ['"disk"', '"nvme "', '""', "5"])
def test_an_unknown_tier_is_refused_and_the_known_ones_are_told(tier: str) -> None:
    with pytest.raises(InvalidMessage, match=r"^locate: tier: .*'nvme' or 'ram'"):
        decode_request(f'{{"action":"locate","uri":"a","tier":{tier}}}'.encode())


def test_a_long_wrong_value_is_cut() -> None:
    long = "x" * 100_000
    with pytest.raises(InvalidMessage) as caught:
        decode_request(json.dumps({"action": "stage_write", "uri": "a", "size_bytes": long}).encode())
    assert len(caught.value.message) < 200
    assert re.search(r"\(got 'x+\.\.\.x+'\)$", caught.value.message)


def test_the_name_of_an_unknown_field_is_in_no_error() -> None:
    line = json.dumps({"action": "locate", "x" * 10_000: 1}).encode()
    with pytest.raises(InvalidMessage, match=r"^locate: the field 'uri' is missing$"):
        decode_request(line)
