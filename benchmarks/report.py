"""From figures to what people read: tables of medians, ranges and ratios, and the record under docs/."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

OURS = "HyperCache"
FLOOR = "floor"
DEVICES_ALONE = "fio"
_PACKAGES = ("lmcache", "lmcache-rust-raw-block-io", "torch", "isal", "trio", "pydantic", "msgpack", "numpy")

Measured = Mapping[str, Mapping[str, Sequence[float]]]
"""By measure and by name."""

Figures = Mapping[str, Measured]
"""By storage."""


def tables(figures: Figures) -> str:
    """Markdown: a table per storage, with medians, ranges, and HyperCache's ratios to the better peer and to
    fio on the same devices."""
    return "\n\n".join(_table(storage, measures) for storage, measures in figures.items())


def _table(storage: str, measures: Measured) -> str:
    names = order(name for peers in measures.values() for name in peers)
    ratios = ["HyperCache by the better peer", *(["by fio"] if DEVICES_ALONE in names else [])]
    rows = [[storage, *names, *ratios], ["---", *["---:"] * (len(names) + len(ratios))]]
    for measure, peers in measures.items():
        cells = [_cell(peers.get(name)) for name in names]
        by = [_ratio(measure, peers), _by(median_of(peers, OURS), median_of(peers, DEVICES_ALONE))]
        rows.append([f"{measure} ({unit(measure)})", *cells, *by[: len(ratios)]])
    return "\n".join(map(row, rows))


def row(cells: Iterable[str]) -> str:
    """One of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def order(names: Iterable[str]) -> list[str]:
    """Each once: the floor, HyperCache, then the others."""
    return sorted(set(names), key=lambda name: (name != FLOOR, not name.startswith(OURS), name))


def is_time(measure: str) -> bool:
    """Whether less of it is better."""
    return measure.startswith("lookup")


def unit(measure: str) -> str:
    """What its figures are in."""
    if ", of alone" in measure:
        return "share"
    return "µs a key" if is_time(measure) else "GB/s"


def _cell(values: Sequence[float] | None) -> str:
    if not values:
        return "—"
    return f"**{_short(statistics.median(values))}** ({_short(min(values))}–{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def median_of(peers: Mapping[str, Sequence[float]], name: str) -> float | None:
    """The median of what was measured of one of them, if anything was."""
    return statistics.median(peers[name]) if peers.get(name) else None


def others(names: Iterable[str]) -> list[str]:
    """Those of LMCache's own adapters."""
    return [name for name in names if not name.startswith((OURS, FLOOR, DEVICES_ALONE))]


def best_of(
    measure: str, peers: Mapping[str, Sequence[float]], names: Collection[str]
) -> tuple[str, float] | None:
    """The name and the median of the best of these, if any was measured."""
    medians = {name: statistics.median(peers[name]) for name in names if peers.get(name)}
    if not medians:
        return None
    best = (min if is_time(measure) else max)(medians, key=lambda name: medians[name])
    return best, medians[best]


def _ratio(measure: str, peers: Mapping[str, Sequence[float]]) -> str:
    best = best_of(measure, peers, others(peers))
    if best is None:
        return "—"
    what = "time" if is_time(measure) else unit(measure) if unit(measure) == "share" else "rate"
    return f"{_by(median_of(peers, OURS), best[1])} of {best[0]}'s {what}"


def _by(ours: float | None, other: float | None) -> str:
    return f"**{ours / other:.2f}**" if ours and other else "—"


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
    """Write the raw figures to `folder`/`name`.json, and put `text` into its README.md."""
    raw = json.dumps(_rounded(report), indent=1, ensure_ascii=False)
    (folder / f"{name}.json").write_text(_one_line_lists(raw) + "\n")
    put_between_marks(folder / "README.md", "measured", text)


def put_between_marks(page: Path, what: str, text: str) -> None:
    """Replace what stands between the two marks of a page that say `what`."""
    begin, end = f"<!-- {what}: begin -->", f"<!-- {what}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


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
