"""What wire 1.1 added: local_only, chunk_checksums, stage_id, sync_status, generation, a ping that tells."""

from __future__ import annotations

import zlib

from hypercache_protocol.errors import ErrorCode
from hypercache_protocol.fields import CHUNK_SIZE
from hypercache_protocol.messages import (
    AppendWrite,
    CommittedReply,
    CommitWrite,
    GetWriteStatus,
    Ping,
    PongReply,
    StagedReply,
    WriteStatusReply,
)
from hypercache_protocol.states import SyncStatus
from hypercache_protocol.versions import WIRE_1_1, features_of

from .checks import ODD_SIZE, Bench, Check, check_places, locate, stage, store, word
from .shell import Connection, Fields, expect

_WRONG_CHECKSUMS: tuple[object, ...] = ([], [1], [1, 2, 3, 4], [1, 2, -1], [1, 2, 1 << 32], [1, 2, "3"], "1")


def ping_fields(bench: Bench) -> None:
    """ping tells wire, daemon, instance_id and features, the same on every connection."""
    first, second = (bench.connect().get(Ping(), PongReply) for _ in range(2))
    for name in ("wire", "daemon", "instance_id", "features"):
        expect(bool(getattr(first, name)), f"the PONG lacks {name}")
        expect(getattr(first, name) == getattr(second, name), f"{name} differs from connection to connection")
    expect(1 in (first.wire or ()), f"wire is {first.wire} and lacks 1, which this connection speaks")


def all_features(bench: Bench) -> None:
    """ping lists every feature of wire 1.1."""
    missing = features_of(WIRE_1_1) - set(bench.connect().get(Ping(), PongReply).features or ())
    expect(not missing, f"features lacks {', '.join(sorted(missing))}")


def local_only(bench: Bench) -> None:
    """A commit with local_only makes the object LOCAL_ONLY, wherever its status is told."""
    connection = bench.connect()
    stored = store(connection, bench.uri("local"), 10, local_only=True)
    told = {
        "commit_write": stored.committed.sync_status,
        "locate": locate(connection, stored.uri).sync_status,
        "get_write_status": connection.get(GetWriteStatus(uri=stored.uri), WriteStatusReply).sync_status,
    }
    for action, status in told.items():
        expect(status is SyncStatus.LOCAL_ONLY, f"{action} says sync_status {word(status)}, not LOCAL_ONLY")


def local_only_contradiction(bench: Bench) -> None:
    """local_only with write_through is an error, and the staged write stays."""
    connection, uri = bench.connect(), bench.uri("contradiction")
    stage(connection, uri, 10)
    connection.refused(CommitWrite(uri=uri, local_only=True, write_through=True))
    connection.get(CommitWrite(uri=uri, local_only=True), CommittedReply)


def checksums_come_back(bench: Bench) -> None:
    """locate gives each chunk the checksum that the commit gave for it, in layout order."""
    connection, uri = bench.connect(), bench.uri("checked")
    staged = stage(connection, uri, ODD_SIZE)
    added = connection.get(AppendWrite(uri=uri, size_bytes=CHUNK_SIZE + 1), StagedReply)
    chunks = [*staged.chunk_layout, *added.chunk_layout]
    given = [zlib.crc32(b"%d" % index) for index in range(len(chunks))]
    connection.get(CommitWrite(uri=uri, chunk_checksums=tuple(given)), CommittedReply)
    hit = locate(connection, uri)
    check_places("the layout of locate", hit.chunk_layout, chunks)
    found = [chunk.checksum for chunk in hit.chunk_layout]
    expect(found == given, f"locate gives the checksums {found}, the commit gave {given}")


def no_checksums(bench: Bench) -> None:
    """An object that was committed without checksums has none in locate."""
    connection = bench.connect()
    stored = store(connection, bench.uri("unchecked"), ODD_SIZE)
    found = [chunk.checksum for chunk in locate(connection, stored.uri).chunk_layout]
    expect(set(found) <= {None}, f"locate gives the checksums {found} and the commit gave none")


