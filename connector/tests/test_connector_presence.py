"""Lookups in the daemon's presence table: right while the daemon lives, unused where in doubt."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, running_daemon
from hypercache_compat.waiting import wait_until
from hypercache_connector.connection import Connection
from hypercache_connector.outcomes import Outcome
from hypercache_connector.presence import PresenceTable, UnusableTable
from hypercache_protocol.batches import GetPresenceTable, PresenceTableReply
from hypercache_protocol.messages import Request
from hypercache_protocol.presence import FORMAT, Geometry, places, words_of

DEADLINE_S = 30.0
KEYS = [f"org/m@00000001@0@{number:064x}" for number in range(8)]
HALF = [True] * 4 + [False] * 4
SMALL = PresenceTableReply(table_format=FORMAT, seed=5, buckets=8)
SIZE_BYTES = Geometry(5, 8).size_bytes


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon() as process:
        yield process


def has_table(driver: Any) -> bool:
    return bool(driver.connector.status()["daemon"]["presence_table"])


def with_table(driver: Any) -> Any:
    """The driver, once it has a table."""
    driver.exists(["any"])
    wait_until(lambda: has_table(driver))
    return driver


def stored_half(driver: Any) -> Any:
    assert driver.store(KEYS[:4], [bytearray(100)] * 4).ok
    return driver


def asked(daemon: DaemonProcess) -> int:
    """How many lookups the daemon was asked so far."""
    with daemon.connect() as raw:
        return sum(
            count for name, count in raw.ask("get_status")["requests"].items() if name.startswith("locate")
        )


# -- with a daemon that has one ------------------------------------------------------------------------


def test_lookups_need_no_exchange_and_see_every_store_and_delete_at_once(daemon, connect) -> None:
    driver = with_table(stored_half(connect(daemon.socket_path)))
    before = asked(daemon)
    assert driver.exists(KEYS) == HALF
    assert driver.exists([]) == []
    other = connect(daemon.socket_path)
    assert other.delete(KEYS[:1]) == [True]
    assert driver.exists(KEYS[:1]) == [False]
    assert other.store(KEYS[7:], [bytearray(9)]).ok
    assert driver.exists(KEYS[7:]) == [True]
    assert asked(daemon) == before
    assert driver.count("lookups", "absent") >= 5


def test_what_has_no_checksums_is_no_hit_and_is_told_why(daemon, connect) -> None:
    driver = with_table(connect(daemon.socket_path))
    uri = driver.connector._mapping.uri(KEYS[0])
    with daemon.connect() as raw:
        raw.ask("stage_write", uri=uri, size_bytes=100)
        raw.ask("commit_write", uri=uri)
    assert driver.exists(KEYS[:2]) == [False, False]
    assert driver.count("lookups", "unverifiable") == 1


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_daemon_that_is_gone_has_nothing_whatever_its_table_says(daemon, connect, how: str) -> None:
    driver = with_table(stored_half(connect(daemon.socket_path)))
    getattr(daemon, how)()
    assert driver.exists(KEYS) == [False] * len(KEYS)
    assert not has_table(driver)
    daemon.start()
    assert with_table(driver).exists(KEYS) == HALF


def test_a_daemon_that_does_not_answer_is_misses_once_a_load_was_late(daemon, connect) -> None:
    driver = with_table(stored_half(connect(daemon.socket_path, timeout_s=0.3)))
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        assert driver.load(KEYS[:1], [bytearray(100)]) == [False]
        assert driver.exists(KEYS) == [False] * len(KEYS)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    wait_until(lambda: driver.exists(KEYS) == HALF)


def test_many_threads_look_up_at_once(daemon, connect) -> None:
    driver = with_table(stored_half(connect(daemon.socket_path)))
    answers: list[list[bool]] = []

    def work() -> None:
        answers.extend(driver.exists(KEYS) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert answers == [HALF] * 200
    assert driver.count("lookup_lane", "handed_back") == 0


@pytest.mark.parametrize("wire", ["2.1", "2.2"])
def test_where_either_side_has_none_the_daemon_is_asked(connect, wire: str) -> None:
    extra = ("--wire", wire) if wire == "2.1" else ("--presence-table-size", "0")
    with running_daemon(DaemonOptions(extra=extra)) as daemon:
        driver = stored_half(connect(daemon.socket_path))
        assert [driver.exists(KEYS) for _ in range(3)] == [HALF] * 3
        assert not has_table(driver)


def test_a_relay_that_passes_no_descriptors_on_costs_the_table_alone(daemon, relay_to, connect) -> None:
    driver = stored_half(connect(relay_to(daemon.socket_path).path))
    assert [driver.exists(KEYS) for _ in range(3)] == [HALF] * 3
    assert not has_table(driver)


def test_a_table_that_is_too_small_leaves_what_it_lacks_to_the_daemon(connect) -> None:
    with running_daemon(DaemonOptions(extra=("--presence-table-size", str(4096 + 64)))) as daemon:
        driver = with_table(connect(daemon.socket_path))
        keys = [f"m@{number}" for number in range(20)]
        assert driver.store(keys, [bytearray(10)] * 20).ok
        before = asked(daemon)
        assert driver.exists([*keys, "absent"]) == [True] * 20 + [False]
        assert asked(daemon) > before


def test_no_descriptor_is_left_open(daemon, connect, open_descriptors) -> None:
    with_table(connect(daemon.socket_path)).connector.close()
    before = open_descriptors()
    for _ in range(5):
        with_table(connect(daemon.socket_path)).connector.close()
    assert open_descriptors() == before


# -- one table -----------------------------------------------------------------------------------------


@contextmanager
def memory(size_bytes: int = SIZE_BYTES, seals: int = fcntl.F_SEAL_SHRINK) -> Iterator[int]:
    descriptor = os.memfd_create("a test's", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def still_open() -> int:
    """How many descriptors this process has of such memory."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread's, by now
            count += "a test's" in str(link.readlink())
    return count


