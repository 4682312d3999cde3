"""Small chunks that lie in a row move in one call, and any doubt about one of them is still its own."""

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercache_connector import KVStore
from hypercache_connector.direct_io import ALIGNMENT, Part
from hypercache_connector.layouts import Chunk, ChunkTransfer
from hypercache_connector.outcomes import Outcome
from hypercache_connector.runs import RUN_BYTES, SMALL_BYTES, Run, in_runs, mapped
from hypercache_connector.storing import _write_in_turn
from hypercache_connector.transfers import _read_run
from hypercache_connector.workers import ChunkWorkers
from hypercache_connector.write_gate import WriteGate
from hypercache_protocol import Tier

BLOCK_COUNT = 3
OBJECT_BYTES = BLOCK_COUNT * ALIGNMENT
KEYS = [f"org/model@00000001@0@{number:04x}" for number in range(8)]
KEYS_AS_BYTES = [key.encode() for key in KEYS]


# -- what is joined ------------------------------------------------------------------------------------------


def chunk(
    offset: int, length: int, *, device: str = "/d", tier: Tier = Tier.NVME, address: int = 0
) -> ChunkTransfer:
    part = Part(memoryview(bytes(length)), address)
    return ChunkTransfer(0, 0, Chunk(device, tier, offset, length), part)


def runs_of(chunks: list[ChunkTransfer], *, aligned: bool = True) -> list[Run]:
    return in_runs(chunks, lambda device: aligned)


def shape(chunks: list[ChunkTransfer], *, aligned: bool = True) -> list[list[int]]:
    """The offsets in each run, in blocks."""
    runs = runs_of(chunks, aligned=aligned)
    return [[transfer.chunk.offset // ALIGNMENT for transfer in run] for run in runs]


def row(count: int, **others: Any) -> list[ChunkTransfer]:
    return [chunk(number * ALIGNMENT, ALIGNMENT, **others) for number in range(count)]


def test_chunks_in_a_row_are_one_run_until_it_is_full() -> None:
    most = RUN_BYTES // ALIGNMENT
    assert shape(row(4)) == [[0, 1, 2, 3]]
    assert list(map(len, runs_of(row(most)))) == [most]
    assert list(map(len, runs_of(row(most + 1)))) == [most, 1]


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([chunk(0, ALIGNMENT), chunk(2 * ALIGNMENT, ALIGNMENT)], [[0], [2]]),
        ([chunk(ALIGNMENT, ALIGNMENT), chunk(0, ALIGNMENT)], [[1], [0]]),
        ([chunk(0, ALIGNMENT), chunk(ALIGNMENT, ALIGNMENT, address=512)], [[0], [1]]),
        ([chunk(0, ALIGNMENT, address=512), chunk(ALIGNMENT, ALIGNMENT)], [[0], [1]]),
        ([chunk(0, ALIGNMENT), chunk(ALIGNMENT, 100)], [[0], [1]]),
        ([chunk(ALIGNMENT - 512, 512), chunk(ALIGNMENT, ALIGNMENT)], [[0], [1]]),
        ([chunk(0, RUN_BYTES), chunk(RUN_BYTES, ALIGNMENT)], [[0], [RUN_BYTES // ALIGNMENT]]),
        ([*row(1, tier=Tier.RAM), chunk(ALIGNMENT, ALIGNMENT, device="")], [[0], [1]]),
    ],
    ids=[
        "a gap",
        "backwards",
        "odd memory",
        "odd memory first",
        "odd length",
        "odd offset",
        "too large",
        "RAM, then a device without a name",
    ],
)
def test_what_does_not_fit_begins_a_run_of_its_own(
    chunks: list[ChunkTransfer], expected: list[list[int]]
) -> None:
    assert shape(chunks) == expected


@pytest.mark.parametrize("place", [0, 1])
def test_odd_memory_is_joined_where_none_must_be_aligned(place: int) -> None:
    chunks = [chunk(number * ALIGNMENT, ALIGNMENT, address=512 * (number == place)) for number in range(2)]
    assert shape(chunks, aligned=False) == [[0, 1]]


def test_files_of_the_ram_tier_are_runs_wherever_they_lie_until_one_is_full() -> None:
    apart = [chunk(7, 100, device=f"/ram/{number}", tier=Tier.RAM, address=3) for number in range(3)]
    assert runs_of(apart) == [apart]
    small = [chunk(0, SMALL_BYTES - 1, device=f"/ram/{number}", tier=Tier.RAM) for number in range(10)]
    assert list(map(len, runs_of(small))) == [8, 2]


def test_a_large_file_of_the_ram_tier_is_a_run_of_its_own() -> None:
    sizes_bytes = [100, SMALL_BYTES, 100, 100]
    files = [chunk(0, size, device=f"/ram/{size}", tier=Tier.RAM) for size in sizes_bytes]
    assert runs_of(files) == [files[:1], files[1:2], files[2:]]


def test_devices_take_turns_run_by_run() -> None:
    there, here = row(3, device="/a"), row(2, device="/b")
    assert runs_of([*there, *here]) == [there, here]
    apart = [chunk(4 * number * ALIGNMENT, ALIGNMENT, device="/b") for number in range(3)]
    assert runs_of([*there, *apart]) == [there, *([each] for each in apart)]
    mixed = [
        transfer for pair in zip(row(4, device="/a"), row(4, device="/b"), strict=True) for transfer in pair
    ]
    assert [[transfer.chunk.device for transfer in run] for run in runs_of(mixed)] == [["/a"] * 4, ["/b"] * 4]


def test_all_files_of_the_ram_tier_take_turns_as_one_device() -> None:
    files = [chunk(0, RUN_BYTES, device=f"/ram/{number}", tier=Tier.RAM) for number in range(3)]
    apart = [chunk(4 * number * ALIGNMENT, ALIGNMENT) for number in range(3)]
    pairs = zip(files, apart, strict=True)
    assert runs_of([*files, *apart]) == [[transfer] for pair in pairs for transfer in pair]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.sampled_from(["/a", "/b"]))))
