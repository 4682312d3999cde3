"""Stores, loads, lookups and deletes without a pause, through the adapter that LMCache creates; every byte of
every load is checked, and every future is watched.

Rules:
1. Loads do what LMCache does: look up and lock, load what was found, unlock. With `blind` every other load
   goes without, so that a load meets what a lookup would have kept from it.
2. A future is late where it completes after `deadline_s`, and lost after three times that. Its buffers are
   kept: whoever writes into them after that must find them still there.
3. One thread submits and collects; deletes, which LMCache waits for, have another one.
"""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..payloads import version_in, versioned
from .adapter import LAYOUTS, bits, create, keys_of
from .ledger import Allowed, Ledger
from .memory import Memory
from .watching import Deleted, Figures, Once

SIZES = (4096, 5000, 65536, 262144, 1 << 20, (4 << 20) + 5)
KINDS = ("store", "load", "lookup", "delete")
LOST_AFTER_DEADLINES = 3
GIVEN_UP_BY_LMCACHE_S = 29.0
_FIRST_BATCH = 6
_IDLE_WAIT_S = 0.02
_BETWEEN_TRIES_S = 0.2

_KEPT: dict[str, Any] = {}


@dataclass(frozen=True)
class Settings:
    """How much there is to do.

    Args:
        per_second: how many batches of each kind are begun at most.
        in_flight: how many of each kind at once; one of them for deletes.
        blind: loads also without a lookup before them.
        overwrite: the connector writes a key again that is there.
        first_version: where another load went before with the same keys, more than it can have stored.
    """

    keys: int = 18
    prefix: str = "key"
    per_second: float = 60.0
    in_flight: int = 3
    deadline_s: float = 8.0
    blind: bool = True
    overwrite: bool = False
    first_version: int = 0
    seed: int = 1


@dataclass(eq=False)
class Operation:
    """One batch on its way."""

    kind: str
    names: list[str]
    begun: float
    task: int = -1
    objects: list[Any] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    allowed: list[Allowed] = field(default_factory=list)
    looks_first: bool = False
    locked: list[str] = field(default_factory=list)


