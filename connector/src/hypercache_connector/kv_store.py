"""Blocks for Python programs without LMCache: the connector's engine, called and waited for.

Rules:
1. A fault of the daemon, of a device or of the stored bytes is a miss or a False, and counted. Only a wrong
   call raises: a bad key, a bad buffer, a store that another process made. Nothing of its batch is done then.
2. Names, positions and defaults are those of hypercache-io's HyperCacheKVStore where it has them, and so are
   the uris: docs/kv_store.md says what differs.
3. A block is local-only unless the store writes through; no read ever asks a backend.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, NoReturn
from weakref import finalize

import numpy as np
from pydantic import TypeAdapter, ValidationError

from hypercache_protocol import Tier
from hypercache_protocol.fields import MAX_URI_BYTES, Uri

from .config import KVStoreConfig, checked, find_socket
from .direct_io import Buffer, own_pages, sharing
from .engine import close_engine, located, open_engine, report, require_home
from .layouts import Answer, Found, doubt_about
from .memory import buffer_of
from .outcomes import Outcome, which_are_good
from .storing import store
from .transfers import delete, load, load_located, lookup

_WRITE_THROUGH_TIMEOUT_S = 120.0
"""The daemon answers a commit that is written through once the backend has the block."""

_URI: TypeAdapter[str] = TypeAdapter(Uri)


class KVStore:
    """Puts and gets blocks by key, from any number of threads of the process that made it.

    Args:
        socket_path: the daemon's socket; None takes the first that is there of
            /run/hypercache/hypercache.sock, /tmp/hypercache/hypercache.sock and /tmp/hypercache.sock.
        default_tier: "ram" or "nvme", where blocks are put; they are got from either.
        prefer_gds: changes nothing: blocks move between devices and the CPU's memory only.
        write_through: a put is a success once the daemon's backend has the block too.
        settings: any other parameter of `KVStoreConfig`: `overwrite`, `direct_io`, `wire`, `timeout_s` …

    Raises:
        ConfigError: a parameter is wrong. A daemon that is down is no error.
    """

    KV_URI_PREFIX = "hypercache://kv_cache"
    _MAX_KEY_BYTES = MAX_URI_BYTES - len(f"{KV_URI_PREFIX}/.kv")

    def __init__(
        self,
        socket_path: str | PathLike[str] | None = None,
        default_tier: str = "ram",
        prefer_gds: bool = True,
        write_through: bool = False,
        **settings: Any,
    ) -> None:
        if write_through:
            settings.setdefault("timeout_s", _WRITE_THROUGH_TIMEOUT_S)
        self.prefer_gds = prefer_gds
        given = {
            **settings,
            "socket_path": find_socket() if socket_path is None else socket_path,
            "default_tier": _any_case(default_tier),
            "write_through": write_through,
        }
        checked_settings = checked(KVStoreConfig, given, "KVStore")
        self.socket_path = checked_settings.socket_path
        self.default_tier = checked_settings.default_tier.value
        self.write_through = checked_settings.write_through
        self._engine = replace(
            open_engine(checked_settings),
            overwrite=checked_settings.overwrite,
            write_through=checked_settings.write_through,
            offers_seals=False,
        )
        # A store that is forgotten is not closed, but its threads end: they refer to no part of it but these.
        for workers in (self._engine.readers, self._engine.writers):
            finalize(self, workers.close).atexit = False

    # -- one block ---------------------------------------------------------------------------------------

    def put(self, block_key: str, kv_data: object, tier: str | None = None, pinned: bool = False) -> bool:
        """Store `kv_data` under `block_key`; see `put_many`."""
        return self.put_many([block_key], [kv_data], tier, pinned)[0]

    def get(self, block_key: str, out_tensor: Any = None) -> Any:
        """The block as new bytes, or `out_tensor` filled with it, or None on a miss; see `get_many`."""
        return self.get_many([block_key], None if out_tensor is None else [out_tensor])[0]

    def exists(self, block_key: str) -> bool:
        """Whether a `get` could verify the block now; see `exists_many`."""
        return self.exists_many([block_key])[0]

    def delete(self, block_key: str) -> bool:
        """Whether the block is gone now; see `delete_many`."""
        return self.delete_many([block_key])[0]

    put_kv_block = put
    get_kv_block = get
    exists_kv_block = exists

    # -- batches -----------------------------------------------------------------------------------------

    def put_many(
        self,
        block_keys: Iterable[str],
        kv_data: Iterable[object],
        tier: str | None = None,
        pinned: bool = False,
    ) -> list[bool]:
        """Store each block under its key, all side by side. True where the commit was acknowledged, or the
        same key is there in the same size and `overwrite` is off.

        Args:
            kv_data: contiguous memory of the CPU: bytes-like, numpy arrays, torch tensors of any dtype.
            tier: "ram" or "nvme" instead of `default_tier`; without a RAM tier the daemon takes its devices.
            pinned: whether the daemon must never evict them by itself.

        Raises:
            TypeError, ValueError: a key, a block or the tier can't be used; nothing was stored.
        """
        keys = _listed(block_keys)
        uris = self._uris(keys)
        buffers = _buffers("kv_data", keys, list(kv_data), writable=False)
        where = replace(self._engine, tier=_tier(tier or self.default_tier), pinned=_flag("pinned", pinned))
        return which_are_good(store(where, uris, buffers))

    def get_many(self, block_keys: Iterable[str], out_tensors: Iterable[Any] | None = None) -> list[Any]:
        """Each block as new bytes, or its item of `out_tensors` filled with it; None where it is a miss: the
        block is absent, only staged, without checksums, damaged, of another size than what is to be filled,
        or can't be read in time.

        Args:
            out_tensors: one writable, contiguous memory of the CPU for each key, of exactly its block's size
                in bytes and none of it another one's. What one holds after a miss is undefined.

        Raises:
            TypeError, ValueError: a key or a memory can't be used; nothing was read.
        """
        keys = _listed(block_keys)
        uris = self._uris(keys)
        if out_tensors is not None:
            outs = list(out_tensors)
            outcomes = load(self._engine, uris, _targets(keys, outs))
            return [out if outcome.good else None for out, outcome in zip(outs, outcomes, strict=True)]
        rooms = [_with_room(answer) for answer in located(self._engine, uris)]
        hits, buffers = [hit for hit, _ in rooms], [buffer for _, buffer in rooms]
        blocks: list[bytes | None] = [None] * len(keys)
        load_located(self._engine, uris, hits, buffers, partial(self._take, buffers, blocks))
        return blocks

    def exists_many(self, block_keys: Iterable[str]) -> list[bool]:
        """Whether a `get` of each could verify it now. It may be evicted before one: a miss.

        Raises:
            TypeError, ValueError: a key can't be used.
        """
        return which_are_good(lookup(self._engine, self._uris(_listed(block_keys))))

    def delete_many(self, block_keys: Iterable[str]) -> list[bool]:
        """Delete each block from the cache, pinned or not. True where there is none now, also where there was
        none before; False where the daemon could not be asked or refused.

        Raises:
            TypeError, ValueError: a key can't be used; nothing was deleted.
        """
        outcomes = delete(self._engine, self._uris(_listed(block_keys)))
        return [outcome in (Outcome.OK, Outcome.ABSENT) for outcome in outcomes]

    # -- about it ----------------------------------------------------------------------------------------

    @staticmethod
    def compute_prefix_hash(
        token_ids: Iterable[int], model_id: str = "default", layer_idx: int | None = None
    ) -> str:
        """The key for the block of a token prefix: the same hexadecimal SHA-256 as hypercache-io's. The ids
        are taken as `str` writes them, so those of a torch tensor (not of its `tolist()`) make another key.

        Raises:
            TypeError: `model_id` is no text, or `token_ids` are not many.
        """
        if not isinstance(model_id, str):
            raise TypeError(f"model_id is a str, not {type(model_id).__name__}")
        layer = "" if layer_idx is None else f"layer_{layer_idx}::"
        text = f"{model_id}::{layer}{','.join(map(str, token_ids))}"
        return hashlib.sha256(text.encode()).hexdigest()

    def status(self) -> dict[str, Any]:
        """Counts per reason, and how the daemon is; connector/README.md explains each."""
        require_home(self._engine, "KVStore")
        return report(self._engine)

    def close(self) -> None:
        """Stop, from any thread and any number of times: what other threads have under way ends as misses.
        In a forked child it does nothing, for all of it is the parent's."""
        if self._engine.is_at_home:
            close_engine(self._engine)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a KVStore has threads and connections of this process and cannot be copied or pickled: "
            "make one in each process"
        )

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the parts of a call -----------------------------------------------------------------------------

    def _uris(self, block_keys: Sequence[str]) -> list[str]:
        require_home(self._engine, "KVStore")
        return [self._uri(key) for key in block_keys]

    def _take(self, buffers: Sequence[Buffer], blocks: list[bytes | None], index: int) -> Outcome:
        """Copy what was loaded into a buffer to its place in `blocks`."""
        try:
            blocks[index] = bytes(buffers[index].view)
        except MemoryError:  # of this block alone: another one may be smaller
            self._engine.log.note("memory", "no memory for a block of %d bytes", buffers[index].size_bytes)
            return Outcome.NO_MEMORY
        return Outcome.OK

    def _uri(self, block_key: str) -> str:
        if not isinstance(block_key, str):
            raise TypeError(f"a block's key is a str, not {type(block_key).__name__}")
        whole = block_key.startswith("hypercache://")
        try:
            # Not formatted: what a member of an enum of texts then is depends on the version of Python.
            return _URI.validate_python(
                block_key if whole else "".join((self.KV_URI_PREFIX, "/", block_key, ".kv"))
            )
        except ValidationError:
            raise ValueError(
                f"the key {block_key[:80]!r} makes no uri: give one without NUL, and of at most "
                f"{MAX_URI_BYTES if whole else self._MAX_KEY_BYTES} bytes of UTF-8"
            ) from None


