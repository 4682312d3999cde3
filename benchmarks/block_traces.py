"""Which blocks the requests of a service asked for: recorded, or made up.

A trace is a list of requests in order; each is the list of its prompt's blocks from the first on. The same
block means the same prompt up to its end.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

Trace = list[list[str]]


class TraceError(Exception):
    """The file is no trace; says in which line, and what was expected."""


def read_mooncake(path: Path) -> Trace:
    """A trace as the Mooncake project publishes them: one JSON object a line, with `hash_ids`, a list of
    whole numbers. A name that ends in .gz is decompressed.

    Raises:
        TraceError: the file cannot be read, or does not have that form.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            trace = [_blocks(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    if not any(trace):
        raise TraceError(f"{path} has no request with blocks")
    return trace


def _blocks(path: Path, number: int, line: str) -> list[str]:
    try:
        hash_ids = json.loads(line)["hash_ids"]
    except (ValueError, KeyError, TypeError):
        raise TraceError(f"{path}, line {number}: expected a JSON object with hash_ids") from None
    if not isinstance(hash_ids, list) or not all(type(block) is int for block in hash_ids):
        raise TraceError(f"{path}, line {number}: hash_ids must be a list of whole numbers")
    return [str(block) for block in hash_ids]


def made_up(seed: int, requests: int) -> Trace:
    """Four loads at once, the same for the same seed: conversations whose prompts grow turn by turn, one-off
    prompts, agents with few long tool prompts and a short rest, and now and then a scan, a run of long
    documents that are never asked for again."""
    return list(itertools.islice(_MadeUp(random.Random(seed)).requests(), requests))


class _MadeUp:
    """Requests by a clock of their own, in seconds."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._made = itertools.count()
        self._waiting: list[tuple[float, int, list[str]]] = []  # when, unique, the prompt so far
        self._greetings = [self._new(blocks) for blocks in (1, 1, 2, 4)]
        self._tools = [self._new(dice.randint(8, 24)) for _ in range(40)]

    def requests(self) -> Iterator[list[str]]:
        """One request after another, without end."""
        now = 0.0
        while True:
            now += self._dice.expovariate(3.0)
            while self._waiting and self._waiting[0][0] <= now:
                when, _, prompt = heapq.heappop(self._waiting)
                yield self._turn(when, prompt, goes_on=0.65)
            if self._dice.random() < 0.001:
                yield from (self._new(self._dice.randint(60, 120)) for _ in range(40))
            yield self._first_request(now)

    def _first_request(self, now: float) -> list[str]:
        load = self._dice.random()
        if load < 0.3:
            return self._tools[min(int(self._dice.paretovariate(0.8)) - 1, 39)] + self._new(self._some(2))
        greeting = self._dice.choice(self._greetings)
        if load < 0.55:
            return greeting + self._new(self._some(12))
        return self._turn(now, greeting, goes_on=0.45)

    def _turn(self, now: float, prompt: Sequence[str], goes_on: float) -> list[str]:
        """The next prompt of a conversation. Its last block is not full, so the turn after it has another."""
        full = [*prompt, *self._new(self._some(10))]
        if self._dice.random() < goes_on:
            heapq.heappush(self._waiting, (now + self._dice.lognormvariate(4.8, 0.8), next(self._made), full))
        return full + self._new(1)

    def _some(self, median: int) -> int:
        return 1 + int(median * self._dice.lognormvariate(0, 0.9))

    def _new(self, count: int) -> list[str]:
        return [f"b{next(self._made)}" for _ in range(count)]
