"""The superblock: its bytes for ever, what damage does, and which sets of devices are one pool."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercache_daemon.access import DeviceError
from hypercache_daemon.superblock import (
    SUPERBLOCK_BYTES,
    Found,
    State,
    Superblock,
    check_pool,
    decode,
    encode,
    is_unused,
)

POOL, OTHER = "00112233445566778899aabbccddeeff", "ff" * 16
SIZE = 20 << 20

# Version 1 as it was released: never edit these bytes; a new version gets new ones beside them.
GOLDEN_FIELDS = bytes.fromhex(
    "894843504f4f4c0a"  # magic
    "01000000"  # version 1
    "02000000"  # READY
    "00112233445566778899aabbccddeeff"  # pool
    "0123456789abcdef0123456789abcdef"  # device
    "01000000"  # index 1
    "04000000"  # of 4
    "0000400100000000"  # 20 MiB
)
GOLDEN_CRC = bytes.fromhex("94fef486")
GOLDEN = GOLDEN_FIELDS.ljust(SUPERBLOCK_BYTES - 4, b"\0") + GOLDEN_CRC
GOLDEN_BLOCK = Superblock(POOL, "0123456789abcdef0123456789abcdef", 1, 4, SIZE, State.READY)

uuids = st.binary(min_size=16, max_size=16).map(bytes.hex)
blocks = st.builds(
    Superblock,
    pool_id=uuids,
    device_id=uuids,
    index=st.integers(0, 2**32 - 1),
    count=st.integers(0, 2**32 - 1),
    size_bytes=st.integers(0, 2**64 - 1),
    state=st.sampled_from(State),
)


def pool(count: int = 3, pool_id: str = POOL, state: State = State.READY) -> list[Found]:
    return [
        Found(f"/dev/d{i}", SIZE, Superblock(pool_id, f"{i:032x}", i, count, SIZE, state))
        for i in range(count)
    ]


def blank(path: str) -> Found:
    return Found(path, SIZE, None)


def test_version_1_is_read_and_written_as_it_was_released() -> None:
    assert decode(GOLDEN, "/dev/x") == GOLDEN_BLOCK
    assert encode(GOLDEN_BLOCK) == GOLDEN


@settings(max_examples=100)
@given(block=blocks)
def test_every_superblock_comes_back_as_it_was_written(block: Superblock) -> None:
    assert decode(encode(block), "/dev/x") == block


@settings(max_examples=100)
@given(position=st.integers(0, SUPERBLOCK_BYTES - 1), change=st.integers(1, 255))
def test_no_damaged_byte_goes_unnoticed(position: int, change: int) -> None:
    damaged = bytearray(GOLDEN)
    damaged[position] ^= change
    if position < 8:  # no magic: somebody else's data, which is refused as such
        assert decode(bytes(damaged), "/dev/x") is None
    else:
        with pytest.raises(DeviceError, match=r"/dev/x.*--format"):
            decode(bytes(damaged), "/dev/x")


@pytest.mark.parametrize("kept", [512, 1024, 2048, 4092])
def test_a_torn_write_is_refused(kept: int) -> None:
    torn = GOLDEN[:kept] + b"\xa5" * (SUPERBLOCK_BYTES - kept)
    with pytest.raises(DeviceError, match=r"superblock of /dev/x is damaged.*--format"):
        decode(torn, "/dev/x")


def test_a_newer_version_is_refused_and_not_called_damaged() -> None:
    body = GOLDEN[:8] + struct.pack("<I", 2) + GOLDEN[12:-4]
    for checksum in (zlib.crc32(body), 0):  # a newer version may sum up in another way
        with pytest.raises(DeviceError, match=r"/dev/x was formatted by a newer hypercached.*version 2"):
            decode(body + struct.pack("<I", checksum), "/dev/x")


@pytest.mark.parametrize(("at", "value"), [(8, 0), (12, 3)], ids=["version 0", "state 3"])
def test_a_sound_checksum_over_nonsense_is_refused(at: int, value: int) -> None:
    body = bytearray(GOLDEN[:-4])
    struct.pack_into("<I", body, at, value)
    with pytest.raises(DeviceError, match=r"superblock of /dev/x makes no sense"):
        decode(bytes(body) + struct.pack("<I", zlib.crc32(body)), "/dev/x")


@pytest.mark.parametrize("front", [bytes(4096), b"\x89HCPOOL\r".ljust(4096, b"x")], ids=["blank", "foreign"])
def test_what_is_not_ours_is_none(front: bytes) -> None:
    assert decode(front, "/dev/x") is None


def test_a_whole_pool_in_order_passes() -> None:
    check_pool(pool())


def wrong_sets() -> dict[str, tuple[list[Found], str]]:
    a, b, c = pool()
    stranger = pool(pool_id=OTHER)[1]
    assert b.block is not None
    return {
        "blank": ([a, blank("/dev/new"), c], r"/dev/new is blank, while /dev/d0 belongs to a pool.*--format"),
        "stranger": ([a, stranger, c], r"/dev/d1 belongs to pool f+, but /dev/d0 to pool 0011.*--format"),
        "copy": ([a, b, replace(b, path="/dev/copy")], r"/dev/copy is a copy of /dev/d1"),
        "missing": ([a, c], r"pool of /dev/d0 has 3 devices and number 1 of it is missing"),
        "swapped": ([a, c, b], r"/dev/d2 is device 2 .*in place 1.*order: /dev/d0, /dev/d1, /dev/d2$"),
        "shrunk": ([a, replace(b, size_bytes=SIZE // 2), c], r"/dev/d1 has 10\.0 MiB but had 20\.0 MiB"),
        "grown": ([a, replace(b, size_bytes=SIZE * 2), c], r"/dev/d1 has 40\.0 MiB but had 20\.0 MiB"),
    }


@pytest.mark.parametrize("name", wrong_sets())
def test_what_is_not_one_whole_pool_is_refused_by_name(name: str) -> None:
    found, words = wrong_sets()[name]
    assert not is_unused(found), "a set that holds a pool is never formatted unasked"
    with pytest.raises(DeviceError, match=words):
        check_pool(found)


ready, formatting = pool(), pool(state=State.FORMATTING)


@pytest.mark.parametrize(
    ("found", "unused"),
    [
        ([], True),
        ([blank("/dev/d0"), blank("/dev/d1")], True),
        ([formatting[0], blank("/dev/d1"), blank("/dev/d2")], True),
        (formatting, True),
        ([ready[0], formatting[1], formatting[2]], True),
        (ready, False),
        ([ready[0], formatting[1], blank("/dev/d2")], False),
        ([formatting[0], pool(pool_id=OTHER)[1]], False),
        ([blank("/dev/d0"), ready[1], ready[2]], False),
    ],
    ids=[
        "nothing",
        "blank",
        "killed while it began",
        "killed before it was ready",
        "killed while it became ready",
        "a pool",
        "no kill leaves this",
        "killed while it replaced another pool",
        "one device replaced",
    ],
)
def test_only_what_never_held_an_object_is_formatted_unasked(found: list[Found], unused: bool) -> None:
    assert is_unused(found) is unused
