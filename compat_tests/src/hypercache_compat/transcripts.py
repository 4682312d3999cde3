"""Whole conversations of released clients with the daemon, byte for byte: added to, never edited.

    python -m hypercache_compat.transcripts     record and freeze what is missing

Rules:
1. What the client sent is kept exactly. In what the daemon sent, the folders of this one run are written as
   /srv/hypercache and /dev/shm/hypercache; nothing else is touched.
2. A replay sends the client's bytes again, connection by connection and in the recorded order, and looks at
   each reply only where the client looked: those fields must be there, of the same type, and where they
   don't depend on the pool (a device, an offset, a wording) of the same value.
3. The daemon may be of any version. What it says beyond what was looked at is its own affair.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .daemon_process import DaemonProcess, running_daemon
from .golden import FOLDER, freeze
from .old_clients import old_client
from .payloads import MIB
from .raw_wire import RawConnection
from .relay import FROM_CLIENT, FROM_DAEMON, Noting, relaying
from .releases import OLD_CLIENT_VERSIONS
from .scenario_process import ScenarioProcess, running

SCENARIOS: dict[str, tuple[str, dict[str, Any]]] = {
    "every-method": ("client_calls.every_method", {"uri": "hypercache://transcript/every-method"}),
    "unknown-uri": ("client_calls.unknown_uri", {"uri": "hypercache://transcript/unknown"}),
    "life-of-an-object": (
        "client_calls.life_of_an_object",
        {"uri": "hypercache://transcript/life", "size_bytes": 9 * MIB + 1920, "tier": None},
    ),
    "life-in-ram": (
        "client_calls.life_of_an_object",
        {"uri": "hypercache://transcript/ram", "size_bytes": 70_001, "tier": "ram"},
    ),
    "overwrite": (
        "client_calls.replace_while_read",
        {"uri": "hypercache://transcript/replaced", "old_size": 3000, "new_size": 4 * MIB + 1},
    ),
    "pin": ("client_calls.pin_and_unpin", {"uri": "hypercache://transcript/pin", "size_bytes": 512}),
    "streamed-write": (
        "file_system.write_in_pieces",
        {"uri": "hypercache://transcript/streamed", "size_bytes": 9 * MIB + 13, "write_bytes": MIB},
    ),
    "overwrite-streamed": (
        "file_system.overwrite_committed",
        {"uri": "hypercache://transcript/over", "old_size": 5000, "new_size": 5 * MIB},
    ),
    "kv-block": ("kv_blocks.put_and_get", {"key": "transcript", "size_bytes": 70_001, "tier": "ram"}),
}
"""Name -> the scenario that is recorded, and its arguments."""


# -- recording -----------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """Lines that one side sent on one connection without a word of anybody in between."""

    connection: int
    side: str
    text: str


class _Recorder:
    """Everything that passes on all connections, in one order."""

    def __init__(self) -> None:
        self.turns: list[tuple[int, str, bytes]] = []
        self._lock = threading.Lock()

    def note(self, number: int, side: str, data: bytes) -> None:
        with self._lock:
            if self.turns and self.turns[-1][:2] == (number, side):
                data = self.turns.pop()[2] + data
            self.turns.append((number, side, data))


def record(client: ScenarioProcess, daemon: DaemonProcess, name: str) -> dict[str, Any]:
    """The conversation of `client` with `daemon` while it runs the scenario `name`."""
    scenario, arguments = SCENARIOS[name]
    recorder = _Recorder()
    path = str(daemon.folder / "r")
    with relaying(path, daemon.socket_path, partial(Noting, recorder.note)):
        client.call(scenario, socket_path=path, **arguments)
    turns = [
        Turn(number, side, _placeless(daemon, side, data.decode())) for number, side, data in recorder.turns
    ]
    return {"client": client.label, "scenario": scenario, "turns": [list(turn) for turn in turns]}


def _placeless(daemon: DaemonProcess, side: str, text: str) -> str:
    places = {str(daemon.ram_folder): "/dev/shm/hypercache", str(daemon.folder): "/srv/hypercache"}
    for folder, instead in places.items():
        if side == FROM_CLIENT and folder in text:
            raise ValueError(f"the client names a folder of the daemon: {text[:200]}")
        text = text.replace(folder, instead)
    return text


def file_name(version: str, name: str) -> str:
    """Where the transcript of one client and scenario lies, under compat_tests."""
    return f"transcripts/hypercache-io-{version}/{name}.json"


def record_missing(folder: Path = FOLDER) -> list[str]:
    """Record and freeze the transcripts that are not there yet; their names."""
    wanted = [
        (version, name)
        for version in OLD_CLIENT_VERSIONS
        for name in SCENARIOS
        if not (folder / file_name(version, name)).exists()
    ]
    made: dict[str, str] = {}
    with ExitStack() as stack:
        clients: dict[str, ScenarioProcess] = {}
        for version, name in wanted:
            if version not in clients:
                clients[version] = stack.enter_context(running(old_client(version)))
            with running_daemon() as daemon:
                transcript = record(clients[version], daemon, name)
            text = json.dumps(transcript, indent=1, ensure_ascii=False) + "\n"
            made[file_name(version, name)] = text
    return freeze(made, folder)


# -- what an old client looks at -----------------------------------------------------------------------

_CHUNK = ("device", "offset", "length", "tier")
_DEVICE = (
    "path",
    "is_nvme",
    "is_virtual",
    "is_partition",
    "is_rotational",
    "size_bytes",
    "model",
    "existing_fs",
    "numa_node",
)
_LAYOUT = ("status", "error_message", "object_size", "chunk_size", "chunk_layout")
_STAGED = (*_LAYOUT, "sync_status")

LOOKED_AT: dict[str, tuple[str, ...]] = {
    "ping": ("status",),
    "get_devices": ("devices",),
    "locate": _LAYOUT,
    "ingest": _LAYOUT,
    "pin": ("status",),
    "evict": ("status",),
    "purge": ("status",),
    "get_status": (),
    "stage_write": _STAGED,
    "append_write": _STAGED,
    "commit_write": ("status",),
    "get_write_status": ("sync_status", "sync_progress_percent"),
    "record_telemetry": ("status",),
}
"""Action -> the fields of its reply that the released clients read."""

INNER = {"chunk_layout": _CHUNK, "devices": _DEVICE}
"""Field -> the fields that they read of each item in it."""

_PLACES = frozenset({"device", "offset", "path", "size_bytes", "model", "existing_fs", "numa_node"})
_FREE = _PLACES | {"error_message"}
"""What another pool, machine or wording makes otherwise: only the type must be the same."""


def differences(action: str, recorded: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What a released client would read in `now` otherwise than in `recorded`, both replies to `action`."""
    yield from _fields_differ(action, LOOKED_AT[action], recorded, now)


