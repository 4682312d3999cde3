"""A scripted daemon over a real socket and real files, and a driver that does what LMCache does.

The scripted daemon answers like a real one until a test tells it what to do wrong.
"""

from __future__ import annotations

import itertools
import select
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hypercache_compat.daemon_process import started_by
from hypercache_compat.forked import fork_daemon
from hypercache_connector import HyperCacheConnector
from hypercache_connector.completions import Completion
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
from hypercache_protocol.batches import (
    BatchRequest,
    CommitMany,
    CommittedMany,
    EvictedMany,
    EvictMany,
    Hello,
    HelloLimits,
    HelloReply,
    ItemError,
    LocatedMany,
    LocateMany,
    StagedMany,
    StageMany,
)
from hypercache_protocol.layout import STATUS_CODES, Layout, pack_layouts, packed, packed_bits
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
from hypercache_protocol.versions import LATEST, features_of

# The suites beside the tests are packages; test files are imported one by one.
sys.path.insert(0, str(Path(__file__).parents[1]))

DEADLINE_S = 30.0
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


class FrameRelay:
    """Stands between clients and a daemon of wire 2 and counts what clients ask for."""

    def __init__(self, path: str, target: str) -> None:
        self.path = path
        self.hellos = 0
        self.frame_bytes: list[int] = []
        """The length of each request's body so far."""
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> FrameRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(DEADLINE_S)
        self._listener.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def taken(self) -> int:
        """How many frames clients sent since this was last asked."""
        count = len(self.frame_bytes)
        self.frame_bytes.clear()
        return count

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(accepted,)))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as daemon:
            daemon.connect(self._target)
            unread = bytearray()
            greeted = False
            while True:
                ready, _, _ = select.select([client, daemon], [], [])
                if daemon in ready and not self._passed(daemon, client):
                    return
                if client in ready:
                    if not (data := self._passed(client, daemon)):
                        return
                    unread += data
                    greeted = greeted or self._took_hello(unread)
                    if greeted:
                        self._count(unread)

    def _passed(self, source: socket.socket, sink: socket.socket) -> bytes:
        try:
            data = source.recv(1 << 20)
            sink.sendall(data)
        except OSError:
            return b""
        return data

    def _took_hello(self, unread: bytearray) -> bool:
        line, newline, rest = bytes(unread).partition(b"\n")
        if newline:
            assert b'"hello"' in line
            self.hellos += 1
            unread[:] = rest
        return bool(newline)

    def _count(self, unread: bytearray) -> None:
        while len(unread) >= 4 and len(unread) >= 4 + (size := int.from_bytes(unread[:4], "big")):
            self.frame_bytes.append(size)
            del unread[: 4 + size]


def _framed_features(wire: WireVersion) -> frozenset[str]:
    return features_of(wire) - features_of(WIRE_1_1)


def singles_of(request: BatchRequest) -> list[Request]:
    """What the batch would have been on wire 1."""
    uris = request.uris()
    match request:
        case LocateMany():
            return [Locate(uri=uri, auto_ingest=False) for uri in uris]
        case EvictMany():
            return [Evict(uri=uri) for uri in uris]
        case StageMany():
            return [
                StageWrite(uri=uri, size_bytes=size, auto_flush_s3=request.auto_flush_s3, tier=request.tier)
                for uri, size in zip(uris, request.sizes, strict=True)
            ]
        case CommitMany():
            assert request.checksum_counts is not None
            assert request.checksums is not None
            counts = struct.unpack(f"<{len(uris)}I", request.checksum_counts)
            words = iter(struct.unpack(f"<{sum(counts)}I", request.checksums))
            return [
                CommitWrite(
                    uri=uri,
                    stage_id=stage_id,
                    local_only=request.local_only,
                    chunk_checksums=tuple(itertools.islice(words, count)),
                )
                for uri, stage_id, count in zip(uris, request.stage_ids, counts, strict=True)
            ]
        case _:
            raise AssertionError(request)


def together(request: BatchRequest, replies: Sequence[Any]) -> Reply:
    """The replies to the singles as one."""
    done = [reply for reply in replies if not isinstance(reply, ErrorReply | MissReply)]
    bits = packed_bits([not isinstance(reply, ErrorReply | MissReply) for reply in replies])
    errors = tuple(
        ItemError(index=index, error_message=reply.error_message, error_code=reply.error_code)
        for index, reply in enumerate(replies)
        if isinstance(reply, ErrorReply)
    )
    match request:
        case LocateMany():
            layouts = pack_layouts([layout_of(reply) for reply in done]) if request.layouts else None
            verifiable = packed_bits(
                [isinstance(reply, HitReply) and layout_of(reply).checksums is not None for reply in replies]
            )
            return LocatedMany(present=bits, verifiable=verifiable, layouts=layouts)
        case EvictMany():
            return EvictedMany(done=bits, errors=errors)
        case StageMany():
            staged = [reply for reply in replies if isinstance(reply, StagedReply)]
            return StagedMany(
                done=packed_bits([isinstance(reply, StagedReply) for reply in replies]),
                stage_ids=tuple(reply.stage_id for reply in staged),
                layouts=pack_layouts([layout_of(reply) for reply in staged]),
                errors=errors,
                stored=packed_bits([isinstance(reply, HitReply) for reply in replies])
                if request.unless_stored
                else None,
            )
        case _:
            return CommittedMany(
                done=bits,
                object_sizes=packed([reply.object_size for reply in done], "<u8"),
                generations=packed([reply.generation or 0 for reply in done], "<u8"),
                sync_statuses=bytes([STATUS_CODES[reply.sync_status] for reply in done]),
                errors=errors,
            )


