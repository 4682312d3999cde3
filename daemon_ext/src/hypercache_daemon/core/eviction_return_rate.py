"""Which objects leave first: those of a kind that seldom comes back.

Rules:
1. A key's kind is the number of batches that asked for it, up to five. A key that was missing at the end of
   a batch is of a kind of its own until it is asked for: the end of a prompt is mostly a block that was not
   full, and the next turn of the conversation has another in its place.
2. Of each kind the policy counts its return rate: the share of its keys that were asked for again, be it
   after they had left. So nothing about the load is assumed, and a kind that is like another costs nothing.
3. A key's age is the number of keys that came in since it was last asked for. The key leaves first whose age
   is greatest in proportion to the return rate of its kind: what comes back twice as often stays twice as
   long.
4. Keys of one kind that were asked for together are one run: they have one age, and the last leaves first, so
   that a chain's tail leaves before its head. Prefix chains are asked for as a whole, so runs are long, and a
   lookup costs a few steps per run and not per key. Keys that came in one after another are a run too, of
   which the first leaves first: nothing says that they are a chain, and commits come in any order.
5. Memory is bounded: the history of keys that left is no longer than the list of those present, and at least
   half of what a run holds is present.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby, repeat

from .eviction import walk

_NEVER_ASKED = 0
_OFTEN_ASKED = 5
_END = _OFTEN_ASKED + 1
_NEXT_KIND = (1, 2, 3, 4, 5, _OFTEN_ASKED, 1)
"""What a key of each kind becomes when it is asked for."""

_LEAST_RATE = 0.01
"""So that what was hot once stays at most a hundred times as long as what never comes back."""

_LONGEST_RUN = 64
"""Of keys that came in; a batch that was asked for may be longer."""

_MOST_ENDS = 4096
"""Missing ends that are remembered until they are stored."""

_FEW = 64
"""Keys, by which bounds that follow the number of keys present exceed it."""


class _Run:
    """Keys of one kind and one age; the last leaves first. `keys` may hold some that are elsewhere by now."""

    __slots__ = ("keys", "kind", "present", "since")

    def __init__(self, kind: _Kind, since: int) -> None:
        self.kind = kind
        self.since = since
        self.keys: list[str] = []
        self.present = 0


class _Kind:
    """The runs of one kind, coldest first, and how many of its keys came back."""

    __slots__ = ("joined", "number", "returned", "runs")

    def __init__(self, number: int) -> None:
        self.number = number
        self.runs: OrderedDict[_Run, None] = OrderedDict()
        self.joined = 0.0
        self.returned = 0.0

    @property
    def return_rate(self) -> float:
        """From 0.01 to 1, also before anything is known."""
        return max(_LEAST_RATE, (self.returned + 1) / (self.joined + 2))

    def new_run(self, since: int) -> _Run:
        """An empty run, the hottest of this kind."""
        run = _Run(self, since)
        self.runs[run] = None
        return run

    def count_joined(self, number: int, present: int) -> None:
        """So many keys are of this kind now; what is long past counts ever less."""
        self.joined += number
        if self.joined > 2 * present + _FEW:
            self.joined /= 2
            self.returned /= 2


class ReturnRate:
    """The kind that seldom comes back leaves soon; see the rules above."""

    def __init__(self) -> None:
        self._kinds = [_Kind(number) for number in range(len(_NEXT_KIND))]
        self._run_of: dict[str, _Run] = {}
        self._arrivals = 0
        self._arriving: _Run | None = None
        self._missing_ends: set[str] = set()
        # Hash of a key -> number of its kind, oldest first: the keys themselves would need several times the
        # memory, and two that share a hash only make a guess worse.
        self._history: OrderedDict[int, int] = OrderedDict()

    def inserted(self, key: str, size_bytes: int) -> None:  # noqa: ARG002 - size does not matter to this policy
        """`key` is the hottest of its kind now, whatever its size; known or in the history, it came back."""
        self.removed(key)
        self._arrivals += 1
        kind = self._kind_on_arrival(key)
        run = self._arriving
        if run is None or run.kind is not kind or len(run.keys) >= _LONGEST_RUN:
            run = self._arriving = kind.new_run(self._arrivals)
        run.keys.insert(0, key)  # the last leaves first, and that is the one that came in first
        run.present += 1
        self._run_of[key] = run
        kind.count_joined(1, len(self._run_of))

    def load(self, keys_coldest_first: Sequence[str], sizes_bytes: Sequence[int]) -> None:  # noqa: ARG002
        """All came in one after another, and are of the kind that nobody asked for yet."""
        kind = self._kinds[_NEVER_ASKED]
        # Python for each run, C for each key: of a million objects a start spends much of its time here.
        for first in range(0, len(keys_coldest_first), _LONGEST_RUN):
            run = self._arriving = kind.new_run(first + 1)
            run.keys = list(reversed(keys_coldest_first[first : first + _LONGEST_RUN]))
            run.present = len(run.keys)
            self._run_of.update(zip(run.keys, repeat(run)))
        self._arrivals = len(keys_coldest_first)
        kind.count_joined(self._arrivals, self._arrivals)

    def touched(self, keys_in_batch_order: Sequence[str]) -> None:
        """The batch moves on to its next kinds; a missing end is remembered, other unknown keys are passed
        over."""
        self._arriving = None
        keys = list(keys_in_batch_order)
        run = self._run_of.get(keys[0]) if keys else None
        if run is not None and run.present == len(keys) and run.keys == keys:
            self._move_whole(run)
        elif keys:
            self._move_parts(list(dict.fromkeys(keys)))
            if keys[-1] not in self._run_of:
                self._remember_end(keys[-1])

    def removed(self, key: str) -> None:
        """`key` goes into the history."""
        run = self._run_of.pop(key, None)
        if run is None:
            return
        if run is self._arriving:
            self._arriving = None  # so that no name is twice in it
        self._left(run, 1)
        self._history[hash(key)] = run.kind.number
        while len(self._history) > len(self._run_of) + _FEW:
            self._history.popitem(last=False)

    def victims(self) -> Iterator[str]:
        """Every key once, in the order of rule 3; see `EvictionPolicy.victims`."""
        given: set[str] = set()
        for _, _, key in heapq.merge(*map(self._by_turn, self._kinds)):
            # Between its being looked at and its turn it may have been removed, or changed its kind.
            if key not in given and key in self._run_of:
                given.add(key)
                yield key

    def _by_turn(self, kind: _Kind) -> Iterator[tuple[float, int, str]]:
        """The keys of one kind as they leave, each with its age in proportion, negated, and its kind."""
        rate = kind.return_rate
        for run in walk(kind.runs):
            turn = (run.since - self._arrivals - 1) / rate
            for key in reversed(run.keys):
                if self._run_of.get(key) is run:
                    yield turn, kind.number, key

    def _kind_on_arrival(self, key: str) -> _Kind:
        number = self._history.pop(hash(key), None)
        if number is not None:
            self._kinds[number].returned += 1
            return self._kinds[_NEXT_KIND[number]]
        if key in self._missing_ends:
            self._missing_ends.discard(key)
            return self._kinds[_END]
        return self._kinds[_NEVER_ASKED]

    def _move_whole(self, run: _Run) -> None:
        """A chain was asked for just as it was the last time: no key needs to be looked at."""
        run.kind.returned += run.present
        del run.kind.runs[run]
        run.kind = self._next_kind(run)
        run.kind.runs[run] = None
        run.since = self._arrivals
        run.kind.count_joined(run.present, len(self._run_of))

    def _move_parts(self, keys: list[str]) -> None:
        """Each of `keys`, all different, joins a new run of its next kind; unknown ones are passed over."""
        start = 0
        moved: dict[_Kind, _Run] = {}
        # Python for each run, C for each key: a lookup of many keys spends most of its time here.
        for run, members in groupby(map(self._run_of.get, keys)):
            end = start + len(list(members))
            if run is not None:
                kind = self._next_kind(run)
                target = moved.get(kind) or moved.setdefault(kind, kind.new_run(self._arrivals))
                self._move(keys[start:end], run, target)
            start = end
        for kind, target in moved.items():
            kind.count_joined(target.present, len(self._run_of))

    def _move(self, keys: list[str], run: _Run, target: _Run) -> None:
        run.kind.returned += len(keys)
        target.keys += keys
        target.present += len(keys)
        self._run_of.update(zip(keys, repeat(target)))
        self._left(run, len(keys))

    def _next_kind(self, run: _Run) -> _Kind:
        return self._kinds[_NEXT_KIND[run.kind.number]]

    def _left(self, run: _Run, number: int) -> None:
        """So many keys are no longer in `run`. Their names stay until they are more than those present."""
        run.present -= number
        if not run.present:
            del run.kind.runs[run]
        elif 2 * run.present < len(run.keys):
            run.keys = [key for key in run.keys if self._run_of.get(key) is run]

    def _remember_end(self, key: str) -> None:
        if len(self._missing_ends) >= _MOST_ENDS:
            self._missing_ends.clear()
        self._missing_ends.add(key)
