"""A report for people (table, Markdown) and for programs (JSON, JUnit)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from textwrap import wrap
from typing import Any
from xml.etree import ElementTree as Xml

from ..printable import printable
from .shell import Exchange, Piece
from .suite import Outcome, Report, Result

Paint = Callable[[str, str], str]
"""Words in a colour, or as they are."""

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}
_WORDS = {
    Outcome.PASSED: ("ok", "green"),
    Outcome.FAILED: ("FAILED", "red"),
    Outcome.NOT_OFFERED: ("--", "dim"),
}
_WIDTH = 100
_SHOWN_BYTES = 600
_SHOWN_URIS = 8


def painted(colour: str, words: str) -> str:
    """The words in a colour of the terminal."""
    return f"\x1b[{_COLOURS[colour]}m{words}\x1b[0m"


def plain(_: str, words: str) -> str:
    """The words as they are."""
    return words


def _printable(text: str) -> str:
    return printable(text, kept="\n\t")


# -- table ---------------------------------------------------------------------------------------------


def as_table(report: Report, paint: Paint = plain) -> str:
    """One line for each check, then each failure at length, then the sum."""
    lines = [_headline(report), ""]
    lines += [_row(result, paint) for result in report.results]
    for result in report.results:
        if result.outcome is Outcome.FAILED:
            lines += ["", *_failure(result, paint)]
    lines += ["", *_left_behind(report, paint), _verdict(report, paint)]
    return "\n".join(lines) + "\n"


def _headline(report: Report) -> str:
    name = report.offer.daemon or "A daemon that does not tell its name"
    return _printable(f"{name} on {report.socket_path}, wire {report.offer.version}")


def _row(result: Result, paint: Paint) -> str:
    word, colour = _WORDS[result.outcome]
    if result.outcome is Outcome.FAILED and not result.check.required:
        word, colour = "failed", "yellow"
    reason = f"{result.outcome.value}: {result.reason}" if result.outcome is Outcome.NOT_OFFERED else ""
    tail = reason or (result.reason if result.outcome is Outcome.FAILED else "")
    return f"{paint(colour, f'{word:<7}')} {result.check.name:<28} {_short(_printable(tail))}".rstrip()


def _failure(result: Result, paint: Paint) -> Iterator[str]:
    yield f"{paint('bold', result.check.name)} failed{_not_required(result)}"
    for title, text in (
        ("checked", result.check.what),
        ("seen", result.reason),
        ("means", result.check.means),
    ):
        for number, line in enumerate(wrap(_printable(text), _WIDTH - 12)):
            yield f"  {title if number == 0 else '':<9} {line}"
    yield "  bytes     > sent, < received, with the number of the connection"
    yield from (f"            {line}" for line in exchange_lines(result.exchange))


def _not_required(result: Result) -> str:
    return "" if result.check.required else " (not required)"


def exchange_lines(exchange: Exchange) -> Iterator[str]:
    """What was exchanged, one line for each piece, with what is no ASCII escaped."""
    if not exchange.pieces:
        yield "(none)"
    for piece in exchange.pieces:
        yield f"{piece.connection} {'>' if piece.is_sent else '<'} {_escaped(piece, _SHOWN_BYTES)}"


def _escaped(piece: Piece, most: int) -> str:
    if piece.is_close:
        return "(closed)"
    shown = piece.data[:most]
    left = piece.size_bytes - len(shown)
    return _ascii(shown) + (f" … and {left} bytes more" if left else "")


def _ascii(data: bytes) -> str:
    return repr(data)[2:-1].replace("\\'", "'")


def _left_behind(report: Report, paint: Paint) -> Iterator[str]:
    if report.left_behind:
        yield from left_behind_lines(report.left_behind, paint)


def left_behind_lines(uris: Sequence[str], paint: Paint = plain) -> Iterator[str]:
    """What an operator must know of objects that could not be removed."""
    yield paint("yellow", "Could not be removed, and is left in the cache:")
    yield from (f"  {uri}" for uri in uris[:_SHOWN_URIS])
    if len(uris) > _SHOWN_URIS:
        yield f"  … and {len(uris) - _SHOWN_URIS} more"


def _verdict(report: Report, paint: Paint) -> str:
    passed, failed, absent = (report.count(outcome) for outcome in Outcome)
    sums = f"{passed} passed, {failed} failed, {absent} not offered."
    if report.conforms:
        return paint("green", f"The daemon conforms: {sums}")
    return paint("red", f"The daemon does not conform: {sums}")


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


# -- Markdown ------------------------------------------------------------------------------------------


def as_markdown(report: Report) -> str:
    """A heading, a table of all checks, and each failure at length."""
    lines = ["# Conformance", "", f"{_headline(report)}. {_verdict(report, plain)}", ""]
    lines += ["| check | since | required | result | |", "| --- | --- | --- | --- | --- |"]
    for result in report.results:
        check = result.check
        cells = [check.name, str(check.since), "yes" if check.required else "no", result.outcome.value]
        lines.append(f"| {' | '.join(cells)} | {_cell(result.reason)} |")
    for result in report.results:
        if result.outcome is Outcome.FAILED:
            lines += [
                "",
                f"## {result.check.name}{_not_required(result)}",
                "",
                f"Checked: {result.check.what}",
            ]
            lines += ["", f"Seen: {_cell(result.reason)}", "", f"Means: {result.check.means}", ""]
            # None of these lines ends the block: each begins with a number, or with a bracket.
            lines += ["```", *exchange_lines(result.exchange), "```"]
    lines += ["", *_left_behind(report, plain)] if report.left_behind else []
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return _printable(text).replace("|", "\\|").replace("\n", " ")


# -- JSON ----------------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """Everything, with the bytes escaped as in the table but up to the amount that is kept."""
    return (
        json.dumps(
            {
                "conforms": report.conforms,
                "socket": report.socket_path,
                "daemon": report.offer.daemon,
                "wire": str(report.offer.version),
                "features": sorted(report.offer.features),
                **{outcome.value.replace(" ", "_"): report.count(outcome) for outcome in Outcome},
                "left_behind": report.left_behind,
                "checks": [_as_object(result) for result in report.results],
            },
            indent=2,
        )
        + "\n"
    )


def _as_object(result: Result) -> dict[str, Any]:
    check = result.check
    found: dict[str, Any] = {
        "name": check.name,
        "since": str(check.since),
        "required": check.required,
        "outcome": result.outcome.value,
        "checked": check.what,
    }
    if result.reason:
        found["seen"] = result.reason
    if result.outcome is Outcome.FAILED:
        found["means"] = check.means
        found["exchange"] = [
            {
                "connection": piece.connection,
                "from": "client" if piece.is_sent else "daemon",
                "size_bytes": piece.size_bytes,
                "closed": piece.is_close,
                "bytes": _ascii(piece.data),
            }
            for piece in result.exchange.pieces
        ]
    return found


# -- JUnit ---------------------------------------------------------------------------------------------


def as_junit(report: Report) -> str:
    """JUnit's XML; what is not required and failed counts as skipped."""
    suite = Xml.Element(
        "testsuite",
        name="hypercache-compat",
        tests=str(len(report.results)),
        failures=str(sum(result.is_fatal for result in report.results)),
        errors="0",
        skipped=str(sum(not _is_decided(result) for result in report.results)),
    )
    for result in report.results:
        group = result.check.name.split(".")[0]
        case = Xml.SubElement(suite, "testcase", classname=f"hypercache.{group}", name=result.check.name)
        if result.is_fatal:
            failure = Xml.SubElement(case, "failure", message=_printable(result.reason))
            failure.text = _printable("\n".join(_failure(result, plain)))
        elif not _is_decided(result):
            reason = _printable(f"{result.outcome.value}: {result.reason}")
            skipped = Xml.SubElement(case, "skipped", message=reason)
            if result.outcome is Outcome.FAILED:
                skipped.text = _printable("\n".join(_failure(result, plain)))
    Xml.indent(suite)
    # In ASCII, so that it is whole whatever the terminal's or file's encoding is.
    whole: bytes = Xml.tostring(suite, "us-ascii", xml_declaration=True)
    return whole.decode() + "\n"


def _is_decided(result: Result) -> bool:
    return result.outcome is Outcome.PASSED or result.is_fatal
