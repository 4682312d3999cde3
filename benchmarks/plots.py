"""Pictures of what was recorded last, from docs/benchmarks/latest.json: a file for each kind of measure.

    make plots       (brings matplotlib, which nothing else needs)

A bar is a median, its line the range of all rounds. The floor moves nothing, so it is there for
lookups only.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from report import DEVICES_ALONE, FLOOR, OURS, order, put_between_marks, unit
from storages import ROOT

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

FOLDER = ROOT / "docs" / "benchmarks"
COLUMNS = 2
OUR_COLOUR, FIO_COLOUR, PEER_COLOUR = "#1f6f8b", "#c8ccd0", "#8d99a6"

Peers = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Picture:
    """The measures of one storage that are of a kind, each in a field of its own."""

    file_name: str
    title: str
    in_memory: bool
    shows: Callable[[str], bool]
    with_floor: bool = False


def _alone(measure: str) -> bool:
    return measure.startswith(("store, ", "load, "))


PICTURES = (
    Picture("speed-in-memory", "Store and load: GB/s, more is better", True, _alone),
    Picture("speed-on-disk", "Store and load on the disk: GB/s, more is better", False, _alone),
    Picture(
        "lookups",
        "Lookup: µs a key, less is better",
        True,
        lambda measure: measure.startswith("lookup"),
        True,
    ),
    Picture(
        "loads-while-stores-run",
        "Both at once: the share of what each has alone",
        True,
        lambda measure: unit(measure) == "share",
    ),
)


def draw(picture: Picture, figures: Mapping[str, Mapping[str, Peers]]) -> Path | None:
    """Write the picture, and give its path; None where nothing of its kind was measured."""
    measures = {
        measure: {name: peers[name] for name in order(peers) if picture.with_floor or name != FLOOR}
        for storage, by_measure in figures.items()
        if storage.startswith("RAM") == picture.in_memory
        for measure, peers in by_measure.items()
        if picture.shows(measure)
    }
    if not measures:
        return None
    rows = -(-len(measures) // COLUMNS)
    most = max(len(peers) for peers in measures.values())
    size = (10, 0.7 + rows * (0.7 + 0.26 * most))
    figure, axes = plt.subplots(rows, COLUMNS, figsize=size, squeeze=False, layout="constrained")
    figure.suptitle(picture.title)
    for field in axes.flat[len(measures) :]:
        field.set_visible(False)
    for field, (measure, peers) in zip(axes.flat, measures.items(), strict=False):
        draw_field(field, measure, peers)
    path = FOLDER / f"{picture.file_name}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def draw_field(field: Axes, measure: str, peers: Peers) -> None:
    """A bar for each peer."""
    medians = [statistics.median(values) for values in peers.values()]
    below = [median - min(values) for median, values in zip(medians, peers.values(), strict=True)]
    above = [max(values) - median for median, values in zip(medians, peers.values(), strict=True)]
    field.barh(
        list(peers),
        medians,
        xerr=[below, above],
        color=[_colour(name) for name in peers],
        error_kw={"ecolor": "#333333", "elinewidth": 0.8, "capsize": 2},
    )
    for number, (name, median) in enumerate(zip(peers, medians, strict=True)):
        colour = "black" if _colour(name) == FIO_COLOUR else "white"
        field.annotate(f" {median:.3g}", (0, number), va="center", color=colour, fontsize=8)
    field.set_title(measure, fontsize=10, loc="left")
    field.invert_yaxis()  # the first one on top, as in the table
    field.set_xlim(left=0)
    field.tick_params(labelsize=8)
    field.spines[["top", "right"]].set_visible(False)


def _colour(name: str) -> str:
    if name.startswith(OURS):
        return OUR_COLOUR
    return FIO_COLOUR if name.startswith(DEVICES_ALONE) else PEER_COLOUR


def main() -> None:
    """Draw all that was recorded, and show it in the README."""
    plt.rcParams["svg.hashsalt"] = "hypercache"  # the same figures give the same file, so ids are not random
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    figures = json.loads((FOLDER / "latest.json").read_text())["adapters"]
    drawn = [(picture, draw(picture, figures)) for picture in PICTURES]
    links = [f"![{picture.title}]({path.name})" for picture, path in drawn if path]
    put_between_marks(FOLDER / "README.md", "pictures", "\n\n".join(links))
    for picture, path in drawn:
        print(f"{picture.title}: {path.relative_to(ROOT) if path else 'nothing of that kind was recorded'}")


if __name__ == "__main__":
    main()
