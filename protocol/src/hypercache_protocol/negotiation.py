"""Which wire two sides go on in: pure functions over what the hello said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .versions import RELEASED, WIRE_1_0, WireVersion, features_of


def parsed(word: str) -> WireVersion | None:
    """The version that "2.0" names, or None where the word is no version."""
    major, dot, minor = word.partition(".")
    if not (dot and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()):
        return None
    return WireVersion(int(major), int(minor))


def choose(wanted: Iterable[str], most: WireVersion) -> WireVersion:
    """The best wire for a client that speaks `wanted`, of those that exist up to `most`.

    A client of the future that names none of ours gets the best that does not exceed its own: a newer
    minor or major understands what came before it.
    """
    known = [version for version in map(parsed, wanted) if version is not None]
    ours = [version for version in RELEASED if version <= most]
    common = [version for version in ours if version in known]
    below = [version for version in ours if known and version <= max(known)]
    return max(common or below or [WIRE_1_0])


def unknown_words(versions: Sequence[str], features: Sequence[str], most: WireVersion) -> tuple[str, ...]:
    """What a hello asked for that this side does not know, as it was written."""
    ours = {str(version) for version in RELEASED if version <= most}
    mine = features_of(most)
    return (
        *(word for word in versions if word not in ours),
        *(word for word in features if word not in mine),
    )


def spoken(most: WireVersion) -> tuple[str, ...]:
    """The versions up to `most`, as a hello names them."""
    return tuple(str(version) for version in RELEASED if version <= most)
