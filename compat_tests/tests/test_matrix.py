"""Every client with every daemon, as docs/compatibility.md has it; and what makes a cell red."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import msgpack
import pytest

import hypercache_connector.client
from hypercache_compat import matrix
from hypercache_compat.grease import FEATURE, FIELDS, VERSION, Greased
from hypercache_compat.matrix import Cell
from hypercache_compat.matrix_cells import (
    DAEMONS,
    GREASED,
    WHOLE,
    Meeting,
    Seen,
    Verdict,
    grease_was_met,
    less,
    meeting,
)
from hypercache_compat.matrix_clients import (
    CONNECTOR_BEHAVIOURS,
    OLD_BEHAVIOURS,
    SEALING_BEHAVIOURS,
    ConnectorInCell,
)
from hypercache_compat.matrix_table import document
from hypercache_compat.relay import FROM_CLIENT, FROM_DAEMON, relaying
from hypercache_compat.releases import OLD_CLIENT_VERSIONS
from hypercache_compat.scenario_process import ScenarioProcess
from hypercache_connector.outcomes import ThrottledLog, logger
from hypercache_protocol.versions import LATEST, RELEASED, WIRE_1_1, WIRE_2_0

pytestmark = pytest.mark.timeout(600)

OLD = [f"hypercache-io {version}" for version in OLD_CLIENT_VERSIONS]
CONNECTORS = [f"connector, wire {version}" for version in RELEASED]
SEALING = f"connector, wire {LATEST}, sealing"
BEHAVIOURS = {
    **dict.fromkeys(OLD, OLD_BEHAVIOURS),
    **dict.fromkeys(CONNECTORS, CONNECTOR_BEHAVIOURS),
    SEALING: SEALING_BEHAVIOURS,
}
COLUMNS = [*DAEMONS, GREASED]


@pytest.fixture(scope="module")
def cells(old_clients: dict[str, ScenarioProcess]) -> dict[tuple[str, str], Cell]:
    """The whole run, by client and daemon."""
    clients = {version: old_clients[version] for version in matrix.OLDEST_FIRST}
    return {(cell.client, cell.daemon): cell for cell in matrix.cells_of(clients)}


def words(cell: Cell) -> dict[str, str]:
    return {name: seen.verdict.value for name, seen in cell.seen.items()}


def test_every_client_meets_every_daemon_and_nothing_fails(cells: dict[tuple[str, str], Cell]) -> None:
    assert cells.keys() == {(client, daemon) for client in BEHAVIOURS for daemon in COLUMNS}
    assert [failure for cell in cells.values() for failure in cell.failures()] == []
    for (client, _), cell in cells.items():
        assert cell.seen.keys() == BEHAVIOURS[client].keys()


def test_the_document_is_what_this_run_gives(cells: dict[tuple[str, str], Cell]) -> None:
    written = matrix.DOCUMENT.read_text(encoding="utf-8")
    assert written == document(list(cells.values()), COLUMNS), "run: make matrix"


@pytest.mark.parametrize("client", OLD)
def test_a_released_client_finds_nothing_missing_anywhere(
    cells: dict[tuple[str, str], Cell], client: str
) -> None:
    for daemon in COLUMNS:
        assert set(words(cells[client, daemon]).values()) == {"works"}


ALL_WORKS = dict.fromkeys(CONNECTOR_BEHAVIOURS, "works")
WITHOUT_1_1 = {
    "ping, status and devices": "works",
    "store, look up and load": "degrades",
    "200 keys at once": "degrades",
    "a lookup sees what others store and delete": "degrades",
    "store another size under a key": "degrades",
    "what is stored is not written again": "degrades",
    "delete": "works",
    "a block without checksums is a miss": "works",
    "a damaged block is a miss, and is healed": "degrades",
    "a new field that may be left out": "degrades",
    "a new field that may not": "refuses",
}


@pytest.mark.parametrize("wire", RELEASED, ids=str)
@pytest.mark.parametrize("daemon", COLUMNS)
def test_the_connector_speaks_the_best_of_both_and_needs_1_1(
    cells: dict[tuple[str, str], Cell], wire: tuple[int, int], daemon: str
) -> None:
    held_to = DAEMONS.get(daemon, LATEST)
    cell = cells[f"connector, wire {wire}", daemon]
    best = min(wire, held_to)
    assert cell.wire == str(best)
    assert words(cell) == (ALL_WORKS if best >= WIRE_1_1 else WITHOUT_1_1)


@pytest.mark.parametrize("daemon", COLUMNS)
def test_a_connector_that_seals_works_everywhere(cells: dict[tuple[str, str], Cell], daemon: str) -> None:
    cell = cells[SEALING, daemon]
    assert cell.wire == str(DAEMONS.get(daemon, LATEST))
    assert set(words(cell).values()) == {"works"}


# -- red -----------------------------------------------------------------------------------------------


class Changed:
    """A relay's passage that puts other words into the daemon's mouth."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        self._change = change

    def passed(self, side: str, data: bytes) -> bytes:
        return self._change(data) if side == FROM_DAEMON else data


