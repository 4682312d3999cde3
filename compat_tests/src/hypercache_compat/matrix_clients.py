"""The behaviours that the matrix shows, for the released clients and for the connector.

Each gives a `Seen`; uris are the cell's own, so one daemon serves every cell of its column.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hypercache_connector import Client, HyperCacheConnector
from hypercache_connector.keys import UriMapping
from hypercache_protocol import LocalProtocolError, WireVersion
from hypercache_protocol.messages import (
    CommittedReply,
    CommitWrite,
    GetDevices,
    GetStatus,
    Ping,
    PongReply,
    StagedReply,
    StageWrite,
)

from . import raw_wire
from .matrix_cells import WORKS, Meeting, Seen, Verdict, checked, less
from .payloads import MIB, payload
from .scenario_process import ScenarioFailed, ScenarioProcess

# -- released clients ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OldBehaviour:
    """A scenario of `old_client_scenarios`, and whether what it gives is right; it compares bytes itself."""

    scenario: str
    arguments: dict[str, Any]
    right: Callable[[Any], bool]
    named: str | None = "uri"
    """The argument that takes the name of what is written, if there is one."""

    def seen(self, client: ScenarioProcess, meeting: Meeting, name: str) -> Seen:
        """How it goes with this daemon; `name` is the cell's own."""
        names = {self.named: f"hypercache://{name}"} if self.named else {}
        try:
            got = client.call(self.scenario, socket_path=meeting.path, **names, **self.arguments)
        except ScenarioFailed as error:
            return Seen(Verdict.FAILS, str(error).strip().splitlines()[-1])
        return checked(self.right(got), f"{self.scenario} gave {got!r}")


def _is(want: object) -> Callable[[Any], bool]:
    return lambda got: bool(got == want)


_LIFE = ["UNKNOWN", "STAGED", "COMMITTED", "MISS"]

OLD_BEHAVIOURS: dict[str, OldBehaviour] = {
    "ping": OldBehaviour("client_calls.ping", {}, _is(True), named=None),
    "write, commit and read on NVMe": OldBehaviour(
        "client_calls.life_of_an_object", {"size_bytes": 5 * MIB + 1920, "tier": "nvme"}, _is(_LIFE)
    ),
    "write, commit and read in RAM": OldBehaviour(
        "client_calls.life_of_an_object", {"size_bytes": 70_001, "tier": "ram"}, _is(_LIFE)
    ),
    "streamed write of a file": OldBehaviour(
        "file_system.write_in_pieces", {"size_bytes": 9 * MIB + 13, "write_bytes": MIB}, _is(None)
    ),
    "overwrite while another reads": OldBehaviour(
        "client_calls.replace_while_read", {"old_size": 3000, "new_size": 4 * MIB + 1}, _is(None)
    ),
    "evict": OldBehaviour("client_calls.evict_twice", {"size_bytes": 5000}, _is([True, False, False])),
    "pin and unpin": OldBehaviour(
        "client_calls.pin_and_unpin", {"size_bytes": 5000}, _is([True, True, False])
    ),
    "devices and status": OldBehaviour(
        "client_calls.facts",
        {},
        lambda got: len(got["devices"]) == 4 and got["status"].get("status") == "OK",
        named=None,
    ),
    "KV block": OldBehaviour(
        "kv_blocks.put_and_get",
        {"size_bytes": 70_001, "tier": "ram"},
        _is({"tiers": ["ram"], "absent": None}),
        named="key",
    ),
    "a name that nobody wrote": OldBehaviour(
        "client_calls.unknown_uri",
        {},
        lambda got: got["locate"] == "MISS" and got["ingest"][0] == "ERROR" and not got["commit"],
    ),
}


# -- the connector -------------------------------------------------------------------------------------

_DEADLINE_S = 30.0
_TOO_OLD = "daemon_too_old"
SIZES = (1, 70_001, 4 * MIB + 1)


