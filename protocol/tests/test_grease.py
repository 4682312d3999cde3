"""Unknown fields on every message, both ways, so that tolerance cannot rot."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hypercache_protocol import WIRE_1_0, WIRE_1_1, ReplyReceived
from hypercache_protocol.codecs.json_lines import encode_reply, encode_request
from hypercache_protocol.messages import Reply, Request, StatusReply
from hypercache_protocol.testing import (
    Cut,
    SessionPair,
    byte_by_byte,
    exchanges,
    greased,
    unknown_fields,
    whole,
)
from hypercache_protocol.versions import WireVersion

VERSIONS = st.sampled_from([WIRE_1_0, WIRE_1_1])


def objects_in(line: bytes) -> int:
    """How many objects a line has that take fields: itself, its fields, and the items of its lists."""
    values = [value if isinstance(value, list) else [value] for value in json.loads(line).values()]
    return 1 + sum(isinstance(item, dict) for items in values for item in items)


@given(exchanges(), unknown_fields(), st.sampled_from([whole, byte_by_byte]))
def test_unknown_fields_change_nothing_and_are_all_counted(
    exchange: tuple[Request, Reply], extra: dict[str, Any], cut: Cut
) -> None:
    request, reply = exchange
    pair = SessionPair(cut=cut, alter=lambda line: greased(line, extra))
    seen_request, seen_reply = pair.exchange(request, reply)
    assert seen_request == request
    assert pair.daemon.unknown_fields == len(extra) * objects_in(encode_request(request))
    if isinstance(reply, StatusReply):  # takes any field
        fields = json.loads(greased(encode_reply(reply), extra))
        del fields["status"]
        assert seen_reply == StatusReply.model_validate(fields)
        assert pair.client.unknown_fields == 0
    else:
        assert seen_reply == reply
        assert pair.client.unknown_fields == len(extra) * objects_in(encode_reply(reply))


@given(exchanges(WIRE_1_0), unknown_fields(), VERSIONS, VERSIONS)
def test_every_pair_of_versions_stands_unknown_fields(
    exchange: tuple[Request, Reply],
    extra: dict[str, Any],
    client_version: WireVersion,
    daemon_version: WireVersion,
) -> None:
    request, reply = exchange
    pair = SessionPair(
        client_version=client_version,
        daemon_version=daemon_version,
        alter=lambda line: greased(line, extra),
    )
    seen_request, seen_reply = pair.exchange(request, reply)
    assert seen_request == request
    assert type(seen_reply) is type(reply)


@given(st.lists(exchanges(), min_size=2, max_size=4), st.lists(unknown_fields(), min_size=1, max_size=3))
def test_grease_leaves_a_pipeline_in_step(
    exchanges: list[tuple[Request, Reply]], extras: list[dict[str, Any]]
) -> None:
    turns = iter(range(100))
    pair = SessionPair(alter=lambda line: greased(line, extras[next(turns) % len(extras)]))
    pair.ask(*(request for request, _ in exchanges))
    answered = pair.answer(*((number, reply) for number, (_, reply) in enumerate(exchanges, 1)))
    seen = [type(event.reply) for event in answered if isinstance(event, ReplyReceived)]
    assert seen == [type(reply) for _, reply in exchanges]
    assert len(answered) == len(exchanges)


def test_grease_is_beside_the_fields_of_a_message_and_in_each_object_that_it_holds() -> None:
    line = b'{"status":"HELLO","limits":{"max_batch":1},"devices":["/d"],"chunk_layout":[{"offset":0}]}'
    assert json.loads(greased(line, {"x": 1})) == {
        "status": "HELLO",
        "limits": {"max_batch": 1, "x": 1},
        "devices": ["/d"],
        "chunk_layout": [{"offset": 0, "x": 1}],
        "x": 1,
    }
