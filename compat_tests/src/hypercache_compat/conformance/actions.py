"""Every action of wire 1 but the writing ones: its success, its error, and the fields that 0.9 reads."""

from __future__ import annotations

from hypercache_protocol.messages import (
    DevicesReply,
    Evict,
    EvictedReply,
    GetDevices,
    GetStatus,
    GetWriteStatus,
    HitReply,
    Ingest,
    Locate,
    MissReply,
    Pin,
    Ping,
    PongReply,
    Purge,
    PurgedReply,
    RecordTelemetry,
    StatusReply,
    WriteStatusReply,
)

from .checks import ODD_SIZE, Bench, Check, check_places, store
from .shell import expect

LOCATE_FIELDS = {"status", "object_size", "chunk_size", "chunk_layout"}
CHUNK_FIELDS = {"device", "offset", "length"}


def ping(bench: Bench) -> None:
    """ping is answered with PONG."""
    bench.connect().get(Ping(), PongReply)


def get_devices(bench: Bench) -> None:
    """get_devices lists the devices with every field that clients of 0.9 read."""
    bench.connect().get(GetDevices(), DevicesReply)


def get_status(bench: Bench) -> None:
    """get_status is answered with a JSON object."""
    bench.connect().get(GetStatus(), StatusReply)


def locate_miss(bench: Bench) -> None:
    """locate of what was never written is answered with MISS."""
    bench.connect().get(Locate(uri=bench.uri("absent"), auto_ingest=False), MissReply)


def locate_hit(bench: Bench) -> None:
    """locate of a committed object is answered with HIT, its size, and its layout as it was staged."""
    connection = bench.connect()
    stored = store(connection, bench.uri("here"), ODD_SIZE)
    hit, fields = connection.get_answer(Locate(uri=stored.uri, auto_ingest=False), HitReply)
    expect(hit.object_size == ODD_SIZE, f"locate says {hit.object_size} bytes, {ODD_SIZE} were committed")
    check_places("the layout of locate", hit.chunk_layout, stored.chunks)
    missing = LOCATE_FIELDS - fields.keys()
    expect(not missing, f"the HIT lacks {', '.join(sorted(missing))}")
    for chunk in fields["chunk_layout"]:
        expect(chunk.keys() >= CHUNK_FIELDS, f"a chunk lacks fields: {chunk}")


def locate_odd_name(bench: Bench) -> None:
    """A uri is an opaque string: letters of any language, quotes and spaces are kept apart."""
    connection = bench.connect()
    names = ['bücher/模型 "x"\\🚀', "bücher/模型 'x'\\🚀", "a/../b", "b", "A", "a", "a ", "%61"]
    uris = [bench.uri(name) for name in names]
    for size, uri in enumerate(uris, 1):
        store(connection, uri, size)
    for size, uri in enumerate(uris, 1):
        hit = connection.get(Locate(uri=uri, auto_ingest=False), HitReply)
        expect(hit.object_size == size, f"{uri!r} was written with {size} bytes and has {hit.object_size}")


def ingest_hit(bench: Bench) -> None:
    """ingest of an object that is here is answered with HIT or INGESTED and the layout."""
    connection = bench.connect()
    stored = store(connection, bench.uri("here"), 1920)
    hit = connection.get(Ingest(uri=stored.uri), HitReply)
    check_places("the layout of ingest", hit.chunk_layout, stored.chunks)


def ingest_error(bench: Bench) -> None:
    """ingest of what is nowhere is answered with an error."""
    bench.connect().refused(Ingest(uri=bench.uri("nowhere")))


def pin(bench: Bench) -> None:
    """pin and unpin are answered with PONG."""
    connection = bench.connect()
    stored = store(connection, bench.uri("pinned"), 10)
    for pinned in (True, True, False):
        connection.get(Pin(uri=stored.uri, pinned=pinned), PongReply)


def pin_error(bench: Bench) -> None:
    """pin of what is not here is answered with an error."""
    bench.connect().refused(Pin(uri=bench.uri("absent")))


def evict(bench: Bench) -> None:
    """evict removes the object, and locate misses it afterwards."""
    connection = bench.connect()
    stored = store(connection, bench.uri("evicted"), 10)
    connection.get(Evict(uri=stored.uri), EvictedReply)
    connection.get(Locate(uri=stored.uri, auto_ingest=False), MissReply)