def test_nothing_is_in_an_empty_one() -> None:
    with memory() as descriptor:
        table = PresenceTable(SMALL, descriptor)
    assert table.look_up([b"ab", b"ac"]) == ([False, False], {Outcome.ABSENT: 2})


def test_one_that_could_shrink_is_refused() -> None:
    with memory(seals=fcntl.F_SEAL_GROW) as descriptor, pytest.raises(UnusableTable, match="may shrink"):
        PresenceTable(SMALL, descriptor)


@pytest.mark.parametrize("size_bytes", [0, SIZE_BYTES - 1, SIZE_BYTES + 1])
def test_one_of_another_size_is_refused(size_bytes: int) -> None:
    with memory(size_bytes) as descriptor, pytest.raises(UnusableTable):
        PresenceTable(SMALL, descriptor)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"table_format": 2}, "format 2, not 1"),
        ({"buckets": 7}, "a power of two"),
        ({"buckets": 0}, "a power of two"),
    ],
)
def test_one_that_is_not_described_as_this_side_knows_it_is_refused(
    change: dict[str, int], told: str
) -> None:
    with memory() as descriptor, pytest.raises(UnusableTable, match=told):
        PresenceTable(SMALL.model_copy(update=change), descriptor)


def test_what_is_no_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE_BYTES))
    with path.open("rb") as file, pytest.raises(UnusableTable):
        PresenceTable(SMALL, file.fileno())


def test_its_memory_is_mapped_so_that_this_process_cannot_change_it() -> None:
    with memory() as descriptor:
        table = PresenceTable(SMALL, descriptor)
    with pytest.raises(ValueError, match="read-only"):
        table._view.buckets[0, 0] = 1


# -- daemons that misbehave with it --------------------------------------------------------------------


