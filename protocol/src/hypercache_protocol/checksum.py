"""CRC-32 with zlib's polynomial, from the fastest library at hand.

Both libraries let go of the interpreter lock while they sum long data (a test holds them to that), so worker
threads sum their chunks at the same time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

Crc32 = Callable[..., int]
"""Of (data), or of (data, crc) to go on from `crc`; unsigned."""


def fastest() -> tuple[str, Crc32]:
    """The library's name and its function, which is C's own: a start sums each record of a catalog."""
    try:
        from isal import isal_zlib
    except ImportError:  # it comes with extras; zlib gives the same value, some ten times slower
        return "zlib", zlib.crc32
    return "isal", isal_zlib.crc32


LIBRARY, crc32 = fastest()