def evict_miss(bench: Bench) -> None:
    """evict of what is not here is answered with MISS."""
    bench.connect().get(Evict(uri=bench.uri("absent")), MissReply)


def write_status(bench: Bench) -> None:
    """get_write_status tells sync_status and sync_progress_percent of a committed object."""
    connection = bench.connect()
    stored = store(connection, bench.uri("status"), 10)
    reply = connection.get(GetWriteStatus(uri=stored.uri), WriteStatusReply)
    expect(reply.sync_status is not None, "sync_status is a word that no wire knows")


def write_status_error(bench: Bench) -> None:
    """get_write_status of what is not here is answered with an error."""
    bench.connect().refused(GetWriteStatus(uri=bench.uri("absent")))


def telemetry(bench: Bench) -> None:
    """record_telemetry is answered with PONG."""
    bench.connect().get(
        RecordTelemetry(
            event_type="read",
            uri=bench.uri("measured"),
            object_size_bytes=1,
            duration_us=1,
            bandwidth_mbps=1.5,
            client_id="hypercache-compat",
        ),
        PongReply,
    )


def telemetry_error(bench: Bench) -> None:
    """record_telemetry without its fields is answered with an error."""
    reply = bench.connect().ask_fields(action="record_telemetry", uri=bench.uri("measured"))
    expect(reply.get("status") == "ERROR", f"it was answered with {reply}")


def error_shape(bench: Bench) -> None:
    """Every error is status ERROR with a sentence in error_message."""
    connection, uri = bench.connect(), bench.uri("never-staged")
    for action in ("commit_write", "pin", "get_write_status", "stage_write", "x_compat_no_such_action"):
        reply = connection.ask_fields(action=action, uri=uri)
        expect(reply.get("status") == "ERROR", f"{action}: status is {reply.get('status')!r}")
        expect(bool(reply.get("error_message")), f"{action}: the error has no error_message: {reply}")
        expect(isinstance(reply["error_message"], str), f"{action}: error_message is no string: {reply}")


def purge(bench: Bench) -> None:
    """purge removes every object."""
    connection = bench.connect()
    stored = store(connection, bench.uri("purged"), 10)
    connection.get(Purge(), PurgedReply)
    connection.get(Locate(uri=stored.uri, auto_ingest=False), MissReply)


CHECKS = (
    Check("ping", ping, "Clients ask this first and take any other answer for a daemon that is not there."),
    Check(
        "get_devices",
        get_devices,
        "Clients of 0.9 read each device's fields by name and crash, or show nothing, where one is missing "
        "or of another type.",
    ),
    Check("get_status", get_status, "Monitoring and `hypercache status` show nothing."),
    Check(
        "locate.miss",
        locate_miss,
        "What is not in the cache is not told as MISS: clients take it for an error, or for a hit.",
    ),
    Check(
        "locate.hit",
        locate_hit,
        "Clients cannot read what they wrote, or read other bytes: the layout that locate gives is not the "
        "one that was written, or its fields have other names. Do not run this daemon.",
    ),
    Check(
        "locate.odd-names",
        locate_odd_name,
        "Two names are taken for one, or one name is not found again: objects overwrite each other.",
    ),
    Check("ingest.hit", ingest_hit, "Prefetching what is already cached fails or gives a wrong layout."),
    Check("ingest.error", ingest_error, "A failed prefetch is told as success; clients read nothing."),
    Check("pin", pin, "Clients take anything but PONG for a failed pin."),
    Check("pin.error", pin_error, "Clients believe that an object is pinned which is not there."),
    Check("evict", evict, "Deleted objects stay: clients read what was deleted, and space is not freed."),
    Check("evict.miss", evict_miss, "Clients take the deletion of nothing for an error, or for a success."),
    Check(
        "write-status",
        write_status,
        "Clients that wait for their upload never see it end: they read sync_status and "
        "sync_progress_percent by name.",
    ),
    Check("write-status.error", write_status_error, "A lost object looks as if it were being uploaded."),
    Check("telemetry", telemetry, "Clients of 0.9 report each transfer and take no PONG for an error."),
    Check("telemetry.error", telemetry_error, "Measurements without figures are counted.", required=False),
    Check(
        "error.shape",
        error_shape,
        "Clients cannot tell what went wrong: they look for status ERROR and show error_message.",
    ),
    Check("purge", purge, "Emptying the cache does not empty it.", empties_cache=True),
)
