"""What HyperCache aims at: ratios to others of the same run, and how near it came."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from report import DEVICES_ALONE, OURS, Figures, Measured, best_of, is_time, median_of, others, row

RAW_BLOCK = ("raw_block posix", "raw_block io_uring")


@dataclass(frozen=True)
class Aim:
    """At most so much of a time, at least so much of a rate; `of` the best of these, or of whichever of
    LMCache's adapters is best."""

    measure: str
    ratio: float
    of: Collection[str] | None = None


AIMS = (
    Aim("lookup, 64 keys, 64 in flight, hits", 0.5, RAW_BLOCK),
    Aim("lookup, 64 keys, 64 in flight, misses", 0.5, RAW_BLOCK),
    Aim("store, 256 KiB", 1.0),
    Aim("load, 256 KiB", 1.0),
    Aim("store, 14 MiB", 1.15, RAW_BLOCK),
    Aim("load, 14 MiB", 1.15, RAW_BLOCK),
    Aim("load, 14 MiB", 1.0, (DEVICES_ALONE,)),
)
"""Of lookups those that there are figures of an earlier connector of, in Rust. With one batch in flight the
floor alone takes most of raw_block's time."""
SHARES = {
    "load beside stores, of alone, 14 MiB": 0.8,
    "store beside loads, of alone, 14 MiB": 0.25,
}
"""What a direction is to keep of its own rate."""


def table(figures: Figures) -> str:
    """Markdown: what was aimed at on each storage, and what became of it; "" where nothing was measured."""
    rows = [each for storage, measures in figures.items() for each in _rows(storage, measures)]
    head = [row(["aimed at", "of", "aim", "here"]), row(["---", "---", "---:", "---:"])] if rows else []
    return "\n".join([*head, *rows])


def _rows(storage: str, measures: Measured) -> list[str]:
    if storage.startswith("disk"):  # what other programs do there decides more than who is measured
        return []
    return [*_ratios(measures), *_shares(measures)]


def _ratios(measures: Measured) -> list[str]:
    rows = []
    for aim in AIMS:
        peers = measures.get(aim.measure, {})
        best = best_of(aim.measure, peers, others(peers) if aim.of is None else aim.of)
        ours = median_of(peers, OURS)
        if best is not None and ours is not None:
            name, median = best
            word = "at most" if is_time(aim.measure) else "at least"
            rows.append(row([aim.measure, name, f"{word} {aim.ratio}", f"**{ours / median:.2f}**"]))
    return rows


def _shares(measures: Measured) -> list[str]:
    kept = {name: median_of(measures.get(name, {}), OURS) for name in SHARES}
    return [
        row([name, "itself", f"at least {SHARES[name]}", f"**{share:.2f}**"])
        for name, share in kept.items()
        if share is not None
    ]