def test_every_transfer_is_in_one_run_and_runs_have_no_gap(drawn: list[tuple[int, int, str]]) -> None:
    chunks = [chunk(start * ALIGNMENT, blocks * ALIGNMENT, device=device) for start, blocks, device in drawn]
    runs = runs_of(chunks)
    assert sorted(map(id, chunks)) == sorted(id(transfer) for run in runs for transfer in run)
    for run in runs:
        assert {transfer.chunk.device for transfer in run} == {run[0].chunk.device}
        places = [each.chunk for each in run]
        assert all(one.offset + one.length == next_.offset for one, next_ in pairwise(places))


def test_what_close_skips_is_skipped_chunk_by_chunk() -> None:
    workers = ChunkWorkers("run", 2)
    runs = [row(2, device="/a"), row(3, device="/b")]
    assert [result for _, result in mapped(workers, lambda run: [len(run)] * len(run), runs, 0)] == [
        2,
        2,
        3,
        3,
        3,
    ]
    workers.close()
    assert [result for _, result in mapped(workers, lambda run: [len(run)] * len(run), runs, 0)] == [0] * 5


# -- loads and stores by runs --------------------------------------------------------------------------------


def pages(fill: bytes = b"") -> mmap.mmap:
    memory = mmap.mmap(-1, OBJECT_BYTES)
    memory[: len(fill)] = fill
    return memory


Move = Callable[[int, list[memoryview], int], int]


