"""Stage, append, commit: the three steps of a write, as clients of wire 1.0 take them."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from pathlib import Path

from hypercache_protocol.fields import CHUNK_SIZE, MIB, Tier
from hypercache_protocol.messages import (
    AppendWrite,
    ChunkLocation,
    CommittedReply,
    CommitWrite,
    GetWriteStatus,
    HitReply,
    Locate,
    StagedReply,
    StageWrite,
    WriteStatusReply,
)
from hypercache_protocol.states import SyncStatus

from .checks import (
    ODD_SIZE,
    Bench,
    Check,
    check_apart,
    check_layout,
    check_places,
    locate,
    stage,
    store,
    word,
)
from .shell import NotOffered, expect

_SIZES = (0, 1, 511, 1920, 4096, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, ODD_SIZE)
_AFTER_COMMIT = frozenset(SyncStatus) - {SyncStatus.STAGED}


def layouts_add_up(bench: Bench) -> None:
    """stage_write of any size gives chunks that add up to it, none above 4 MiB, none sharing a byte."""
    connection = bench.connect()
    taken: list[ChunkLocation] = []
    for size in _SIZES:
        taken += stage(connection, bench.uri(f"of-{size}"), size).chunk_layout
    check_apart("stage_write of several objects", taken)


def staged_word(bench: Bench) -> None:
    """A staged write has the sync_status STAGED until its commit."""
    connection, uri = bench.connect(), bench.uri("staged")
    reply = stage(connection, uri, 10)
    expect(reply.sync_status is SyncStatus.STAGED, f"stage_write says sync_status {word(reply.sync_status)}")
    status = connection.get(GetWriteStatus(uri=uri), WriteStatusReply).sync_status
    expect(status is SyncStatus.STAGED, f"get_write_status says {word(status)} before the commit")


def staged_is_found(bench: Bench) -> None:
    """locate of a staged write that has no committed version gives the staged layout."""
    connection, uri = bench.connect(), bench.uri("staged")
    staged = stage(connection, uri, ODD_SIZE)
    check_places("the layout of locate", locate(connection, uri).chunk_layout, staged.chunk_layout)


def append(bench: Bench) -> None:
    """append_write gives only the new chunks, and the object's whole size."""
    connection, uri = bench.connect(), bench.uri("appended")
    chunks = list(stage(connection, uri, 1920).chunk_layout)
    size = 1920
    for more in (1, CHUNK_SIZE, 5 * MIB + 3):
        reply = connection.get(AppendWrite(uri=uri, size_bytes=more), StagedReply)
        size += more
        check_layout("append_write (only the new chunks)", reply.chunk_layout, more)
        expect(reply.object_size == size, f"append_write says {reply.object_size} bytes in all, not {size}")
        chunks += reply.chunk_layout
    connection.get(CommitWrite(uri=uri), CommittedReply)
    check_apart("append_write", chunks)
    check_places("the layout of locate after appends", locate(connection, uri).chunk_layout, chunks)


def commit(bench: Bench) -> None:
    """commit_write is answered with WRITECOMMITTED, the size, and a status beyond STAGED."""
    connection = bench.connect()
    reply = store(connection, bench.uri("committed"), ODD_SIZE).committed
    expect(reply.object_size == ODD_SIZE, f"commit_write says {reply.object_size} bytes, not {ODD_SIZE}")
    expect(reply.sync_status in _AFTER_COMMIT, f"commit_write says sync_status {word(reply.sync_status)}")


def empty_object(bench: Bench) -> None:
    """An object of no bytes is committed and found."""
    connection = bench.connect()
    stored = store(connection, bench.uri("empty"), 0)
    hit = locate(connection, stored.uri)
    expect(hit.object_size == 0, f"locate says {hit.object_size} bytes")
    expect(not hit.chunk_layout, "an empty object has chunks")


def never_staged(bench: Bench) -> None:
    """A commit or an append of what was never staged is an error, and makes no object."""
    connection, uri = bench.connect(), bench.uri("never-staged")
    connection.refused(CommitWrite(uri=uri))
    connection.refused(AppendWrite(uri=uri, size_bytes=10))
    reply = connection.ask(Locate(uri=uri, auto_ingest=False)).reply
    expect(not isinstance(reply, HitReply), "locate finds what was never staged")


