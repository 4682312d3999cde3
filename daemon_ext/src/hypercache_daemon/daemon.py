"""The composition root: everything is wired here, and stopped in the order in which it depends.

Nurseries, outermost first: the catalog (last to stop: all others write to it), the background tasks, the
server. Stopping: no new connections, requests under way are answered, background work ends, the catalog
writes what is left.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket as stdlib_socket
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version as distribution_version

import trio

from hypercache_protocol.fields import MIB

from . import outages
from .access import Access
from .backend import Backend
from .committing import Committer
from .config import Config
from .connection import DEFAULT_LIMITS, ConnectionLimits
from .device_health import DeviceHealth
from .drain_file import DRAIN_FILE_NAME
from .flusher import Flusher
from .handlers import Handlers
from .identity import Identity
from .ingest import Ingester
from .removal import Remover, run_janitor
from .scrub import Scrubber
from .server import Server, bind, remove_socket, socket_identity
from .staging import Stager
from .startup import Opened, open_all
from .status import report
from .store import Store
from .telemetry import Telemetry

log = logging.getLogger(__name__)

_JANITOR_PERIOD_S = 1.0


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT; look at the devices and the drain file again on SIGHUP.

    Raises:
        ConfigError, DeviceError, CatalogError, BackendError, SocketError: it could not start.
    """
    access = Access(config.gid())
    config.rules()  # wrong ones end it before anything is touched
    backend = Backend(config.backend, config.ingest_prefix)
    watched = trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    with watched as signals, ExitStack() as held:
        # The socket comes first: where another daemon answers, its devices must not even be looked at.
        sock = held.enter_context(bind(config.socket, access))
        held.callback(remove_socket, config.socket, socket_identity(config.socket))
        told_at = held.enter_context(_bound_metrics(config))
        opened = _opened(config, access)
        held.callback(opened.close)
        await _serve_until_signal(config, opened, backend, sock, told_at, signals)


def _bound_metrics(config: Config) -> AbstractContextManager[stdlib_socket.socket | None]:
    if config.metrics_address is None:
        return nullcontext()
    from .metrics_server import bind_metrics  # Prometheus's library takes 0.2 s to import

    return bind_metrics(config.metrics_address)


def _opened(config: Config, access: Access) -> Opened:
    # What is loaded is no garbage, and looking for some among a million objects takes longer than loading
    # them, and later on would hold up every client.
    gc.disable()
    try:
        opened = open_all(config, access, trio.current_time())
        gc.freeze()
        return opened
    finally:
        gc.enable()


async def _serve_until_signal(
    config: Config,
    opened: Opened,
    backend: Backend,
    sock: stdlib_socket.socket,
    told_at: stdlib_socket.socket | None,
    signals: AsyncIterator[int],
) -> None:
    stop = trio.Event()
    async with trio.open_nursery() as obeying:
        async with trio.open_nursery() as serving:
            parts = await serving.start(serve, config, opened, backend, sock, stop)
            obeying.start_soon(_obey, signals, stop, parts.health)
            if told_at is not None:
                from .metrics_server import MetricsServer

                obeying.start_soon(MetricsServer(parts.handlers.report).serve, told_at)
        obeying.cancel_scope.cancel()


async def _obey(signals: AsyncIterator[int], stop: trio.Event, health: DeviceHealth) -> None:
    async with trio.open_nursery() as nursery:  # looking may take long, and must not delay a stop
        async for number in signals:
            if number == signal.SIGHUP:
                log.info("looking at the devices again on SIGHUP")
                nursery.start_soon(health.look_again)
            else:
                log.info("stopping on %s", signal.Signals(number).name)
                stop.set()


@dataclass(frozen=True)
class Parts:
    """One daemon, wired."""

    store: Store
    remover: Remover
    flusher: Flusher
    ingester: Ingester
    scrubber: Scrubber
    health: DeviceHealth
    handlers: Handlers
    server: Server


async def serve(
    config: Config,
    opened: Opened,
    backend: Backend,
    sock: stdlib_socket.socket,
    stop: trio.Event,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    task_status: trio.TaskStatus[Parts] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve on a listening socket, with what was opened, until `stop` is set."""
    async with trio.open_nursery() as last:
        await last.start(opened.catalog.run)
        async with trio.open_nursery() as background:
            parts = _wired(config, opened, backend, limits, background)
            background.start_soon(parts.flusher.run)
            background.start_soon(parts.remover.run)
            background.start_soon(parts.scrubber.run)
            background.start_soon(parts.health.run)
            background.start_soon(run_janitor, parts.store, _JANITOR_PERIOD_S)
            log.info("ready: serving %s", config.socket)
            task_status.started(parts)
            await parts.server.serve(sock, stop, config.shutdown_grace_s)
            background.cancel_scope.cancel()
        if await outages.reached_the_devices(parts.store.descriptors.values()):
            opened.catalog.post([outages.ended()])
        last.cancel_scope.cancel()
    log.info("stopped")


def _wired(
    config: Config, opened: Opened, backend: Backend, limits: ConnectionLimits, background: trio.Nursery
) -> Parts:
    store = Store(
        opened.cache,
        opened.catalog,
        {device.index: device.path for device in opened.pool.devices},
        opened.ram_files,
        opened.cache.times,
        descriptors={device.index: device.fd for device in opened.pool.devices if device.fd is not None},
    )
    started = store.clock()

    def uptime_s() -> float:
        return store.clock() - started

    remover = Remover(
        store, high=config.evict_above, low=config.evict_down_to, max_objects=config.max_objects
    )
    flusher = Flusher(store, backend)
    keeps_unflushed = config.has_no_backend and not config.evict_unflushed
    stager = Stager(store, remover, flusher, keeps_unflushed)
    committer = Committer(store, remover, flusher, config.verify_on_commit)
    ingester = Ingester(store, stager, committer, backend, background)
    scrubber = Scrubber(store, remover, config.scrub_mib_s * MIB)
    drain_file = config.catalog_dir / DRAIN_FILE_NAME
    health = DeviceHealth(opened, store, remover, flusher, drain_file)
    handlers = Handlers(
        store,
        stager,
        committer,
        remover,
        flusher,
        ingester,
        health.infos,
        _identity(config, opened, limits),
        lambda: report(store, handlers, remover, flusher, ingester, scrubber, health, server, uptime_s),
        Telemetry(),
        opened.presence,
    )
    limits = replace(limits, idle_timeout_s=config.idle_s)
    server = Server(handlers, config.wire_version, limits, config.max_connections, config.rules())
    return Parts(store, remover, flusher, ingester, scrubber, health, handlers, server)


def _identity(config: Config, opened: Opened, limits: ConnectionLimits) -> Identity:
    return Identity(
        config.wire_version,
        f"hypercached {distribution_version('hypercache-ext')}",
        uuid.uuid4().hex,
        tuple(device.path for device in opened.pool.devices),
        limits.session,
        limits.max_in_flight,
    )
