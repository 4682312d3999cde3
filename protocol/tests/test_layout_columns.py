"""Columns and bitmaps: what is packed comes back, and a column that lies is an InvalidMessage."""

from typing import Any

import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from hypercache_protocol import ErrorCode, InvalidMessage
from hypercache_protocol.batches import FRAMED_REPLIES, LayoutColumns, LocatedMany, LocateMany
from hypercache_protocol.codecs.msgpack_frames import encode_request
from hypercache_protocol.fields import CHUNK_SIZE, MAX_OBJECT_BYTES, Tier
from hypercache_protocol.layout import (
    STATUS_CODES,
    TIER_CODES,
    U8,
    U32,
    U64,
    Layout,
    Layouts,
    pack_layouts,
    packed,
    packed_bits,
    unpack_hits,
    unpack_layouts,
    unpack_statuses,
    unpacked,
    unpacked_bits,
)
from hypercache_protocol.messages import (
    REPLIES,
    ChunkLocation,
    HitReply,
    Locate,
    Message,
    MissReply,
    StatusReply,
)
from hypercache_protocol.schema import held_models, possible_replies
from hypercache_protocol.states import SyncStatus
from hypercache_protocol.testing import layouts, messages_of
from hypercache_protocol.versions import WIRE_2_0

# -- bitmaps -------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=70))
def test_bits_come_back_as_they_went(flags: list[bool]) -> None:
    bitmap = packed_bits(flags)
    assert len(bitmap) == (len(flags) + 7) // 8
    assert unpacked_bits(bitmap, len(flags)) == flags


def test_the_lowest_bit_of_a_byte_comes_first() -> None:
    assert packed_bits([True] + [False] * 7 + [False, True]) == b"\x01\x02"
    assert unpacked_bits(b"\x81", 8) == [True, False, False, False, False, False, False, True]
    assert packed_bits([]) == b""


@pytest.mark.parametrize(
    ("bitmap", "count", "told"),
    [
        (b"", 1, "for 1 uris must have 1 bytes, not 0"),
        (b"\0", 0, "for 0 uris must have 0 bytes, not 1"),
        (b"\0", 9, "for 9 uris must have 2 bytes, not 1"),
        (b"\0\0", 8, "for 8 uris must have 1 bytes, not 2"),
        (b"\x02", 1, "has a bit set beyond them"),
        (b"\x80", 7, "has a bit set beyond them"),
    ],
)
def test_a_bitmap_of_another_length_or_with_bits_to_spare_lies(bitmap: bytes, count: int, told: str) -> None:
    with pytest.raises(InvalidMessage, match=told) as caught:
        unpacked_bits(bitmap, count)
    assert caught.value.code is ErrorCode.BAD_REQUEST


# -- columns -------------------------------------------------------------------------------------------


def test_columns_are_little_endian() -> None:
    assert packed([1, 0x01020304], U32) == b"\1\0\0\0\4\3\2\1"
    assert packed([1 << 40], U64) == b"\0\0\0\0\0\1\0\0"
    assert unpacked("x", b"\1\0\0\0\4\3\2\1", U32, 2) == [1, 0x01020304]
    assert unpacked("x", b"", U64, 0) == []
    assert unpacked("x", b"\xff" * 8, U64, 1) == [(1 << 64) - 1]


@pytest.mark.parametrize(
    ("column", "count"), [(b"", 1), (b"\0\0\0", 1), (b"\0" * 5, 1), (b"\0" * 8, 1), (b"\0", 0)]
)
def test_a_column_of_another_length_lies(column: bytes, count: int) -> None:
    told = f"^x must have {count} values, so {4 * count} bytes, not {len(column)}$"
    with pytest.raises(InvalidMessage, match=told):
        unpacked("x", column, U32, count)


def test_every_status_and_tier_has_a_code_of_its_own() -> None:
    # Frozen: a peer of an earlier release reads these numbers.
    assert {status.value: code for status, code in STATUS_CODES.items()} == {
        "STAGED": 0,
        "COMMITTED": 1,
        "SYNCING_BACKEND": 2,
        "SYNCED_BACKEND": 3,
        "LOCAL_ONLY": 4,
    }
    assert {tier.value: code for tier, code in TIER_CODES.items()} == {"nvme": 0, "ram": 1}
    assert set(STATUS_CODES) == set(SyncStatus)
    assert set(TIER_CODES) == set(Tier)