def wrong_checksums(bench: Bench) -> None:
    """A list of checksums of a wrong length, type or range is an error, and the staged write stays."""
    connection, uri = bench.connect(), bench.uri("wrong-checksums")
    chunks = stage(connection, uri, ODD_SIZE).chunk_layout
    for wrong in _WRONG_CHECKSUMS:
        if isinstance(wrong, list) and len(wrong) == len(chunks) and all(_is_crc32(word) for word in wrong):
            continue  # a daemon may cut objects into any chunks of at most 4 MiB
        reply = connection.ask_fields(action="commit_write", uri=uri, chunk_checksums=wrong)
        expect(
            reply.get("status") == "ERROR", f"chunk_checksums {wrong} for {len(chunks)} chunks got {reply}"
        )
    connection.get(CommitWrite(uri=uri), CommittedReply)


def _is_crc32(word: object) -> bool:
    return isinstance(word, int) and 0 <= word < 1 << 32


def stage_id_told(bench: Bench) -> None:
    """stage_write names the staged write, each with another name; append_write says the same name."""
    connection, uri = bench.connect(), bench.uri("named")
    first, second = (_stage_id(stage(connection, uri, 10), "stage_write") for _ in range(2))
    expect(first != second, f"two staged writes have the same stage_id {first!r}")
    reply = connection.get(AppendWrite(uri=uri, size_bytes=1, stage_id=first), StagedReply)
    expect(_stage_id(reply, "append_write") == first, f"append_write to {first!r} says {reply.stage_id!r}")


def stage_id_chooses(bench: Bench) -> None:
    """A commit with a stage_id commits that staged write, and no newer one."""
    connection, uri = bench.connect(), bench.uri("chosen")
    first, second = stage(connection, uri, 10), stage(connection, uri, 20)
    for staged in (first, second):
        request = CommitWrite(uri=uri, stage_id=_stage_id(staged, "stage_write"))
        reply = connection.get(request, CommittedReply)
        expect(
            reply.object_size == staged.object_size,
            f"the commit of a staged write of {staged.object_size} bytes says {reply.object_size} bytes",
        )
        check_places("the layout of locate", locate(connection, uri).chunk_layout, staged.chunk_layout)


def stage_id_stale(bench: Bench) -> None:
    """A commit with a stage_id that is gone is an error, and a newer staged write is untouched."""
    connection, uri = bench.connect(), bench.uri("stale")
    old = _stage_id(stage(connection, uri, 10), "stage_write")
    connection.get(CommitWrite(uri=uri, stage_id=old), CommittedReply)
    newer = stage(connection, uri, 20)
    connection.refused(CommitWrite(uri=uri, stage_id=old))
    connection.refused(AppendWrite(uri=uri, size_bytes=1, stage_id=old))
    expect(locate(connection, uri).object_size == 10, "the refused commit changed what locate gives")
    request = CommitWrite(uri=uri, stage_id=_stage_id(newer, "stage_write"))
    reply = connection.get(request, CommittedReply)
    expect(reply.object_size == 20, f"the newer write has {reply.object_size} bytes now, 20 were staged")


def _stage_id(reply: StagedReply, action: str) -> str:
    expect(reply.stage_id is not None, f"the reply to {action} has no stage_id")
    return str(reply.stage_id)


def sync_status_told(bench: Bench) -> None:
    """locate tells STAGED before the first commit, and never again after it."""
    connection, uri = bench.connect(), bench.uri("told")
    stage(connection, uri, 10)
    status = locate(connection, uri).sync_status
    expect(status is SyncStatus.STAGED, f"before the commit locate says sync_status {word(status)}")
    connection.get(CommitWrite(uri=uri), CommittedReply)
    _is_committed(connection, uri, "after the commit")
    stage(connection, uri, 20)
    _is_committed(connection, uri, "while a second version is staged")


def _is_committed(connection: Connection, uri: str, when: str) -> None:
    status = locate(connection, uri).sync_status
    expect(status is not None, f"{when} locate tells no sync_status")
    expect(status is not SyncStatus.STAGED, f"{when} locate says sync_status STAGED")


def generation_grows(bench: Bench) -> None:
    """Each commit of a name has a higher generation, also after the object was deleted."""
    connection, uri = bench.connect(), bench.uri("generations")
    last = -1
    for turn in range(4):
        generation = store(connection, uri, 10).committed.generation
        if generation is None:
            expect(False, "the reply to commit_write has no generation")
            return
        expect(generation > last, f"commit {turn + 1} has the generation {generation} after {last}")
        last = generation
        if turn == 1:
            connection.ask_fields(action="evict", uri=uri)


