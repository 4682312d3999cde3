"""Clients that connect as another user with its own groups. Only root may; others connect as they are."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trio
from daemon_harness import Client, Daemon

FREE_ID = 41_000
"""No user and no group of any machine that runs the tests."""


@dataclass(frozen=True)
class Identity:
    """An effective user, its group and its further groups."""

    uid: int
    gid: int
    groups: Sequence[int]


TENANT = (
    Identity(FREE_ID + 1, FREE_ID + 2, (FREE_ID + 3, FREE_ID + 4))
    if os.geteuid() == 0
    else Identity(os.geteuid(), os.getegid(), os.getgroups())
)


@contextmanager
def acting_as(identity: Identity) -> Iterator[None]:
    """Be that identity meanwhile, which nothing that waits may do."""
    if os.geteuid() != 0:
        assert identity == TENANT, "only root can be somebody else"
        yield
        return
    before = os.getgroups(), os.getegid()
    os.setgroups(identity.groups)
    os.setegid(identity.gid)
    os.seteuid(identity.uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(before[1])
        os.setgroups(before[0])


def connected(path: Path, identity: Identity = TENANT) -> socket.socket:
    """A socket that was connected to `path` by that identity, who may from now on open it."""
    if os.geteuid() == 0:
        path.parent.chmod(0o755)
        path.chmod(0o666)
    sock = socket.socket(socket.AF_UNIX)
    try:
        with acting_as(identity):
            sock.connect(str(path))
    except BaseException:
        sock.close()
        raise
    return sock


def client_as(daemon: Daemon, identity: Identity = TENANT) -> Client:
    """A client that connected as that identity."""
    sock = connected(daemon.config.socket, identity)
    client = Client(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))
    daemon.clients.append(client)
    return client
