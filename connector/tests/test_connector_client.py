"""The client: one deadline, no late reply for the wrong caller, nothing sent twice that may have arrived."""

import copy
import gc
import pickle
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asking import MakeClient, failure, hit, locates

from hypercache_compat.waiting import wait_until
from hypercache_connector import Client, ConfigError, DaemonUnavailable, dialing
from hypercache_connector.connection import WINDOW_BYTES, Connection, DeadBeforeSending
from hypercache_connector.outcomes import Outcome
from hypercache_protocol import ErrorCode
from hypercache_protocol.batches import LocateMany
from hypercache_protocol.messages import (
    CommitWrite,
    ErrorReply,
    Evict,
    HitReply,
    Locate,
    MissReply,
    Ping,
    PongReply,
    Reply,
    Request,
    StageWrite,
)

DEADLINE_S = 30.0


@pytest.fixture
def make(scripted, client_to: MakeClient) -> MakeClient:
    """Makes clients of the scripted daemon that are closed at the end."""
    return partial(client_to, scripted.socket_path)


# -- exchanges -----------------------------------------------------------------------------------------------


def test_requests_that_can_be_had_only_once_are_sent_again_all_the_same(
    scripted, make: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make()
    client.exchange(locates(1))
    scripted.stop()
    scripted.start()
    monkeypatch.setattr(Connection, "is_out_of_step", lambda self: False)  # it dies a moment later
    assert client.exchange(iter(locates(3))) == [MissReply()] * 3
    assert client.lookup(iter(["u1", "u2"])) == [Outcome.ABSENT] * 2


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"timeout_s": 0}, "Client: 'timeout_s' is wrong: Input should be greater than 0"),
        ({"timeout_s": float("nan")}, "'timeout_s' is wrong"),
        ({"timeout_s": float("inf")}, "'timeout_s' is wrong"),
        ({"timeout_s": "5"}, "'timeout_s' is wrong"),
        ({"probe_interval_s": -1}, "Client: 'probe_interval_s' is wrong"),
        ({"socket_path": 5}, "Client: 'socket_path' is wrong"),
        ({"socket_path": "/dev/null"}, "not a socket; give the daemon's --socket path"),
        ({"socket_path": "/tmp/\ud800"}, "Client: 'socket_path' is wrong"),
        ({"version": "1.1"}, "Client: 'version' is wrong: must be hypercache_protocol's for one of 1.0, 1.1"),
        ({"version": (1, 1)}, "Client: 'version' is wrong"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_told_at_once_in_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        Client(**{"socket_path": "/nowhere/s"} | wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda client: client.exchange([Ping(), 1]), "such as Ping(), of hypercache_protocol, not 1"),
        (lambda client: client.exchange([Ping]), "give a request such as Ping()"),
        (lambda client: client.exchange([PongReply()]), "not PongReply("),
        (lambda client: client.exchange(Ping()), "requests is a sequence of requests, not one request"),
        (
            lambda client: client.ask(Ping()),
            "LocateMany(), of hypercache_protocol.batches, not Ping()",
        ),
        (lambda client: client.ask([LocateMany(suffixes=("u",))]), "not [LocateMany("),
        (lambda client: client.ask(LocateMany(suffixes=("u",), layouts=False)), "must be on; `lookup` is"),
        (lambda client: client.lookup(["u"], needs="abc"), "needs is a set of features, not 'abc'"),
        (lambda client: client.exchange([Ping()], needs=["a"]), "needs is a set of features, not ['a']"),
        (lambda client: client.borrow(needs=None), "needs is a set of features, not None"),
    ],
)
def test_what_cannot_be_asked_is_told_in_one_sentence_and_nothing_is_sent(
    scripted, make: MakeClient, ask: Callable[[Any], object], sentence: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)) as caught:
        ask(make())
    assert "\n" not in str(caught.value)
    assert scripted.connections_accepted == 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_client_is_not_copied_but_made_anew(make: MakeClient, copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"a Client has connections .* make one in each process"):
        copied(make())


def test_a_path_is_a_path_to_the_socket_too(scripted) -> None:
    with Client(Path(scripted.socket_path)) as client:
        assert client.ping().features


