"""Lookups that need no thread: what takes the lane, and what becomes of it when the daemon misbehaves."""

from __future__ import annotations

import errno
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from forking import numbered, run_forking

from hypercache_compat.waiting import wait_until
from hypercache_connector.lookup_lane import MOST_KEYS
from hypercache_protocol.batches import LocatedMany, LocateMany
from hypercache_protocol.codecs.msgpack_frames import encode_reply
from hypercache_protocol.messages import PongReply
from hypercache_protocol.versions import LATEST

DEADLINE_S = 30.0
KEYS = [f"m@00000001@0@{number:064x}" for number in range(8)]


def opened(driver: Any) -> Any:
    """The driver, once its lane is open."""
    driver.exists(["any"])
    wait_until(lambda: driver.connector.status()["daemon"]["lookup_lane_open"])
    driver.answered_before = driver.count("lookup_lane", "answered")
    return driver


def answered(driver: Any) -> int:
    """How many lookups the lane answered since it was opened."""
    return int(driver.count("lookup_lane", "answered") - driver.answered_before)


def handed_back(driver: Any) -> int:
    return int(driver.count("lookup_lane", "handed_back"))


# -- what takes it -------------------------------------------------------------------------------------


def test_after_the_first_lookup_those_that_follow_take_the_lane(scripted2, connect) -> None:
    driver = connect(scripted2.socket_path)
    assert driver.store(KEYS[:4], [bytearray(100)] * 4).ok
    assert driver.exists(KEYS) == [True] * 4 + [False] * 4
    assert driver.count("lookup_lane", "answered") == 0
    opened(driver)
    before = scripted2.connections_accepted
    assert driver.exists(KEYS) == [True] * 4 + [False] * 4
    assert driver.exists(["alone"]) == [False]
    assert answered(driver) == 2
    assert scripted2.connections_accepted == before


def test_many_lookups_wait_in_it_at_once_and_each_gets_its_own_answer(scripted2, connect) -> None:
    driver = opened(connect(scripted2.socket_path))
    driver.store(KEYS, [bytearray(100)] * len(KEYS))
    scripted2.freeze()
    ids = [driver.connector.submit_batch_exists([key, "absent"]) for key in KEYS]
    scripted2.thaw()
    assert [driver.wait(each).result_bools for each in ids] == [[True, False]] * len(KEYS)
    assert answered(driver) == len(KEYS)


def test_no_key_and_more_than_fit_one_frame_go_the_ordinary_way(scripted2, connect) -> None:
    driver = opened(connect(scripted2.socket_path))
    assert driver.exists([]) == []
    assert driver.exists([f"k{number}" for number in range(MOST_KEYS + 1)]) == [False] * (MOST_KEYS + 1)
    assert answered(driver) == 0
    assert driver.exists([f"k{number}" for number in range(MOST_KEYS)]) == [False] * MOST_KEYS
    assert answered(driver) == 1


def test_no_more_wait_in_it_than_the_daemon_takes_at_once(scripted2, connect) -> None:
    scripted2.limits = scripted2.limits.model_copy(update={"max_in_flight": 2})
    driver = opened(connect(scripted2.socket_path))
    scripted2.freeze()
    ids = [driver.connector.submit_batch_exists([key]) for key in KEYS]
    scripted2.thaw()
    assert [driver.wait(each).result_bools for each in ids] == [[False]] * len(KEYS)
    assert answered(driver) == 2


def test_what_may_take_more_than_one_frame_of_the_daemon_s_goes_the_ordinary_way(scripted2, connect) -> None:
    scripted2.limits = scripted2.limits.model_copy(update={"max_request_bytes": 4096, "max_batch": 20})
    driver = opened(connect(scripted2.socket_path))
    assert driver.exists([str(number) * 400 for number in range(10)]) == [False] * 10
    assert driver.exists([f"k{number}" for number in range(21)]) == [False] * 21
    assert answered(driver) == 0
    assert driver.exists([f"k{number}" for number in range(20)]) == [False] * 20
    assert answered(driver) == 1