def gives(
    scripted2: Any, send: Callable[[socket.socket, bytes], None], reply: PresenceTableReply = SMALL
) -> None:
    """Have the scripted daemon answer with this table, sent by `send`."""
    answered = scripted2._answer

    def answer(connected: socket.socket, session: Any, event: Any) -> None:
        if isinstance(getattr(event, "request", None), GetPresenceTable):
            send(connected, session.send_reply(event.request_id, reply))
        else:
            answered(connected, session, event)

    scripted2._answer = answer


def enclosing(*descriptors: int) -> Callable[[socket.socket, bytes], None]:
    return lambda connected, data: void(socket.send_fds(connected, [data], descriptors))


def put_word(descriptor: int, connector: Any, key: str) -> None:
    """Have the table `SMALL` say that this key is there."""
    words = words_of(connector._mapping.encoded([key]), SMALL.seed)
    offset = 4096 + 64 * int(places(words, SMALL.buckets)[1, 0]) + 8 * 5
    os.pwrite(descriptor, struct.pack("<Q", int(words[0])), offset)


def void(_: object) -> None:
    return None


@pytest.mark.parametrize("count", [0, 2, 6], ids=lambda count: f"{count} descriptors")
def test_other_than_one_descriptor_is_no_table_and_none_stays_open(scripted2, connect, count: int) -> None:
    with memory() as descriptor:
        gives(scripted2, enclosing(*[descriptor] * count))
        driver = stored_half(connect(scripted2.socket_path))
        assert [driver.exists(KEYS) for _ in range(3)] == [HALF] * 3
        wait_until(lambda: driver.connector.status()["daemon"]["lookup_lane_open"])
        scripted2.drop_connections()
        assert [driver.exists(KEYS) for _ in range(3)] == [HALF] * 3
        wait_until(lambda: driver.connector.status()["daemon"]["lookup_lane_open"])
        assert not has_table(driver)
        assert still_open() == 1, "the test's own"


def test_descriptors_that_nobody_asked_for_are_not_taken(scripted2, connect) -> None:
    with memory() as descriptor:
        driver = stored_half(connect(scripted2.socket_path))
        driver.exists(KEYS)
        wait_until(lambda: driver.connector.status()["daemon"]["lookup_lane_open"])
        answered = scripted2._answer

        def answer(connected: socket.socket, session: Any, event: Any) -> None:
            class Enclosing:
                def sendall(self, data: bytes) -> None:
                    socket.send_fds(connected, [data], [descriptor])

            answered(Enclosing(), session, event)

        scripted2._answer = answer
        assert [driver.exists(KEYS) for _ in range(3)] == [HALF] * 3
        assert still_open() == 1, "the test's own"


def test_a_table_that_comes_in_pieces_is_taken_whole(scripted2, connect) -> None:
    with memory() as descriptor:

        def in_pieces(connected: socket.socket, data: bytes) -> None:
            socket.send_fds(connected, [data[:1]], [descriptor])
            connected.sendall(data[1:7])
            connected.sendall(data[7:])

        gives(scripted2, in_pieces)
        with_table(connect(scripted2.socket_path))


def test_an_unusable_table_is_said_once_and_lookups_go_on(
    scripted2, connect, caplog: pytest.LogCaptureFixture
) -> None:
    with memory(SIZE_BYTES + 4096) as descriptor:
        gives(scripted2, enclosing(descriptor))
        driver = stored_half(connect(scripted2.socket_path))
        for _ in range(3):
            scripted2.drop_connections()
            assert driver.exists(KEYS) == HALF
            wait_until(lambda: driver.connector.status()["daemon"]["lookup_lane_open"])
    assert caplog.text.count("the daemon's presence table is not used: the table has") == 1