def test_a_connection_that_is_lost_to_ctrl_c_between_two_steps_does_not_stay_open(
    scripted, make: MakeClient, monkeypatch: pytest.MonkeyPatch, open_descriptors: Callable[[], int]
) -> None:
    client = make()
    client.exchange(locates(1))
    before = open_descriptors()

    def interrupted(self: Connection) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # that the socket is closed by what is tested
        patch.setattr(Connection, "is_out_of_step", interrupted)
        with suppress(KeyboardInterrupt):
            client.exchange(locates(1))
        gc.collect()
    assert open_descriptors() < before
    assert client.exchange(locates(1)) == [MissReply()]


def test_replies_come_in_the_order_of_the_requests(scripted, make: MakeClient) -> None:
    scripted.objects = {f"u{number}": hit(number) for number in range(0, 300, 2)}
    replies = make().exchange(locates(300))
    assert [reply.object_size if isinstance(reply, HitReply) else None for reply in replies] == [
        None if number % 2 else number for number in range(300)
    ]


def test_an_exchange_of_nothing_asks_nobody(scripted, make: MakeClient) -> None:
    assert make().exchange([]) == []
    assert scripted.requests == []


def test_64_requests_are_all_sent_before_the_first_reply_is_waited_for(scripted, make: MakeClient) -> None:
    scripted.hold = 64
    assert len(make().exchange(locates(64))) == 64
    assert scripted.connections_accepted == 1


def test_more_than_64_requests_go_in_windows(scripted, make: MakeClient) -> None:
    scripted.hold = 65
    assert failure(make(timeout_s=0.5), locates(65)) is Outcome.DAEMON_LATE


def test_long_requests_make_windows_smaller(scripted, make: MakeClient) -> None:
    per_request = 4000
    in_a_window = WINDOW_BYTES // per_request
    seen_before_first_reply: list[int] = []

    def note(request: Request, reply: Reply) -> Reply:
        if isinstance(request, Locate) and not seen_before_first_reply:
            wait_until(lambda: len(scripted.requests) > in_a_window)
            seen_before_first_reply.append(len(scripted.requests) - 1)
        return reply

    scripted.change = note
    assert len(make().exchange(locates(64, "x" * per_request))) == 64
    assert seen_before_first_reply[0] <= in_a_window + 1


def test_full_socket_buffers_on_both_sides_do_not_hold_each_other_up(scripted, make: MakeClient) -> None:
    client = make()
    client.exchange([Ping()])
    # One window: while the daemon can't go on writing its first reply, most of the second request is unsent.
    scripted.change = lambda request, reply: (
        PongReply(daemon="z" * 2_000_000) if isinstance(request, Ping) else reply
    )
    large = CommitWrite(uri="u", chunk_checksums=(4_000_000_000,) * 80_000)
    first, second = client.exchange([Ping(), large])
    assert isinstance(first, PongReply)
    assert second.status == "ERROR"  # nothing was staged


def test_many_threads_get_their_own_replies(scripted, make: MakeClient) -> None:
    scripted.objects = {
        f"{thread}-{number}": hit(thread * 100 + number) for thread in range(8) for number in range(50)
    }
    client = make()
    wrong: list[object] = []

    def work(thread: int) -> None:
        for number in range(50):
            (reply,) = client.exchange([Locate(uri=f"{thread}-{number}")])
            if reply != hit(thread * 100 + number):
                wrong.append(reply)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert wrong == []
    assert scripted.connections_accepted <= 8


def test_a_connection_is_kept_for_the_next_exchange(scripted, make: MakeClient) -> None:
    client = make()
    for _ in range(5):
        client.exchange(locates(1))
    assert scripted.connections_accepted == 1
    assert scripted.counted()["ping"] == 1


# -- what the daemon is --------------------------------------------------------------------------------------


def test_features_and_instance_are_known_after_the_first_exchange(scripted, make: MakeClient) -> None:
    client = make()
    assert (client.instance_id, client.features) == (None, frozenset())
    client.exchange(locates(1))
    assert client.instance_id == "instance-1"
    assert {"local_only", "chunk_checksums"} <= client.features


