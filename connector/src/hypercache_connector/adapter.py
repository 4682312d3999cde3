"""The class that LMCache's `native_plugin` adapter loads.

Rules (LMCache's side of each is in README.md):
1. `submit_*` only takes an id and enqueues: it never waits, and never raises for what the daemon does.
2. Every id completes exactly once: with what came of each key, or as failed where the queue was full, the
   connector closed, or something unforeseen happened.
3. A get always has one boolean per key. `ok` alone would count every key as loaded.
4. After `close` returned nothing touches a caller's buffer.
5. The descriptor that LMCache polls is an epoll of the eventfd and of the lookup lane's connection.
6. A forked child is refused: the threads are its parent's, and so are the signals on the descriptor.
7. No chunk of a batch begins once the batch's time is up, wherever it waited: LMCache's locks on its buffers
   end, and they may be other chunks'. What was stored from such memory would be taken for right ever after.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any

from typing_extensions import assert_never

from . import config as configuration
from .completions import Completion, Completions
from .config import Config
from .direct_io import Buffer
from .engine import LOAD_NEEDS, Engine, close_engine, count, open_engine, report, require_home
from .keys import UriMapping
from .lookup_lane import MOST_KEYS, LookupLane
from .metrics import PAGE
from .outcomes import Outcome, logger, reasons, which_are_good
from .start_check import check_start
from .storing import store
from .transfers import delete, load, lookup
from .workers import TaskQueue


class Kind(Enum):
    """What LMCache asks for; the value names the threads and the queue."""

    EXISTS = "lookup"
    GET = "load"
    SET = "store"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Operation:
    """One submitted batch; from `late_at` on (monotonic) its buffers may be somebody else's."""

    kind: Kind
    future_id: int
    keys: list[str]
    sources: list[object]
    late_at: float


_Transfer = Callable[[Engine, Sequence[str], Sequence[Buffer]], list[Outcome]]


