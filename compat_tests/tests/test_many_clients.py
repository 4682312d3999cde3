"""Many clients at once, and clients that die: nobody notices anybody else."""

from __future__ import annotations

import os
import signal

from hypercache_compat.daemon_process import DaemonProcess
from hypercache_compat.old_clients import old_client
from hypercache_compat.payloads import MIB, payload
from hypercache_compat.raw_wire import RawConnection, fetch, store
from hypercache_compat.scenario_process import ScenarioProcess, running


def test_a_client_killed_while_writing_leaves_the_others_and_their_uris_alone(
    old_clients: dict[str, ScenarioProcess], daemon: DaemonProcess, uri: str
) -> None:
    old, data = old_clients["0.9.0"], payload(uri, 3 * MIB)
    with daemon.connect() as connection:
        store(connection, uri, data)
        with running(old_client("0.9.0b1")) as doomed:
            doomed.call(
                "file_system.write_and_never_close",
                socket_path=daemon.socket_path,
                uri=uri,
                size_bytes=9 * MIB,
            )
            os.kill(doomed.pid, signal.SIGKILL)
        assert fetch(connection, uri) == data
    arguments = {"socket_path": daemon.socket_path, "uri": uri, "size_bytes": 7 * MIB}
    old.call("file_system.write_in_pieces", **arguments, write_bytes=MIB)
    assert old.call("file_system.read_whole", **arguments) is True


def test_a_client_that_goes_away_with_replies_unread_disturbs_nobody(
    daemon: DaemonProcess, raw: RawConnection, uri: str
) -> None:
    store(raw, uri, payload(uri, 64 * MIB))
    for _ in range(20):
        with daemon.connect() as rude:
            rude.send(b'{"action":"locate","uri":"%s"}\n' % uri.encode() * 500)
    assert fetch(raw, uri) == payload(uri, 64 * MIB)


def test_a_client_that_reads_nothing_does_not_hold_up_the_others(
    daemon: DaemonProcess, raw: RawConnection, uri: str
) -> None:
    store(raw, uri, payload(uri, 64 * MIB))
    line = b'{"action":"locate","uri":"%s"}\n' % uri.encode()
    before = daemon.peak_memory_bytes()
    with daemon.connect(timeout_s=0.5) as deaf:
        try:
            for _ in range(100_000):
                deaf.send(line)
        except TimeoutError:
            pass  # the daemon reads no more from one who does not read: that is what bounds its memory
        else:
            raise AssertionError("the daemon took 100,000 requests from a client that reads no reply")
        assert raw.ask("ping")["status"] == "PONG"
        assert fetch(raw, uri) == payload(uri, 64 * MIB)
    assert daemon.peak_memory_bytes() - before < 32 * MIB


def test_two_hundred_connections_are_served_at_once(daemon: DaemonProcess) -> None:
    connections = [daemon.connect() for _ in range(200)]
    try:
        for number, connection in enumerate(connections):
            connection.send(b'{"action":"locate","uri":"absent-%d"}\n' % number)
        assert [connection.receive()["status"] for connection in connections] == ["MISS"] * 200
    finally:
        for connection in connections:
            connection.close()