@pytest.mark.parametrize("does", ["breaks off", "says nothing"])
def test_a_daemon_that_fails_over_it_is_asked_for_lookups_in_the_lane(scripted2, connect, does: str) -> None:
    def answers(request: Request, data: bytes) -> bytes | None:
        return None if isinstance(request, GetPresenceTable) else data

    if does == "breaks off":
        scripted2.garble = answers
    else:
        gives(scripted2, lambda *_: None)
    driver = stored_half(connect(scripted2.socket_path, timeout_s=0.5))
    assert [driver.exists(KEYS) for _ in range(4)] == [HALF] * 4
    wait_until(lambda: driver.exists(KEYS) == HALF and driver.count("lookup_lane", "answered"))
    assert not has_table(driver)


def test_a_table_goes_with_its_connection(scripted2, connect) -> None:
    with memory() as descriptor:
        gives(scripted2, enclosing(descriptor))
        driver = with_table(stored_half(connect(scripted2.socket_path)))
        assert driver.exists(KEYS) == [False] * len(KEYS)  # it is empty, whatever the daemon has
        gives(scripted2, enclosing())
        scripted2.drop_connections()
        assert driver.exists(KEYS) == HALF
        assert not has_table(driver)


def test_a_table_is_not_believed_once_another_daemon_answers(scripted2, connect) -> None:
    with memory() as descriptor:
        gives(scripted2, enclosing(descriptor))
        driver = with_table(stored_half(connect(scripted2.socket_path)))
        scripted2.instance_id = "another"
        client = driver.connector._engine.client
        client.discard(client.borrow())
        driver.delete(["any"])  # which finds out who answers by now; the old connection stays open
        assert driver.exists(KEYS) == HALF


def test_a_lookup_that_waits_for_a_table_goes_to_the_daemon_when_the_connection_does(
    scripted2, connect
) -> None:
    with memory() as descriptor:
        gives(scripted2, enclosing(descriptor))
        driver = with_table(stored_half(connect(scripted2.socket_path)))
        lane = driver.connector._lane
        waiting = driver.connector.submit_batch_exists(KEYS)
        lane._break("a test")
        lane.open(frozenset())  # whose table is as empty as the one before
        assert driver.wait(waiting).result_bools == HALF, "what the daemon says"
        assert driver.count("lookup_lane", "handed_back") == 1


def test_lookups_that_were_submitted_together_are_looked_up_together(daemon, connect) -> None:
    driver = with_table(stored_half(connect(daemon.socket_path)))
    table = driver.connector._lane._table
    looks: list[int] = []
    look_up = table.look_up
    table.look_up = lambda uris: looks.append(len(uris)) or look_up(uris)
    many = [f"many{number}" for number in range(500)]
    ids = [driver.connector.submit_batch_exists(keys) for keys in (KEYS[:5], [], many, KEYS[3:], many[:3])]
    found = {each.future_id: each.result_bools for each in driver.connector.drain_completions()}
    assert [found[each] for each in ids] == [HALF[:5], [], [False] * 500, HALF[3:], [False] * 3]
    assert looks == [5 + 500 + 5 + 3]
    ids = [driver.connector.submit_batch_exists(many) for _ in range(9)]
    assert len(driver.connector.drain_completions()) == len(ids)
    assert looks[1:] == [2000, 2000, 500]
    assert driver.count("lookup_lane", "answered") == 5 + len(ids)


def test_who_only_waits_on_the_descriptor_gets_every_lookup(daemon, connect) -> None:
    connector = with_table(stored_half(connect(daemon.socket_path))).connector
    for _ in range(3):
        submitted = [connector.submit_batch_exists(KEYS) for _ in range(4)]
        assert select.select([connector.event_fd()], [], [], DEADLINE_S)[0]
        assert [each.future_id for each in connector.drain_completions()] == submitted
        assert not select.select([connector.event_fd()], [], [], 0)[0]
    assert connector.drain_completions() == []