def _fields_differ(
    where: str, names: tuple[str, ...], recorded: dict[str, Any], now: dict[str, Any]
) -> Iterator[str]:
    for name in names:
        place = f"{where}.{name}"
        if name not in recorded:
            continue  # it took its default then, and what is new must not be in its way: see the type
        if name not in now:
            yield f"{place} is gone"
        elif _kind(recorded[name]) != _kind(now[name]):
            yield f"{place} was {_kind(recorded[name])} and is {_kind(now[name])}"
        elif name in INNER:
            yield from _items_differ(place, INNER[name], recorded[name], now[name])
        elif name not in _FREE and recorded[name] != now[name]:
            yield f"{place} was {recorded[name]!r} and is {now[name]!r}"
    for name in sorted({*names} & now.keys() - recorded.keys()):
        yield f"{where}.{name} was not there and would be read as {now[name]!r}"


def _items_differ(
    where: str, names: tuple[str, ...], recorded: list[dict[str, Any]], now: list[dict[str, Any]]
) -> Iterator[str]:
    if len(recorded) != len(now):
        yield f"{where} had {len(recorded)} items and has {len(now)}"
        return
    for number, (then, one) in enumerate(zip(recorded, now, strict=True)):
        yield from _fields_differ(f"{where}[{number}]", names, then, one)


def _kind(value: Any) -> str:
    return "a number" if type(value) in (int, float) else type(value).__name__


# -- replaying -----------------------------------------------------------------------------------------


def replay(transcript: dict[str, Any], daemon: DaemonProcess) -> list[str]:
    """Say again what the client said; every difference that it would have read in the answers."""
    found: list[str] = []
    asked: dict[int, list[str]] = {}
    with ExitStack() as stack:
        connections: dict[int, RawConnection] = {}
        for turn in (Turn(*each) for each in transcript["turns"]):
            if turn.connection not in connections:
                connections[turn.connection] = stack.enter_context(daemon.connect())
            connection, lines = connections[turn.connection], turn.text.split("\n")[:-1]
            if turn.side == FROM_CLIENT:
                connection.send(turn.text.encode())
                asked.setdefault(turn.connection, []).extend(json.loads(line)["action"] for line in lines)
                continue
            assert turn.side == FROM_DAEMON
            for line in lines:
                action = asked[turn.connection].pop(0)
                found += differences(action, json.loads(line), connection.receive())
    return found


def main() -> int:
    """Record what is missing."""
    for name in record_missing():
        print(f"added {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
