"""SIGKILL at every step that changes what survives: no acknowledged commit is lost, none is half done.

The daemon is a process of its own. Where a test says "every step", it counts the daemon's own calls into
SQLite and the kernel and kills it at the first, the second, and so on, until it comes through alive.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest
from daemon_harness import CHUNK, MIB, pattern
from forked_daemons import BlockingClient, ForkedDaemon, Forks, Gone, Message, checked_status, small_pool
from killed_daemon import KillAt

from hypercache_compat.raw_wire import read_layout, write_layout

Place = tuple[str, int, int]  # device, offset, length


@dataclass
class Ledger:
    """What one client was told, and what it does not know because the daemon died before it answered."""

    objects: dict[str, bytes] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    uncertain: dict[str, list[bytes | None]] = field(default_factory=dict)
    uncertain_pin: bool = False
    staged: dict[str, tuple[bytes, list[Place]]] = field(default_factory=dict)
    abandoned: list[Place] = field(default_factory=list)

    def may_be(self, uri: str) -> list[bytes | None]:
        """The contents that the uri may have now; None is a miss."""
        return self.uncertain.get(uri, [self.objects.get(uri)])

    def unfinished_places(self) -> list[Place]:
        """Where writers may still be writing."""
        return [place for _, places in self.staged.values() for place in places] + self.abandoned


@dataclass
class Writer:
    """Does one thing after the other and keeps the ledger; raises Gone when the daemon dies."""

    client: BlockingClient
    ledger: Ledger

    def stage(self, uri: str, data: bytes, **fields: object) -> None:
        reply = self.client.ask("stage_write", uri=uri, size_bytes=len(data), **fields)
        assert reply["status"] == "WRITESTAGED", reply
        self.ledger.staged[uri] = (data, places(reply))
        write_layout(reply["chunk_layout"], data)

    def append(self, uri: str, data: bytes) -> None:
        reply = self.client.ask("append_write", uri=uri, size_bytes=len(data))
        before, extents = self.ledger.staged[uri]
        self.ledger.staged[uri] = (before + data, extents + places(reply))
        write_layout(reply["chunk_layout"], data)

    def commit(self, uri: str, **fields: object) -> None:
        data, extents = self.ledger.staged.pop(uri)
        self.ledger.uncertain[uri] = [self.ledger.objects.get(uri), data]
        try:
            reply = self.client.ask("commit_write", uri=uri, **fields)
        except Gone:
            self.ledger.abandoned += extents
            raise
        assert reply["status"] == "WRITECOMMITTED", reply
        self.ledger.objects[uri] = data
        del self.ledger.uncertain[uri]

    def store(self, uri: str, data: bytes, **fields: object) -> None:
        self.stage(uri, data, **fields)
        self.commit(uri)

    def evict(self, uri: str) -> None:
        self.ledger.uncertain[uri] = [self.ledger.objects.get(uri), None]
        assert self.client.ask("evict", uri=uri)["status"] == "EVICTED"
        del self.ledger.uncertain[uri]
        self.ledger.objects.pop(uri, None)
        self.ledger.pinned.discard(uri)
        self.ledger.abandoned += self.ledger.staged.pop(uri, (b"", []))[1]

    def purge(self) -> None:
        self.ledger.uncertain |= {uri: [data, None] for uri, data in self.ledger.objects.items()}
        self.ledger.uncertain_pin = True
        assert self.client.ask("purge")["status"] == "PURGED"
        self.ledger.uncertain.clear()
        self.ledger.objects.clear()
        self.ledger.pinned.clear()
        self.ledger.uncertain_pin = False

    def pin(self, uri: str) -> None:
        self.ledger.uncertain_pin = True
        assert self.client.ask("pin", uri=uri, pinned=True)["status"] == "PONG"
        self.ledger.pinned.add(uri)
        self.ledger.uncertain_pin = False


def places(reply: Message) -> list[Place]:
    return [(chunk["device"], chunk["offset"], chunk["length"]) for chunk in reply["chunk_layout"]]


def workload(writer: Writer) -> None:
    """Every kind of change, on both tiers."""
    writer.store("a", pattern(1, 5000))
    writer.store("b", pattern(2, MIB), tier="ram", auto_flush_s3=False)
    writer.stage("c", pattern(3, 1920))
    writer.append("c", pattern(4, CHUNK + 1))
    writer.store("a", pattern(5, 2 * MIB))
    writer.store("d", pattern(6, CHUNK + 5))
    writer.pin("d")
    writer.evict("a")
    writer.store("a", pattern(7, 3 * MIB))
    writer.stage("e", pattern(8, 4096))
    writer.evict("e")
    writer.store("b", pattern(9, MIB))
    writer.commit("c")
    writer.stage("f", pattern(10, 100_000), tier="ram")
    writer.purge()
    writer.store("g", pattern(11, MIB))
    writer.stage("g", pattern(12, 8192))


def check_after(daemon: ForkedDaemon, ledger: Ledger) -> None:
    """The restarted daemon holds what the ledger says, and hands out nobody's blocks."""
    with daemon.connect() as client:
        status = checked_status(client)
        assert status["objects_by_state"]["STAGED"] == 0, "a staged write came back"
        owned: list[Place] = []
        pinned_bytes = 0
        for uri in sorted({*ledger.objects, *ledger.uncertain, *"abcdefg"}):
            found = client.ask("locate", uri=uri)
            data = read_layout(found["chunk_layout"]) if found["status"] == "HIT" else None
            assert data in ledger.may_be(uri), f"{uri} is none of what it may be"
            owned += places(found) if data is not None else []
            if uri in ledger.pinned and data is not None:
                pinned_bytes += sum(-(-chunk["length"] // 4096) * 4096 for chunk in found["chunk_layout"])
        assert ledger.uncertain_pin or status["pools"]["nvme"]["pinned_bytes"] == pinned_bytes
        for tier in ("nvme", "ram"):
            # What rests beyond its share of the pool becomes free with the first of these.
            while free_bytes := checked_status(client)["pools"][tier]["free_bytes"]:
                reply = client.ask("stage_write", uri="all the rest", size_bytes=free_bytes, tier=tier)
                assert reply["status"] == "WRITESTAGED", reply
                check_apart(places(reply), owned + ledger.unfinished_places())


def check_apart(new: Sequence[Place], taken: Sequence[Place]) -> None:
    ends = {(device, offset): offset + length for device, offset, length in taken}
    for device, offset, length in new:
        for (other, start), end in ends.items():
            assert device != other or offset + length <= start or end <= offset, "blocks with two owners"


# -- every step of every change ------------------------------------------------------------------------

COMMITS = {"calls": ("execute",), "caller": "__exit__"}
SWEEPS = {
    "before each transaction becomes durable": KillAt(0, event="c_call", **COMMITS),
    "after it did and before anybody knows": KillAt(0, event="c_return", **COMMITS),
    "amid a transaction": KillAt(0, event="c_return", calls=("executemany",), caller="_apply"),
}
STRIDES = {"amid a transaction": 5}  # SQLite takes back the whole transaction, so one place is like another


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_kill_at_any_step_of_any_change_loses_nothing_acknowledged(
    sweep: str, forks: Forks, short_dir: Path
) -> None:
    for after in count(1, STRIDES.get(sweep, 1)):
        folder = short_dir / str(after)
        folder.mkdir()
        killed, ledger = run_and_be_killed(forks, folder, replace(SWEEPS[sweep], after=after))
        again = forks.start(folder, small_pool(folder))
        check_after(again, ledger)
        again.kill()
        shutil.rmtree(folder)
        if not killed:
            break
    assert after > 20, "the sweep missed its steps"


def run_and_be_killed(forks: Forks, folder: Path, kill: KillAt) -> tuple[bool, Ledger]:
    ledger = Ledger()
    daemon = forks.start(folder, small_pool(folder), kill)
    try:
        with daemon.connect() as client:
            workload(Writer(client, ledger))
    except Gone:  # what a start writes before it answers is among the steps
        assert daemon.wait() == -9
        return True, ledger
    daemon.kill()
    return False, ledger


# -- every step of a start -----------------------------------------------------------------------------

STEPS = ("mkdir", "posix_fallocate", "pwrite", "fsync", "rename", "unlink", "fchmod", "executemany")


def test_a_kill_at_any_step_of_the_first_start_leaves_nothing_that_a_second_start_trips_over(
    forks: Forks, short_dir: Path
) -> None:
    for after in count(1):
        folder = short_dir / str(after)
        folder.mkdir()
        daemon = forks.start(folder, small_pool(folder), KillAt(after, thread="main", calls=STEPS))
        came_up = answers(daemon)
        daemon.kill()
        again = forks.start(folder, small_pool(folder))
        with again.connect() as client:
            Writer(client, Ledger()).store("a", pattern(after, 10_000))
            assert checked_status(client)["objects"] == 1
        again.kill()
        shutil.rmtree(folder)
        if came_up:
            break
    assert after > 25, "the sweep missed its steps"


def answers(daemon: ForkedDaemon) -> bool:
    try:
        daemon.connect().close()
    except Gone:
        return False
    return True


@pytest.mark.parametrize("first", [1, 2], ids=["odd steps", "even steps"])
def test_a_kill_at_any_step_of_a_format_leaves_the_old_pool_or_a_refusal_or_an_empty_pool(
    first: int, forks: Forks, short_dir: Path
) -> None:
    template = short_dir / "t"
    template.mkdir()
    ledger = Ledger()
    daemon = forks.start(template, small_pool(template))
    with daemon.connect() as client:
        Writer(client, ledger).store("a", pattern(1, CHUNK + 5))
    daemon.kill()
    outcomes = []
    folder = short_dir / "w"
    for after in count(first, 2):
        restored(template, folder)
        step = KillAt(after, thread="main", calls=STEPS)
        daemon = forks.start(folder, small_pool(folder, "--format"), step)
        came_up = answers(daemon)
        daemon.kill()
        outcomes.append(outcome(forks.start(folder, small_pool(folder)), ledger))
        if outcomes[-1] == "refused":
            daemon = forks.start(folder, small_pool(folder, "--format"))
            with daemon.connect() as client:
                assert checked_status(client)["objects"] == 0
            daemon.kill()
        if came_up:
            break
    assert outcomes[0] == "old"
    assert outcomes[-1] == "empty"
    assert after > 25, "the sweep missed its steps"


def restored(template: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder, ignore=shutil.ignore_patterns("s", "log"))


def outcome(daemon: ForkedDaemon, ledger: Ledger) -> str:
    """What a start without --format makes of what the kill left."""
    try:
        client = daemon.connect()
    except Gone:
        assert daemon.wait() == 2
        assert "--format" in daemon.log()
        return "refused"
    with client:
        found = client.ask("locate", uri="a")
        word = "empty" if found["status"] == "MISS" else "old"
        assert word == "empty" or read_layout(found["chunk_layout"]) == ledger.objects["a"]
        assert checked_status(client)["objects"] == (word == "old")
    daemon.kill()
    return word


# -- at random moments ---------------------------------------------------------------------------------


def test_kills_at_random_moments_of_many_writers_lose_nothing_and_give_no_wrong_byte(
    forks: Forks, short_dir: Path
) -> None:
    chance = random.Random(20)
    ledgers = [Ledger() for _ in range(4)]
    (short_dir / "backend").mkdir()
    more = ("--stage-expiry-s", "0.2", "--quarantine-s", "0.05", "--backend", str(short_dir / "backend"))
    commits = 0
    for _ in range(4):  # `make faults` goes on for longer
        daemon = forks.start(short_dir, small_pool(short_dir, *more))
        daemon.connect().close()
        writers = [
            threading.Thread(target=write_at_random, args=(daemon, number, ledger, chance.random()))
            for number, ledger in enumerate(ledgers)
        ]
        for thread in writers:
            thread.start()
        wait_until(lambda: sum(len(ledger.objects) for ledger in ledgers) > 0, chance.uniform(0.05, 0.4))
        daemon.kill()
        for thread in writers:
            thread.join()
        again = forks.start(short_dir, small_pool(short_dir, *more))
        with again.connect() as client:
            commits += sum(check_contents(client, ledger) for ledger in ledgers)
            assert checked_status(client)["objects_by_state"]["STAGED"] == 0
        again.kill()
    assert commits > 16


def wait_until(holds: Callable[[], bool], at_least_s: float) -> None:
    """Both: the condition, and a random moment after the start."""
    started = time.monotonic()
    while time.monotonic() < started + at_least_s or not holds():
        assert time.monotonic() < started + 30
        time.sleep(0.001)


def write_at_random(daemon: ForkedDaemon, number: int, ledger: Ledger, seed: float) -> None:
    chance = random.Random(seed)
    try:
        with daemon.connect() as client:
            writer = Writer(client, ledger)
            while True:
                uri = f"hypercache://{number}/{chance.randrange(4)}"
                data = pattern(chance.randrange(1 << 30), chance.choice([1, 5000, MIB]))
                writer.stage(uri, data, tier=chance.choice(["nvme", "ram"]))
                writer.commit(uri)
    except Gone:
        ledger.staged.clear()


def check_contents(client: BlockingClient, ledger: Ledger) -> int:
    """Each uri has the last content it was told of, or the one it was not told of any more. Settles which."""
    for uri in {*ledger.objects, *ledger.uncertain}:
        found = client.ask("locate", uri=uri)
        data = read_layout(found["chunk_layout"]) if found["status"] != "MISS" else None
        assert data in ledger.may_be(uri), uri
        if data is not None:
            ledger.objects[uri] = data
    ledger.uncertain.clear()
    return len(ledger.objects)
