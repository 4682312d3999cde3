"""Metrics: what get_status reports, as Prometheus reads it, and an answer for whoever asks oddly."""

from __future__ import annotations

import errno
import http.client
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from daemon_harness import DEADLINE_S, MIB, Client, Daemon, eventually, pattern, running
from forked_daemons import Forks, small_pool
from gated_backend import GatedBackend
from prometheus_client.parser import text_string_to_metric_families

from hypercache_daemon import metrics_server
from hypercache_daemon.config import Config, ConfigError, parse
from hypercache_daemon.metrics import NOT_SHOWN, TABLE, Kind, exposition, leaves
from hypercache_daemon.metrics_server import MetricsServer, bind_metrics

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
LOCAL = ("127.0.0.1", 0)


def samples_of(text: str) -> Samples:
    """Every sample by its name and labels, as Prometheus's own parser reads them."""
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def asked(port: int, request: bytes) -> bytes:
    """The whole answer to what is sent."""
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as sock:
        sock.sendall(request)
        answer = b""
        while data := sock.recv(65536):
            answer += data
        return answer


def scraped(port: int) -> tuple[int, str, str]:
    """Status, content type and body of a scrape."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET", "/metrics?x=1", headers={"Accept": "text/plain;version=0.0.4"})
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read().decode()
    finally:
        connection.close()


@asynccontextmanager
async def told(daemon: Daemon) -> AsyncIterator[int]:
    """The daemon's metrics can be asked for at this port."""
    async with trio.open_nursery() as nursery:
        with bind_metrics(LOCAL) as sock:
            nursery.start_soon(MetricsServer(daemon.parts.handlers.report).serve, sock)
            yield sock.getsockname()[1]
            nursery.cancel_scope.cancel()


async def scrape(port: int) -> Samples:
    status, kind, text = await trio.to_thread.run_sync(scraped, port)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return samples_of(text)


async def something_of_everything(client: Client) -> None:
    await client.store("hypercache://a/1", pattern(1, MIB), pinned=True)
    await client.stage("hypercache://a/2", pattern(2, MIB), tier="ram")
    await client.ask("ping", newcomer=1)
    moved = {"object_size_bytes": 7, "duration_us": 1_500_000, "bandwidth_mbps": 1.5, "time_saved_ms": 250}
    assert (await client.ask("record_telemetry", event_type="READ", uri="a", **moved))["status"] == "PONG"


async def test_every_figure_of_get_status_is_a_metric_and_has_the_same_value(short_dir: Path) -> None:
    async with running(short_dir, capacity=("hypercache://a=8MiB",)) as daemon, told(daemon) as port:
        client = await daemon.connect()
        await something_of_everything(client)
        samples = await scrape(port)
        report = daemon.parts.handlers.report()
        assert report["telemetry"], "it was taken"
        for path, value in leaves(report):
            rows = [row for row in TABLE if row.labels_at(path, value) is not None]
            if f"{path[0]}/{path[-1]}" in NOT_SHOWN:
                assert rows == [], path
                continue
            (row,) = rows
            labels = row.labels_at(path, value)
            assert labels is not None
            name = f"hypercache_{row.name}" + "_total" * (row.kind is Kind.COUNTER)
            shown = samples[name, frozenset(zip(row.labels, labels, strict=True))]
            if path != ("uptime_s",):
                assert shown == (1 if row.kind is Kind.WORD else pytest.approx(value * row.scale)), path


async def test_a_scrape_says_what_there_is_in_base_units(short_dir: Path) -> None:
    async with running(short_dir, capacity=("hypercache://a=8MiB",)) as daemon, told(daemon) as port:
        await something_of_everything(await daemon.connect())
        samples = await scrape(port)

        def value(name: str, **labels: str) -> float:
            return samples[f"hypercache_{name}", frozenset(labels.items())]

        assert value("pool_pinned_bytes", tier="nvme") == MIB
        assert value("pool_staged_bytes", tier="ram") == MIB
        assert value("capacity_used_bytes", prefix="hypercache://a/") == MIB
        assert value("state_objects", state="LOCAL_ONLY") == 1
        assert value("requests_total", action="stage_write", status="WRITESTAGED") == 2
        assert value("client_duration_seconds_total", event="READ") == 1.5
        assert value("client_time_saved_seconds_total", event="READ") == 0.25
        device = daemon.parts.health.report()[0]["path"]
        assert value("device_use", device=device, use="IN_USE") == 1
        assert value("wire_info", wire=str(daemon.config.wire)) == 1


async def test_a_backend_that_fails_shows(short_dir: Path) -> None:
    backend = GatedBackend(short_dir / "backend")
    backend.failures = 1
    async with running(short_dir, own_backend=backend) as daemon, told(daemon) as port:
        client = await daemon.connect()
        await client.store("hypercache://1", b"bytes", commit={})
        await eventually(lambda: daemon.parts.flusher.failed_uploads == 1)
        samples = await scrape(port)
        assert samples["hypercache_backend_failed_uploads_total", frozenset()] == 1
        assert samples["hypercache_backend_waiting_objects", frozenset()] == 1
        assert samples["hypercache_pool_dirty_bytes", frozenset({("tier", "nvme")})] == 4096


