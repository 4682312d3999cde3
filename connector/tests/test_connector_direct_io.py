"""Transfers move exactly the bytes asked for, on every kind of target, aligned or not."""

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercache_compat.loop_devices import can_make_loop_devices, loop_devices
from hypercache_connector import direct_io
from hypercache_connector.config import DirectIo
from hypercache_connector.devices import COUNTS, DeviceRefused, Devices
from hypercache_connector.direct_io import ALIGNMENT, Buffer, Part
from hypercache_connector.outcomes import Counters, ThrottledLog
from hypercache_protocol import Tier

MIB = 1 << 20
LENGTHS = [1, 511, 512, 513, 4095, 4096, 4097, 65_535, 65_536, MIB - 1, MIB + 5000, 4 * MIB]
SHIFTS = [0, 1, 512]


def part_of(size_bytes: int, shift: int = 0, fill: bytes = b"") -> tuple[Part, memoryview]:
    """A part of `size_bytes` that starts `shift` bytes after a page, and the whole memory around it."""
    memory = memoryview(mmap.mmap(-1, size_bytes + 3 * ALIGNMENT))
    memory[:] = b"\xa5" * len(memory)
    start = ALIGNMENT + shift
    memory[start : start + len(fill)] = fill
    return Buffer(memory, writable=True).part(start, size_bytes), memory


def assert_untouched_around(memory: memoryview, size_bytes: int, shift: int) -> None:
    start = ALIGNMENT + shift
    assert bytes(memory[:start]) == b"\xa5" * start
    assert set(memory[start + size_bytes :]) == {0xA5}


@pytest.fixture(scope="module")
def file_target() -> Iterator[str]:
    path = Path(f"/var/tmp/hypercache-test-{os.getpid()}")  # a file system with O_DIRECT; /dev/shm lacks it
    with path.open("xb") as file:
        file.truncate(32 * MIB)
    yield str(path)
    path.unlink()


@contextmanager
def block_device(folder: Path, sector_bytes: int) -> Iterator[str]:
    """A loop device where this user may make one, else a file: the same code in either case."""
    if not can_make_loop_devices():
        path = folder / "file"
        path.write_bytes(bytes(32 * MIB))
        yield str(path)
        return
    with loop_devices(folder, 1, 32, sector_bytes) as (device,):
        yield device


@pytest.fixture(scope="module")
def block_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with block_device(tmp_path_factory.mktemp("loop"), 512) as device:
        yield device


@pytest.fixture(scope="module")
def big_sector_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with block_device(tmp_path_factory.mktemp("loop"), 4096) as device:
        yield device


@pytest.fixture
def counters() -> Counters:
    return Counters()


def devices_in(mode: DirectIo, counters: Counters) -> Devices:
    return Devices(mode, counters, ThrottledLog())


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("target", ["file_target", "block_target", "big_sector_target"])
def test_direct_transfers_move_every_length_from_and_to_any_address(
    request: pytest.FixtureRequest, counters: Counters, target: str, length: int, shift: int
) -> None:
    path = request.getfixturevalue(target)
    devices = devices_in(DirectIo.ON, counters)
    payload = os.urandom(length)
    source, _ = part_of(length, shift, payload)
    assert devices.write(path, Tier.NVME, source, 8 * MIB) == length
    sink, memory = part_of(length, shift)
    assert devices.read(path, Tier.NVME, sink, 8 * MIB) == length
    assert bytes(sink.view) == payload
    assert_untouched_around(memory, length, shift)
    expected = {"direct" if shift == 0 else "bounced": 2}
    assert counters.snapshot()[COUNTS] == expected
    with open(path, "rb") as file:  # the same bytes for whoever reads through the page cache
        file.seek(8 * MIB)
        assert file.read(length) == payload


def pages_in_cache(path: str, offset: int, size_bytes: int) -> int:
    """How many of these bytes' pages the kernel keeps in its page cache."""
    page_count = -(-size_bytes // mmap.PAGESIZE)
    kept = (ctypes.c_ubyte * page_count)()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size_bytes, offset=offset) as pages:
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), kept) == 0
    return sum(each & 1 for each in kept)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("target", ["file_target", "block_target"])
