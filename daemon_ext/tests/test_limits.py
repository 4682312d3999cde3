"""What happens at each limit that is not the wire's: idle connections, descriptors, many clients, objects."""

from __future__ import annotations

import math
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio
from daemon_harness import CHUNK, DEADLINE_S, MIB, Client, config_for, eventually, line, running
from forked_daemons import BlockingClient, Forks
from frames import bits, framed
from gated_backend import GatedBackend

from hypercache_compat.process_figures import cpu_seconds, open_descriptors, resident_bytes
from hypercache_compat.raw_wire import write_layout
from hypercache_daemon import staging
from hypercache_daemon.catalog_rows import Change

PING = b'{"action": "ping"}\n'


# -- idle connections ----------------------------------------------------------------------------------


def test_idle_connections_are_kept_unless_the_operator_says_otherwise(short_dir: Path) -> None:
    assert config_for(short_dir).idle_s == math.inf
    assert config_for(short_dir, idle_timeout_s=5).idle_s == 5


async def test_a_connection_on_which_nothing_is_asked_is_closed_without_a_word_and_others_are_not(
    short_dir: Path,
) -> None:
    async with running(short_dir, idle_timeout_s=1.0) as daemon:
        silent, half, busy = [await daemon.connect() for _ in range(3)]
        await half.send(PING + PING[:9])
        assert (await half.receive())["status"] == "PONG"
        with trio.fail_after(DEADLINE_S):
            while len(daemon.parts.server.connections) > 1:
                assert (await busy.ask("ping"))["status"] == "PONG"
        assert [await client.receive_line() for client in (silent, half)] == [b"", b""]
        assert (await busy.status())["connections"]["idle_closed"] == 2


@pytest.mark.parametrize("is_framed", [False, True], ids=["lines", "frames"])
async def test_who_waits_for_an_answer_is_not_idle(short_dir: Path, is_framed: bool) -> None:
    backend = GatedBackend(short_dir / "backend")
    (backend.folder / "a").write_bytes(b"bytes")
    async with running(short_dir, own_backend=backend, idle_timeout_s=1.0) as daemon:
        client = await framed(daemon) if is_framed else await daemon.connect()
        backend.gate.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_open_after, 2.5, backend)
            assert (await client.ask("locate", uri="hypercache://a"))["status"] == "HIT"
        assert daemon.parts.server.idle_closed == 0


async def _open_after(seconds: float, backend: GatedBackend) -> None:
    await trio.sleep(seconds)  # more than twice the idle time, which must pass for the test to mean anything
    backend.gate.set()


# -- file descriptors ----------------------------------------------------------------------------------


def arguments(folder: Path, *more: str) -> list[str]:
    return [
        *("--pool-dir", str(folder / "pool"), "--pool-size", str(34 * MIB), "--devices", "2"),
        *("--ram-size", "0", *more),
    ]


def queued_client(folder: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(DEADLINE_S)
    sock.connect(str(folder / "s"))
    sock.sendall(PING)
    return sock


def test_without_descriptors_it_tries_now_and_then_says_so_once_and_recovers(
    forks: Forks, short_dir: Path
) -> None:
    daemon = forks.start(short_dir, arguments(short_dir))
    with daemon.connect() as client, ExitStack() as queued:
        used = open_descriptors(daemon.pid)
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used, hard))
        before, begun = cpu_seconds(daemon.pid), time.monotonic()
        waiting = [queued.enter_context(queued_client(short_dir)) for _ in range(5)]
        deadline = time.monotonic() + DEADLINE_S
        while (tries := client.ask("get_status")["connections"]["failed_accepts"]) < 10:
            assert time.monotonic() < deadline
            time.sleep(0.05)  # what is asked here costs the daemon CPU time, too
        passed_s = time.monotonic() - begun
        assert tries <= passed_s / 0.1 + 1, "a tenth of a second from try to try"
        assert cpu_seconds(daemon.pid) - before < passed_s / 2
        assert daemon.log().count("no further client can be let in") == 1
        assert "LimitNOFILE=" in daemon.log()
        assert "Traceback" not in daemon.log()
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used + 5, hard))
        for sock in waiting:
            assert b"PONG" in sock.recv(4096)


def test_no_more_are_let_in_than_there_are_descriptors_for_and_one_too_many_is_told(
    forks: Forks, short_dir: Path
) -> None:
    with ExitStack() as held:
        daemon = forks.start(short_dir, arguments(short_dir), descriptors=(200, 200))
        clients = [held.enter_context(daemon.connect()) for _ in range(200 - 128 - 2)]
        too_many = held.enter_context(queued_client(short_dir)).recv(4096)
        assert b"UNAVAILABLE" in too_many
        assert b"serves 70 connections already" in too_many
        assert clients[-1].ask("get_status")["connections"]["failed_accepts"] == 0
        assert "at most 70 connections are served at once and not 4096" in daemon.log()
        assert "LimitNOFILE=" in daemon.log()


