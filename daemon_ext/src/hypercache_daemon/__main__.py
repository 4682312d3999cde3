"""`hypercached`: exit status 0 after a stop, 2 where the configuration is refused."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Sequence

import trio

from .access import DeviceError
from .backend import BackendError
from .catalog import CatalogError
from .config import ConfigError, parse
from .daemon import run
from .server import SocketError

_REFUSALS = (ConfigError, DeviceError, CatalogError, BackendError, SocketError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon in the foreground until it is told to stop; returns the exit status."""
    try:
        config = parse(sys.argv[1:] if arguments is None else arguments)
        logging.basicConfig(
            level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        _raise_file_limit()
        trio.run(run, config)
    except _REFUSALS as refusal:
        print(f"hypercached: {refusal}", file=sys.stderr)
        return 2
    return 0


def _raise_file_limit() -> None:
    """Each connection takes a descriptor, and the usual soft limit of 1,024 is less than they may be."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
