"""CRC-32: zlib's values, computed without the interpreter lock."""

import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache_protocol import checksum


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """A thread keeps the interpreter lock until it lets go of it by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


def other_threads_run_during(call: Callable[[], object], deadline_s: float) -> bool:
    """Whether another thread gets the lock while `call` runs, again and again until it does."""
    began, ran = threading.Event(), threading.Event()

    def other() -> None:
        began.wait()
        ran.set()

    thread = threading.Thread(target=other)
    thread.start()
    began.set()
    deadline = time.monotonic() + deadline_s
    while not ran._flag and time.monotonic() < deadline:  # is_set() may switch
        call()
    result = ran.is_set()
    thread.join()
    return result


def test_the_accelerated_library_is_in_use() -> None:
    assert checksum.LIBRARY == "isal"


def test_without_it_zlib_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal", None)
    assert checksum.fastest() == ("zlib", zlib.crc32)


@given(st.binary(max_size=10_000))
def test_the_value_is_that_of_zlib_in_one_step_or_two(data: bytes) -> None:
    assert checksum.crc32(memoryview(data)) == zlib.crc32(data)
    assert checksum.crc32(data[7:], checksum.crc32(data[:7])) == zlib.crc32(data)


@pytest.mark.parametrize("crc32", [checksum.crc32, zlib.crc32], ids=["in use", "fallback"])
def test_the_interpreter_lock_is_free_meanwhile(
    no_forced_switches: None, crc32: Callable[[memoryview], int]
) -> None:
    chunk = memoryview(bytearray(4 << 20))
    assert other_threads_run_during(lambda: crc32(chunk), deadline_s=30.0)


def test_the_test_would_notice_a_library_that_keeps_the_lock(no_forced_switches: None) -> None:
    assert not other_threads_run_during(lambda: sum(range(1000)), deadline_s=0.3)