# -- a thousand idle connections -----------------------------------------------------------------------


@pytest.fixture
def room_for_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_thousand_idle_connections_cost_little_and_one_more_client_is_served_promptly(
    forks: Forks, short_dir: Path, room_for_descriptors: None
) -> None:
    daemon = forks.start(short_dir, arguments(short_dir))
    with daemon.connect() as client, ExitStack() as idle:
        before = resident_bytes(daemon.pid)
        for _ in range(1000):
            sock = idle.enter_context(queued_client(short_dir))
            assert b"PONG" in sock.recv(4096)
        each = (resident_bytes(daemon.pid) - before) / 1000
        begun = time.perf_counter()
        with BlockingClient(short_dir / "s") as newcomer:
            assert newcomer.ask("ping")["status"] == "PONG"
            took_s = time.perf_counter() - begun
            assert newcomer.ask("get_status")["connections"]["open"] == 1002
        print(
            f"1000 idle connections: {each / 1024:.1f} KiB each; one more is served in {took_s * 1e3:.1f} ms"
        )
        assert each < 32 * 1024
        assert took_s < 1.0
        assert client.ask("ping")["status"] == "PONG"


# -- a backend that hangs --------------------------------------------------------------------------------


async def test_while_the_backend_hangs_for_some_all_that_needs_none_is_answered(short_dir: Path) -> None:
    backend = GatedBackend(short_dir / "backend")
    for number in range(6):
        (backend.folder / f"{number}").write_bytes(b"there")
    async with running(short_dir, own_backend=backend) as daemon:
        readers = [await daemon.connect() for _ in range(6)]
        writers = [await daemon.connect() for _ in range(6)]
        backend.gate.clear()
        for number, client in enumerate(readers):
            await client.send(line("locate", uri=f"hypercache://{number}"))
        for number, client in enumerate(writers):
            await client.stage(f"hypercache://w{number}", b"bytes")
            await client.send(line("commit_write", uri=f"hypercache://w{number}", write_through=True))
        await eventually(lambda: (len(backend.downloads), backend.under_way) == (4, 4), "4 of each at once")
        other = await daemon.connect()
        for number in range(10):
            assert (await other.ask("ping"))["status"] == "PONG"
            await other.store(f"hypercache://mine/{number}", b"bytes")
            assert await other.fetch(f"hypercache://mine/{number}") == b"bytes"
            assert (await other.ask("evict", uri=f"hypercache://mine/{number}"))["status"] == "EVICTED"
        assert not daemon.parts.handlers.counters["locate.HIT"] - 10, "the readers still wait"
        backend.gate.set()
        words = [(await client.receive())["status"] for client in (*readers, *writers)]
        assert words == ["HIT"] * 6 + ["WRITECOMMITTED"] * 6


