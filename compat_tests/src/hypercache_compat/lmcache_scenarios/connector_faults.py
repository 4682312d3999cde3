"""Faults that the connector could have, put into this process on request, to show which checks see them.

Each replaces functions of the connector while it lasts: `put_in` one, `take_out` all.
"""

from __future__ import annotations

import ctypes
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from hypercache_connector import adapter, storing, transfers
from hypercache_connector.devices import Devices
from hypercache_connector.direct_io import Buffer, Part
from hypercache_connector.engine import Engine
from hypercache_connector.keys import UriMapping
from hypercache_connector.lookup_lane import LookupLane
from hypercache_connector.outcomes import Outcome
from hypercache_connector.prefixes import shared_prefix
from hypercache_protocol.batches import CommitMany, StageMany
from hypercache_protocol.messages import HitReply, Locate

Patch = tuple[object, str, Callable[..., Any]]
"""Whose attribute becomes what."""

_load, _store, _delete, _uri, _read = (
    transfers.load,
    storing.store,
    transfers.delete,
    UriMapping.uri,
    Devices.read,
)
_stage_many, _commit_many = storing._stage_many, storing._commit_many
_kept: list[Patch] = []


def put_in(fault: str) -> None:
    """From now on the connector has this fault, in every adapter of this process."""
    for owner, name, function in FAULTS[fault]:
        _kept.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)


def take_out() -> None:
    """The connector is itself again."""
    while _kept:
        owner, name, function = _kept.pop()
        setattr(owner, name, function)


# -- loads -----------------------------------------------------------------------------------------------


def _careless(
    engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer], *, ingest: bool
) -> list[Outcome]:
    """A load that believes the daemon and the devices: no state, size, checksum or error is looked at."""
    replies = engine.client.exchange([Locate(uri=uri, auto_ingest=ingest) for uri in uris])
    return [
        _taken(engine, reply, buffer) if isinstance(reply, HitReply) else Outcome.ABSENT
        for reply, buffer in zip(replies, buffers, strict=True)
    ]


def _taken(engine: Engine, reply: HitReply, buffer: Buffer) -> Outcome:
    start = 0
    for chunk in reply.chunk_layout:
        part = buffer.part(start, min(chunk.length, buffer.size_bytes - start))
        with suppress(OSError):
            engine.devices.read(chunk.device, chunk.tier, part, chunk.offset)
        start += chunk.length
    return Outcome.OK


