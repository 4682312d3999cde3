"""A catalog as a start has it that found nothing wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hypercache_daemon.catalog import Catalog


@contextmanager
def opened(path: Path, pool_id: str) -> Iterator[Catalog]:
    """A catalog that may be written."""
    with closing(Catalog.open(path, pool_id)) as catalog:
        with catalog.checked():
            pass
        yield catalog
