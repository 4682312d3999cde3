"""The matrix as a document: one table of clients and daemons, one of behaviours for each client, and every
sentence that a client said where not all of it worked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .matrix_cells import Seen, Verdict

if TYPE_CHECKING:
    from .matrix import Cell

_INTRODUCTION = """\
# Which client works with which daemon

Written by `make matrix` from what happened when every client met every daemon; CI runs it again and fails
where this file differs. Do not edit it.

- Clients: hypercache-io as it was released, unchanged, and the connector held to each wire (its parameter
  `wire`); once more where it seals its objects for old daemons (`seal_for_old_daemons`).
- Daemons: `hypercached`, the same held to an older wire (`--wire`: it then knows no field and no action of a
  later one), and the same behind a relay that adds unknown fields and features to every message, both ways,
  on JSON lines and in frames.
- *works*: all of it, every byte compared. *degrades*: less than all, *refuses*: an error to the caller; the
  note says why and names both versions. A connector says it in its log, once a minute at most, and counts it.
- The wire in a cell is the one that both sides agreed on.
"""

_CONSEQUENCES = """\
Without wire 1.1 on both sides the connector cannot know that a block is right. It then stores nothing, and
every lookup and load is a miss, counted as `daemon_too_old` in `status()`. With `seal_for_old_daemons` each
object carries its own checksums there, and a load counts only where these fit; a lookup may say yes to what
turns out not to be sealed (connector/README.md says what else differs).
"""


def document(cells: Sequence[Cell], daemons: Sequence[str]) -> str:
    """The whole text."""
    notes = _Notes()
    by_client: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        by_client.setdefault(cell.client, {})[cell.daemon] = cell
    rows = [
        [client, *(_summary(held[daemon], notes) for daemon in daemons)] for client, held in by_client.items()
    ]
    parts = [_INTRODUCTION, "## In one table", _table(["client", *daemons], rows), _CONSEQUENCES]
    for client, held in by_client.items():
        parts += [f"## {client}", _table(["", *daemons], _behaviours(held, daemons, notes))]
    parts += ["## Notes", notes.text()]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


class _Notes:
    """Sentences, numbered as they first come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, said: str) -> str:
        return f"[{self._numbers.setdefault(said, len(self._numbers) + 1)}]"

    def text(self) -> str:
        return "\n".join(f"{number}. {said}" for said, number in self._numbers.items())


def _summary(cell: Cell, notes: _Notes) -> str:
    """The worst first: what degrades, what is refused, and else that it works; and over which wire."""
    words = []
    for verdict in (Verdict.DEGRADES, Verdict.REFUSES):
        said = dict.fromkeys(one.said for one in cell.seen.values() if one.verdict is verdict)
        if said:
            words.append(" ".join([verdict.value, *(notes.mark(each) for each in said)]))
    return f"{'; '.join(words) or Verdict.WORKS.value}, wire {cell.wire}"


def _behaviours(held: dict[str, Cell], daemons: Sequence[str], notes: _Notes) -> Iterable[list[str]]:
    for name in next(iter(held.values())).seen:
        yield [name, *(_word(held[daemon].seen[name], notes) for daemon in daemons)]


def _word(seen: Seen, notes: _Notes) -> str:
    return f"{seen.verdict.value} {notes.mark(seen.said)}" if seen.said else seen.verdict.value


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
