"""Clients that write, read and evict at random, and remember what they were told."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from daemon_harness import CHUNK, pattern
from forked_daemons import BlockingClient, ForkedDaemon, Gone, Message

from hypercache_compat.raw_wire import write_layout

CLIENTS = 4
URIS_OF_EACH = 6
SIZES = (1, 5000, 1 << 18)
LARGE_BYTES = CHUNK + 5
"""Two chunks. Only one uri of each client may be so large, so that nothing has to leave for space."""
TIERS = ("nvme", "ram")
WITHOUT_DEVICE_S = 0.2
"""What a client waits that could not write, so that its staged writes don't fill the pool."""
REFUSALS = ("UNAVAILABLE", "STALE_STAGE")
"""What a daemon may answer that cannot write, or that stood still until a staged write expired."""


@dataclass(frozen=True)
class Content:
    """What a uri holds; `flushed`: it goes to the backend."""

    data: bytes
    flushed: bool


@dataclass
class Ledger:
    """What one client was told. A uri is its alone, so it knows what each of them may hold."""

    number: int
    objects: dict[str, Content] = field(default_factory=dict)
    uncertain: dict[str, list[Content | None]] = field(default_factory=dict)
    may_miss: bool = False
    """Whether a miss says nothing now, since the daemon is without one of its devices."""
    acknowledged: int = 0
    refused: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def uris(self) -> list[str]:
        return [f"hypercache://{self.number}/{each}" for each in range(URIS_OF_EACH)]

    def may_be(self, uri: str) -> list[Content | None]:
        """The contents that the uri may have now; None is a miss."""
        return self.uncertain.get(uri, [self.objects.get(uri)])

    @contextmanager
    def unsure(self, uri: str, becomes: Content | None) -> Iterator[None]:
        """The uri has its old content or the new one until the daemon answers."""
        self.uncertain[uri] = [self.objects.get(uri), becomes]
        yield
        del self.uncertain[uri]

    def now(self, uri: str, content: Content | None) -> None:
        """The uri has this content for sure."""
        self.uncertain.pop(uri, None)
        self.objects.pop(uri, None)
        if content is not None:
            self.objects[uri] = content

    def judge(self, uri: str, found: bytes | None) -> None:
        """Count what was found where it is none of what it may be; go on with it."""
        if found is None and self.may_miss:
            return
        fitting = [each for each in self.may_be(uri) if (each.data if each else None) == found]
        if fitting:
            self.now(uri, fitting[-1])
            return
        (self.lost if found is None else self.wrong).append(uri)
        self.now(uri, None if found is None else Content(found, flushed=False))


def read_verified(client: BlockingClient, uri: str) -> bytes | None:
    """The object's bytes if each chunk has the CRC-32 that it was committed with; any doubt is a miss."""
    found = client.ask("locate", uri=uri, auto_ingest=False)
    if found["status"] != "HIT" or found["sync_status"] == "STAGED":
        return None
    parts = []
    for chunk in found["chunk_layout"]:
        data = _chunk(chunk)
        if chunk.get("checksum") != zlib.crc32(data):
            return None
        parts.append(data)
    return b"".join(parts)


def _chunk(chunk: Message) -> bytes:
    try:
        with Path(chunk["device"]).open("rb") as device:
            device.seek(chunk["offset"])
            return device.read(chunk["length"])
    except FileNotFoundError:  # the RAM file of an object that is gone, or a device that is
        return b""


@dataclass
class RandomClient:
    """Does one thing after the other, until it is told to stop or the daemon is gone."""

    client: BlockingClient
    ledger: Ledger
    chance: random.Random

    def step(self) -> None:
        uri = self.chance.choice(self.ledger.uris())
        action = self.chance.choices([self.store, self.read, self.evict], [6, 3, 1])[0]
        action(uri)

    def store(self, uri: str) -> None:
        sizes = (*SIZES, LARGE_BYTES) if uri.endswith("/0") else SIZES
        data = pattern(self.chance.randrange(1 << 30), self.chance.choice(sizes))
        content = Content(data, flushed=self.chance.random() < 0.5)
        staged = self.client.ask(
            "stage_write",
            uri=uri,
            size_bytes=len(data),
            tier=self.chance.choice(TIERS),
            auto_flush_s3=content.flushed,
        )
        if self._refused(staged):
            return
        try:
            write_layout(staged["chunk_layout"], data)
        except FileNotFoundError:  # the device is gone: what is staged there stays until it expires
            time.sleep(WITHOUT_DEVICE_S)
            return
        sums = [zlib.crc32(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK)]
        with self.ledger.unsure(uri, content):
            reply = self.client.ask(
                "commit_write", uri=uri, stage_id=staged["stage_id"], chunk_checksums=sums
            )
        if not self._refused(reply):
            self.ledger.now(uri, content)
            self.ledger.acknowledged += 1

    def read(self, uri: str) -> None:
        self.ledger.judge(uri, read_verified(self.client, uri))

    def evict(self, uri: str) -> None:
        with self.ledger.unsure(uri, None):
            reply = self.client.ask("evict", uri=uri)
        if not self._refused(reply):
            self.ledger.now(uri, None)

    def _refused(self, reply: Message) -> bool:
        """An error says that nothing was changed."""
        is_refused: bool = reply["status"] == "ERROR"
        assert not is_refused or reply["error_code"] in REFUSALS, reply
        self.ledger.refused += is_refused
        return is_refused


@contextmanager
def at_work(daemon: ForkedDaemon, ledgers: Sequence[Ledger], seed: float) -> Iterator[None]:
    """All clients work meanwhile, each in a thread of its own, until the end or until the daemon is gone."""
    stop = threading.Event()

    def work(ledger: Ledger) -> None:
        try:
            with daemon.connect() as client:
                worker = RandomClient(client, ledger, random.Random(f"{seed} {ledger.number}"))
                while not stop.is_set():
                    worker.step()
        except Gone:
            return

    with ThreadPoolExecutor(len(ledgers)) as threads:
        working = [threads.submit(work, ledger) for ledger in ledgers]
        try:
            yield
        finally:
            stop.set()
            for each in working:
                each.result()  # what a client met says more than what was waited for meanwhile
