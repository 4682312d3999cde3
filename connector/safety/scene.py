"""Where a check runs: LMCache with the connector in its process, and a daemon on devices of its own.

Rules:
1. What LMCache does goes through its own adapter, in its own process. What others do (an old client, a hand
   on the device) goes past the connector.
2. Adapters are made when a check first asks for them, and kept for the checks after it: one takes half a
   second to close. So each check uses keys that no other one uses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from hypercache_compat.altered_replies import Altered, Fields, OnReply, unchanged_reply
from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, running_daemon
from hypercache_compat.raw_wire import Message, RawConnection
from hypercache_compat.relay import relaying
from hypercache_compat.scenario_process import ScenarioProcess
from hypercache_connector.keys import UriMapping

from .check import Failed, require
from .places import POOL_MIB, Chunk, Places, places

NAMESPACE = "safety"
UNHURRIED = {"timeout_s": 50.0, "transfer_timeout_s": 50.0}
"""A miss because the machine is busy would be right, and show nothing."""
PLAIN, OVERWRITING, ELSEWHERE, ALTERED = "plain", "overwriting", "elsewhere", "altered"
CONNECTIONS: dict[str, dict[str, object]] = {
    PLAIN: {},
    OVERWRITING: {"overwrite": True},
    ELSEWHERE: {"namespace": "safety/elsewhere"},
    ALTERED: {"wire": "1.1", "overwrite": True},
}
"""The parameters of the adapters that checks ask for; any other name is one without parameters. ALTERED's
replies pass by the rule of `altering`."""

_numbers = count()


@dataclass(frozen=True)
class Cell:
    """A column of the table."""

    lmcache: str
    devices: int
    tier: str

    def __str__(self) -> str:
        return f"LMCache {self.lmcache}, {self.devices} device{'s' * (self.devices > 1)}, {self.tier}"


@dataclass(frozen=True)
class Block:
    """One of LMCache's objects: its size, the fields of its key, and the name of the payload in it."""

    size_bytes: int
    chunk_hash: str
    model_name: str = "org/model-7B"
    kv_rank: int = 0x01000001
    object_group_id: int = 0
    cache_salt: str = ""
    content: str = ""

    @property
    def key(self) -> dict[str, object]:
        """The fields of LMCache's ObjectKey."""
        return {name: value for name, value in asdict(self).items() if name not in ("size_bytes", "content")}

    @property
    def payload(self) -> str:
        """The name of the bytes in it; another one for each key, unless `content` says which."""
        return self.content or f"block {hashlib.sha256(json.dumps(self.key).encode()).hexdigest()[:12]}"


def block(size_bytes: int, **fields: Any) -> Block:
    """A block whose key no other one has, unless `fields` say so."""
    chunk_hash = hashlib.sha256(str(next(_numbers)).encode()).hexdigest()
    return Block(size_bytes, **{"chunk_hash": chunk_hash, **fields})


def blocks(*sizes: int) -> list[Block]:
    """One for each size."""
    return [block(size) for size in sizes]