def test_a_daemon_that_reads_nothing_for_a_while_gets_every_lookup_in_the_end(scripted2, connect) -> None:
    scripted2.limits = scripted2.limits.model_copy(update={"max_in_flight": 1000})
    driver = opened(connect(scripted2.socket_path))
    scripted2.freeze()
    # Long after the first one the kernel's buffers are full, and what is left waits on this side.
    batch = [f"{number:0400d}" for number in range(MOST_KEYS)]
    ids = [driver.connector.submit_batch_exists([f"{each}{key}" for key in batch]) for each in range(6)]
    scripted2.thaw()
    assert [driver.wait(each).result_bools for each in ids] == [[False] * MOST_KEYS] * 6
    assert answered(driver) == 6


def test_on_wire_1_there_is_no_lane(scripted, connect) -> None:
    finds_without_lane(connect(scripted.socket_path))


def test_where_objects_are_sealed_there_is_no_lane(scripted2, connect) -> None:
    finds_without_lane(connect(scripted2.socket_path, seal_for_old_daemons=True))


def finds_without_lane(driver: Any) -> None:
    driver.store(KEYS[:4], [bytearray(100)] * 4)
    assert [driver.exists(KEYS) for _ in range(3)] == [[True] * 4 + [False] * 4] * 3
    assert driver.count("lookup_lane", "answered") == 0
    assert not driver.connector.status()["daemon"]["lookup_lane_open"]


def test_the_lane_follows_the_client_to_another_daemon_though_the_old_one_never_closes_it(
    scripted2, connect
) -> None:
    driver = opened(connect(scripted2.socket_path))
    scripted2.instance_id = "another"
    client = driver.connector._engine.client
    client.discard(client.borrow())  # so that the next lookup greets the daemon anew
    assert driver.exists(["by thread"]) == [False]
    assert driver.exists(["finds that another daemon answers"]) == [False]
    before = answered(driver)
    wait_until(lambda: driver.exists(["in the lane"]) == [False] and answered(driver) > before)


# -- what ends it --------------------------------------------------------------------------------------


def located(spoil: Callable[[LocatedMany], Any]) -> Callable[[Any, Any], Any]:
    """A change of the answers to lookups."""
    return lambda request, reply: spoil(reply) if isinstance(request, LocateMany) else reply


SPOILED: dict[str, dict[str, Any]] = {
    "garbage": {"garble": lambda request, data: b"\xff" * 64},
    "a closed connection": {"garble": lambda request, data: None},
    "half an answer, then the end": {"garble": lambda request, data: data[:7] + b"\xff" * 64},
    "too few bits": {"change_batch": located(lambda reply: reply.model_copy(update={"present": b""}))},
    "verifiable and absent": {
        "change_batch": located(lambda reply: reply.model_copy(update={"verifiable": b"\xff"}))
    },
}


def test_a_reply_that_comes_while_nothing_waits_closes_it(scripted2, connect) -> None:
    driver = opened(connect(scripted2.socket_path, timeout_s=8 * DEADLINE_S))  # its own thread comes too late
    frame = encode_reply(99, PongReply(), LATEST)
    for accepted in tuple(scripted2._sockets):
        accepted.sendall(frame)
    assert select.select([driver.connector.event_fd()], [], [], DEADLINE_S)[0]
    # Else whoever polls the descriptor would be woken by it for ever.
    assert driver.connector.drain_completions() == []
    assert not driver.connector._lane.is_open
    assert driver.exists(KEYS) == [False] * len(KEYS)


@pytest.mark.parametrize("what", SPOILED)
def test_an_odd_answer_closes_it_and_its_lookups_go_the_ordinary_way(scripted2, connect, what: str) -> None:
    driver = opened(connect(scripted2.socket_path))
    driver.store(KEYS[:4], [bytearray(100)] * 4)
    scripted2.freeze()
    ids = [driver.connector.submit_batch_exists(KEYS) for _ in range(3)]
    honest = {name: getattr(scripted2, name) for name in SPOILED[what]}
    spoilt = threading.Event()

    def once(name: str) -> Callable[[Any, Any], Any]:
        def answer(request: Any, reply: Any) -> Any:
            if isinstance(request, LocateMany) and not spoilt.is_set():
                spoilt.set()
                return SPOILED[what][name](request, reply)
            return honest[name](request, reply)

        return answer

    for name in honest:
        setattr(scripted2, name, once(name))
    scripted2.thaw()
    for each in ids:
        assert driver.wait(each).result_bools == [True] * 4 + [False] * 4
    assert spoilt.is_set()
    assert handed_back(driver) >= 1
    opened(driver)
    assert driver.exists(KEYS) == [True] * 4 + [False] * 4


