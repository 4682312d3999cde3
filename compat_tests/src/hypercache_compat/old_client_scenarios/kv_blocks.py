"""The KV store: blocks of bytes and tensors on both tiers."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from hypercache import HyperCacheKVStore

from ..payloads import payload, require_same


def put_and_get(socket_path: str, key: str, size_bytes: int, tier: str) -> dict[str, Any]:
    """Store a block given as bytes, bytearray and memoryview; get it back each time."""
    store = HyperCacheKVStore(socket_path, default_tier=tier)
    data = payload(key, size_bytes)
    for number, given in enumerate((data, bytearray(data), memoryview(data))):
        assert not store.exists_kv_block(f"{key}-{number}")
        assert store.put_kv_block(f"{key}-{number}", given)
        assert store.exists_kv_block(f"{key}-{number}")
        require_same(store.get_kv_block(f"{key}-{number}"), data)
    located = store._client.locate(store._make_uri(f"{key}-0"), auto_ingest=False)
    absent = store.get_kv_block(f"{key}-absent")
    store.close()
    return {"tiers": sorted({chunk.tier for chunk in located.chunk_layout}), "absent": absent}


def replace(socket_path: str, key: str, sizes: list[int], tier: str) -> None:
    """Store several blocks under one key, one after the other: the newest is what there is."""
    store = HyperCacheKVStore(socket_path, default_tier=tier)
    for number, size_bytes in enumerate(sizes):
        data = payload(f"{key}{number}", size_bytes)
        assert store.put_kv_block(key, data)
        require_same(store.get_kv_block(key), data)
    store.close()


def tensors(socket_path: str, prefix: str, tier: str) -> None:
    """Tensors of several types go in and come back, as bytes and into a tensor that is there already."""
    store = HyperCacheKVStore(socket_path, default_tier=tier)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
        tensor = torch.arange(3 * 257 * 129).reshape(3, 257, 129).to(dtype)
        key = store.compute_prefix_hash(range(256), model_id=f"{prefix}{dtype}", layer_idx=3)
        assert store.put_kv_block(key, tensor, pinned=True)
        into = torch.zeros_like(tensor)
        assert store.get_kv_block(key, out_tensor=into) is into
        assert torch.equal(into, tensor)
    store.close()


def put(socket_path: str, key: str, size_bytes: int, tier: str) -> bool:
    """Store the payload of `key`."""
    store = HyperCacheKVStore(socket_path, default_tier=tier)
    stored = store.put_kv_block(key, payload(key, size_bytes))
    store.close()
    return bool(stored)


def get(socket_path: str, key: str, size_bytes: int) -> bool:
    """Is the block there? Where it is, its bytes are compared."""
    store = HyperCacheKVStore(socket_path)
    data = store.get_kv_block(key)
    store.close()
    if data is not None:
        require_same(data, payload(key, size_bytes))
    return data is not None


def get_tensor(socket_path: str, key: str, dtype: str, shape: list[int]) -> bool:
    """Is the block there? Where it is, it is filled into a tensor and that must count up from 0."""
    store = HyperCacheKVStore(socket_path)
    want = torch.arange(math.prod(shape)).reshape(shape).to(getattr(torch, dtype))
    into = torch.zeros_like(want)
    got = store.get_kv_block(key, out_tensor=into)
    store.close()
    assert got is None or torch.equal(into, want)
    return got is into


def prefix_hash(token_ids: list[int], **named: Any) -> str:
    """The key of a prefix."""
    return str(HyperCacheKVStore.compute_prefix_hash(token_ids, **named))


def signatures() -> dict[str, list[list[str]]]:
    """The name and the default of every parameter of every public method."""
    methods = inspect.getmembers(HyperCacheKVStore, inspect.isfunction)
    return {
        name: [[each.name, repr(each.default)] for each in inspect.signature(method).parameters.values()]
        for name, method in methods
        if name == "__init__" or not name.startswith("_")
    }
