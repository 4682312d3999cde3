"""A whole daemon in the test's own Trio run: real socket, real catalog, real device and RAM files.

The bytes on the socket are made and read here with nothing but `json`, so that the protocol package is no
witness for itself.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from hypercache_compat.raw_wire import read_layout, write_layout
from hypercache_daemon.access import Access
from hypercache_daemon.backend import Backend
from hypercache_daemon.config import Config
from hypercache_daemon.connection import DEFAULT_LIMITS, ConnectionLimits
from hypercache_daemon.daemon import Parts, serve
from hypercache_daemon.server import bind, remove_socket, socket_identity
from hypercache_daemon.startup import open_all

MIB = 1 << 20
CHUNK = 4 * MIB
DEADLINE_S = 30.0
Message = dict[str, Any]


class Client:
    """One raw connection; every read has a deadline."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = b""

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def end(self) -> None:
        """Say that nothing more will be sent."""
        await self.stream.send_eof()

    async def receive_line(self) -> bytes:
        """The next line without its newline; b"" where the daemon closed the connection."""
        with trio.fail_after(DEADLINE_S):
            while b"\n" not in self._buffer:
                try:
                    data = await self.stream.receive_some(65536)
                except trio.BrokenResourceError:
                    data = b""
                if not data:
                    assert not self._buffer, f"half a line: {self._buffer!r}"
                    return b""
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    async def receive(self) -> Message:
        line = await self.receive_line()
        assert line, "the daemon closed the connection instead of answering"
        reply: Message = json.loads(line)
        return reply

    async def ask(self, action: str, **fields: object) -> Message:
        await self.send(line(action, **fields))
        return await self.receive()

    async def refusal(self, action: str, **fields: object) -> tuple[str, str]:
        """The code and the sentence of an error reply."""
        reply = await self.ask(action, **fields)
        assert reply["status"] == "ERROR", reply
        assert set(reply) == {"status", "error_message", "error_code"}
        return reply["error_code"], reply["error_message"]

    async def stage(self, uri: str, data: bytes, **fields: object) -> Message:
        """Stage a write and put the bytes where the reply says."""
        staged = await self.ask("stage_write", uri=uri, size_bytes=len(data), **fields)
        assert staged["status"] == "WRITESTAGED", staged
        write_layout(staged["chunk_layout"], data)
        return staged

    async def store(self, uri: str, data: bytes, commit: Message | None = None, **fields: object) -> Message:
        """Stage, write and commit; by default local-only."""
        await self.stage(uri, data, **fields)
        choices = {"local_only": True} if commit is None else commit
        reply = await self.ask("commit_write", uri=uri, **choices)
        assert reply["status"] == "WRITECOMMITTED", reply
        return reply

    async def fetch(self, uri: str) -> bytes | None:
        """The bytes that locate finds without fetching; None on a miss."""
        found = await self.ask("locate", uri=uri, auto_ingest=False)
        return read_layout(found["chunk_layout"]) if found["status"] == "HIT" else None

    async def status(self) -> Message:
        """What get_status says; every pool's sum is checked on the way."""
        status = await self.ask("get_status")
        for pool in status["pools"].values():
            parts = ("free_bytes", "used_bytes", "staged_bytes", "quarantined_bytes")
            assert sum(pool[part] for part in parts) == pool["total_bytes"], pool
        return status

    async def aclose(self) -> None:
        await self.stream.aclose()


@dataclass
class Daemon:
    """A daemon that runs, and how to reach it and its clock."""

    config: Config
    parts: Parts
    stop: trio.Event
    ended: trio.Event
    clients: list[Client] = field(default_factory=list)
    ahead_s: float = 0.0

    def __post_init__(self) -> None:
        self.parts.store.clock = lambda: trio.current_time() + self.ahead_s

    async def connect(self) -> Client:
        client = Client(await trio.open_unix_socket(self.config.socket))
        self.clients.append(client)
        return client


def line(action: str, **fields: object) -> bytes:
    """One request as it goes over the wire."""
    return json.dumps({"action": action, **fields}).encode() + b"\n"


def pattern(number: int, size_bytes: int) -> bytes:
    """Bytes that differ from number to number and from page to page."""
    seed = number.to_bytes(4, "little")
    pages = range(-(-size_bytes // 4096))
    return b"".join((seed + page.to_bytes(4, "little")) * 512 for page in pages)[:size_bytes]


async def eventually(holds: Callable[[], Any], what: str = "the condition") -> None:
    """Wait until `holds()` or, where it is a coroutine function, its result is true."""
    with trio.move_on_after(DEADLINE_S):
        while True:
            result = holds()
            if await result if hasattr(result, "__await__") else result:
                return
            await trio.sleep(0.003)
    raise AssertionError(f"{what} did not come true in {DEADLINE_S} s")


def config_for(folder: Path, **settings: object) -> Config:
    """Two devices of 16 MiB net and a RAM tier of 16 MiB, unless `settings` say otherwise."""
    defaults: dict[str, object] = {
        "socket": folder / "s",
        "pool_dir": folder / "pool",
        "pool_size": 34 * MIB,
        "devices": 2,
        "ram_dir": folder / "ram",
        "ram_size": 16 * MIB,
        "quarantine_s": 0,
    }
    return Config.model_validate({**defaults, **settings})


@asynccontextmanager
async def running(
    folder: Path,
    *,
    own_backend: Backend | None = None,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    **settings: object,
) -> AsyncIterator[Daemon]:
    """A daemon on `folder` that answers; stopped in order afterwards, or at once where the body fails."""
    config = config_for(folder, **settings)
    access = Access(config.gid())
    sock = bind(config.socket, access)
    identity = socket_identity(config.socket)
    with ExitStack() as held:
        held.callback(remove_socket, config.socket, identity)
        held.callback(sock.close)
        opened = open_all(config, access, trio.current_time())
        held.callback(opened.close)
        async with trio.open_nursery() as nursery:
            stop = trio.Event()
            backend = own_backend or Backend(config.backend, config.ingest_prefix)
            ended = trio.Event()
            parts: Parts = await nursery.start(_serve, ended, config, opened, backend, sock, stop, limits)
            daemon = Daemon(config, parts, stop, ended)
            try:
                yield daemon
            finally:
                with trio.CancelScope(shield=True):
                    for client in daemon.clients:
                        await client.aclose()
            stop.set()


async def _serve(ended: trio.Event, *arguments: Any, task_status: trio.TaskStatus[Parts]) -> None:
    try:
        await serve(*arguments, task_status=task_status)
    finally:
        ended.set()


def sums_of(data: bytes) -> list[int]:
    """The CRC-32 of each chunk of an object of these bytes."""
    return [zlib.crc32(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK)]


async def cleared(daemon: Daemon) -> None:
    """What has to leave devices that failed or are drained has left them."""
    for index in range(len(daemon.parts.health.report())):
        await daemon.parts.health.clear(index)


@contextmanager
def no_checking(daemon: Daemon) -> Iterator[None]:
    """What is to be read back (for a sha256, or `verify_on_commit`) waits as long as this holds every place
    for it."""
    limiter = daemon.parts.store.hashing
    holders = [object() for _ in range(int(limiter.total_tokens))]
    for holder in holders:
        limiter.acquire_on_behalf_of_nowait(holder)
    try:
        yield
    finally:
        for holder in holders:
            limiter.release_on_behalf_of(holder)