def test_a_restarted_daemon_answers_what_the_old_one_left_and_the_lane_opens_again(
    scripted2, connect
) -> None:
    driver = opened(connect(scripted2.socket_path))
    driver.store(KEYS, [bytearray(100)] * len(KEYS))
    scripted2.freeze()
    ids = [driver.connector.submit_batch_exists(KEYS) for _ in range(3)]
    scripted2.stop()
    scripted2.start()
    scripted2.thaw()
    assert [driver.wait(each).result_bools for each in ids] == [[True] * len(KEYS)] * 3
    opened(driver)
    assert driver.exists(KEYS) == [True] * len(KEYS)
    assert answered(driver) == 1


def test_a_daemon_that_went_away_while_nothing_was_asked_costs_no_lookup(scripted2, connect) -> None:
    driver = opened(connect(scripted2.socket_path))
    driver.store(KEYS, [bytearray(100)] * len(KEYS))
    scripted2.stop()
    scripted2.start()
    assert driver.exists(KEYS) == [True] * len(KEYS)


def test_a_daemon_that_does_not_answer_makes_its_lookups_late_once_and_opens_the_breaker(
    scripted2, connect
) -> None:
    driver = opened(connect(scripted2.socket_path, timeout_s=0.5, probe_interval_s=30.0))
    scripted2.freeze()
    start = time.monotonic()
    ids = [driver.connector.submit_batch_exists(KEYS) for _ in range(3)]
    for each in ids:
        assert driver.wait(each).result_bools == [False] * len(KEYS)
    assert 0.5 <= time.monotonic() - start < 5.0
    # One that had a moment left when the first was given up is not asked again.
    late, refused = driver.count("lookups", "daemon_late"), driver.count("lookups", "breaker_open")
    assert late >= len(KEYS)
    assert late + refused == 3 * len(KEYS)
    assert driver.connector.status()["daemon"]["breaker_open"]
    assert driver.exists(KEYS) == [False] * len(KEYS)
    assert driver.count("lookups", "breaker_open") == refused + len(KEYS)


def test_while_the_breaker_is_open_lookups_fail_at_once_though_the_lane_is_open(scripted2, connect) -> None:
    driver = opened(connect(scripted2.socket_path, timeout_s=0.5, probe_interval_s=0.05))
    scripted2.freeze()
    driver.delete(KEYS[:1])  # this one is late
    assert driver.connector.status()["daemon"]["lookup_lane_open"]
    assert driver.exists(KEYS) == [False] * len(KEYS)
    assert (driver.count("lookups", "breaker_open"), driver.count("lookups", "daemon_late")) == (len(KEYS), 0)
    scripted2.thaw()
    wait_until(lambda: not driver.connector.status()["daemon"]["breaker_open"])
    assert driver.exists(KEYS) == [False] * len(KEYS)
    assert answered(driver) == 1


def test_answers_that_nobody_drains_are_not_late(scripted2, connect) -> None:
    driver = opened(connect(scripted2.socket_path, timeout_s=0.4))
    future_id = driver.connector.submit_batch_exists(KEYS)
    wait_until(lambda: answered(driver) == 1)
    time_spent = time.monotonic() + 1.0
    wait_until(lambda: time.monotonic() > time_spent)
    assert driver.count("lookups", "daemon_late") == 0
    assert driver.wait(future_id).ok


