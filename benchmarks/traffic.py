"""Loads and stores alone and together: how much is moved, and what the figures are called.

lmcache_traffic.py does it with LMCache's adapters, fio.py with fio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LOAD_ALONE, STORE_ALONE = "load alone", "store alone"
LOAD_BESIDE, STORE_BESIDE = "load beside stores", "store beside loads"
SHARES = {LOAD_BESIDE: LOAD_ALONE, STORE_BESIDE: STORE_ALONE}
"""What is compared with what: each rate beside the other direction with that of its own alone."""

Rates = Mapping[str, float]
"""GB/s by these names."""


@dataclass(frozen=True)
class Traffic:
    """Batches of `keys` objects, `in_flight` of them under way in each direction.

    Args:
        loaded: how many objects the loads go round.
        store_batches: how many a window stores at most; it ends earlier then.
    """

    object_bytes: int
    keys: int
    in_flight: int
    loaded: int
    store_batches: int
    window_s: float

    @property
    def batch_bytes(self) -> int:
        """The bytes of one batch."""
        return self.keys * self.object_bytes

    @property
    def stored_bytes(self) -> int:
        """All that is ever stored: what is loaded, and two windows."""
        return self.loaded * self.object_bytes + 2 * self.store_batches * self.batch_bytes
