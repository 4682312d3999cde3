"""The fsspec file system: files written whole, in pieces, patched and overwritten; read, sought, mapped."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path
from typing import Any

import fsspec
from hypercache import HyperCacheFileSystem

from ..payloads import MIB, payload, require_same

PIECE = 4 * MIB


def file_system(socket_path: str) -> Any:
    """The package's file system on one daemon."""
    return HyperCacheFileSystem(socket_path=socket_path)


def write_in_pieces(
    socket_path: str, uri: str, size_bytes: int, write_bytes: int, tier: str | None = None, **options: Any
) -> None:
    """Write the payload of `uri` with writes of `write_bytes` each, then read it back whole."""
    fs = file_system(socket_path)
    data = payload(uri, size_bytes)
    with fs.open(uri, "wb", tier=tier, **options) as file:
        for start in range(0, size_bytes, write_bytes):
            file.write(data[start : start + write_bytes])
    assert fs.size(uri) == size_bytes
    with fs.open(uri, "rb") as file:
        require_same(file.read(), data)


def read_whole(socket_path: str, uri: str, size_bytes: int) -> bool:
    """Is the file there? Where it is, its bytes are compared with the payload of `uri`."""
    fs = file_system(socket_path)
    if not fs.exists(uri):
        return False
    with fs.open(uri, "rb") as file:
        require_same(file.read(), payload(uri, size_bytes))
    return True


def seek_and_read(socket_path: str, uri: str, size_bytes: int) -> None:
    """Seek from all three origins, read and readinto at any offset, over chunk borders and past the end."""
    data = payload(uri, size_bytes)
    write_in_pieces(socket_path, uri, size_bytes, PIECE)
    with file_system(socket_path).open(uri, "rb") as file:
        for start, length in _ranges(size_bytes):
            assert file.seek(start) == start
            require_same(file.read(length), data[start : start + length])
            assert file.tell() == min(size_bytes, start + length)
        file.seek(-777, io.SEEK_END)
        file.seek(-223, io.SEEK_CUR)
        require_same(file.read(), data[-1000:])
        assert bytes(file.read(10)) == b""
        _read_into(file, data)


def _ranges(size_bytes: int) -> list[tuple[int, int]]:
    """Aligned and odd ranges, around chunk borders, and a hundred at random."""
    chosen = random.Random(size_bytes)
    ranges = [
        (0, 1),
        (0, 512),
        (511, 2),
        (PIECE - 1, 2),
        (PIECE - 512, 1024),
        (PIECE, PIECE),
        (1, size_bytes),
    ]
    ranges += [(size_bytes - 1, 1), (0, size_bytes)]
    for _ in range(100):
        start = chosen.randrange(size_bytes)
        ranges.append((start, chosen.choice([1, 511, 512, 4096, 70000, 2 * MIB])))
    return ranges


def _read_into(file: Any, data: bytes) -> None:
    buffer = bytearray(100_000)
    file.seek(PIECE - 50_000)
    assert file.readinto(buffer) == len(buffer)
    require_same(buffer, data[PIECE - 50_000 : PIECE + 50_000])
    file.seek(len(data) - 10)
    assert file.readinto(memoryview(buffer)[:20]) == 10
    require_same(buffer[:10], data[-10:])
    assert file.readinto(buffer) == 0


def patch_earlier_pieces(socket_path: str, uri: str, size_bytes: int, tier: str | None) -> None:
    """Go back into pieces that were flushed, overwrite bytes there, return to the end and go on."""
    fs = file_system(socket_path)
    want = bytearray(payload(uri, size_bytes))
    patch = payload("patch", 5000)
    places = [0, 17, PIECE - 2500, 2 * PIECE - 1, size_bytes - 5000]
    with fs.open(uri, "wb", tier=tier) as file:
        for start in range(0, size_bytes, MIB):
            file.write(want[start : start + MIB])
        for place in places:
            file.seek(place)
            file.write(patch)
            want[place : place + len(patch)] = patch
        file.seek(0, io.SEEK_END)
        file.write(b"the end")
    with fs.open(uri, "rb") as file:
        require_same(file.read(), bytes(want) + b"the end")


