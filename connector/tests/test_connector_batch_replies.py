"""What is believed of the reply to a batch: nothing where it lies, and else of each uri its own."""

import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from asking import MakeClient, failure, hit, limits_of, locates, u32

from hypercache_compat.waiting import wait_until
from hypercache_connector import DaemonUnavailable
from hypercache_connector.batching import batched
from hypercache_connector.keys import UriMapping
from hypercache_connector.outcomes import Outcome
from hypercache_protocol import WIRE_1_1, ErrorCode, SyncStatus, WireVersion
from hypercache_protocol.batches import (
    BatchRequest,
    CommitMany,
    CommittedMany,
    EvictedMany,
    EvictMany,
    Hello,
    ItemError,
    LocatedMany,
    LocateMany,
    StagedMany,
    StageMany,
)
from hypercache_protocol.messages import (
    CommitWrite,
    ErrorReply,
    Evict,
    HitReply,
    Locate,
    MissReply,
    Ping,
    Reply,
    Request,
    StageWrite,
)
from hypercache_protocol.versions import LATEST

DEADLINE_S = 30.0
MAPPING = UriMapping("test")


# -- replies that lie ----------------------------------------------------------------------------------------


def spoiled_layouts(**columns: object) -> Callable[[Request, Reply], Reply]:
    """What replaces columns of the reply's layouts."""

    def change(request: Request, reply: Reply) -> Reply:
        layouts = getattr(reply, "layouts", None)
        if layouts is None:
            return reply
        return reply.model_copy(update={"layouts": layouts.model_copy(update=columns)})

    return change


def spoiled(kind: type[Reply], **fields: object) -> Callable[[Request, Reply], Reply]:
    return lambda request, reply: reply.model_copy(update=fields) if isinstance(reply, kind) else reply


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


# Three objects of 100 bytes, one chunk each, all present.
LIES_ABOUT_LAYOUTS: dict[str, Callable[[Request, Reply], Reply]] = {
    "too short a bitmap": spoiled(LocatedMany, present=b""),
    "too long a bitmap": spoiled(LocatedMany, present=b"\x07\x00"),
    "a bit beyond": spoiled(LocatedMany, present=b"\x0f"),
    "fewer present than layouts": spoiled(LocatedMany, present=b"\x03"),
    "no layouts": spoiled(LocatedMany, layouts=None),
    "a size too few": spoiled_layouts(object_sizes=u64(100, 100)),
    "half a size": spoiled_layouts(object_sizes=u64(100, 100, 100)[:-1]),
    "another size": spoiled_layouts(object_sizes=u64(100, 101, 100)),
    "generations too few": spoiled_layouts(generations=b""),
    "an unknown status": spoiled_layouts(sync_statuses=b"\x04\x04\xfa"),
    "statuses too many": spoiled_layouts(sync_statuses=b"\x04\x04\x04\x04"),
    "chunks too few": spoiled_layouts(chunk_counts=u32(1, 1, 0)),
    "chunks by the billion": spoiled_layouts(chunk_counts=u32(1, 1, 0xFFFFFFFF)),
    "a path out of range": spoiled_layouts(chunk_paths=u32(0, 1, 2)),
    "no paths": spoiled_layouts(paths=(), path_tiers=b""),
    "tiers too few": spoiled_layouts(path_tiers=b"\x00"),
    "an unknown tier": spoiled_layouts(path_tiers=b"\x00\x09"),
    "an offset out of range": spoiled_layouts(chunk_offsets=u64(0, 4096, 1 << 63)),
    "a length of nothing": spoiled_layouts(chunk_lengths=u32(100, 100, 0)),
    "too long a chunk": spoiled_layouts(chunk_lengths=u32(100, 100, (4 << 20) + 1)),
    "checksums too few": spoiled_layouts(chunk_checksums=u32(1, 2)),
    "checksum bits too many": spoiled_layouts(checksummed=b"\x07\x07"),
}


@pytest.mark.parametrize("lie", LIES_ABOUT_LAYOUTS.values(), ids=LIES_ABOUT_LAYOUTS.keys())
def test_a_locate_of_many_that_lies_is_a_miss_for_all_and_ends_the_connection(
    scripted2, connect, lie: Callable[[Request, Reply], Reply]
) -> None:
    keys, data = ["a", "b", "c"], [bytearray(os.urandom(100)) for _ in range(3)]
    assert connect(scripted2.socket_path).store(keys, data).ok
    driver = connect(scripted2.socket_path)
    accepted = scripted2.connections_accepted
    scripted2.change_batch = lie
    buffers = [bytearray(100) for _ in keys]
    assert driver.load(keys, buffers) == [False] * 3
    assert driver.count("loads", "daemon_garbled") == 3
    scripted2.change_batch = lambda request, reply: reply
    assert driver.load(keys, buffers) == [True] * 3
    assert buffers == data
    assert scripted2.connections_accepted == accepted + 2


