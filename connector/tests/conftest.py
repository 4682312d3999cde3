"""A scripted daemon over a real socket and real files, and a driver that does what LMCache does.

The scripted daemon answers like a real one until a test tells it what to do wrong.
"""

from __future__ import annotations

import itertools
import select
import shutil
import socket
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

from hypercache_connector import HyperCacheConnector
from hypercache_connector.completions import Completion
from hypercache_protocol import ConnectionClosed, ErrorCode, RequestReceived, Role, Session, SyncStatus, Tier
from hypercache_protocol.messages import (
    ChunkLocation,
    CommittedReply,
    CommitWrite,
    ErrorReply,
    Evict,
    EvictedReply,
    HitReply,
    Locate,
    MissReply,
    Ping,
    PongReply,
    Reply,
    Request,
    StagedReply,
    StageWrite,
)

DEADLINE_S = 30.0
FEATURES = ("chunk_checksums", "generation", "local_only", "stage_id", "sync_status")
BLOCK = 4096


@dataclass
class ScriptedDaemon:
    """A daemon whose answers a test can change.

    `change` maps a request and its reply to the reply that is given; `garble` maps a request and the bytes
    of its reply to the bytes that are sent, or to None to close the connection. `hold` answers nothing
    before so many requests wait on one connection.
    """

    folder: Path
    device_count: int = 2
    chunk_bytes: int = 4 << 20
    features: tuple[str, ...] | None = FEATURES
    change: Callable[[Request, Reply], Reply] = lambda request, reply: reply
    garble: Callable[[Request, bytes], bytes | None] = lambda request, data: data
    hold: int = 1
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
            session = Session(Role.DAEMON)
            waiting: list[RequestReceived] = []
            while self._read(connected, session, waiting):
                first = waiting[0].request if waiting else None
                if len(waiting) >= (1 if isinstance(first, Ping) else self.hold):
                    self.running.wait()
                    for event in waiting:
                        self._answer(connected, session, event)
                    waiting.clear()
        with self._lock:
            self._sockets.discard(connected)

    def _read(self, connected: socket.socket, session: Session, waiting: list[RequestReceived]) -> bool:
        session.receive_data(connected.recv(1 << 20))
        while isinstance(event := session.next_event(), (RequestReceived, ConnectionClosed)):
            if isinstance(event, ConnectionClosed):
                return False
            with self._lock:
                self.requests.append(event.request)
            waiting.append(event)
        return True

    def _answer(self, connected: socket.socket, session: Session, event: RequestReceived) -> None:
        with self._lock:
            reply = self.change(event.request, self._reply(event.request))
        data = self.garble(event.request, session.send_reply(event.request_id, reply))
        if data is None:
            raise OSError("the test wants the connection closed")
        connected.sendall(data)

    # -- what a daemon does ------------------------------------------------------------------------------

    def _reply(self, request: Request) -> Reply:
        match request:
            case Ping():
                return PongReply(
                    wire=(1,), daemon="scripted", instance_id=self.instance_id, features=self.features
                )
            case Locate():
                return self.objects.get(request.uri, MissReply())
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
