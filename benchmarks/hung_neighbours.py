"""What a client waits while the disk or the backend of others hangs, on a real hypercached.

No slow call may delay another client's reply by more than 50 ms (p99), nor may Prometheus, which asks without
a pause here. The backend is a server that takes every request and never answers (that its driver is loaded
meanwhile is part of the figures); the disk is a file system with the pool and the catalog on it, which is
frozen (fsfreeze), so that only root can measure it. `daemon_requests.py` prints the table.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from hypercache_compat import disks
from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, daemon_folders

PROMISED_MS = 50.0
HUNG = 8  # requests of each kind that hang at once: twice what the daemon asks of a backend side by side
PAUSE_S = 0.001  # between two requests of the client that is watched
POOL_SIZE = "64MiB"
DISK_BYTES = 192 << 20
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Waits:
    """Milliseconds."""

    p50_ms: float
    p99_ms: float
    most_ms: float


class Neighbour:
    """A connection that asks one thing at a time."""

    def __init__(self, socket_path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(socket_path)

    def send(self, action: str, **fields: Any) -> None:
        self.socket.sendall(json.dumps({"action": action, **fields}).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            line += self.socket.recv(65536)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def ask(self, action: str, **fields: Any) -> dict[str, Any]:
        self.send(action, **fields)
        return self.receive()


def measure(samples: int) -> dict[str, Waits]:
    """The waits by what was asked and what hung meanwhile."""
    waits: dict[str, Waits] = {}
    with ExitStack() as held:
        folder, ram_folder = held.enter_context(daemon_folders())
        disk = held.enter_context(small_disk(folder))
        held.enter_context(silent_s3())
        port = free_port()
        options = replace(OPTIONS, extra=(*OPTIONS.extra, "--metrics", f"127.0.0.1:{port}"))
        daemon = DaemonProcess(folder, ram_folder, options)
        daemon.pool_folder, daemon.state_folder = disk / "pool", disk / "state"
        daemon.start()
        held.callback(daemon.stop)
        prepare(daemon)
        waits |= watched(daemon, samples, "nothing hangs")
        with scraping(port):
            waits |= watched(daemon, samples, "Prometheus asks without a pause")
        if os.path.ismount(disk):
            with hanging_disk(daemon, disk):
                waits |= watched(daemon, samples, "the disk hangs")
        with hanging_backend(daemon):
            waits |= watched(daemon, samples, "the backend hangs")
    return waits


OPTIONS = DaemonOptions(
    pool_size=POOL_SIZE,
    pool_devices=2,
    ram_size="0",
    backend="s3://bucket",
    extra=("--log-level", "error", "--shutdown-grace-s", "0"),
)


def prepare(daemon: DaemonProcess) -> None:
    """Store what the watched client will locate."""
    client = Neighbour(daemon.socket_path)
    commit(client, "s3-free://here", local_only=True)
    client.socket.close()


def commit(client: Neighbour, uri: str, **fields: Any) -> None:
    client.ask("stage_write", uri=uri, size_bytes=4096, auto_flush_s3=False)
    reply = client.ask("commit_write", uri=uri, **fields)
    assert reply["status"] == "WRITECOMMITTED", reply


def watched(daemon: DaemonProcess, samples: int, what: str) -> dict[str, Waits]:
    """Ask again and again, with a pause between, and note what each reply took."""
    client = Neighbour(daemon.socket_path)
    took: dict[str, list[float]] = {"ping": [], "locate": []}
    for _ in range(samples):
        for action, fields in (("ping", {}), ("locate", {"uri": "s3-free://here"})):
            begun = time.perf_counter()
            reply = client.ask(action, **fields)
            took[action].append((time.perf_counter() - begun) * 1e3)
            assert reply["status"] in ("PONG", "HIT"), reply
            time.sleep(PAUSE_S)
    client.socket.close()
    return {f"{action}, {what}": summed_up(each) for action, each in took.items()}


def summed_up(waits_ms: Sequence[float]) -> Waits:
    ordered = sorted(waits_ms)
    return Waits(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1])


# -- what hangs ----------------------------------------------------------------------------------------


def free_port() -> int:
    """A port of loopback that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def scraping(port: int) -> Iterator[None]:
    """The metrics are asked for again and again meanwhile."""
    ended = threading.Event()
    scrapes = 0

    def scrape() -> None:
        nonlocal scrapes
        while not ended.is_set():
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as response:
                assert b"hypercache_objects" in response.read()
            scrapes += 1

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert scrapes, "else the figures say nothing"


@contextmanager
def hanging_backend(daemon: DaemonProcess) -> Iterator[None]:
    """Others wait for an ingest and for a write-through meanwhile."""
    others = [Neighbour(daemon.socket_path) for _ in range(2 * HUNG)]
    for number, client in enumerate(others[:HUNG]):
        client.send("locate", uri=f"hypercache://absent/{number}")
    for number, client in enumerate(others[HUNG:]):
        uri = f"hypercache://through/{number}"
        client.ask("stage_write", uri=uri, size_bytes=4096)
        client.send("commit_write", uri=uri, write_through=True)
    yield
    assert_unanswered(others)


@contextmanager
def hanging_disk(daemon: DaemonProcess, disk: Path) -> Iterator[None]:
    """Others wait for a commit and for an eviction meanwhile, and get their answers afterwards."""
    others = [Neighbour(daemon.socket_path) for _ in range(2 * HUNG)]
    for number, client in enumerate(others[:HUNG]):
        commit(client, f"s3-free://evicted/{number}", local_only=True)
    for number, client in enumerate(others[HUNG:]):
        client.ask("stage_write", uri=f"s3-free://committed/{number}", size_bytes=4096)
    with disks.frozen(disk):
        for number, client in enumerate(others[:HUNG]):
            client.send("evict", uri=f"s3-free://evicted/{number}")
        for number, client in enumerate(others[HUNG:]):
            client.send("commit_write", uri=f"s3-free://committed/{number}", local_only=True)
        yield
        assert_unanswered(others)
    words = [client.receive()["status"] for client in others]
    assert words == ["EVICTED"] * HUNG + ["WRITECOMMITTED"] * HUNG, words


def assert_unanswered(clients: Sequence[Neighbour]) -> None:
    """Else nothing hung, and the figures say nothing."""
    answered, _, _ = select.select([client.socket for client in clients], [], [], 0)
    assert not answered, f"{len(answered)} of {len(clients)} requests did not hang"


@contextmanager
def silent_s3() -> Iterator[None]:
    """An S3 endpoint that the kernel connects to, and that nobody serves."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        settings = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{listener.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        before = dict(os.environ)
        os.environ.update(settings)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A folder; where root can, with a file system of its own in it, which can be frozen."""
    disk = folder / "disk"
    disk.mkdir()
    if disks.lacks_to_freeze():
        yield disk
        return
    with disks.on_a_file(disk, folder / "image", DISK_BYTES):
        yield disk


def table(waits: Mapping[str, Waits]) -> str:
    """Markdown."""
    rows = [
        f"| another client's request | p50 ms | p99 ms (promised: {PROMISED_MS:g}) | most ms |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, each in waits.items():
        rows.append(f"| {name} | {each.p50_ms:.2f} | {each.p99_ms:.2f} | {each.most_ms:.2f} |")
    if not any("disk" in name for name in waits):
        rows.append(f"\nThe disk was not made to hang: that takes {disks.lacks_to_freeze()}.")
    return "\n".join(rows)
