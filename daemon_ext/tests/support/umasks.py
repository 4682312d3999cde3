"""The process's umask, which daemons are started under and must not depend on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Files are made under this umask meanwhile."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