def test_a_fault_nobody_foresaw_closes_it_and_raises_nothing(
    scripted2, connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = opened(connect(scripted2.socket_path))

    def fault(*_: object) -> None:
        raise RuntimeError("unforeseen")

    with monkeypatch.context() as patched:
        patched.setattr("hypercache_connector.connection.Connection.presence", fault)
        assert driver.exists(KEYS) == [False] * len(KEYS)
    assert handed_back(driver) == 1
    opened(driver)
    with monkeypatch.context() as patched:
        patched.setattr("hypercache_connector.connection.Connection.post_lookup", fault)
        assert driver.exists(KEYS) == [False] * len(KEYS)
    assert not driver.connector.status()["daemon"]["lookup_lane_open"] or answered(driver) == 0
    assert caplog.text.count("the lookup lane has a fault") == 1, "faults come in thousands"


def test_no_descriptor_left_to_watch_costs_the_lane_and_no_thread(
    scripted2, connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = connect(scripted2.socket_path, lookup_threads=1)
    tries: list[object] = []

    class Full:
        def register(self, *_: object) -> None:
            tries.append(None)
            raise OSError(errno.ENOSPC, "no space left on device")

        def unregister(self, *_: object) -> None:
            raise FileNotFoundError

    with monkeypatch.context() as patched:
        patched.setattr(driver.connector._lane, "_ready", Full())
        assert driver.exists(KEYS) == [False] * len(KEYS)
        wait_until(lambda: bool(tries))
        assert driver.exists(KEYS) == [False] * len(KEYS)
    assert driver.count("lookup_lane", "answered") == 0
    opened(driver)


def no_thread_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)


def test_lookups_are_late_also_where_the_breaker_finds_no_thread_for_its_probe(
    scripted2, connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = opened(connect(scripted2.socket_path, timeout_s=0.3))
    no_thread_named(monkeypatch, "hypercache-probe")
    scripted2.freeze()
    ids = [driver.connector.submit_batch_exists(KEYS) for _ in range(3)]
    assert [driver.wait(each).result_bools for each in ids] == [[False] * len(KEYS)] * 3
    assert driver.count("lookups", "daemon_late") >= len(KEYS)
    assert not driver.connector.status()["daemon"]["breaker_open"]
    scripted2.thaw()
    assert driver.exists(KEYS) == [False] * len(KEYS)
    assert driver.count("lookups", "breaker_open") == 0
    opened(driver)


# -- close, fork ---------------------------------------------------------------------------------------


def test_close_fails_what_waits_in_it_each_id_once(scripted2, connect) -> None:
    driver = opened(connect(scripted2.socket_path))
    driver.connector.drain_completions()
    scripted2.freeze()
    ids = [driver.connector.submit_batch_exists(KEYS) for _ in range(5)]
    driver.connector.close()
    taken = driver.connector.drain_completions()
    assert sorted(completion.future_id for completion in taken) == ids
    assert not any(completion.ok or any(completion.result_bools or ()) for completion in taken)


_FORKING = """
import os, select, sys, time
from hypercache_connector import HyperCacheConnector

connector = HyperCacheConnector(socket_path=sys.argv[1], namespace="n")

def lookup():
    future_id = connector.submit_batch_exists(["k"])
    while not (done := connector.drain_completions()):
        assert select.select([connector.event_fd()], [], [], 20)[0]
    assert [(each.future_id, each.ok) for each in done] == [(future_id, True)]

while connector.status().get("lookup_lane", {}).get("answered", 0) < 3:
    lookup()
child = os.fork()
if child == 0:
    lane = connector._lane
    lane.open(frozenset())
    os._exit(1 if lane.ask(None) else 0)
assert os.waitpid(child, 0)[1] == 0
lookup()
assert connector.status()["lookup_lane"]["answered"] == 4

future_id = connector.submit_batch_exists(["k"])
assert select.select([connector.event_fd()], [], [], 20)[0]
child = os.fork()
if child == 0:
    connector._lane.take()  # the answer is the parent's
    connector._lane.close()
    connector.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert select.select([connector.event_fd()], [], [], 0)[0], "the child took the connection off the descriptor"
assert [each.ok for each in connector.drain_completions()] == [True]
connector.close()
"""


@numbered
def test_a_forked_child_leaves_its_parent_s_lane_alone(scripted2, numbers: str) -> None:
    run_forking(_FORKING, scripted2.socket_path, numbers)
