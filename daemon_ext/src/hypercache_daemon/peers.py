"""Who is at the other end of a connection, as the kernel tells, and lists of such people.

The kernel notes a client's user and groups when it connects, and nothing changes them afterwards. Nothing of
this comes from what the client sends.
"""

from __future__ import annotations

import grp
import pwd
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group
_SO_PEERGROUPS = 59  # Linux has it since 4.13; Python has no name for it
_GROUPS_BYTES = 1024  # 256 groups; Python asks for no more
_GID_BYTES = 4
_MOST_ID = 2**32 - 2  # 2**32 - 1 means nobody in particular, to the kernel
_SHOWN_GROUPS = 16  # a batch may be refused thousands of times over, each time with this sentence
_GROUP_MARK = "@"


class ConnectedSocket(Protocol):
    """What is needed of a socket."""

    def getsockopt(self, level: int, option: int, buffer_bytes: int, /) -> bytes: ...


@dataclass(frozen=True)
class Peer:
    """A client's effective user and its groups at the moment when it connected."""

    uid: int
    gids: frozenset[int]

    def __str__(self) -> str:
        shown = list(map(str, sorted(self.gids)[:_SHOWN_GROUPS]))
        more = ["…"] if len(self.gids) > _SHOWN_GROUPS else []
        return f"user {self.uid} with groups {', '.join(shown + more)}"


@dataclass(frozen=True)
class People:
    """Some users, and the members of some groups; nobody where both are empty."""

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    def __contains__(self, peer: Peer) -> bool:
        return peer.uid in self.uids or not self.gids.isdisjoint(peer.gids)


def peer_of(sock: ConnectedSocket) -> Peer:
    """The client at the other end of a connected Unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, gid = _CREDENTIALS.unpack(credentials)
    return Peer(uid, frozenset({gid, *_supplementary_gids(sock)}))


def _supplementary_gids(sock: ConnectedSocket) -> Iterable[int]:
    """None where the kernel does not tell: then nobody is let in for a group that he may not be in."""
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return ()
    return struct.unpack(f"{len(packed) // _GID_BYTES}I", packed)


def people(words: Iterable[str]) -> People:
    """The people whom `words` name: a user by name or number, or a group so with an @ before it.

    Raises:
        ValueError: one of them is unknown; the sentence names it.
    """
    listed = [word.strip() for word in words]
    return People(
        frozenset(_uid(word) for word in listed if not word.startswith(_GROUP_MARK)),
        frozenset(_gid(word[1:]) for word in listed if word.startswith(_GROUP_MARK)),
    )


def _uid(word: str) -> int:
    if _is_number(word):
        return _checked(int(word))
    try:
        return pwd.getpwnam(word).pw_uid
    except KeyError:
        raise ValueError(
            f"there is no user {word!r} on this machine; give its name or number, or a group's after an @"
        ) from None


def _gid(word: str) -> int:
    if _is_number(word):
        return _checked(int(word))
    try:
        return grp.getgrnam(word).gr_gid
    except KeyError:
        raise ValueError(
            f"there is no group {word!r} on this machine; give a group's name or number after the @"
        ) from None


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal()


def _checked(number: int) -> int:
    if number > _MOST_ID:
        raise ValueError(f"{number} is no user or group; numbers are 0 to {_MOST_ID}")
    return number