def test_statuses_come_out_of_a_column_and_unknown_codes_are_refused() -> None:
    assert unpack_statuses(b"\1\4", 2) == [SyncStatus.COMMITTED, SyncStatus.LOCAL_ONLY]
    with pytest.raises(InvalidMessage, match="sync_statuses has the code 5, which this side does not know"):
        unpack_statuses(b"\1\5", 2)
    with pytest.raises(InvalidMessage, match="sync_statuses must have 3 values"):
        unpack_statuses(b"\1\4", 3)


# -- layouts -------------------------------------------------------------------------------------------


def as_hit(layout: Layout) -> HitReply:
    """What a single locate of the same object would have said."""
    checksums = layout.checksums or [None] * len(layout.paths)
    chunks = zip(layout.paths, layout.offsets, layout.lengths, checksums, strict=True)
    return HitReply.model_validate(
        {
            "object_size": layout.size_bytes,
            "chunk_size": CHUNK_SIZE,
            "chunk_layout": [
                {"device": path, "offset": offset, "length": length, "tier": layout.tier, "checksum": word}
                for path, offset, length, word in chunks
            ],
            "sync_status": layout.sync_status,
            "generation": layout.generation,
        }
    )


@pytest.mark.parametrize("chunk_count", range(5))
def test_made_up_layouts_have_as_many_of_everything_as_chunks(chunk_count: int) -> None:
    layout = find(layouts(), lambda it: len(it.lengths) == chunk_count and it.checksums is not None)
    assert [len(each) for each in (layout.paths, layout.offsets, layout.checksums)] == [chunk_count] * 3
    assert layout.size_bytes == sum(layout.lengths)


@given(st.lists(layouts(), max_size=5))
def test_layouts_come_back_as_the_hits_that_single_locates_would_have_been(each: list[Layout]) -> None:
    columns = pack_layouts(each)
    hits = unpack_hits(columns, len(each))
    assert hits == [as_hit(layout) for layout in each]
    # Nothing in a hit that was never validated is what validation would refuse, or make something else of.
    for hit in hits:
        assert HitReply.model_validate(hit.model_dump()) == hit


@given(st.lists(layouts(), max_size=5))
def test_packed_columns_are_what_validation_takes(each: list[Layout]) -> None:
    columns = pack_layouts(each)
    assert LayoutColumns.model_validate(columns.model_dump()) == columns


A = Layout(6, 3, SyncStatus.COMMITTED, Tier.NVME, ["/dev/a", "/dev/b"], [0, 8], [4, 2], [7, 0xFFFFFFFF])
B = Layout(5, 1 << 62, SyncStatus.STAGED, Tier.RAM, ["/dev/a"], [1 << 62], [5], None)


def test_paths_are_named_once_for_each_tier() -> None:
    columns = pack_layouts([A, A, B])
    assert columns.paths == ("/dev/a", "/dev/b", "/dev/a")
    assert columns.path_tiers == b"\0\0\1"
    assert columns.chunk_paths == packed([0, 1, 0, 1, 2], U32)
    assert columns.chunk_counts == packed([2, 2, 1], U32)
    assert columns.checksummed == b"\x03"
    assert columns.chunk_checksums == packed([7, 0xFFFFFFFF, 7, 0xFFFFFFFF, 0], U32)


def test_layouts_come_out_as_lists_of_all_objects_and_of_all_chunks() -> None:
    empty = Layout(0, 0, SyncStatus.COMMITTED, Tier.NVME, [], [], [], [])
    assert unpack_layouts(pack_layouts([B, empty, A]), 3) == Layouts(
        sizes_bytes=[5, 0, 6],
        generations=[1 << 62, 0, 3],
        sync_statuses=[SyncStatus.STAGED, SyncStatus.COMMITTED, SyncStatus.COMMITTED],
        starts=[0, 1, 1],
        ends=[1, 1, 3],
        paths=["/dev/a", "/dev/a", "/dev/b"],
        tiers=[Tier.RAM, Tier.NVME, Tier.NVME],
        offsets=[1 << 62, 0, 8],
        lengths=[5, 4, 2],
        checksums=[None, 7, 0xFFFFFFFF],
    )


def test_no_layouts_are_empty_columns() -> None:
    columns = pack_layouts([])
    assert set(columns.model_dump().values()) == {b"", ()}
    assert unpack_hits(columns, 0) == []
    with pytest.raises(InvalidMessage, match="object_sizes must have 1 values"):
        unpack_hits(columns, 1)


