"""What texts begin with in common: a batch's keys and uris differ in their ends only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat


def shared_prefix(texts: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """What all of them begin with, and the rest of each."""
    cut = _shared_length(min(texts), max(texts)) if texts else 0
    return texts[0][:cut] if texts else "", tuple([text[cut:] for text in texts])


def shared_up_to(separator: str, texts: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """The first text up to its first `separator`, and the rest of each; None where not all begin with that.
    Found more quickly than by `shared_prefix`, though it may be shorter."""
    cut = texts[0].find(separator) + 1 if texts else 0
    if not cut:
        return None
    prefix = texts[0][:cut]
    rests = tuple(map(str.removeprefix, texts, repeat(prefix)))
    # Each that began with it is shorter by just that, and each other one is as it was.
    if len("".join(texts)) - len("".join(rests)) != cut * len(texts):
        return None
    return prefix, rests


def _shared_length(one: str, other: str) -> int:
    # By halves: os.path.commonprefix goes character by character, in Python.
    length, most = 0, min(len(one), len(other))
    while length < most:
        half = (length + most + 1) // 2
        if one.startswith(other[:half]):
            length = half
        else:
            most = half - 1
    return length