def test_names_follow_the_conventions() -> None:
    assert max(Counter(row.name for row in TABLE).values()) == 1
    for row in TABLE:
        assert re.fullmatch("[a-z][a-z_]*[a-z]", row.name)
        assert not row.name.endswith("_total"), "the library adds it to counters"
        assert not re.search("(_us|_ms|_s)$", row.name), "in seconds"
        assert (row.path.endswith("_bytes")) <= row.name.endswith("_bytes"), "in bytes"
        assert row.kind is not Kind.WORD or row.name.endswith(("_info", "_use"))
        assert row.help.endswith(".")


def test_labels_hold_any_text() -> None:
    strange = 'hypercache://a "quoted" \\ line\nbreak/é/'
    samples = samples_of(exposition({"capacities": {strange: {"objects": 3}}}).decode())
    assert samples["hypercache_capacity_objects", frozenset({("prefix", strange)})] == 3


# -- over HTTP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200 OK"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\nHost: a\r\n\r\n", b"405 Method Not Allowed"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 17_000, b"400 Bad Request"),
        (b"\r\n\r\n", b"400 Bad Request"),
    ],
    ids=["plain", "elsewhere", "no GET", "endless", "empty"],
)
async def test_what_is_asked_oddly_is_told_so_and_others_go_on(
    short_dir: Path, request_bytes: bytes, status: bytes
) -> None:
    async with running(short_dir) as daemon, told(daemon) as port:
        answer = await trio.to_thread.run_sync(asked, port, request_bytes)
        assert answer.startswith(b"HTTP/1.1 " + status + b"\r\n")
        assert await scrape(port)


async def test_who_sends_nothing_is_given_up_and_keeps_nobody_out_for_long(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "_WITHIN_S", 0.2)
    async with running(short_dir) as daemon, told(daemon) as port:
        silent = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(8)]
        assert await scrape(port)
        for stream in silent:
            await stream.aclose()


async def test_a_fault_while_metrics_are_told_ends_nothing(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(report: Mapping[str, Any]) -> bytes:
        raise RuntimeError("a fault")

    async with running(short_dir) as daemon, told(daemon) as port:
        with monkeypatch.context() as patched:
            patched.setattr(metrics_server, "exposition", fails)
            request = b"GET /metrics HTTP/1.0\r\n\r\n"
            assert await trio.to_thread.run_sync(asked, port, request) == b""
        assert "by a fault of the daemon" in caplog.text
        assert await scrape(port)


async def test_without_descriptors_it_says_so_once_and_goes_on_later(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_server, "_ACCEPT_AGAIN_S", 0.01)
    left = [OSError(errno.EMFILE, "Too many open files")] * 3
    accept = trio.SocketListener.accept

    async def accepts_later(listener: trio.SocketListener) -> trio.SocketStream:
        if left:
            raise left.pop()
        return await accept(listener)

    async with running(short_dir) as daemon:
        monkeypatch.setattr(trio.SocketListener, "accept", accepts_later)
        async with told(daemon) as port:
            assert await scrape(port)
            assert caplog.text.count("nobody can ask for metrics just now") == 1
        monkeypatch.undo()


# -- the setting ---------------------------------------------------------------------------------------


def test_it_is_off_unless_an_address_is_given(tmp_path: Path) -> None:
    assert Config(pool_dir=tmp_path).metrics_address is None
    assert parse(["--pool-dir", "p", "--metrics", "127.0.0.1:9464"]).metrics_address == ("127.0.0.1", 9464)
    assert parse(["--pool-dir", "p", "--metrics", "[::1]:0"]).metrics_address == ("::1", 0)


@pytest.mark.parametrize("word", ["9464", ":9464", "127.0.0.1", "127.0.0.1:", "a:65536", "a:-1", "a:x"])
def test_what_is_no_address_is_refused_in_words(word: str) -> None:
    with pytest.raises(ConfigError, match=r"--metrics: write HOST:PORT, such as 127\.0\.0\.1:9464"):
        parse(["--pool-dir", "p", "--metrics", word])


def test_an_address_that_is_taken_is_refused_in_words() -> None:
    with bind_metrics(LOCAL) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"127.0.0.1:{port} cannot be had: Address already in use; give"
        ):
            bind_metrics(("127.0.0.1", port))


def test_a_daemon_that_was_asked_to_tells_them_and_stops_in_order(forks: Forks, short_dir: Path) -> None:
    with bind_metrics(LOCAL) as sock:  # a port that was free a moment ago
        port = sock.getsockname()[1]
    daemon = forks.start(short_dir, small_pool(short_dir, "--metrics", f"127.0.0.1:{port}"))
    with daemon.connect() as client:
        client.ask("ping")
        _, _, text = scraped(port)
        assert samples_of(text)["hypercache_connections", frozenset()] == 1
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S):  # asks for nothing
        os.kill(daemon.pid, signal.SIGTERM)
        assert daemon.wait() == 0
    assert time.monotonic() - begun < metrics_server._WITHIN_S
    assert "Traceback" not in daemon.log()
