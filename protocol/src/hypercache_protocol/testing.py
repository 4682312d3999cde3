"""For tests: two sessions joined by a link without I/O, and hypothesis strategies for every message.

The strategies are chosen by a field's name, which means the same in every message but where a model has
columns; a model whose field is missing from the tables fails at once, so nothing new goes untested. Needs
hypothesis.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, TypeVar

import msgpack
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from .actions import actions_in_frames, actions_on_lines
from .batches import MAX_BATCH, Hello, HelloLimits, HelloReply, LayoutColumns
from .errors import ErrorCode
from .fields import CHUNK_SIZE, MAX_OBJECT_BYTES, Tier
from .layout import Layout
from .messages import Message, Reply, Request, StatusReply
from .negotiation import choose, spoken
from .schema import held_models, newer_fields, possible_replies, required_fields
from .session import (
    DEFAULT_LIMITS,
    NEED_DATA,
    ConnectionClosed,
    Event,
    Limits,
    ReplyReceived,
    RequestReceived,
    Role,
    Session,
)
from .states import SyncStatus
from .versions import LATEST, WireVersion

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")

# -- the link ------------------------------------------------------------------------------------------

Cut = Callable[[bytes], Iterable[bytes]]
"""How a link cuts what it carries: bytes in, the same bytes in pieces out."""


def whole(data: bytes) -> Iterable[bytes]:
    """All in one piece."""
    return [data] if data else []  # an empty piece would be the end of the connection


def byte_by_byte(data: bytes) -> Iterable[bytes]:
    """One byte at a time."""
    return [data[at : at + 1] for at in range(len(data))]


def cut_at(positions: Iterable[int]) -> Cut:
    """Cuts at `positions`, each taken modulo what there is to cut."""

    def cut(data: bytes) -> Iterable[bytes]:
        edges = sorted({0, len(data), *(position % (len(data) + 1) for position in positions)})
        return [data[start:end] for start, end in pairwise(edges)]

    return cut


def events(session: Session, data: bytes, cut: Cut = whole) -> list[Event]:
    """Every event that `session` makes of `data`, up to the last byte or the end of the connection."""
    found: list[Event] = []
    for piece in cut(data):
        session.receive_data(piece)
        while (event := session.next_event()) is not NEED_DATA:
            found.append(event)
            if isinstance(event, ConnectionClosed):
                return found
    return found


class SessionPair:
    """A client's session and a daemon's; what one sends, the other receives, cut as `cut` says.

    Args:
        alter: what the link does to each line, for grease and for damage.
    """

    def __init__(
        self,
        *,
        client_version: WireVersion = LATEST,
        daemon_version: WireVersion = LATEST,
        limits: Limits = DEFAULT_LIMITS,
        cut: Cut = whole,
        alter: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.client = Session(Role.CLIENT, version=client_version, limits=limits)
        self.daemon = Session(Role.DAEMON, version=daemon_version, limits=limits)
        self._cut = cut
        self._alter = alter

    def greet(self) -> HelloReply:
        """Hello and its answer; from here on both speak the best wire that both have."""
        most = min(self.client.version, self.daemon.version)
        hello = Hello(versions=spoken(self.client.version), name="test")
        _, reply = self.exchange(hello, welcome(str(choose(hello.versions, most))))
        assert isinstance(reply, HelloReply), reply
        return reply

    def ask(self, *requests: Request) -> list[Event]:
        """What the daemon's session makes of `requests`, sent in one piece before the link cuts it."""
        lines = [self.client.send_request(request)[1] for request in requests]
        return events(self.daemon, b"".join(map(self._alter, lines)), self._cut)

    def answer(self, *replies: tuple[int, Reply]) -> list[Event]:
        """What the client's session makes of `replies`, each with the id of its request."""
        lines = [self.daemon.send_reply(request_id, reply) for request_id, reply in replies]
        return events(self.client, b"".join(map(self._alter, lines)), self._cut)

    def exchange(self, request: Request, reply: Reply) -> tuple[Request, Reply]:
        """The request and the reply as the other end sees them."""
        (asked,) = self.ask(request)
        assert isinstance(asked, RequestReceived), asked
        (answered,) = self.answer((asked.request_id, reply))
        assert isinstance(answered, ReplyReceived), answered
        return asked.request, answered.reply


