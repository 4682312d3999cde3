"""The relay between clients and a daemon: nothing is lost, and either side's end is the other's."""

from collections.abc import Iterator

import pytest

from hypercache_compat.daemon_process import DaemonProcess, running_daemon
from hypercache_compat.raw_wire import RawConnection
from hypercache_compat.relay import FROM_CLIENT, FROM_DAEMON, Relay, relaying


class Noted:
    """What passed, by side."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sides = {FROM_CLIENT: b"", FROM_DAEMON: b""}

    def passed(self, side: str, data: bytes) -> bytes:
        self.sides[side] += data
        return data


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


class Broken:
    """Raises where the daemon speaks."""

    def __init__(self, number: int) -> None:
        self.number = number

    def passed(self, side: str, data: bytes) -> bytes:
        if side == FROM_DAEMON:
            raise ValueError("this cannot be passed on")
        return data


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_cannot_be_passed_on_ends_its_connection(daemon: DaemonProcess) -> None:
    path = str(daemon.folder / "broken")
    with relaying(path, daemon.socket_path, Broken):
        for _ in range(2):
            with RawConnection(path) as connection:
                connection.send(b'{"action":"ping"}\n')
                assert connection.receive_line() == b""