HONEST: dict[str, Any] = pack_layouts([A, B]).model_dump()

LIES: dict[str, tuple[dict[str, Any], str]] = {
    "a size too few": ({"object_sizes": packed([6], U64)}, "object_sizes must have 2 values"),
    "half a size": ({"object_sizes": b"\0" * 12}, "object_sizes must have 2 values"),
    "a size too many": ({"object_sizes": b"\0" * 24}, "object_sizes must have 2 values"),
    "another size": ({"object_sizes": packed([7, 5], U64)}, "object of 7 bytes has chunks of another total"),
    "sizes changed about": ({"object_sizes": packed([5, 6], U64)}, "chunks of another total length"),
    "a size of 16 EiB": ({"object_sizes": b"\xff" * 16}, "chunks of another total length"),
    "a generation too few": ({"generations": b"\0" * 8}, "generations must have 2 values"),
    "a generation out of range": (
        {"generations": packed([1 << 63, 1], U64)},
        "generations has a value out of",
    ),
    "a status too many": ({"sync_statuses": b"\1\1\1"}, "sync_statuses must have 2 values"),
    "an unknown status": ({"sync_statuses": b"\1\x09"}, "sync_statuses has the code 9"),
    "a count too few": ({"chunk_counts": packed([3], U32)}, "chunk_counts must have 2 values"),
    "more chunks than there are": ({"chunk_counts": packed([2, 2], U32)}, "must have 4 values"),
    "fewer chunks than there are": ({"chunk_counts": packed([2, 0], U32)}, "must have 2 values"),
    "4 G chunks": ({"chunk_counts": b"\xff" * 8}, "chunk_paths must have 8589934590 values"),
    "chunks of another object": ({"chunk_counts": packed([1, 2], U32)}, "chunks of another total length"),
    "no bit for checksums": ({"checksummed": b""}, "a bitmap for 2 uris must have 1 bytes"),
    "a bit too many": ({"checksummed": b"\5"}, "has a bit set beyond them"),
    "a path too few": ({"paths": ("/dev/a", "/dev/b")}, "path_tiers must have 2 values"),
    "no path": ({"paths": (), "path_tiers": b""}, "chunk_paths names path 2 and there are 0"),
    "a path that there is not": ({"chunk_paths": packed([0, 1, 3], U32)}, "names path 3 and there are 3"),
    "path 4 G": ({"chunk_paths": b"\xff" * 12}, "names path 4294967295 and there are 3"),
    "a tier too few": ({"path_tiers": b"\0\0"}, "path_tiers must have 3 values"),
    "an unknown tier": ({"path_tiers": b"\0\0\2"}, "path_tiers has the code 2"),
    "an index too few": ({"chunk_paths": packed([0, 1], U32)}, "chunk_paths must have 3 values"),
    "an offset too few": ({"chunk_offsets": b"\0" * 16}, "chunk_offsets must have 3 values"),
    "an offset out of range": ({"chunk_offsets": packed([0, 8, (1 << 62) + 1], U64)}, "out of range"),
    "a length too few": ({"chunk_lengths": packed([4, 2], U32)}, "chunk_lengths must have 3 values"),
    "a length of 0": ({"chunk_lengths": packed([6, 0, 5], U32)}, "out of range"),
    "a length above a chunk": ({"chunk_lengths": packed([4, 2, CHUNK_SIZE + 1], U32)}, "out of range"),
    "a checksum too few": ({"chunk_checksums": packed([7, 7], U32)}, "chunk_checksums must have 3 values"),
    "a byte too many": ({"chunk_checksums": b"\0" * 13}, "chunk_checksums must have 3 values"),
}


@pytest.mark.parametrize(("lie", "told"), LIES.values(), ids=LIES.keys())
def test_a_column_that_lies_is_an_invalid_message(lie: dict[str, Any], told: str) -> None:
    columns = LayoutColumns.model_validate({**HONEST, **lie})
    with pytest.raises(InvalidMessage, match=told):
        unpack_hits(columns, 2)


def test_every_column_is_lied_about_and_the_honest_ones_are_read() -> None:
    assert {name for lie, _ in LIES.values() for name in lie} == set(HONEST)
    assert unpack_hits(LayoutColumns.model_validate(HONEST), 2) == [as_hit(A), as_hit(B)]