@contextmanager
def changed(held: Meeting, change: Callable[[bytes], bytes]) -> Iterator[Meeting]:
    path = str(held.daemon.folder / "changed")
    with relaying(path, held.path, lambda number: Changed(change)):
        yield Meeting("changed", held.daemon, path)


@pytest.fixture(scope="module")
def whole() -> Iterator[Meeting]:
    with meeting(WHOLE) as held:
        yield held


@pytest.fixture(scope="module")
def first() -> Iterator[Meeting]:
    with meeting("daemon held to 1.0") as held:
        yield held


@pytest.mark.parametrize(
    ("word", "instead", "failing"),
    [
        (b'"PONG"', b'"PING"', {"ping", "pin and unpin"}),
        (b'"EVICTED"', b'"GONE"', {"evict"}),
        (
            b'"sync_status"',
            b'"sync_state_"',
            {"write, commit and read on NVMe", "write, commit and read in RAM"},
        ),
    ],
)
def test_a_word_that_changed_makes_an_old_cell_red(
    old: ScenarioProcess, whole: Meeting, word: bytes, instead: bytes, failing: set[str]
) -> None:
    with changed(whole, lambda data: data.replace(word, instead)) as held:
        cell = matrix.old_cell("it", old, held)
    red = {name for name, seen in cell.seen.items() if seen.verdict is Verdict.FAILS}
    assert failing <= red
    assert len(cell.failures()) == len(red)


def test_a_connector_that_loads_nothing_from_a_daemon_that_could_is_red(whole: Meeting) -> None:
    with changed(whole, lambda data: data.replace(b'"checksum"', b'"check_sum"')) as held:
        cell = matrix.connector_cell(WIRE_1_1, held)
    assert words(cell)["store, look up and load"] == "FAILS"


