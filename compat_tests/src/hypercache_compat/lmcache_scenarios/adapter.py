"""Store, look up, load and delete objects of mixed sizes through LMCache's adapter around the connector."""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lmcache
import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import wait_eventfd
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from ..lmcache_versions import connector_spec
from ..payloads import first_difference, payload

DEADLINE_S = 60.0
UNTOUCHED = 0xA5
LAYOUTS = {0: MemoryLayoutDesc(shapes=[], dtypes=[])}
"""What a lookup has to be given; these adapters don't look at it."""

_KEPT: dict[str, Any] = {}


def version() -> dict[str, str]:
    """Which LMCache this process has, and from where."""
    from importlib.metadata import version as installed

    return {"version": installed("lmcache"), "folder": str(Path(lmcache.__file__).parent)}


def create(spec: Mapping[str, object]) -> Any:
    """The adapter that LMCache makes of this part of its configuration."""
    config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))
    return create_l2_adapter(config.adapters[0])


def connect(socket_path: str, namespace: str, **parameters: object) -> str:
    """Make the adapter and keep it for the other scenarios; gives its class's name. `parameters` are further
    ones of the connector."""
    _KEPT["adapter"] = create(connector_spec(socket_path, namespace, **parameters))
    return type(_KEPT["adapter"]).__name__


def close() -> None:
    """Close the adapter."""
    _KEPT.pop("adapter").close()


def store(names: list[str], sizes: list[int], align_bytes: int = 4096) -> bool:
    """Store the payloads of `names` in one batch; did LMCache call the batch stored?"""
    adapter, objects = _KEPT["adapter"], memory_objects(sizes, align_bytes)
    for name, item in zip(names, objects, strict=True):
        item.raw_data.copy_(torch.frombuffer(bytearray(payload(name, item.get_size())), dtype=torch.uint8))
    task = adapter.submit_store_task(keys_of(names), objects)
    assert wait_eventfd(adapter.get_store_event_fd(), DEADLINE_S), "the store never completed"
    return bool(adapter.pop_completed_store_tasks()[task].is_successful())


def lookup(names: list[str]) -> list[bool]:
    """Which of `names` LMCache finds, asked in one batch."""
    adapter = _KEPT["adapter"]
    task = adapter.submit_lookup_and_lock_task(keys_of(names), LAYOUTS)
    assert wait_eventfd(adapter.get_lookup_and_lock_event_fd(), DEADLINE_S), "the lookup never completed"
    return bits(adapter.query_lookup_and_lock_result(task), len(names))


def load(names: list[str], sizes: list[int], align_bytes: int = 4096) -> dict[str, Any]:
    """Load `names` in one batch: which ones LMCache calls loaded, and what is wrong with any of those.

    Buffers begin filled with UNTOUCHED, so that a load that does nothing can't pass.
    """
    adapter, objects = _KEPT["adapter"], memory_objects(sizes, align_bytes)
    for item in objects:
        item.raw_data.fill_(UNTOUCHED)
    task = adapter.submit_load_task(keys_of(names), objects)
    assert wait_eventfd(adapter.get_load_event_fd(), DEADLINE_S), "the load never completed"
    loaded = bits(adapter.query_load_result(task), len(names))
    wrong = []
    for name, item, is_loaded in zip(names, objects, loaded, strict=True):
        difference = first_difference(item.raw_data.numpy(), payload(name, item.get_size()))
        if is_loaded and difference is not None:
            wrong.append(f"{name} ({item.get_size()} bytes): {difference}")
    return {"loaded": loaded, "wrong": wrong}


def delete(names: list[str]) -> int:
    """Delete `names`; gives how many bytes LMCache still counts as used."""
    adapter = _KEPT["adapter"]
    adapter.delete(keys_of(names))
    return int(adapter.get_usage().total_bytes_used)


def soak(socket_path: str, namespace: str, rounds: int) -> list[str]:
    """Store, load and delete batch after batch; gives whatever was wrong."""
    connect(socket_path, namespace)
    sizes = [4096, 4097, 1 << 20, (9 << 20) + 5, 511, 14 << 20]
    wrong = []
    for turn in range(rounds):
        names = [f"{turn}-{number}" for number in range(len(sizes))]
        wrong += [] if store(names, sizes) else [f"round {turn} was not stored"]
        loaded = load(names, sizes)
        wrong += loaded["wrong"] + [f"{turn}: a miss"] * loaded["loaded"].count(False)
        delete(names)
    close()
    return wrong


def keys_of(names: Sequence[str]) -> list[Any]:
    """Keys as LMCache makes them: a model's name with a slash; about every second one with a salt."""
    return [
        ObjectKey(
            chunk_hash=name.encode(),
            model_name="org/model-7B",
            kv_rank=zlib.crc32(name.encode()),
            cache_salt="salt" if zlib.crc32(name.encode()) % 2 else "",
        )
        for name in names
    ]


def memory_objects(sizes: Sequence[int], align_bytes: int) -> list[Any]:
    """Memory objects of `sizes` bytes in one buffer, each at a multiple of `align_bytes` from its start."""
    slots = [-(-size // align_bytes) * align_bytes for size in sizes]
    buffer = _aligned_buffer(sum(slots) + 1)
    start, objects = (0 if align_bytes > 1 else 1), []
    for size, slot in zip(sizes, slots, strict=True):
        metadata = MemoryObjMetadata(
            shape=torch.Size([size]),
            dtype=torch.uint8,
            address=start,
            phy_size=slot,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
        )
        objects.append(TensorMemoryObj(buffer[start : start + size], metadata, parent_allocator=None))
        start += slot
    return objects


def _aligned_buffer(size_bytes: int) -> Any:
    backing = torch.empty(size_bytes + 4096, dtype=torch.uint8)
    skip = -backing.data_ptr() % 4096
    return backing[skip : skip + size_bytes]


def bits(bitmap: Any, count: int) -> list[bool]:
    """What a bitmap of LMCache's says of each of `count` keys."""
    return [bool(bitmap.test(number)) for number in range(count)]