def welcome(version: str, **fields: Any) -> HelloReply:
    """A hello's answer that goes on in `version`."""
    limits = HelloLimits(
        max_request_bytes=DEFAULT_LIMITS.max_request_bytes,
        max_reply_bytes=DEFAULT_LIMITS.max_reply_bytes,
        max_in_flight=64,
        max_batch=MAX_BATCH,
    )
    known = {"versions": (version,), "features": (), "limits": limits, "devices": (), "instance_id": "1"}
    return HelloReply.model_validate({"version": version, **known, **fields})


# -- strategies: fields --------------------------------------------------------------------------------

_I63 = (1 << 63) - 1
_characters = st.characters(exclude_categories=["Cs"])
_text = st.text(_characters, max_size=40)
_counts = st.integers(0, _I63)
_flags = st.booleans()
_crc32s = st.integers(0, 0xFFFFFFFF)
_amounts = st.floats(0, allow_infinity=False)
_sizes = st.integers(0, MAX_OBJECT_BYTES)
_tiers = st.sampled_from(Tier)


def uris() -> SearchStrategy[str]:
    """Names of objects: the schemes in use, and odd characters."""
    odd = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)
    usual = st.builds("{}://{}".format, st.sampled_from(["hypercache", "s3", "file", "nfs"]), odd)
    return usual | odd


def json_values() -> SearchStrategy[Any]:
    """Anything that JSON can hold."""
    scalars = st.none() | st.booleans() | st.integers(-_I63, _I63) | st.floats(allow_nan=False) | _text
    finite = scalars.filter(lambda value: value not in (float("inf"), float("-inf")))
    return st.recursive(finite, lambda inner: st.lists(inner) | st.dictionaries(_text, inner), max_leaves=8)


_columns = st.binary(max_size=24)
_words = st.lists(_text, max_size=4).map(tuple)
_versions = st.sampled_from(["1.0", "1.1", "2.0", "2.1", "2.7", "3.0", "10.11", "", "two", "1."])
_stage_ids = st.text(_characters, min_size=1, max_size=64)

_FIELDS: dict[str, SearchStrategy[Any]] = {
    "auto_flush_s3": _flags,
    "auto_ingest": _flags,
    "bandwidth_mbps": _amounts,
    "buckets": _counts,
    "checksum": _crc32s,
    "checksum_counts": _columns,
    "checksummed": _columns,
    "checksums": _columns,
    "chunk_checksums": st.lists(_crc32s, max_size=6).map(tuple),
    "chunk_count": _counts,
    "chunk_counts": _columns,
    "chunk_lengths": _columns,
    "chunk_offsets": _columns,
    "chunk_paths": _columns,
    "chunk_size": _counts,
    "client_id": _text,
    "cpu_pct": _amounts,
    "daemon": _text,
    "device": _text,
    "devices": _words,
    "done": _columns,
    "duration_us": _counts,
    "error_code": st.sampled_from(ErrorCode),
    "error_message": _text,
    "event_type": _text,
    "existing_fs": _text,
    "features": _words,
    "generation": _counts,
    "generations": _columns,
    "index": _counts,
    "instance_id": _text,
    "is_leader": _flags,
    "is_nvme": _flags,
    "is_partition": _flags,
    "is_rotational": _flags,
    "is_virtual": _flags,
    "layouts": _flags,
    "length": st.integers(1, CHUNK_SIZE),
    "local_meta_us": _counts,
    "local_only": _flags,
    "local_ttfb_us": _counts,
    "max_batch": _counts,
    "max_in_flight": _counts,
    "max_reply_bytes": _counts,
    "max_request_bytes": _counts,
    "model": _text,
    "name": _text,
    "numa_node": st.integers(-1, 255),
    "object_size": _sizes,
    "object_size_bytes": _counts,
    "object_sizes": _columns,
    "offset": st.integers(0, 1 << 62),
    "path": _text,
    "path_tiers": _columns,
    "paths": _words,
    "pinned": _flags,
    "prefix": _text,
    "present": _columns,
    "remote_meta_us": _counts,
    "remote_ttfb_us": _counts,
    "seed": _counts,
    "sha256": st.text("0123456789abcdefABCDEF", min_size=64, max_size=64),
    "size_bytes": _sizes,
    "sizes": st.lists(_sizes, max_size=6).map(tuple),
    "stage_id": _stage_ids,
    "stage_ids": st.lists(_stage_ids, max_size=6).map(tuple),
    "status": _text,
    "stored": _columns,
    "suffixes": st.lists(uris(), max_size=6).map(tuple),
    "sync_progress_percent": st.floats(0, 100),
    "sync_status": st.sampled_from(SyncStatus),
    "sync_statuses": _columns,
    "table_format": _counts,
    "tier": _tiers,
    "time_saved_ms": _counts,
    "unknown": _words,
    "unless_stored": _flags,
    "uri": uris(),
    "verifiable": _columns,
    "version": _versions,
    "versions": st.lists(_versions, max_size=4).map(tuple),
    "wire": st.lists(st.integers(1, 9), max_size=3).map(tuple),
    "write_through": _flags,
}

