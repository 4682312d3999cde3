"""Writes the tables and diagrams of docs/wire.md and docs/states.md from the protocol's own models.

    python docs/generate.py            write what changed
    python docs/generate.py --check    write nothing; fail where a document is stale

Only what lies between a `begin` and an `end` comment is written; the prose around it is kept.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from inspect import cleandoc
from pathlib import Path

from hypercache_protocol.batches import (
    FRAMED_REPLIES,
    Hello,
    HelloLimits,
    HelloReply,
    ItemError,
    LayoutColumns,
)
from hypercache_protocol.errors import ERROR_MEANINGS, ErrorCode
from hypercache_protocol.fields import Tier
from hypercache_protocol.layout import STATUS_CODES, TIER_CODES, Layout, pack_layouts
from hypercache_protocol.messages import (
    REPLIES,
    STATUS_ALIASES,
    STATUS_FREE,
    ChunkLocation,
    DeviceInfo,
    ErrorReply,
    Message,
    Reply,
    Request,
)
from hypercache_protocol.schema import FieldRow, field_rows
from hypercache_protocol.states import DIRTY, EVICTABLE, STATE_MEANINGS, TRANSITIONS, SyncStatus
from hypercache_protocol.versions import FEATURES, RELEASED

DOCS = Path(__file__).parent
DOCUMENTS = (DOCS / "wire.md", DOCS / "states.md")


def rendered(text: str) -> str:
    """The same document with each generated part as the models have it now."""
    parts = {name: make() for name, make in PARTS.items()}
    pattern = re.compile(r"(<!-- begin ([\w ]+):[^>]*-->\n).*?(<!-- end \2 -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}\n{parts[found[2]]}\n\n{found[3]}", text)


# -- tables --------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _field_table(model: type[Message]) -> str:
    rows = field_rows(model)
    if not rows:
        return "No fields."
    cells = [(f"`{row.name}`", _type(row), _default(row), str(row.since), _older(row, model)) for row in rows]
    return _table(("field", "type", "if absent", "since", "for an older peer"), cells)


def _type(row: FieldRow) -> str:
    return f"{row.kind}: {row.limits}" if row.limits else row.kind


def _default(row: FieldRow) -> str:
    if row.required:
        return "**required**"
    return "nothing said" if row.default is None else f"`{json.dumps(row.default)}`"


def _older(row: FieldRow, model: type[Message]) -> str:
    if row.since == model.since:
        return ""
    return "left out" if row.safe_to_drop else "the message is refused"


def _section(title: str, model: type[Message], *notes: str) -> str:
    return "\n\n".join([f"### {title}", cleandoc(model.__doc__ or ""), *notes, _field_table(model)])


# -- the parts -----------------------------------------------------------------------------------------


def _versions() -> str:
    rows = [(str(version), _code(sorted(FEATURES[version])) or "the first") for version in RELEASED]
    return _table(("version", "what it brought"), rows)


def _requests() -> str:
    return "\n\n".join(_section(_code([model.action]), model, _answers(model)) for model in REPLIES)


def _answers(request: type[Request]) -> str:
    words = _code([*(reply.status for reply in REPLIES[request]), ErrorReply.status])
    free = " The status word is not looked at, unless it is `ERROR`." if request in STATUS_FREE else ""
    return f"Answers: {words}.{free}"


def _replies() -> str:
    # One status word has other fields in answer to another request, so a heading names both.
    asked: dict[type[Reply], list[str]] = {}
    for request, replies in REPLIES.items():
        for reply in replies:
            asked.setdefault(reply, []).append(request.action)
    sections = [_reply(reply, actions) for reply, actions in asked.items()]
    return "\n\n".join([*sections, _section("`ERROR` to any request", ErrorReply)])


def _reply(reply: type[Reply], actions: list[str]) -> str:
    also = STATUS_ALIASES.get(reply, ())
    notes = [f"A client also takes the words {_code(also)} for it."] if also else []
    return _section(f"{_code([reply.status])} to {_code(actions)}", reply, *notes)


def _parts() -> str:
    return "\n\n".join(_section(_code([model.__name__]), model) for model in (ChunkLocation, DeviceInfo))


# -- wire 2 --------------------------------------------------------------------------------------------


def _hello() -> str:
    asked, answered = _code([Hello.action]), f"{_code([HelloReply.status])} to {_code([Hello.action])}"
    return "\n\n".join(
        [_section(asked, Hello), _section(answered, HelloReply), _section("`HelloLimits`", HelloLimits)]
    )


def _batches() -> str:
    sections = []
    for request, replies in FRAMED_REPLIES.items():
        sections.append(_section(_code([request.action]), request, _batch_answers(request)))
        sections += [_reply(reply, [request.action]) for reply in replies]
    parts = [_section(_code([model.__name__]), model) for model in (ItemError, LayoutColumns)]
    return "\n\n".join([*sections, *parts])


def _batch_answers(request: type[Request]) -> str:
    return f"Answers: {_code([*(reply.status for reply in FRAMED_REPLIES[request]), ErrorReply.status])}."


def _columns() -> str:
    """What each column holds as it is packed: three objects, five paths and seven chunks tell them apart."""
    each = {3: "object", 5: "path", 7: "chunk"}
    names = iter("abcdeaa")
    columns = pack_layouts([_layout(names, chunks) for chunks in (3, 2, 2)]).model_dump()
    rows = []
    for name, column in columns.items():
        if name == "paths":
            rows.append((f"`{name}`", "string", "path"))
        elif len(column) == 1:
            rows.append((f"`{name}`", "bit", "object"))
        else:
            count = next(count for count in each if len(column) % count == 0)
            rows.append((f"`{name}`", f"unsigned, {len(column) // count * 8} bits", each[count]))
    return _table(("column", "value", "one for each"), rows)


def _layout(names: Iterator[str], chunks: int) -> Layout:
    paths = [next(names) for _ in range(chunks)]
    return Layout(chunks, 1, SyncStatus.COMMITTED, Tier.NVME, paths, [0] * chunks, [1] * chunks, [0] * chunks)


def _column_codes() -> str:
    statuses = [("`sync_statuses`", str(code), f"`{status.value}`") for status, code in STATUS_CODES.items()]
    tiers = [("`path_tiers`", str(code), f"`{tier.value}`") for tier, code in TIER_CODES.items()]
    return _table(("column", "code", "meaning"), [*statuses, *tiers])


def _error_codes() -> str:
    return _table(("code", "meaning"), [(f"`{code.value}`", ERROR_MEANINGS[code]) for code in ErrorCode])


def _state_diagram() -> str:
    arrows = [
        f"    {before.value} --> {after.value}: {event.value}"
        for (before, event), after in TRANSITIONS.items()
    ]
    first, *_ = SyncStatus
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {first.value}", *arrows, "```"])


def _states() -> str:
    rows = [
        (f"`{state.value}`", STATE_MEANINGS[state], _yes(state in DIRTY), _yes(state in EVICTABLE))
        for state in SyncStatus
    ]
    return _table(("state", "meaning", "dirty", "evictable"), rows)


def _yes(value: bool) -> str:
    return "yes" if value else ""


def _transitions() -> str:
    rows = [
        (f"`{before.value}`", event.value, f"`{after.value}`")
        for (before, event), after in TRANSITIONS.items()
    ]
    return _table(("state", "event", "next state"), rows)


PARTS = {
    "versions": _versions,
    "requests": _requests,
    "replies": _replies,
    "parts": _parts,
    "hello": _hello,
    "batches": _batches,
    "columns": _columns,
    "column codes": _column_codes,
    "error codes": _error_codes,
    "state diagram": _state_diagram,
    "states": _states,
    "transitions": _transitions,
}


def main() -> int:
    """Write or check every document; 1 where one is stale and was only checked."""
    parser = argparse.ArgumentParser(description="Write the generated parts of the documents.")
    parser.add_argument("--check", action="store_true", help="write nothing and fail where one is stale")
    check = parser.parse_args().check
    stale = {path: rendered(path.read_text()) for path in DOCUMENTS}
    stale = {path: text for path, text in stale.items() if text != path.read_text()}
    for path, text in stale.items():
        print(f"{path.name} is stale" if check else f"{path.name} written")
        if not check:
            path.write_text(text)
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