def test_a_missing_feature_sends_nothing_and_keeps_the_connection(scripted, make: MakeClient) -> None:
    scripted.features = ("sync_status",)
    client = make()
    for _ in range(3):
        with pytest.raises(DaemonUnavailable, match="lacks chunk_checksums; upgrade it") as caught:
            client.exchange([Evict(uri="u")], needs=frozenset({"chunk_checksums", "sync_status"}))
        assert caught.value.outcome is Outcome.DAEMON_TOO_OLD
    assert scripted.counted() == {"ping": 1}
    assert scripted.connections_accepted == 1


def test_a_new_instance_is_announced_before_its_first_reply(scripted, make: MakeClient) -> None:
    order: list[str] = []
    client = make(on_new_instance=lambda: order.append("announced"))
    client.exchange(locates(1))
    scripted.stop()
    scripted.start()
    client.exchange(locates(1))
    order.append("replied")
    assert order == ["announced", "announced", "replied"]
    assert client.instance_id == "instance-2"


def test_nobody_hears_of_a_new_instance_before_it_was_announced(scripted, make: MakeClient) -> None:
    heard, announcing = threading.Event(), threading.Event()
    early: list[bool] = []

    def announce() -> None:
        if client.instance_id == "instance-2":
            announcing.set()
            early.append(heard.wait(0.2))

    def ask() -> None:
        client.exchange(locates(1))
        heard.set()

    client = make(on_new_instance=announce)
    client.exchange(locates(1))
    scripted.stop()
    scripted.start()
    asking = [threading.Thread(target=ask), threading.Thread(target=ask)]
    asking[0].start()
    assert announcing.wait(DEADLINE_S)
    asking[1].start()
    for thread in asking:
        thread.join(DEADLINE_S)
    assert early == [False]


def test_an_instance_whose_announcement_failed_is_announced_again(scripted, make: MakeClient) -> None:
    order: list[str] = []

    def announce() -> None:
        order.append("announced")
        if order == ["announced"]:
            raise LookupError("nothing was dropped")

    client = make(on_new_instance=announce)
    with pytest.raises(LookupError):
        client.exchange(locates(1))
    client.exchange(locates(1))
    order.append("replied")
    assert order == ["announced", "announced", "replied"]


def test_whoever_announces_a_new_instance_may_ask_it(scripted, make: MakeClient) -> None:
    answers: list[Reply] = []
    client = make(on_new_instance=lambda: answers.extend(client.exchange([Ping()])))
    client.exchange(locates(1))
    assert isinstance(answers[0], PongReply)
    assert len(answers) == 1


def test_a_kept_connection_to_another_daemon_than_the_one_that_answered_last_is_not_used(
    scripted, make: MakeClient
) -> None:
    client = make(timeout_s=0.3, probe_interval_s=0.02)
    lent = [client.borrow(), client.borrow()]
    for connection in lent:
        client.give_back(connection)
    scripted.freeze()
    assert failure(client, locates(1)) is Outcome.DAEMON_LATE
    scripted.instance_id = "another"  # to which the probe comes
    scripted.thaw()
    wait_until(lambda: not client.breaker_open)
    lent = [client.borrow(), client.borrow()]
    for connection in lent:
        client.discard(connection)
    assert [connection.instance_id for connection in lent] == ["another"] * 2


def test_an_upgrade_under_way_is_noticed_at_the_next_connection(scripted, make: MakeClient) -> None:
    scripted.features = None
    client = make()
    needs = frozenset({"local_only"})
    with pytest.raises(DaemonUnavailable):
        client.exchange(locates(1), needs=needs)
    scripted.stop()
    scripted.features = ("local_only",)
    scripted.start()
    assert client.exchange(locates(1), needs=needs) == [MissReply()]


# -- no daemon, a dead one, a restarted one ------------------------------------------------------------------


def test_nobody_there_fails_at_once_and_recovers_by_itself(scripted, make: MakeClient) -> None:
    scripted.stop()
    client = make()
    began = time.monotonic()
    assert failure(client, locates(1)) is Outcome.DAEMON_GONE
    Path(scripted.socket_path).unlink()
    assert failure(client, locates(1)) is Outcome.DAEMON_GONE
    assert time.monotonic() - began < 5
    assert not client.breaker_open
    scripted.start()
    assert client.exchange(locates(1)) == [MissReply()]


