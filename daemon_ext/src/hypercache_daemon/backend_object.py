"""Objects in stores that fsspec drives: S3 (by s3fs), and the memory of this process.

Rules:

- No listing is cached and no file system object shared, so what another host wrote is seen at once.
- An object becomes visible by one put, or by completing a multipart upload; before that it is discarded, not
  closed, where anything is wrong (closing one of fsspec's files commits what was written so far). A crash may
  leave an unfinished multipart upload: the bucket should have a lifecycle rule that aborts those.
- Every exchange with S3 has a deadline of its own on top of the driver's time limits, because those don't
  start before a request body was sent, and start again with every byte of a reply.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fsspec.core import url_to_fs

from .backend_names import StoreError

PIECE_BYTES = 4 * 1024 * 1024
_BLOCK_BYTES = 16 * 1024 * 1024
"""Read by one request."""
PART_BYTES = 32 * 1024 * 1024
"""Up to this an object is put by one request, above it in parts of at least this."""
_MAX_PARTS = 9_000  # S3 allows 10,000
_MAX_KEY_BYTES = 1024
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 20.0
_STAMP = ("size", "ETag", "LastModified", "VersionId", "created")

_log = logging.getLogger(__name__)

# fsspec's memory files share one position between all readers, and appear before they are written.
_memory_lock = threading.Lock()


class MemoryStore:
    """The objects under `url` in fsspec's memory file system: for demonstrations and tests."""

    def __init__(self, url: str) -> None:
        self._fs, self._root = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)

    def fits(self, _path: str) -> bool:
        return True

    def size_bytes(self, path: str) -> int | None:
        with _memory_lock:
            return _file_size(self._fs, f"{self._root}/{path}")

    def download(self, path: str) -> tuple[int, Iterator[bytes]]:
        with _memory_lock:
            whole: bytes = self._fs.cat_file(f"{self._root}/{path}")
        return len(whole), _cut(whole)

    def upload(self, path: str, pieces: Iterable[bytes], _size_bytes: int) -> None:
        whole = b"".join(pieces)
        with _memory_lock:
            self._fs.pipe_file(f"{self._root}/{path}", whole)


class S3Store:
    """The objects under `url` (`s3://bucket/prefix`), reached by s3fs with the given options.

    Args:
        request_timeout_s: how long one exchange may take; also cuts off the driver's own repetitions.
    """

    def __init__(self, url: str, options: Mapping[str, Any], request_timeout_s: float) -> None:
        if not url.partition("://")[2].strip("/"):
            raise StoreError("it names no bucket; write s3://bucket or s3://bucket/prefix")
        limited = {
            **options,
            "config_kwargs": _limits(request_timeout_s) | dict(options.get("config_kwargs", {})),
        }
        try:
            fs, root = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **limited)
        except ImportError as error:
            raise StoreError('its driver s3fs is missing; run: pip install "hypercache-ext[s3]"') from error
        fs.retries = 1  # whoever calls repeats, with a backoff that does not hold a thread
        for name in ("call_s3", "abort_mpu"):  # its files call these without a deadline; this gives them one
            if hasattr(fs, name):  # older s3fs have only the first
                setattr(fs, name, functools.partial(getattr(fs, name), timeout=request_timeout_s))
        self._fs, self._root = fs, root
        self._deadline = {"timeout": request_timeout_s}

    def fits(self, path: str) -> bool:
        key = f"{self._root}/{path}".partition("/")[2]
        return len(key.encode()) <= _MAX_KEY_BYTES

    def size_bytes(self, path: str) -> int | None:
        return _file_size(self._fs, f"{self._root}/{path}", **self._deadline)

    def download(self, path: str) -> tuple[int, Iterator[bytes]]:
        full = f"{self._root}/{path}"
        before = self._stamp(full)
        return before["size"], self._pieces(full, before)

    def upload(self, path: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        full = f"{self._root}/{path}"
        if size_bytes <= PART_BYTES:
            self._fs.pipe_file(full, b"".join(pieces), **self._deadline)
        else:
            self._upload_parts(full, pieces, max(PART_BYTES, -(-size_bytes // _MAX_PARTS)))

    def _upload_parts(self, full: str, pieces: Iterable[bytes], part_bytes: int) -> None:
        writer = self._fs.open(full, "wb", block_size=part_bytes, autocommit=False)
        try:
            for piece in pieces:
                writer.write(piece)
            writer.close()
            writer.commit()
        except BaseException:
            _discard(writer)
            raise

    def _stamp(self, full: str) -> dict[str, Any]:
        info = self._fs.info(full, **self._deadline)
        if info["type"] != "file":
            raise FileNotFoundError
        return {field: info.get(field) for field in _STAMP}

    def _pieces(self, full: str, before: dict[str, Any]) -> Iterator[bytes]:
        size_bytes: int = before["size"]
        for start in range(0, size_bytes, _BLOCK_BYTES):
            end = min(start + _BLOCK_BYTES, size_bytes)
            block: bytes = self._fs.cat_file(full, start=start, end=end, **self._deadline)
            # The last block is held back until the object is known to be what it was.
            if len(block) != end - start or (end == size_bytes and self._stamp(full) != before):
                raise StoreError("it changed while it was read")
            yield from _cut(block)


def _discard(writer: Any) -> None:
    writer.closed = True  # or its finalizer would go on with the upload
    try:
        writer.discard()
    except Exception as error:  # noqa: BLE001 - the upload's own error is the one to report
        _log.warning("an unfinished multipart upload stays behind: %s", type(error).__name__)


def _limits(request_timeout_s: float) -> dict[str, Any]:
    return {
        "connect_timeout": min(_CONNECT_TIMEOUT_S, request_timeout_s),
        "read_timeout": min(_READ_TIMEOUT_S, request_timeout_s),
        "retries": {"mode": "standard", "total_max_attempts": 2},
        "max_pool_connections": 64,
    }


def _file_size(fs: Any, full: str, **deadline: float) -> int | None:
    try:
        info = fs.info(full, **deadline)
    except FileNotFoundError:
        return None
    return int(info["size"]) if info["type"] == "file" else None


def _cut(block: bytes) -> Iterator[bytes]:
    for start in range(0, len(block), PIECE_BYTES):
        yield block[start : start + PIECE_BYTES]