def layout_of(reply: HitReply | StagedReply) -> Layout:
    """One reply's layout, to be packed."""
    chunks = reply.chunk_layout
    sums = [chunk.checksum for chunk in chunks if chunk.checksum is not None]
    return Layout(
        reply.object_size,
        (reply.generation or 0) if isinstance(reply, HitReply) else 0,
        reply.sync_status or SyncStatus.STAGED,
        chunks[0].tier if chunks else Tier.NVME,
        [chunk.device for chunk in chunks],
        [chunk.offset for chunk in chunks],
        [chunk.length for chunk in chunks],
        sums if len(sums) == len(chunks) and reply.sync_status is not SyncStatus.STAGED else None,
    )


class Driver:
    """Does with a connector what LMCache does, and waits for the results."""

    def __init__(self, connector: HyperCacheConnector) -> None:
        self.connector = connector
        self._results: dict[int, Completion] = {}
        self._draining = threading.Lock()

    def wait(self, future_id: int, deadline_s: float = DEADLINE_S) -> Completion:
        """The completion of `future_id`, which must come in time and once; for any number of threads."""
        deadline = time.monotonic() + deadline_s
        while future_id not in self._results:
            assert time.monotonic() < deadline, f"no completion of {future_id} within {deadline_s} s"
            # Another thread may drain this one's result, so nobody sleeps long.
            select.select([self.connector.event_fd()], [], [], 0.02)
            with self._draining:
                for completion in self.connector.drain_completions():
                    assert completion.future_id not in self._results
                    self._results[completion.future_id] = completion
        return self._results[future_id]

    def store(self, keys: Sequence[str], buffers: Sequence[Any]) -> Completion:
        return self.wait(self.connector.submit_batch_set(keys, buffers))

    def load(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[bool]:
        completion = self.wait(self.connector.submit_batch_get(keys, buffers))
        assert completion.result_bools is not None
        assert len(completion.result_bools) == len(keys)
        return completion.result_bools

    def exists(self, keys: Sequence[str]) -> list[bool]:
        completion = self.wait(self.connector.submit_batch_exists(keys))
        return completion.result_bools if completion.ok and completion.result_bools else [False] * len(keys)

    def delete(self, keys: Sequence[str]) -> list[bool] | None:
        return self.wait(self.connector.submit_batch_delete(keys)).result_bools

    def count(self, group: str, name: str) -> int:
        """A counter of the connector's status."""
        return int(self.connector.status().get(group, {}).get(name, 0))


Connect = Callable[..., Driver]


@pytest.fixture(scope="session", autouse=True)
def forked_daemons() -> Iterator[None]:
    """Daemons start with everything imported."""
    with started_by(fork_daemon):
        yield


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="hc", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def scripted(folder: Path) -> Iterator[ScriptedDaemon]:
    """A scripted daemon that behaves well until told otherwise."""
    daemon = ScriptedDaemon(folder)
    yield daemon
    daemon.thaw()
    daemon.stop()


@pytest.fixture
def scripted2(folder: Path) -> Iterator[ScriptedDaemon]:
    """A scripted daemon of wire 2 that behaves well until told otherwise."""
    daemon = ScriptedDaemon(folder, wire=LATEST)
    yield daemon
    daemon.thaw()
    daemon.stop()


@pytest.fixture
def relay_to(folder: Path) -> Iterator[Callable[[str], FrameRelay]]:
    """Puts relays before daemons; they end with the test."""
    with ExitStack() as stack:
        yield lambda target: stack.enter_context(FrameRelay(str(folder / "relay"), target))


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes drivers of connectors that are closed at the end."""
    with ExitStack() as stack:

        def make(socket_path: str, **parameters: Any) -> Driver:
            connector = HyperCacheConnector(
                **{"socket_path": socket_path, "namespace": "test", "timeout_s": 10.0} | parameters
            )
            stack.callback(connector.close)
            return Driver(connector)

        yield make


@pytest.fixture
def driver(scripted: ScriptedDaemon, connect: Connect) -> Driver:
    """A driver of a connector to the scripted daemon."""
    return connect(scripted.socket_path)


@pytest.fixture
def open_descriptors() -> Callable[[], int]:
    """Counts this process's open descriptors."""
    return lambda: sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def only_so_many_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[threading.Thread]]:
    """Lets so many more threads begin, which come in the list, and fails every one after them."""

    def limit(most: int) -> list[threading.Thread]:
        start, started = threading.Thread.start, list[threading.Thread]()

        def scarce(thread: threading.Thread) -> None:
            if len(started) == most:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", scarce)
        return started

    return limit