class ConnectorInCell(AbstractContextManager["ConnectorInCell"]):
    """A connector and a client pinned to `wire`, and every warning that they log. `seals` turns on the
    connector's `seal_for_old_daemons`."""

    def __init__(self, meeting: Meeting, wire: WireVersion, name: str, *, seals: bool = False) -> None:
        self.meeting = meeting
        self.name = name
        self.mapping = UriMapping(name)
        self.connector = HyperCacheConnector(
            namespace=name,
            socket_path=meeting.path,
            wire=str(wire),
            timeout_s=_DEADLINE_S,
            seal_for_old_daemons=seals,
        )
        self.client = Client(meeting.path, _DEADLINE_S, version=wire)
        self._log = _Warnings()
        logging.getLogger("hypercache_connector").addHandler(self._log)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("hypercache_connector").removeHandler(self._log)
        self.connector.close()
        self.client.close()

    @property
    def wire(self) -> str:
        """The wire that connector and daemon agreed on."""
        return str(self.connector.status()["daemon"]["wire"])

    def warnings(self) -> list[str]:
        """What was logged so far, without the socket's path."""
        return [line.removeprefix(f"{self.meeting.path}: ") for line in self._log.lines]

    def completion(self, future_id: int) -> Any:
        """The completion of what was just submitted."""
        deadline = time.monotonic() + _DEADLINE_S
        while not (done := self.connector.drain_completions()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no completion within {_DEADLINE_S} s")
            select.select([self.connector.event_fd()], [], [], left_s)
        assert [each.future_id for each in done] == [future_id]
        return done[0]

    def store(self, keys: Sequence[str], sizes: Sequence[int]) -> bool:
        """Whether every key's payload was stored."""
        data = [payload(key, size) for key, size in zip(keys, sizes, strict=True)]
        return bool(self.completion(self.connector.submit_batch_set(keys, data)).ok)

    def found(self, keys: Sequence[str]) -> list[bool]:
        return list(self.completion(self.connector.submit_batch_exists(keys)).result_bools)

    def loaded(self, keys: Sequence[str], sizes: Sequence[int]) -> list[bool]:
        """Which keys were loaded; their bytes are compared.

        Raises:
            WrongBytes: of one of them they are not what was stored.
        """
        buffers = [bytearray(size) for size in sizes]
        flags = list(self.completion(self.connector.submit_batch_get(keys, buffers)).result_bools)
        for key, flag, buffer in zip(keys, flags, buffers, strict=True):
            if flag and buffer != payload(key, len(buffer)):
                raise WrongBytes(f"a load of {key} gave wrong bytes and called them right")
        return flags

    def deleted(self, keys: Sequence[str]) -> list[bool]:
        return list(self.completion(self.connector.submit_batch_delete(keys)).result_bools)

    def only_too_old(self, *groups: str) -> bool:
        """Whether nothing in these counters was ever good, and the daemon's age is why."""
        status = self.connector.status()
        return all(status.get(group, {}).keys() == {_TOO_OLD} for group in groups)

    def degraded(self, worked: bool, *groups: str) -> Seen:
        """The verdict on a behaviour of the connector: all of it, or none of it with one logged reason."""
        if worked:
            return WORKS
        reasons = self.warnings()
        if not self.only_too_old(*groups):
            return Seen(Verdict.FAILS, f"{self.connector.status()}, logged {reasons}")
        if len(reasons) != 1:
            return Seen(Verdict.FAILS, f"logged {len(reasons)} lines within a minute: {reasons}")
        return less(Verdict.DEGRADES, reasons[0])


class WrongBytes(AssertionError):
    """A wrong byte was handed out as right."""


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _ping(cell: ConnectorInCell) -> Seen:
    replies = cell.client.exchange([Ping(), GetStatus(), GetDevices()])
    words = [reply.status for reply in replies]
    return checked(isinstance(replies[0], PongReply) and words == ["PONG", "OK", "OK"], f"got {words}")


def _store_and_load(cell: ConnectorInCell) -> Seen:
    keys = [f"chunk-{size}" for size in SIZES]
    got = [cell.store(keys, SIZES), *cell.found(keys), *cell.loaded(keys, SIZES)]
    return cell.degraded(all(got), "stores", "lookups", "loads") if len(set(got)) == 1 else _mixed(got)


def _many_keys(cell: ConnectorInCell) -> Seen:
    keys = [f"many-{number}" for number in range(200)]
    got = [cell.store(keys, [100] * 200), *cell.found(keys), *cell.loaded(keys, [100] * 200)]
    return cell.degraded(all(got), "stores", "lookups", "loads") if len(set(got)) == 1 else _mixed(got)


def _seen_at_once(cell: ConnectorInCell) -> Seen:
    """What others store and delete is seen by the next lookup, however lookups are answered."""
    uri = cell.mapping.uri("seen")
    got = []
    with cell.meeting.daemon.connect() as raw:
        for _ in range(4):  # the first ones are asked by a thread, later ones perhaps not at all
            got.append(cell.store(["seen"], [100]) and cell.found(["seen"]) == [True])
            raw.ask("evict", uri=uri)
            if cell.found(["seen"]) != [False]:
                return Seen(Verdict.FAILS, "what another client deleted is found")
    return cell.degraded(all(got), "stores", "lookups") if len(set(got)) == 1 else _mixed(got)


def _store_again(cell: ConnectorInCell) -> Seen:
    got = [cell.store(["again"], [size]) and cell.loaded(["again"], [size]) == [True] for size in (70, 9000)]
    return cell.degraded(all(got), "stores") if len(set(got)) == 1 else _mixed(got)


def _stored_already(cell: ConnectorInCell) -> Seen:
    """What is stored is not written again: the second store changes no generation."""
    if not cell.store(["stored"], [5000]):
        return cell.degraded(False, "stores")
    before, again, after = (
        _generation(cell, "stored"),
        cell.store(["stored"], [5000]),
        _generation(cell, "stored"),
    )
    counted = cell.connector.status()["stores"].get("already_stored", 0)
    return checked(
        again and before == after and counted == 1, f"generations {before}, {after}; counted {counted}"
    )


def _generation(cell: ConnectorInCell, key: str) -> object:
    with cell.meeting.daemon.connect() as raw:
        located = raw.ask("locate", uri=cell.mapping.uri(key), auto_ingest=False)
        return located.get("generation"), located["chunk_layout"]


def _mixed(got: list[bool]) -> Seen:
    return Seen(Verdict.FAILS, f"some of it worked and some did not: {got}")


def _delete(cell: ConnectorInCell) -> Seen:
    # Deleting needs nothing that 1.0 lacks: what another client wrote goes as well.
    uri = cell.mapping.uri("deleted")
    with cell.meeting.daemon.connect() as raw:
        raw_wire.store(raw, uri, b"any")
        gone = cell.deleted(["deleted", "never there"])
        return checked(gone == [True, True] and raw_wire.fetch(raw, uri) is None, f"deleted {gone}")


def _unverifiable(cell: ConnectorInCell) -> Seen:
    """A block that an old client wrote has no checksums: it must be a miss, whatever the daemon is."""
    _store_by_hand(cell, "old")
    hits = [*cell.found(["old"]), *cell.loaded(["old"], [5000])]
    if any(hits):
        return Seen(Verdict.FAILS, "a block without checksums was called a hit")
    counts = {name for group in ("lookups", "loads") for name in cell.connector.status()[group]}
    reasons = {"unverifiable", "no_checksum", _TOO_OLD}
    return checked(
        bool(counts & reasons), f"a block without checksums was a miss and nothing says why: {counts}"
    )


def _unsealed(cell: ConnectorInCell) -> Seen:
    """The same where seals are looked for: a lookup cannot know better, a load must."""
    _store_by_hand(cell, "unsealed")
    before = cell.connector.status()["loads"].get("no_checksum", 0)
    loaded = cell.loaded(["unsealed"], [5000])
    after = cell.connector.status()["loads"].get("no_checksum", 0)
    return checked((loaded, after - before) == ([False], 1), f"loaded {loaded}, counted {after - before}")


def _store_by_hand(cell: ConnectorInCell, key: str) -> None:
    with cell.meeting.daemon.connect() as raw:
        raw_wire.store(raw, cell.mapping.uri(key), payload(key, 5000))


def _damaged(cell: ConnectorInCell) -> Seen:
    """One byte flipped on the device: a miss, and the next store finds nothing in its way."""
    if not cell.store(["damaged"], [5000]):
        return cell.degraded(False, "stores")
    with cell.meeting.daemon.connect() as raw:
        chunks = raw.ask("locate", uri=cell.mapping.uri("damaged"), auto_ingest=False)["chunk_layout"]
    data = raw_wire.read_layout(chunks)
    raw_wire.write_layout(chunks, bytes([data[0] ^ 1]) + data[1:])
    missed = [*cell.loaded(["damaged"], [5000]), *cell.found(["damaged"])]
    healed = [cell.store(["damaged"], [5000]), *cell.loaded(["damaged"], [5000])]
    return checked(not any(missed) and all(healed), f"hits {missed}, stored anew and loaded {healed}")


def _droppable(cell: ConnectorInCell) -> Seen:
    """chunk_checksums may be left out for an old peer: the object is whole, and its readers see that it
    cannot be verified."""
    uri = cell.mapping.uri("droppable")
    staged = _stage(cell, uri)
    (committed,) = cell.client.exchange(
        [CommitWrite(uri=uri, chunk_checksums=(0,), stage_id=staged.stage_id)]
    )
    with cell.meeting.daemon.connect() as raw:
        layout = raw.ask("locate", uri=uri)["chunk_layout"]
    kept = [chunk.get("checksum") for chunk in layout] == [0]
    if kept or not isinstance(committed, CommittedReply):
        return checked(kept, f"the commit got {committed}")
    return less(
        Verdict.DEGRADES,
        f"chunk_checksums came with wire 1.1 and is left out for a peer of wire {cell.client.wire}: the "
        "object can be read and not verified (docs/wire.md marks the fields that may be left out)",
    )


def _essential(cell: ConnectorInCell) -> Seen:
    """local_only may not be left out: the caller gets an error, and nothing was sent."""
    uri = cell.mapping.uri("essential")
    staged = _stage(cell, uri)
    try:
        (reply,) = cell.client.exchange([CommitWrite(uri=uri, local_only=True, stage_id=staged.stage_id)])
    except LocalProtocolError as error:
        with cell.meeting.daemon.connect() as raw:
            state = raw.ask("get_write_status", uri=uri).get("sync_status")
        return (
            less(Verdict.REFUSES, str(error))
            if state == "STAGED"
            else Seen(Verdict.FAILS, f"{state}: {error}")
        )
    return checked(isinstance(reply, CommittedReply) and reply.sync_status == "LOCAL_ONLY", f"got {reply}")


def _stage(cell: ConnectorInCell, uri: str) -> StagedReply:
    (staged,) = cell.client.exchange([StageWrite(uri=uri, size_bytes=10)])
    assert isinstance(staged, StagedReply), staged
    return staged


CONNECTOR_BEHAVIOURS: dict[str, Callable[[ConnectorInCell], Seen]] = {
    "ping, status and devices": _ping,
    "store, look up and load": _store_and_load,
    "200 keys at once": _many_keys,
    "a lookup sees what others store and delete": _seen_at_once,
    "store another size under a key": _store_again,
    "what is stored is not written again": _stored_already,
    "delete": _delete,
    "a block without checksums is a miss": _unverifiable,
    "a damaged block is a miss, and is healed": _damaged,
    "a new field that may be left out": _droppable,
    "a new field that may not": _essential,
}

_NOT_OF_SEALS = (_unverifiable, _droppable, _essential)

SEALING_BEHAVIOURS: dict[str, Callable[[ConnectorInCell], Seen]] = {
    **{name: each for name, each in CONNECTOR_BEHAVIOURS.items() if each not in _NOT_OF_SEALS},
    "a block without checksums or seal is not loaded": _unsealed,
}
"""Of a connector that seals: it sends an old daemon no new field, so what comes of those is no matter."""
