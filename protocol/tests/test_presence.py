"""The presence table's format and how it is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache_protocol.presence import (
    BUCKET_WORDS,
    HEADER_BYTES,
    VERIFIABLE,
    Geometry,
    Presence,
    TableView,
    places,
    words_of,
)

SMALL = Geometry(seed=7, buckets=4)


def table(geometry: Geometry = SMALL) -> TableView:
    return TableView(memoryview(bytearray(geometry.size_bytes)), geometry)


def test_the_words_and_places_of_format_1_are_frozen() -> None:
    """A daemon and a client of different releases must agree on them."""
    words = words_of([b"hypercache://lmcache/v1/ns/key", "ü".encode(), b""], seed=7)
    assert [f"{word:016x}" for word in words.tolist()] == [
        "fcae075d8b98de7f",
        "a63c71a4e9fcb645",
        "b87e9b3e87e03a91",
    ]
    assert places(words, 1 << 20).tolist() == [[814911, 940834, 7496], [919389, 815524, 957246]]
    assert (HEADER_BYTES, BUCKET_WORDS, SMALL.size_bytes) == (4096, 8, 4096 + 4 * 64)


@pytest.mark.parametrize("bucket", [0, 1])
@pytest.mark.parametrize("place", range(BUCKET_WORDS))
def test_a_word_is_found_in_every_place_of_both_its_buckets(bucket: int, place: int) -> None:
    view = table(Geometry(seed=1, buckets=1 << 10))
    (word,) = words_of([b"a"], 1)
    view.buckets[places(np.array([word]), 1 << 10)[bucket, 0], place] = word
    states = view.look_up([b"a", b"b"])
    assert states == [Presence.VERIFIABLE, Presence.ABSENT]
    assert set(map(type, states)) == {int}


def test_an_object_without_checksums_is_told_apart() -> None:
    view = table()
    words = words_of([b"a"], SMALL.seed)
    view.buckets[places(words, SMALL.buckets)[0, 0], 3] = words[0] & ~VERIFIABLE
    assert view.look_up([b"a"]) == [Presence.UNVERIFIABLE]


def test_a_word_in_a_bucket_that_is_not_its_own_is_not_found() -> None:
    view = table()
    words = words_of([b"a"], SMALL.seed)
    own = set(places(words, SMALL.buckets).ravel().tolist())
    for other in set(range(SMALL.buckets)) - own:
        view.buckets[other] = words[0]
    assert view.look_up([b"a"]) == [Presence.ABSENT]


@given(st.lists(st.text(st.characters(codec="utf-8")), max_size=20))
def test_an_empty_table_has_nothing(uris: list[str]) -> None:
    assert table().look_up([uri.encode() for uri in uris]) == [Presence.ABSENT] * len(uris)


@given(st.text(st.characters(codec="utf-8")), st.integers(0, (1 << 63) - 1))
def test_a_word_depends_on_the_seed_and_is_never_an_empty_place(uri: str, seed: int) -> None:
    (word,) = words_of([uri.encode()], seed).tolist()
    assert word >> 63 == 1
    assert word & 1 == 1
    assert word != words_of([uri.encode()], seed ^ 1).tolist()[0]


def test_how_many_found_no_place_is_the_first_number_of_the_header() -> None:
    view = table()
    view.header[0] = 3
    assert view.unplaced == 3


@pytest.mark.parametrize("buckets", [-1, 0, 3, 6, 1 << 32])
def test_a_table_has_a_power_of_two_of_buckets(buckets: int) -> None:
    with pytest.raises(ValueError, match=f"a power of two of buckets, not {buckets}"):
        Geometry(1, buckets)


@pytest.mark.parametrize("size_bytes", [0, SMALL.size_bytes - 1, SMALL.size_bytes + 8])
def test_memory_of_another_size_is_refused(size_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"the table has {size_bytes} bytes, not {SMALL.size_bytes}"):
        TableView(memoryview(bytes(size_bytes)), SMALL)