def generation_located(bench: Bench) -> None:
    """locate tells the generation that the commit told."""
    connection = bench.connect()
    stored = store(connection, bench.uri("generation"), 10)
    found = locate(connection, stored.uri).generation
    expect(found is not None, "locate tells no generation")
    expect(
        found == stored.committed.generation,
        f"locate says generation {found}, the commit said {stored.committed.generation}",
    )


def error_codes(bench: Bench) -> None:
    """Errors carry the code that the list has for them."""
    connection, uri = bench.connect(), bench.uri("codes")
    cases: dict[ErrorCode, Fields] = {
        ErrorCode.UNKNOWN_ACTION: {"action": "x_compat_no_such_action"},
        ErrorCode.BAD_REQUEST: {"action": "stage_write", "uri": uri},
        ErrorCode.NOT_STAGED: {"action": "commit_write", "uri": uri},
        ErrorCode.STALE_STAGE: {"action": "commit_write", "uri": uri, "stage_id": "x-compat"},
        ErrorCode.NOT_FOUND: {"action": "get_write_status", "uri": uri},
    }
    for code, fields in cases.items():
        found = connection.ask_fields(**fields).get("error_code")
        expect(found == code.value, f"{fields} has the error_code {found!r}, not {code.value}")


CHECKS = (
    Check(
        "ping.fields",
        ping_fields,
        "Clients cannot learn what the daemon speaks, nor that it was restarted: they keep stale layouts, or "
        "leave checksums and local-only writes unused.",
        WIRE_1_1,
    ),
    Check(
        "ping.all-features",
        all_features,
        "Parts of wire 1.1 are not there. Clients go without them; the connector for LMCache counts every "
        "block that it cannot verify as a miss.",
        WIRE_1_1,
        required=False,
    ),
    Check(
        "local-only",
        local_only,
        "Cache entries that must never leave this machine are told, and perhaps treated, as data to upload.",
        WIRE_1_1,
        feature="local_only",
    ),
    Check(
        "local-only.contradiction",
        local_only_contradiction,
        'A request that asks for both "never upload" and "upload before you answer" is carried out in one '
        "of the two ways, and the client does not know which.",
        WIRE_1_1,
        feature="local_only",
    ),
    Check(
        "checksums.come-back",
        checksums_come_back,
        "Checksums are lost or belong to other chunks. Clients that verify take every such object for "
        "damaged: the cache never hits.",
        WIRE_1_1,
        feature="chunk_checksums",
    ),
    Check(
        "checksums.none",
        no_checksums,
        "Objects that nobody gave checksums have some: clients that verify call good bytes damaged.",
        WIRE_1_1,
        feature="chunk_checksums",
    ),
    Check(
        "checksums.wrong",
        wrong_checksums,
        "Wrong lists of checksums are taken, and the objects can never be verified; or the write is lost.",
        WIRE_1_1,
        feature="chunk_checksums",
    ),
    Check(
        "stage-id.told",
        stage_id_told,
        "Two writers of one name cannot be told apart: one commits the blocks of the other.",
        WIRE_1_1,
        feature="stage_id",
    ),
    Check(
        "stage-id.chooses",
        stage_id_chooses,
        "A commit takes another staged write than the one it names: half written bytes become the object. "
        "Do not run this daemon.",
        WIRE_1_1,
        feature="stage_id",
    ),
    Check(
        "stage-id.stale",
        stage_id_stale,
        "A late commit of a write that is gone takes a newer, unfinished write in its place: half written "
        "bytes become the object. Do not run this daemon.",
        WIRE_1_1,
        feature="stage_id",
    ),
    Check(
        "sync-status.told",
        sync_status_told,
        "Clients cannot tell a committed object from one that is still being written: they read half "
        "written bytes, or treat every object as a miss.",
        WIRE_1_1,
        feature="sync_status",
    ),
    Check(
        "generation.grows",
        generation_grows,
        "A client that kept a layout cannot see that the object was replaced: it reads old or foreign bytes.",
        WIRE_1_1,
        feature="generation",
    ),
    Check(
        "generation.located",
        generation_located,
        "A writer cannot tell whether what is found is what it committed.",
        WIRE_1_1,
        feature="generation",
    ),
    Check(
        "error.codes",
        error_codes,
        "Programs cannot tell errors apart and treat all alike; people still have the sentence.",
        WIRE_1_1,
        required=False,
    ),
)
