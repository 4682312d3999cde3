"""The connector against the real daemon: whatever happens to it, right bytes or a miss, and it heals."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, running_daemon
from hypercache_compat.loop_devices import can_make_loop_devices, loop_devices
from hypercache_compat.waiting import wait_until
from hypercache_connector import Client
from hypercache_connector.keys import UriMapping
from hypercache_protocol import SyncStatus, WireVersion
from hypercache_protocol.batches import EvictMany
from hypercache_protocol.messages import (
    AppendWrite,
    CommitWrite,
    Evict,
    GetWriteStatus,
    Locate,
    Pin,
    StageWrite,
    WriteStatusReply,
)
from hypercache_protocol.versions import RELEASED

MIB = 1 << 20
DEADLINE_S = 30.0
SIZES = [1, 4096, 70_001, 4 * MIB + 1, 9 * MIB]


def payload(name: str, size: int) -> bytes:
    """Bytes that say whose they are."""
    unit = f"{name}:{size};".encode()
    return (unit * (size // len(unit) + 1))[:size]


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon() as process:
        yield process


def check_load(driver: Any, keys: list[str], sizes: list[int]) -> list[bool]:
    """Load, and let no wrong byte pass. Returns what was loaded."""
    back = [bytearray(size) for size in sizes]
    loaded = driver.load(keys, back)
    for key, size, ok, data in zip(keys, sizes, loaded, back, strict=True):
        assert not ok or data == payload(key, size)
    return loaded


def store_all(driver: Any, keys: list[str], sizes: list[int]) -> bool:
    return bool(driver.store(keys, [payload(key, size) for key, size in zip(keys, sizes, strict=True)]).ok)


KEYS = [f"org/m@0@0@{number}" for number in range(len(SIZES))]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_every_number_of_devices_and_every_mode_gives_the_bytes_back(
    tmp_path: Path, connect, count: int, mode: str
) -> None:
    options = DaemonOptions(pool_size="256MiB", pool_devices=count)
    with running_daemon(options) as daemon:
        driver = connect(daemon.socket_path, direct_io=mode, timeout_s=20.0)
        assert store_all(driver, KEYS, SIZES)
        assert driver.exists(KEYS) == [True] * len(KEYS)
        assert check_load(driver, KEYS, SIZES) == [True] * len(KEYS)
        status = driver.connector.status()
        refused = bool(status["devices_refusing_direct_io"])  # some file systems do, and that is shown
        direct = mode == "on" and not refused
        assert {"direct", "bounced"}.isdisjoint(status["transfers"]) != direct
        assert ("buffered" in status["transfers"]) != direct


@pytest.fixture
def block_devices(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """Two loop devices where this user may make them, else two files: the daemon takes either."""
    if can_make_loop_devices():
        with loop_devices(tmp_path, 2, 256) as devices:
            yield devices
        return
    files = [tmp_path / f"device-{number}" for number in range(2)]
    for file in files:
        with file.open("xb") as opened:
            opened.truncate(256 * MIB)
    yield tuple(str(file) for file in files)


def test_given_devices_are_used_directly_where_they_are_block_devices(
    block_devices: tuple[str, ...], connect
) -> None:
    with running_daemon(DaemonOptions(devices=block_devices)) as daemon:
        driver = connect(daemon.socket_path, timeout_s=20.0)
        assert store_all(driver, KEYS, SIZES)
        assert check_load(driver, KEYS, SIZES) == [True] * len(KEYS)
        kinds = {"direct", "bounced"} if Path(block_devices[0]).is_block_device() else {"buffered"}
        assert set(driver.connector.status()["transfers"]) <= kinds
        assert driver.connector.status()["devices_refusing_direct_io"] == []


def test_what_is_stored_is_local_only(daemon: DaemonProcess, connect) -> None:
    driver = connect(daemon.socket_path, timeout_s=20.0)
    assert store_all(driver, ["k"], [1000])
    with Client(daemon.socket_path, 20.0) as client:
        (reply,) = client.exchange([GetWriteStatus(uri=UriMapping("test").uri("k"))])
    assert isinstance(reply, WriteStatusReply)
    assert reply.sync_status == "LOCAL_ONLY"


def test_what_another_client_only_staged_is_a_miss_until_it_is_stored(daemon: DaemonProcess, connect) -> None:
    driver = connect(daemon.socket_path, timeout_s=20.0)
    with Client(daemon.socket_path, 20.0) as client:
        client.exchange([StageWrite(uri=UriMapping("test").uri("k"), size_bytes=1000)])
    assert driver.exists(["k"]) == [False]
    assert check_load(driver, ["k"], [1000]) == [False]
    assert store_all(driver, ["k"], [1000])
    assert check_load(driver, ["k"], [1000]) == [True]


@pytest.mark.parametrize("crash", [False, True])
def test_objects_outlive_a_restart_and_the_connector_needs_none(
    daemon: DaemonProcess, connect, crash: bool
) -> None:
    driver = connect(daemon.socket_path, timeout_s=20.0)
    assert store_all(driver, KEYS, SIZES)
    first = driver.connector.status()["daemon"]["instance_id"]
    daemon.restart(crash=crash)
    assert check_load(driver, KEYS, SIZES) == [True] * len(KEYS)
    assert driver.connector.status()["daemon"]["instance_id"] != first
    assert driver.connector.status()["loads"] == {"ok": len(KEYS)}


def test_a_frozen_daemon_is_misses_and_then_works_again(daemon: DaemonProcess, connect) -> None:
    driver = connect(daemon.socket_path, timeout_s=1.0, probe_interval_s=0.05)
    assert store_all(driver, KEYS, SIZES)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in range(20):
            assert check_load(driver, KEYS, SIZES) == [False] * len(KEYS)
            assert driver.exists(KEYS) == [False] * len(KEYS)
            assert not store_all(driver, ["new"], [10])
        assert time.monotonic() - began < 10  # one deadline, not sixty
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    wait_until(lambda: not driver.connector.status()["daemon"]["breaker_open"])
    assert check_load(driver, KEYS, SIZES) == [True] * len(KEYS)


def test_crashes_under_load_give_right_bytes_or_misses_and_every_id_completes(
    daemon: DaemonProcess, connect
) -> None:
    driver = connect(daemon.socket_path, timeout_s=5.0, probe_interval_s=0.05)
    stop = threading.Event()
    done: list[int] = []

    def work(number: int) -> None:
        keys = [f"{number}-{each}" for each in range(len(SIZES))]
        while not stop.is_set():
            store_all(driver, keys, SIZES)
            check_load(driver, keys, SIZES)
            driver.exists(keys)
            driver.delete(keys[:1])
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        before = driver.count("loads", "ok")
        wait_until(lambda before=before: driver.count("loads", "ok") > before)
        daemon.restart(crash=True)
    stop.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(done) == [0, 1, 2]
    assert driver.connector.status()["pending"] == 0
    assert driver.count("loads", "checksum_mismatch") == 0
    assert store_all(driver, KEYS, SIZES)
    assert check_load(driver, KEYS, SIZES) == [True] * len(KEYS)


def test_a_full_pool_evicts_for_new_objects_and_what_is_loaded_is_right(connect) -> None:
    with running_daemon(DaemonOptions(pool_size="128MiB", pool_devices=2)) as daemon:
        driver = connect(daemon.socket_path, timeout_s=20.0)
        keys = [f"k{number}" for number in range(60)]
        for key in keys:
            store_all(driver, [key], [4 * MIB])
        loaded = check_load(driver, keys, [4 * MIB] * len(keys))
        assert 1 <= sum(loaded) < 60
        assert loaded == driver.exists(keys)


class HoldingRelay:
    """Stands between a daemon and clients, one after the other, and passes nothing on before so many requests
    have come."""

    def __init__(self, path: str, target: str) -> None:
        self.hold = 1
        """How many requests must have come, after the greeting."""
        self.bursts: list[int] = []
        """How many came together, on the last connection."""
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):  # no longer listening
            while True:
                accepted, _ = self._listener.accept()
                self.bursts.clear()
                self._serve(accepted)

    def _serve(self, accepted: socket.socket) -> None:
        with accepted, socket.socket(socket.AF_UNIX) as daemon:
            daemon.connect(self._target)
            while burst := self._burst(accepted):
                daemon.sendall(burst)
                self._pass_back(daemon, accepted, burst.count(b"\n"))

    def _burst(self, accepted: socket.socket) -> bytes:
        data = b""
        while data.count(b"\n") < (self.hold if self.bursts else 1):
            if not (piece := accepted.recv(1 << 20)):
                return b""
            data += piece
        self.bursts.append(data.count(b"\n"))
        return data

    def _pass_back(self, daemon: socket.socket, accepted: socket.socket, count: int) -> None:
        while count > 0:
            piece = daemon.recv(1 << 20)
            count -= piece.count(b"\n")
            accepted.sendall(piece)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE_S)
        self._listener.close()


def test_on_wire_1_a_lookup_of_64_keys_is_one_exchange_with_the_daemon(
    daemon: DaemonProcess, connect
) -> None:
    keys = [f"k{number}" for number in range(64)]
    assert store_all(connect(daemon.socket_path, timeout_s=20.0), keys, [100] * 64)
    path = str(daemon.folder / "relay")
    with closing(HoldingRelay(path, daemon.socket_path)) as relay:
        driver = connect(path, timeout_s=20.0, wire="1.1")
        relay.hold = 64
        assert driver.exists(keys) == [True] * 64
        assert check_load(driver, keys, [100] * 64) == [True] * 64
        assert relay.bursts == [1, 64, 64]  # the greeting, the lookup, the load's look
        driver.connector.close()


@pytest.mark.parametrize("count", [64, 512])
def test_on_wire_2_what_an_operation_costs_does_not_grow_with_its_keys(
    daemon: DaemonProcess, connect, relay_to, count: int
) -> None:
    relay = relay_to(daemon.socket_path)
    driver = connect(relay.path, timeout_s=20.0)
    keys, sizes = [f"k{number}" for number in range(count)], [100] * count
    relay.taken()  # what a start looks for
    assert driver.exists(keys) == [False] * count
    wait_until(lambda: driver.connector.status()["daemon"]["lookup_lane_open"])
    assert relay.taken() == 2, "the lookup, and once for the presence table, which no relay passes on"
    assert store_all(driver, keys, sizes)
    assert relay.taken() == 2, "the staging of what is not stored, and the commit"
    assert store_all(driver, keys, sizes)
    assert relay.taken() == 1, "nothing was staged, so there is nothing to commit"
    assert driver.exists(keys) == [True] * count
    assert relay.taken() == 1
    assert check_load(driver, keys, sizes) == [True] * count
    assert relay.taken() == 1
    assert driver.delete(keys) == [True] * count
    assert relay.taken() == 1
    driver.connector.close()


@pytest.mark.parametrize("wire", ["1.1", "2.0"])
def test_a_batch_of_10000_keys(daemon: DaemonProcess, connect, wire: str) -> None:
    driver = connect(daemon.socket_path, timeout_s=25.0, wire=wire)
    keys = [f"k{number}" for number in range(10_000)]
    assert driver.exists(keys) == [False] * 10_000
    assert store_all(driver, keys[::1000], [10] * 10)
    assert [number for number, found in enumerate(driver.exists(keys)) if found] == list(
        range(0, 10_000, 1000)
    )


_STORING = """
import os, signal, sys, threading
from hypercache_connector import HyperCacheConnector