@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_columns_for_another_number_of_objects_are_refused(count: int) -> None:
    with pytest.raises(InvalidMessage):
        unpack_hits(LayoutColumns.model_validate(HONEST), count)


def test_the_bounds_themselves_are_read() -> None:
    edge = Layout(
        CHUNK_SIZE, (1 << 63) - 1, SyncStatus.LOCAL_ONLY, Tier.NVME, ["a"], [1 << 62], [CHUNK_SIZE], [0]
    )
    assert unpack_hits(pack_layouts([edge]), 1) == [as_hit(edge)]
    empty = Layout(0, 0, SyncStatus.COMMITTED, Tier.NVME, [], [], [], [])
    assert unpack_hits(pack_layouts([empty]), 1)[0].chunk_layout == ()
    assert MAX_OBJECT_BYTES > CHUNK_SIZE


def test_the_chunks_of_an_object_of_more_than_4_gib_are_added_up_whole() -> None:
    number = 1025
    chunks = ["a"] * number, [0] * number, [CHUNK_SIZE] * number, [0] * number
    large = Layout(number * CHUNK_SIZE, 1, SyncStatus.COMMITTED, Tier.NVME, *chunks)
    assert unpack_layouts(pack_layouts([large, A]), 2).sizes_bytes == [number * CHUNK_SIZE, A.size_bytes]
    left_of_32_bits = large._replace(size_bytes=large.size_bytes % (1 << 32))
    with pytest.raises(InvalidMessage, match="chunks of another total length"):
        unpack_layouts(pack_layouts([left_of_32_bits]), 1)


@given(st.data())
def test_random_columns_are_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    honest = data.draw(st.lists(layouts(), min_size=1, max_size=3))
    columns = pack_layouts(honest).model_dump()
    name = data.draw(st.sampled_from(sorted(columns.keys() - {"paths"})))
    spoiled = bytearray(columns[name])
    if spoiled and data.draw(st.booleans()):
        spoiled[data.draw(st.integers(0, len(spoiled) - 1))] = data.draw(st.integers(0, 255))
    else:
        spoiled += b"\0"
    try:
        hits = unpack_hits(LayoutColumns.model_validate({**columns, name: bytes(spoiled)}), len(honest))
    except InvalidMessage:
        return
    for hit in hits:
        assert HitReply.model_validate(hit.model_dump()) == hit


# -- trusted messages ----------------------------------------------------------------------------------

# A dict keeps its order where a set of classes doesn't: every pytest-xdist worker must collect the same list.
MODELS = dict.fromkeys(
    [
        *REPLIES,
        *FRAMED_REPLIES,
        *(reply for request in [*REPLIES, *FRAMED_REPLIES] for reply in possible_replies(request)),
        ChunkLocation,
        LayoutColumns,
    ]
)
del MODELS[StatusReply]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@given(data=st.data())
def test_a_trusted_message_equals_a_validated_one(model: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages_of(model))
    fields = {name: getattr(message, name) for name in message.model_fields_set}
    trusted = model.trusted(**fields)
    assert trusted == message
    assert trusted.model_fields_set == message.model_fields_set
    assert trusted.model_dump() == message.model_dump()
    assert trusted.model_copy() == message
    assert repr(trusted) == repr(message)


def test_trusted_messages_share_nothing_that_could_change() -> None:
    first, second = LocateMany.trusted(suffixes=("a",)), LocateMany.trusted(suffixes=("b",))
    assert (first.prefix, first.layouts, first.uris(), second.uris()) == ("", False, ["a"], ["b"])
    assert hash(first) == hash(LocateMany(suffixes=("a",)))
    assert MissReply.trusted() == MissReply()
    with pytest.raises(ValueError, match="frozen"):
        setattr(first, "prefix", "x")  # noqa: B010 - as an assignment mypy refuses it first


def test_trusted_parts_inside_a_message_are_encoded_alike() -> None:
    columns = pack_layouts([A, B])
    checked = LayoutColumns.model_validate(columns.model_dump())
    assert LocatedMany(present=b"", verifiable=b"", layouts=columns) == LocatedMany(
        present=b"", verifiable=b"", layouts=checked
    )
    assert encode_request(1, Locate.trusted(uri="a"), WIRE_2_0) == encode_request(
        1, Locate(uri="a"), WIRE_2_0
    )
    assert held_models(LocatedMany)["layouts"].model is LayoutColumns
    assert U8.itemsize == 1
