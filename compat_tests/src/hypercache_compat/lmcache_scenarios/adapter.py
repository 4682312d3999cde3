"""Store, look up, load and delete objects of mixed sizes through LMCache's adapter around the connector."""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lmcache
from lmcache.cli.commands.bench.l2_adapter_bench.data import wait_eventfd
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string

from ..lmcache_versions import connector_spec
from .memory import Memory

DEADLINE_S = 60.0
LAYOUTS = {0: MemoryLayoutDesc(shapes=[], dtypes=[])}
"""What a lookup has to be given; these adapters don't look at it."""
LOADS_AT_ONCE = 4
PLAIN = "plain"

Name = str | dict[str, Any]
"""What makes a key: a text, or the fields of LMCache's ObjectKey with the hash in hexadecimal."""

_KEPT: dict[str, Any] = {}


def version() -> dict[str, str]:
    """Which LMCache this process has, and from where."""
    from importlib.metadata import version as installed

    return {"version": installed("lmcache"), "folder": str(Path(lmcache.__file__).parent)}


def create(spec: Mapping[str, object]) -> Any:
    """The adapter that LMCache makes of this part of its configuration."""
    config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))
    return create_l2_adapter(config.adapters[0])


def connect(socket_path: str, namespace: str, *, connection: str = PLAIN, **parameters: object) -> str:
    """Make an adapter and keep it, by the name of its `connection`, for the other scenarios; gives its
    class's name. `parameters` are further ones of the connector."""
    _KEPT[connection] = create(connector_spec(socket_path, namespace, **parameters))
    return type(_KEPT[connection]).__name__


def close(connection: str = PLAIN) -> None:
    """Close the adapter."""
    _KEPT.pop(connection).close()


def store(
    names: Sequence[Name],
    sizes: Sequence[int],
    align_bytes: int = 4096,
    contents: Sequence[str] | None = None,
    connection: str = PLAIN,
) -> bool:
    """Store the payloads of `names`, or of `contents`, in one batch; did LMCache call the batch stored?"""
    adapter, memory = _KEPT[connection], Memory(sizes, align_bytes)
    memory.fill(contents or [str(name) for name in names])
    task = adapter.submit_store_task(keys_of(names), memory.objects)
    assert wait_eventfd(adapter.get_store_event_fd(), DEADLINE_S), "the store never completed"
    return bool(adapter.pop_completed_store_tasks()[task].is_successful())


def lookup(names: Sequence[Name], connection: str = PLAIN) -> list[bool]:
    """Which of `names` LMCache finds, asked in one batch."""
    adapter = _KEPT[connection]
    task = adapter.submit_lookup_and_lock_task(keys_of(names), LAYOUTS)
    assert wait_eventfd(adapter.get_lookup_and_lock_event_fd(), DEADLINE_S), "the lookup never completed"
    return bits(adapter.query_lookup_and_lock_result(task), len(names))


def load(
    names: Sequence[Name],
    sizes: Sequence[int],
    align_bytes: int = 4096,
    contents: Sequence[Sequence[str]] | None = None,
    connection: str = PLAIN,
) -> dict[str, Any]:
    """Load `names` in one batch: which ones LMCache calls loaded, and what is wrong with any of those.

    Right is the payload of the name, or of any of its `contents`. Buffers begin filled with UNTOUCHED, so
    that a load that does nothing can't pass, and nothing around them may change.
    """
    memory = Memory(sizes, align_bytes)
    loaded = _begun_load(_KEPT[connection], names, memory)()
    right = contents or [[str(name)] for name in names]
    return {"loaded": loaded, "wrong": memory.differences(loaded, right) + memory.changed_around()}


def store_versions(
    names: Sequence[Name], sizes: Sequence[int], rounds: int, contents: str, connection: str = PLAIN
) -> None:
    """Store one version of all after the other; some may be refused, since somebody else stores them too."""
    for turn in range(rounds):
        store(names, sizes, contents=[f"{contents} {turn + 1}"] * len(names), connection=connection)


def replace_while_loading(
    names: Sequence[Name], sizes: Sequence[int], rounds: int, contents: str, connection: str = PLAIN
) -> list[str]:
    """Store new contents under the same keys again and again while the keys are loaded; gives whatever was
    neither the old payload nor the new one."""
    adapter, wrong = _KEPT[connection], []
    for turn in range(rounds):
        old, new = f"{contents} {turn}", f"{contents} {turn + 1}"
        source, targets = Memory(sizes, 4096), [Memory(sizes, 4096) for _ in range(LOADS_AT_ONCE)]
        source.fill([new] * len(names))
        task = adapter.submit_store_task(keys_of(names), source.objects)
        loads = [_begun_load(adapter, names, target) for target in targets]
        for finish, target in zip(loads, targets, strict=True):
            wrong += target.differences(finish(), [[old, new]] * len(names))
        assert wait_eventfd(adapter.get_store_event_fd(), DEADLINE_S), "the store never completed"
        stored = adapter.pop_completed_store_tasks()[task].is_successful()
        wrong += [] if stored else [f"round {turn} was not stored"]
    return wrong


def delete(names: Sequence[Name], connection: str = PLAIN) -> int:
    """Delete `names`; gives how many bytes LMCache still counts as used."""
    adapter = _KEPT[connection]
    adapter.delete(keys_of(names))
    return int(adapter.get_usage().total_bytes_used)


def texts(names: Sequence[Name]) -> list[str]:
    """The keys as LMCache gives them to the connector."""
    return [_object_key_to_string(key) for key in keys_of(names)]


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


def keys_of(names: Sequence[Name]) -> list[Any]:
    """Keys as LMCache makes them: a model's name with a slash; about every second one with a salt."""
    return [
        ObjectKey(**{**name, "chunk_hash": bytes.fromhex(name["chunk_hash"])})
        if isinstance(name, dict)
        else ObjectKey(
            chunk_hash=name.encode(),
            model_name="org/model-7B",
            kv_rank=zlib.crc32(name.encode()),
            cache_salt="salt" if zlib.crc32(name.encode()) % 2 else "",
        )
        for name in names
    ]


def _begun_load(adapter: Any, names: Sequence[Name], memory: Memory) -> Callable[[], list[bool]]:
    """Begin a load; what is returned waits for it, and says which names LMCache calls loaded."""
    task = adapter.submit_load_task(keys_of(names), memory.objects)

    def finish() -> list[bool]:
        while (result := adapter.query_load_result(task)) is None:
            assert wait_eventfd(adapter.get_load_event_fd(), DEADLINE_S), "the load never completed"
        return bits(result, len(names))

    return finish


def bits(bitmap: Any, count: int) -> list[bool]:
    """What a bitmap of LMCache's says of each of `count` keys."""
    return [bool(bitmap.test(number)) for number in range(count)]
