"""What an old client sees of the backend behind the cache."""

from __future__ import annotations

import time
from typing import Any

import hypercache
from hypercache import HyperCacheFileSystem
from hypercache.client import HyperCacheClient

from ..payloads import payload, require_same
from .client_calls import get, put

DEADLINE_S = 30.0


def write_back(socket_path: str, uri: str, size_bytes: int) -> list[str]:
    """Write, wait until the backend has it, drop it here, and get it back by asking for it."""
    with HyperCacheClient(socket_path) as client:
        put(client, uri, payload(uri, size_bytes))
        seen = _wait_until_synced(client, uri)
        assert client.evict(uri)
        assert not client.locate(uri, auto_ingest=False).is_hit
        require_same(get(client, uri, auto_ingest=True) or b"", payload(uri, size_bytes))
        return seen


def _wait_until_synced(client: Any, uri: str) -> list[str]:
    seen: list[str] = []
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        status = client.get_write_status(uri)
        if not seen or seen[-1] != status["status"]:
            seen.append(status["status"])
        if status["status"] == "SYNCED_BACKEND":
            assert status["progress_percent"] == 100.0, status
            return seen
        time.sleep(0.01)
    raise AssertionError(f"the backend did not get {uri} in time: {seen}")


def write_through(socket_path: str, uri: str, size_bytes: int) -> str:
    """Write a file through: when close returns the backend has it."""
    fs = HyperCacheFileSystem(socket_path=socket_path)
    with fs.open(uri, "wb", write_through=True) as file:
        file.write(payload(uri, size_bytes))
    with HyperCacheClient(socket_path) as client:
        return str(client.get_write_status(uri)["status"])


def keep_here(socket_path: str, uri: str, size_bytes: int) -> str:
    """Write with auto_flush_s3 false; gives the status that it then has."""
    with HyperCacheClient(socket_path) as client:
        put(client, uri, payload(uri, size_bytes), auto_flush_s3=False)
        return str(client.get_write_status(uri)["status"])


def ingest(socket_path: str, uri: str, origin: str, size_bytes: int, how: str) -> None:
    """Get an object that lies at `uri` outside the cache, in each of the ways that the package has."""
    want = payload(origin, size_bytes)
    with HyperCacheClient(socket_path) as client:
        assert not client.locate(uri, auto_ingest=False).is_hit
        match how:
            case "ingest":
                assert client.ingest(uri, pinned=True).is_hit
            case "ingest to ram":
                assert {chunk.tier for chunk in client.ingest(uri, tier="RAM").chunk_layout} == {"ram"}
            case "preload":
                assert hypercache.preload(uri, socket_path=socket_path).is_hit
            case "open":
                require_same(HyperCacheFileSystem(socket_path=socket_path).cat_file(uri), want)
            case _:
                assert client.locate(uri).is_hit
        data = get(client, uri)
        require_same(b"" if data is None else data, want)


def ingest_refused(socket_path: str, uri: str) -> list[str | None]:
    """What ingest says of a place that it may not, or can't, read."""
    with HyperCacheClient(socket_path) as client:
        result = client.ingest(uri)
        return [result.status, result.error_message]
