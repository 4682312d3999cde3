"""From figures to what people read: tables of medians, ranges and ratios, and the record under docs/."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OURS = "HyperCache"
FLOOR = "floor"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_PACKAGES = ("lmcache", "lmcache-rust-raw-block-io", "torch", "isal", "trio", "pydantic", "msgpack", "numpy")

Figures = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]


def tables(figures: Figures) -> str:
    """Markdown: a table per storage, with medians, ranges, and HyperCache's ratio to the better peer."""
    return "\n\n".join(_table(storage, measures) for storage, measures in figures.items())


def _table(storage: str, measures: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    names = list(dict.fromkeys(name for peers in measures.values() for name in peers))
    names.sort(key=lambda name: (name != FLOOR, not name.startswith(OURS), name))
    rows = [[storage, *names, "HyperCache by the better peer"], ["---", *["---:"] * (len(names) + 1)]]
    for measure, peers in measures.items():
        cells = [_cell(peers.get(name)) for name in names]
        rows.append([f"{measure} ({_unit(measure)})", *cells, _ratio(measure, peers)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _is_time(measure: str) -> bool:
    return measure.startswith("lookup")


def _unit(measure: str) -> str:
    return "µs a key" if _is_time(measure) else "GB/s"


def _cell(values: Sequence[float] | None) -> str:
    if not values:
        return "—"
    return f"**{_short(statistics.median(values))}** ({_short(min(values))}–{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def better_peer(measure: str, peers: Mapping[str, Sequence[float]]) -> tuple[str, float] | None:
    """The name and the median of the best of the others, if any was measured."""
    medians = {name: statistics.median(values) for name, values in peers.items() if values}
    others = {name: median for name, median in medians.items() if not name.startswith((OURS, FLOOR))}
    if not others:
        return None
    best = (min if _is_time(measure) else max)(others, key=lambda name: others[name])
    return best, others[best]


def ratio(measure: str, peers: Mapping[str, Sequence[float]]) -> float | None:
    """HyperCache's median by that of the better peer: time by time, or rate by rate."""
    best = better_peer(measure, peers)
    if best is None or not peers.get(OURS):
        return None
    return statistics.median(peers[OURS]) / best[1]


def _ratio(measure: str, peers: Mapping[str, Sequence[float]]) -> str:
    value, best = ratio(measure, peers), better_peer(measure, peers)
    if value is None or best is None:
        return "—"
    return f"**{value:.2f}** of {best[0]}'s {'time' if _is_time(measure) else 'rate'}"


# -- the machine -----------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def load_average() -> float:
    """How many tasks wanted the cores during the last minute."""
    return round(os.getloadavg()[0], 1)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# -- the record ------------------------------------------------------------------------------------------


def record(folder: Path, name: str, report: Mapping[str, Any], text: str) -> None:
    """Write the raw figures to `folder`/`name`.json, and put `text` into its README.md, between the marks."""
    raw = json.dumps(_rounded(report), indent=1, ensure_ascii=False)
    (folder / f"{name}.json").write_text(_one_line_lists(raw) + "\n")
    readme = folder / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.4g}")
        case Mapping():
            return {key: _rounded(each) for key, each in value.items()}
        case list() | tuple():
            return [_rounded(each) for each in value]
        case _:
            return value


def _one_line_lists(text: str) -> str:
    """Lists of numbers on one line each, so that people can read the file."""
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)