def test_a_lookup_that_is_submitted_amid_a_drain_is_announced(
    daemon, connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = with_table(stored_half(connect(daemon.socket_path))).connector
    look_up = connector._lane.look_up
    submitted = [connector.submit_batch_exists(KEYS)]

    def and_then_submits() -> Any:
        found = look_up()
        submitted.append(connector.submit_batch_exists(KEYS))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(connector._lane, "look_up", and_then_submits)
        assert [each.future_id for each in connector.drain_completions()] == submitted[:1]
    assert select.select([connector.event_fd()], [], [], DEADLINE_S)[0]
    assert [each.future_id for each in connector.drain_completions()] == submitted[1:]


def test_lookups_in_the_table_hold_up_nothing_else_while_the_daemon_is_asked_too(scripted2, connect) -> None:
    with memory() as descriptor:
        gives(scripted2, enclosing(descriptor))
        driver = with_table(connect(scripted2.socket_path))
        connector = driver.connector
        placed = KEYS[:1]
        put_word(descriptor, connector, placed[0])
        os.pwrite(descriptor, struct.pack("<Q", 1), 0)  # it says that it has not all
        scripted2.freeze()
        asked = connector.submit_batch_exists(["unplaced"])
        assert connector.drain_completions() == []
        assert driver.count("lookup_lane", "handed_back") == 0, "it is asked in the lane"
        failed = connector.submit_batch_get(["any"], [object()])  # which is no buffer, so nobody is asked
        wait_until(lambda: connector.status()["pending"] == 1)
        found = connector.submit_batch_exists(placed)
        assert {each.future_id for each in connector.drain_completions()} == {failed, found}
        scripted2.thaw()
        # Not drained before the answer is there, which is what makes the descriptor readable now.
        assert select.select([connector.event_fd()], [], [], DEADLINE_S)[0]
        found = connector.submit_batch_exists(placed)
        assert {each.future_id for each in connector.drain_completions()} == {asked, found}


def test_another_process_looks_nothing_up(daemon, connect, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = with_table(stored_half(connect(daemon.socket_path)))
    waiting = driver.connector.submit_batch_exists(KEYS)
    with monkeypatch.context() as in_child:
        in_child.setattr(driver.connector._lane, "_process", None)
        assert driver.connector._lane.look_up() == []
    assert driver.wait(waiting).result_bools == HALF


def test_a_close_fails_what_still_waits_for_a_look_and_nothing_else(daemon, connect) -> None:
    driver = with_table(connect(daemon.socket_path))
    driver.exists(KEYS)
    waiting = driver.connector.submit_batch_exists(KEYS)
    driver.connector.close()
    (left,) = driver.connector.drain_completions()
    assert (left.future_id, left.ok, left.result_bools) == (waiting, False, [False] * len(KEYS))


def test_a_fault_in_a_look_sends_the_lookup_the_ordinary_way(
    daemon, connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = with_table(stored_half(connect(daemon.socket_path)))

    def fault(*_: object) -> None:
        raise RuntimeError("nobody foresaw it")

    monkeypatch.setattr(PresenceTable, "look_up", fault)
    assert driver.exists(KEYS) == HALF


def test_a_fault_over_the_table_costs_no_lookup(
    daemon, connect, monkeypatch: pytest.MonkeyPatch, open_descriptors
) -> None:
    def fault(*_: object) -> None:
        raise RuntimeError("nobody foresaw it")

    monkeypatch.setattr(Connection, "presence_table", fault)
    driver = stored_half(connect(daemon.socket_path))
    assert driver.exists(KEYS) == HALF
    before = open_descriptors()
    assert [driver.exists(KEYS) for _ in range(20)] == [HALF] * 20
    assert open_descriptors() <= before + 2


def test_the_words_of_a_table_are_found_by_the_uris_of_keys(scripted2, connect) -> None:
    with memory() as descriptor:
        gives(scripted2, enclosing(descriptor))
        driver = with_table(connect(scripted2.socket_path))
        put_word(descriptor, driver.connector, KEYS[3])
        assert driver.exists(KEYS) == [index == 3 for index in range(len(KEYS))]
