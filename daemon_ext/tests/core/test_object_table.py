"""Records of objects, and the table that makes objects of them when they are asked for."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from chunk_tables import table_of
from hypothesis import given
from hypothesis import strategies as st

from hypercache_daemon.core.extents import Extent, end_on, packed
from hypercache_daemon.core.object_table import ObjectTable
from hypercache_daemon.core.objects import StoredObject, packed_checksums
from hypercache_daemon.core.records import STATES, generations_of, of_tier, record_of, state_of, stored_of
from hypercache_protocol.fields import Tier
from hypercache_protocol.states import SyncStatus

EXTENTS = st.lists(
    st.builds(Extent, st.integers(0, 2**64 - 1), st.integers(0, 2**62), st.integers(1, 4 << 20))
)
OBJECTS = st.builds(
    StoredObject,
    st.text(min_size=1),
    st.sampled_from(Tier),
    st.integers(0, 2**64 - 1),
    EXTENTS.map(packed),
    st.none() | st.lists(st.integers(0, 2**32 - 1)).map(packed_checksums),
    st.integers(0, 2**64 - 1),
    st.sampled_from(STATES),
    st.booleans(),
    st.none() | st.text("0123456789abcdef", min_size=64, max_size=64),
    st.booleans(),
)
UPLOADED = StoredObject(
    "hypercache://a",
    Tier.RAM,
    5000,
    packed([Extent(7, 0, 4096), Extent(8, 0, 904)]),
    packed_checksums([1, 2**32 - 1]),
    3 << 40 | 9,
    SyncStatus.SYNCED_BACKEND,
    pinned=True,
    sha256="0f" * 32,
)
UPLOADED_RECORD = (
    "0900000000030000" "8813000000000000" "01" "01" "01" "00" "02000000" "02000000"
    "0700000000000000" "0000000000000000" "00100000"
    "0800000000000000" "0000000000000000" "88030000"
    "01000000" "ffffffff"
)  # fmt: skip


@given(OBJECTS)
def test_a_record_gives_back_the_object(stored: StoredObject) -> None:
    record = record_of(stored)
    assert stored_of(stored.uri, record) == stored
    assert state_of(record) is stored.state
    assert generations_of([record, record]) == (stored.generation,) * 2


def test_a_record_is_what_catalogs_have() -> None:
    assert record_of(UPLOADED) == bytes.fromhex(UPLOADED_RECORD) + b"0f" * 32


def test_what_is_uploaded_is_recorded_as_to_be_uploaded() -> None:
    record = record_of(UPLOADED._replace(state=SyncStatus.SYNCING_BACKEND))
    assert stored_of(UPLOADED.uri, record) == UPLOADED._replace(state=SyncStatus.COMMITTED)


def test_no_checksums_are_not_the_checksums_of_no_chunks() -> None:
    empty = UPLOADED._replace(packed_extents=b"", packed_checksums=b"")
    assert stored_of("u", record_of(empty)).checksums == ()
    assert stored_of("u", record_of(empty._replace(packed_checksums=None))).checksums is None


def test_a_number_that_fits_in_no_record_is_refused() -> None:
    with pytest.raises(struct.error):
        record_of(UPLOADED._replace(generation=1 << 64))


def test_the_objects_of_one_tier_are_found() -> None:
    on_device = UPLOADED._replace(uri="b", tier=Tier.NVME)
    records = {stored.uri: record_of(stored) for stored in (UPLOADED, on_device)}
    assert of_tier(records, Tier.RAM) == [UPLOADED]
    assert of_tier(records, Tier.NVME) == [on_device]
    assert of_tier({"b": record_of(on_device)}, Tier.RAM) == []


# -- the table -------------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")


def an_object(uri: str, state: SyncStatus = SyncStatus.LOCAL_ONLY) -> StoredObject:
    return UPLOADED._replace(uri=uri, state=state)


def loaded(*objects: StoredObject) -> ObjectTable:
    table = ObjectTable()
    have = np.array([stored.is_verifiable for stored in objects], np.bool_)
    table.load({stored.uri: record_of(stored) for stored in objects}, have)
    return table


def test_what_was_loaded_is_there_as_if_it_had_been_put() -> None:
    objects = [an_object(name) for name in NAMES]
    table = loaded(*objects)
    assert len(table) == 3
    assert sorted(table.uris()) == list(NAMES)
    assert sorted(table.values(), key=lambda stored: stored.uri) == objects
    assert table.many(["c", "nowhere", "a", "c"]) == [objects[2], None, objects[0], objects[2]]
    assert table.get("b") == objects[1]
    assert table.get("nowhere") is None


def test_an_object_is_made_once() -> None:
    table = loaded(an_object("a"), an_object("b"))
    assert table.get("a") is table.get("a")
    (found,) = table.many(["b"])
    assert table.get("b") is found
    assert table.many(["b", "nowhere"]) == [found, None]


def test_looking_at_all_of_them_keeps_none() -> None:
    table = loaded(an_object("a"))
    (first,) = table.values()
    (second,) = table.values()
    assert first == second
    assert first is not second


def test_a_peek_shows_what_is_there_and_keeps_nothing() -> None:
    table = loaded(an_object("a"), an_object("b"))
    assert table.peek("a") == an_object("a")
    assert table.peek("a") is not table.peek("a")
    assert table.peek("b") is not table.get("b")
    assert table.peek("b") is table.get("b")
    assert table.peek("nowhere") is None


def test_what_is_put_replaces_what_was_loaded() -> None:
    table = loaded(an_object("a"), an_object("b"))
    changed = an_object("a")._replace(pinned=False)
    table.put([changed])
    assert table.get("a") is changed
    assert len(table) == 2


def test_what_is_popped_is_gone_whether_it_was_made_or_not() -> None:
    table = loaded(an_object("a"), an_object("b"))
    made = table.get("b")
    assert table.pop(["a"]) == [an_object("a")]
    assert table.pop(["b"]) == [made]
    assert table.pop(["b"]) == [None]
    assert table.uris() == []


def test_what_is_handed_over_is_in_the_other_table_alone_and_no_object_is_made_of_it() -> None:
    table, other = loaded(an_object("a"), an_object("b")), ObjectTable()
    table.hand_over("a", other)
    assert (table.uris(), other.uris()) == (["b"], ["a"])
    assert other.peek("a") == an_object("a")
    assert other.peek("a") is not other.peek("a")
    assert table.get("a") is None
    assert other.many(["a", "b"]) == [an_object("a"), None]


def test_the_objects_in_a_state_are_found_among_both_kinds() -> None:
    table = loaded(an_object("a", SyncStatus.COMMITTED), an_object("b"), an_object("c", SyncStatus.COMMITTED))
    table.put([an_object("d", SyncStatus.COMMITTED)])
    table.put([an_object("e")])
    assert sorted(table.in_state(SyncStatus.COMMITTED)) == ["a", "c", "d"]
    assert sorted(table.in_state(SyncStatus.LOCAL_ONLY)) == ["b", "e"]


def test_where_the_last_chunk_on_a_device_ends() -> None:
    chunks = table_of([Extent(1, 8192, 5000), Extent(1, 4096, 1), Extent(2, 1 << 40, 1)])
    assert [end_on(chunks, device) for device in range(3)] == [0, 8192 + 8192, (1 << 40) + 4096]
    assert end_on(table_of([]), 0) == 0
