"""Plain reads and writes on devices and RAM files: whole or an error, and never a file made anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hypercache_daemon.devices import DeviceError, read_chunk, write_chunk

MIB = 1 << 20

Make = Callable[..., str]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a sparse file and gives its path."""

    def one(name: str = "a", size_bytes: int = 20 * MIB) -> str:
        path = tmp_path / name
        with path.open("xb") as file:
            file.truncate(size_bytes)
        return str(path)

    return one


def content(path: str) -> bytes:
    return Path(path).read_bytes()


def test_what_is_written_is_read(make: Make) -> None:
    path = make()
    for offset, data in ((4096, os.urandom(4 * MIB)), (5 * MIB, b"x"), (6 * MIB, b"")):
        write_chunk(path, offset, memoryview(data))
        assert read_chunk(path, offset, len(data)) == data
    assert content(path)[5 * MIB : 5 * MIB + 2] == b"x\0"


def test_a_chunk_that_is_not_whole_is_an_error(make: Make) -> None:
    path = make("a", 8192)
    assert read_chunk(path, 4096, 4096) == bytes(4096)
    for offset, length in ((4096, 4097), (8192, 1), (1 << 40, 4096)):
        with pytest.raises(DeviceError, match=rf"{path} was cut off"):
            read_chunk(path, offset, length)


def test_a_device_that_is_gone_is_an_error_and_is_not_made_anew(tmp_path: Path) -> None:
    path = str(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        read_chunk(path, 0, 1)
    with pytest.raises(FileNotFoundError):
        write_chunk(path, 0, b"x")
    assert not Path(path).exists()


def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_chunk("/dev/full", 0, b"x")


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes and gives 1,000 bytes at a time."""
    pread, pwrite = os.pread, os.pwrite
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, min(length, 1000), offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))


def test_reads_and_writes_in_pieces_are_whole(make: Make, pieces: None) -> None:
    path, data = make(), os.urandom(10_500)
    write_chunk(path, 4096, data)
    assert content(path)[4096 : 4096 + len(data)] == data
    assert read_chunk(path, 4096, len(data)) == data
