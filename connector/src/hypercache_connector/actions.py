"""One method for each action of the daemon, in terms of `exchange`.

Rules:
1. Names, fields and defaults are the wire's; `hypercache_protocol.messages` says what each field means.
2. A miss is a result. A refusal is DaemonRefused; no answer that could be trusted is DaemonUnavailable.
3. What a daemon's wire can't carry is a LocalProtocolError before anything is sent: `local_only` and
   `stage_id` mean nothing to one of wire 1.0, and may not be lost on the way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hypercache_protocol import ErrorCode, Tier
from hypercache_protocol.actions import check_request
from hypercache_protocol.fields import MAX_URI_BYTES, Uri
from hypercache_protocol.messages import (
    AppendWrite,
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
    Locate,
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

from .config import what_is_wrong

_Reply = TypeVar("_Reply", bound=Reply)

_URIS: TypeAdapter[list[str]] = TypeAdapter(list[Uri])


class DaemonRefused(Exception):
    """The daemon answered that it did not carry out a request; `code` is its word for why, if it gave one.
    `replies` are all answers of the call in order, those of the requests that were carried out among them."""

    def __init__(self, action: str, reply: Reply, replies: Sequence[Reply] = ()) -> None:
        self.replies = tuple(replies) or (reply,)
        self.code: ErrorCode | None = reply.error_code if isinstance(reply, ErrorReply) else None
        odd = f"{action}: the daemon answered {reply.status}, which says nothing"
        super().__init__(reply.error_message if isinstance(reply, ErrorReply) else odd)


class Actions(ABC):
    """What can be asked of a daemon, one question at a time or many.

    Every method raises:
        ValueError: an argument is wrong; nothing was sent.
        DaemonUnavailable, LocalProtocolError: as `exchange`.
        DaemonRefused: the daemon's answer is an error.
    """

    @abstractmethod
    def exchange(self, requests: Iterable[Request], *, needs: frozenset[str] = frozenset()) -> list[Reply]:
        """One reply for each request, in order."""

    # -- about the daemon --------------------------------------------------------------------------------

    def ping(self) -> PongReply:
        """Which daemon answers, and what it can do; nothing of it from one of wire 1.0."""
        return self._answer(PongReply, Ping)

    def get_devices(self) -> tuple[DeviceInfo, ...]:
        """The devices of the pool."""
        return self._answer(DevicesReply, GetDevices).devices

    def get_status(self) -> dict[str, Any]:
        """Usage, limits and counters; the keys may change from release to release."""
        return dict(self._answer(StatusReply, GetStatus).model_extra or {})

    def record_telemetry(
        self,
        event_type: str,
        uri: str,
        object_size_bytes: int,
        duration_us: int,
        bandwidth_mbps: float,
        **measured: Any,
    ) -> None:
        """Hand the daemon one measurement; `measured` are further fields of `RecordTelemetry`."""
        fields = {
            "event_type": event_type,
            "uri": uri,
            "object_size_bytes": object_size_bytes,
            "duration_us": duration_us,
            "bandwidth_mbps": bandwidth_mbps,
        }
        self._answer(PongReply, RecordTelemetry, **fields, **measured)

    # -- reading -----------------------------------------------------------------------------------------

    def locate(
        self, uri: str, auto_ingest: bool = True, tier: Tier | str | None = None, pinned: bool = False
    ) -> HitReply | None:
        """Where the object lies, or None. Its `sync_status` may be STAGED: then nothing was ever committed.

        Args:
            auto_ingest: fetch it on a miss from the place that its uri names, into `tier`.
            pinned: pin what is found.
        """
        reply = self._answered(Locate, uri=uri, auto_ingest=auto_ingest, tier=tier, pinned=pinned)
        return reply if isinstance(reply, HitReply) else None

    def locate_many(self, uris: Iterable[str]) -> list[HitReply | None]:
        """Where each object lies, or None, in one exchange; nothing is fetched. `lookup` is quicker where no
        layouts are wanted."""
        replies = self._each(Locate, [{"uri": uri, "auto_ingest": False} for uri in _listed(uris)])
        return [reply if isinstance(reply, HitReply) else None for reply in replies]

    def ingest(self, uri: str, tier: Tier | str | None = None, pinned: bool = False) -> HitReply:
        """Where the object lies; where it was not here it was fetched from the place that its uri names."""
        return self._answer(HitReply, Ingest, uri=uri, tier=tier, pinned=pinned)

    def pin(self, uri: str, pinned: bool = True) -> None:
        """Have the object never evicted by policy, or let it be again."""
        self._answer(PongReply, Pin, uri=uri, pinned=pinned)

    def get_write_status(self, uri: str) -> WriteStatusReply:
        """How far the object is on its way to the backend."""
        return self._answer(WriteStatusReply, GetWriteStatus, uri=uri)

    # -- dropping ----------------------------------------------------------------------------------------

    def evict(self, uri: str) -> bool:
        """Delete one object from the cache; whether it was there."""
        return isinstance(self._answered(Evict, uri=uri), EvictedReply)

    def evict_many(self, uris: Iterable[str]) -> list[bool]:
        """Delete each object from the cache, in one exchange; whether it was there. One that the daemon
        refuses raises; the others are gone all the same, which the exception's `replies` tell."""
        return [
            isinstance(reply, EvictedReply)
            for reply in self._each(Evict, [{"uri": uri} for uri in _listed(uris)])
        ]

    def purge(self) -> None:
        """Delete every object from the cache."""
        self._answer(PurgedReply, Purge)

    # -- writing -----------------------------------------------------------------------------------------

    def stage_write(
        self,
        uri: str,
        size_bytes: int,
        tier: Tier | str | None = None,
        is_leader: bool = False,
        auto_flush_s3: bool = True,
        write_through: bool = False,
        pinned: bool = False,
    ) -> StagedReply:
        """Blocks for an object of `size_bytes`: write them where `chunk_layout` says, then commit with the
        `stage_id`."""
        return self._answer(
            StagedReply,
            StageWrite,
            uri=uri,
            size_bytes=size_bytes,
            tier=tier,
            is_leader=is_leader,
            auto_flush_s3=auto_flush_s3,
            write_through=write_through,
            pinned=pinned,
        )

    def append_write(
        self, uri: str, size_bytes: int, tier: Tier | str | None = None, stage_id: str | None = None
    ) -> StagedReply:
        """`size_bytes` more for a staged write; the layout has only the new chunks."""
        return self._answer(
            StagedReply, AppendWrite, uri=uri, size_bytes=size_bytes, tier=tier, stage_id=stage_id
        )

    def commit_write(
        self,
        uri: str,
        sha256: str | None = None,
        write_through: bool = False,
        *,
        local_only: bool | None = None,
        chunk_checksums: Sequence[int] | None = None,
        stage_id: str | None = None,
    ) -> CommittedReply:
        """Make the staged write the object.

        Args:
            chunk_checksums: the CRC-32 (zlib's) of each chunk, in layout order. Without them no connector
                and no KVStore will ever take the object for right; a daemon of wire 1.0 drops them.
        """
        checksums = None if chunk_checksums is None else tuple(chunk_checksums)
        return self._answer(
            CommittedReply,
            CommitWrite,
            uri=uri,
            sha256=sha256,
            write_through=write_through,
            local_only=local_only,
            chunk_checksums=checksums,
            stage_id=stage_id,
        )

    # -- asking ------------------------------------------------------------------------------------------

    def _answer(self, wanted: type[_Reply], action: type[Request], **fields: object) -> _Reply:
        reply = self._answered(action, **fields)
        if not isinstance(reply, wanted):
            raise DaemonRefused(action.action, reply)
        return reply

    def _answered(self, action: type[Request], **fields: object) -> Reply:
        return self._each(action, [fields])[0]

    def _each(self, action: type[Request], fields: Sequence[dict[str, object]]) -> list[Reply]:
        replies = self.exchange([_request(action, each) for each in fields])
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise DaemonRefused(action.action, reply, replies)
        return replies


