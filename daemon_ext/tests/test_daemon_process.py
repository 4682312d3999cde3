"""The daemon as a process: its exit, its memory, its descriptors, and what it refuses to start on."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sqlite3
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from daemon_harness import MIB, pattern
from forked_daemons import DEADLINE_S, BlockingClient, ForkedDaemon, Forks, Message, small_pool

from hypercache_compat.daemon_process import run_refused
from hypercache_compat.process_figures import open_descriptors, peak_bytes
from hypercache_compat.raw_wire import read_layout, write_layout
from hypercache_compat.waiting import wait_until
from hypercache_daemon.catalog_rows import AddHold, hold_row
from hypercache_daemon.core.extents import Extent, packed
from hypercache_protocol.fields import Tier

URI = "hypercache://a/b"


def store(client: BlockingClient, uri: str, data: bytes, **fields: object) -> Message:
    staged = client.ask("stage_write", uri=uri, size_bytes=len(data), **fields)
    assert staged["status"] == "WRITESTAGED", staged
    write_layout(staged["chunk_layout"], data)
    return client.ask("commit_write", uri=uri)


def fetch(client: BlockingClient, uri: str) -> bytes | None:
    found = client.ask("locate", uri=uri)
    return read_layout(found["chunk_layout"]) if found["status"] == "HIT" else None


# -- starting and stopping -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_in_order(forks: Forks, short_dir: Path, number: signal.Signals) -> None:
    daemon = forks.start(short_dir, small_pool(short_dir))
    with daemon.connect() as client:
        store(client, URI, b"bytes")
        os.kill(daemon.pid, number)
        assert daemon.wait() == 0
    assert not (short_dir / "s").exists()
    files = {path.name for path in (short_dir / "pool").iterdir()}
    assert "catalog.sqlite" in files
    assert not files & {"catalog.sqlite-wal", "catalog.sqlite-shm"}, "the catalog was closed"
    assert "Traceback" not in daemon.log()
    with forks.start(short_dir, small_pool(short_dir)).connect() as client:
        assert fetch(client, URI) == b"bytes"


def test_a_hangup_makes_it_look_at_the_devices_and_the_drain_file_again(
    forks: Forks, short_dir: Path
) -> None:
    daemon = forks.start(short_dir, small_pool(short_dir))
    with daemon.connect() as client:
        store(client, URI, b"bytes")
        first = client.ask("get_status")["device_health"][0]["path"]
        for text, uses in ((first, ("DRAINING", "DRAINED")), ("", ("IN_USE",))):
            (short_dir / "pool" / "drain").write_text(text)
            os.kill(daemon.pid, signal.SIGHUP)
            wait_until(lambda uses=uses: client.ask("get_status")["device_health"][0]["use"] in uses)
        assert fetch(client, URI) == b"bytes"
        os.kill(daemon.pid, signal.SIGTERM)
        assert daemon.wait() == 0
    assert "Traceback" not in daemon.log()


def test_a_signal_while_it_starts_is_not_lost(forks: Forks, short_dir: Path) -> None:
    daemon = forks.start(short_dir, small_pool(short_dir))
    deadline = time.monotonic() + DEADLINE_S
    while not (short_dir / "s").exists():
        assert time.monotonic() < deadline
    os.kill(daemon.pid, signal.SIGTERM)
    assert daemon.wait() == 0
    assert not (short_dir / "s").exists()


def test_a_second_daemon_on_the_same_socket_is_refused_and_the_first_goes_on(
    forks: Forks, short_dir: Path
) -> None:
    daemon = forks.start(short_dir, small_pool(short_dir))
    with daemon.connect() as client:
        store(client, URI, b"bytes")
        done = refused("--socket", str(short_dir / "s"), *small_pool(short_dir, "--format"))
        assert "already answers" in done
        assert fetch(client, URI) == b"bytes"
        assert client.ask("ping")["status"] == "PONG"


def test_a_second_daemon_on_the_same_pool_is_refused_and_takes_only_its_own_socket_away(
    forks: Forks, short_dir: Path
) -> None:
    daemon = forks.start(short_dir, small_pool(short_dir))
    with daemon.connect() as client:
        store(client, URI, b"bytes")
        other = short_dir / "other"
        assert str(short_dir / "pool") in refused("--socket", str(other), *small_pool(short_dir, "--format"))
        assert not other.exists()
        assert fetch(client, URI) == b"bytes"


def refused(*words: str) -> str:
    """What a daemon says that ends by itself: one sentence, and no trace."""
    done = run_refused(*words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("hypercached: ")
    assert "Traceback" not in done.stderr
    return done.stderr


# -- what it refuses to start on -----------------------------------------------------------------------


def sentence_of(daemon: ForkedDaemon) -> str:
    assert daemon.wait() == 2, daemon.log()
    log = daemon.log()
    assert "Traceback" not in log
    return log


def test_a_missing_catalog_is_refused_with_the_way_out_and_format_starts_empty(
    forks: Forks, short_dir: Path
) -> None:
    daemon = forks.start(short_dir, small_pool(short_dir))
    with daemon.connect() as client:
        store(client, URI, b"bytes")
    daemon.kill()
    catalog = short_dir / "pool" / "catalog.sqlite"
    image = {path.name: path.read_bytes() for path in catalog.parent.glob("catalog.sqlite*")}
    for name in image:
        (catalog.parent / name).unlink()
    sentence = sentence_of(forks.start(short_dir, small_pool(short_dir)))
    assert str(catalog) in sentence
    assert "--format" in sentence
    assert not (short_dir / "s").exists()
    catalog.write_bytes(image["catalog.sqlite"][:5000])
    assert "malformed" in sentence_of(forks.start(short_dir, small_pool(short_dir)))
    for name, data in image.items():
        (catalog.parent / name).write_bytes(data)
    daemon = forks.start(short_dir, small_pool(short_dir))
    with daemon.connect() as client:
        assert fetch(client, URI) == b"bytes"
    daemon.kill()
    with forks.start(short_dir, small_pool(short_dir, "--format")).connect() as client:
        assert client.ask("locate", uri=URI)["status"] == "MISS"


def test_the_catalog_of_another_pool_is_refused(forks: Forks, short_dir: Path) -> None:
    folders = [short_dir / "1", short_dir / "2"]
    for folder in folders:
        folder.mkdir()
        daemon = forks.start(folder, small_pool(folder))
        with daemon.connect() as client:
            store(client, URI, b"bytes")
            os.kill(daemon.pid, signal.SIGTERM)
            daemon.wait()
    one, two = [folder / "pool" / "catalog.sqlite" for folder in folders]
    one.write_bytes(two.read_bytes())
    sentence = sentence_of(forks.start(folders[0], small_pool(folders[0])))
    assert "another pool" in sentence
    assert one.read_bytes() == two.read_bytes()


def test_a_catalog_that_does_not_fit_the_devices_is_refused(forks: Forks, short_dir: Path) -> None:
    """An old copy of the catalog beside newer devices shows nothing; blocks with two owners do."""
    daemon = forks.start(short_dir, small_pool(short_dir))
    with daemon.connect() as client:
        store(client, URI, b"bytes")
        place = client.ask("locate", uri=URI)["chunk_layout"][0]
        os.kill(daemon.pid, signal.SIGTERM)
        daemon.wait()
    hold = AddHold("x", Tier.NVME, packed([Extent(0, place["offset"], 4096)]), writer=True)
    connection = sqlite3.connect(short_dir / "pool" / "catalog.sqlite")
    connection.execute("INSERT INTO holds VALUES (?, ?, ?, ?, ?, ?)", hold_row(hold))
    connection.commit()
    connection.close()
    sentence = sentence_of(forks.start(short_dir, small_pool(short_dir)))
    assert "does not fit the devices" in sentence
    assert "--format" in sentence


# -- limits --------------------------------------------------------------------------------------------


def test_endless_lines_of_many_clients_cost_no_memory_to_speak_of(forks: Forks, short_dir: Path) -> None:
    daemon = forks.start(short_dir, small_pool(short_dir))
    with daemon.connect() as client, ExitStack() as stack:
        before = peak_bytes(daemon.pid)
        sockets = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(8)]
        for sock in sockets:
            sock.settimeout(DEADLINE_S)
            sock.connect(str(short_dir / "s"))
        for _ in range(200):  # 12.5 MiB each, all of them at once
            for sock in sockets:
                with suppress(BrokenPipeError, ConnectionResetError):
                    sock.sendall(b"x" * 65536)
        for sock in sockets:
            reply = json.loads(sock.makefile("rb").readline())
            assert reply["error_code"] == "TOO_LARGE"
        assert client.ask("ping")["status"] == "PONG"
        assert peak_bytes(daemon.pid) - before < 8 * 4 * MIB


def test_without_descriptors_the_daemon_serves_on_and_lets_others_in_when_there_are_some_again(
    forks: Forks, short_dir: Path
) -> None:
    daemon = forks.start(short_dir, small_pool(short_dir))
    with daemon.connect() as client:
        store(client, "kept", pattern(1, 5000))
        used = open_descriptors(daemon.pid)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used + 3, used + 3))
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(10)]
        for sock in waiting:
            sock.settimeout(DEADLINE_S)
            sock.connect(str(short_dir / "s"))
            sock.sendall(b'{"action": "ping"}\n')
        wait_until(lambda: open_descriptors(daemon.pid) == used + 3)
        # All that needs no further descriptor is served; what needs one is an error and no more.
        assert fetch(client, "kept") == pattern(1, 5000)
        assert store(client, "more", b"bytes")["status"] == "WRITECOMMITTED"
        reply = client.ask("stage_write", uri="ram", size_bytes=5, tier="ram")
        assert reply["error_code"] == "UNAVAILABLE"
        for sock in waiting[:3]:
            assert b"PONG" in sock.recv(4096)
            sock.close()
        for sock in waiting[3:]:
            assert b"PONG" in sock.recv(4096), "they get in as the others leave"
            sock.close()
        assert client.ask("get_status")["pools"]["ram"]["staged_bytes"] == 0
        assert not daemon.ended()


def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_one(forks: Forks, short_dir: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    daemon = forks.start(short_dir, small_pool(short_dir), descriptors=(256, hard))
    daemon.connect().close()
    assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_catalog_that_cannot_be_written_fails_the_requests_and_loses_nothing(
    forks: Forks, short_dir: Path
) -> None:
    daemon = forks.start(short_dir, small_pool(short_dir))
    with daemon.connect() as client:
        store(client, "kept", pattern(1, 5000))
        client.ask("stage_write", uri=URI, size_bytes=5)
        before = client.ask("get_status")
        no_limit = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (4096, no_limit[1]))  # a full disk, to its files
        refusals = [
            client.ask("stage_write", uri="new", size_bytes=5),
            client.ask("stage_write", uri="new", size_bytes=5, tier="ram"),
            client.ask("append_write", uri=URI, size_bytes=5),
            client.ask("commit_write", uri=URI),
            client.ask("pin", uri="kept"),
            client.ask("evict", uri="kept"),
            client.ask("purge"),
        ]
        for reply in refusals:
            assert (reply["status"], reply["error_code"]) == ("ERROR", "UNAVAILABLE"), reply
            assert "catalog.sqlite" in reply["error_message"]
        after = client.ask("get_status")
        for name in ("objects", "objects_by_state", "pools"):
            assert after[name] == before[name], "a refused request changed something"
        assert fetch(client, "kept") == pattern(1, 5000)
        assert list((short_dir / "ram").iterdir()) == []
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, no_limit)
        assert client.ask("commit_write", uri=URI)["status"] == "WRITECOMMITTED"
        assert client.ask("evict", uri="kept")["status"] == "EVICTED"
    daemon.kill()
    with forks.start(short_dir, small_pool(short_dir)).connect() as client:
        assert client.ask("locate", uri="kept")["status"] == "MISS"
        assert client.ask("get_write_status", uri=URI)["sync_status"] == "COMMITTED"
