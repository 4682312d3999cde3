"""How a client and a daemon agree on a wire, also where the daemon makes nothing of a hello."""

import os
import time
from collections.abc import Callable

import pytest
from asking import MakeClient, hit, locates

from hypercache_connector import client as client_module
from hypercache_protocol import WIRE_1_0, WIRE_1_1, WIRE_2_0, WIRE_2_1, WIRE_2_2, WireVersion
from hypercache_protocol.batches import Hello
from hypercache_protocol.messages import MissReply, Ping, Request
from hypercache_protocol.versions import LATEST


def in_version(hello: bytes, version: str) -> bytes:
    """The answer to a hello, as of another version."""
    assert LATEST_ON_WIRE in hello
    return hello.replace(LATEST_ON_WIRE, b'"version":"%s"' % version.encode())


LATEST_ON_WIRE = b'"version":"%s"' % str(LATEST).encode()

ANSWERS: dict[str, Callable[[bytes], bytes | None]] = {
    "error": lambda _: b'{"status":"ERROR","error_message":"Unknown action"}\n',
    "error in other words": lambda _: b'{"status":"ERROR","error_message":"quoi?","error_code":"NOVEL"}\n',
    "error without words": lambda _: b'{"status":"FAILED"}\n',
    "strange success": lambda _: b'{"status":"OK","hello":"world"}\n',
    "a pong": lambda _: b'{"status":"PONG"}\n',
    "half a hello": lambda _: b'{"status":"HELLO","version":"2.0"}\n',
    "a hello of wire 3": lambda data: in_version(data, "3.0"),
    "a hello of wire 1": lambda data: in_version(data, "1.1"),
    "a hello of no wire": lambda data: in_version(data, "two"),
    "no object": lambda _: b"[]\n",
    "no json": lambda _: b"\x00\xff\xfe!\n",
    "no line": lambda _: b"\x93\x01\x02",
    "twice": lambda data: data + data,
    "half a line": lambda data: data[:20],
    "silence": lambda _: b"",
    "a closed connection": lambda _: None,
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_whatever_an_old_daemon_makes_of_a_hello_wire_1_works_within_a_second(
    scripted2, client_to: MakeClient, monkeypatch: pytest.MonkeyPatch, answer: Callable[[bytes], bytes | None]
) -> None:
    assert client_module.HELLO_TIMEOUT_S <= 0.5
    monkeypatch.setattr(client_module, "HELLO_TIMEOUT_S", 0.1)  # a busy machine may take the rest
    scripted2.garble = lambda request, data: answer(data) if isinstance(request, Hello) else data
    scripted2.objects = {"u0": hit(5)}
    client = client_to(scripted2.socket_path)
    began = time.monotonic()
    assert client.exchange(locates(2)) == [hit(5), MissReply()]
    assert time.monotonic() - began < 1.0
    assert client.wire == WIRE_1_1
    assert not client.breaker_open
    assert scripted2.counted()["locate"] == 2
    assert scripted2.counted()["locate_many"] == 0


@pytest.mark.parametrize("answer", ["silence", "half a line"])
def test_a_client_in_a_hurry_has_time_left_for_wire_1(
    scripted2, client_to: MakeClient, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    scripted2.garble = lambda request, data: ANSWERS[answer](data) if isinstance(request, Hello) else data
    monkeypatch.setattr(client_module, "HELLO_TIMEOUT_S", 60.0)  # so that 1.6 s are a hurry
    client = client_to(scripted2.socket_path, timeout_s=1.6)
    assert client.exchange(locates(2)) == [MissReply()] * 2
    assert client.wire == WIRE_1_1


def test_an_old_daemon_that_refuses_a_hello_and_closes_is_connected_to_again(
    scripted, client_to: MakeClient
) -> None:
    def refused_and_closed(request: Request, data: bytes) -> bytes | None:
        if isinstance(request, Ping) and scripted.connections_accepted == 1:
            return None
        return data

    scripted.garble = refused_and_closed
    client = client_to(scripted.socket_path)
    assert client.exchange(locates(2)) == [MissReply()] * 2
    assert (client.wire, scripted.connections_accepted) == (WIRE_1_1, 2)


def test_each_new_connection_asks_again_and_takes_up_an_upgrade_and_a_downgrade(
    scripted, client_to: MakeClient
) -> None:
    client = client_to(scripted.socket_path)
    for wire in (WIRE_1_1, WIRE_2_0, WIRE_1_1, WIRE_2_1, WIRE_2_2, WIRE_2_0):
        scripted.stop()
        scripted.wire = wire
        scripted.start()
        assert client.exchange(locates(2)) == [MissReply()] * 2
        assert client.wire == wire
    assert scripted.counted()["locate_many"] == 4
    assert scripted.counted()["locate"] == 4


def test_a_kept_connection_says_hello_once_and_pings_never(scripted2, client_to: MakeClient) -> None:
    client = client_to(scripted2.socket_path)
    for _ in range(5):
        client.exchange(locates(2))
    assert scripted2.counted() == {"hello": 1, "locate_many": 5}
    assert (client.instance_id, client.wire) == ("instance-1", LATEST)
    assert {"batches", "chunk_checksums"} <= client.features


@pytest.mark.parametrize("version", [WIRE_1_1, LATEST], ids=str)
def test_a_daemon_of_wire_2_that_was_too_busy_for_a_hello_is_asked_again(
    scripted2, client_to: MakeClient, version: WireVersion
) -> None:
    novel = b'{"novel":1,"status"'
    scripted2.garble = lambda request, data: (
        b"" if isinstance(request, Hello) else data.replace(b'{"status"', novel)
    )
    scripted2.change = lambda request, reply: (
        reply.model_copy(update={"wire": (1, 2)}) if isinstance(request, Ping) else reply
    )
    client = client_to(scripted2.socket_path, version=version)
    client.exchange(locates(1))
    assert client.wire == WIRE_1_1
    assert client.ignored()["unknown_fields"] == 2, "also of the connection that is not kept"
    scripted2.garble = lambda _, data: data
    client.exchange(locates(1))
    assert client.wire == version
    accepted = scripted2.connections_accepted
    client.exchange(locates(1))
    assert scripted2.connections_accepted == accepted


def test_an_instance_that_a_hello_names_is_announced_before_its_first_reply(
    scripted2, client_to: MakeClient
) -> None:
    announced: list[None] = []
    client = client_to(scripted2.socket_path, on_new_instance=lambda: announced.append(None))
    client.exchange(locates(1))
    scripted2.stop()
    scripted2.start()
    client.exchange(locates(1))
    assert len(announced) == 2
    assert client.instance_id == "instance-2"


@pytest.mark.parametrize("wire", [WIRE_1_0, WIRE_1_1])
def test_a_client_pinned_to_wire_1_never_says_hello(
    scripted2, client_to: MakeClient, wire: WireVersion
) -> None:
    client = client_to(scripted2.socket_path, version=wire)
    client.exchange(locates(3))
    assert scripted2.counted() == {"ping": 1, "locate": 3}


@pytest.mark.parametrize("wire", ["1.1", "2.0", "2.1"])
def test_a_connector_pinned_to_a_wire_works_in_it(scripted2, connect, wire: str) -> None:
    driver = connect(scripted2.socket_path, wire=wire)
    data, back = bytearray(os.urandom(5000)), bytearray(5000)
    assert driver.store(["k"], [data]).ok
    assert driver.load(["k"], [back]) == [True]
    assert back == data
    asked = scripted2.counted()
    assert (asked["hello"] > 0, asked["ping"] > 0) == (wire != "1.1", wire == "1.1")
    for hello in (each for each in scripted2.requests if isinstance(each, Hello)):
        assert hello.versions[-1] == wire, "nothing later than the pin is asked for"


def test_a_connector_pinned_to_1_0_misses_and_fails_since_nothing_can_be_verified(scripted2, connect) -> None:
    assert connect(scripted2.socket_path).store(["k"], [bytearray(100)]).ok
    driver = connect(scripted2.socket_path, wire="1.0")
    asked_before = scripted2.counted()
    assert driver.exists(["k"]) == [False]
    assert driver.load(["k"], [bytearray(100)]) == [False]
    assert not driver.store(["l"], [bytearray(100)]).ok
    assert scripted2.counted() - asked_before == {"ping": 1}, "nothing was asked that means less in 1.0"
    for operation in ("lookups", "loads", "stores"):
        assert driver.count(operation, "daemon_too_old") == 1
