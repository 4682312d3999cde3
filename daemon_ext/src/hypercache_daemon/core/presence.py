"""What the presence table has in which place. Clients read the words while they are written.

Rules:
1. One word is written at once; a reader sees the old one or the new one.
2. A word that finds no place is kept beside the table, and counted in its header.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hypercache_protocol.presence import BUCKET_WORDS, VERIFIABLE, TableView, places, words_of


class PresenceWords:
    """The words of all committed objects, in a table that may be too small."""

    def __init__(self, table: TableView) -> None:
        self._table = table
        self._unplaced: Counter[int] = Counter()

    def load(self, uris: Sequence[str], verifiable: npt.NDArray[np.bool_]) -> None:
        """Put all objects of a catalog into an empty table; `verifiable` says which have checksums."""
        words = words_of(uris, self._table.geometry.seed)
        firsts = places(words, self._table.geometry.buckets)[: len(words)]
        words[~verifiable] &= ~VERIFIABLE
        order = np.argsort(firsts, kind="stable")
        firsts, words = firsts[order], words[order]
        ranks = np.arange(len(words)) - np.searchsorted(firsts, firsts)
        fits = ranks < BUCKET_WORDS
        self._table.buckets[firsts[fits], ranks[fits]] = words[fits]
        for word in words[~fits]:
            self._place(word)

    def change(self, uri: str, before: bool | None, now: bool | None) -> None:
        """What is under `uri`: an object with checksums (True) or without (False), or none."""
        if before is now:
            return
        if now is not None:
            self._place(self._word(uri, now))
        if before is not None:
            self._remove(self._word(uri, before))

    def _word(self, uri: str, verifiable: bool) -> np.uint64:
        (word,) = words_of((uri,), self._table.geometry.seed)
        return np.uint64(word if verifiable else word & ~VERIFIABLE)

    def _place(self, word: np.uint64) -> None:
        place = self._found(word, np.uint64(0))
        if place is not None:
            self._table.buckets[place] = word
            return
        self._unplaced[int(word)] += 1
        self._count()

    def _remove(self, word: np.uint64) -> None:
        place = self._found(word, word)
        if place is not None:
            self._table.buckets[place] = 0
            return
        self._unplaced -= Counter({int(word): 1})
        self._count()

    def _found(self, word: np.uint64, wanted: np.uint64) -> tuple[int, int] | None:
        """The first place for `word` that holds `wanted`."""
        for bucket in places(np.array([word]), self._table.geometry.buckets).tolist():
            (there,) = np.nonzero(self._table.buckets[bucket] == wanted)
            if len(there):
                return bucket, int(there[0])
        return None

    def _count(self) -> None:
        self._table.header[0] = self._unplaced.total()
