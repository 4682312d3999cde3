"""The client class itself: every public method, and what it says where there is nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import hypercache
from hypercache.client import HyperCacheClient
from hypercache.datapath import DirectBlockWriter, get_data_reader

from ..payloads import payload, require_same


def version() -> str:
    """The version that the package gives itself."""
    return str(hypercache.__version__)


def put(
    client: Any, uri: str, data: bytes, *, tier: str | None = None, commit: bool = True, **stage: Any
) -> Any:
    """Stage, write and (unless told not to) commit `data`, as the package's own classes do."""
    staged = client.stage_write(uri, len(data), tier=tier, **stage)
    assert staged.is_staged, staged.error_message
    writer = DirectBlockWriter()
    writer.write_chunks(staged.chunk_layout, data)
    writer.close()
    if commit:
        assert client.commit_write(uri, write_through=stage.get("write_through", False))
    return staged


def get(client: Any, uri: str, *, auto_ingest: bool = False) -> bytes | None:
    """The object's bytes through the package's reader; None on a miss."""
    located = client.locate(uri, auto_ingest=auto_ingest)
    if not located.is_hit:
        return None
    data = get_data_reader().read_range(located.chunk_layout, 0, located.object_size)
    return bytes(memoryview(data))


def store(
    socket_path: str, uri: str, size_bytes: int, tier: str | None = None, **stage: Any
) -> dict[str, Any]:
    """Store the payload of `uri` and give the layout that it got."""
    with HyperCacheClient(socket_path) as client:
        staged = put(client, uri, payload(uri, size_bytes), tier=tier, **stage)
        return dataclasses.asdict(staged)


def fetch(socket_path: str, uri: str, size_bytes: int) -> bool:
    """Is the object there? Where it is, its bytes are compared with the payload of `uri`."""
    with HyperCacheClient(socket_path) as client:
        data = get(client, uri)
    if data is not None:
        require_same(data, payload(uri, size_bytes))
    return data is not None


def every_method(socket_path: str, uri: str) -> list[str]:
    """Call every public method of the client once, check what it says, and give their names."""
    client = HyperCacheClient(socket_path)
    calls: dict[str, Callable[[], bool]] = {
        "ping": lambda: client.ping() is True,
        "get_devices": lambda: all(device.size_bytes > 0 for device in client.get_devices()),
        "stage_write": lambda: client.stage_write(uri, 4096).sync_status == "STAGED",
        "append_write": lambda: client.append_write(uri, 1920).object_size == 4096 + 1920,
        "commit_write": lambda: client.commit_write(uri) is True,
        "locate": lambda: client.locate(uri).object_size == 4096 + 1920,
        "ingest": lambda: client.ingest(uri).is_hit,
        "preload": lambda: client.preload(uri).is_hit,
        "pin": lambda: client.pin(uri) and client.pin(uri, pinned=False),
        "get_write_status": lambda: client.get_write_status(uri)["status"] == "COMMITTED",
        "get_status": lambda: isinstance(client.get_status(), dict),
        "record_telemetry": lambda: client.record_telemetry("read", uri, 6016, 120, 50.5) is True,
        "evict": lambda: client.evict(uri) is True and not client.locate(uri).is_hit,
        "purge": lambda: client.purge() is True,
        "close": lambda: client.close() is None,
    }
    wrong = [name for name, call in calls.items() if not call()]
    assert not wrong, f"these methods did not get the answer that they understand: {wrong}"
    missed = {name for name in vars(HyperCacheClient) if not name.startswith("_")} - calls.keys()
    assert not missed, f"no call for {missed}"
    return list(calls)


def facts(socket_path: str) -> dict[str, Any]:
    """What get_devices and get_status say."""
    with HyperCacheClient(socket_path) as client:
        devices = [dataclasses.asdict(device) for device in client.get_devices()]
        return {"devices": devices, "status": client.get_status()}


def report_a_transfer(socket_path: str, duration_us: int) -> bool:
    """Report one transfer, with every field that the package has."""
    with HyperCacheClient(socket_path) as client:
        return bool(
            client.record_telemetry(
                event_type="demo_read",
                uri="hypercache://measured",
                object_size_bytes=4096,
                duration_us=duration_us,
                bandwidth_mbps=123.4,
                client_id="suite",
                chunk_count=2,
                local_meta_us=3,
                remote_meta_us=4,
                local_ttfb_us=5,
                remote_ttfb_us=6,
                time_saved_ms=7,
                cpu_pct=8.5,
                status="OK",
            )
        )