def test_after_a_restart_kept_connections_cost_no_failure(scripted, make: MakeClient) -> None:
    client = make()
    for _ in range(5):
        assert client.exchange(locates(3)) == [MissReply()] * 3
        scripted.stop()
        scripted.start()
    assert scripted.counted()["locate"] == 15


def test_a_connection_found_dead_by_the_write_is_replaced_and_the_request_sent_once(
    scripted, make: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make()
    client.exchange(locates(1))
    scripted.stop()
    scripted.start()
    # As if it died between the look at it and the write.
    monkeypatch.setattr(Connection, "is_out_of_step", lambda self: False)
    assert client.exchange([StageWrite(uri="u", size_bytes=1)])[0].status == "WRITESTAGED"
    assert scripted.counted()["stage_write"] == 1
    assert scripted.connections_accepted == 2


def test_it_is_tried_again_once_and_not_twice(make: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []
    real_send = Connection._send

    def dead(self: Connection, data: memoryview, *, untouched: bool) -> int:
        if b'"ping"' in bytes(data) or b'"hello"' in bytes(data):
            return real_send(self, data, untouched=untouched)
        attempts.append(len(data))
        raise DeadBeforeSending

    client = make()
    monkeypatch.setattr(Connection, "_send", dead)
    assert failure(client, locates(1)) is Outcome.DAEMON_GONE
    assert len(attempts) == 2


def test_a_request_that_may_have_arrived_is_never_sent_again(scripted, make: MakeClient) -> None:
    def close_instead(request: Request, data: bytes) -> bytes | None:
        return data if isinstance(request, Ping) else None

    client = make()
    client.exchange([Ping()])
    scripted.garble = close_instead
    assert failure(client, [StageWrite(uri="u", size_bytes=1)]) is Outcome.DAEMON_GONE
    assert scripted.counted()["stage_write"] == 1


def test_a_write_that_was_partly_taken_is_never_repeated(
    scripted, make: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make()
    client.exchange([Ping()])
    sent: list[bool] = []
    real_send = Connection._send

    def half(self: Connection, data: memoryview, *, untouched: bool) -> int:
        sent.append(untouched)
        if len(sent) == 1:
            return real_send(self, data[:10], untouched=untouched)
        scripted.drop_connections()
        wait_until(self.is_out_of_step)
        return real_send(self, data, untouched=untouched)

    monkeypatch.setattr(Connection, "_send", half)
    assert failure(client, [Evict(uri="u" * 100)]) is Outcome.DAEMON_GONE
    assert sent == [True, False]
    assert scripted.counted()["evict"] == 0


def test_a_connection_that_dies_between_two_windows_has_nothing_of_the_first_sent_again(
    scripted, make: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make()
    client.exchange([Ping()])
    windows: list[int] = []
    real_send = Connection._send

    def dying(self: Connection, data: memoryview, *, untouched: bool) -> int:
        windows.append(len(data))
        if len(windows) == 2:
            scripted.drop_connections()
            wait_until(self.is_out_of_step)
        return real_send(self, data, untouched=untouched)

    monkeypatch.setattr(Connection, "_send", dying)
    assert failure(client, [Evict(uri=f"u{number}") for number in range(65)]) is Outcome.DAEMON_GONE
    assert len(windows) == 2
    assert scripted.counted()["evict"] == 64


# -- replies that cannot be trusted --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "outcome"),
    [
        (lambda data: b"\xff\xfe garbage\n", Outcome.DAEMON_GARBLED),
        (lambda data: b"[]\n", Outcome.DAEMON_GARBLED),
        (lambda data: b'{"status":"HIT","object_size":-1}\n', Outcome.DAEMON_GARBLED),
        (lambda data: data + data, Outcome.DAEMON_GARBLED),
        (lambda data: data + b'{"sta', Outcome.DAEMON_GARBLED),
        (lambda data: data[: len(data) // 2], Outcome.DAEMON_LATE),
        (lambda data: b"", Outcome.DAEMON_LATE),
        (lambda data: None, Outcome.DAEMON_GONE),
    ],
    ids=["garbage", "no object", "bad field", "twice", "more to come", "half", "nothing", "closed"],
)
def test_one_bad_reply_spoils_its_whole_exchange_and_nothing_else(
    scripted, make: MakeClient, spoil: Callable[[bytes], bytes | None], outcome: Outcome
) -> None:
    def spoil_the_last(request: Request, data: bytes) -> bytes | None:
        return spoil(data) if request == Locate(uri="u2", auto_ingest=False) else data

    client = make(timeout_s=1.0, probe_interval_s=0.01)
    scripted.objects = {"u0": hit(5)}
    scripted.garble = spoil_the_last
    assert failure(client, locates(3)) is outcome
    wait_until(lambda: not client.breaker_open)
    assert client.exchange(locates(2)) == [hit(5), MissReply()]


def test_an_unknown_status_is_that_request_s_error_alone(scripted, make: MakeClient) -> None:
    scripted.garble = lambda request, data: (
        b'{"status":"TELEPORTED"}\n' if request == Locate(uri="u1", auto_ingest=False) else data
    )
    replies = make().exchange(locates(3))
    assert [reply.status for reply in replies] == ["MISS", "ERROR", "MISS"]


def test_a_late_reply_never_reaches_the_next_caller(scripted, make: MakeClient) -> None:
    client = make(timeout_s=0.3, probe_interval_s=0.01)
    client.exchange([Ping()])
    scripted.objects = {"old": hit(1), "new": hit(2)}
    scripted.freeze()
    assert failure(client, [Locate(uri="old")]) is Outcome.DAEMON_LATE
    scripted.thaw()
    wait_until(lambda: not client.breaker_open)
    assert client.exchange([Locate(uri="new")]) == [hit(2)]


def test_a_reply_that_nobody_asked_for_is_not_taken_for_the_next_one(scripted, make: MakeClient) -> None:
    client = make()
    client.exchange([Ping()])
    with scripted._lock:
        (connected,) = scripted._sockets
    connected.sendall(b'{"status":"HIT","object_size":1,"chunk_layout":[],"sync_status":"LOCAL_ONLY"}\n')
    assert client.exchange([Locate(uri="u")]) == [MissReply()]


def test_bytes_that_trickle_in_do_not_stretch_the_deadline(folder: Path) -> None:
    path = str(folder / "trickle")
    stop = threading.Event()

    def trickle(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        with accepted, suppress(OSError):
            while not stop.wait(0.0002):  # more often than a wait can end between two
                accepted.send(b" ")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=trickle, args=(listener,))
        thread.start()
        client = Client(path, 0.5)
        began = time.monotonic()
        assert failure(client, [Ping()]) is Outcome.DAEMON_LATE
        assert time.monotonic() - began < 5
        client.close()
        stop.set()
        thread.join(DEADLINE_S)


def test_a_peer_that_is_no_daemon_is_told_apart(scripted, make: MakeClient) -> None:
    scripted.garble = lambda request, data: b'{"status":"ERROR","error_message":"what?"}\n'
    assert failure(make(), locates(1)) is Outcome.DAEMON_GARBLED


def test_where_no_daemon_is_the_path_is_told(folder: Path) -> None:
    with Client(str(folder / "s")) as client, pytest.raises(DaemonUnavailable) as caught:
        client.ping()
    assert str(caught.value) == f"cannot connect to {folder / 's'}: No such file or directory"


@pytest.mark.parametrize("code", [ErrorCode.FORBIDDEN, ErrorCode.UNAVAILABLE])
def test_a_daemon_that_lets_nobody_in_is_a_refusal_with_its_sentence(
    scripted, make: MakeClient, code: ErrorCode
) -> None:
    scripted.change = lambda request, reply: ErrorReply(error_message="not you", error_code=code)
    with pytest.raises(DaemonUnavailable, match=r"^the daemon refuses: not you$") as caught:
        make().locate("u")
    assert (caught.value.outcome, caught.value.code) == (Outcome.TURNED_AWAY, code)


# -- the breaker ---------------------------------------------------------------------------------------------


def test_a_frozen_daemon_costs_one_deadline_and_then_nothing_for_a_while(scripted, make: MakeClient) -> None:
    client = make(timeout_s=0.5, probe_interval_s=0.02)
    client.exchange([Ping()])
    scripted.freeze()
    assert failure(client, locates(1)) is Outcome.DAEMON_LATE
    began = time.monotonic()
    assert {failure(client, locates(1)) for _ in range(100)} == {Outcome.BREAKER_OPEN}
    assert time.monotonic() - began < 10  # a hundred deadlines are 50 s
    assert client.breaker_open
    scripted.thaw()
    wait_until(lambda: not client.breaker_open)
    assert client.exchange(locates(1)) == [MissReply()]


def test_an_exchange_has_its_deadline_and_no_more(make: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client, real, told = make(timeout_s=7.0), Connection.exchange, []

    def noted(connection: Connection, requests: list[Request], deadline: float) -> list[Reply]:
        told.append(deadline)
        return real(connection, requests, deadline)

    monkeypatch.setattr(Connection, "exchange", noted)
    before = time.monotonic()
    client.exchange([Ping()])
    assert before <= told[0] - 7.0 <= time.monotonic()


def test_a_daemon_that_does_not_accept_is_frozen_too(folder: Path) -> None:
    path = str(folder / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        fillers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(path)
        client = Client(path, 0.3)
        assert failure(client, [Ping()]) is Outcome.DAEMON_LATE
        client.close()
        for filler in fillers:
            filler.close()


def test_a_daemon_that_does_not_accept_yet_is_tried_again_ever_less_often(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float | None] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            return False

    monkeypatch.setattr(dialing, "_accepted", lambda *_: len(waited) == 7)
    dialing.connected(str(folder / "s"), time.monotonic() + DEADLINE_S, Stop()).close()
    assert waited == [0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.1]


def test_a_probe_that_goes_wrong_does_not_leave_the_breaker_open_for_ever(scripted, make: MakeClient) -> None:
    trouble = iter([RuntimeError("first"), RuntimeError("second")])
    announced: list[None] = []

    def announce() -> None:
        announced.append(None)
        if len(announced) > 1 and (error := next(trouble, None)):
            raise error

    client = make(timeout_s=0.3, probe_interval_s=0.02, on_new_instance=announce)
    client.exchange([Ping()])
    scripted.freeze()
    assert failure(client, locates(1)) is Outcome.DAEMON_LATE
    scripted.stop()
    scripted.thaw()
    scripted.start()
    wait_until(lambda: not client.breaker_open)
    assert client.exchange(locates(1)) == [MissReply()]


# -- close, descriptors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stuck_in", ["exchange", "greeting"])
def test_close_ends_what_is_running_at_once_and_for_good(scripted, make: MakeClient, stuck_in: str) -> None:
    client = make(timeout_s=60.0)
    if stuck_in == "exchange":
        client.exchange([Ping()])
    scripted.freeze()
    caught: list[Outcome] = []
    thread = threading.Thread(target=lambda: caught.append(failure(client, locates(1))))
    before = len(scripted.requests)
    thread.start()
    wait_until(lambda: len(scripted.requests) > before)
    began = time.monotonic()
    client.close()
    client.close()
    thread.join(DEADLINE_S)
    assert caught == [Outcome.CLOSED]
    assert time.monotonic() - began < 5
    assert failure(client, locates(1)) is Outcome.CLOSED


def test_close_ends_the_probe(scripted, make: MakeClient) -> None:
    client = make(timeout_s=0.2, probe_interval_s=0.01)
    scripted.freeze()
    assert failure(client, locates(1)) is Outcome.DAEMON_LATE
    client.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hypercache-probe"]


def test_no_descriptor_is_left(scripted, open_descriptors: Callable[[], int]) -> None:
    # The daemon runs in this process too, so its ends of the connections are waited for.
    before = open_descriptors()
    with Client(scripted.socket_path, 10.0) as client:
        for _ in range(3):
            client.exchange(locates(1))
            scripted.drop_connections()
        scripted.garble = lambda request, data: None
        for _ in range(3):
            failure(client, locates(1))
    wait_until(lambda: open_descriptors() <= before)  # those of an earlier test may close meanwhile
