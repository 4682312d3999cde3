"""Sealed objects over layouts of every shape, and which replies may be one."""

import itertools
import mmap
import os
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercache_connector.direct_io import ALIGNMENT, Buffer
from hypercache_connector.layouts import Answer, Chunk, ChunkTransfer, Found, cut
from hypercache_connector.outcomes import Outcome
from hypercache_connector.sealed_objects import SealedObject, doubt_about_object
from hypercache_connector.sealing import BLOCK_BYTES, body_bytes, seal, sealed_bytes
from hypercache_protocol import SyncStatus, Tier
from hypercache_protocol.messages import ErrorReply, MissReply

URI = "hypercache://lmcache/v1/n/k"
PAYLOAD_BYTES = 2 * BLOCK_BYTES + 17
SEALED_BYTES = sealed_bytes(URI, PAYLOAD_BYTES)


def layout_of(lengths: Sequence[int], checksum: int | None = None) -> tuple[Chunk, ...]:
    """Chunks of these lengths, each on a device of its own and at an offset of its own."""
    return tuple(
        Chunk(f"/d{number}", Tier.NVME, number * BLOCK_BYTES, length, checksum)
        for number, length in enumerate(lengths)
    )


def lengths_from(total: int, cuts: Sequence[int]) -> list[int]:
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < total}), total]
    return [end - start for start, end in itertools.pairwise(edges) if end > start]


def moved(planned: Sequence[ChunkTransfer], devices: dict[str, bytearray], *, reading: bool) -> None:
    """Do what the transfers say, in memory."""
    for transfer in planned:
        device = devices.setdefault(transfer.chunk.device, bytearray(1 << 16))
        place = slice(transfer.chunk.offset, transfer.chunk.offset + len(transfer.part.view))
        if reading:
            transfer.part.view[:] = device[place]
        else:
            device[place] = transfer.part.view


@settings(max_examples=100)
@given(st.integers(0, 3 * BLOCK_BYTES + 1), st.lists(st.integers(0, 5 * BLOCK_BYTES), max_size=6))
def test_it_comes_back_from_a_layout_of_any_shape(size: int, cuts: list[int]) -> None:
    payload, back, devices = os.urandom(size), bytearray(size), {}
    layout = layout_of(lengths_from(sealed_bytes(URI, size), cuts))
    written = SealedObject(URI, Buffer(payload, writable=False))
    written.seal()
    moved(written.transfers(0, layout), devices, reading=False)
    lying = b"".join(devices[chunk.device][chunk.offset : chunk.offset + chunk.length] for chunk in layout)
    assert lying == payload[: body_bytes(size)] + seal(URI, memoryview(payload))
    read = SealedObject(URI, Buffer(back, writable=True))
    moved(read.transfers(0, layout), devices, reading=True)
    assert read.opened() is Outcome.OK
    assert back == payload


@settings(max_examples=100)
@given(st.lists(st.integers(1, 20), max_size=6), st.data())
def test_a_cut_layout_has_every_byte_once(lengths: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, sum(lengths)))
    layout = layout_of(lengths, checksum=1)

    def places(chunks: Sequence[Chunk]) -> list[tuple[str, int]]:
        return [(chunk.device, chunk.offset + index) for chunk in chunks for index in range(chunk.length)]

    before, after = cut(layout, at)
    assert places(before) == places(layout)[:at]
    assert places(before) + places(after) == places(layout)
    assert {chunk.checksum for chunk in before + after} <= {None}, "a checksum is of a whole chunk"


def test_all_of_it_moves_in_whole_blocks_of_aligned_memory() -> None:
    """So that devices are read and written past the page cache, without a copy."""
    sealed = SealedObject(URI, Buffer(mmap.mmap(-1, PAYLOAD_BYTES), writable=True))
    planned = sealed.transfers(0, layout_of([sealed.size_bytes]))
    assert [len(transfer.part.view) % ALIGNMENT for transfer in planned] == [0, 0]
    assert [transfer.part.address % ALIGNMENT for transfer in planned] == [0, 0]