@pytest.mark.parametrize(
    "lie",
    [
        spoiled(LocatedMany, present=b"\x07\x00"),
        spoiled(LocatedMany, verifiable=b""),
        spoiled(LocatedMany, verifiable=b"\xff"),
        spoiled(LocatedMany, present=b"\x03", verifiable=b"\x07"),
    ],
    ids=["present too long", "verifiable too short", "a bit beyond", "verifiable and not present"],
)
def test_a_lookup_s_reply_that_lies_is_a_miss_for_all_and_ends_the_connection(
    scripted2, client_to: MakeClient, lie: Callable[[Request, Reply], Reply]
) -> None:
    client = client_to(scripted2.socket_path)
    scripted2.change_batch = lie
    with pytest.raises(DaemonUnavailable) as caught:
        client.lookup(["a", "b", "c"])
    assert caught.value.outcome is Outcome.DAEMON_GARBLED
    scripted2.change_batch = lambda request, reply: reply
    assert client.lookup(["a"]) == [Outcome.ABSENT]
    assert scripted2.connections_accepted == 2


STALE = ItemError(index=0, error_message="stale", error_code=ErrorCode.STALE_STAGE)
ALL_STALE = [STALE.model_copy(update={"index": index}) for index in range(3)]
BEYOND = STALE.model_copy(update={"index": 3})
STAGES: list[Request] = [StageWrite(uri=f"u{number}", size_bytes=100) for number in range(3)]
COMMITS: list[Request] = [
    CommitWrite(uri=f"u{number}", stage_id="s", local_only=True, chunk_checksums=(1,)) for number in range(3)
]
EVICTS: list[Request] = [Evict(uri=f"u{number}") for number in range(3)]
LIES: list[tuple[str, list[Request], Callable[[Request, Reply], Reply]]] = [
    ("stage: a stage id too few", STAGES, spoiled(StagedMany, stage_ids=("s", "s"))),
    ("stage: a stage id too many", STAGES, spoiled(StagedMany, stage_ids=("s",) * 4)),
    ("stage: fewer done", STAGES, spoiled(StagedMany, done=b"\x03")),
    ("stage: wrong bitmap", STAGES, spoiled(StagedMany, done=b"")),
    ("stage: done and refused", STAGES, spoiled(StagedMany, errors=(STALE,))),
    ("stage: an error beyond", STAGES, spoiled(StagedMany, errors=(BEYOND,))),
    ("stage: a layout of another size", STAGES, spoiled_layouts(object_sizes=u64(1, 100, 100))),
    ("commit: no reasons", COMMITS, spoiled(CommittedMany, errors=())),
    ("commit: one reason twice", COMMITS, spoiled(CommittedMany, errors=(STALE, STALE, STALE))),
    ("commit: a reason too many", COMMITS, spoiled(CommittedMany, errors=(*ALL_STALE, STALE))),
    ("commit: an error beyond", COMMITS, spoiled(CommittedMany, errors=(STALE, BEYOND, BEYOND))),
    ("commit: done without a size", COMMITS, spoiled(CommittedMany, done=b"\x07", errors=())),
    ("commit: sizes for none", COMMITS, spoiled(CommittedMany, object_sizes=u64(100))),
    ("commit: statuses for none", COMMITS, spoiled(CommittedMany, sync_statuses=b"\x04")),
    ("commit: generations for none", COMMITS, spoiled(CommittedMany, generations=u64(1))),
    ("evict: wrong bitmap", EVICTS, spoiled(EvictedMany, done=b"\x00\x00")),
    ("evict: done and refused", EVICTS, spoiled(EvictedMany, done=b"\x01", errors=(STALE,))),
    ("evict: an error beyond", EVICTS, spoiled(EvictedMany, errors=(BEYOND,))),
    ("evict: one error twice", EVICTS, spoiled(EvictedMany, errors=(STALE, STALE))),
]


