"""The backend: the authoritative store behind the cache, and the places that ingest may read.

Synchronous; called from worker threads, from any number at once. Rules:

- `hypercache://a/b` lies at `<backend>/a/b`; `backend_names` has the mapping and its escapes.
- Any other uri names its own place. It is read from and flushed to only where that place lies under one of
  the operator's prefixes or the backend's own root, compared by scheme, host and whole segments.
- Schemes are a closed list, since each has its own way to misread a name and to show half an object:
  `file` (a folder), `nfs` (`nfs://host/export=/mount/point`: a share that is mounted here already), `s3` and
  `s3a` (needs s3fs), `memory`. A new one is a row in `_open_store`, and tests against its server.
- An upload is verified (size, and sha256 where given) before it becomes visible; its size is asked back.
- Every failure is a BackendError of one sentence, which names the target and no credentials.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .backend_local import LocalStore
from .backend_names import (
    HYPERCACHE,
    Place,
    Refusal,
    StoreError,
    object_path,
    parse_root,
    parse_uri,
    without_credentials,
)

REQUEST_TIMEOUT_S = 60.0
_MAX_REASON = 300
_SECRET_OPTIONS = ("key", "secret", "token", "password", "passwd", "credential")


class BackendError(Exception):
    """The backend cannot do what was asked: one sentence that names the target, without credentials."""


class ObjectStore(Protocol):
    """What a kind of store does; paths are under its root and hold no surprises. Raises anything."""

    def fits(self, path: str, /) -> bool:
        """Whether the store can have an object of this name."""

    def size_bytes(self, path: str, /) -> int | None:
        """The size of the object; None where there is none."""

    def download(self, path: str, /) -> tuple[int, Iterator[bytes]]:
        """Its size in bytes, and its pieces of at most 4 MiB. FileNotFoundError where there is none."""

    def upload(self, path: str, pieces: Iterable[bytes], size_bytes: int, /) -> None:
        """Makes the object visible, whole, once `pieces` ended without an exception."""


@dataclass(frozen=True)
class Target:
    """One object's place in a store; `url` is for people and logs."""

    url: str
    path: str
    store: ObjectStore = field(repr=False)


@dataclass(frozen=True)
class _Root:
    place: Place
    store: ObjectStore