def _believe(engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
    return _careless(engine, uris, buffers, ingest=False)


def _ingest(engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
    return _careless(engine, uris, buffers, ingest=True)


def _say_yes(_engine: Engine, uris: Sequence[str], *_buffers: object) -> list[Outcome]:
    return [Outcome.OK] * len(uris)


def _all_or_none(engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
    outcomes = _load(engine, uris, buffers)
    return outcomes if all(each.good for each in outcomes) else [Outcome.IO_ERROR] * len(uris)


def _any_is_all(engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
    outcomes = _load(engine, uris, buffers)
    return [Outcome.OK] * len(uris) if any(each.good for each in outcomes) else outcomes


def _backwards(engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
    return _load(engine, uris, buffers[::-1])[::-1]


def _too_far(engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
    outcomes = _load(engine, uris, buffers)
    for buffer in buffers:
        ctypes.memset(buffer.address + buffer.size_bytes, 0, 1)
    return outcomes


def _torn(engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
    outcomes = _load(engine, uris, buffers)
    for buffer in buffers:
        half = buffer.size_bytes // 2
        buffer.view[half:] = bytes(buffer.size_bytes - half)
    return outcomes


def _short(devices: Devices, path: str, tier: Any, part: Part, offset: int) -> int:
    """The last byte is not read, and nobody is told."""
    length = len(part.view)
    _read(devices, path, tier, Part(part.view[: length - 1], part.address), offset)
    return length


def _not_on_empty(engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
    uris[0]  # raises where there is none
    return _store(engine, uris, buffers)


# -- stores and deletes -----------------------------------------------------------------------------------


def _overwriting(is_on: bool) -> Callable[..., list[Outcome]]:
    def store(engine: Engine, uris: Sequence[str], buffers: Sequence[Buffer]) -> list[Outcome]:
        return _store(replace(engine, overwrite=is_on), uris, buffers)

    return store


def _to_the_backend(engine: Engine, writes: Sequence[Any]) -> StageMany:
    return _stage_many(engine, writes).model_copy(update={"auto_flush_s3": True})


def _not_local(engine: Engine, writes: Sequence[Any]) -> CommitMany:
    return _commit_many(engine, writes).model_copy(update={"local_only": False})


def _purge(engine: Engine, uris: Sequence[str]) -> list[Outcome]:
    engine.client.purge()
    return [Outcome.OK] * len(uris)


# -- keys ------------------------------------------------------------------------------------------------


def _keys_through(change: Callable[[str], str]) -> tuple[Patch, ...]:
    def uri(mapping: UriMapping, key: str) -> str:
        return _uri(mapping, change(key))

    return _uris_by(uri)


def _uris_by(uri: Callable[[UriMapping, str], str]) -> tuple[Patch, ...]:
    def split(mapping: UriMapping, keys: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        return shared_prefix([uri(mapping, key) for key in keys])

    return (UriMapping, "uri", uri), (UriMapping, "split", split)


def _without(position: int) -> tuple[Patch, ...]:
    def change(key: str) -> str:
        parts = key.split("@")
        return "@".join(parts[:position] + parts[position + 1 :])

    return _keys_through(change)


_IN_NO_NAMESPACE = UriMapping("none")

FAULTS: dict[str, tuple[Patch, ...]] = {
    "loads believe daemon and devices": ((adapter, "load", _believe),),
    "loads fetch from the backend": ((adapter, "load", _ingest),),
    "loads say yes": ((adapter, "load", _say_yes),),
    "loads miss together": ((adapter, "load", _all_or_none),),
    "loads hit together": ((adapter, "load", _any_is_all),),
    "loads mix up their buffers": ((adapter, "load", _backwards),),
    "loads give halves": ((adapter, "load", _torn),),
    "loads write past the buffer": ((adapter, "load", _too_far),),
    "reads end early": ((Devices, "read", _short),),
    "damage is left": ((transfers, "_heal", lambda *_: None),),
    "lookups say yes": ((adapter, "lookup", _say_yes), (LookupLane, "ask", lambda *_: False)),
    "stores say yes": ((adapter, "store", _say_yes),),
    "stores overwrite": ((adapter, "store", _overwriting(True)),),
    "stores keep what is there": ((adapter, "store", _overwriting(False)),),
    "stores fail without keys": ((adapter, "store", _not_on_empty),),
    "stores are flushed": (
        (storing, "_stage_many", _to_the_backend),
        (storing, "_commit_many", _not_local),
    ),
    "deletes do nothing": ((adapter, "delete", _say_yes),),
    "deletes take all": ((adapter, "delete", _purge),),
    "keys lose the model": _without(0),
    "keys lose the rank": _without(1),
    "keys lose the group": _without(2),
    "keys lose the hash": _without(3),
    "keys lose the salt": _without(4),
    "keys lose their separators": _keys_through(lambda key: key.replace("@", "")),
    "keys lose their case": _keys_through(str.lower),
    "keys lose their end": _keys_through(lambda key: key[:255]),
    "keys lose their control characters": _keys_through(lambda key: "".join(filter(str.isprintable, key))),
    "keys are unquoted": _keys_through(unquote),
    "keys are normalised": _keys_through(lambda key: unicodedata.normalize("NFKC", key)),
    "keys are paths": _keys_through(lambda key: key.replace("/./", "/").replace("//", "/")),
    "namespaces are ignored": _uris_by(lambda _, key: _uri(_IN_NO_NAMESPACE, key)),
}
"""What is wrong -> what it replaces."""
