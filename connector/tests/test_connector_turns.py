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


def comes(turns: Turns, size_bytes: int = CHUNK) -> Write:
    write = Write(size_bytes)
    turns.write_comes(write)
    return write


def loading(write_share: float) -> Turns:
    """A load is under way."""
    turns = Turns(write_share)
    turns.load_begins("a load")
    return turns


# -- one rule each -----------------------------------------------------------------------------------------


def test_without_loads_no_write_need_ask_and_any_that_does_begins_at_once() -> None:
    turns = Turns(0.01)
    assert not turns.bounded
    assert all(comes(turns).at_work for _ in range(100))


def test_a_share_of_one_is_no_bound() -> None:
    turns = loading(1.0)
    assert not turns.bounded
    assert all(comes(turns).at_work for _ in range(100))


@pytest.mark.parametrize(("write_share", "reads"), [(0.2, 4), (0.5, 1)])
def test_while_a_load_runs_a_write_begins_for_so_many_reads(write_share: float, reads: int) -> None:
    turns = loading(write_share)
    assert turns.bounded
    assert comes(turns).at_work, "one may always be, and owes its reads"
    first, second, third = [comes(turns) for _ in range(3)]
    begun = [turns.loaded(CHUNK) for _ in range(4 * reads)]
    nothing = [[]] * (reads - 1)
    assert begun == [*nothing, [], *nothing, [first], *nothing, [second], *nothing, [third]]