def second_commit(bench: Bench) -> None:
    """A second commit of one staged write is an error, and the first stands."""
    connection = bench.connect()
    stored = store(connection, bench.uri("twice"), 10)
    connection.refused(CommitWrite(uri=stored.uri))
    check_places("the layout of locate", locate(connection, stored.uri).chunk_layout, stored.chunks)


def overwrite(bench: Bench) -> None:
    """The old version stays what locate gives until the new one is committed; their blocks differ."""
    connection, uri = bench.connect(), bench.uri("overwritten")
    first = store(connection, uri, 1920)
    second = stage(connection, uri, ODD_SIZE)
    check_apart("stage_write over a committed object", [*first.chunks, *second.chunk_layout])
    check_places("locate before the second commit", locate(connection, uri).chunk_layout, first.chunks)
    connection.get(CommitWrite(uri=uri), CommittedReply)
    hit = locate(connection, uri)
    expect(hit.object_size == ODD_SIZE, f"after the second commit locate says {hit.object_size} bytes")
    check_places("locate after the second commit", hit.chunk_layout, second.chunk_layout)


def across_connections(bench: Bench) -> None:
    """A write may be staged, appended to and committed over three connections."""
    uri = bench.uri("wandering")
    first = stage(bench.connect(), uri, 10)
    added = bench.connect().get(AppendWrite(uri=uri, size_bytes=20), StagedReply)
    reply = bench.connect().get(CommitWrite(uri=uri), CommittedReply)
    expect(reply.object_size == 30, f"commit_write says {reply.object_size} bytes, not 30")
    wanted = [*first.chunk_layout, *added.chunk_layout]
    check_places("the layout of locate", locate(bench.connect(), uri).chunk_layout, wanted)


def wrong_sha256(bench: Bench) -> None:
    """A commit whose sha256 is not that of the blocks is an error, and the staged write stays."""
    connection, uri = bench.connect(), bench.uri("sha256")
    stage(connection, uri, 4096)
    connection.refused(CommitWrite(uri=uri, sha256="0" * 64))
    connection.get(CommitWrite(uri=uri), CommittedReply)


def no_space(bench: Bench) -> None:
    """A write that no pool could hold is an error, at once."""
    connection, uri = bench.connect(), bench.uri("huge")
    connection.refused(StageWrite(uri=uri, size_bytes=1 << 45, auto_flush_s3=False))
    connection.get(StageWrite(uri=uri, size_bytes=1, auto_flush_s3=False), StagedReply)


def tier_words(bench: Bench) -> None:
    """A tier may be asked for in letters of any case, and each chunk says which it got."""
    connection = bench.connect()
    for name in ("nvme", "NVME", "ram", "RAM"):
        uri = bench.uri(f"tier-{name}")
        fields = {"uri": uri, "size_bytes": 10, "auto_flush_s3": False, "tier": name}
        reply = connection.ask_fields(action="stage_write", **fields)
        expect("error_message" not in reply, f"stage_write with tier {name!r} got {reply}")
        tiers = {str(chunk.get("tier", "nvme")).lower() for chunk in reply.get("chunk_layout", [])}
        expect(tiers <= {tier.value for tier in Tier}, f"a chunk is in the tier {tiers}")


def ram_files(bench: Bench) -> None:
    """Each chunk of the tier ram is a file of its own, which is there before its client writes."""
    connection = bench.connect()
    chunks: list[ChunkLocation] = []
    for number in range(2):
        uri = bench.uri(f"ram-{number}")
        request = StageWrite(uri=uri, size_bytes=CHUNK_SIZE + 1, tier=Tier.RAM, auto_flush_s3=False)
        chunks += connection.get(request, StagedReply).chunk_layout
    files = [Path(chunk.device) for chunk in chunks if chunk.tier is Tier.RAM]
    if not files:
        raise NotOffered("the daemon puts what is for the tier ram elsewhere")
    expect(len(set(files)) == len(files), f"two chunks of the tier ram share a file: {files}")
    expect(not any(chunk.offset for chunk in chunks if chunk.tier is Tier.RAM), "a RAM chunk has an offset")
    for file in files:
        expect(file.suffix == ".shm", f"the RAM file {file} does not end in .shm")
        expect(file.is_file() or not file.parent.is_dir(), f"the RAM file {file} is not there")