def spoiling(
    monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[Move, int, list[memoryview], int], int]
) -> list[int]:
    """Have `spoil` do each preadv or pwritev. Gives how many buffers each call had, as they come."""
    real = getattr(os, name)
    calls: list[int] = []

    def called(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        calls.append(len(pieces))
        return spoil(real, descriptor, pieces, offset)

    monkeypatch.setattr(os, name, called)
    return calls


def honest(real: Move, descriptor: int, pieces: list[memoryview], offset: int) -> int:
    return real(descriptor, pieces, offset)


@pytest.fixture
def one_device(scripted, connect):
    """A connector whose objects lie in a row on one device, past the page cache."""
    scripted.devices = scripted.devices[:1]
    return connect(scripted.socket_path, direct_io="on")


def test_a_batch_of_small_objects_is_one_call_each_way(one_device, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [pages(os.urandom(OBJECT_BYTES)) for _ in KEYS]
    back = [pages() for _ in KEYS]
    written = spoiling(monkeypatch, "pwritev", honest)
    read = spoiling(monkeypatch, "preadv", honest)
    assert one_device.store(KEYS, data).ok
    assert one_device.load(KEYS, back) == [True] * len(KEYS)
    assert (written, read) == ([len(KEYS)], [len(KEYS)])
    assert [bytes(each) for each in back] == [bytes(each) for each in data]
    assert one_device.count("transfers", "direct") == 2 * len(KEYS)


def test_one_flipped_byte_in_a_run_is_one_miss(one_device, scripted) -> None:
    one_device.store(KEYS, [pages(os.urandom(OBJECT_BYTES)) for _ in KEYS])
    with open(scripted.devices[0], "r+b") as device:
        device.seek(scripted.objects[uri_of(one_device, KEYS[3])].chunk_layout[0].offset + 5)
        byte = device.read(1)[0]
        device.seek(-1, os.SEEK_CUR)
        device.write(bytes([byte ^ 1]))
        device.flush()
        os.fsync(device.fileno())
    assert one_device.load(KEYS, [pages() for _ in KEYS]) == [key != KEYS[3] for key in KEYS]


def uri_of(driver, key: str) -> str:
    uri: str = driver.connector._mapping.uri(key)
    return uri


def fails_at(place: int) -> Callable[[Move, int, list[memoryview], int], int]:
    """Every call that reaches this byte of the device fails."""

    def spoil(real: Move, descriptor: int, pieces: list[memoryview], offset: int) -> int:
        if offset <= place < offset + sum(map(len, pieces)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, pieces, offset)

    return spoil


def test_a_read_error_in_a_run_is_one_miss(one_device, scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    data, back = [pages(os.urandom(OBJECT_BYTES)) for _ in KEYS], [pages() for _ in KEYS]
    one_device.store(KEYS, data)
    place = scripted.objects[uri_of(one_device, KEYS[2])].chunk_layout[0].offset
    spoiling(monkeypatch, "preadv", fails_at(place))
    assert one_device.load(KEYS, back) == [key != KEYS[2] for key in KEYS]
    assert one_device.count("loads", "io_error") == 1
    assert all(
        bytes(have) == bytes(want) for key, have, want in zip(KEYS, back, data, strict=True) if key != KEYS[2]
    )


def test_a_write_error_in_a_run_is_one_failure(one_device, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        spoiling(patch, "pwritev", fails_at(2 * OBJECT_BYTES))
        result = one_device.store(KEYS, [pages(os.urandom(OBJECT_BYTES)) for _ in KEYS])
    assert (result.ok, result.error) == (False, "io_error: 1")
    assert one_device.exists(KEYS).count(False) == 1


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_run_that_ends_early_moves_chunk_by_chunk(
    one_device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def half(real: Move, descriptor: int, pieces: list[memoryview], offset: int) -> int:
        return real(descriptor, pieces[: max(1, len(pieces) // 2)], offset)

    calls = spoiling(monkeypatch, name, half)
    data, back = [pages(os.urandom(OBJECT_BYTES)) for _ in KEYS], [pages() for _ in KEYS]
    assert one_device.store(KEYS, data).ok
    assert one_device.load(KEYS, back) == [True] * len(KEYS)
    assert calls == [len(KEYS)] + [1] * len(KEYS)
    assert [bytes(each) for each in back] == [bytes(each) for each in data]


@pytest.mark.parametrize("odd_bytes", [0, 3])
def test_through_the_page_cache_a_run_is_one_call_too_whatever_the_memory(
    scripted, connect, monkeypatch: pytest.MonkeyPatch, odd_bytes: int
) -> None:
    scripted.devices = scripted.devices[:1]
    driver = connect(scripted.socket_path, direct_io="off", overwrite=True)
    data = [odd_pages(odd_bytes, os.urandom(OBJECT_BYTES)) for _ in KEYS]
    back = [odd_pages(odd_bytes) for _ in KEYS]
    assert driver.store(KEYS, data).ok  # before a device was opened nothing is known of it
    assert driver.load(KEYS, back) == [True] * len(KEYS)
    written = spoiling(monkeypatch, "pwritev", honest)
    read = spoiling(monkeypatch, "preadv", honest)
    assert driver.store(KEYS, data).ok
    assert driver.load(KEYS, back) == [True] * len(KEYS)
    assert (written, read) == ([len(KEYS)], [len(KEYS)])
    assert [bytes(each) for each in back] == [bytes(each) for each in data]
    assert driver.connector.status()["transfers"] == {"buffered": 4 * len(KEYS)}


def odd_pages(odd_bytes: int, fill: bytes = b"") -> memoryview:
    """Memory of an object's size that begins so many bytes after a page does."""
    memory = memoryview(mmap.mmap(-1, odd_bytes + OBJECT_BYTES))[odd_bytes:]
    memory[: len(fill)] = fill
    return memory


def test_where_direct_transfers_are_refused_a_run_is_counted_as_that(
    one_device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(real: Move, descriptor: int, pieces: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, pieces, offset)

    calls = spoiling(monkeypatch, "pwritev", refuse)
    data = [pages(os.urandom(OBJECT_BYTES)) for _ in KEYS]
    assert one_device.store(KEYS, data).ok
    assert calls[:2] == [len(KEYS), 1]
    calls.clear()
    assert one_device.store([f"{key}-again" for key in KEYS], data).ok
    assert calls == [len(KEYS)]
    counted = {"buffered": 2 * len(KEYS), "fallback": 2 * len(KEYS)}
    assert one_device.connector.status()["transfers"] == counted


def test_small_files_of_the_ram_tier_fail_one_by_one_though_one_thread_moves_them(scripted, connect) -> None:
    with KVStore(scripted.socket_path) as store:
        assert store.put_many(KEYS, KEYS_AS_BYTES) == [True] * len(KEYS)
        gone = scripted.objects[f"{store.KV_URI_PREFIX}/{KEYS[3]}.kv"].chunk_layout[0]
        os.truncate(gone.device, 0)
        assert store.get_many(KEYS) == [
            None if key == KEYS[3] else data for key, data in zip(KEYS, KEYS_AS_BYTES, strict=True)
        ]
        assert store.status()["loads"] == {"ok": len(KEYS) - 1, "short_transfer": 1}


@pytest.mark.parametrize(("move", "name"), [(_read_run, "preadv"), (_write_in_turn, "pwritev")])
def test_a_run_whose_time_has_passed_does_not_begin(
    one_device, scripted, monkeypatch: pytest.MonkeyPatch, move: Any, name: str
) -> None:
    calls = spoiling(monkeypatch, name, honest)
    late = move(one_device.connector._engine, time.monotonic(), row(3, device=scripted.devices[0]))
    assert late == [Outcome.TRANSFER_LATE] * 3
    assert calls == []


def test_a_run_is_one_to_the_gate_with_all_its_bytes(one_device, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = one_device.connector._engine.gate
    writing = gate.writing
    written: list[int] = []
    read: list[int] = []
    monkeypatch.setattr(gate, "writing", lambda size, by: void(written.append(size)) or writing(size, by))
    monkeypatch.setattr(gate, "loaded", read.append)
    monkeypatch.setattr(WriteGate, "waiting", 1)
    with gate.loading():
        assert one_device.store(KEYS, [pages(os.urandom(OBJECT_BYTES)) for _ in KEYS]).ok
    assert one_device.load(KEYS, [pages() for _ in KEYS]) == [True] * len(KEYS)
    whole = OBJECT_BYTES * len(KEYS)
    assert (written, read) == ([whole], [whole])


def void(_: object) -> None:
    return None


def test_each_chunk_of_a_run_is_told_that_the_gate_was_closed(one_device, scripted) -> None:
    engine = one_device.connector._engine
    with engine.gate.loading():
        engine.gate.close()
        run = row(3, device=scripted.devices[0])
        assert _write_in_turn(engine, time.monotonic() + 30, run) == [Outcome.CLOSED] * 3
