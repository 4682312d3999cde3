"""Submitting never waits, every id completes once, and after close nothing is touched."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from forking import numbered, run_forking

from hypercache_compat.waiting import wait_until
from hypercache_connector import HyperCacheConnector
from hypercache_connector import transfers as transfers_module
from hypercache_protocol.messages import Reply, Request

MIB = 1 << 20
DEADLINE_S = 30.0


class Gate:
    """Stands in front of os.preadv or os.pwritev and holds every transfer back until it opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.opened = threading.Event()
        self.waiting = 0
        self.passed = 0
        self._real = getattr(os, name)
        self._lock = threading.Lock()
        monkeypatch.setattr(os, name, self._transfer)

    def _transfer(self, descriptor: int, pieces: list[memoryview], offset: int) -> int:
        with self._lock:
            self.waiting += 1
        assert self.opened.wait(DEADLINE_S)
        moved = self._real(descriptor, pieces, offset)
        with self._lock:
            self.passed += 1
        return moved


def submit_all(connector: HyperCacheConnector) -> list[int]:
    return [
        connector.submit_batch_exists(["k"]),
        connector.submit_batch_get(["k"], [bytearray(1000)]),
        connector.submit_batch_set(["k"], [bytearray(1000)]),
        connector.submit_batch_delete(["k"]),
    ]


def outcomes_of(connector: HyperCacheConnector) -> list[tuple[int, bool]]:
    return [(completion.future_id, completion.ok) for completion in connector.drain_completions()]


# -- submitting ----------------------------------------------------------------------------------------------


def test_submitting_returns_at_once_with_a_frozen_daemon_and_every_id_completes(scripted, connect) -> None:
    driver = connect(scripted.socket_path, timeout_s=0.5, queue_limit=5)
    scripted.freeze()
    began = time.monotonic()
    ids = [each for _ in range(50) for each in submit_all(driver.connector)]
    assert time.monotonic() - began < 0.4
    assert len(set(ids)) == 200
    results = [driver.wait(each) for each in ids]
    assert not any(any(result.result_bools or []) for result in results)
    assert not any(result.ok for result in results if result.result_bools is None)
    reasons = {result.error for result in results}
    assert "queue_full: 1" in reasons
    assert reasons <= {"queue_full: 1", "daemon_late: 1", "breaker_open: 1"}


def test_submitting_without_any_daemon_never_raises(folder, connect) -> None:
    driver = connect(str(folder / "nobody"))
    assert driver.exists(["k", "l"]) == [False, False]
    assert driver.load(["k"], [bytearray(8)]) == [False]
    assert not driver.store(["k"], [bytearray(8)]).ok
    assert driver.delete(["k"]) == [False]
    assert driver.count("loads", "daemon_gone") == 1


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "text",
        7,
        memoryview(bytearray(8))[::2],
        memoryview(np.zeros(1, object)),  # to fill it would make bytes from outside this process's addresses
        ctypes.c_void_p(),
    ],
    ids=lambda bad: type(getattr(bad, "obj", bad)).__name__,
)
def test_a_bad_buffer_fails_its_key_alone(scripted, driver, bad: object) -> None:
    good = bytearray(b"12345678")
    assert not driver.store(["k", "l"], [good, bad]).ok
    assert driver.exists(["k", "l"]) == [True, False]
    back = bytearray(8)
    assert driver.load(["l", "k", "k"], [bytearray(8), bad, back]) == [False, False, True]
    assert back == good
    assert (driver.count("stores", "bad_buffer"), driver.count("loads", "bad_buffer")) == (1, 1)
    assert sum(driver.connector.status()["loads"].values()) == 3, "each key is counted, and once"


def test_of_two_keys_with_one_buffer_one_is_loaded_and_the_other_stays_as_it_is(scripted, driver) -> None:
    values = [b"1" * 5000, b"2" * 5000]
    assert driver.store(["k", "l"], values).ok
    back = bytearray(5000)
    assert driver.load(["k", "l"], [back, back]) == [True, False]
    assert back == values[0]
    assert driver.count("loads", "bad_buffer") == 1
    assert driver.exists(["k", "l"]) == [True, True]  # what overwrote the other was not taken for damage
    assert driver.load(["l"], [back]) == [True]


def test_a_read_only_buffer_can_be_stored_and_not_loaded(scripted, driver) -> None:
    assert driver.store(["k"], [b"12345678"]).ok
    assert driver.load(["k"], [b"\0" * 8]) == [False]


def test_fewer_buffers_than_keys_fail_the_batch_and_the_threads_live_on(scripted, driver) -> None:
    assert driver.load(["k", "l"], [bytearray(8)]) == [False, False]
    assert not driver.store(["k", "l"], [bytearray(8)]).ok
    assert driver.exists(["k"]) == [False]


