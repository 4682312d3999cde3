"""For tests: two sessions joined by a link without I/O, and hypothesis strategies for every message.

The strategies are chosen by a field's name, which means the same in every message; a model whose field is
missing from the table fails at once, so nothing new goes untested. Needs hypothesis.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from .errors import ErrorCode
from .fields import CHUNK_SIZE, MAX_OBJECT_BYTES, Tier
from .messages import REPLIES, Message, Reply, Request, StatusReply
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


_FIELDS: dict[str, SearchStrategy[Any]] = {
    "auto_flush_s3": _flags,
    "auto_ingest": _flags,
    "bandwidth_mbps": _amounts,
    "checksum": _crc32s,
    "chunk_checksums": st.lists(_crc32s, max_size=6).map(tuple),
    "chunk_count": _counts,
    "chunk_size": _counts,
    "client_id": _text,
    "cpu_pct": _amounts,
    "daemon": _text,
    "device": _text,
    "duration_us": _counts,
    "error_code": st.sampled_from(ErrorCode),
    "error_message": _text,
    "event_type": _text,
    "existing_fs": _text,
    "features": st.lists(_text, max_size=4).map(tuple),
    "generation": _counts,
    "instance_id": _text,
    "is_leader": _flags,
    "is_nvme": _flags,
    "is_partition": _flags,
    "is_rotational": _flags,
    "is_virtual": _flags,
    "length": st.integers(1, CHUNK_SIZE),
    "local_meta_us": _counts,
    "local_only": _flags,
    "local_ttfb_us": _counts,
    "model": _text,
    "numa_node": st.integers(-1, 255),
    "object_size": _sizes,
    "object_size_bytes": _counts,
    "offset": st.integers(0, 1 << 62),
    "path": _text,
    "pinned": _flags,
    "remote_meta_us": _counts,
    "remote_ttfb_us": _counts,
    "sha256": st.text("0123456789abcdefABCDEF", min_size=64, max_size=64),
    "size_bytes": _sizes,
    "stage_id": st.text(_characters, min_size=1, max_size=64),
    "status": _text,
    "sync_progress_percent": st.floats(0, 100),
    "sync_status": st.sampled_from(SyncStatus),
    "tier": _tiers,
    "time_saved_ms": _counts,
    "uri": uris(),
    "wire": st.lists(st.integers(1, 9), max_size=3).map(tuple),
    "write_through": _flags,
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
        return _FIELDS[name]
    one = messages_of(held.model, version)
    return st.lists(one, max_size=4).map(tuple) if held.many else one


def requests(version: WireVersion = LATEST) -> SearchStrategy[Request]:
    """Any request that a client of `version` may send."""
    return st.one_of([messages_of(model, version) for model in REPLIES])


def replies_to(request: type[Request], version: WireVersion = LATEST) -> SearchStrategy[Reply]:
    """Any reply, an error included, that a daemon of `version` may give to `request`."""
    return st.one_of([messages_of(model, version) for model in possible_replies(request)])


def exchanges(version: WireVersion = LATEST) -> SearchStrategy[tuple[Request, Reply]]:
    """A request and a reply to it."""
    return st.one_of(
        [st.tuples(messages_of(model, version), replies_to(model, version)) for model in REPLIES]
    )


# -- grease --------------------------------------------------------------------------------------------


def unknown_fields() -> SearchStrategy[dict[str, Any]]:
    """Fields that no version has, to be ignored wherever they turn up."""
    return st.dictionaries(_text.map("x_{}".format), json_values(), min_size=1, max_size=4)


def greased(line: bytes, extra: dict[str, Any]) -> bytes:
    """The same line with the fields `extra` beside its own, and in each object of its lists."""
    fields = json.loads(line)
    for value in fields.values():
        for item in value if isinstance(value, list) else ():
            if isinstance(item, dict):
                item.update(extra)
    return json.dumps(fields | extra).encode() + b"\n"
