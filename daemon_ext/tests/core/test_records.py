"""Records as they come out of a catalog, which may be damaged."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from hypercache_daemon.core import records as records_module
from hypercache_daemon.core.extents import Extent, packed
from hypercache_daemon.core.objects import StoredObject
from hypercache_daemon.core.records import (
    Columns,
    generations_of,
    in_tier,
    record_of,
    unverifiable,
    verifiable,
)
from hypercache_protocol.fields import Tier
from hypercache_protocol.states import SyncStatus


def record(*extents: Extent) -> bytes:
    return record_of(StoredObject("a", Tier.NVME, 1, packed(extents), None, 1, SyncStatus.LOCAL_ONLY))


ONE, TWO = Extent(0, 4096, 1), Extent(1, 8192, 5)


@pytest.mark.parametrize("together", [1, 2, 3])
def test_all_chunks_come_in_the_order_of_their_records(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_module, "_CUT_TOGETHER", together)
    records = [record(ONE, TWO), record(), record(TWO)]
    columns = Columns(records)
    chunks = columns.chunks(in_tier(columns.heads, Tier.NVME))
    assert [tuple(chunk) for chunk in chunks.tolist()] == [tuple(ONE), tuple(TWO), tuple(TWO)]
    assert columns.chunks(np.array([False, True, True])).tolist() == [tuple(TWO)]
    assert columns.chunks(in_tier(columns.heads, Tier.RAM)).tolist() == []
    assert Columns([]).chunks(np.empty(0, np.bool_)).tolist() == []


def test_of_each_record_is_told_whether_it_has_checksums() -> None:
    stored = StoredObject("a", Tier.NVME, 1, packed([ONE]), None, 1, SyncStatus.LOCAL_ONLY)
    kinds = (None, b"", b"\xff\xff\xff\xff")
    records = [record_of(stored._replace(packed_checksums=checksums)) for checksums in kinds]
    assert verifiable(Columns(records).heads).tolist() == [False, True, True]
    by_uri = dict(zip("abc", records, strict=True))
    assert unverifiable(by_uri) == [stored]


def test_generations_are_read_in_the_order_of_the_records() -> None:
    stored = StoredObject("a", Tier.NVME, 1, packed([ONE]), None, 1, SyncStatus.LOCAL_ONLY)
    records = [record_of(stored._replace(generation=generation)) for generation in (3, 1 << 62, 2)]
    assert generations_of(records) == (3, 1 << 62, 2)
    with pytest.raises(struct.error):
        generations_of([*records, records[0][:7]])


@pytest.mark.parametrize("cut", [1, 20, 21, 40, 41, 67])
@pytest.mark.parametrize("is_last", [True, False])
def test_a_record_that_is_cut_off_is_not_read_on_in_the_next(cut: int, is_last: bool) -> None:
    short = record(ONE, TWO)[:-cut]
    records = [record(ONE), short] if is_last else [short, record(ONE), record(ONE, TWO)]
    with pytest.raises(ValueError, match="a record is cut off"):
        Columns(records)


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_nor_is_one_that_lacks_some_of_its_checksums(cut: int) -> None:
    stored = StoredObject("a", Tier.NVME, 1, packed([ONE, TWO]), bytes(8), 1, SyncStatus.LOCAL_ONLY)
    with pytest.raises(ValueError, match="a record is cut off"):
        Columns([record_of(stored)[:-cut], record(ONE)])