@pytest.mark.parametrize(
    "said", ["the daemon is too old", "the daemon speaks wire 1.0", "wire 1.1, wire 1.1"]
)
def test_a_reason_that_does_not_name_both_versions_is_red(
    first: Meeting, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr(hypercache_connector.client, "what_is_missing", lambda *_: said)
    cell = matrix.connector_cell(WIRE_2_0, first)
    assert words(cell)["store, look up and load"] == "FAILS"
    assert said in cell.failures()[0]


def test_a_miss_that_nobody_explains_is_red(first: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConnectorInCell, "warnings", lambda self: [])
    cell = matrix.connector_cell(WIRE_2_0, first)
    assert "logged 0 lines" in cell.seen["store, look up and load"].said
    assert words(cell)["store, look up and load"] == "FAILS"


def test_a_reason_that_is_repeated_within_a_minute_is_red(
    first: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThrottledLog, "note", lambda _, __, text, *values: logger.warning(text, *values))
    with ConnectorInCell(first, WIRE_2_0, "repeated") as cell:
        seen = CONNECTOR_BEHAVIOURS["store, look up and load"](cell)
    assert "lines within a minute" in seen.said
    assert seen.verdict is Verdict.FAILS


def test_a_behaviour_that_raises_is_red_and_the_others_are_run(
    whole: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ConnectorInCell, "deleted", lambda self, keys: int("seven"))
    cell = matrix.connector_cell(WIRE_1_1, whole)
    assert cell.seen["delete"] == Seen(
        Verdict.FAILS, "ValueError: invalid literal for int() with base 10: 'seven'"
    )
    assert words(cell)["a new field that may not"] == "works"


def test_a_wrong_byte_that_is_called_right_is_red(whole: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = count(1)  # nothing that is loaded is what the cell then compares it with
    monkeypatch.setattr(
        "hypercache_compat.matrix_clients.payload", lambda name, size: bytes([next(fresh) % 251]) * size
    )
    cell = matrix.connector_cell(WIRE_2_0, whole)
    assert cell.seen["store, look up and load"].said.startswith("WrongBytes: a load of chunk-1 gave wrong")


def test_a_seal_that_is_not_looked_at_is_red(first: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypercache_connector.sealed_objects.unseal", lambda *_: True)
    cell = matrix.connector_cell(WIRE_2_0, first, seals=True)
    assert cell.seen["a damaged block is a miss, and is healed"].said.startswith("WrongBytes: a load of")


def test_less_than_all_needs_two_versions() -> None:
    assert less(Verdict.REFUSES, "needs wire 1.1, speaks wire 1.0").verdict is Verdict.REFUSES
    assert less(Verdict.REFUSES, "needs wire 1.1").verdict is Verdict.FAILS


def test_a_document_that_differs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "DOCUMENT", tmp_path / "compatibility.md")
    cells = [Cell("c", "d", "1.0", {"ping": Seen(Verdict.WORKS)})]
    monkeypatch.setattr(matrix, "run", lambda: cells)
    monkeypatch.setattr(matrix, "DAEMONS", {"d": "1.0"})
    monkeypatch.setattr(matrix, "GREASED", "d")
    assert matrix.main(["--check"]) == 1
    assert matrix.main([]) == matrix.main(["--check"]) == 0
    cells[0].seen["ping"] = less(Verdict.DEGRADES, "wire 1.0, wire 1.1")
    assert matrix.main(["--check"]) == 1
    assert "+| ping | degrades [1] |" in capsys.readouterr().err
    cells[0].seen["ping"] = Seen(Verdict.FAILS, "no answer")
    before = matrix.DOCUMENT.read_bytes()
    assert matrix.main([]) == 1
    assert "FAILED: c with d: ping: no answer" in capsys.readouterr().err
    assert matrix.DOCUMENT.read_bytes() == before


# -- grease --------------------------------------------------------------------------------------------


def in_pieces(greased: Greased, side: str, data: bytes) -> bytes:
    return b"".join(greased.passed(side, data[at : at + 1]) for at in range(len(data)))


def test_grease_is_in_every_map_of_every_message_however_it_is_cut() -> None:
    greased = Greased()
    line = in_pieces(
        greased, FROM_DAEMON, b'{"status":"HIT","chunk_layout":[{"offset":0}],"features":["a"]}\n'
    )
    assert json.loads(line) == {
        "status": "HIT",
        "chunk_layout": [{"offset": 0, **FIELDS}],
        "features": ["a", FEATURE],
        **FIELDS,
    }
    hello = json.loads(in_pieces(greased, FROM_CLIENT, b'{"action":"hello","versions":["2.0"]}\n'))
    assert hello["versions"] == ["2.0", VERSION]
    assert not greased.framed
    in_pieces(greased, FROM_DAEMON, b'{"status":"HELLO","version":"2.0"}\n')
    assert greased.framed
    body = msgpack.packb([1, "locate_many", {"prefix": "p", "suffixes": ["a"]}])
    frame = in_pieces(greased, FROM_CLIENT, (len(body).to_bytes(4, "big") + body) * 2)
    size = int.from_bytes(frame[:4], "big")
    assert len(frame) == 2 * (4 + size)
    assert msgpack.unpackb(frame[4 : 4 + size]) == [
        1,
        "locate_many",
        {"prefix": "p", "suffixes": ["a"], **FIELDS},
    ]
    assert greased.greased == {FROM_CLIENT: 3, FROM_DAEMON: 2}


def passage(*, framed: bool, client: int = 1, daemon: int = 1) -> Greased:
    """What watched a connection on which so many messages of each side were added to."""
    one = Greased()
    one.framed, one.greased = framed, {FROM_CLIENT: client, FROM_DAEMON: daemon}
    return one


@pytest.mark.parametrize("framed", [True, False])
def test_a_wire_or_a_side_without_grease_is_told(framed: bool) -> None:
    other = passage(framed=not framed)
    assert grease_was_met([passage(framed=framed), other])
    assert not grease_was_met([other])
    assert not grease_was_met([passage(framed=framed, client=0), other])
    assert not grease_was_met([passage(framed=framed, daemon=0), other])