def bytes_come_back(bench: Bench) -> None:
    """What is written where the layout says is read where locate says, and has the sha256 it was given."""
    connection, uri = bench.connect(), bench.uri("bytes")
    data = random.Random(uri).randbytes(ODD_SIZE)
    staged = stage(connection, uri, len(data))
    _write(staged.chunk_layout, data)
    connection.get(CommitWrite(uri=uri, sha256=hashlib.sha256(data).hexdigest()), CommittedReply)
    expect(_read(locate(connection, uri).chunk_layout) == data, "other bytes came back than were written")


def _write(chunks: Sequence[ChunkLocation], data: bytes) -> None:
    position = 0
    for chunk in chunks:
        device = _open(chunk.device, os.O_RDWR)
        try:
            os.pwrite(device, data[position : position + chunk.length], chunk.offset)
            # The daemon may read the blocks around the page cache.
            os.fsync(device)
        finally:
            os.close(device)
        position += chunk.length


def _read(chunks: Sequence[ChunkLocation]) -> bytes:
    parts = []
    for chunk in chunks:
        device = _open(chunk.device, os.O_RDONLY)
        try:
            parts.append(os.pread(device, chunk.length, chunk.offset))
        finally:
            os.close(device)
    return b"".join(parts)


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise NotOffered(f"{path} cannot be opened by whoever runs this: {error.strerror}") from error


CHECKS = (
    Check(
        "write.layouts-add-up",
        layouts_add_up,
        "The daemon hands out layouts with chunks missing, too long, or on top of each other. Clients would "
        "write less than they think, or over other objects. Do not run this daemon.",
    ),
    Check(
        "write.staged",
        staged_word,
        "A write that is not committed does not look like one: finished and unfinished cannot be told apart.",
    ),
    Check(
        "write.staged-is-found",
        staged_is_found,
        "Clients of 0.9 read back what they have staged before they commit it, and do not find it.",
    ),
    Check(
        "write.append",
        append,
        "Streamed writes (fsspec, checkpoints) put their pieces in wrong places, or lose some of them: an "
        "append must give the new chunks and nothing else.",
    ),
    Check(
        "write.commit",
        commit,
        "Clients take a successful write for a failed one: they look for the word WRITECOMMITTED, "
        "object_size and sync_status.",
    ),
    Check("write.empty", empty_object, "Empty files cannot be stored, or are not found again."),
    Check(
        "write.never-staged",
        never_staged,
        "A commit without a write is told as success: clients believe that an object exists which does not.",
    ),
    Check(
        "write.second-commit",
        second_commit,
        "A repeated commit changes the object or looks like a new write.",
    ),
    Check(
        "write.overwrite",
        overwrite,
        "Readers see a half written new version, or lose the old one, while an object is replaced.",
    ),
    Check(
        "write.across-connections",
        across_connections,
        "Clients of 0.9 stage, append and commit one write over different connections; here it is lost.",
    ),
    Check(
        "write.wrong-sha256",
        wrong_sha256,
        "Damaged bytes are committed although the client gave the SHA-256 that shows it, or the write is "
        "lost and cannot be tried again.",
    ),
    Check(
        "write.no-space",
        no_space,
        "A write that cannot fit is not refused: clients hang, or write past the end.",
    ),
    Check("write.tier-words", tier_words, "Clients that ask for the RAM tier (the KV store of 0.9) fail."),
    Check(
        "write.ram-files",
        ram_files,
        "Clients of 0.9 empty a RAM file before they write it, so what shares it is lost; those that create "
        "nothing cannot write; and a file of any other name they keep open for ever.",
        required=False,
    ),
    Check(
        "write.bytes-come-back",
        bytes_come_back,
        "Bytes that were written are not those that are read. Do not run this daemon.",
        required=False,
    ),
)
