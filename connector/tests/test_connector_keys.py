"""The mapping from keys to uris: frozen, injective, and made of plain ASCII."""

import hashlib
from urllib.parse import quote, unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercache_connector.keys import UriMapping
from hypercache_connector.prefixes import shared_up_to

# Frozen with version 1 of the mapping: lines are added, never edited.
GOLDEN = [
    ("ns", "m@00000001@0@abcdef", "hypercache://lmcache/v1/ns/m@00000001@0@abcdef"),
    (
        "llama-3.1-8b-rev2-bf16",
        "meta-llama/Llama-3.1-8B@01000001@0@00ff",
        "hypercache://lmcache/v1/llama-3.1-8b-rev2-bf16/meta-llama%2FLlama-3.1-8B@01000001@0@00ff",
    ),
    ("a/b", "c", "hypercache://lmcache/v1/a%2Fb/c"),
    ("a", "b/c", "hypercache://lmcache/v1/a/b%2Fc"),
    ("100%", "%41", "hypercache://lmcache/v1/100%25/%2541"),
    ("n", "m@0@0@00@salt with space", "hypercache://lmcache/v1/n/m@0@0@00@salt%20with%20space"),
    ("ü", "模型@0", "hypercache://lmcache/v1/%C3%BC/%E6%A8%A1%E5%9E%8B@0"),
    ("n", "", "hypercache://lmcache/v1/n/"),
    ("n", "\n\0\x7f~._-", "hypercache://lmcache/v1/n/%0A%00%7F~._-"),
    ("n", "\ud800", "hypercache://lmcache/v1/n/%ED%A0%80"),
    ("n", "k" * 8166, "hypercache://lmcache/v1/n/" + "k" * 8166),
    (
        "n",
        "k" * 8167,
        "hypercache://lmcache/v1-sha256/n/99d9820664a6f277d76293e91d3703aa408d8ed05bf77a8803494ceba63de66c",
    ),
]

any_text = st.text(st.characters(), max_size=60)  # lone surrogates too
awkward = st.text(st.sampled_from("a%/@2F5\0é\ud800"), max_size=8)


@pytest.mark.parametrize(("namespace", "key", "uri"), GOLDEN)
def test_golden_uris_never_change(namespace: str, key: str, uri: str) -> None:
    assert UriMapping(namespace).uri(key) == uri


@settings(max_examples=100)
@given(namespace=any_text, key=any_text)
def test_a_uri_gives_namespace_and_key_back(namespace: str, key: str) -> None:
    path = UriMapping(namespace).uri(key).removeprefix("hypercache://lmcache/v1/")
    first, second = path.split("/")
    assert unquote(first, errors="surrogatepass") == namespace
    assert unquote(second, errors="surrogatepass") == key


@settings(max_examples=500)
@given(st.tuples(awkward, awkward), st.tuples(awkward, awkward))
def test_two_keys_never_share_a_uri(one: tuple[str, str], other: tuple[str, str]) -> None:
    same = UriMapping(one[0]).uri(one[1]) == UriMapping(other[0]).uri(other[1])
    assert same == (one == other)


@settings(max_examples=100)
@given(any_text)
def test_the_fast_encoding_is_the_standard_one(key: str) -> None:
    expected = quote(key.encode("utf-8", "surrogatepass"), safe="@")
    assert UriMapping("n").uri(key) == f"hypercache://lmcache/v1/n/{expected}"


def test_a_key_too_long_for_a_uri_is_named_by_its_hash_and_stays_apart() -> None:
    mapping = UriMapping("n")
    long, longer = "k" * 9000, "k" * 9001
    digest = hashlib.sha256(long.encode()).hexdigest()
    assert mapping.uri(long) == f"hypercache://lmcache/v1-sha256/n/{digest}"
    assert mapping.uri(longer) != mapping.uri(long)
    assert mapping.uri(digest) != mapping.uri(long)
    assert UriMapping("o").uri(long) != mapping.uri(long)


def test_every_uri_fits_the_wire() -> None:
    mapping = UriMapping("\U0001f600" * 128)  # the longest namespace, encoded threefold
    for length in (1, 1000, 2000, 2210, 2300, 3000, 100_000):
        assert len(mapping.uri("é" * length)) <= 8192


batches = st.lists(
    st.one_of(any_text, awkward, st.text("0123456789abcdef@", max_size=8), st.just("k" * 8167)), max_size=6
)


@settings(max_examples=100)
@given(shared=any_text, keys=batches)
def test_a_batch_has_the_uris_of_its_keys(shared: str, keys: list[str]) -> None:
    mapping = UriMapping("n/s")
    whole = [shared + key for key in keys]
    uris = [mapping.uri(key) for key in whole]
    assert mapping.uris(whole) == uris
    assert mapping.encoded(whole) == [uri.encode() for uri in uris]


@pytest.mark.parametrize(
    "keys", [["a\nb", "c"], ["a", "\n"], [""], ["", "\n", ""], ["k" * 9000, "a"], ["\udc80"]]
)
def test_what_may_not_stay_in_a_key_is_encoded_among_many_as_alone(keys: list[str]) -> None:
    mapping = UriMapping("n")
    assert mapping.encoded(keys) == [mapping.uri(key).encode() for key in keys]


@settings(max_examples=100)
@given(st.lists(st.text("a@/é", max_size=6), max_size=6))
def test_what_keys_share_up_to_a_separator_is_taken_off_all_or_none(keys: list[str]) -> None:
    split = shared_up_to("@", keys)
    prefix = keys[0][: keys[0].find("@") + 1] if keys else ""
    if not prefix or not all(key.startswith(prefix) for key in keys):
        assert split is None
    else:
        assert split == (prefix, tuple(key[len(prefix) :] for key in keys))
