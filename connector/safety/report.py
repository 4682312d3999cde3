"""What the run prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from .check import Check
from .scene import Cell

Results = Mapping[tuple[Check, Cell], str]
"""The sentence of what failed, "" where it passed."""

_GREEN, _RED, _PLAIN = "\033[32m", "\033[31m", "\033[0m"


def has_colours() -> bool:
    """Whether this goes to somebody's terminal."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def words(passed: bool, colours: bool) -> str:
    """One field of the table."""
    word = "passed" if passed else "FAILED"
    return f"{_GREEN if passed else _RED}{word}{_PLAIN}" if colours else word


def table(checks: Sequence[Check], cells: Sequence[Cell], results: Results, *, colours: bool) -> str:
    """A line for each check and a column for each cell, then a sentence for each that failed."""
    width = max(len(check.name) for check in checks)
    heads = [_columns([f"{part:8}" for part in parts], width, name) for name, *parts in _heads(cells)]
    lines = [
        _columns([words(not results[check, cell], colours) + "  " for cell in cells], width, check.name)
        for check in checks
    ]
    return "\n".join([*heads, *lines, *_sentences(checks, cells, results)])


def _heads(cells: Sequence[Cell]) -> list[list[str]]:
    return [
        ["LMCache", *(cell.lmcache for cell in cells)],
        ["devices", *(str(cell.devices) for cell in cells)],
        ["tier", *(cell.tier for cell in cells)],
    ]


def _columns(fields: Sequence[str], width: int, name: str) -> str:
    return f"{name:{width}}  {''.join(fields)}".rstrip()


def _sentences(checks: Sequence[Check], cells: Sequence[Cell], results: Results) -> list[str]:
    return [
        f"\n{check.name} ({cell}): {results[check, cell]}"
        for check in checks
        for cell in cells
        if results[check, cell]
    ]


def markdown(checks: Sequence[Check]) -> str:
    """The table of docs/safety.md."""
    rows = ["| check | theme | what it proves |", "| --- | --- | --- |"]
    rows += [f"| `{check.name}` | {check.theme} | {check.proves} |" for check in checks]
    return "\n".join(rows)