def _listed(block_keys: Iterable[str]) -> list[str]:
    if isinstance(block_keys, str):
        raise TypeError("block_keys is a sequence of keys, not one key")
    return list(block_keys)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, not {value!r}"[:200])
    return bool(value)


def _any_case(word: object) -> object:
    """Tiers are taken in capitals too, as hypercache-io takes them."""
    return word.lower() if isinstance(word, str) else word


def _tier(word: str) -> Tier:
    try:
        return Tier(_any_case(word))
    except ValueError:
        raise ValueError(f"tier must be one of 'nvme', 'ram', not {word!r}") from None


def _targets(block_keys: Sequence[str], out_tensors: Sequence[object]) -> list[Buffer]:
    buffers = _buffers("out_tensors", block_keys, out_tensors, writable=True)
    for one, other in sharing(buffers).items():
        raise ValueError(
            f"{block_keys[one][:80]!r}: it shares memory with what {block_keys[other][:80]!r} is to fill: "
            "give each key memory of its own"
        )
    return buffers


def _buffers(
    name: str, block_keys: Sequence[str], sources: Sequence[object], *, writable: bool
) -> list[Buffer]:
    if len(sources) != len(block_keys):
        raise ValueError(f"{name} has {len(sources)} items for {len(block_keys)} keys; give one for each")
    return [_buffer(key, source, writable) for key, source in zip(block_keys, sources, strict=True)]


def _buffer(block_key: str, source: object, writable: bool) -> Buffer:
    try:
        return buffer_of(source, writable=writable)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{block_key[:80]!r}: {error}") from None


def _with_room(answer: Answer) -> tuple[Answer, Buffer]:
    """What was located, and memory for it, on pages of its own so that it moves past the page cache without a
    copy. Or the reason why it is a miss: no memory is taken on the say-so of a size alone, and there may be
    none to be had."""
    doubt = doubt_about(answer)
    size_bytes = answer.size_bytes if doubt is Outcome.OK and isinstance(answer, Found) else 0
    try:
        room = Buffer(own_pages(size_bytes) if size_bytes else bytearray(), writable=True)
    except OSError:
        return Outcome.NO_MEMORY, Buffer(bytearray(), writable=True)
    return answer if doubt is Outcome.OK else doubt, room