@dataclass
class Scene:
    """What a check works with.

    Args:
        other: gives a second process, with another release of LMCache.
        rule: by which replies reach the ALTERED connection, through the relay at `relay_path`.
        prefix: of the names of adapters, so that two scenes can share a process.
    """

    cell: Cell
    lmcache: ScenarioProcess
    other: Callable[[], ScenarioProcess]
    daemon: DaemonProcess
    places: Places
    backend: Path
    rule: OnReply = unchanged_reply
    relay_path: str = ""
    prefix: str = ""
    _connected: dict[str, ScenarioProcess] = field(default_factory=dict)

    # -- what LMCache does -------------------------------------------------------------------------------

    def store(self, items: Sequence[Block], connection: str = PLAIN, **options: object) -> None:
        """Store all in one batch, which LMCache must call stored."""
        require(self.tried_to_store(items, connection, **options), f"{_words(items)}: not stored")

    def tried_to_store(self, items: Sequence[Block], connection: str = PLAIN, **options: object) -> bool:
        """The same, whatever LMCache says."""
        return bool(
            self.call(
                "store", connection, **_columns(items), contents=[item.payload for item in items], **options
            )
        )

    def found(self, items: Sequence[Block], connection: str = PLAIN) -> list[bool]:
        """Which of them a lookup finds."""
        found: list[bool] = self.call("lookup", connection, names=[item.key for item in items])
        return found

    def loaded(
        self,
        items: Sequence[Block],
        connection: str = PLAIN,
        contents: Sequence[Sequence[str]] | None = None,
        **options: Any,
    ) -> list[bool]:
        """Which of them are loaded, in one batch.

        Args:
            contents: for each the names of the payloads that may be in it; its own unless given.

        Raises:
            Failed: one that LMCache calls loaded holds wrong bytes.
        """
        contents = contents or [[item.payload] for item in items]
        got = self.call("load", connection, **_columns(items), contents=contents, **options)
        require(not got["wrong"], f"wrong bytes were given as right: {'; '.join(got['wrong'][:3])}")
        loaded: list[bool] = got["loaded"]
        return loaded

    def expect_found(
        self, items: Sequence[Block], want: bool | Sequence[bool], connection: str = PLAIN
    ) -> None:
        """A lookup finds them (True), none of them, or those for which it is wanted."""
        _require_same(items, self.found(items, connection), want, "found")

    def expect_loaded(
        self, items: Sequence[Block], want: bool | Sequence[bool], connection: str = PLAIN, **options: Any
    ) -> None:
        """A load gives the right bytes for them, misses for all, or each where it is wanted."""
        _require_same(items, self.loaded(items, connection, **options), want, "loaded")

    def expect_kept(self, items: Sequence[Block], connection: str = PLAIN, **options: Any) -> None:
        """They are found and loaded."""
        self.expect_found(items, True, connection)
        self.expect_loaded(items, True, connection, **options)

    def expect_missed(self, items: Sequence[Block], connection: str = PLAIN) -> None:
        """They are neither found nor loaded."""
        self.expect_found(items, False, connection)
        self.expect_loaded(items, False, connection)

    def delete(self, items: Sequence[Block], connection: str = PLAIN) -> int:
        """Delete them; the bytes that LMCache counts as used."""
        return int(self.call("delete", connection, names=[item.key for item in items]))

    def call(self, scenario: str, connection: str = PLAIN, **arguments: object) -> Any:
        """Run a scenario in LMCache's process."""
        if connection not in self._connected:
            self.connect(self.lmcache, connection, **CONNECTIONS.get(connection, {}))
        return self.lmcache.call(f"adapter.{scenario}", connection=self.prefix + connection, **arguments)

    def connect(self, process: ScenarioProcess, connection: str, **parameters: object) -> None:
        """Have LMCache make an adapter, in the tier that is looked at."""
        socket_path = self.relay_path if connection == ALTERED else self.daemon.socket_path
        settings = {**UNHURRIED, "namespace": NAMESPACE, "tier": self.cell.tier, **parameters}
        process.call(
            "adapter.connect", socket_path=socket_path, connection=self.prefix + connection, **settings
        )
        self._connected[connection] = process

    def disconnect(self, connection: str) -> None:
        """Close an adapter."""
        self._connected.pop(connection).call("adapter.close", connection=self.prefix + connection)

    # -- what others do ----------------------------------------------------------------------------------

    def uri(self, item: Block) -> str:
        """The block's name in the daemon."""
        (text,) = self.lmcache.call("adapter.texts", names=[item.key])
        return UriMapping(NAMESPACE).uri(text)

    def asked(self, action: str, **fields: object) -> Message:
        """The daemon's reply to somebody else."""
        with self.daemon.connect() as connection:
            return connection.ask(action, **fields)

    def by_hand(self) -> RawConnection:
        """A connection of somebody else."""
        return self.daemon.connect()

    def chunks(self, items: Sequence[Block]) -> list[list[Chunk]]:
        """Where the daemon says that each lies."""
        texts = self.lmcache.call("adapter.texts", names=[item.key for item in items])
        with self.daemon.connect() as connection:
            replies = [
                connection.ask("locate", uri=uri, auto_ingest=False)
                for uri in UriMapping(NAMESPACE).uris(texts)
            ]
        missing = [reply for reply in replies if reply["status"] != "HIT"]
        require(not missing, f"the daemon does not know a block that was stored: {missing[:1]}")
        return [reply["chunk_layout"] for reply in replies]

    @contextmanager
    def altering(self, rule: OnReply) -> Iterator[None]:
        """Replies reach the ALTERED connection by this rule meanwhile."""
        self.rule = rule
        try:
            yield
        finally:
            self.rule = unchanged_reply

    @contextmanager
    def anew(self, *extra: str, sector_bytes: int = 512) -> Iterator[Scene]:
        """The same on a daemon and devices of its own, with further arguments of it."""
        prefix = f"{next(_numbers)} "
        with scene(
            self.cell, self.lmcache, self.other, *extra, prefix=prefix, sector_bytes=sector_bytes
        ) as another:
            yield another

    def close(self) -> None:
        """Close what is open."""
        for connection in list(self._connected):
            self.disconnect(connection)


@contextmanager
def scene(
    cell: Cell,
    lmcache: ScenarioProcess,
    other: Callable[[], ScenarioProcess],
    *extra: str,
    prefix: str = "",
    sector_bytes: int = 512,
) -> Iterator[Scene]:
    """A scene whose daemon reuses freed blocks at once, so that whoever trusts an old layout is caught, and
    reads nothing by itself."""
    with places(cell.devices, sector_bytes) as held:
        backend = held.files[0].parent / "backend"
        backend.mkdir()
        options = DaemonOptions(
            devices=held.devices,
            ram_size=f"{POOL_MIB}MiB",
            backend=str(backend),
            extra=("--quarantine-s", "0", "--scrub-mib-s", "0", *extra),
        )
        with running_daemon(options) as daemon:
            made = Scene(cell, lmcache, other, daemon, held, backend)
            made.relay_path, made.prefix = str(daemon.folder / "r"), prefix
            with relaying(made.relay_path, daemon.socket_path, lambda _: Altered(on_reply=_by_rule_of(made))):
                try:
                    yield made
                finally:
                    made.close()


def _by_rule_of(made: Scene) -> OnReply:
    def altered(request: Fields, reply: Fields) -> Fields:
        return made.rule(request, reply)

    return altered


def _columns(items: Sequence[Block]) -> dict[str, object]:
    return {"names": [item.key for item in items], "sizes": [item.size_bytes for item in items]}


def _require_same(
    items: Sequence[Block], got: Sequence[bool], want: bool | Sequence[bool], what: str
) -> None:
    wanted = [want] * len(items) if isinstance(want, bool) else list(want)
    too_few = [
        item for item, is_there, is_wanted in zip(items, got, wanted, strict=True) if is_wanted > is_there
    ]
    too_many = [
        item for item, is_there, is_wanted in zip(items, got, wanted, strict=True) if is_there > is_wanted
    ]
    if too_few:
        raise Failed(f"{_words(too_few)}: not {what}, and should be")
    if too_many:
        raise Failed(f"{_words(too_many)}: {what}, and should not be")


def _words(items: Sequence[Block]) -> str:
    sizes = ", ".join(str(item.size_bytes) for item in items[:4])
    return f"{len(items)} block{'s' * (len(items) != 1)} ({sizes}{', …' * (len(items) > 4)} bytes)"
