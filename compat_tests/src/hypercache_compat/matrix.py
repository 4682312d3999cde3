"""Every client version with every daemon version: what works, what degrades, and what is refused.

    python -m hypercache_compat.matrix            run it, print it, and write docs/compatibility.md
    python -m hypercache_compat.matrix --check    run it, write nothing, fail where the document differs

Rules:
1. The table is made from what happened, never from what should.
2. Nothing in it depends on the machine, the time or the run.
3. A run in which anything fails writes nothing.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hypercache_protocol.versions import LATEST, RELEASED, WireVersion

from .matrix_cells import (
    DAEMONS,
    GREASED,
    Meeting,
    Seen,
    Verdict,
    grease_was_met,
    greased_meeting,
    meeting,
)
from .matrix_clients import CONNECTOR_BEHAVIOURS, OLD_BEHAVIOURS, SEALING_BEHAVIOURS, ConnectorInCell
from .matrix_table import document
from .old_clients import old_client
from .releases import OLD_CLIENT_VERSIONS
from .scenario_process import ScenarioProcess, running
from .stopping import stoppable

DOCUMENT = Path(__file__).parents[3] / "docs" / "compatibility.md"

OLDEST_FIRST = OLD_CLIENT_VERSIONS[::-1]


@dataclass(frozen=True)
class Cell:
    """One client with one daemon: each behaviour by name, and the wire that they spoke."""

    client: str
    daemon: str
    wire: str
    seen: dict[str, Seen]

    def failures(self) -> list[str]:
        """What went wrong, in sentences."""
        where = f"{self.client} with {self.daemon}"
        return [
            f"{where}: {name}: {one.said}" for name, one in self.seen.items() if one.verdict is Verdict.FAILS
        ]


def old_cell(version: str, client: ScenarioProcess, held: Meeting) -> Cell:
    """How a released client fares with this daemon."""
    name = _name(client.label, held.label)
    seen = {
        what: behaviour.seen(client, held, f"{name}/{number}")
        for number, (what, behaviour) in enumerate(OLD_BEHAVIOURS.items())
    }
    return Cell(f"hypercache-io {version}", held.label, "1.0", seen)


def connector_cell(wire: WireVersion, held: Meeting, *, seals: bool = False) -> Cell:
    """How the connector fares with this daemon when it speaks at most `wire`, and seals if told to."""
    client = f"connector, wire {wire}" + (", sealing" if seals else "")
    behaviours = SEALING_BEHAVIOURS if seals else CONNECTOR_BEHAVIOURS
    with ConnectorInCell(held, wire, _name(client, held.label), seals=seals) as cell:
        seen = {what: _seen(behaviour, cell) for what, behaviour in behaviours.items()}
        return Cell(client, held.label, cell.wire, seen)


def _seen(behaviour: Callable[[ConnectorInCell], Seen], cell: ConnectorInCell) -> Seen:
    try:
        return behaviour(cell)
    except Exception as error:  # noqa: BLE001 - boundary of a behaviour: whatever it raises is its verdict
        return Seen(Verdict.FAILS, f"{type(error).__name__}: {error}")


def _name(client: str, daemon: str) -> str:
    return f"{client}-{daemon}".replace(" ", "-").replace(",", "")


def run() -> list[Cell]:
    """Every cell, column by column."""
    with ExitStack() as stack:
        return cells_of(
            {version: stack.enter_context(running(old_client(version))) for version in OLDEST_FIRST}
        )


def cells_of(clients: dict[str, ScenarioProcess]) -> list[Cell]:
    """Every cell, with these processes of the released clients by version, the oldest first."""
    return [cell for label in DAEMONS for cell in _columns(label, clients)]


def _columns(label: str, clients: dict[str, ScenarioProcess]) -> Iterator[Cell]:
    with meeting(label) as held:
        yield from column(held, clients)
        if label == next(iter(DAEMONS)):
            with greased_meeting(held) as (greasy, passages):
                cells = list(column(greasy, clients))
            yield from cells
            # Where grease is not borne there may be no frames; the cells say so better.
            if not grease_was_met(passages) and not any(cell.failures() for cell in cells):
                raise RuntimeError("not every wire was greased: the relay was not in between")


def column(held: Meeting, clients: dict[str, ScenarioProcess]) -> Iterator[Cell]:
    """Every client with this daemon."""
    for version, client in clients.items():
        yield old_cell(version, client, held)
    for wire in RELEASED:
        yield connector_cell(wire, held)
    yield connector_cell(LATEST, held, seals=True)


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write or check; 1 where something failed or the document differs."""
    parser = argparse.ArgumentParser(prog="python -m hypercache_compat.matrix", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the document differs")
    check = parser.parse_args(arguments).check
    cells = run()
    failures = [failure for cell in cells for failure in cell.failures()]
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if failures:
        return 1
    text = document(cells, [*DAEMONS, GREASED])
    print(text, end="")
    if check:
        return report_difference(text)
    DOCUMENT.write_text(text, encoding="utf-8")
    return 0


def report_difference(text: str) -> int:
    """0 where the checked-in document is `text`; else 1, and the difference is printed."""
    held = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    for line in difflib.unified_diff(
        held.splitlines(), text.splitlines(), "checked in", "this run", lineterm=""
    ):
        print(line, file=sys.stderr)
    return int(held != text)


if __name__ == "__main__":
    sys.exit(stoppable(main))
