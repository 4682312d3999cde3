"""Named threads and what feeds them.

Rules:
1. `offer` never waits: a full or closed queue says no at once.
2. `ChunkWorkers.map` ends only when no thread touches its items any more, also where an exception (Ctrl-C)
   interrupts it: who called it may give the memory to something else.
3. Closing starts nothing new: what waits is handed back or skipped, what runs is waited for.

All threads are daemon threads, so that a program which forgets `close` can still end.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def _start(
    threads: list[threading.Thread],
    name: str,
    thread_count: int,
    loop: Callable[[], None],
    close: Callable[[], object],
) -> None:
    """Add so many running threads to `threads`. Where there are not enough to be had, `close` ends those that
    are there, which would wait for ever."""
    try:
        for index in range(thread_count):
            thread = threading.Thread(target=loop, name=f"{name}-{index}", daemon=True)
            thread.start()
            threads.append(thread)
    except BaseException:  # Ctrl-C too
        close()
        raise


def join_all(threads: Iterable[threading.Thread], deadline: float) -> list[threading.Thread]:
    """Wait for threads to end, until `deadline` (monotonic). Returns those that still run; the calling
    thread is not waited for."""
    own = threading.current_thread()
    others = [thread for thread in threads if thread is not own]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in others if thread.is_alive()]


class TaskQueue(Generic[T]):
    """Threads that run tasks from a bounded queue, first come first served."""

    def __init__(self, name: str, thread_count: int, limit: int, run: Callable[[T], None]) -> None:
        """
        Args:
            limit: how many tasks may wait; those that run don't count.
            run: is called with each task and must not raise.
        """
        self._run = run
        self._limit = limit
        self._tasks: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.threads: list[threading.Thread] = []
        _start(self.threads, name, thread_count, self._loop, self.close)

    def offer(self, task: T) -> bool:
        """Whether the task was taken; it is not where the queue is full or closed."""
        with self._changed:
            if self._closed or len(self._tasks) >= self._limit:
                return False
            self._tasks.append(task)
            self._changed.notify()
            return True

    @property
    def waiting(self) -> int:
        """How many tasks have not begun."""
        return len(self._tasks)

    def close(self) -> list[T]:
        """Take no more tasks, let the threads end, and hand back what had not begun."""
        with self._changed:
            self._closed = True
            left = list(self._tasks)
            self._tasks.clear()
            self._changed.notify_all()
            return left

    def _next(self) -> T | None:
        with self._changed:
            while not self._tasks and not self._closed:
                self._changed.wait()
            return self._tasks.popleft() if self._tasks else None

    def _loop(self) -> None:
        while (task := self._next()) is not None:
            self._run(task)
            del task  # it holds a caller's buffers, and the next one may be long in coming


class _Batch(Generic[T, R]):
    """One call of `map`: whoever has time takes the next item."""

    def __init__(self, function: Callable[[T], R], items: Sequence[T], skipped: R) -> None:
        self._function = function
        self._items = items
        self.results: list[R] = [skipped] * len(items)
        self.error: Exception | None = None
        self._cursor = itertools.count()
        self._stopped = False
        self._changed = threading.Condition()
        self._helpers = 0

    def work(self, closing: threading.Event) -> None:
        """Take items until none is left. Once `closing` is set they are passed over, not worked on."""
        while not self._stopped and (index := next(self._cursor)) < len(self._items):
            if not closing.is_set():
                self._work_on(index)

    def help(self, closing: threading.Event) -> None:
        """The same in another thread than the caller's, who waits for it."""
        with self._changed:
            self._helpers += 1
        self.work(closing)
        with self._changed:
            self._helpers -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all items are through, when the caller found none left: whoever helps later finds none."""
        with self._changed:
            while self._helpers:
                self._changed.wait()

    def stop(self) -> None:
        """Begin nothing more and wait for what was begun, whatever else interrupts that."""
        self._stopped = True
        while self._helpers:
            with suppress(BaseException):
                self.wait()

    def _work_on(self, index: int) -> None:
        try:
            self.results[index] = self._function(self._items[index])
        except Exception as error:  # noqa: BLE001 - boundary of the thread: `map` raises it to its caller
            self.error = error


class ChunkWorkers:
    """Threads that move chunks: many for one batch, and all of them for every batch in turn."""

    def __init__(self, name: str, thread_count: int) -> None:
        self._batches: SimpleQueue[_Batch[object, object] | None] = SimpleQueue()
        self._closing = threading.Event()
        self.threads: list[threading.Thread] = []
        _start(self.threads, name, thread_count, self._loop, self.close)

    def map(self, function: Callable[[T], R], items: Sequence[T], skipped: R) -> list[R]:
        """The function's result for each item, begun in order and worked on side by side; `skipped` for an
        item that was not begun before `close`.

        The queue needs no bound of its own: each caller waits here, so it holds one batch per caller.
        An exception of the function is raised once all items are through.
        """
        batch = _Batch(function, items, skipped)
        if len(items) < 2:
            batch.work(self._closing)  # the calling thread is as good as any
        else:
            try:
                for _ in range(min(len(items), len(self.threads))):
                    self._batches.put(batch)  # type: ignore[arg-type]
                batch.work(self._closing)
                batch.wait()
            except BaseException:  # Ctrl-C too: the caller must not have its memory back before rule 2 holds
                batch.stop()
                raise
        if batch.error is not None:
            raise batch.error
        return batch.results

    def close(self) -> None:
        """Begin no more items and let the threads end; join `threads` to know that none is at work."""
        self._closing.set()
        self._batches.put(None)  # each thread hands it on: Ctrl-C may have kept one out of `threads`

    def _loop(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch.help(self._closing)
            del batch
        self._batches.put(None)
