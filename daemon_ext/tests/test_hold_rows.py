"""Shared rows of holds: whatever comes and goes in whatever order, the rows say which blocks are held."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from hypercache_daemon.catalog_rows import AddHold
from hypercache_daemon.core.extents import PACKED_BYTES, Extent, packed, unpacked
from hypercache_daemon.hold_rows import HoldRows
from hypercache_protocol.fields import Tier

Rows = dict[tuple[str, int], AddHold]


class Catalog:
    """The table of holds, as SQLite would have it."""

    def __init__(self) -> None:
        self.rows: Rows = {}
        self.holds = HoldRows()

    def add(self, holds: Sequence[AddHold]) -> None:
        self.rows |= {(row.hold_id, row.part): row for row in self.holds.add(holds)}

    def drop(self, hold_ids: Sequence[str]) -> None:
        unneeded, changed = self.holds.drop(hold_ids)
        self.rows = {key: row for key, row in self.rows.items() if key[0] not in unneeded}
        self.rows |= {(row.hold_id, row.part): row for row in changed}

    def held(self) -> list[tuple[Tier, bool, Extent]]:
        """Every chunk that a restart would find held."""
        return sorted(
            (row.tier, row.writer, extent)
            for row in self.rows.values()
            for extent in unpacked(row.packed_extents)
        )


def hold(number: int, tier: Tier = Tier.NVME, chunks: int = 1, part: int = 0, writer: bool = True) -> AddHold:
    extents = [Extent(number, 4096 * (part + chunk), 4096) for chunk in range(chunks)]
    return AddHold(f"{number:x}", tier, packed(extents), writer, part)


def held_by(holds: Sequence[AddHold]) -> list[tuple[Tier, bool, Extent]]:
    return sorted((it.tier, it.writer, extent) for it in holds for extent in it.extents)


def test_holds_that_come_together_share_a_row_until_the_last_of_them_goes() -> None:
    catalog = Catalog()
    catalog.add([hold(number) for number in range(64)])
    assert len(catalog.rows) == 1
    catalog.drop([f"{number:x}" for number in range(63)])
    assert [row.extents for row in catalog.rows.values()] == [(Extent(63, 0, 4096),)]
    catalog.drop(["3f"])
    assert catalog.rows == {}


def test_a_row_is_shared_by_no_more_than_can_be_written_anew_each_time() -> None:
    catalog = Catalog()
    catalog.add([hold(number) for number in range(200)])
    sizes = [len(row.packed_extents) // PACKED_BYTES for row in catalog.rows.values()]
    assert sizes == [64, 64, 64, 8]
    large = hold(200, chunks=1000)
    catalog.add([hold(201), large, hold(202)])
    assert catalog.rows[large.hold_id, 0] == large


def test_one_that_comes_alone_has_its_own_row() -> None:
    catalog = Catalog()
    alone = [hold(1), hold(2, Tier.RAM), hold(3), hold(4, writer=False)]
    catalog.add(alone)
    assert list(catalog.rows.values()) == alone


def test_what_a_daemon_before_this_one_left_is_dropped_by_its_id() -> None:
    catalog = Catalog()
    catalog.rows = {("1+", 0): hold(1), ("2", 0): hold(2), ("2", 5): hold(2, part=5)}
    catalog.drop(["2", "1+"])
    assert catalog.rows == {}


KINDS = st.tuples(st.sampled_from(Tier), st.integers(0, 40), st.booleans())


@settings(max_examples=150)
@given(st.data())
def test_the_rows_always_say_what_is_held_also_after_transactions_that_fail(data: st.DataObject) -> None:
    catalog = Catalog()
    live: dict[str, list[AddHold]] = {}
    number = 0
    for _ in range(data.draw(st.integers(1, 12))):
        rows_before, live_before = dict(catalog.rows), {key: list(parts) for key, parts in live.items()}
        for step in data.draw(st.lists(st.sampled_from(["add", "append", "drop"]), min_size=1, max_size=3)):
            known = sorted(live)
            if step == "drop":
                chosen = data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []
                for hold_id in chosen:
                    del live[hold_id]
                catalog.drop(chosen)
                continue
            kinds = data.draw(st.lists(KINDS, min_size=1, max_size=6))
            together = [
                hold(number + i, tier, chunks, 0, writer) for i, (tier, chunks, writer) in enumerate(kinds)
            ]
            number += len(together)
            live |= {it.hold_id: [it] for it in together}
            if known and step == "append":
                whole = live[data.draw(st.sampled_from(known))]
                first = sum(len(it.extents) for it in whole)
                more = hold(int(whole[0].hold_id, 16), whole[0].tier, 2, first + 1, whole[0].writer)
                whole.append(more)
                together.insert(data.draw(st.integers(0, len(together))), more)
            catalog.add(together)
        if data.draw(st.booleans()):
            catalog.holds.keep()
        else:
            catalog.holds.take_back()
            catalog.rows, live = rows_before, live_before
        assert catalog.held() == held_by([it for parts in live.values() for it in parts])
    catalog.drop(list(live))
    assert catalog.rows == {}
    catalog.holds.keep()
    assert (catalog.holds._shared_by, catalog.holds._in_parts) == ({}, set())
