"""Reads before writes: the rules of turns.py, in every order of events and on a simulated device."""

import heapq
import itertools
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hypercache_connector.config import EngineConfig
from hypercache_connector.turns import Turns, Write

MIB = 1 << 20
CHUNK = 4 * MIB
READERS = 16


def comes(turns: Turns, size_bytes: int = CHUNK) -> Write:
    write = Write(size_bytes)
    turns.write_comes(write)
    return write


# -- one rule each -----------------------------------------------------------------------------------------


def test_without_loads_no_write_need_ask_and_any_that_does_begins_at_once() -> None:
    turns = Turns(0.01, READERS)
    assert not turns.bounded
    assert all(comes(turns).at_work for _ in range(100))


@pytest.mark.parametrize(("write_share", "at_work"), [(0.01, 1), (0.2, 4), (0.5, 16), (0.999, 40), (1.0, 40)])
def test_while_a_load_runs_writes_have_their_share_of_the_bytes_at_work(
    write_share: float, at_work: int
) -> None:
    turns = Turns(write_share, READERS)
    turns.load_begins(16, 16 * CHUNK)
    assert turns.bounded == (write_share < 1)
    assert sum(comes(turns).at_work for _ in range(40)) == at_work


@pytest.mark.parametrize(("chunks", "at_work"), [(4, 1), (8, 2), (16, 4), (17, 4), (1000, 4)])
def test_of_a_large_load_only_as_many_chunks_count_as_there_are_readers(chunks: int, at_work: int) -> None:
    turns = Turns(0.2, READERS)
    turns.load_begins(chunks // 2, chunks // 2 * CHUNK)
    turns.load_begins(chunks - chunks // 2, (chunks - chunks // 2) * CHUNK)
    assert sum(comes(turns).at_work for _ in range(40)) == at_work


def test_beside_small_reads_one_large_write_is_at_work() -> None:
    turns = Turns(0.2, READERS)
    turns.load_begins(16, 16 * 256 << 10)
    assert [comes(turns).at_work for _ in range(3)] == [True, False, False]


def test_what_is_at_work_already_ends_before_the_next_write_begins() -> None:
    turns = Turns(0.2, READERS)
    early = [comes(turns) for _ in range(8)]
    turns.load_begins(1, CHUNK)
    late = comes(turns)
    assert [turns.write_leaves(write) for write in early] == [[]] * 7 + [[late]]


def test_writes_begin_in_the_order_in_which_they_came_and_one_that_leaves_lets_the_next_by() -> None:
    turns = Turns(0.2, READERS)
    turns.load_begins(2, 8 * MIB)
    assert comes(turns, MIB).at_work
    large, small = comes(turns, CHUNK), comes(turns, MIB)
    assert (large.at_work, small.at_work) == (False, False)
    assert turns.write_leaves(large) == [small]


def test_a_write_that_insists_begins_out_of_turn_and_counts_as_any_other() -> None:
    turns = Turns(0.2, READERS)
    turns.load_begins(1, CHUNK)
    hanging, waiting, insisting = comes(turns), comes(turns), comes(turns)
    turns.write_insists(insisting)
    assert (insisting.at_work, waiting.at_work) == (True, False)
    turns.write_insists(insisting)
    assert turns.write_leaves(hanging) == []
    assert turns.write_leaves(insisting) == [waiting]


def test_a_write_that_never_came_may_leave() -> None:
    turns = Turns(0.2, READERS)
    turns.load_begins(1, CHUNK)
    assert comes(turns).at_work
    waiting = comes(turns)
    assert turns.write_leaves(Write(CHUNK)) == []
    assert not waiting.at_work


def test_after_the_last_load_the_bound_grows_with_what_is_written_until_it_is_none() -> None:
    turns = Turns(0.2, READERS)
    turns.load_begins(1, CHUNK)
    at_work = deque(write for write in [comes(turns) for _ in range(100)] if write.at_work)
    assert len(at_work) == 1
    assert turns.load_ends(1, CHUNK) == [], "the next batch may come any moment"
    counts = []
    while turns.bounded:
        at_work += turns.write_leaves(at_work.popleft())
        counts.append(len(at_work))
    assert counts == [*range(1, 16), 100 - 16], "one more with each, and at last all that are left"


# -- in every order ----------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Loads and writes come and end in any order; the rules hold after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(0.2, READERS)
        self.loads: list[tuple[int, int]] = []
        self.writes: list[Write] = []
        self.came: deque[Write] = deque()

    @rule(chunks=st.integers(1, 40), size_bytes=st.sampled_from([1, MIB, CHUNK]))
    def load_begins(self, chunks: int, size_bytes: int) -> None:
        self.loads.append((chunks, chunks * size_bytes))
        self.begun(self.turns.load_begins(*self.loads[-1]))
        assert self.turns.bounded

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def load_ends(self, data: st.DataObject) -> None:
        load = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.begun(self.turns.load_ends(*load))

    @rule(size_bytes=st.sampled_from([1, MIB, CHUNK]))
    def write_comes(self, size_bytes: int) -> None:
        write = Write(size_bytes)
        self.writes.append(write)
        self.came.append(write)
        self.begun(self.turns.write_comes(write))

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def write_leaves(self, data: st.DataObject) -> None:
        write = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
        if not write.at_work:
            self.came.remove(write)
        self.begun(self.turns.write_leaves(write))

    def begun(self, writes: list[Write]) -> None:
        beside = sum(write.size_bytes for write in self.writes if write.at_work and write not in writes)
        for write in writes:
            assert write is self.came.popleft(), "in the order in which they came"
            if self.loads and beside:
                assert beside + write.size_bytes <= self.read_bytes_at_work() / 4
            beside += write.size_bytes

    def read_bytes_at_work(self) -> float:
        chunks = sum(chunks for chunks, _ in self.loads)
        return sum(size_bytes for _, size_bytes in self.loads) / chunks * min(chunks, READERS)

    @invariant()
    def no_write_waits_without_a_reason(self) -> None:
        assert [write for write in self.writes if not write.at_work] == list(self.came)
        assert any(write.at_work for write in self.writes) or not self.came, "one may always be at work"
        assert self.turns.bounded or not self.came

    def teardown(self) -> None:
        """Without loads, those that wait get through by the ends of the others."""
        while self.loads:
            self.begun(self.turns.load_ends(*self.loads.pop()))
        for _ in range(len(self.writes)):
            write = next(each for each in self.writes if each.at_work)
            self.writes.remove(write)
            self.begun(self.turns.write_leaves(write))
        assert not self.came


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# -- on a simulated device ---------------------------------------------------------------------------------


def simulated(write_share: float, readers: int, pause_s: float = 0.0) -> dict[str, float]:
    """MiB moved in 4 s by batches of loads of four chunks for each reader, with pauses between, and by 16
    writers without a pause, on a device that serves 1,000 MiB/s in the order in which it is asked."""
    turns = Turns(write_share, readers)
    moved = {"read": 0.0, "write": 0.0}
    free_at_s, left, order = 0.0, 0, itertools.count()
    events: list[tuple[float, int, str, Write]] = []

    def at(time_s: float, kind: str, write: Write) -> None:
        heapq.heappush(events, (time_s, next(order), kind, write))

    def asks(now_s: float, kind: str, writes: list[Write]) -> None:
        nonlocal free_at_s
        for write in writes:
            free_at_s = max(free_at_s, now_s) + write.size_bytes / MIB / 1000
            at(free_at_s, kind, write)

    def write_comes(now_s: float) -> None:
        write = Write(CHUNK)
        asks(now_s, "write", [write] if not turns.bounded else turns.write_comes(write))

    for _ in range(16):
        write_comes(0.0)
    at(0.0, "load", Write(0))
    while events[0][0] < 4.0:
        now_s, _, kind, chunk = heapq.heappop(events)
        match kind:
            case "load":
                left = 4 * readers
                asks(now_s, "write", turns.load_begins(left, left * CHUNK))
                asks(now_s, "read", [Write(CHUNK) for _ in range(readers)])
            case "read":
                left -= 1
                if left >= readers:
                    asks(now_s, "read", [Write(CHUNK)])
                if not left:
                    asks(now_s, "write", turns.load_ends(4 * readers, 4 * readers * CHUNK))
                    at(now_s + pause_s, "load", Write(0))
            case "write":
                if chunk.at_work:
                    asks(now_s, "write", turns.write_leaves(chunk))
                write_comes(now_s)
        if kind != "load":
            moved[kind] += chunk.size_bytes / MIB
    return moved


@pytest.mark.parametrize("pause_s", [0.0, 0.002])
@pytest.mark.parametrize("readers", [4, 16, 32])
def test_loads_keep_their_speed_and_stores_go_on(readers: int, pause_s: float) -> None:
    default = EngineConfig().write_share
    moved, unbounded = simulated(default, readers, pause_s), simulated(1.0, readers, pause_s)
    whole = sum(moved.values())
    assert whole == pytest.approx(4000, rel=0.01), "the device is never idle"
    assert 0.75 < moved["read"] / whole < 0.85
    assert unbounded["read"] / whole < 0.7


def test_a_single_reader_shares_with_a_single_writer() -> None:
    moved = simulated(0.2, readers=1)
    assert moved["read"] == pytest.approx(moved["write"], rel=0.05)
