"""The relay between clients and a daemon: nothing is lost, and either side's end is the other's."""

import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hypercache_compat.daemon_process import DaemonProcess, running_daemon
from hypercache_compat.raw_wire import RawConnection
from hypercache_compat.relay import FROM_CLIENT, FROM_DAEMON, HangUp, Passage, Relay, relaying


class Noted:
    """What passed, by side."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sides = {FROM_CLIENT: b"", FROM_DAEMON: b""}

    def passed(self, side: str, data: bytes) -> bytes:
        self.sides[side] += data
        return data


class Halved:
    """Hangs up after the first half of what the daemon says."""

    def passed(self, side: str, data: bytes) -> bytes:
        if side == FROM_CLIENT:
            return data
        raise HangUp("half of it", data[: len(data) // 2])


@pytest.fixture
def noted() -> list[Noted]:
    return []


@pytest.fixture
def relay(daemon: DaemonProcess, noted: list[Noted]) -> Iterator[Relay]:
    def passage(number: int) -> Noted:
        noted.append(Noted(number))
        return noted[-1]

    with relaying(str(daemon.folder / "r"), daemon.socket_path, passage) as relay:
        yield relay


def test_every_byte_passes_both_ways_and_is_noted(relay: Relay, noted: list[Noted]) -> None:
    asked = b'{"action":"ping"}\n{"action":"no such"}\n' * 3000
    with RawConnection(relay.path) as connection, RawConnection(relay.path) as other:
        connection.send(asked)
        lines = [connection.receive_line() for _ in range(6000)]
        assert other.ask("ping")["status"] == "PONG"
    assert [one.number for one in noted] == [0, 1]
    assert noted[0].sides[FROM_CLIENT] == asked
    assert noted[0].sides[FROM_DAEMON] == b"".join(line + b"\n" for line in lines)


def test_a_client_that_sends_no_more_still_gets_its_answers(relay: Relay) -> None:
    with RawConnection(relay.path) as connection:
        connection.send(b'{"action":"ping"}\n' * 2)
        connection.end()
        assert [connection.receive()["status"] for _ in range(2)] == ["PONG", "PONG"]
        assert connection.receive_line() == b""


def test_a_passage_that_hangs_up_can_have_some_bytes_passed_on_before(daemon: DaemonProcess) -> None:
    path = str(daemon.folder / "halved")
    with relaying(path, daemon.socket_path, lambda _: Halved()), RawConnection(path) as connection:
        connection.send(b'{"action":"ping"}\n')
        with connection._socket.makefile("rb") as reader:
            half = reader.read()
    assert half.startswith(b'{"status"')
    assert not half.endswith(b"}\n")


def test_a_daemon_that_ends_ends_its_clients(noted: list[Noted]) -> None:
    with running_daemon() as daemon:
        path = str(daemon.folder / "r")
        with relaying(path, daemon.socket_path, Noted), RawConnection(path) as connection:
            assert connection.ask("ping")["status"] == "PONG"
            daemon.kill()
            assert connection.receive_line() == b""
            with RawConnection(path) as late:
                assert late.receive_line() == b""


def test_closing_ends_every_connection_and_leaves_nothing(daemon: DaemonProcess) -> None:
    path = daemon.folder / "closing"
    relay = Relay(str(path), daemon.socket_path, Noted)
    with RawConnection(relay.path) as connection:
        assert connection.ask("ping")["status"] == "PONG"
        relay.close()
        assert connection.receive_line() == b""
    assert not path.exists()


# -- passages that fail --------------------------------------------------------------------------------


class Broken:
    """Raises where `side` speaks."""

    def __init__(self, side: str) -> None:
        self._side = side

    def passed(self, side: str, data: bytes) -> bytes:
        if side == self._side:
            raise ValueError(f"what the {side} says cannot be passed on")
        return data


def never(number: int) -> Passage:
    raise ValueError(f"nothing watches over connection {number}")


BROKEN: dict[str, Callable[[int], Passage]] = {
    "what the client says": lambda _: Broken(FROM_CLIENT),
    "what the daemon says": lambda _: Broken(FROM_DAEMON),
    "nothing watches over connection 0": never,
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("fault", BROKEN)
def test_what_a_passage_raises_ends_its_connection_at_once_and_is_raised_at_the_end(
    daemon: DaemonProcess, fault: str
) -> None:
    relay = Relay(str(daemon.folder / "broken"), daemon.socket_path, BROKEN[fault])
    for _ in range(2):
        with RawConnection(relay.path) as connection, suppress(BrokenPipeError):
            connection.send(b'{"action":"ping"}\n')
            assert connection.receive_line() == b""
    with pytest.raises(ValueError, match=fault):
        relay.close()


@pytest.mark.timeout(30)
def test_a_client_whose_words_cannot_be_passed_on_does_not_wait_for_a_daemon_that_says_nothing(
    mute: socket.socket, short_folder: Path
) -> None:
    relay = Relay(str(short_folder / "r"), mute.getsockname(), lambda _: Broken(FROM_CLIENT))
    with RawConnection(relay.path, timeout_s=10.0) as connection:
        connection.send(b"x")
        assert connection.receive_line() == b""
    with pytest.raises(ValueError, match="what the client"):
        relay.close()


@pytest.mark.timeout(30)
def test_closing_does_not_wait_for_a_daemon_that_accepts_nobody(
    mute: socket.socket, short_folder: Path
) -> None:
    path = str(short_folder / "r")
    with RawConnection(mute.getsockname()), relaying(path, mute.getsockname(), Noted) as relay:
        # The backlog has two places: one is taken above, and one by the first of these.
        first, second = RawConnection(path), RawConnection(path)
        first.send(b"x")
    with first, second:
        assert [each.receive_line() for each in (first, second)] == [b"", b""]
    assert not Path(relay.path).exists()


@pytest.mark.timeout(30)
def test_a_listener_that_fails_refuses_clients_and_is_told(daemon: DaemonProcess) -> None:
    path = str(daemon.folder / "failing")
    relay = Relay(path, daemon.socket_path, Noted)
    with RawConnection(path) as connection:
        assert connection.ask("ping")["status"] == "PONG"
        relay._listener.shutdown(socket.SHUT_RDWR)  # as if the system had taken it away
        relay._accepting.join(10.0)
        assert not relay._accepting.is_alive()
        with pytest.raises(ConnectionRefusedError):
            RawConnection(path)
        assert connection.ask("ping")["status"] == "PONG", "what is connected goes on"
    with pytest.raises(OSError, match="Invalid argument"):
        relay.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hc", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def mute(short_folder: Path) -> Iterator[socket.socket]:
    """What listens, with two places in its backlog, and never accepts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(short_folder / "mute"))
        listener.listen(1)
        yield listener