def unknown_uri(socket_path: str, uri: str) -> dict[str, Any]:
    """What each method says of a uri that nobody ever wrote."""
    with HyperCacheClient(socket_path) as client:
        ingested = client.ingest(uri)
        appended = client.append_write(uri, 10)
        return {
            "locate": client.locate(uri).status,
            "locate_no_ingest": client.locate(uri, auto_ingest=False).status,
            "ingest": [ingested.status, ingested.error_message],
            "pin": client.pin(uri),
            "evict": client.evict(uri),
            "append": [appended.status, appended.error_message],
            "commit": client.commit_write(uri),
            "write_status": client.get_write_status(uri),
        }


def life_of_an_object(socket_path: str, uri: str, size_bytes: int, tier: str | None) -> list[str]:
    """The write status before, while and after writing; the bytes are compared."""
    seen = []
    data = payload(uri, size_bytes)
    with HyperCacheClient(socket_path) as client:
        seen.append(client.get_write_status(uri)["status"])
        put(client, uri, data, tier=tier, commit=False)
        seen.append(client.get_write_status(uri)["status"])
        assert client.commit_write(uri)
        seen.append(client.get_write_status(uri)["status"])
        got = get(client, uri)
        require_same(b"" if got is None else got, data)
        assert client.evict(uri)
        seen.append(client.locate(uri, auto_ingest=False).status)
    return seen


def evict_twice(socket_path: str, uri: str, size_bytes: int) -> list[bool]:
    """Evict what is there and then what is not; it is gone in between."""
    with HyperCacheClient(socket_path) as client:
        put(client, uri, payload(uri, size_bytes))
        seen = [client.evict(uri), client.locate(uri, auto_ingest=False).is_hit, client.evict(uri)]
    return [bool(each) for each in seen]


def pin_and_unpin(socket_path: str, uri: str, size_bytes: int) -> list[bool]:
    """Pin and unpin what is there, then what is not."""
    with HyperCacheClient(socket_path) as client:
        put(client, uri, payload(uri, size_bytes))
        seen = [client.pin(uri), client.pin(uri, pinned=False), client.pin(uri + ".absent")]
    return [bool(each) for each in seen]


def replace_while_read(socket_path: str, uri: str, old_size: int, new_size: int) -> None:
    """Until its commit, a second write under the same uri changes nothing that a reader gets."""
    old, new = payload(uri + "old", old_size), payload(uri + "new", new_size)
    with HyperCacheClient(socket_path) as writer, HyperCacheClient(socket_path) as reader:
        put(writer, uri, old)
        put(writer, uri, new, commit=False)
        require_same(get(reader, uri), old)
        assert writer.commit_write(uri)
        require_same(get(reader, uri), new)


def pinned_survives_pressure(socket_path: str, prefix: str, count: int, size_bytes: int) -> dict[str, Any]:
    """Write `count` evictable objects, the first of them pinned, into a pool that can't hold them all.

    Every object that is still there has its bytes compared; gives which ones are.
    """
    uris = [f"{prefix}/{number}" for number in range(count)]
    with HyperCacheClient(socket_path) as client:
        for number, uri in enumerate(uris):
            put(client, uri, payload(uri, size_bytes), auto_flush_s3=False, pinned=number == 0)
        present = []
        for number, uri in enumerate(uris):
            data = get(client, uri)
            if data is not None:
                require_same(data, payload(uri, size_bytes))
                present.append(number)
        return {"present": present, "statuses": [client.get_write_status(uris[0])["status"]]}


def purge(socket_path: str) -> bool:
    """Delete everything."""
    with HyperCacheClient(socket_path) as client:
        return bool(client.purge())


def ping(socket_path: str) -> bool:
    """Does the daemon answer? Never raises, as the package promises."""
    with HyperCacheClient(socket_path) as client:
        return bool(client.ping())


def stay_connected(socket_path: str) -> bool:
    """Connect and keep the connection for `after_a_restart`."""
    _KEPT["client"] = HyperCacheClient(socket_path)
    return bool(_KEPT["client"].ping())


def after_a_restart(uri: str, size_bytes: int) -> list[str]:
    """What a client that was connected before a restart sees: one error, and then it works again."""
    client = _KEPT.pop("client")
    seen = [_status_or_error(client, uri), _status_or_error(client, uri)]
    require_same(get(client, uri), payload(uri, size_bytes))
    client.close()
    return seen


def _status_or_error(client: Any, uri: str) -> str:
    try:
        return str(client.locate(uri, auto_ingest=False).status)
    except OSError as error:
        return type(error).__name__


_KEPT: dict[str, Any] = {}
