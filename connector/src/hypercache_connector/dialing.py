"""A socket to the daemon, connected within a deadline."""

from __future__ import annotations

import socket
import threading
import time

from .outcomes import DaemonUnavailable, Outcome

_FIRST_RETRY_S = 0.005
_LONGEST_RETRY_S = 0.1
"""A daemon that comes back to a full backlog is left in peace by those who wait longest."""


def connected(socket_path: str, deadline: float, stop: threading.Event) -> socket.socket:
    """A socket that is connected and does not block.

    Args:
        deadline: on the monotonic clock.
        stop: gives up the attempt when set.

    Raises:
        DaemonUnavailable: nobody listens there, or accepts in time.
    """
    try:
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # this process has no descriptor left
        raise DaemonUnavailable(Outcome.DAEMON_GONE, f"no socket to be had: {error.strerror}") from None
    try:
        connecting.setblocking(False)
        retry_s = _FIRST_RETRY_S
        while not _accepted(connecting, socket_path):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or stop.wait(min(retry_s, left_s)):
                raise DaemonUnavailable(Outcome.DAEMON_LATE, "the daemon does not accept connections")
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
    except BaseException:
        connecting.close()
        raise
    return connecting


def _accepted(connecting: socket.socket, socket_path: str) -> bool:
    try:
        connecting.connect(socket_path)
    except BlockingIOError:  # a Unix socket says so when the daemon's backlog is full
        return False
    except OSError as error:
        sentence = f"cannot connect to {socket_path}: {error.strerror}"
        raise DaemonUnavailable(Outcome.DAEMON_GONE, sentence) from None
    return True
