"""Wire 2's batches: each uri has its own result, and it is the one that a single request would have had."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from hypercache_protocol.batches import (
    CommitMany,
    CommittedMany,
    EvictedMany,
    EvictMany,
    LocatedMany,
    LocateMany,
    StagedMany,
    StageMany,
)
from hypercache_protocol.errors import InvalidMessage
from hypercache_protocol.fields import CHUNK_SIZE
from hypercache_protocol.layout import (
    U32,
    U64,
    packed,
    unpack_hits,
    unpack_statuses,
    unpacked,
    unpacked_bits,
)
from hypercache_protocol.messages import (
    CommittedReply,
    CommitWrite,
    Evict,
    EvictedReply,
    HitReply,
    Locate,
    MissReply,
)
from hypercache_protocol.states import SyncStatus
from hypercache_protocol.versions import WIRE_2_0, WIRE_2_1

from .checks import (
    ODD_SIZE,
    Bench,
    Check,
    check_apart,
    check_layout,
    check_places,
    locate,
    store,
    store_checked,
    word,
)
from .checks import stage as stage_one
from .shell import CheckFailed, Connection, expect

SIZES = (1, 0, CHUNK_SIZE, 1920, ODD_SIZE, 4096, 7, CHUNK_SIZE + 1, 511, 12, 13)
"""Eleven objects: not a whole number of bytes of a bitmap, and no two alike."""


@dataclass
class Written:
    """Objects that were staged in one request: what the daemon gave for each."""

    suffixes: tuple[str, ...]
    stage_ids: tuple[str, ...]
    layouts: list[HitReply]


def _stage_many(connection: Connection, prefix: str, suffixes: tuple[str, ...]) -> Written:
    sizes = SIZES[: len(suffixes)]
    request = StageMany(prefix=prefix, suffixes=suffixes, sizes=sizes, auto_flush_s3=False)
    reply = connection.get(request, StagedMany)
    done = _bits("done", reply.done, len(suffixes))
    expect(all(done), f"stage_many refused some: {[error.error_message for error in reply.errors]}")
    layouts = _layouts(reply, len(suffixes))
    expect(
        len(reply.stage_ids) == len(suffixes), f"{len(reply.stage_ids)} stage_ids for {len(suffixes)} uris"
    )
    for layout, size in zip(layouts, sizes, strict=True):
        check_layout("stage_many", layout.chunk_layout, size)
    return Written(suffixes, reply.stage_ids, layouts)


def _names(bench: Bench, count: int = len(SIZES)) -> tuple[str, tuple[str, ...]]:
    """A prefix, and the rest of each uri."""
    suffixes = tuple(f"{number:02}" for number in range(count))
    prefix = ""
    for suffix in suffixes:
        prefix = bench.uri(f"many-{suffix}").removesuffix(suffix)
    return prefix, suffixes


def _bits(name: str, bitmap: bytes, count: int) -> list[bool]:
    try:
        return unpacked_bits(bitmap, count)
    except InvalidMessage as error:
        raise CheckFailed(f"{name}: {error}") from error


def _layouts(reply: LocatedMany | StagedMany, count: int) -> list[HitReply]:
    if reply.layouts is None:
        raise CheckFailed(f"{reply.status} has no layouts although they were asked for")
    try:
        return unpack_hits(reply.layouts, count)
    except InvalidMessage as error:
        raise CheckFailed(f"{reply.status}: {error}") from error


def _column(name: str, column: bytes, count: int) -> list[int]:
    try:
        return unpacked(name, column, U64, count)
    except InvalidMessage as error:
        raise CheckFailed(str(error)) from error


def stage(bench: Bench) -> None:
    """stage_many gives each uri a stage_id and a layout of its own, which add up and lie apart."""
    connection, _ = bench.connect_framed()
    prefix, suffixes = _names(bench)
    written = _stage_many(connection, prefix, suffixes)
    expect(len(set(written.stage_ids)) == len(suffixes), "two staged writes have the same stage_id")
    check_apart("stage_many", [chunk for layout in written.layouts for chunk in layout.chunk_layout])


def commit(bench: Bench) -> None:
    """commit_many commits each staged write, with its own checksums, size and generation."""
    connection, _ = bench.connect_framed()
    prefix, suffixes = _names(bench)
    written = _stage_many(connection, prefix, suffixes)
    words = _checksums(written.layouts)
    reply = connection.get(_commit_request(prefix, written, words), CommittedMany)
    count = len(suffixes)
    expect(all(_bits("done", reply.done, count)), f"commit_many refused some: {reply.errors}")
    sizes = _column("object_sizes", reply.object_sizes, count)
    expect(sizes == list(SIZES), f"commit_many says the sizes {sizes}, staged were {list(SIZES)}")
    try:
        statuses = set(unpack_statuses(reply.sync_statuses, count))
    except InvalidMessage as error:
        raise CheckFailed(str(error)) from error
    expect(statuses == {SyncStatus.LOCAL_ONLY}, f"commit_many says {sorted(map(word, statuses))}")
    generations = _column("generations", reply.generations, count)
    for index, suffix in enumerate(suffixes):
        hit = locate(connection, prefix + suffix)
        check_places(f"locate of uri {index}", hit.chunk_layout, written.layouts[index].chunk_layout)
        found = _own_checksums(hit)
        expect(found == words[index], f"uri {index} has the checksums {found}, given were {words[index]}")
        expect(
            hit.generation == generations[index], f"uri {index}: the generations of commit and locate differ"
        )


def _checksums(layouts: Sequence[HitReply]) -> list[list[int]]:
    return [
        [zlib.crc32(b"%d %d" % (index, number)) for number in range(len(layout.chunk_layout))]
        for index, layout in enumerate(layouts)
    ]


def _commit_request(prefix: str, written: Written, words: Sequence[Sequence[int]]) -> CommitMany:
    return CommitMany(
        prefix=prefix,
        suffixes=written.suffixes,
        stage_ids=written.stage_ids,
        local_only=True,
        checksum_counts=packed([len(own) for own in words], U32),
        checksums=packed([word for own in words for word in own], U32),
    )


def own_results(bench: Bench) -> None:
    """One uri that is refused fails alone: the others are committed, and the error names its place."""
    connection, _ = bench.connect_framed()
    prefix, suffixes = _names(bench, 5)
    written = _stage_many(connection, prefix, suffixes)
    stage_ids = (*written.stage_ids[:2], "x-compat-stale", *written.stage_ids[3:])
    request = CommitMany(prefix=prefix, suffixes=suffixes, stage_ids=stage_ids, local_only=True)
    reply = connection.get(request, CommittedMany)
    done = _bits("done", reply.done, 5)
    expect(done == [True, True, False, True, True], f"done is {done}; only the third was wrong")
    indexes = [error.index for error in reply.errors]
    expect(indexes == [2], f"errors are about the uris {indexes}; only that at 2 was wrong")
    sizes = _column("object_sizes", reply.object_sizes, 4)
    expect(sizes == [1, 0, 1920, ODD_SIZE], f"object_sizes of those that are done are {sizes}")
    connection.get(CommitWrite(uri=prefix + suffixes[2], stage_id=written.stage_ids[2]), CommittedReply)


def presence(bench: Bench) -> None:
    """locate_many has a bit for each uri that is here, and one for each that can be verified."""
    connection, _ = bench.connect_framed()
    prefix, suffixes = _names(bench)
    verifiable, unverifiable = {0, 4, 8}, {3, 10}
    lines = bench.connect()
    for index in verifiable:
        store_checked(lines, prefix + suffixes[index])
    for index in unverifiable:
        store(lines, prefix + suffixes[index], 10)
    reply = connection.get(LocateMany(prefix=prefix, suffixes=suffixes), LocatedMany)
    _same_places("present", _bits("present", reply.present, len(suffixes)), verifiable | unverifiable)
    _same_places("verifiable", _bits("verifiable", reply.verifiable, len(suffixes)), verifiable)


def _same_places(name: str, flags: Sequence[bool], wanted: set[int]) -> None:
    found = {index for index, flag in enumerate(flags) if flag}
    expect(found == wanted, f"{name} has the bits {sorted(found)} set and should have {sorted(wanted)}")


def agree(bench: Bench) -> None:
    """locate_many gives every uri the layout, status, generation and checksums that a single locate gives."""
    connection, _ = bench.connect_framed()
    prefix, suffixes = _names(bench)
    written = _stage_many(connection, prefix, suffixes)
    words = _checksums(written.layouts)
    connection.get(_commit_request(prefix, written, words), CommittedMany)
    for index in (1, 6):
        connection.get(Evict(uri=prefix + suffixes[index]), EvictedReply)
    reply = connection.get(LocateMany(prefix=prefix, suffixes=suffixes, layouts=True), LocatedMany)
    present = _bits("present", reply.present, len(suffixes))
    many = iter(_layouts(reply, sum(present)))
    for index, suffix in enumerate(suffixes):
        single = connection.ask(Locate(uri=prefix + suffix, auto_ingest=False)).reply
        expect(
            isinstance(single, HitReply) == present[index],
            f"present and a single locate differ on uri {index}",
        )
        if isinstance(single, HitReply):
            _same_hit(index, next(many), single)


def _same_hit(index: int, many: HitReply, single: HitReply) -> None:
    check_places(f"uri {index} in the batch", many.chunk_layout, single.chunk_layout)
    for name, one, other in (
        ("object_size", many.object_size, single.object_size),
        ("sync_status", word(many.sync_status), word(single.sync_status)),
        ("generation", many.generation, single.generation),
        ("checksums", _own_checksums(many), _own_checksums(single)),
        ("tiers", _tiers(many), _tiers(single)),
    ):
        expect(one == other, f"{name} of uri {index}: {one} in a batch and {other} alone")


def _own_checksums(hit: HitReply) -> list[int | None]:
    return [chunk.checksum for chunk in hit.chunk_layout]


def _tiers(hit: HitReply) -> list[str]:
    return [chunk.tier.value for chunk in hit.chunk_layout]


def evict(bench: Bench) -> None:
    """evict_many has a bit for each uri that was here, and all of them are gone."""
    connection, _ = bench.connect_framed()
    prefix, suffixes = _names(bench)
    here = {2, 3, 9}
    for index in here:
        store(bench.connect(), prefix + suffixes[index], 10)
    reply = connection.get(EvictMany(prefix=prefix, suffixes=suffixes), EvictedMany)
    _same_places("done", _bits("done", reply.done, len(suffixes)), here)
    for suffix in suffixes:
        connection.get(Locate(uri=prefix + suffix, auto_ingest=False), MissReply)


def unless_stored(bench: Bench) -> None:
    """stage_many with unless_stored stages nothing where that very size is committed with checksums, and says
    so; it stages all else."""
    connection, _ = bench.connect_framed(WIRE_2_1)
    prefix, suffixes = _names(bench, 5)
    lines = bench.connect()
    store_checked(lines, prefix + suffixes[0])
    store_checked(lines, prefix + suffixes[1])
    store(lines, prefix + suffixes[2], ODD_SIZE)  # without checksums
    stage_one(lines, prefix + suffixes[3], ODD_SIZE)
    sizes = (ODD_SIZE, ODD_SIZE + 1, ODD_SIZE, ODD_SIZE, ODD_SIZE)
    request = StageMany(
        prefix=prefix, suffixes=suffixes, sizes=sizes, auto_flush_s3=False, unless_stored=True
    )
    reply = connection.get(request, StagedMany)
    if reply.stored is None:
        raise CheckFailed("stage_many does not say what is stored although it was asked with unless_stored")
    _same_places("stored", _bits("stored", reply.stored, 5), {0})
    _same_places("done", _bits("done", reply.done, 5), {1, 2, 3, 4})
    for layout, size in zip(_layouts(reply, 4), sizes[1:], strict=True):
        check_layout("stage_many", layout.chunk_layout, size)


CHECKS = (
    Check(
        "batches.stage",
        stage,
        "Objects that are written together get each other's blocks, or layouts that do not add up. Do not "
        "run this daemon.",
        WIRE_2_0,
        feature="batches",
    ),
    Check(
        "batches.commit",
        commit,
        "Objects that are committed together get each other's checksums, sizes or generations.",
        WIRE_2_0,
        feature="batches",
    ),
    Check(
        "batches.own-results",
        own_results,
        "One bad object fails or confuses the whole batch it was committed in.",
        WIRE_2_0,
        feature="batches",
    ),
    Check(
        "batches.presence",
        presence,
        "A lookup says that objects are here which are not, or the other way round: loads fail, or the "
        "cache never hits.",
        WIRE_2_0,
        feature="batches",
    ),
    Check(
        "batches.agree-with-singles",
        agree,
        "A batch gives an object another layout than a single locate does: clients would load other "
        "objects' bytes. Do not run this daemon.",
        WIRE_2_0,
        feature="batches",
    ),
    Check(
        "batches.evict",
        evict,
        "Deleting many objects deletes others, or says that it did and did not.",
        WIRE_2_0,
        feature="batches",
    ),
    Check(
        "batches.unless-stored",
        unless_stored,
        "What a client stores may be taken for stored although it is not and so never be written, or be "
        "written again and again.",
        WIRE_2_1,
        feature="unless_stored",
    ),
)