def test_what_moves_directly_is_not_in_the_page_cache_afterwards(
    request: pytest.FixtureRequest, counters: Counters, target: str, shift: int
) -> None:
    path, offset, size_bytes = request.getfixturevalue(target), 20 * MIB, MIB
    part, _ = part_of(size_bytes, shift)
    with open(path, "r+b") as file:  # what others have read ahead of here
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    direct, cached = devices_in(DirectIo.ON, counters), devices_in(DirectIo.OFF, counters)
    assert direct.write(path, Tier.NVME, part, offset) == size_bytes
    assert direct.read(path, Tier.NVME, part, offset) == size_bytes
    assert pages_in_cache(path, offset, size_bytes) == 0
    assert cached.read(path, Tier.NVME, part, offset) == size_bytes
    assert pages_in_cache(path, offset, size_bytes) == size_bytes // mmap.PAGESIZE


def test_a_thread_s_first_transfer_needs_no_scratch_memory(file_target: str, counters: Counters) -> None:
    devices = devices_in(DirectIo.ON, counters)
    moved: list[int] = []
    for transfer in (devices.write, devices.read):
        part, _ = part_of(ALIGNMENT)
        thread = threading.Thread(
            target=lambda part=part, move=transfer: moved.append(move(file_target, Tier.NVME, part, 0))
        )
        thread.start()
        thread.join(30)
    assert moved == [ALIGNMENT, ALIGNMENT]


def test_a_forked_child_gets_a_copy_of_the_scratch_memory_and_not_the_memory() -> None:
    pages = direct_io.own_pages(4096)
    pages[:6] = b"parent"
    child = os.fork()
    if child == 0:
        pages[:6] = b"child!"
        os._exit(0)
    os.waitpid(child, 0)
    assert pages[:6] == b"parent"


def test_a_direct_write_pads_to_its_block_and_not_beyond(file_target: str) -> None:
    Path(file_target).write_bytes(b"\x77" * 4 * ALIGNMENT)
    descriptor = os.open(file_target, os.O_RDWR | os.O_DIRECT)
    source, _ = part_of(ALIGNMENT + 10, 0, b"\x11" * (ALIGNMENT + 10))
    assert direct_io.write_direct(descriptor, source, ALIGNMENT) == ALIGNMENT + 10
    os.close(descriptor)
    content = Path(file_target).read_bytes()
    assert content[:ALIGNMENT] == b"\x77" * ALIGNMENT
    assert content[ALIGNMENT : 2 * ALIGNMENT + 10] == b"\x11" * (ALIGNMENT + 10)
    assert content[2 * ALIGNMENT + 10 : 3 * ALIGNMENT] == bytes(ALIGNMENT - 10)
    assert content[3 * ALIGNMENT :] == b"\x77" * ALIGNMENT
    os.truncate(file_target, 32 * MIB)


