"""Whole transfers between a caller's buffer and a descriptor, through the page cache or past it.

Rules:
1. A transfer reads into, and takes from, exactly the view it is given; whatever alignment makes it move
   beyond that lies in memory of its own.
2. Direct transfers (O_DIRECT) start at a multiple of ALIGNMENT and move whole blocks of it. Chunks are
   allocated that way, so the bytes up to the next boundary belong to the same chunk.
3. Short counts are continued. A transfer that ends early (the file ends there) returns the bytes moved.
   EINTR is Python's own affair (PEP 475); every other error is the caller's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ALIGNMENT = 4096
"""Bytes; a multiple of every sector size in use, and the unit in which chunks are allocated."""

_MASK = ALIGNMENT - 1


_FIELD_NAME = re.compile(r":[^:]*:")
_ADDRESS = re.compile(r"[OP&zX]|Z(?![fdg])")
"""What says in a format that there are addresses: of Python objects, of anything, of text (Z alone; with a
letter it is a complex number), of functions."""


@lru_cache
def _is_plain(format_: str) -> bool:
    return not _ADDRESS.search(_FIELD_NAME.sub("", format_))


class Buffer:
    """A caller's memory as flat bytes, with its address."""

    __slots__ = ("address", "size_bytes", "view")

    def __init__(self, source: object, *, writable: bool) -> None:
        """
        Raises:
            TypeError, BufferError: it is no memory.
            ValueError: it is not contiguous, holds addresses of this process, or is read-only where it must
                not be.
        """
        flat = memoryview(source)  # type: ignore[arg-type]
        require_contiguous(flat.c_contiguous)
        require_plain(_is_plain(flat.format))
        if writable and flat.readonly:
            raise ValueError("its memory is read-only: give a bytearray, a writable array or a tensor")
        self.size_bytes = flat.nbytes
        if self.size_bytes == 0:  # numpy refuses empty ones
            self.view, self.address = memoryview(b""), 0
            return
        # numpy takes every format (ctypes' is "<B"), unlike memoryview.cast.
        array = np.frombuffer(flat, dtype=np.uint8)
        self.view = memoryview(array)  # type: ignore[arg-type]
        self.address = _address_of(array)

    def part(self, start: int, length: int) -> Part:
        """The `length` bytes from `start` on."""
        return Part(self.view[start : start + length], self.address + start)


def sharing(buffers: Sequence[Buffer]) -> dict[int, int]:
    """Of each buffer that has a byte in common with one before it in memory, its index and that one's."""
    shared: dict[int, int] = {}
    last, end = -1, 0
    for index in sorted(range(len(buffers)), key=lambda index: buffers[index].address):
        buffer = buffers[index]
        if not buffer.size_bytes:
            continue
        if buffer.address < end:
            shared[index] = last
        if buffer.address + buffer.size_bytes > end:
            last, end = index, buffer.address + buffer.size_bytes
    return shared


def require_contiguous(is_contiguous: bool) -> None:
    """
    Raises:
        ValueError: it is not.
    """
    if not is_contiguous:
        raise ValueError(
            "its memory is not contiguous: give a contiguous copy (tensor.contiguous(), "
            "numpy.ascontiguousarray)"
        )


def require_plain(is_plain: bool) -> None:
    """
    Raises:
        ValueError: it is not.
    """
    if not is_plain:
        raise ValueError(
            "it holds Python objects or pointers, which are addresses in this process: give plain numbers"
        )


def _address_of(array: npt.NDArray[np.uint8]) -> int:
    # ctypes tells it eight times as fast as numpy, of what it could write to. (That an array is a buffer is
    # unknown to the types of Pythons before 3.12.)
    if array.flags.writeable:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    return int(array.__array_interface__["data"][0])


class Part(NamedTuple):
    """Some bytes of a buffer, and where in memory they lie."""

    view: memoryview
    address: int


def own_pages(size_bytes: int) -> mmap.mmap:
    """Zeroed memory on pages of its own, at least one byte. A forked child gets a copy: pages that it shared,
    which is what mmap makes unless told otherwise, it could write to while a transfer reads them."""
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _Bounce(threading.local):
    """One page-aligned scratch area for each thread, as large as was ever needed."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray())  # writable: even an empty slice of bytes refuses assignment

    def of(self, size_bytes: int) -> memoryview:
        if len(self._view) < size_bytes:
            self._view = memoryview(own_pages(size_bytes))
        return self._view[:size_bytes]


_bounce = _Bounce()


def is_aligned(part: Part) -> bool:
    """Whether direct transfers can use the memory itself rather than a copy."""
    return part.address & _MASK == 0


def read(fd: int, part: Part, offset: int) -> int:
    """Fill `part` from `offset` on, through the page cache. Returns the bytes read."""
    return _through(os.preadv, fd, part.view, offset)


def write(fd: int, part: Part, offset: int) -> int:
    """Write `part` at `offset`, through the page cache. Returns the bytes written."""
    return _through(os.pwritev, fd, part.view, offset)


def read_direct(fd: int, part: Part, offset: int) -> int:
    """Fill `part` from `offset` on, past the page cache. Returns the bytes read."""
    length = len(part.view)
    body_length, scratch = _split(part)
    moved = _past(os.preadv, fd, part.view[:body_length], scratch, offset, length)
    part.view[body_length:] = scratch[: length - body_length]
    return moved


def write_direct(fd: int, part: Part, offset: int) -> int:
    """Write `part` at `offset`, past the page cache, and zeros up to the next boundary. Returns the bytes
    written, the zeros not counted."""
    length = len(part.view)
    body_length, scratch = _split(part)
    scratch[: length - body_length] = part.view[body_length:]
    scratch[length - body_length :] = bytes(len(scratch) - (length - body_length))
    return _past(os.pwritev, fd, part.view[:body_length], scratch, offset, length)


Vectored = Callable[[int, list[memoryview], int], int]
"""os.preadv and os.pwritev."""


def _split(part: Part) -> tuple[int, memoryview]:
    """How many bytes move without a copy, and an aligned scratch area for whole blocks with the rest."""
    length = len(part.view)
    body_length = length & ~_MASK if is_aligned(part) else 0
    return body_length, _bounce.of(_rounded_up(length - body_length))


def _rounded_up(size_bytes: int) -> int:
    return (size_bytes + _MASK) & ~_MASK


def _through(move: Vectored, fd: int, view: memoryview, offset: int) -> int:
    done = 0
    while done < len(view):
        moved = move(fd, [view[done:]], offset + done)
        if moved == 0:
            break
        done += moved
    return done


def _past(move: Vectored, fd: int, body: memoryview, tail: memoryview, offset: int, length: int) -> int:
    """Move body and tail, both whole blocks, and continue where a short count ends: at the last boundary
    before it, since nothing else is a legal place to go on."""
    done = 0
    while done < length:
        pieces = [piece for piece in (body[done:], tail[max(0, done - len(body)) :]) if piece]
        moved = move(fd, pieces, offset + done)
        if done + moved >= length:
            break
        if moved < ALIGNMENT:
            return done + moved
        done += moved & ~_MASK
    return length