@pytest.mark.parametrize(("requests", "lie"), [each[1:] for each in LIES], ids=[each[0] for each in LIES])
def test_a_change_of_many_whose_reply_lies_fails_for_all_and_ends_the_connection(
    scripted2, client_to: MakeClient, requests: list[Request], lie: Callable[[Request, Reply], Reply]
) -> None:
    client = client_to(scripted2.socket_path)
    scripted2.change_batch = lie
    assert failure(client, requests) is Outcome.DAEMON_GARBLED
    (whole,) = batched(requests, limits_of(3))
    assert isinstance(whole.request, BatchRequest)
    with pytest.raises(DaemonUnavailable) as caught:
        client.ask(whole.request)
    assert caught.value.outcome is Outcome.DAEMON_GARBLED
    scripted2.change_batch = lambda request, reply: reply
    assert client.exchange(locates(2)) == [MissReply()] * 2
    assert scripted2.connections_accepted == 3


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        struct.pack(">I", 1) + b"\xc1",
        struct.pack(">I", 2) + b"\x90\x90",
        struct.pack(">I", 4) + b"\x93\x00\xa1x",
        struct.pack(">I", 5) + b"\x93\x00\xa1x\x80",
    ],
    ids=["4 GiB claimed", "no msgpack", "trailing bytes", "short list", "the connection's end"],
)
def test_a_frame_that_is_none_fails_its_exchange_and_ends_the_connection(
    scripted2, client_to: MakeClient, frame: bytes
) -> None:
    client = client_to(scripted2.socket_path)
    client.exchange([Ping()])
    scripted2.garble = lambda request, data: frame if isinstance(request, LocateMany) else data
    assert failure(client, locates(2)) is Outcome.DAEMON_GARBLED
    scripted2.garble = lambda request, data: data
    assert client.exchange(locates(2)) == [MissReply()] * 2
    assert scripted2.connections_accepted == 2


# -- one uri that fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [LocateMany, StageMany, CommitMany, EvictMany])
def test_a_batch_that_is_refused_as_a_whole_is_that_refusal_for_each(
    scripted2, client_to: MakeClient, refused: type[Request]
) -> None:
    error = ErrorReply(error_message="not now", error_code=ErrorCode.UNAVAILABLE)
    requests: dict[type[Request], Sequence[Request]] = {
        LocateMany: locates(3),
        StageMany: STAGES,
        CommitMany: COMMITS,
        EvictMany: EVICTS,
    }
    scripted2.change_batch = lambda request, reply: error
    client = client_to(scripted2.socket_path)
    assert client.exchange(requests[refused]) == [error] * 3
    assert client.lookup(["a"]) == [Outcome.DAEMON_REFUSED]
    assert scripted2.connections_accepted == 1


@pytest.mark.parametrize("step", [StageWrite, CommitWrite])
def test_one_key_that_is_refused_fails_alone(scripted2, connect, step: type[Request]) -> None:
    bad = MAPPING.uri("bad")

    def refuse_one(request: Request, reply: Reply) -> Reply:
        if not (isinstance(request, step) and request.uri == bad):
            return reply
        scripted2.objects.pop(bad, None)
        return ErrorReply(error_message="no", error_code=ErrorCode.NO_SPACE)

    scripted2.change = refuse_one
    keys = ["a", "bad", "b"]
    driver = connect(scripted2.socket_path, store_threads=1)
    assert not driver.store(keys, [bytearray(10)] * 3).ok
    assert driver.exists(keys) == [True, False, True]
    assert driver.connector.status()["stores"] == {"ok": 2, "no_space": 1}


def test_one_delete_that_is_refused_fails_alone(scripted2, connect) -> None:
    driver = connect(scripted2.socket_path)
    assert driver.store(["a", "bad"], [bytearray(10)] * 2).ok
    bad = MAPPING.uri("bad")
    kept = scripted2.objects[bad]

    def refuse_one(request: Request, reply: Reply) -> Reply:
        if request != Evict(uri=bad):
            return reply
        scripted2.objects[bad] = kept
        return ErrorReply(error_message="no")

    scripted2.change = refuse_one
    assert driver.delete(["a", "bad", "none"]) == [True, False, True]
    assert driver.exists(["a", "bad"]) == [False, True]


