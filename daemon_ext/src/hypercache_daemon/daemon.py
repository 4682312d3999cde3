"""The composition root: everything is wired here, and stopped in the order in which it depends.

Nurseries, outermost first: the catalog (last to stop: all others write to it), the background tasks, the
server. Stopping: no new connections, requests under way are answered, background work ends, the catalog
writes what is left.
"""

from __future__ import annotations

import logging
import signal
import socket as stdlib_socket
import uuid
from collections import Counter
from importlib.metadata import version as distribution_version

import trio

from hypercache_protocol.session import Limits

from .access import Access
from .backend import Backend
from .config import Config
from .connection import ConnectionLimits
from .flusher import Flusher
from .handlers import Handlers, identity
from .ingest import Ingester
from .removal import Remover, run_janitor
from .server import Server, bind, remove_socket
from .startup import Opened, open_all, socket_inode
from .status import report
from .store import Store
from .telemetry import Telemetry
from .writes import Writer

log = logging.getLogger(__name__)

_JANITOR_PERIOD_S = 1.0


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError, DeviceError, CatalogError, BackendError, SocketError: it could not start.
    """
    access = Access(config.gid())
    backend = Backend(config.backend, config.ingest_prefix)
    # The socket comes first: where another daemon answers, its devices must not even be looked at.
    sock = bind(config.socket, access)
    inode = socket_inode(config.socket)
    try:
        opened = open_all(config, access, trio.current_time())
        try:
            await _serve(config, opened, backend, sock)
        finally:
            opened.close()
    finally:
        sock.close()
        remove_socket(config.socket, inode)


async def _serve(config: Config, opened: Opened, backend: Backend, sock: stdlib_socket.socket) -> None:
    store = Store(
        opened.cache,
        opened.catalog,
        {device.index: device.path for device in opened.pool.devices},
        opened.ram_files,
        opened.cache.times,
    )
    remover = Remover(store, high=config.evict_above, low=config.evict_down_to)
    flusher = Flusher(store, backend)
    writer = Writer(store, remover, flusher)
    async with trio.open_nursery() as last, trio.open_nursery() as background:
        await last.start(opened.catalog.run)
        ingester = Ingester(store, writer, backend, background)
        server = _server(config, opened, store, writer, remover, flusher, ingester)
        background.start_soon(flusher.run)
        background.start_soon(remover.run)
        background.start_soon(run_janitor, store, _JANITOR_PERIOD_S)
        stop = trio.Event()
        background.start_soon(_stop_on_signal, stop)
        log.info("ready: serving %s", config.socket)
        await server.serve(sock, stop, config.shutdown_grace_s)
        background.cancel_scope.cancel()
        last.cancel_scope.cancel()
    log.info("stopped")


def _server(
    config: Config,
    opened: Opened,
    store: Store,
    writer: Writer,
    remover: Remover,
    flusher: Flusher,
    ingester: Ingester,
) -> Server:
    started = store.clock()
    name = f"hypercached {distribution_version('hypercache-ext')}"
    handlers = Handlers(
        store,
        writer,
        remover,
        flusher,
        ingester,
        tuple(device.info for device in opened.pool.devices),
        identity(config.wire_version, name, uuid.uuid4().hex),
        lambda: report(store, handlers, remover, flusher, ingester, server, lambda: store.clock() - started),
        Telemetry(),
        Counter(),
    )
    limits = ConnectionLimits(Limits())
    server = Server(handlers, config.wire_version, limits, config.max_connections)
    return server


async def _stop_on_signal(stop: trio.Event) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("stopping on %s", signal.Signals(number).name)
            stop.set()
