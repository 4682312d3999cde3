"""From a request to its reply: one small function per action, in two tables.

`answer_now` is for what needs no waiting; `answer` is for the rest. Only here does a refusal become an
error reply.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from hypercache_protocol.batches import (
    CommitMany,
    EvictMany,
    GetPresenceTable,
    Hello,
    LocateMany,
    StageMany,
)
from hypercache_protocol.errors import ErrorCode, InvalidMessage
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
    IngestedReply,
    Locate,
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
from hypercache_protocol.states import SyncStatus

from . import batches
from .catalog import CatalogError
from .catalog_rows import Put
from .committing import Committer
from .core.objects import StagedWrite, StageOptions, StoredObject, packed_checksums
from .errors import DaemonError, sole
from .flusher import Flusher
from .identity import Identity
from .ingest import Ingester
from .orders import CommitOrder, StageOrder
from .presence_table import SharedTable
from .removal import Remover
from .rights import Rights
from .staging import Stager
from .store import Store
from .telemetry import Telemetry

log = logging.getLogger(__name__)

_FAULT = "%s failed by a fault of the daemon"


@dataclass(frozen=True)
class Caller:
    """Who asks: one connection, and what it may do."""

    connection_id: int
    rights: Rights


@dataclass
class Handlers:
    """Answers every request of every connection."""

    store: Store
    stager: Stager
    committer: Committer
    remover: Remover
    flusher: Flusher
    ingester: Ingester
    devices: Callable[[], tuple[DeviceInfo, ...]]
    identity: Identity
    report: Callable[[], dict[str, Any]]
    telemetry: Telemetry
    presence: SharedTable | None
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._pong = self.identity.pong()

    def answer_now(self, request: Request, caller: Caller) -> Reply | None:
        """The reply, where it can be given without waiting; else None, and nothing has happened."""
        handler = _AT_ONCE.get(type(request))
        if handler is None:
            return None
        try:
            refusal = caller.rights.refusal(request)
            reply = handler(self, request) if refusal is None else _error_reply(refusal)
        except Exception:  # the same boundary as in `answer`
            log.exception(_FAULT, request.action)
            reply = _fault_reply(request)
        if reply is not None:
            self._count(request, reply)
        return reply

    async def answer(self, request: Request, caller: Caller) -> Reply:
        """The reply to any request."""
        try:
            if (refusal := caller.rights.refusal(request)) is not None:
                raise refusal
            reply = await _WAITING[type(request)](self, request, caller)
        except (DaemonError, InvalidMessage) as error:
            reply = _error_reply(error)
        except (CatalogError, OSError) as error:
            log.error("%s failed: %s", request.action, error)
            reply = ErrorReply(error_message=f"{request.action}: {error}", error_code=ErrorCode.UNAVAILABLE)
        except Exception:  # the boundary: a fault of ours must not end other clients' connections
            log.exception(_FAULT, request.action)
            reply = _fault_reply(request)
        self._count(request, reply)
        return reply

    @property
    def enclosed(self) -> int:
        """The descriptor that goes with a PresenceTableReply."""
        assert self.presence is not None, "else there is no such reply"
        return self.presence.descriptor

    def _count(self, request: Request, reply: Reply) -> None:
        self.counters[f"{request.action}.{reply.status}"] += 1

    # -- reading ---------------------------------------------------------------------------------------

    def _locate_now(self, request: Locate) -> Reply | None:
        stored = self.store.cache.locate((request.uri,))[0]
        if stored is not None:
            return None if request.pinned and not stored.pinned else self._hit(stored)
        staged = self.store.cache.staged.newest(request.uri)
        if staged is not None:
            return self._staged_hit(staged)
        if request.auto_ingest and self.ingester.can_fetch(request.uri):
            return None
        return MissReply()

    async def _locate(self, request: Locate, _: Caller) -> Reply:
        stored = self.store.cache.get(request.uri)
        if stored is None and request.auto_ingest and self.ingester.can_fetch(request.uri):
            stored = await self.ingester.fetch(request.uri, request.tier)
        if stored is not None and request.pinned:
            stored = await self._set_pin(request.uri, True)
        return MissReply() if stored is None else self._hit(stored)

    async def _ingest(self, request: Ingest, _: Caller) -> Reply:
        here = self.store.cache.get(request.uri)
        stored = here or await self.ingester.fetch(request.uri, request.tier)
        if stored is not None and request.pinned:
            stored = await self._set_pin(request.uri, True)
        if stored is None:
            raise DaemonError(ErrorCode.NOT_FOUND, f"{request.uri} is not in the place that its name says")
        hit = self._hit(stored)
        return hit if here is not None else IngestedReply.trusted(**dict(hit))

    def _hit(self, stored: StoredObject) -> HitReply:
        return HitReply.trusted(
            object_size=stored.size_bytes,
            chunk_layout=self.store.layout(stored.tier, stored.extents, stored.checksums),
            sync_status=stored.announced,
            generation=stored.generation,
        )

    def _staged_hit(self, staged: StagedWrite) -> HitReply:
        return HitReply.trusted(
            object_size=staged.size_bytes,
            chunk_layout=self.store.layout(staged.tier, staged.extents),
            sync_status=SyncStatus.STAGED,
        )

    # -- pin, evict, purge -----------------------------------------------------------------------------

    async def _pin(self, request: Pin, _: Caller) -> Reply:
        if await self._set_pin(request.uri, request.pinned) is None:
            raise DaemonError(ErrorCode.NOT_FOUND, f"pin: {request.uri} is not in the cache")
        return PongReply()

    async def _set_pin(self, uri: str, pinned: bool) -> StoredObject | None:
        store = self.store
        async with store.locks.hold(uri):
            stored = store.cache.get(uri)
            if stored is None or stored.pinned == pinned:
                return stored
            await store.make_durable([Put(stored._replace(pinned=pinned))])
            # An upload may have changed the state meanwhile; the lock keeps the object itself in place.
            now = (store.cache.get(uri) or stored)._replace(pinned=pinned)
            store.cache.apply_change(now)
            return now

    async def _evict(self, request: Evict, _: Caller) -> Reply:
        (was_here,) = await self.remover.evict([request.uri])
        return EvictedReply() if was_here else MissReply()

    async def _purge(self, _: Purge, __: Caller) -> Reply:
        removed = await self.remover.purge()
        log.info("purged %d objects", removed)
        return PurgedReply()

    # -- writing ---------------------------------------------------------------------------------------

    async def _stage_write(self, request: StageWrite, caller: Caller) -> Reply:
        options = StageOptions(request.auto_flush_s3, request.write_through, request.pinned)
        order = StageOrder([request.uri], [request.size_bytes], options, request.tier, caller.connection_id)
        staged = sole(await self.stager.stage(order))
        return self._staged_reply(staged, 0)

    async def _append_write(self, request: AppendWrite, caller: Caller) -> Reply:
        staged, extents = await self.stager.append(request, caller.connection_id)
        return self._staged_reply(staged, staged.chunk_count - len(extents))

    def _staged_reply(self, staged: StagedWrite, first: int) -> StagedReply:
        return StagedReply.trusted(
            object_size=staged.size_bytes,
            chunk_layout=self.store.layout(staged.tier, staged.extents_from(first)),
            sync_status=SyncStatus.STAGED,
            stage_id=staged.stage_id,
        )

    async def _commit_write(self, request: CommitWrite, caller: Caller) -> Reply:
        order = CommitOrder(
            [request.uri],
            [request.stage_id],
            [packed_checksums(request.chunk_checksums)],
            bool(request.local_only),
            request.write_through,
            caller.connection_id,
            request.sha256,
        )
        stored = sole(await self.committer.commit(order))
        return CommittedReply.trusted(
            object_size=stored.size_bytes, sync_status=stored.announced, generation=stored.generation
        )

    def _get_write_status(self, request: GetWriteStatus) -> Reply:
        stored = self.store.cache.get(request.uri)
        if stored is not None:
            progress = self.flusher.progress_percent(stored)
            return WriteStatusReply(sync_status=stored.announced, sync_progress_percent=progress)
        if self.store.cache.staged.newest(request.uri) is not None:
            return WriteStatusReply(sync_status=SyncStatus.STAGED, sync_progress_percent=0.0)
        return ErrorReply(
            error_message=f"get_write_status: {request.uri} is not in the cache",
            error_code=ErrorCode.NOT_FOUND,
        )

    # -- batches ---------------------------------------------------------------------------------------

    def _locate_many(self, request: LocateMany) -> Reply:
        return batches.located(self.store, request)

    async def _stage_many(self, request: StageMany, caller: Caller) -> Reply:
        forbidden = caller.rights.refusals("stage_many", request.uris())
        settled = batches.settled_at_once(self.store, request, forbidden)
        while True:
            order = batches.stage_order(request, settled, caller.connection_id)
            staged = iter(await self.stager.stage(order))
            results = [result or next(staged) for result in settled]
            # What was stored may have been evicted to make room: then it is to be staged as well.
            settled = batches.still_stored(self.store, results)
            if all(settled):
                return batches.staged_reply(self.store, results, tells_stored=bool(request.unless_stored))

    async def _commit_many(self, request: CommitMany, caller: Caller) -> Reply:
        forbidden = caller.rights.refusals("commit_many", request.uris())
        order = batches.commit_order(request, forbidden, caller.connection_id)
        committed = iter(await self.committer.commit(order))
        return batches.committed_reply([refusal or next(committed) for refusal in forbidden])

    async def _evict_many(self, request: EvictMany, caller: Caller) -> Reply:
        forbidden = caller.rights.refusals("evict_many", request.uris())
        were_here = iter(await self.remover.evict(batches.not_refused(request.uris(), forbidden)))
        return batches.evicted_reply([refusal or next(were_here) for refusal in forbidden])

    # -- about the daemon ------------------------------------------------------------------------------

    def _ping(self, _: Ping) -> Reply:
        return self._pong

    def _hello(self, request: Hello) -> Reply:
        return self.identity.hello(request)

    def _get_presence_table(self, _: GetPresenceTable) -> Reply:
        if self.presence is None:
            return ErrorReply(
                error_message="this daemon has no presence table: ask with locate_many",
                error_code=ErrorCode.UNAVAILABLE,
            )
        return self.presence.reply()

    def _get_devices(self, _: GetDevices) -> Reply:
        return DevicesReply(devices=self.devices())

    def _get_status(self, _: GetStatus) -> Reply:
        return StatusReply.model_validate(self.report())

    def _record_telemetry(self, request: RecordTelemetry) -> Reply:
        self.telemetry.record(request)
        return PongReply()


def _error_reply(error: DaemonError | InvalidMessage) -> ErrorReply:
    return ErrorReply(error_message=error.message, error_code=error.code)


def _fault_reply(request: Request) -> ErrorReply:
    sentence = f"{_FAULT % request.action}; its log has the details"
    return ErrorReply(error_message=sentence, error_code=ErrorCode.INTERNAL)


_AT_ONCE: dict[type[Request], Callable[[Handlers, Any], Reply | None]] = {
    Ping: Handlers._ping,
    Hello: Handlers._hello,
    GetPresenceTable: Handlers._get_presence_table,
    GetDevices: Handlers._get_devices,
    Locate: Handlers._locate_now,
    LocateMany: Handlers._locate_many,
    GetStatus: Handlers._get_status,
    GetWriteStatus: Handlers._get_write_status,
    RecordTelemetry: Handlers._record_telemetry,
}

_WAITING: dict[type[Request], Callable[[Handlers, Any, Caller], Awaitable[Reply]]] = {
    Locate: Handlers._locate,
    Ingest: Handlers._ingest,
    Pin: Handlers._pin,
    Evict: Handlers._evict,
    Purge: Handlers._purge,
    StageWrite: Handlers._stage_write,
    AppendWrite: Handlers._append_write,
    CommitWrite: Handlers._commit_write,
    StageMany: Handlers._stage_many,
    CommitMany: Handlers._commit_many,
    EvictMany: Handlers._evict_many,
}