def test_one_key_without_checksums_and_one_only_staged_are_misses_alone(scripted2, connect) -> None:
    driver = connect(scripted2.socket_path)
    keys, data = ["a", "unsummed", "staged", "b"], [bytearray(os.urandom(10)) for _ in range(4)]
    assert driver.store(keys, data).ok
    for key, changes in {"unsummed": {"checksum": None}, "staged": {}}.items():
        found = scripted2.objects[MAPPING.uri(key)]
        layout = tuple(chunk.model_copy(update=changes) for chunk in found.chunk_layout)
        status = SyncStatus.STAGED if key == "staged" else found.sync_status
        scripted2.objects[MAPPING.uri(key)] = found.model_copy(
            update={"chunk_layout": layout, "sync_status": status}
        )
    back = [bytearray(10) for _ in keys]
    assert driver.exists(keys) == [True, False, False, True]
    assert driver.load(keys, back) == [True, False, False, True]
    assert (back[0], back[3]) == (data[0], data[3])
    assert driver.connector.status()["lookups"] == {"ok": 2, "unverifiable": 2}
    assert driver.connector.status()["loads"] == {"ok": 2, "no_checksum": 1, "staged": 1}


# -- late replies --------------------------------------------------------------------------------------------


def test_a_late_batch_reply_never_reaches_the_next_caller(scripted2, client_to: MakeClient) -> None:
    client = client_to(scripted2.socket_path, 0.3, probe_interval_s=0.01)
    client.exchange([Ping()])
    scripted2.objects = {"old": hit(1), "new": hit(2)}
    scripted2.freeze()
    assert failure(client, [Locate(uri="old", auto_ingest=False)] * 2) is Outcome.DAEMON_LATE
    scripted2.thaw()
    wait_until(lambda: not client.breaker_open)
    assert client.exchange([Locate(uri="new", auto_ingest=False)] * 2) == [hit(2)] * 2


def test_a_reply_to_nobody_is_dropped_and_the_right_one_still_taken(scripted2, client_to: MakeClient) -> None:
    client = client_to(scripted2.socket_path)
    client.exchange([Ping()])
    scripted2.objects = {"a": hit(1)}
    body = b"\x93\xcd\x30\x39\xa4MISS\x80"  # [12345, "MISS", {}]
    stray = struct.pack(">I", len(body)) + body
    scripted2.garble = lambda request, data: stray + data
    assert client.exchange([Locate(uri="a", auto_ingest=False)]) == [hit(1)]
    assert scripted2.connections_accepted == 1
    assert client.ignored() == {"unknown_fields": 0, "dropped_replies": 1}


@pytest.mark.parametrize("wire", [WIRE_1_1, LATEST], ids=str)
def test_what_nobody_used_is_counted_and_told_also_of_connections_that_are_closed(
    scripted2, connect, wire: WireVersion
) -> None:
    """A field in the answer to each greeting, and where it is told."""
    scripted2.garble = lambda request, data: (
        data.replace(b'{"status"', b'{"novel":1,"status"') if isinstance(request, Ping | Hello) else data
    )
    driver = connect(scripted2.socket_path, wire=str(wire))
    told = [{"unknown_fields": 0}]
    for _ in range(2):
        assert driver.exists(["a"]) == [False]
        told.append(driver.connector.status()["ignored"])
        scripted2.stop()
        scripted2.start()
    assert all(later["unknown_fields"] > before["unknown_fields"] for before, later in pairwise(told))
    driver.connector.close()
    assert driver.connector.status()["ignored"]["unknown_fields"] >= told[-1]["unknown_fields"]


def test_replies_out_of_order_reach_the_request_that_asked(folder: Path, client_to: MakeClient) -> None:
    """By a daemon of its own, since the scripted one answers in order."""
    path = str(folder / "s")
    hello = (
        b'{"status":"HELLO","version":"2.0","versions":["2.0"],"features":[],"devices":[],"instance_id":"i",'
        b'"limits":{"max_request_bytes":9999,"max_reply_bytes":9999,"max_in_flight":9,"max_batch":1}}\n'
    )

    def serve(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        with accepted, suppress(OSError):
            accepted.recv(65536)
            accepted.sendall(hello)
            asked = b""
            while asked.count(b"locate") < 3:
                asked += accepted.recv(65536)
            for number in (4, 2, 3):
                body = bytes([0x93, number]) + b"\xa3HIT\x83\xabobject_size" + bytes([number])
                body += b"\xacchunk_layout\x90\xabsync_status\xaaLOCAL_ONLY"
                accepted.sendall(struct.pack(">I", len(body)) + body)
            accepted.recv(65536)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        client = client_to(path)
        replies = client.exchange([Locate(uri=f"u{number}") for number in range(3)])
        assert [reply.object_size for reply in replies if isinstance(reply, HitReply)] == [2, 3, 4]
        client.close()
        thread.join(DEADLINE_S)