class Scripted:
    """Stands in for os.preadv or os.pwritev on a byte string and moves at most so many bytes a call."""

    def __init__(self, content: bytearray, counts: Callable[[int], int]) -> None:
        self.content, self.counts, self.offsets = content, counts, []

    def read(self, fd: int, pieces: list[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        wanted = sum(map(len, pieces))
        data = self.content[offset : offset + min(wanted, self.counts(wanted))]
        left = memoryview(data)
        for piece in pieces:
            taken = left[: len(piece)]
            piece[: len(taken)] = taken
            left = left[len(taken) :]
        return len(data)

    def write(self, fd: int, pieces: list[memoryview], offset: int) -> int:
        data = b"".join(pieces)
        data = data[: min(len(data), self.counts(len(data)))]
        self.content[offset : offset + len(data)] = data
        return len(data)


@settings(max_examples=60)
@given(
    length=st.integers(1, 5 * ALIGNMENT),
    shift=st.sampled_from(SHIFTS),
    direct=st.booleans(),
    counts=st.lists(st.integers(700, 3 * ALIGNMENT), min_size=1, max_size=8),
)
def test_short_counts_are_continued(length: int, shift: int, direct: bool, counts: list[int]) -> None:
    payload = bytes(np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8))
    turns = itertools.cycle(counts)
    least = ALIGNMENT if direct else 1
    script = Scripted(bytearray(payload + bytes(ALIGNMENT)), lambda wanted: max(least, next(turns)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", script.read)
        patch.setattr(os, "pwritev", script.write)
        sink, memory = part_of(length, shift)
        assert (direct_io.read_direct if direct else direct_io.read)(-1, sink, 0) == length
        assert bytes(sink.view) == payload
        assert_untouched_around(memory, length, shift)
        if direct:
            assert not any(offset % ALIGNMENT for offset in script.offsets)
        script.content = bytearray(len(script.content))
        source, _ = part_of(length, shift, payload)
        assert (direct_io.write_direct if direct else direct_io.write)(-1, source, 0) == length
        assert bytes(script.content[:length]) == payload


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_that_ends_early_gives_fewer_bytes(tmp_path: Path, direct: bool) -> None:
    path = Path("/var/tmp") / f"hypercache-short-{os.getpid()}"
    path.write_bytes(bytes(2 * ALIGNMENT + 100))
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    sink, _ = part_of(3 * ALIGNMENT)
    moved = (direct_io.read_direct if direct else direct_io.read)(descriptor, sink, 0)
    os.close(descriptor)
    path.unlink()
    assert moved == 2 * ALIGNMENT + 100


def test_by_default_files_go_through_the_page_cache_and_block_devices_past_it(
    file_target: str, block_target: str, counters: Counters
) -> None:
    devices = devices_in(DirectIo.AUTO, counters)
    part, _ = part_of(ALIGNMENT)
    devices.write(file_target, Tier.NVME, part, 0)
    assert counters.snapshot()[COUNTS] == {"buffered": 1}
    devices.write(block_target, Tier.NVME, part, 0)
    kind = "direct" if Path(block_target).is_block_device() else "buffered"
    assert counters.snapshot()[COUNTS][kind] == (1 if kind == "direct" else 2)


def test_off_means_the_page_cache_everywhere(block_target: str, counters: Counters) -> None:
    part, _ = part_of(ALIGNMENT)
    devices_in(DirectIo.OFF, counters).write(block_target, Tier.NVME, part, 0)
    assert counters.snapshot()[COUNTS] == {"buffered": 1}


def test_an_offset_between_blocks_goes_through_the_page_cache_and_is_counted(
    file_target: str, counters: Counters
) -> None:
    devices = devices_in(DirectIo.ON, counters)
    source, _ = part_of(1000, 0, b"\x42" * 1000)
    assert devices.write(file_target, Tier.NVME, source, MIB + 3) == 1000
    sink, _ = part_of(1000)
    assert devices.read(file_target, Tier.NVME, sink, MIB + 3) == 1000
    assert bytes(sink.view) == b"\x42" * 1000
    assert counters.snapshot()[COUNTS] == {"fallback": 2, "buffered": 2}
    assert devices.refusing_direct() == []  # the device is not to blame


@pytest.mark.parametrize("refused_at", ["open", "transfer"])
def test_a_refusal_of_direct_io_falls_back_and_is_shown(
    file_target: str, counters: Counters, monkeypatch: pytest.MonkeyPatch, refused_at: str
) -> None:
    real_open, real_preadv = os.open, os.preadv

    def refusing_open(path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real_open(path, flags)

    def refusing_preadv(fd: int, pieces: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not aligned enough")
        return real_preadv(fd, pieces, offset)

    if refused_at == "open":
        monkeypatch.setattr(os, "open", refusing_open)
    else:
        monkeypatch.setattr(os, "preadv", refusing_preadv)
    devices = devices_in(DirectIo.ON, counters)
    sink, _ = part_of(ALIGNMENT)
    for _ in range(3):
        assert devices.read(file_target, Tier.NVME, sink, 0) == ALIGNMENT
    assert counters.snapshot()[COUNTS] == {"fallback": 3, "buffered": 3}
    assert devices.refusing_direct() == [file_target]
    devices.forget_all()
    assert devices.refusing_direct() == []


def test_a_device_error_is_no_refusal(
    file_target: str, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fd: int, pieces: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(os, "preadv", failing)
    devices = devices_in(DirectIo.ON, counters)
    sink, _ = part_of(ALIGNMENT)
    with pytest.raises(OSError, match="bad sector"):
        devices.read(file_target, Tier.NVME, sink, 0)
    assert devices.refusing_direct() == []


# -- what may be opened ------------------------------------------------------------------------------------


def test_only_regular_files_and_block_devices_by_absolute_path_are_opened(
    folder: Path, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "real").write_bytes(bytes(ALIGNMENT))
    (folder / "link").symlink_to(folder / "real")
    os.mkfifo(folder / "pipe")
    devices = devices_in(DirectIo.AUTO, counters)
    part, _ = part_of(ALIGNMENT)
    began = time.monotonic()
    for name in ("link", "pipe", ".", "gone", "nul\0", "\ud800"):
        for tier in Tier:
            with pytest.raises(OSError):  # noqa: PT011 - which one depends on the case; none is another kind
                devices.read(f"{folder}/{name}", tier, part, 0)
            with pytest.raises(OSError):  # noqa: PT011
                devices.write(f"{folder}/{name}", tier, part, 0)
    for path in ("real", "./real", "", "/dev/null", "/dev/fd"):
        with pytest.raises(DeviceRefused):
            devices.read(path, Tier.NVME, part, 0)
    assert time.monotonic() - began < 10  # a pipe without a peer would hang
    assert not (folder / "gone").exists()
    assert devices.read(f"{folder}/real", Tier.NVME, part, 0) == ALIGNMENT


def test_descriptors_are_kept_for_devices_and_not_for_ram_files(
    folder: Path, counters: Counters, open_descriptors: Callable[[], int]
) -> None:
    (folder / "file").write_bytes(bytes(ALIGNMENT))
    devices = devices_in(DirectIo.AUTO, counters)
    part, _ = part_of(ALIGNMENT)
    before = open_descriptors()
    for _ in range(3):
        devices.read(f"{folder}/file", Tier.RAM, part, 0)
        devices.write(f"{folder}/file", Tier.RAM, part, 0)
    assert open_descriptors() == before
    for _ in range(3):
        devices.read(f"{folder}/file", Tier.NVME, part, 0)
    assert open_descriptors() == before + 1
    devices.forget_all()
    assert open_descriptors() == before


def test_a_forgotten_device_is_opened_anew(folder: Path, counters: Counters) -> None:
    path = folder / "file"
    path.write_bytes(b"\1" * ALIGNMENT)
    devices = devices_in(DirectIo.AUTO, counters)
    part, _ = part_of(ALIGNMENT)
    devices.read(str(path), Tier.NVME, part, 0)
    path.unlink()
    path.write_bytes(b"\2" * ALIGNMENT)
    devices.read(str(path), Tier.NVME, part, 0)
    assert part.view[0] == 1
    devices.forget(str(path))
    devices.read(str(path), Tier.NVME, part, 0)
    assert part.view[0] == 2


def test_a_device_forgotten_while_it_was_opened_is_not_kept(
    folder: Path, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "file"
    path.write_bytes(b"\1" * ALIGNMENT)
    devices = devices_in(DirectIo.AUTO, counters)
    part, _ = part_of(ALIGNMENT)
    real_open = os.open

    def open_and_replace(name: str, flags: int) -> int:
        descriptor = real_open(name, flags)
        monkeypatch.undo()
        path.unlink()
        path.write_bytes(b"\2" * ALIGNMENT)
        devices.forget_all()
        return descriptor

    monkeypatch.setattr(os, "open", open_and_replace)
    devices.read(str(path), Tier.NVME, part, 0)
    devices.read(str(path), Tier.NVME, part, 0)
    assert part.view[0] == 2


# -- buffers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        bytearray(8),
        (ctypes.c_ubyte * 8)(),
        memoryview(bytearray(16))[4:12],
        np.zeros((2, 2), dtype=np.uint16),
    ],
    ids=["bytearray", "ctypes", "memoryview", "numpy"],
)
def test_any_contiguous_memory_is_a_buffer(source: object) -> None:
    buffer = Buffer(source, writable=True)
    assert buffer.size_bytes == 8
    buffer.part(0, 8).view[:] = b"12345678"
    assert (
        bytes(memoryview(source).cast("B") if not isinstance(source, ctypes.Array) else source) == b"12345678"
    )
    assert ctypes.string_at(buffer.address, 8) == b"12345678"


def test_memory_that_is_read_only_has_its_address_too() -> None:
    buffer = Buffer(b"12345678", writable=False)
    assert ctypes.string_at(buffer.address, 8) == bytes(buffer.view) == b"12345678"


def test_an_empty_buffer_is_one_of_no_bytes() -> None:
    assert Buffer(bytearray(), writable=True).size_bytes == 0


@pytest.mark.parametrize("source", [b"read-only", memoryview(bytearray(8))[::2], "text", None, 7])
def test_what_cannot_be_filled_is_no_buffer(source: object) -> None:
    with pytest.raises((TypeError, ValueError, BufferError)):
        Buffer(source, writable=True)
