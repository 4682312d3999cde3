"""The command `hypercached`: exit status 0 after a stop, 2 where the configuration is refused."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Sequence

import trio

from .access import DeviceError
from .backend import BackendError
from .catalog import CatalogError
from .config import Config, ConfigError, parse
from .daemon import run
from .server import SocketError

log = logging.getLogger(__name__)

_OWN_DESCRIPTORS = 128  # beside the devices': the catalog, backends, RAM files being made, who is turned away
_SWITCH_S = 0.0005
"""How long a worker thread may keep the event loop from going on: a client's request gives the interpreter up
several times, so with Python's 5 ms it waited many times as long while the catalog was written."""

_REFUSALS = (ConfigError, DeviceError, CatalogError, BackendError, SocketError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon in the foreground until it is told to stop; returns the exit status."""
    try:
        config = parse(sys.argv[1:] if arguments is None else arguments)
        logging.basicConfig(
            level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        _raise_file_limit()
        sys.setswitchinterval(_SWITCH_S)
        trio.run(run, _fitted(config))
    except _REFUSALS as refusal:
        print(f"hypercached: {refusal}", file=sys.stderr)
        return 2
    return 0


def _raise_file_limit() -> None:
    """Each connection takes a descriptor, and the usual soft limit of 1,024 is less than they may be."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _fitted(config: Config) -> Config:
    """The configuration with no more connections than there are descriptors for, so that one too many is
    told so instead of waiting, and those who are in never lack one for what they ask."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(1, descriptors - _OWN_DESCRIPTORS - (len(config.device) or config.devices))
    if descriptors == resource.RLIM_INFINITY or config.max_connections <= most:
        return config
    log.warning(
        "at most %d connections are served at once and not %d: the process may open %d files only; allow "
        "more (ulimit -n, LimitNOFILE=), or set a lower --max-connections",
        most,
        config.max_connections,
        descriptors,
    )
    return config.model_copy(update={"max_connections": most})
