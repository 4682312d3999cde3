"""Staging what is not stored: by a daemon of wire 2.1 that looks itself, and by others."""

from collections.abc import Callable
from typing import Any

import pytest
from asking import MakeClient

from hypercache_connector import DaemonUnavailable
from hypercache_connector.keys import UriMapping
from hypercache_protocol import WIRE_1_1, WIRE_2_0, ErrorCode, LocalProtocolError, WireVersion
from hypercache_protocol.batches import CommitMany, ItemError, StagedMany, StageMany
from hypercache_protocol.messages import ErrorReply, StageWrite

MAPPING = UriMapping("test")


def stored_twice(scripted: Any, connect: Any) -> Any:
    """A driver that has stored a and b, and a daemon that counts from then on."""
    driver = connect(scripted.socket_path)
    assert driver.store(["a", "b"], [bytes(10), bytes(20)]).ok
    scripted.requests.clear()
    return driver


def test_a_daemon_of_2_1_looks_for_what_is_stored_when_it_stages(scripted2, connect) -> None:
    driver = stored_twice(scripted2, connect)
    assert driver.store(["a", "c", "b"], [bytes(10), bytes(30), b"x" * 21]).ok
    (staged, committed) = scripted2.requests
    assert isinstance(staged, StageMany)
    assert staged.unless_stored
    assert isinstance(committed, CommitMany)
    assert committed.uris() == [MAPPING.uri("c"), MAPPING.uri("b")], "of another size is another object"
    assert driver.connector.status()["stores"] == {"ok": 4, "already_stored": 1}
    back = [bytearray(size) for size in (10, 21, 30)]
    assert driver.load(["a", "b", "c"], back) == [True] * 3
    assert bytes(back[1]) == b"x" * 21


def test_one_key_that_is_stored_costs_one_exchange_and_one_that_is_not_two(scripted2, connect) -> None:
    driver = stored_twice(scripted2, connect)
    assert driver.store(["a"], [bytes(10)]).ok
    assert scripted2.counted() == {"stage_many": 1}
    assert driver.store(["new"], [bytes(10)]).ok
    assert scripted2.counted() == {"stage_many": 2, "commit_write": 1}


def test_overwrite_asks_for_nothing_to_be_spared(scripted2, connect) -> None:
    driver = connect(scripted2.socket_path, overwrite=True)
    for data in (bytes(10), b"y" * 10):
        assert driver.store(["a", "b"], [data, data]).ok
    assert all(not request.unless_stored for request in scripted2.requests if isinstance(request, StageMany))
    back = bytearray(10)
    assert driver.load(["a"], [back]) == [True]
    assert back == b"y" * 10


@pytest.mark.parametrize("wire", [WIRE_1_1, WIRE_2_0], ids=str)
def test_a_daemon_before_2_1_is_asked_what_is_stored_before_anything_is_staged(
    scripted, connect, wire: WireVersion
) -> None:
    scripted.stop()
    scripted.wire = wire
    scripted.start()
    driver = stored_twice(scripted, connect)
    assert driver.store(["a", "c"], [bytes(10), bytes(30)]).ok
    asked = [request.action for request in scripted.requests]
    assert asked == (
        ["locate", "locate", "stage_write", "commit_write"]
        if wire == WIRE_1_1
        else ["locate_many", "stage_write", "commit_write"]
    )


def test_a_daemon_that_lacks_it_all_at_once_is_stored_to_the_older_way_without_a_word(
    scripted2, connect, caplog: pytest.LogCaptureFixture
) -> None:
    driver = connect(scripted2.socket_path)
    assert driver.store(["a"], [bytearray(5)]).ok
    scripted2.stop()
    scripted2.wire = WIRE_2_0
    scripted2.start()
    assert driver.store(["b"], [bytearray(5)]).ok
    assert driver.connector.status()["daemon"]["wire"] == "2.0"
    assert "unless_stored" not in caplog.text


def test_unless_stored_is_refused_before_a_daemon_of_2_0_could_drop_it(
    scripted, client_to: MakeClient
) -> None:
    scripted.wire = WIRE_2_0
    client = client_to(scripted.socket_path)
    request = StageMany(suffixes=("a",), sizes=(1,), unless_stored=True)
    with pytest.raises(LocalProtocolError, match=r"unless_stored needs wire 2\.1 .* speaks wire 2\.0"):
        client.exchange([request])
    needs = {"batches"}
    with pytest.raises(DaemonUnavailable, match=r"lacks unless_stored; upgrade it to wire 2\.1"):
        client.ask(request, needs=needs)
    assert needs == {"batches"}, "the caller's own"
    assert scripted.counted() == {"hello": 2}


def test_a_downgrade_between_two_stores_is_noticed_and_nothing_is_lost(scripted2, connect) -> None:
    driver = stored_twice(scripted2, connect)
    scripted2.stop()
    scripted2.wire = WIRE_2_0
    scripted2.start()
    assert driver.store(["a", "c"], [bytes(10), bytes(30)]).ok
    assert scripted2.counted() == {"hello": 1, "locate_many": 1, "stage_write": 1, "commit_write": 1}
    assert driver.connector.status()["stores"] == {"ok": 3, "already_stored": 1}


def _with(**changes: Any) -> Callable[[StagedMany], StagedMany]:
    return lambda reply: reply.model_copy(update=changes)


@pytest.mark.parametrize(
    "wrong",
    [
        _with(stored=None),
        _with(stored=b"\x00"),
        _with(stored=b"\x03"),
        _with(stored=b"\x05"),
        _with(stored=b"\x01\x00"),
        _with(stored=b""),
        _with(done=b"\x03"),
        _with(errors=(ItemError(index=0, error_message="no"),)),
    ],
    ids=["not told", "nothing", "staged too", "beyond", "too long", "empty", "one too many", "refused too"],
)
def test_what_is_called_stored_is_believed_only_where_the_whole_reply_fits(
    scripted2, connect, wrong: Callable[[StagedMany], StagedMany]
) -> None:
    driver = stored_twice(scripted2, connect)
    scripted2.change_batch = lambda request, reply: wrong(reply) if isinstance(reply, StagedMany) else reply
    assert not driver.store(["a", "c"], [bytes(10), bytes(30)]).ok
    assert driver.count("stores", "daemon_garbled") == 2
    assert MAPPING.uri("c") not in scripted2.objects


@pytest.mark.parametrize("stored", [b"\x01", b"\x00"])
def test_a_refusal_beside_what_is_stored_is_that_key_s_own(scripted2, connect, stored: bytes) -> None:
    driver = stored_twice(scripted2, connect)
    scripted2.change = lambda request, reply: (
        ErrorReply(error_message="full", error_code=ErrorCode.NO_SPACE)
        if isinstance(request, StageWrite) and request.uri == MAPPING.uri("c")
        else reply
    )
    sizes = [10 if stored == b"\x01" else 11, 30]
    assert not driver.store(["a", "c"], [bytes(size) for size in sizes]).ok
    good = "already_stored" if stored == b"\x01" else "ok"
    assert driver.count("stores", "no_space") == 1
    assert driver.count("stores", good) == (1 if good == "already_stored" else 3)