# Where a name means something else in one model.
_OWN_FIELDS: dict[tuple[type[Message], str], SearchStrategy[Any]] = {
    (LayoutColumns, "chunk_checksums"): _columns,
}

# -- strategies: messages ------------------------------------------------------------------------------


def messages_of(model: type[_M], version: WireVersion = LATEST) -> SearchStrategy[_M]:
    """Valid messages of `model` that set no field which came after `version`."""
    if issubclass(model, StatusReply):
        names = _text.filter(lambda name: name != "status")
        values = json_values().filter(lambda value: value is not None)
        return st.dictionaries(names, values, max_size=5).map(model.model_validate)
    known = model.model_fields.keys() - newer_fields(model, version).keys()
    needed = required_fields(model)
    return st.fixed_dictionaries(
        {name: _field(model, name, version) for name in sorted(needed)},
        optional={name: _field(model, name, version) for name in sorted(known - needed)},
    ).map(model.model_validate)


def _field(model: type[Message], name: str, version: WireVersion) -> SearchStrategy[Any]:
    held = held_models(model).get(name)
    if held is None:
        return _OWN_FIELDS[model, name] if (model, name) in _OWN_FIELDS else _FIELDS[name]
    one = messages_of(held.model, version)
    return st.lists(one, max_size=4).map(tuple) if held.many else one


def requests(version: WireVersion = LATEST, *, framed: bool = False) -> SearchStrategy[Request]:
    """Any request that a client of `version` may send on a line, or in a frame."""
    return st.one_of([messages_of(model, version) for model in _asked(version, framed)])


def replies_to(request: type[Request], version: WireVersion = LATEST) -> SearchStrategy[Reply]:
    """Any reply, an error included, that a daemon of `version` may give to `request`."""
    return st.one_of([messages_of(model, version) for model in possible_replies(request)])


def exchanges(
    version: WireVersion = LATEST, *, framed: bool = False
) -> SearchStrategy[tuple[Request, Reply]]:
    """A request on a line, or in a frame, and a reply to it; never a hello, which changes the wire."""
    return st.one_of(
        [
            st.tuples(messages_of(model, version), replies_to(model, version))
            for model in _asked(version, framed)
        ]
    )


def _asked(version: WireVersion, framed: bool) -> list[type[Request]]:
    known = actions_in_frames(version) if framed else actions_on_lines(version)
    return [model for model in known.values() if model is not Hello]


def _one_each(items: list[int], values: SearchStrategy[_T]) -> SearchStrategy[list[_T]]:
    return st.lists(values, min_size=len(items), max_size=len(items))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Where an object may lie, of up to four chunks."""
    lengths = draw(st.lists(st.integers(1, CHUNK_SIZE), max_size=4))
    return Layout(
        sum(lengths),
        draw(_counts),
        draw(st.sampled_from(SyncStatus)),
        draw(_tiers),
        draw(_one_each(lengths, st.sampled_from(["/dev/nvme0n1", "/dev/nvme1n1", "/dev/shm/0"]))),
        draw(_one_each(lengths, st.integers(0, 1 << 62))),
        lengths,
        draw(st.none() | _one_each(lengths, _crc32s)),
    )


# -- grease --------------------------------------------------------------------------------------------


def unknown_fields() -> SearchStrategy[dict[str, Any]]:
    """Fields that no version has, to be ignored wherever they turn up."""
    return st.dictionaries(_text.map("x_{}".format), json_values(), min_size=1, max_size=4)


def greased(line: bytes, extra: dict[str, Any]) -> bytes:
    """The same line with the fields `extra` beside its own, and in each object of its lists."""
    return json.dumps(_greased_fields(json.loads(line), extra)).encode() + b"\n"


def greased_frame(frame: bytes, extra: dict[str, Any]) -> bytes:
    """The same frame with the fields `extra` beside its own, and in each map that is a field or in a list."""
    request_id, word, fields = msgpack.unpackb(frame[4:])
    body: bytes = msgpack.packb([request_id, word, _greased_fields(fields, extra)])
    return len(body).to_bytes(4, "big") + body


def _greased_fields(fields: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    for value in fields.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                item.update(extra)
    return fields | extra
