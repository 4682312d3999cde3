"""Which objects leave first when space is short.

Rules:
1. A policy knows only keys that may be evicted. Who may not (dirty, pinned, staged) is decided before: such
   an object is `removed`, and `inserted` again when it may be.
2. A policy names victims and removes nothing by itself; what was evicted is told by `removed`.
3. The keys of a batch form a prefix chain: each is of use only while all before it are there. So a chain's
   tail must leave before its head.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import Protocol, TypeVar

_FIRST_LOOK = 16
_Item = TypeVar("_Item")


class EvictionPolicy(Protocol):
    """The order in which evictable objects leave a pool."""

    def inserted(self, key: str, size_bytes: int) -> None:
        """`key` may be evicted from now on; known already, it is as good as new and has the new size."""

    def load(self, keys_coldest_first: Sequence[str], sizes_bytes: Sequence[int]) -> None:
        """Like `inserted` for each of these, which are all different, before anything else has happened: a
        start does this with every object there is."""

    def touched(self, keys_in_batch_order: Sequence[str]) -> None:
        """These were asked for together, in this order; unknown keys are passed over, and may tell a policy
        what to think of them once they are inserted."""

    def removed(self, key: str) -> None:
        """`key` is gone, or may not be evicted any more; an unknown key changes nothing."""

    def victims(self) -> Iterator[str]:
        """Every key once, coldest first.

        The caller may remove what it was given, or leave it, before it asks for the next one. What others
        remove meanwhile is not given; what others touch meanwhile may still be.
        """


class Lru:
    """Least recently used leaves first; within a batch the last key does."""

    def __init__(self) -> None:
        self._coldest_first: OrderedDict[str, None] = OrderedDict()

    def inserted(self, key: str, size_bytes: int) -> None:  # noqa: ARG002 - size does not matter to this policy
        """`key` is the hottest now, whatever its size."""
        self._coldest_first[key] = None
        self._coldest_first.move_to_end(key)

    def load(self, keys_coldest_first: Sequence[str], sizes_bytes: Sequence[int]) -> None:  # noqa: ARG002
        """The last key is the hottest, whatever their sizes."""
        self._coldest_first.update(zip(keys_coldest_first, repeat(None)))

    def touched(self, keys_in_batch_order: Sequence[str]) -> None:
        """The batch's first key is the hottest now, the others follow it; unknown keys are passed over."""
        # In C from end to end: a lookup of many keys spends most of its time here.
        known = filter(self._coldest_first.__contains__, reversed(keys_in_batch_order))
        deque(map(self._coldest_first.move_to_end, known), maxlen=0)

    def removed(self, key: str) -> None:
        """Forgets `key`."""
        self._coldest_first.pop(key, None)

    def victims(self) -> Iterator[str]:
        """Every key once, coldest first; see `EvictionPolicy.victims`."""
        return walk(self._coldest_first)


def walk(queue: OrderedDict[_Item, None]) -> Iterator[_Item]:
    """Everything in `queue` once, from its first on; what leaves it before its turn is not given."""
    given: set[_Item] = set()
    look = _FIRST_LOOK
    # An OrderedDict must not change while it is iterated, and a copy of a million keys for the sake of
    # one victim is too dear. Looks that double cost no more than one pass, whatever the caller leaves.
    while True:
        ahead = list(islice(queue, look))
        for item in ahead:
            if item not in given and item in queue:
                given.add(item)
                yield item
        if len(ahead) < look:
            return
        look *= 2