class VerifiedLoad:
    """One adapter and what is done with it."""

    def __init__(self, spec: dict[str, object], settings: Settings) -> None:
        self._settings = settings
        self.figures = Figures()
        self._adapter = create(spec)
        if hasattr(self._adapter, "_client"):
            self._adapter._client = Once(self._adapter._client, self.figures)
        self._deleted = Deleted()
        self._adapter.register_listener(self._deleted)
        self._sizes = {
            f"{settings.prefix}-{number}": SIZES[number % len(SIZES)] for number in range(settings.keys)
        }
        self._ledger = Ledger(overwrite=settings.overwrite, first_version=settings.first_version)
        self._fillers: list[str] = []
        self._filling = False
        self._chance = random.Random(settings.seed)
        self._pending: list[Operation] = []
        self._lost: list[Operation] = []
        self._due = dict.fromkeys(KINDS, 0.0)
        self._begin: dict[str, Callable[[], Operation | None]] = {
            "store": self._begin_store,
            "load": self._begin_load,
            "lookup": self._begin_lookup,
        }
        self._fds = {
            self._adapter.get_store_event_fd(): self._collect_stores,
            self._adapter.get_lookup_and_lock_event_fd(): self._collect_lookups,
            self._adapter.get_load_event_fd(): self._collect_loads,
        }
        self._poll = select.poll()
        for fd in self._fds:
            self._poll.register(fd, select.POLLIN)
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    # -- the life of it --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Store every key, which is not counted, then go on until `end`."""
        names = list(self._sizes)
        for start in range(0, len(names), _FIRST_BATCH):
            self._finish(self._begin_store(names[start : start + _FIRST_BATCH]))
        self.figures.counts.clear()
        self._threads = [
            threading.Thread(target=self._watched, args=(work,), daemon=True)
            for work in (self._work, self._delete_on_and_on)
        ]
        for thread in self._threads:
            thread.start()

    def fill(self, filling: bool) -> None:
        """Store further keys of the largest size meanwhile; afterwards they are deleted."""
        self._filling = filling

    @property
    def fillers(self) -> int:
        """How many further keys have not been deleted yet."""
        return len(self._fillers)

    def end(self) -> None:
        """Begin nothing more and wait for what is on its way."""
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def heal(self, deadline_s: float) -> list[str]:
        """Store, find and load each key, as often as it takes. Returns those that could not be, in time."""
        end = time.monotonic() + deadline_s
        left = [name for name in self._sizes if self._ledger.claim([name])]
        stuck = [name for name in self._sizes if name not in left]
        self._ledger.release(left)
        while left and time.monotonic() < end:
            left = [name for name in left if not self._is_sound(name)]
            if left:
                time.sleep(_BETWEEN_TRIES_S)
        return left + stuck

    def close(self) -> None:
        """Close the adapter."""
        self._adapter.close()

    def _is_sound(self, name: str) -> bool:
        before = self.figures.counts["right"]
        self._finish(self._submit_lookup([name], "load"))
        if self.figures.counts["right"] > before:
            return True
        self._finish(self._begin_store([name]))
        self._finish(self._submit_lookup([name], "load"))
        return self.figures.counts["right"] > before

    def _finish(self, operation: Operation | None) -> None:
        while operation in self._pending:
            self._collect()

    def _watched(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the boundary of a thread: it is told, and fails the run
            self.figures.counts["broken"] += 1
            self.figures.problem(f"the load itself broke off: {error!r}")
            raise

    # -- submitting ------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._ending.is_set():
            now = time.monotonic()
            for kind, begin in self._begin.items():
                if now >= self._due[kind] and self._in_flight(kind) < self._settings.in_flight:
                    self._due[kind] = now + 1 / self._settings.per_second
                    begin()
            self._collect()
        while self._pending:
            self._collect()

    def _in_flight(self, kind: str) -> int:
        return sum(operation.kind == kind for operation in self._pending)

    def _some(self) -> list[str]:
        return self._chance.sample(list(self._sizes), self._chance.randrange(1, 4))

    def _begin_store(self, names: Sequence[str] | None = None) -> Operation | None:
        names = self._ledger.claim(names or ([self._filler()] if self._filling else self._some()[:2]))
        if not names:
            return None
        operation = Operation("store", names, time.monotonic(), objects=self._objects(names))
        for name, item in zip(names, operation.objects, strict=True):
            version = self._ledger.begin(name)
            operation.versions.append(version)
            item.raw_data.numpy()[:] = np.frombuffer(versioned(name, version, item.get_size()), np.uint8)
        return self._submitted(operation, self._adapter.submit_store_task, operation.objects)

    def _filler(self) -> str:
        self._fillers.append(f"filler-{len(self._fillers)}")
        return self._fillers[-1]

    def _begin_lookup(self) -> Operation | None:
        return self._submit_lookup(self._some(), "lookup")

    def _begin_load(self) -> Operation | None:
        names = self._some()
        if self._settings.blind and self._chance.random() < 0.5:
            return self._submit_load(Operation("load", names, time.monotonic()))
        return self._submit_lookup(names, "load")

    def _submit_lookup(self, names: list[str], kind: str) -> Operation | None:
        operation = Operation(kind, names, time.monotonic(), looks_first=True)
        return self._submitted(operation, self._adapter.submit_lookup_and_lock_task, LAYOUTS)

    def _submit_load(self, operation: Operation) -> Operation | None:
        operation.looks_first = False
        operation.objects = self._objects(operation.names)
        operation.allowed = [self._ledger.allowed(name) for name in operation.names]
        return self._submitted(operation, self._adapter.submit_load_task, operation.objects)

    def _submitted(self, operation: Operation, submit: Callable[..., int], what: object) -> Operation | None:
        try:
            operation.task = submit(keys_of(operation.names), what)
        except Exception as error:  # noqa: BLE001 - whatever it is, LMCache would get no future
            self.figures.counts["lost"] += 1
            self.figures.problem(f"submitting a {operation.kind} raised {error!r}")
            self._over(operation)
            return None
        self._pending.append(operation)
        return operation

    def _objects(self, names: Sequence[str]) -> list[Any]:
        return Memory([self._sizes.get(name, max(SIZES)) for name in names], 4096).objects

    # -- collecting ------------------------------------------------------------------------------------

    def _collect(self) -> None:
        for fd, _ in self._poll.poll(_IDLE_WAIT_S * 1000):
            with suppress(BlockingIOError):
                os.read(fd, 8)
            self._fds[fd]()
        now = time.monotonic()
        for operation in list(self._pending):
            if now - operation.begun > LOST_AFTER_DEADLINES * self._settings.deadline_s:
                self._pending.remove(operation)
                self._lost.append(operation)
                self.figures.counts["lost"] += 1
                self.figures.problem(f"a {operation.kind} of {operation.names} never completed")

    def _done(self, operation: Operation) -> None:
        self._pending.remove(operation)
        self.figures.completed(operation.kind, operation.begun, self._settings.deadline_s)
        self._over(operation)

    def _over(self, operation: Operation) -> None:
        if operation.locked:
            self._adapter.submit_unlock(keys_of(operation.locked))
        if operation.kind == "store":
            self._ledger.release(operation.names)

    def _collect_stores(self) -> None:
        for task, result in self._adapter.pop_completed_store_tasks().items():
            stores = [each for each in self._pending if each.kind == "store"]
            operation = next((each for each in stores if each.task == task), None)
            if operation is None:
                self.figures.problem(f"store {task} completed after it was given up, or twice")
                continue
            if result.is_successful():
                for name, version in zip(operation.names, operation.versions, strict=True):
                    self._ledger.stored(name, version)
                self.figures.good("store", operation.begun)
            self._done(operation)

    def _collect_lookups(self) -> None:
        for operation in [each for each in self._pending if each.looks_first]:
            bitmap = self._adapter.query_lookup_and_lock_result(operation.task)
            if bitmap is not None:
                self._looked_up(operation, bits(bitmap, len(operation.names)))

    def _looked_up(self, operation: Operation, found: list[bool]) -> None:
        operation.locked = [name for name, there in zip(operation.names, found, strict=True) if there]
        self.figures.counts[f"{operation.kind} missed"] += found.count(False)
        if operation.kind == "load" and operation.locked:
            self._pending.remove(operation)
            operation.names = operation.locked
            self._submit_load(operation)
            return
        if operation.locked:
            self.figures.good("lookup", operation.begun)
        self._done(operation)

    def _collect_loads(self) -> None:
        for operation in [each for each in self._pending if each.kind == "load" and not each.looks_first]:
            bitmap = self._adapter.query_load_result(operation.task)
            if bitmap is not None:
                self._loaded(operation, bits(bitmap, len(operation.names)))

    def _loaded(self, operation: Operation, loaded: list[bool]) -> None:
        right = 0
        for index, is_loaded in enumerate(loaded):
            name, item = operation.names[index], operation.objects[index]
            if not is_loaded:
                self.figures.counts["load missed"] += 1
                continue
            version = version_in(name, item.raw_data.numpy())
            if version is not None and version in operation.allowed[index]:
                right += 1
            else:
                what = "no version as a whole" if version is None else f"version {version}, long replaced"
                self.figures.is_wrong(f"{name} ({item.get_size()} bytes): {what}")
        self.figures.counts["right"] += right
        if right:
            self.figures.good("load", operation.begun)
        self._done(operation)

    # -- deleting --------------------------------------------------------------------------------------

    def _delete_on_and_on(self) -> None:
        chance = random.Random(f"{self._settings.seed} deletes")
        while not self._ending.wait(4 / self._settings.per_second):
            is_filler = bool(self._fillers) and not self._filling
            name = self._fillers.pop() if is_filler else chance.choice(list(self._sizes))
            if self._ledger.claim([name]):
                self._delete([name])
                self._ledger.release([name])
            elif is_filler:
                self._fillers.insert(0, name)

    def _delete(self, names: list[str]) -> None:
        begun = time.monotonic()
        keys = keys_of(names)
        self._deleted.keys.difference_update(keys)
        self._adapter.delete(keys)
        if time.monotonic() - begun > GIVEN_UP_BY_LMCACHE_S:
            self.figures.counts["lost"] += 1
            self.figures.problem(f"a delete of {names} never completed")
            return
        self.figures.completed("delete", begun, self._settings.deadline_s)
        for name, key in zip(names, keys, strict=True):
            if key in self._deleted.keys:
                self._ledger.deleted(name)
                self.figures.good("delete", begun)


# -- what the other process calls ----------------------------------------------------------------------


def start(spec: dict[str, object], settings: dict[str, Any]) -> None:
    """Create the adapter that `spec` describes and begin."""
    _KEPT["load"] = VerifiedLoad(spec, Settings(**settings))
    _KEPT["load"].begin()


def figures() -> dict[str, Any]:
    """Everything so far; `since_mark`: after how many seconds each kind first succeeded again."""
    load: VerifiedLoad = _KEPT["load"]
    return {**load.figures.report(), "fillers": load.fillers}


def mark() -> None:
    """From now on `since_mark` counts."""
    counted = _KEPT["load"].figures
    counted.since_mark = {}
    counted.marked = time.monotonic()


def fill(filling: bool) -> None:
    """Whether to store ever more keys, until nothing more fits."""
    _KEPT["load"].fill(filling)


def end() -> None:
    """Begin nothing more, and wait for what is on its way."""
    _KEPT["load"].end()


def heal(deadline_s: float) -> list[str]:
    """The keys that could not be stored, found and loaded by then."""
    unsound: list[str] = _KEPT["load"].heal(deadline_s)
    return unsound


def close() -> None:
    """Close the adapter."""
    _KEPT.pop("load").close()