def test_a_fault_nobody_foresaw_fails_its_batch_and_the_threads_live_on(
    scripted, driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(transfers_module, "crc32", broken)
        driver.store(["k"], [bytearray(10)])
        assert driver.load(["k", "l"], [bytearray(10), "no buffer"]) == [False, False]
    assert driver.connector.status()["loads"] == {"internal_error": 2}, "each key is counted, and once"
    assert driver.load(["k"], [bytearray(10)]) == [True]


# -- close ---------------------------------------------------------------------------------------------------


def test_close_fails_what_waits_and_what_runs_each_id_once(scripted, connect) -> None:
    driver = connect(scripted.socket_path, timeout_s=60.0)
    scripted.freeze()
    ids = [each for _ in range(10) for each in submit_all(driver.connector)]
    wait_until(lambda: len(scripted.requests) >= 4)  # one greeting each, that nobody answers
    began = time.monotonic()
    driver.connector.close()
    assert time.monotonic() - began < 5
    results = driver.connector.drain_completions()
    assert sorted(result.future_id for result in results) == sorted(ids)
    assert not any(any(result.result_bools or []) for result in results)
    assert driver.connector.drain_completions() == []
    assert driver.count("lookups", "closed") == driver.count("loads", "closed") == 10


def test_close_from_many_threads_at_once_and_again_is_one_close(scripted, connect) -> None:
    driver = connect(scripted.socket_path)
    driver.store(["k"], [bytearray(1000)])
    threads = [threading.Thread(target=driver.connector.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)
    driver.connector.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("hypercache")]
    assert left == []


def test_submitting_after_close_completes_as_failed(scripted, connect) -> None:
    connector = connect(scripted.socket_path).connector
    connector.close()
    ids = submit_all(connector)
    results = {result.future_id: result for result in connector.drain_completions()}
    assert sorted(results) == sorted(ids)
    assert {result.error for result in results.values()} == {"closed: 1"}


@pytest.mark.parametrize("chunks", [1, 100])
def test_no_buffer_is_written_after_close_returned(
    scripted, connect, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    driver = connect(scripted.socket_path, read_workers=3)
    scripted.chunk_bytes = 4096
    size = chunks * 4096
    data = bytearray(os.urandom(size))
    assert driver.store(["k"], [data]).ok
    gate = Gate(monkeypatch, "preadv")
    back = bytearray(size)
    driver.connector.submit_batch_get(["k"], [back])
    wait_until(lambda: gate.waiting == min(chunks, 4))
    closing = threading.Thread(target=driver.connector.close)
    closing.start()
    wait_until(driver.connector._engine.readers._closing.is_set)
    closing.join(0.2)
    assert closing.is_alive()  # it waits for what is on its way
    gate.opened.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    after = bytes(back)
    assert gate.waiting == gate.passed == min(chunks, 4)  # and nothing more was begun
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith("hypercache")])
    assert bytes(back) == after


