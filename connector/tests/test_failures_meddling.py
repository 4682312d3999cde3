"""What the rules of the failure suite's relay do to the bytes of a reply."""

from __future__ import annotations

import random
import threading

import pytest
from failures import meddling
from failures.meddling import KillAt, Meddled, Meddler

from hypercache_compat.relay import FROM_CLIENT, FROM_DAEMON, HangUp

REPLY = b'{"status": "PONG"}\n'


def passed(connection: Meddled, data: bytes = REPLY) -> bytes:
    """What a client gets of `data`, and whether the connection ends with it, as a "!" after it."""
    try:
        return connection.passed(FROM_DAEMON, data)
    except HangUp as end:
        return end.last + b"!"


def test_without_a_rule_all_passes_and_the_first_reply_is_measured() -> None:
    meddler = Meddler()
    connection = meddler.passage(4)
    assert connection.passed(FROM_CLIENT, b'{"action": "ping"}\n') == b'{"action": "ping"}\n'
    assert passed(connection) == REPLY
    assert (meddler.connections, meddler.hello_bytes) == (5, len(REPLY))


@pytest.mark.parametrize("number", range(len(REPLY) + 4))
def test_each_connection_is_cut_one_byte_later(number: int) -> None:
    meddler = Meddler()
    connection = meddler.passage(10 + number)
    with meddler.meddling(meddling.cut_at_every_byte(10)):
        got = passed(connection) + passed(connection)
    assert got.startswith((2 * REPLY)[:number] + b"!")
    assert passed(meddler.passage(99)) == REPLY, "afterwards nothing is cut"


def test_an_older_connection_is_cut_before_any_byte() -> None:
    meddler = Meddler()
    with meddler.meddling(meddling.cut_at_every_byte(10)):
        assert passed(meddler.passage(9)) == b"!"


def test_replies_are_halved_replaced_or_never_come() -> None:
    meddler = Meddler()
    with meddler.meddling(meddling.halve):
        assert passed(meddler.passage(0)) == REPLY[: len(REPLY) // 2]
    with meddler.meddling(meddling.hang_up):
        assert passed(meddler.passage(0)) == b"!"
    with meddler.meddling(meddling.garble(random.Random(1))):
        garbage = [passed(meddler.passage(0)) for _ in range(20)]
    assert REPLY not in garbage
    assert bytes(len(REPLY)) in garbage


def test_a_delay_ends_when_all_is_over() -> None:
    over = threading.Event()
    over.set()
    meddler = Meddler()
    with meddler.meddling(meddling.delay(over, 60.0)):
        assert passed(meddler.passage(0)) == REPLY


def test_a_process_is_killed_once_at_the_message_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(meddling.os, "kill", lambda pid, number: killed.append((pid, number)))
    kill = KillAt(lambda request: request["action"] == "ping", 4242)
    meddler = Meddler()
    with meddler.seeing(reply=kill.at_reply):
        connection = meddler.passage(0)
        for action in ("get_status", "ping", "ping"):
            connection.passed(FROM_CLIENT, b'{"action": "%s"}\n' % action.encode())
            assert passed(connection) == REPLY
            assert killed == [(4242, 9)] * (action == "ping")
    assert kill.done.is_set()
