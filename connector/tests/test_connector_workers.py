"""Threads: queues that never wait, batches that leave nothing running, and an orderly end."""

import threading
import time
from types import SimpleNamespace

import pytest

from hypercache_connector.workers import ChunkWorkers, TaskQueue, join_all

DEADLINE_S = 20.0


def ended(threads: list[threading.Thread]) -> bool:
    return not join_all(threads, time.monotonic() + DEADLINE_S)


@pytest.fixture
def workers():
    made = ChunkWorkers("test", 4)
    yield made
    made.close()
    assert ended(made.threads)


def test_a_full_queue_refuses_at_once_and_a_closed_one_hands_back_what_waits() -> None:
    started, release = threading.Event(), threading.Event()
    done: list[int] = []

    def run(task: int) -> None:
        started.set()
        assert release.wait(DEADLINE_S)
        done.append(task)

    queue = TaskQueue("test", 1, limit=2, run=run)
    assert queue.offer(0)
    assert started.wait(DEADLINE_S)
    assert [queue.offer(1), queue.offer(2), queue.offer(3)] == [True, True, False]
    assert queue.waiting == 2
    assert queue.close() == [1, 2]
    assert not queue.offer(4)
    release.set()
    assert ended(queue.threads)
    assert done == [0]


def test_threads_carry_names_that_say_what_they_are_for() -> None:
    queue = TaskQueue("hypercache-load", 2, limit=1, run=lambda task: None)
    assert [thread.name for thread in queue.threads] == ["hypercache-load-0", "hypercache-load-1"]
    queue.close()
    assert ended(queue.threads)


def test_items_are_worked_on_side_by_side_and_results_keep_their_order(workers: ChunkWorkers) -> None:
    together = threading.Barrier(5)  # four threads and the caller

    def square(number: int) -> int:
        together.wait(DEADLINE_S)
        return number * number

    assert workers.map(square, [1, 2, 3, 4, 5], -1) == [1, 4, 9, 16, 25]


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_every_item_is_worked_on_once(workers: ChunkWorkers, count: int) -> None:
    seen: list[int] = []
    assert workers.map(lambda item: seen.append(item) or item, list(range(count)), -1) == list(range(count))
    assert sorted(seen) == list(range(count))


def test_an_exception_comes_out_only_when_all_items_are_through(workers: ChunkWorkers) -> None:
    finished: list[int] = []

    def work(item: int) -> int:
        if item == 0:
            raise RuntimeError("the first")
        finished.append(item)
        return item

    with pytest.raises(RuntimeError, match="the first"):
        workers.map(work, list(range(50)), -1)
    assert sorted(finished) == list(range(1, 50))


def test_close_skips_what_has_not_begun_and_waits_for_what_has() -> None:
    workers = ChunkWorkers("test", 2)
    begun, release = threading.Semaphore(0), threading.Event()
    finished: list[int] = []
    results: list[int] = []

    def work(item: int) -> int:
        begun.release()
        assert release.wait(DEADLINE_S)
        finished.append(item)
        return item

    caller = threading.Thread(target=lambda: results.extend(workers.map(work, list(range(10)), -1)))
    caller.start()
    for _ in range(3):
        assert begun.acquire(timeout=DEADLINE_S)
    workers.close()
    release.set()
    assert ended([caller, *workers.threads])
    assert sorted(finished) == [0, 1, 2]
    assert results == [0, 1, 2, *[-1] * 7]
    assert workers.map(work, [1], -1) == [-1]


class Interrupted(BaseException):
    """What Ctrl-C is to a test."""


def test_what_interrupts_a_caller_comes_out_only_when_no_thread_is_at_work(
    workers: ChunkWorkers,
) -> None:
    begun, release = threading.Semaphore(0), threading.Event()
    finished: list[int] = []
    caller = threading.current_thread()

    def work(item: int) -> None:
        if threading.current_thread() is caller:
            for _ in workers.threads:
                assert begun.acquire(timeout=DEADLINE_S)
            threading.Timer(0.05, release.set).start()
            raise Interrupted
        begun.release()
        assert release.wait(DEADLINE_S)
        finished.append(item)

    with pytest.raises(Interrupted):
        workers.map(work, list(range(100)), None)
    assert len(finished) == len(workers.threads), "those that had begun, and none after it"
    assert workers.map(str, [1, 2, 3], "") == ["1", "2", "3"], "the threads are free again"


def test_threads_that_began_before_an_interruption_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, begun = threading.Thread.start, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        begin(thread)
        begun.append(thread)
        if len(begun) == 2:
            raise Interrupted

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(Interrupted):
        ChunkWorkers("test", 3)
    assert len(begun) == 2
    assert ended(begun)


def test_a_close_that_was_interrupted_can_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise Interrupted

    workers = ChunkWorkers("test", 2)
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_batches", SimpleNamespace(put=interrupted, get=workers._batches.get))
        with pytest.raises(Interrupted):
            workers.close()
    workers.close()
    assert ended(workers.threads)
