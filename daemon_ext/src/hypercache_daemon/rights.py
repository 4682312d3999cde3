"""What the configuration lets each client do. Without any of its rules: everything.

Rules:
1. A list means what it says: root is not on it unless it is named: clients in containers often are root.
2. An action that is restricted is for those whom its list names.
3. What lies under a prefix with owners is changed by these alone; of several prefixes the longest counts.
4. Where anything has owners, a purge, which asks nobody, is for those alone whom --restrict purge=… names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypercache_protocol.batches import EvictMany
from hypercache_protocol.errors import ErrorCode
from hypercache_protocol.messages import (
    AppendWrite,
    CommitWrite,
    Evict,
    GetDevices,
    GetStatus,
    Ingest,
    Locate,
    Pin,
    Purge,
    Request,
    StageWrite,
)

from .errors import DaemonError
from .peers import Peer, People, people

_SHOWN_CHARACTERS = 256  # of a uri; the refusals of one batch are all in one reply
_From = TypeVar("_From")
_To = TypeVar("_To")

_RESTRICTABLE: dict[type[Request], str] = {
    Purge: "purge",
    Evict: "evict",
    EvictMany: "evict",
    GetDevices: "get_devices",
    GetStatus: "get_status",
}

# A batch changes many uris, and its handler asks about each; see `Rights.refusals`.
_CHANGES: dict[type[Request], Callable[[Any], bool]] = {
    Evict: lambda _: True,
    StageWrite: lambda _: True,
    AppendWrite: lambda _: True,
    CommitWrite: lambda _: True,
    Pin: lambda _: True,
    Locate: lambda request: request.pinned,
    Ingest: lambda request: request.pinned,
}


@dataclass(frozen=True)
class Rights:
    """What one client may do: all but the `forbidden` actions, and under each of `prefixes`, longest first,
    what its value says."""

    peer: Peer
    forbidden: frozenset[str] = frozenset()
    prefixes: tuple[tuple[str, bool], ...] = ()

    def refusal(self, request: Request) -> DaemonError | None:
        """Why a request is not for this client; None where it is. A batch's uris are not looked at."""
        action = _RESTRICTABLE.get(type(request))
        if action in self.forbidden:
            return DaemonError(
                ErrorCode.FORBIDDEN,
                f"{request.action} is restricted and not for {self.peer}; ask the daemon's operator to name "
                f"one of them in --restrict {action}=…",
            )
        changes = _CHANGES.get(type(request))
        if self.prefixes and changes is not None and changes(request):
            uri: str = request.uri  # type: ignore[attr-defined] # all in the table have one
            return self._uri_refusal(request.action, uri)
        return None

    def refusals(self, action: str, uris: Sequence[str]) -> list[DaemonError | None]:
        """For each uri why this client may not change it, or None."""
        if not self.prefixes:
            return [None] * len(uris)
        return [self._uri_refusal(action, uri) for uri in uris]

    def _uri_refusal(self, action: str, uri: str) -> DaemonError | None:
        below = uri + "/"
        for prefix, is_owner in self.prefixes:
            if below.startswith(prefix):
                return None if is_owner else self._not_an_owner(action, uri, prefix)
        return None

    def _not_an_owner(self, action: str, uri: str, prefix: str) -> DaemonError:
        return DaemonError(
            ErrorCode.FORBIDDEN,
            f"{action}: {_shown(uri)} lies under {prefix}, whose owners {self.peer} is none of; "
            f"use another name, or ask the daemon's operator to name one of them in --owner {prefix}=…",
        )


def _shown(uri: str) -> str:
    return uri if len(uri) <= _SHOWN_CHARACTERS else uri[:_SHOWN_CHARACTERS] + "…"


@dataclass(frozen=True)
class Rules:
    """The configuration's rules. `allowed` None lets everybody in who may open the socket."""

    allowed: People | None = None
    restricted: Mapping[str, People] = field(default_factory=dict)
    owners: Mapping[str, People] = field(default_factory=dict)

    def lets_in(self, peer: Peer) -> bool:
        """False where the list of the allowed lacks the client."""
        return self.allowed is None or peer in self.allowed

    def rights_of(self, peer: Peer) -> Rights:
        """What a client may do that was let in."""
        restricted = dict(self.restricted)
        if self.owners:
            restricted.setdefault("purge", People())
        longest_first = sorted(self.owners, key=len, reverse=True)
        return Rights(
            peer,
            frozenset(action for action, listed in restricted.items() if peer not in listed),
            tuple((prefix, peer in self.owners[prefix]) for prefix in longest_first),
        )


def rules(allow: Sequence[str], restrict: Iterable[str], owner: Iterable[str]) -> Rules:
    """The rules that the settings of these names describe.

    Raises:
        ValueError: one of them is wrong; the sentence begins with its argument.
    """
    return Rules(
        _named("--allow", people, allow) if allow else None,
        _table("--restrict", "ACTION", restrict, _action),
        _table("--owner", "PREFIX", owner, whole_prefix),
    )


def _table(
    argument: str, what: str, entries: Iterable[str], key_of: Callable[[str], str]
) -> dict[str, People]:
    table: dict[str, People] = {}
    for entry in entries:
        word, equals, names = entry.rpartition("=")  # a uri may hold "=", a list of people does not
        if not equals:
            raise ValueError(f"{argument}: {entry!r} says not for whom; write {what}=USER,@GROUP")
        key = _named(argument, key_of, word)
        if key in table:
            raise ValueError(f"{argument}: {key} is given twice; name everybody in one list")
        table[key] = _named(argument, people, names.split(",") if names.strip() else [])
    return table


def _named(argument: str, parse: Callable[[_From], _To], value: _From) -> _To:
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from None


def _action(word: str) -> str:
    known = sorted(set(_RESTRICTABLE.values()))
    if word not in known:
        raise ValueError(f"{word!r} cannot be restricted; what can is {', '.join(known)}")
    return word


def whole_prefix(word: str) -> str:
    """A prefix of uris that ends with its last segment. ValueError where it is none."""
    if "://" not in word:
        raise ValueError(
            f"{word!r} is no prefix of uris; write one with its scheme, such as hypercache://team-a"
        )
    scheme, _, rest = word.partition("://")
    return f"{scheme}://{rest.rstrip('/')}/" if rest.strip("/") else f"{scheme}://"
