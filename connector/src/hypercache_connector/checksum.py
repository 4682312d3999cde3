"""CRC-32 with zlib's polynomial, from the fastest library at hand.

Both libraries let go of the interpreter lock while they compute (a test holds them to that), so worker
threads sum their chunks at the same time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

Crc32Function = Callable[[memoryview], int]


def _fastest() -> tuple[str, Crc32Function]:
    try:
        from isal import isal_zlib
    except ImportError:  # an optional extra; zlib gives the same value, some ten times slower
        return "zlib", zlib.crc32
    return "isal", isal_zlib.crc32


LIBRARY, _crc32 = _fastest()


def crc32(data: memoryview) -> int:
    """The CRC-32 of `data`, unsigned."""
    return _crc32(data)