def test_at_its_bound_close_gives_up_a_write_but_waits_for_a_read(
    scripted, connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writing = connect(scripted.socket_path, close_timeout_s=0.3)
    gate = Gate(monkeypatch, "pwritev")
    future_id = writing.connector.submit_batch_set(["k"], [bytearray(1000)])
    wait_until(lambda: gate.waiting == 1)
    began = time.monotonic()
    writing.connector.close()
    assert 0.3 <= time.monotonic() - began < 5
    assert [(each.future_id, each.ok) for each in writing.connector.drain_completions()] == [
        (future_id, False)
    ]
    assert "giving it up" in caplog.text
    gate.opened.set()
    wait_until(
        lambda: not [each for each in threading.enumerate() if each.name.startswith("hypercache-store")]
    )
    assert scripted.objects == {}  # what was given up is never committed

    monkeypatch.undo()
    reading = connect(scripted.socket_path, close_timeout_s=0.2)
    assert reading.store(["k"], [bytearray(1000)]).ok
    gate = Gate(monkeypatch, "preadv")
    reading.connector.submit_batch_get(["k"], [bytearray(1000)])
    wait_until(lambda: gate.waiting == 1)
    closing = threading.Thread(target=reading.connector.close)
    closing.start()
    wait_until(lambda: "waiting on" in caplog.text)
    assert closing.is_alive()
    gate.opened.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()


def test_close_while_a_store_runs_commits_nothing_half_written(
    scripted, connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = connect(scripted.socket_path, write_workers=2)
    scripted.chunk_bytes = 4096
    gate = Gate(monkeypatch, "pwritev")
    future_id = driver.connector.submit_batch_set(["k"], [bytearray(20 * 4096)])
    wait_until(lambda: gate.waiting == 3)
    closing = threading.Thread(target=driver.connector.close)
    closing.start()
    wait_until(driver.connector._engine.writers._closing.is_set)
    gate.opened.set()
    closing.join(DEADLINE_S)
    assert gate.passed == 3
    assert scripted.objects == {}
    assert [(each.future_id, each.ok) for each in driver.connector.drain_completions()] == [
        (future_id, False)
    ]


def test_what_a_load_reads_lets_writes_begin_that_wait_for_it(
    scripted, connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = connect(scripted.socket_path, write_share=0.5, write_workers=4)
    driver.connector._engine.gate._patience_s = 2 * DEADLINE_S  # nothing begins but by what was read
    scripted.chunk_bytes = 4096
    assert driver.store(["k"], [bytearray(3 * 4096)]).ok
    reading, writing = Gate(monkeypatch, "preadv"), Gate(monkeypatch, "pwritev")
    driver.connector.submit_batch_get(["k"], [bytearray(3 * 4096)])
    wait_until(lambda: reading.waiting == 3)
    driver.connector.submit_batch_set(["l"], [bytearray(4 * 4096)])
    wait_until(lambda: driver.connector._engine.gate.waiting == 3)
    wait_until(lambda: writing.waiting == 1)
    reading.opened.set()
    wait_until(lambda: writing.waiting == 3)  # one for each chunk read, with the one that was let in for none
    assert driver.connector._engine.gate.waiting == 1
    writing.opened.set()


def test_close_sends_away_writes_that_wait_for_loads(
    scripted, connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = connect(scripted.socket_path, write_workers=4)
    scripted.chunk_bytes = 4096
    assert driver.store(["k"], [bytearray(4096)]).ok
    reading, writing = Gate(monkeypatch, "preadv"), Gate(monkeypatch, "pwritev")
    driver.connector.submit_batch_get(["k"], [bytearray(4096)])
    wait_until(lambda: reading.waiting == 1)
    driver.connector.submit_batch_set(["l"], [bytearray(20 * 4096)])
    wait_until(lambda: driver.connector._engine.gate.waiting == 4)  # four threads and the caller, less one
    wait_until(lambda: writing.waiting == 1)
    wait_until(lambda: driver.connector.status()["transfers"].get("waited") == 4)
    closing = threading.Thread(target=driver.connector.close)
    closing.start()
    wait_until(lambda: driver.connector._engine.gate.waiting == 0)
    reading.opened.set()
    writing.opened.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert writing.waiting == writing.passed == 1
    assert list(scripted.objects) == [driver.connector._mapping.uri("k")]


def test_close_leaves_no_thread_and_no_descriptor(scripted, open_descriptors: Callable[[], int]) -> None:
    descriptors, threads = open_descriptors(), threading.active_count()
    for _ in range(3):
        connector = HyperCacheConnector(socket_path=scripted.socket_path, namespace="n", timeout_s=10.0)
        future_id = connector.submit_batch_set(["k", "l"], [bytearray(5000), bytearray(9 * MIB)])
        wait_until(lambda: any(each.future_id == future_id for each in connector.drain_completions()))  # noqa: B023
        connector.close()
    # The scripted daemon's ends of the connections close a moment later; so may those of an earlier test.
    wait_until(lambda: open_descriptors() <= descriptors and threading.active_count() <= threads)


def test_a_program_that_forgets_close_still_ends(scripted) -> None:
    program = (
        "import sys; from hypercache_connector import HyperCacheConnector as C;"
        "c = C(socket_path=sys.argv[1], namespace='n', timeout_s=60.0);"
        "c.submit_batch_set(['k'], [bytearray(1000)]); c.submit_batch_exists(['k'])"
    )
    scripted.freeze()
    subprocess.run([sys.executable, "-c", program, scripted.socket_path], check=True, timeout=DEADLINE_S)


def test_importing_needs_neither_lmcache_nor_torch_nor_trio() -> None:
    program = (
        "import sys; import hypercache_connector;"
        "sys.exit(', '.join({'lmcache', 'torch', 'trio', 'hypercache_daemon'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE_S)


def test_a_restarted_daemon_drops_what_was_cached_of_the_old_one(scripted, driver) -> None:
    devices = driver.connector._engine.devices
    driver.store(["k"], [bytearray(1000)])
    assert devices._kept
    scripted.stop()
    scripted.objects.clear()
    scripted.start()
    seen: list[int] = []

    def note(request: Request, reply: Reply) -> Reply:
        if request.action == "locate":
            seen.append(len(devices._kept))
        return reply

    scripted.change = note
    assert driver.exists(["k"]) == [False]
    assert seen == [0]


_FORKING = """
import os, select, sys
from hypercache_connector import HyperCacheConnector

connector = HyperCacheConnector(socket_path=sys.argv[1], namespace="n")
future_id = connector.submit_batch_set(["k"], [bytearray(1000)])
assert select.select([connector.event_fd()], [], [], 20)[0]
child = os.fork()
if child == 0:
    said = []
    for call in (
        lambda: connector.submit_batch_exists(["k"]),
        lambda: connector.submit_batch_get(["k"], [bytearray(1000)]),
        lambda: connector.submit_batch_set(["k"], [bytearray(1000)]),
        lambda: connector.submit_batch_delete(["k"]),
        connector.drain_completions,
        connector.status,
    ):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    connector.close()
    expected = f"this connector was made by process {os.getppid()}, and its threads are there: make one"
    os._exit(0 if len(said) == 6 and all(each.startswith(expected) for each in said) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert select.select([connector.event_fd()], [], [], 0)[0], "the child took the parent's signal"
assert [(each.future_id, each.ok) for each in connector.drain_completions()] == [(future_id, True)]
connector.close()
"""


@numbered
def test_a_forked_child_is_told_to_make_its_own_and_leaves_its_parents_alone(scripted, numbers: str) -> None:
    run_forking(_FORKING, scripted.socket_path, numbers)