writing = threading.Event()

def hang(descriptor, pieces, offset):
    writing.set()
    threading.Event().wait()

os.pwritev = hang
other = os.fork()
key = "over" if other else "terminated"
connector = HyperCacheConnector(socket_path=sys.argv[1], namespace="n")
connector.submit_batch_set([key], [bytearray(1000)])
assert writing.wait(30)
child = os.fork()
if child == 0:
    threading.Event().wait()
os.write(1, f"{key} {os.getpid()}\\n".encode())  # at once: both write to one pipe
if key == "terminated":
    threading.Event().wait()
assert os.waitpid(other, 0)[1] == signal.SIGTERM
"""


def test_a_process_that_goes_amid_a_store_leaves_its_staged_write_no_longer_than_that_lives() -> None:
    """One by SIGTERM, one by coming to its end; of each a forked child lives on, with all its descriptors."""
    options = DaemonOptions(pool_size="64MiB", pool_devices=1, extra=("--stage-expiry-s", "0.3"))
    words = [sys.executable, "-c", _STORING]
    with running_daemon(options) as daemon, ExitStack() as held:
        process = held.enter_context(
            subprocess.Popen(
                [*words, daemon.socket_path], stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        held.callback(os.killpg, process.pid, signal.SIGKILL)  # the children, and all where something fails
        assert process.stdout is not None
        storing = {}
        for _ in range(2):
            key, pid = process.stdout.readline().split()
            storing[key] = int(pid)
        os.kill(storing["terminated"], signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        for key in ("terminated", "over"):
            wait_until(partial(says, daemon, f"of hypercache://lmcache/v1/n/{key} expired"))
        with daemon.connect() as client:
            assert client.ask("get_status")["pools"]["nvme"]["staged_bytes"] == 0


def says(daemon: DaemonProcess, words: str) -> bool:
    return words in daemon.log_text()


@pytest.mark.parametrize("wire", RELEASED, ids=str)
def test_on_any_wire_a_request_is_carried_out_after_those_before_it(
    daemon: DaemonProcess, wire: WireVersion
) -> None:
    uri = "hypercache://in/order"
    stage, look = StageWrite(uri=uri, size_bytes=9), Locate(uri=uri, auto_ingest=False)
    more = [AppendWrite(uri=uri, size_bytes=size) for size in (1, 2, 3)]
    pins = [Pin(uri=uri, pinned=pinned) for pinned in (True, False)]
    state, evict = GetWriteStatus(uri=uri), Evict(uri=uri)
    with Client(daemon.socket_path, 20.0, version=wire) as client:
        replies = client.exchange(
            [stage, state, *more, CommitWrite(uri=uri), state, *pins, evict, look, evict, state]
        )
    words = [reply.status for reply in replies]
    staged = ["WRITESTAGED", "OK", *["WRITESTAGED"] * 3]
    assert words == [*staged, "WRITECOMMITTED", "OK", "PONG", "PONG", "EVICTED", "MISS", "MISS", "ERROR"]
    assert [reply.object_size for reply in replies[2:6]] == [10, 12, 15, 15]


@pytest.mark.parametrize("wire", RELEASED, ids=str)
def test_on_any_wire_what_is_named_twice_in_a_batch_is_evicted_once(
    daemon: DaemonProcess, wire: WireVersion
) -> None:
    uri, absent = "hypercache://twice", "hypercache://absent"
    with Client(daemon.socket_path, 20.0, version=wire) as client:
        client.exchange(
            [StageWrite(uri=uri, size_bytes=9), CommitWrite(uri=uri), StageWrite(uri=uri, size_bytes=8)]
        )
        answers = client.ask(EvictMany(suffixes=(uri, absent, uri)))
        assert [answer.status for answer in answers] == ["EVICTED", "MISS", "EVICTED"]
        assert client.get_write_status(uri).sync_status is SyncStatus.STAGED, "another's, for all it knows"
        assert client.evict(uri)
