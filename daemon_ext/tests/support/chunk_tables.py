"""Chunks as the columns that a catalog is loaded from."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hypercache_daemon.core.extents import EXTENT_COLUMNS, Extent, ExtentTable, packed


def table_of(chunks: Iterable[Extent]) -> ExtentTable:
    """These chunks, in their order."""
    return np.frombuffer(packed(chunks), EXTENT_COLUMNS)