class HyperCacheConnector:
    """Stores and loads LMCache's chunks through a HyperCache daemon on this host.

    Args:
        adapter_params: see `Config`; `namespace` is required.

    Raises:
        ConfigError: a parameter is wrong. A daemon that is down is no error.
        RuntimeError, OSError: there are not enough threads or descriptors; none is left.
    """

    def __init__(self, **adapter_params: Any) -> None:
        settings = configuration.parse(adapter_params)
        check_start(settings)
        self._mapping = UriMapping(settings.namespace)
        self._batch_timeout_s = settings.batch_timeout_s
        self._queues: dict[Kind, TaskQueue[Operation]] = {}
        with ExitStack() as begun:  # which ends again where there is no thread or descriptor for the rest
            self._completions = Completions()
            begun.callback(self._completions.close)
            self._engine = replace(
                open_engine(settings),
                tier=settings.tier,
                overwrite=settings.overwrite,
                seals=settings.seal_for_old_daemons,
            )
            begun.callback(close_engine, self._engine)
            self._ready = select.epoll()
            begun.callback(self._ready.close)
            self._ready.register(self._completions.event_fd, select.EPOLLIN)
            self._event_fd = self._ready.fileno()
            self._lane: LookupLane[Operation] = LookupLane(
                self._engine,
                settings.timeout_s,
                self._mapping,
                self._ready,
                announce=self._completions.announce,
                answered=self._answered,
                handed_back=self._enqueue,
            )
            begun.callback(self._lane.close)
            for kind, threads in _threads(settings).items():
                name = f"hypercache-{kind.value}"
                self._queues[kind] = TaskQueue(name, threads, settings.queue_limit, self._run)
                begun.callback(self._queues[kind].close)
            begun.pop_all()
        self._closing = threading.Lock()
        self._closed = False
        self.namespace = settings.namespace
        PAGE.show(self)

    # -- what LMCache calls ------------------------------------------------------------------------------

    def event_fd(self) -> int:
        """The descriptor that becomes readable when there are completions to drain."""
        return self._event_fd

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[object]) -> int:
        """Begin to load each key into its buffer. Returns the id of the completion to come."""
        return self._submit(Kind.GET, keys, memoryviews)

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[object]) -> int:
        """Begin to store each buffer under its key. Returns the id of the completion to come."""
        return self._submit(Kind.SET, keys, memoryviews)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Begin to look up each key. Returns the id of the completion to come."""
        operation = self._begun(Kind.EXISTS, keys)
        if len(operation.keys) > MOST_KEYS or not self._lane.ask(operation):
            self._enqueue(operation)
        return operation.future_id

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Begin to delete each key. Returns the id of the completion to come."""
        return self._submit(Kind.DELETE, keys)

    def drain_completions(self) -> list[Completion]:
        """Each result that was not taken yet, as (id, ok, error, booleans or None); what made the descriptor
        readable is dealt with."""
        require_home(self._engine, "connector")
        if self._lane.is_waiting:  # each time, or a stream of lookups in the table would hold these up
            self._lane.take()
        taken = self._completions.drain()
        # After that, so that whatever is submitted from here on is announced anew.
        found = [Completion(each.future_id, True, "", good) for each, good in self._lane.look_up()]
        taken += self._completions.settle(found)
        if not taken:  # then it may have been the lane's connection that made the descriptor readable
            self._lane.take()
        return taken

    def close(self) -> None:
        """Stop, from any thread and any number of times; nothing touches a buffer afterwards.

        Queued operations fail, exchanges with the daemon break off, chunks that have not begun are
        skipped, and those on their way to or from a device are waited for. After `close_timeout_s` a write
        that the device still holds is given up: it will never be committed. A read is not: the device
        could yet write into memory that has another owner by then. Each further `close_timeout_s` of
        waiting for it is logged as an error. In a forked child nothing happens: all of it is the parent's.
        """
        if not self._engine.is_at_home:
            return
        with self._closing:
            if not self._closed:
                self._shut_down()
                self._closed = True

    # -- for people and monitoring -----------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Counts per reason, what waits, and how the daemon is; README.md explains each."""
        require_home(self._engine, "connector")
        status = report(self._engine)
        status["daemon"]["lookup_lane_open"] = self._lane.is_open
        status["daemon"]["presence_table"] = self._lane.has_table
        waiting = {kind.value: queue.waiting for kind, queue in self._queues.items()}
        return {**status, "waiting": waiting, "pending": self._completions.pending}

    # -- operations --------------------------------------------------------------------------------------

    def _submit(self, kind: Kind, keys: Sequence[str], sources: Sequence[object] = ()) -> int:
        operation = self._begun(kind, keys, sources)
        self._enqueue(operation)
        return operation.future_id

    def _begun(self, kind: Kind, keys: Sequence[str], sources: Sequence[object] = ()) -> Operation:
        require_home(self._engine, "connector")
        future_id = self._completions.begin(None if kind is Kind.SET else len(keys))
        return Operation(kind, future_id, list(keys), list(sources), time.monotonic() + self._batch_timeout_s)

    def _enqueue(self, operation: Operation) -> None:
        if not self._queues[operation.kind].offer(operation):
            closing = self._closed or self._closing.locked()
            self._fail(operation, Outcome.CLOSED if closing else Outcome.QUEUE_FULL)

    def _answered(self, operation: Operation, outcomes: Sequence[Outcome]) -> None:
        self._completions.complete(_completion(operation, outcomes))

    def _run(self, operation: Operation) -> None:
        try:
            outcomes = self._outcomes(operation)
        except Exception:  # noqa: BLE001 - boundary: whatever it is, the id completes and the thread lives
            logger.exception("a %s of %d keys failed", operation.kind.value, len(operation.keys))
            self._fail(operation, Outcome.INTERNAL_ERROR)
        else:
            self._completions.complete(_completion(operation, outcomes))
            if operation.kind is Kind.EXISTS and not self._engine.seals:  # a seal may take a second look
                self._lane.open(LOAD_NEEDS)

    def _outcomes(self, operation: Operation) -> list[Outcome]:
        match operation.kind:
            case Kind.EXISTS:
                return lookup(self._engine, self._mapping.uris(operation.keys))
            case Kind.DELETE:
                return delete(self._engine, self._mapping.uris(operation.keys))
            case Kind.GET:
                return self._transferred(load, operation, writable=True)
            case Kind.SET:
                return self._transferred(store, operation, writable=False)
            case _:
                assert_never(operation.kind)

    def _transferred(self, transfer: _Transfer, operation: Operation, *, writable: bool) -> list[Outcome]:
        if time.monotonic() >= operation.late_at:  # there is no use in asking the daemon
            late = [Outcome.TRANSFER_LATE] * len(operation.keys)
            count(self._engine, f"{operation.kind.value}s", late)
            return late
        outcomes = [Outcome.BAD_BUFFER] * len(operation.keys)
        buffers = [self._usable(source, writable) for source in operation.sources]
        usable = [
            (index, key, buffer)
            for index, (key, buffer) in enumerate(zip(operation.keys, buffers, strict=True))
            if buffer is not None
        ]
        uris = self._mapping.uris([key for _, key, _ in usable])
        engine = replace(self._engine, late_at=operation.late_at)
        results = transfer(engine, uris, [buffer for *_, buffer in usable])
        for (index, *_), outcome in zip(usable, results, strict=True):
            outcomes[index] = outcome
        if unusable := len(buffers) - len(usable):
            # Last: what raises before that is counted for every key.
            count(self._engine, f"{operation.kind.value}s", [Outcome.BAD_BUFFER] * unusable)
        return outcomes

    def _usable(self, source: object, writable: bool) -> Buffer | None:
        try:
            return Buffer(source, writable=writable)
        except (TypeError, ValueError, BufferError) as error:
            self._engine.log.note("buffer", "a buffer cannot be used: %s", error)
            return None

    def _fail(self, operation: Operation, outcome: Outcome) -> None:
        outcomes = [outcome] * len(operation.keys)
        count(self._engine, f"{operation.kind.value}s", outcomes)
        self._completions.complete(_completion(operation, outcomes, failed=True))

    # -- the end -----------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        PAGE.hide(self)
        for queue in self._queues.values():
            for operation in queue.close():
                self._fail(operation, Outcome.CLOSED)
        self._lane.close()
        threads = {kind: queue.threads for kind, queue in self._queues.items()}
        loading = threads.pop(Kind.GET)
        close_engine(self._engine, loading=loading, others=[self._lane.watch, *chain(*threads.values())])
        self._completions.close()
        self._ready.close()


def _threads(settings: Config) -> dict[Kind, int]:
    return {
        Kind.EXISTS: settings.lookup_threads,
        Kind.GET: settings.load_threads,
        Kind.SET: settings.store_threads,
        Kind.DELETE: 1,
    }


def _completion(operation: Operation, outcomes: Sequence[Outcome], *, failed: bool = False) -> Completion:
    """What LMCache is told: a set's booleans are not asked for, a lookup's count only beside a true `ok`,
    and a key that was absent is deleted as well as one that was not."""
    good = which_are_good(outcomes)
    error = reasons(outcomes)
    match operation.kind:
        case Kind.SET:
            return Completion(operation.future_id, all(good) and not failed, error, None)
        case Kind.GET:
            return Completion(operation.future_id, all(good) and not failed, error, good)
        case Kind.EXISTS:
            return Completion(operation.future_id, not failed, error, good)
        case Kind.DELETE:
            gone = [outcome in (Outcome.OK, Outcome.ABSENT) for outcome in outcomes]
            return Completion(operation.future_id, all(gone) and not failed, error, gone)
        case _:
            assert_never(operation.kind)
