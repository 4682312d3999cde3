"""A daemon over a real socket and real files that answers like a real one, until a test tells it what to do
wrong."""

from __future__ import annotations

import itertools
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripted_batches import singles_of, together

from hypercache_protocol import (
    NEED_DATA,
    WIRE_1_1,
    ErrorCode,
    RequestReceived,
    RequestRejected,
    Role,
    Session,
    SyncStatus,
    Tier,
    WireVersion,
)
from hypercache_protocol.batches import BatchRequest, Hello, HelloLimits, HelloReply, StageMany
from hypercache_protocol.messages import (
    ChunkLocation,
    CommittedReply,
    CommitWrite,
    ErrorReply,
    Evict,
    EvictedReply,
    GetWriteStatus,
    HitReply,
    Locate,
    MissReply,
    Ping,
    PongReply,
    Reply,
    Request,
    StagedReply,
    StageWrite,
    WriteStatusReply,
)
from hypercache_protocol.negotiation import choose, spoken
from hypercache_protocol.versions import features_of

FEATURES = ("chunk_checksums", "generation", "local_only", "stage_id", "sync_status")
BLOCK = 4096
LIMITS = HelloLimits(max_request_bytes=1 << 20, max_reply_bytes=64 << 20, max_in_flight=64, max_batch=4096)