class Backend:
    """The authoritative store at `url`, and the places under `ingest_prefixes`.

    Args:
        url: `file:///folder`, a plain absolute or relative folder, `s3://bucket/prefix`, `memory://name`,
            `nfs://host/export=/mount/point`; None for no backend.
        ingest_prefixes: URLs of the same kinds under which clients' uris may name their own place.
        storage_options: what s3fs takes (endpoint_url, key, secret …); for every S3 place.
        request_timeout_s: the longest that one exchange with a remote store may take. An upload or download
            is one exchange per 32 or 16 MiB; one that fails takes another to clean up.

    Nothing is read or written yet: a store that is away is noticed by the first call. Raises BackendError.
    """

    def __init__(
        self,
        url: str | None,
        ingest_prefixes: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
        *,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._options = dict(storage_options or {})
        self._secrets = sorted(_secrets(self._options), key=len, reverse=True)
        self._request_timeout_s = request_timeout_s
        self._root = None if url is None else self._open_root("backend", _as_url(url))
        roots = [self._open_root("ingest prefix", prefix) for prefix in ingest_prefixes]
        if self._root is not None:
            roots.append(self._root)
        # The deepest first: a prefix inside another may be mounted elsewhere.
        self._roots = sorted(roots, key=lambda root: len(root.place.segments), reverse=True)

    def upload_target(self, uri: str) -> Target | None:
        """Where an object of this uri is flushed; None for nowhere, and `refusal` says why."""
        place = self._place(uri)
        return place if isinstance(place, Target) else None

    def ingest_source(self, uri: str) -> Target | None:
        """Where an object of this uri may be fetched from; None for nowhere, and `refusal` says why."""
        return self.upload_target(uri)

    def refusal(self, uri: str) -> str | None:
        """Why this uri has no place, as half a sentence ("it has no scheme"); None where it has one."""
        place = self._place(uri)
        return place.reason if isinstance(place, Refusal) else None

    def size_bytes(self, target: Target) -> int | None:
        """The size of the object there; None where there is none. Raises BackendError."""
        with self._failures_named("look for", target):
            return target.store.size_bytes(target.path)

    def upload(
        self, target: Target, pieces: Iterable[bytes], size_bytes: int, sha256: str | None = None
    ) -> None:
        """Puts the object there, replacing any; returns once the store confirmed its size.

        Readers of the store see the former object or the whole new one. If anything fails nothing changed,
        but for one case: the store did the last step and its answer got lost.

        Args:
            size_bytes: what `pieces` must add up to.
            sha256: hexadecimal; what `pieces` must hash to.

        Raises: BackendError; and as it is whatever `pieces` raises, for which the backend is not to blame.
        """
        try:
            with self._failures_named("upload", target):
                target.store.upload(target.path, _checked(pieces, size_bytes, sha256), size_bytes)
                confirmed = target.store.size_bytes(target.path)
                if confirmed != size_bytes:
                    raise StoreError(f"the store has {confirmed} bytes of it afterwards, not {size_bytes}")
        except _PiecesFailed as failure:
            raise failure.cause from None

    def download(self, target: Target) -> tuple[int, Iterator[bytes]]:
        """The object's size in bytes, and its bytes in pieces of at most 4 MiB.

        The last piece comes only once the object is known not to have changed meanwhile, so pieces that add
        up to the size are the object. Raises BackendError, from the iterator too.
        """
        with self._failures_named("download", target):
            size_bytes, pieces = target.store.download(target.path)
        return size_bytes, self._guarded(target, pieces)

    def _guarded(self, target: Target, pieces: Iterator[bytes]) -> Iterator[bytes]:
        with self._failures_named("download", target):
            yield from pieces

    def _place(self, uri: str) -> Target | Refusal:
        if not uri.startswith(HYPERCACHE):
            return self._named_place(uri)
        if self._root is None:
            return Refusal("there is no backend; start the daemon with --backend URL")
        path = object_path(uri)
        return path if isinstance(path, Refusal) else _target(self._root, path)

    def _named_place(self, uri: str) -> Target | Refusal:
        place = parse_uri(uri)
        if isinstance(place, Refusal):
            return place
        for root in self._roots:
            if path := place.below(root.place):
                return _target(root, path)
        return Refusal("it lies under none of the places that the configuration allows")

    def _open_root(self, what: str, url: str) -> _Root:
        try:
            place, folder = parse_root(url)
            return _Root(place, self._open_store(place, folder))
        except Exception as error:  # drivers raise anything on options they don't like
            shown = without_credentials(url)
            raise BackendError(f"cannot use {what} {shown}: {self._reason(error)}") from error

    def _open_store(self, place: Place, folder: str) -> ObjectStore:
        match place.scheme:
            case "file" | "nfs":
                return LocalStore(folder)
            case "s3" | "s3a" | "memory":
                return self._open_object_store(place)
            case unknown:
                raise StoreError(f"the scheme {unknown} is not supported; use file, nfs, s3, s3a or memory")

    def _open_object_store(self, place: Place) -> ObjectStore:
        # fsspec is a sixth of what a start imports, and clients wait for a daemon that is being upgraded.
        from .backend_object import MemoryStore, S3Store

        if place.scheme == "memory":
            return MemoryStore(place.url)
        return S3Store(place.url, self._options, self._request_timeout_s)

    @contextmanager
    def _failures_named(self, doing: str, target: Target) -> Iterator[None]:
        try:
            yield
        except _PiecesFailed:
            raise
        except Exception as error:  # the boundary to drivers, which raise anything
            raise BackendError(f"cannot {doing} {target.url}: {self._reason(error)}") from error

    def _reason(self, error: Exception) -> str:
        text = without_credentials(_in_words(error, self._request_timeout_s))
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text[:_MAX_REASON]


class _PiecesFailed(Exception):
    """Carries an exception of the uploaded pieces' source past the boundary to the drivers."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _checked(pieces: Iterable[bytes], size_bytes: int, sha256: str | None) -> Iterator[bytes]:
    """The pieces; raises instead of ending where they don't add up, so that no store makes them visible."""
    digest = hashlib.sha256() if sha256 is not None else None
    total_bytes = 0
    for piece in _from_source(pieces):
        total_bytes += len(piece)
        if total_bytes > size_bytes:
            break
        if digest is not None:
            digest.update(piece)
        yield piece
    if total_bytes != size_bytes:
        more = "more" if total_bytes > size_bytes else f"{total_bytes}"
        raise StoreError(f"its pieces have {more} bytes, not {size_bytes}")
    if digest is not None and sha256 is not None and digest.hexdigest() != sha256.lower():
        raise StoreError(f"its bytes have the sha256 {digest.hexdigest()}, not {sha256.lower()}")


def _from_source(pieces: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from pieces
    except Exception as error:  # raised again, as it is, by upload
        raise _PiecesFailed(error) from error


def _target(root: _Root, path: str) -> Target | Refusal:
    if not root.store.fits(path):
        return Refusal("its name is too long for the store")
    return Target(f"{root.place.url}/{path}", path, root.store)


def _as_url(url: str) -> str:
    return url if "://" in url else f"file://{Path(url).absolute()}"


def _in_words(error: Exception, request_timeout_s: float) -> str:
    match error:
        case StoreError():
            return str(error)
        case FileNotFoundError():
            return "it is not there"
        case _ if _is_late(error):
            return f"no answer within {request_timeout_s:g} s"
        case OSError(strerror=str(words)) if words:
            return words
        case _:
            first_line = str(error).strip().partition("\n")[0]
            return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def _is_late(error: Exception) -> bool:
    # By its name: fsspec is imported only where a store needs it, and its own is none on Python 3.10.
    return isinstance(error, TimeoutError) or type(error).__name__ == "FSTimeoutError"


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, str) and value and any(word in name.lower() for word in _SECRET_OPTIONS):
            yield value
