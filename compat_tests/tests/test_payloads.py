"""Versioned payloads tell themselves whole, and nothing else for themselves."""

from __future__ import annotations

import pytest

from hypercache_compat.payloads import LEAST_VERSIONED_BYTES, MARK, MIB, version_in, versioned

SIZES = [LEAST_VERSIONED_BYTES, 4097, MIB, 2 * MIB + 13]


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_payload_says_which_version_it_is(size_bytes: int) -> None:
    data = versioned("a", 7, size_bytes)
    assert len(data) == size_bytes
    assert data.startswith(MARK)
    assert version_in("a", data) == 7
    assert version_in("a", bytearray(data)) == 7


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("where", [0, 10, 20, 24, -1])
def test_one_wrong_byte_anywhere_makes_it_none(size_bytes: int, where: int) -> None:
    damaged = bytearray(versioned("a", 7, size_bytes))
    damaged[where] ^= 1
    assert version_in("a", damaged) is None


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(versioned("b", 7, MIB), id="another's"),
        pytest.param(versioned("a", 7, MIB)[:-1], id="shorter"),
        pytest.param(versioned("a", 7, MIB)[:4096] + versioned("a", 8, MIB)[4096:], id="two versions mixed"),
        pytest.param(bytes(MIB), id="zeros"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_what_is_not_one_whole_version_of_that_name_is_none(wrong: bytes) -> None:
    assert version_in("a", wrong) is None