@dataclass
class ScriptedDaemon:
    """A daemon whose answers a test can change.

    `change` maps a request and its reply to the reply that is given; `garble` maps a request and the bytes
    of its reply to the bytes that are sent, or to None to close the connection. `hold` answers nothing
    before so many requests wait on one connection. `wire` is the newest that it speaks: by default it takes
    a hello for an unknown action, as any daemon before wire 2 does. Batches are answered uri by uri, each
    through `change`; `change_batch` then maps the batch and its reply.
    """

    folder: Path
    device_count: int = 2
    chunk_bytes: int = 4 << 20
    features: tuple[str, ...] | None = FEATURES
    change: Callable[[Request, Reply], Reply] = lambda request, reply: reply
    garble: Callable[[Request, bytes], bytes | None] = lambda request, data: data
    change_batch: Callable[[Request, Any], Reply] = lambda request, reply: reply
    hold: int = 1
    wire: WireVersion = WIRE_1_1
    limits: HelloLimits = LIMITS
    requests: list[Request] = field(default_factory=list)
    objects: dict[str, HitReply] = field(default_factory=dict)
    staged: dict[str, tuple[str, StagedReply]] = field(default_factory=dict)
    connections_accepted: int = 0

    def __post_init__(self) -> None:
        self.socket_path = str(self.folder / "s")
        self.devices = [str(self.folder / f"device-{number}") for number in range(self.device_count)]
        for path in self.devices:
            with Path(path).open("xb") as file:
                file.truncate(256 << 20)
        self.running = threading.Event()
        self.running.set()
        self._numbers = itertools.count(1)
        self._places = itertools.count()
        self._next_block = 0
        self._lock = threading.RLock()
        self._sockets: set[socket.socket] = set()
        self.start()

    # -- life --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, as a new instance."""
        self.instance_id = f"instance-{next(self._numbers)}"
        Path(self.socket_path).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.socket_path)
        self._listener.listen(64)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        """Close the socket and every connection; what was staged is gone."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_connections()
        self.staged.clear()

    def drop_connections(self) -> None:
        """Close every connection."""
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def freeze(self) -> None:
        """Answer nothing more, but stay connected and connectable."""
        self.running.clear()

    def thaw(self) -> None:
        """Answer again, also what waited."""
        self.running.set()

    def counted(self) -> Counter[str]:
        """How often each action was asked for so far."""
        with self._lock:
            return Counter(request.action for request in self.requests)

    # -- one connection ----------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = listener.accept()
                with self._lock:
                    self._sockets.add(accepted)
                    self.connections_accepted += 1
                threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        with suppress(OSError), connected:
            session = Session(Role.DAEMON, version=self.wire)
            waiting: list[RequestReceived | RequestRejected] = []
            while self._read(connected, session, waiting):
                first = waiting[0] if waiting else None
                greeting = not isinstance(first, RequestReceived) or isinstance(first.request, Ping | Hello)
                if len(waiting) >= (1 if greeting else self.hold):
                    self.running.wait()
                    for event in waiting:
                        self._answer(connected, session, event)
                    waiting.clear()
        with self._lock:
            self._sockets.discard(connected)

    def _read(
        self, connected: socket.socket, session: Session, waiting: list[RequestReceived | RequestRejected]
    ) -> bool:
        session.receive_data(connected.recv(1 << 20))
        while (event := session.next_event()) is not NEED_DATA:
            match event:
                case RequestReceived():
                    with self._lock:
                        self.requests.append(event.request)
                    waiting.append(event)
                case RequestRejected():
                    waiting.append(event)
                case _:
                    return False
        return True

    def _answer(
        self, connected: socket.socket, session: Session, event: RequestReceived | RequestRejected
    ) -> None:
        if isinstance(event, RequestRejected):
            connected.sendall(session.send_reply(event.request_id, event.reply))
            return
        with self._lock:
            reply = self._answered(event.request)
        data = self.garble(event.request, session.send_reply(event.request_id, reply))
        if data is None:
            raise OSError("the test wants the connection closed")
        connected.sendall(data)

    # -- what a daemon does ------------------------------------------------------------------------------

    def _answered(self, request: Request) -> Reply:
        if isinstance(request, BatchRequest):
            unless_stored = isinstance(request, StageMany) and request.unless_stored
            replies: list[Reply] = [
                self.objects[single.uri]  # what need not be staged
                if unless_stored and self._is_stored(single)
                else self.change(single, self._reply(single))
                for single in singles_of(request)
            ]
            return self.change_batch(request, together(request, replies))
        return self.change(request, self._reply(request))

    def _is_stored(self, wanted: StageWrite) -> bool:
        hit = self.objects.get(wanted.uri)
        if hit is None or hit.object_size != wanted.size_bytes or hit.sync_status is SyncStatus.STAGED:
            return False
        return all(chunk.checksum is not None for chunk in hit.chunk_layout)

    def _reply(self, request: Request) -> Reply:
        match request:
            case Ping():
                return PongReply(
                    wire=(1,), daemon="scripted", instance_id=self.instance_id, features=self.features
                )
            case Hello():
                return HelloReply(
                    version=str(choose(request.versions, self.wire)),
                    versions=spoken(self.wire),
                    features=(*(self.features or ()), *sorted(_framed_features(self.wire))),
                    limits=self.limits,
                    devices=(),
                    instance_id=self.instance_id,
                )
            case Locate():
                return self.objects.get(request.uri, MissReply())
            case GetWriteStatus():
                if request.uri in self.staged and request.uri not in self.objects:
                    return WriteStatusReply(sync_status=SyncStatus.STAGED, sync_progress_percent=0.0)
                return WriteStatusReply(sync_status=SyncStatus.COMMITTED, sync_progress_percent=100.0)
            case Evict():
                return EvictedReply() if self.objects.pop(request.uri, None) else MissReply()
            case StageWrite():
                return self._stage(request)
            case CommitWrite():
                return self._commit(request)
            case _:
                return ErrorReply(error_message=f"{request.action} is not scripted")

    def _stage(self, request: StageWrite) -> StagedReply:
        lengths = [
            min(self.chunk_bytes, request.size_bytes - start)
            for start in range(0, request.size_bytes, self.chunk_bytes)
        ]
        tier = request.tier or Tier.NVME
        stage_id = f"stage-{next(self._numbers)}"
        reply = StagedReply(
            object_size=request.size_bytes,
            chunk_layout=tuple(self._place(tier, length) for length in lengths),
            sync_status=SyncStatus.STAGED,
            stage_id=stage_id,
        )
        self.staged[request.uri] = (stage_id, reply)
        return reply

    def _place(self, tier: Tier, length: int) -> ChunkLocation:
        number = next(self._places)
        if tier is Tier.RAM:
            path = self.folder / f"ram-{number}"
            path.write_bytes(bytes(length))
            return ChunkLocation(device=str(path), offset=0, length=length, tier=tier)
        offset = self._next_block * BLOCK
        self._next_block += -(-length // BLOCK)
        return ChunkLocation(device=self.devices[number % len(self.devices)], offset=offset, length=length)

    def _commit(self, request: CommitWrite) -> Reply:
        stage_id, staged = self.staged.get(request.uri, (None, None))
        if staged is None or stage_id != request.stage_id:
            return ErrorReply(error_message="stale", error_code=ErrorCode.STALE_STAGE)
        del self.staged[request.uri]
        sums = request.chunk_checksums or (None,) * len(staged.chunk_layout)
        layout = tuple(
            chunk.model_copy(update={"checksum": checksum})
            for chunk, checksum in zip(staged.chunk_layout, sums, strict=True)
        )
        self.objects[request.uri] = HitReply(
            object_size=staged.object_size,
            chunk_layout=layout,
            sync_status=SyncStatus.LOCAL_ONLY if request.local_only else SyncStatus.COMMITTED,
            generation=next(self._numbers),
        )
        return CommittedReply(object_size=staged.object_size, sync_status=SyncStatus.LOCAL_ONLY)

    # -- damage ------------------------------------------------------------------------------------------

    def flip_byte(self, uri: str, position: int) -> None:
        """Invert one stored byte of an object, behind everybody's back."""
        for chunk in self.objects[uri].chunk_layout:
            if position < chunk.length:
                with Path(chunk.device).open("r+b") as file:
                    file.seek(chunk.offset + position)
                    old = file.read(1)
                    file.seek(chunk.offset + position)
                    file.write(bytes([old[0] ^ 0xFF]))
                return
            position -= chunk.length


def _framed_features(wire: WireVersion) -> frozenset[str]:
    return features_of(wire) - features_of(WIRE_1_1)