def checked_requests(requests: Iterable[Request]) -> list[Request]:
    """All of them, each of which is one.

    Raises:
        TypeError: one is not.
    """
    if isinstance(requests, Request):  # which pydantic would give field by field
        raise TypeError("requests is a sequence of requests, not one request")
    listed = list(requests)  # a generator would have none left for a second attempt
    for request in listed:
        check_request(request)
    return listed


def checked_uris(uris: Iterable[str]) -> list[str]:
    """All of them, each of which is one by the wire's rules.

    Raises:
        TypeError, ValueError: one is not.
    """
    listed = _listed(uris)
    if not _are_plain(listed):
        try:
            _URIS.validate_python(listed)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            raise ValueError(what_is_wrong(first, "uris")) from None
    return listed


def _listed(uris: Iterable[str]) -> list[str]:
    if isinstance(uris, str):
        raise TypeError("uris is a sequence of uris, not one uri")
    return list(uris)


def _are_plain(uris: Sequence[str]) -> bool:
    """Whether a look at all of them together finds nothing to look at in each, which takes ten times as
    long."""
    try:
        together = "".join(uris)
    except TypeError:
        return False
    lengths = list(map(len, uris)) or [1]
    return together.isascii() and "\0" not in together and min(lengths) > 0 and max(lengths) <= MAX_URI_BYTES


def _request(action: type[Request], fields: dict[str, object]) -> Request:
    unknown = [name for name in fields if name not in action.model_fields]
    if unknown:
        raise ValueError(
            f"{action.action} has no field {unknown[0]!r}; it has {', '.join(action.model_fields)}"
        )
    try:
        return action.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise ValueError(what_is_wrong(first, action.action)) from None
