"""Batches that come to their turn late: LMCache's locks have ended, and the memory is another chunk's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
from deadline_clock import DeadlineClock
from keyed_buffers import empty, payloads, uri
from lmcache_driver import DEADLINE_S, Driver

from hypercache_connector.runs import RUN_BYTES

LMCACHES_READ_TTL_S = 300
SIZE = 4096


class Device:
    """Lets no chunk through until it is opened."""

    def __init__(self, move: Callable[[int, list[memoryview], int], int]) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._move = move

    def __call__(self, descriptor: int, pieces: list[memoryview], offset: int) -> int:
        self.reached.set()
        assert self.opened.wait(DEADLINE_S)
        return self._move(descriptor, pieces, offset)


@pytest.fixture
def busy(
    request: pytest.FixtureRequest, scripted, connect, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Driver, Device]]:
    """A connector whose one thread for stores or loads is at work on a device that waits."""
    driver = connect(scripted.socket_path, store_threads=1, load_threads=1)
    if request.param == "preadv":
        assert driver.store(["first", "second"], payloads([SIZE, SIZE])).ok
    device = Device(getattr(os, request.param))
    monkeypatch.setattr(os, request.param, device)
    submit = {"preadv": driver.connector.submit_batch_get, "pwritev": driver.connector.submit_batch_set}
    submit[request.param](["first"], empty([SIZE]))
    assert device.reached.wait(DEADLINE_S)
    yield driver, device
    device.opened.set()


@pytest.mark.parametrize("busy", ["pwritev"], indirect=True)
def test_a_store_that_waited_until_its_memory_is_another_chunk_s_stores_nothing(
    scripted, clock: DeadlineClock, busy: tuple[Driver, Device]
) -> None:
    driver, device = busy
    memory = bytearray(b"m" * SIZE)
    waiting = driver.connector.submit_batch_set(["second"], [memory])
    clock.now_s += LMCACHES_READ_TTL_S
    memory[:] = b"o" * SIZE  # another chunk, under another key
    device.opened.set()
    assert driver.wait(waiting).error == "transfer_late: 1"
    assert uri("second") not in scripted.objects
    assert driver.exists(["second"]) == [False]


@pytest.mark.parametrize("busy", ["preadv"], indirect=True)
def test_a_load_that_waited_until_its_memory_is_another_chunk_s_writes_nothing_there(
    clock: DeadlineClock, busy: tuple[Driver, Device]
) -> None:
    driver, device = busy
    memory = bytearray(SIZE)
    waiting = driver.connector.submit_batch_get(["second"], [memory])
    clock.now_s += LMCACHES_READ_TTL_S
    memory[:] = b"o" * SIZE
    device.opened.set()
    late = driver.wait(waiting)
    assert (late.result_bools, late.error) == ([False], "transfer_late: 1")
    assert memory == b"o" * SIZE


@pytest.mark.parametrize("move", ["pwritev", "preadv"])
def test_a_batch_that_was_begun_in_time_begins_no_chunk_once_its_time_is_up(
    scripted, connect, clock: DeadlineClock, move: str
) -> None:
    driver = connect(scripted.socket_path, transfer_timeout_s=3600, read_workers=1, write_workers=1)
    scripted.chunk_bytes = RUN_BYTES  # so that each moves alone
    memory = empty([8 * RUN_BYTES])
    if move == "preadv":
        assert driver.store(["k"], payloads([8 * RUN_BYTES])).ok
    moved = clock.slow_down(move, LMCACHES_READ_TTL_S)
    submit = driver.connector.submit_batch_get if move == "preadv" else driver.connector.submit_batch_set
    assert driver.wait(submit(["k"], memory)).error == "transfer_late: 1"
    assert len(moved) <= 2  # its one thread, and the one that waits for it