def test_one_large_read_begins_as_many_small_writes_as_it_earns() -> None:
    turns = loading(0.2)
    assert comes(turns, MIB // 4).at_work
    waiting = [comes(turns, MIB // 4) for _ in range(6)]
    assert turns.loaded(CHUNK) == waiting[:3]


def test_what_was_earned_lapses_while_no_write_waits() -> None:
    turns = loading(0.2)
    assert turns.loaded(100 * CHUNK) == []
    assert [comes(turns).at_work for _ in range(3)] == [True, False, False]


def test_however_many_were_at_work_beyond_their_share_one_chunk_is_owed() -> None:
    turns = loading(0.2)
    for _ in range(10):
        turns.write_leaves(comes(turns))
    assert comes(turns).at_work
    waiting = comes(turns)
    assert turns.loaded(7 * CHUNK) == []
    assert turns.loaded(CHUNK) == [waiting]


def test_a_load_that_begins_or_ends_beside_another_one_lets_no_write_in() -> None:
    turns = loading(0.2)
    assert comes(turns).at_work
    waiting = comes(turns)
    turns.load_begins("another")
    turns.load_ends("another")
    turns.load_ends("another")
    assert turns.bounded
    assert turns.loaded(7 * CHUNK) == []
    assert turns.loaded(CHUNK) == [waiting]


def test_writes_begin_in_the_order_in_which_they_came_and_one_that_leaves_lets_the_next_by() -> None:
    turns = loading(0.2)
    assert comes(turns, MIB).at_work
    large, small = comes(turns, CHUNK), comes(turns, MIB)
    assert turns.loaded(8 * MIB) == []
    assert turns.write_leaves(large) == [small]


def test_a_write_that_insists_begins_out_of_turn_and_takes_what_was_earned() -> None:
    turns = loading(0.2)
    hanging, waiting, insisting = comes(turns), comes(turns), comes(turns)
    assert hanging.at_work
    assert turns.loaded(7 * CHUNK) == []
    turns.write_insists(insisting)
    assert (insisting.at_work, waiting.at_work) == (True, False)
    turns.write_insists(insisting)
    assert turns.write_leaves(insisting) == []
    assert turns.loaded(4 * CHUNK) == []
    assert turns.loaded(CHUNK) == [waiting]


def test_a_write_whose_beginning_was_broken_off_begins_when_it_insists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    turns = loading(0.2)
    first, second = comes(turns), comes(turns)
    with monkeypatch.context() as patch:
        patch.setattr(Turns, "_begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            turns.write_leaves(first)
    turns.write_insists(second)
    assert second.at_work


def test_a_write_that_has_left_may_leave_again_and_so_may_one_that_never_came() -> None:
    turns = loading(0.2)
    first = comes(turns)
    assert first.at_work
    waiting = comes(turns)
    assert turns.write_leaves(Write(CHUNK)) == []
    assert not waiting.at_work
    assert turns.write_leaves(waiting) == turns.write_leaves(waiting) == []
    assert turns.write_leaves(first) == turns.write_leaves(first) == []
    assert [comes(turns).at_work, comes(turns).at_work] == [True, False], "one may be at work, and no more"


def test_after_the_last_load_the_bound_grows_with_what_is_written_until_it_is_none() -> None:
    turns = loading(0.2)
    at_work = deque(write for write in [comes(turns) for _ in range(100)] if write.at_work)
    turns.load_ends("a load")
    assert len(at_work) == 1, "the next batch may come any moment"
    counts = []
    while turns.bounded:
        at_work += turns.write_leaves(at_work.popleft())
        counts.append(len(at_work))
    assert counts == [*range(2, 16), 100 - 15], "one more with each, and at last all that are left"


def test_a_load_that_begins_again_ends_that_growth() -> None:
    turns = loading(0.2)
    first, *_ = [comes(turns) for _ in range(100)]
    turns.load_ends("a load")
    second, third = turns.write_leaves(first)
    turns.load_begins("a load")
    assert turns.write_leaves(second) == []
    assert len(turns.write_leaves(third)) == 1, "one may always be at work"


# -- in every order ----------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Loads and writes come and end in any order; the rules hold after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(0.2)
        self.loads = 0
        self.loaded_bytes = 0
        """Since loads began after a time without any."""
        self.begun_bytes = 0
        """Of writes beside others at work, since then."""
        self.writes: list[Write] = []
        self.came: deque[Write] = deque()

    @rule()
    def load_begins(self) -> None:
        if not self.loads:
            self.loaded_bytes = self.begun_bytes = 0
        self.loads += 1
        self.turns.load_begins(self.loads)
        assert self.turns.bounded

    @precondition(lambda self: self.loads)
    @rule(size_bytes=st.sampled_from([1, MIB, CHUNK, 16 * CHUNK]))
    def loaded(self, size_bytes: int) -> None:
        self.loaded_bytes += size_bytes
        self.begun(self.turns.loaded(size_bytes))

    @precondition(lambda self: self.loads)
    @rule()
    def load_ends(self) -> None:
        self.turns.load_ends(self.loads)
        self.loads -= 1

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
        beside = any(write.at_work for write in self.writes if write not in writes)
        for write in writes:
            assert write is self.came.popleft(), "in the order in which they came"
            self.begun_bytes += write.size_bytes if beside else 0
            beside = True

    @invariant()
    def writes_take_no_more_than_loads_earn(self) -> None:
        # What a chunk that waits has earned may be left from loads before.
        assert not self.loads or self.begun_bytes <= self.loaded_bytes / 4 + CHUNK

    @invariant()
    def no_write_waits_without_a_reason(self) -> None:
        assert [write for write in self.writes if not write.at_work] == list(self.came)
        assert any(write.at_work for write in self.writes) or not self.came, "one may always be at work"
        assert self.turns.bounded or not self.came

    def teardown(self) -> None:
        """Without loads, those that wait get through by the ends of the others."""
        for load in range(1, self.loads + 1):
            self.turns.load_ends(load)
        for _ in range(len(self.writes)):
            write = next(each for each in self.writes if each.at_work)
            self.writes.remove(write)
            self.begun(self.turns.write_leaves(write))
        assert not self.came


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30)


# -- on a simulated device ---------------------------------------------------------------------------------


def simulated(
    write_share: float, readers: int, *, pause_s: float = 0.0, summing_s: float = 0.0
) -> dict[str, float]:
    """MiB moved in 4 s by batches of loads of four chunks for each reader, with pauses between, and by 16
    writers without a pause, on a device that serves 1,000 MiB/s in the order in which it is asked. A reader
    asks for no other chunk until it has summed the last one."""
    turns = Turns(write_share)
    moved = {"read": 0.0, "write": 0.0}
    free_at_s, left, order = 0.0, 0, itertools.count()
    events: list[tuple[float, int, str, Write]] = []

    def at(time_s: float, kind: str, write: Write) -> None:
        heapq.heappush(events, (time_s, next(order), kind, write))

    def asks(now_s: float, kind: str, writes: list[Write]) -> None:
        nonlocal free_at_s
        for write in writes:
            free_at_s = max(free_at_s, now_s) + write.size_bytes / MIB / 1000
            at(free_at_s + (summing_s if kind == "read" else 0.0), kind, write)

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
                turns.load_begins("a load")
                asks(now_s, "read", [Write(CHUNK) for _ in range(readers)])
            case "read":
                left -= 1
                asks(now_s, "write", turns.loaded(CHUNK))
                if left >= readers:
                    asks(now_s, "read", [Write(CHUNK)])
                if not left:
                    turns.load_ends("a load")
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
    moved = simulated(default, readers, pause_s=pause_s)
    unbounded = simulated(1.0, readers, pause_s=pause_s)
    whole = sum(moved.values())
    assert whole == pytest.approx(4000, rel=0.01), "the device is never idle"
    assert 0.75 < moved["read"] / whole < 0.85
    assert unbounded["read"] / whole < 0.7


@pytest.mark.parametrize("summing_s", [0.0, 0.005, 0.01])
def test_the_share_does_not_depend_on_how_long_reads_are_at_work(summing_s: float) -> None:
    moved = simulated(0.25, 16, summing_s=summing_s)
    assert moved["write"] / sum(moved.values()) == pytest.approx(0.25, abs=0.02)


def test_a_single_reader_shares_with_a_single_writer() -> None:
    moved = simulated(0.2, readers=1)
    assert moved["read"] == pytest.approx(moved["write"], rel=0.05)