def test_a_seal_is_checked_against_the_bytes_in_the_caller_s_buffer() -> None:
    payload = os.urandom(PAYLOAD_BYTES)
    buffer = bytearray(payload)
    sealed = SealedObject(URI, Buffer(buffer, writable=True))
    sealed.seal()
    assert sealed.opened() is Outcome.OK
    buffer[5] ^= 1
    assert sealed.opened() is Outcome.SEAL_BROKEN


def hit(
    *lengths: int, size: int | None = None, status: SyncStatus | None = None, checksum: int | None = None
) -> Found:
    return Found(sum(lengths) if size is None else size, status, None, layout_of(lengths, checksum))


REPLIES: dict[str, tuple[Answer, Outcome, Outcome]] = {
    # name: the answer, what is doubted where seals are looked for, and where they are not
    "sealed": (hit(SEALED_BYTES), Outcome.OK, Outcome.NO_SYNC_STATUS),
    "in chunks": (hit(5000, SEALED_BYTES - 5000), Outcome.OK, Outcome.NO_SYNC_STATUS),
    "committed": (hit(SEALED_BYTES, status=SyncStatus.COMMITTED), Outcome.OK, Outcome.NO_CHECKSUM),
    "local": (hit(SEALED_BYTES, status=SyncStatus.LOCAL_ONLY), Outcome.OK, Outcome.NO_CHECKSUM),
    "staged": (hit(SEALED_BYTES, status=SyncStatus.STAGED), Outcome.STAGED, Outcome.STAGED),
    "unsealed": (hit(PAYLOAD_BYTES), Outcome.NO_CHECKSUM, Outcome.NO_SYNC_STATUS),
    "shorter": (hit(SEALED_BYTES - 4096), Outcome.WRONG_SIZE, Outcome.NO_SYNC_STATUS),
    "longer": (hit(SEALED_BYTES + 4096), Outcome.WRONG_SIZE, Outcome.NO_SYNC_STATUS),
    "chunks lack": (hit(4096, size=SEALED_BYTES), Outcome.BAD_LAYOUT, Outcome.NO_SYNC_STATUS),
    "chunks too many": (hit(SEALED_BYTES, 1, size=SEALED_BYTES), Outcome.BAD_LAYOUT, Outcome.NO_SYNC_STATUS),
    "no chunks": (hit(size=SEALED_BYTES), Outcome.NO_SYNC_STATUS, Outcome.NO_SYNC_STATUS),
    "empty": (hit(status=SyncStatus.COMMITTED), Outcome.WRONG_SIZE, Outcome.WRONG_SIZE),
    "checksums": (
        hit(PAYLOAD_BYTES, status=SyncStatus.LOCAL_ONLY, checksum=1),
        Outcome.OK,
        Outcome.OK,
    ),
    "checksums, in the size of a sealed one": (
        hit(SEALED_BYTES, status=SyncStatus.LOCAL_ONLY, checksum=1),
        Outcome.WRONG_SIZE,
        Outcome.WRONG_SIZE,
    ),
    "some checksums": (
        Found(
            SEALED_BYTES,
            SyncStatus.COMMITTED,
            None,
            (*layout_of([4096], 1), *layout_of([SEALED_BYTES - 4096])),
        ),
        Outcome.NO_CHECKSUM,
        Outcome.NO_CHECKSUM,
    ),
    "absent": (MissReply(), Outcome.ABSENT, Outcome.ABSENT),
    "refused": (ErrorReply(error_message="no"), Outcome.DAEMON_REFUSED, Outcome.DAEMON_REFUSED),
    "no answer": (Outcome.DAEMON_LATE, Outcome.DAEMON_LATE, Outcome.DAEMON_LATE),
}


@pytest.mark.parametrize("name", REPLIES)
def test_what_may_be_sealed_and_what_may_not(name: str) -> None:
    answer, with_seals, without = REPLIES[name]
    assert doubt_about_object(answer, URI, PAYLOAD_BYTES, seals=True) is with_seals
    assert doubt_about_object(answer, URI, PAYLOAD_BYTES, seals=False) is without


def test_the_tier_of_each_chunk_is_kept_when_a_layout_is_cut() -> None:
    chunk = Chunk("/ram.shm", Tier.RAM, 0, 100)
    before, after = cut([chunk], 60)
    assert [(each.tier, each.offset, each.length) for each in before + after] == [
        (Tier.RAM, 0, 60),
        (Tier.RAM, 60, 40),
    ]