async def test_while_the_catalogs_disk_hangs_whoever_needs_nothing_of_it_is_answered(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, writes = threading.Event(), threading.Event()
    async with running(short_dir) as daemon:
        writers = [await daemon.connect() for _ in range(3)]
        other = await daemon.connect()
        await other.store("here", b"bytes")
        await writers[1].stage("staged", b"bytes")
        catalog = daemon.parts.store.catalog
        apply = catalog._apply

        def hangs(changes: Sequence[Change]) -> None:
            writing.set()
            assert writes.wait(DEADLINE_S)
            apply(changes)

        monkeypatch.setattr(catalog, "_apply", hangs)
        await writers[0].send(line("stage_write", uri="new", size_bytes=1))
        await writers[1].send(line("commit_write", uri="staged"))
        await writers[2].send(line("evict", uri="here"))
        await eventually(writing.is_set)
        for _ in range(20):
            assert (await other.ask("ping"))["status"] == "PONG"
            assert await other.fetch("here") == b"bytes", "its removal is not durable yet"
            assert (await other.ask("locate", uri="nowhere"))["status"] == "MISS"
        assert not writes.is_set()
        writes.set()
        words = [(await client.receive())["status"] for client in writers]
        assert words == ["WRITESTAGED", "WRITECOMMITTED", "EVICTED"]


# -- objects -------------------------------------------------------------------------------------------


async def test_at_the_limit_of_objects_the_coldest_leave_for_new_ones(short_dir: Path) -> None:
    async with running(short_dir, max_objects=4) as daemon:
        client = await daemon.connect()
        for number in range(6):
            await client.store(f"{number}", b"bytes", tier=("nvme", "ram")[number % 2])
            assert (await client.status())["objects"] <= 4
        status = await client.status()
        assert (status["objects"], status["max_objects"], status["evicted"]["objects"]) == (4, 4, 2)
        assert await client.fetch("5") == b"bytes"


async def test_where_none_may_leave_the_limit_is_an_error_that_says_so_until_there_is_room(
    short_dir: Path,
) -> None:
    async with running(short_dir, max_objects=3) as daemon:
        client = await daemon.connect()
        await client.store("pinned", b"bytes", pinned=True)
        await client.store("dirty", b"bytes", commit={})
        await client.stage("staged", b"")  # without a block, and yet it takes memory
        code, sentence = await client.refusal("stage_write", uri="more", size_bytes=0)
        assert code == "NO_SPACE"
        assert "keeps 3 objects and staged writes already" in sentence
        assert "--max-objects" in sentence
        assert (await client.ask("evict", uri="staged"))["status"] == "EVICTED"
        await client.store("more", b"bytes")
        assert await client.fetch("pinned") == await client.fetch("dirty") == b"bytes"


async def test_for_what_could_never_fit_no_object_leaves(short_dir: Path) -> None:
    async with running(short_dir, max_objects=2, capacity=("hypercache://narrow=1MiB",)) as daemon:
        client = await daemon.connect()
        for number in range(2):
            await client.store(f"{number}", b"bytes")
        for uri, size_bytes in (("wide", 64 * MIB), ("hypercache://narrow/1", 2 * MIB)):
            code, sentence = await client.refusal("stage_write", uri=uri, size_bytes=size_bytes)
            assert code == "NO_SPACE"
            assert f"no space for {size_bytes} bytes" in sentence, "and not: too many objects"
        assert await client.fetch("0") == await client.fetch("1") == b"bytes"


async def test_a_batch_stages_as_many_as_there_may_be_and_refuses_the_rest(short_dir: Path) -> None:
    async with running(short_dir, max_objects=5) as daemon:
        old, client = await daemon.connect(), await framed(daemon)
        for name in ("cold", "pinned"):
            await old.store(name, b"bytes", pinned=name == "pinned")
        staged = await client.ask("stage_many", suffixes=[f"{number}" for number in range(6)], sizes=[5] * 6)
        assert bits(staged["done"], 6) == [True] * 4 + [False] * 2
        assert {error["error_code"] for error in staged["errors"]} == {"NO_SPACE"}
        assert await old.fetch("cold") is None
        assert await old.fetch("pinned") == b"bytes"


async def test_a_start_with_a_lower_limit_keeps_all_and_evicts_down_to_it_with_the_next_write(
    short_dir: Path,
) -> None:
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        for number in range(8):
            await client.store(f"{number}", b"bytes")
    async with running(short_dir, max_objects=3) as daemon:
        client = await daemon.connect()
        assert (await client.status())["objects"] == 8
        await client.store("new", b"bytes")
        assert (await client.status())["objects"] == 3
        assert await client.fetch("new") == b"bytes"


async def test_many_clients_at_once_never_exceed_the_limit(short_dir: Path) -> None:
    async with running(short_dir, max_objects=10) as daemon:
        clients = [await daemon.connect() for _ in range(8)]
        most = 0

        async def store_some(client: Client, name: str) -> None:
            nonlocal most
            for number in range(10):
                await client.send(line("stage_write", uri=f"{name}/{number}", size_bytes=0))
                if (await client.receive())["status"] == "WRITESTAGED":
                    await client.ask("commit_write", uri=f"{name}/{number}", local_only=True)
                most = max(most, daemon.parts.remover.max_objects - daemon.parts.remover.object_room())

        async with trio.open_nursery() as nursery:
            for index, client in enumerate(clients):
                nursery.start_soon(store_some, client, f"{index}")
        assert most == 10


# -- chunks of an object -------------------------------------------------------------------------------


async def test_an_object_may_have_many_chunks_and_not_without_end(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "MOST_SPARE_CHUNKS", 2)
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.stage("many", b"1")
        for piece in (b"2", b"3"):
            reply = await client.ask("append_write", uri="many", size_bytes=1)
            write_layout(reply["chunk_layout"], piece)
        before = (await client.status())["pools"]
        code, sentence = await client.refusal("append_write", uri="many", size_bytes=1)
        assert code == "NO_SPACE"
        assert sentence.startswith("append_write: many has 3 chunks, and with this more than 2 beyond")
        assert "append pieces of 4 MiB, or write several objects" in sentence
        assert (await client.status())["pools"] == before
        assert (await client.ask("commit_write", uri="many"))["status"] == "WRITECOMMITTED"
        assert await client.fetch("many") == b"123"


async def test_whole_chunks_can_be_appended_for_ever(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "MOST_SPARE_CHUNKS", 0)
    async with running(short_dir) as daemon:
        client = await daemon.connect()
        await client.stage("whole", bytes(CHUNK))
        for size_bytes in (CHUNK, 2 * CHUNK, 1):
            reply = await client.ask("append_write", uri="whole", size_bytes=size_bytes)
            assert reply["status"] == "WRITESTAGED", reply
        assert (await client.refusal("append_write", uri="whole", size_bytes=1))[0] == "NO_SPACE"
