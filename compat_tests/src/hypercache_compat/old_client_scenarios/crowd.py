"""Many clients at once in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypercache.client import HyperCacheClient

from ..payloads import payload, require_same
from .client_calls import get, put

SIZES = (1, 1920, 4096, 70_000, 1_048_576, 4_194_305)


def write_and_read(socket_path: str, prefix: str, clients: int, rounds: int) -> int:
    """`clients` threads, each with a connection of its own, write, read, replace and evict at the same time.

    Every byte is compared. Gives how many objects were read.
    """
    with ThreadPoolExecutor(clients) as pool:
        counts = pool.map(
            lambda number: _one_client(socket_path, f"{prefix}/{number}", rounds), range(clients)
        )
        return sum(counts)


def _one_client(socket_path: str, prefix: str, rounds: int) -> int:
    read = 0
    with HyperCacheClient(socket_path) as client:
        for number in range(rounds):
            size_bytes = SIZES[number % len(SIZES)]
            uri, tier = f"{prefix}/{number % 7}", "ram" if number % 5 == 0 else "nvme"
            data = payload(f"{uri}{number}", size_bytes)
            put(client, uri, data, tier=tier, auto_flush_s3=False)
            require_same(get(client, uri), data)
            read += 1
            if number % 4 == 3:
                assert client.evict(uri)
                assert get(client, uri) is None
    return read
