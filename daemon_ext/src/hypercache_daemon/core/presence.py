"""What the presence table has in which place. Clients read the words while they are written.

Rules:
1. One word is written at once; a reader sees the old one or the new one.
2. A word that finds no place is counted in the header. So one that is to go and is not there is among those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from hypercache_protocol.presence import (
    BUCKET_WORDS,
    HEADER_WORDS,
    VERIFIABLE,
    TableView,
    Words,
    places,
    words_of,
)

_UNPLACED = 0
_EMPTY = 0
_PLACE_BITS = 32
_HASHED_TOGETHER = 1000  # few enough that their bytes stay in the processor's cache


class PresenceWords:
    """The words of all committed objects, in a table that may be too small."""

    def __init__(self, table: TableView) -> None:
        self._table = table
        # Python's own numbers: for one word at a time numpy's cost more than all else.
        self._memory = table.memory.cast("B").cast("Q")
        self._most = table.geometry.buckets - 1

    def load(self, uris: Sequence[str], verifiable: npt.NDArray[np.bool_]) -> None:
        """Put all objects of a catalog into an empty table; `verifiable` says which have checksums."""
        words = self._words_of(uris)
        buckets = places(words, self._table.geometry.buckets)[0]
        words[~verifiable] &= ~VERIFIABLE
        # Bucket and place as one number: to sort numbers takes a fifth of what it takes to sort by them.
        in_order = np.sort(buckets << _PLACE_BITS | np.arange(len(words)))
        firsts, words = in_order >> _PLACE_BITS, words[in_order & (1 << _PLACE_BITS) - 1]
        ranks = np.arange(len(words)) - np.searchsorted(firsts, firsts)
        fits = ranks < BUCKET_WORDS
        self._table.buckets[firsts[fits], ranks[fits]] = words[fits]
        for word in words[~fits].tolist():
            self._place(word)

    def _words_of(self, uris: Sequence[str]) -> Words:
        words = np.empty(len(uris), np.uint64)
        for start in range(0, len(uris), _HASHED_TOGETHER):
            encoded = [uri.encode() for uri in uris[start : start + _HASHED_TOGETHER]]
            words[start : start + _HASHED_TOGETHER] = words_of(encoded, self._table.geometry.seed)
        return words

    def change(self, uris: Sequence[str], before: Iterable[bool | None], now: Iterable[bool | None]) -> None:
        """What is under each of `uris`: an object with checksums (True) or without (False), or none."""
        words: list[int] = self._words_of(uris).tolist()
        for word, was, will_be in zip(words, before, now, strict=True):
            if was is will_be:
                continue
            if will_be is not None:
                self._place(word if will_be else word - 1)
            if was is not None:
                self._remove(word if was else word - 1)

    def _place(self, word: int) -> None:
        place = self._found(word, _EMPTY)
        if place is None:
            self._memory[_UNPLACED] += 1
        else:
            self._memory[place] = word

    def _remove(self, word: int) -> None:
        place = self._found(word, word)
        if place is None:
            self._memory[_UNPLACED] -= 1
        else:
            self._memory[place] = _EMPTY

    def _found(self, word: int, wanted: int) -> int | None:
        """The first place for `word` that holds `wanted`."""
        for bucket in (word >> 1 & self._most, word >> 32 & self._most):
            start = HEADER_WORDS + BUCKET_WORDS * bucket
            there = self._memory[start : start + BUCKET_WORDS].tolist()
            if wanted in there:
                return start + there.index(wanted)
        return None
