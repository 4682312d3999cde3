"""The client's method for each action: what it asks for, what it gives, and what it refuses."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hypercache_compat.daemon_process import DaemonProcess, running_daemon
from hypercache_connector import Client, DaemonRefused, DaemonUnavailable, Outcome
from hypercache_connector.actions import Actions
from hypercache_protocol import (
    WIRE_1_0,
    WIRE_1_1,
    WIRE_2_0,
    ErrorCode,
    LocalProtocolError,
    SyncStatus,
    Tier,
    WireVersion,
)
from hypercache_protocol.messages import REQUESTS, ErrorReply, Evict, MissReply, PongReply


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon() as process:
        yield process


@pytest.fixture(params=[WIRE_1_0, WIRE_1_1, WIRE_2_0], ids=str)
def client(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Iterator[Client]:
    """A client of each wire, over one real daemon that is empty."""
    with Client(daemon.socket_path, 20.0, version=request.param) as made:
        made.purge()
        yield made


def filled(client: Client, uri: str, data: bytes, **commit: Any) -> None:
    """Stage, write and commit an object of one chunk."""
    staged = client.stage_write(uri, len(data), "nvme", auto_flush_s3=False)
    (chunk,) = staged.chunk_layout
    with Path(chunk.device).open("r+b") as device:
        device.seek(chunk.offset)
        device.write(data)
    assert client.commit_write(uri, **commit).object_size == len(data)


def test_every_action_of_the_wire_has_a_method_of_its_name() -> None:
    assert [name for name in REQUESTS if not callable(getattr(Actions, name, None))] == []


def test_the_life_of_an_object(client: Client) -> None:
    assert client.locate("hypercache://a/1") is None
    filled(client, "hypercache://a/1", b"abc", chunk_checksums=[zlib.crc32(b"abc")])
    hit = client.locate("hypercache://a/1")
    assert hit is not None
    assert hit.object_size == 3
    assert client.locate_many(["hypercache://a/1", "hypercache://a/2"]) == [hit, None]
    client.pin("hypercache://a/1")
    client.pin("hypercache://a/1", False)
    assert client.ingest("hypercache://a/1").object_size == 3
    assert client.get_write_status("hypercache://a/1").sync_status is SyncStatus.COMMITTED
    assert client.evict_many(["hypercache://a/1", "hypercache://a/2"]) == [True, False]
    assert not client.evict("hypercache://a/1")


def test_about_the_daemon(client: Client) -> None:
    assert isinstance(client.ping(), PongReply)
    assert all(Path(device.path).exists() for device in client.get_devices())
    assert len(client.get_devices()) == 4
    assert client.get_status()["pools"]["nvme"]["used_bytes"] == 0
    client.record_telemetry("READ", "hypercache://a/1", 3, 10, 1.5, cpu_pct=2.0)


def test_a_write_may_grow_and_names_itself(daemon: DaemonProcess) -> None:
    with Client(daemon.socket_path, 20.0) as client:
        staged = client.stage_write("hypercache://a/3", 10, Tier.RAM)
        more = client.append_write("hypercache://a/3", 5, stage_id=staged.stage_id)
        assert more.object_size == 15
        assert len(more.chunk_layout) == 1
        with pytest.raises(DaemonRefused) as caught:
            client.commit_write("hypercache://a/3", stage_id="another")
        assert caught.value.code is ErrorCode.STALE_STAGE
        done = client.commit_write("hypercache://a/3", local_only=True, stage_id=staged.stage_id)
        assert done.sync_status is SyncStatus.LOCAL_ONLY


def test_what_an_old_wire_would_lose_is_refused_before_it_is_sent(daemon: DaemonProcess) -> None:
    with Client(daemon.socket_path, 20.0, version=WIRE_1_0) as client:
        client.stage_write("hypercache://a/4", 3)
        with pytest.raises(LocalProtocolError, match="local_only"):
            client.commit_write("hypercache://a/4", local_only=True)


def test_lookup_says_which_could_be_verified(daemon: DaemonProcess) -> None:
    with Client(daemon.socket_path, 20.0) as client:
        filled(client, "hypercache://a/5", b"abc", local_only=True, chunk_checksums=[zlib.crc32(b"abc")])
        filled(client, "hypercache://a/6", b"abc", local_only=True)
        found = client.lookup(["hypercache://a/5", "hypercache://a/6", "hypercache://a/7"])
    assert found == [Outcome.OK, Outcome.UNVERIFIABLE, Outcome.ABSENT]


@pytest.mark.parametrize("daemon_wire", [WIRE_1_1, WIRE_2_0], ids=str)
def test_a_refusal_raises_the_daemon_s_sentence_and_word(scripted, daemon_wire: WireVersion) -> None:
    scripted.wire = daemon_wire
    refusal = ErrorReply(error_message="no, since I say so", error_code=ErrorCode.FORBIDDEN)
    scripted.change = lambda request, reply: refusal if isinstance(request, Evict) else reply
    with (
        Client(scripted.socket_path, 10.0) as client,
        pytest.raises(DaemonRefused, match="no, since I say so") as caught,
    ):
        client.evict_many(["u1", "u2"])
    assert caught.value.code is ErrorCode.FORBIDDEN


@pytest.mark.parametrize("daemon_wire", [WIRE_1_1, WIRE_2_0], ids=str)
def test_a_refusal_of_one_of_many_tells_what_became_of_the_others(scripted, daemon_wire: WireVersion) -> None:
    scripted.wire = daemon_wire
    refusal = ErrorReply(error_message="not that one", error_code=ErrorCode.FORBIDDEN)
    scripted.change = lambda request, reply: refusal if getattr(request, "uri", "") == "u2" else reply
    with Client(scripted.socket_path, 10.0) as client:
        with pytest.raises(DaemonRefused, match="not that one") as caught:
            client.evict_many(["u1", "u2", "u3"])
        assert [type(reply) for reply in caught.value.replies] == [MissReply, ErrorReply, MissReply]
        with pytest.raises(DaemonRefused, match="not that one") as caught:
            client.evict("u2")
        assert caught.value.replies == (refusal,)


def test_no_daemon_is_no_refusal() -> None:
    with Client("/nowhere/s") as client, pytest.raises(DaemonUnavailable):
        client.evict("u")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda client: client.locate(""), "locate: 'uri' is wrong: String should have at least 1 character"),
        (lambda client: client.stage_write("u", -1), "stage_write: 'size_bytes' is wrong"),
        (
            lambda client: client.stage_write("u", 1, "disk"),
            r"'tier' is wrong: .*'nvme' or 'ram' \(got 'disk'",
        ),
        (lambda client: client.commit_write("u", chunk_checksums=[-1]), "'chunk_checksums.0' is wrong"),
        (lambda client: client.record_telemetry("E", "u", 1, 1, 1.0, cpu=1.0), "has no field 'cpu'; it has"),
        (lambda client: client.lookup(["u", "a\0"]), "uris: '1' is wrong: must not hold a NUL"),
        (lambda client: client.lookup(["u", "\ud800"]), "uris: '1' is wrong: .*valid string"),
        (lambda client: client.lookup(["", "u"]), "uris: '0' is wrong: .*at least 1 character"),
        (lambda client: client.lookup(["a" * 8193]), "uris: '0' is wrong: must be at most 8192 bytes"),
        (lambda client: client.lookup(["ä" * 4097]), "uris: '0' is wrong: must be at most 8192 bytes"),
        (lambda client: client.lookup(["u", b"u"]), "uris: '1' is wrong: .*valid string"),
    ],
    ids=[
        "uri",
        "size",
        "tier",
        "checksum",
        "telemetry",
        "NUL",
        "surrogate",
        "empty",
        "long",
        "wide",
        "bytes",
    ],
)
def test_a_wrong_argument_is_named_in_one_sentence_and_nothing_is_sent(
    scripted, call: Callable[[Client], object], sentence: str
) -> None:
    with Client(scripted.socket_path, 10.0) as client, pytest.raises(ValueError, match=sentence) as caught:
        call(client)
    assert "\n" not in str(caught.value)
    assert scripted.requests == []


@pytest.mark.parametrize("ask", [Client.lookup, Client.locate_many, Client.evict_many])
def test_one_uri_is_not_taken_for_as_many_as_it_has_letters(
    scripted, ask: Callable[[Client, Any], object]
) -> None:
    with Client(scripted.socket_path, 10.0) as client:
        with pytest.raises(TypeError, match="a sequence of uris, not one"):
            ask(client, "hypercache://u")
        assert ask(client, []) == []
        assert scripted.requests == []
        assert ask(client, iter(["hypercache://u"])) in ([Outcome.ABSENT], [None], [False])