def zip_file(socket_path: str, uri: str, member_sizes: list[int]) -> None:
    """Write a real zip file, whose headers are patched after the data, and test it member by member."""
    fs = file_system(socket_path)
    with fs.open(uri, "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for number, size_bytes in enumerate(member_sizes):
            with archive.open(f"member-{number}", "w") as member:
                member.write(payload(f"{uri}{number}", size_bytes))
    with fs.open(uri, "rb") as file, zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        for number, size_bytes in enumerate(member_sizes):
            require_same(archive.read(f"member-{number}"), payload(f"{uri}{number}", size_bytes))


def connection_closed_between_pieces(socket_path: str, uri: str, size_bytes: int, tier: str | None) -> None:
    """Reading another file closes the one connection of the file system while a write is under way."""
    fs = file_system(socket_path)
    other, data = uri + ".other", payload(uri, size_bytes)
    write_in_pieces(socket_path, other, 5000, 5000)
    with fs.open(uri, "wb", tier=tier) as file:
        for start in range(0, size_bytes, PIECE):
            file.write(data[start : start + PIECE])
            with fs.open(other, "rb") as reading:
                require_same(reading.read(), payload(other, 5000))
    with fs.open(uri, "rb") as file:
        require_same(file.read(), data)


def overwrite_committed(socket_path: str, uri: str, old_size: int, new_size: int) -> None:
    """A streamed write over a file: until it is closed readers get the old bytes, then the new ones."""
    fs, reader = file_system(socket_path), file_system(socket_path)
    old, new = payload(uri + "old", old_size), payload(uri + "new", new_size)
    fs.pipe_file(uri, old)
    with reader.open(uri, "rb") as kept_open:
        with fs.open(uri, "wb") as file:
            for start in range(0, new_size, MIB):
                file.write(new[start : start + MIB])
                if start % PIECE == 0:
                    require_same(reader.cat_file(uri), old)
        require_same(reader.cat_file(uri), new)
        assert reader.size(uri) == new_size
        assert kept_open.locate_result.object_size == old_size


def empty_file(socket_path: str, uri: str) -> bool:
    """Close a file without having written: the package asks the daemon for nothing. Is the file there?"""
    fs = file_system(socket_path)
    with fs.open(uri, "wb"):
        pass
    return bool(fs.exists(uri))


def general_calls(socket_path: str, uri: str, folder: str) -> dict[str, Any]:
    """What fsspec itself offers on top: open by URL, cat, pipe, info, ls, get, put."""
    fs = fsspec.filesystem("hypercache", socket_path=socket_path)
    data = payload(uri, 9 * MIB + 13)
    fs.pipe_file(uri, data)
    with fsspec.open(uri, "rb", socket_path=socket_path) as file:
        require_same(file.read(), data)
    require_same(fs.cat_file(uri, start=100, end=200), data[100:200])
    local, back = Path(folder, "local"), uri + ".back"
    fs.get_file(uri, str(local))
    require_same(local.read_bytes(), data)
    fs.put_file(str(local), back)
    require_same(fs.cat_file(back), data)
    assert fs.ls(uri) == [uri]
    missing = False
    try:
        fs.open(uri + ".missing", "rb")
    except FileNotFoundError:
        missing = True
    return {"info": fs.info(uri), "missing": missing}


def read_into_tensor(socket_path: str, uri: str, size_bytes: int) -> None:
    """The reader's way into a tensor, which without a GPU is a read and a copy."""
    import torch

    write_in_pieces(socket_path, uri, size_bytes, PIECE)
    tensor = torch.zeros(size_bytes, dtype=torch.uint8)
    with file_system(socket_path).open(uri, "rb") as file:
        assert file.read_into_gpu(tensor) == size_bytes
    require_same(tensor.numpy(), payload(uri, size_bytes))


def write_and_never_close(socket_path: str, uri: str, size_bytes: int, tier: str | None = None) -> None:
    """Begin a streamed write and leave it open: what a process looks like that dies while writing."""
    file = file_system(socket_path).open(uri, "wb", tier=tier)
    file.write(payload(uri, size_bytes))
    _LEFT_OPEN.append(file)


_LEFT_OPEN: list[Any] = []
