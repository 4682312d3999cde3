"""Threads at the gate: who waits is called when it is its turn, at its deadline, or by `close`."""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from hypercache_compat.waiting import wait_until
from hypercache_connector.outcomes import Counters, Outcome
from hypercache_connector.turns import ENOUGH_BYTES
from hypercache_connector.write_gate import WriteGate

CHUNK = 4 << 20
DEADLINE_S = 20.0


class Writer:
    """A thread that writes one chunk as soon as it may, and until it is let go."""

    def __init__(self, gate: WriteGate, wait_s: float = DEADLINE_S) -> None:
        self.turn: Outcome | None = None
        self.let_go = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(gate, wait_s))
        self._thread.start()

    def _run(self, gate: WriteGate, wait_s: float) -> None:
        with gate.writing(CHUNK, time.monotonic() + wait_s) as turn:
            self.turn = turn
            assert self.let_go.wait(DEADLINE_S)

    def end(self) -> None:
        self.let_go.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def gate(counters: Counters) -> WriteGate:
    return WriteGate(0.2, counters)


@pytest.fixture
def busy(gate: WriteGate) -> Iterator[tuple[ExitStack, Writer, Writer]]:
    """A load is under way, one write too, and another one waits."""
    with ExitStack() as load:
        load.enter_context(gate.loading())
        first = Writer(gate)
        wait_until(lambda: first.turn is Outcome.OK, deadline_s=DEADLINE_S)
        second = Writer(gate)
        wait_until(lambda: gate.waiting == 1, deadline_s=DEADLINE_S)
        yield load, first, second
        for writer in (first, second):
            writer.end()


def test_a_write_waits_while_a_load_and_another_write_are_under_way(
    busy: tuple[ExitStack, Writer, Writer], gate: WriteGate, counters: Counters
) -> None:
    _, first, second = busy
    assert second.turn is None
    first.end()
    wait_until(lambda: second.turn is Outcome.OK, deadline_s=DEADLINE_S)
    assert gate.waiting == 0
    wait_until(lambda: counters.snapshot() == {"transfers": {"waited": 1}}, deadline_s=DEADLINE_S)


def test_many_that_wait_come_in_one_by_one_and_all_of_them(
    busy: tuple[ExitStack, Writer, Writer], gate: WriteGate
) -> None:
    _, first, second = busy
    writers = [first, second]
    for count in range(2, 10):
        writers.append(Writer(gate))
        wait_until(lambda count=count: gate.waiting == count, deadline_s=DEADLINE_S)
    for ending, following in itertools.pairwise(writers):
        ending.end()
        wait_until(lambda following=following: following.turn is Outcome.OK, deadline_s=DEADLINE_S)
        assert sum(each.turn is None for each in writers) == gate.waiting
    writers[-1].end()


def test_what_is_loaded_calls_a_write_in(busy: tuple[ExitStack, Writer, Writer], gate: WriteGate) -> None:
    _, _, second = busy
    gate.loaded(7 * CHUNK)
    assert gate.waiting == 1
    gate.loaded(CHUNK)
    wait_until(lambda: second.turn is Outcome.OK, deadline_s=DEADLINE_S)


def test_after_its_deadline_a_write_is_late_and_the_next_one_is_not_held_up(
    busy: tuple[ExitStack, Writer, Writer], gate: WriteGate
) -> None:
    _, first, second = busy
    late = Writer(gate, wait_s=0.02)
    wait_until(lambda: late.turn is Outcome.TRANSFER_LATE, deadline_s=DEADLINE_S)
    late.end()
    past = Writer(gate, wait_s=-1.0)
    wait_until(lambda: past.turn is Outcome.TRANSFER_LATE, deadline_s=DEADLINE_S)
    past.end()
    assert gate.waiting == 1
    first.end()
    wait_until(lambda: second.turn is Outcome.OK, deadline_s=DEADLINE_S)


def test_a_write_that_hangs_does_not_hold_up_all_others(counters: Counters) -> None:
    gate = WriteGate(0.2, counters, patience_s=0.02)
    with gate.loading():
        hanging = Writer(gate)
        wait_until(lambda: hanging.turn is Outcome.OK, deadline_s=DEADLINE_S)
        others = [Writer(gate) for _ in range(3)]
        wait_until(lambda: all(each.turn is Outcome.OK for each in others), deadline_s=DEADLINE_S)
        assert gate.waiting == 0
    for writer in (*others, hanging):
        writer.end()
    with gate.loading(), gate.writing(CHUNK, time.monotonic()) as turn:
        assert turn is Outcome.OK, "those that left are not at work any more"


def test_close_sends_away_those_that_wait_and_lets_no_more_in(
    busy: tuple[ExitStack, Writer, Writer], gate: WriteGate
) -> None:
    _, first, second = busy
    gate.close()
    wait_until(lambda: second.turn is Outcome.CLOSED, deadline_s=DEADLINE_S)
    assert first.turn is Outcome.OK, "what is under way ends by itself"
    after = Writer(gate)
    wait_until(lambda: after.turn is Outcome.CLOSED, deadline_s=DEADLINE_S)
    after.end()
    with gate.loading():
        pass


def test_what_breaks_off_a_write_or_its_waiting_leaves_no_trace(
    busy: tuple[ExitStack, Writer, Writer], gate: WriteGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first, second = busy
    with monkeypatch.context() as patched:
        patched.setattr(threading.Event, "wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), gate.writing(CHUNK, time.monotonic() + DEADLINE_S):
            pytest.fail("it was not its turn")
    assert gate.waiting == 1
    first.end()
    wait_until(lambda: second.turn is Outcome.OK, deadline_s=DEADLINE_S)
    second.end()
    with suppress(OSError), gate.writing(CHUNK, time.monotonic()) as turn:
        assert turn is Outcome.OK
        raise OSError("the device is gone")
    with gate.writing(CHUNK, time.monotonic()) as turn:
        assert turn is Outcome.OK


class BreakingLock:
    """A lock at which Ctrl-C comes: before it is taken, or after it was given back."""

    def __init__(self, step: int) -> None:
        self._lock = threading.Lock()
        self._left = step

    def __enter__(self) -> None:
        self._step()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._step()

    def _step(self) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("step", range(1, 9))
def test_a_load_and_a_write_that_are_broken_off_at_any_step_are_gone(
    gate: WriteGate, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_lock", BreakingLock(step))
    with pytest.raises(KeyboardInterrupt), gate.loading(), gate.writing(CHUNK, time.monotonic()) as turn:
        assert turn is Outcome.OK
    monkeypatch.undo()
    with gate.loading(), gate.writing(ENOUGH_BYTES, time.monotonic()) as turn:
        assert turn is Outcome.OK, "else a write is counted that is none"
    with gate.writing(ENOUGH_BYTES, time.monotonic()):
        pass
    assert not gate.bounded, "else a load is counted that is none"
