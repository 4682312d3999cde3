"""What the compatibility tool says of a presence table that a client could change."""

from __future__ import annotations

import fcntl
import os

import pytest

from hypercache_compat.conformance.presence import check_sealed
from hypercache_compat.conformance.shell import CheckFailed

SIZE_BYTES = 8192
FUTURE_WRITE = 0x10
ALL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | FUTURE_WRITE | fcntl.F_SEAL_SEAL


@pytest.fixture
def memory() -> int:
    descriptor = os.memfd_create("a test's", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE_BYTES)
    return descriptor


@pytest.mark.parametrize(
    ("seals", "told"),
    [
        (0, "make the table shorter"),
        (ALL & ~fcntl.F_SEAL_SHRINK, "shorter"),
        (ALL & ~FUTURE_WRITE, "write to the table"),
    ],
)
def test_a_table_that_is_not_sealed_enough_fails(memory: int, seals: int, told: str) -> None:
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    try:
        with pytest.raises(CheckFailed, match=told):
            check_sealed(memory, SIZE_BYTES)
    finally:
        os.close(memory)


def test_a_sealed_one_passes(memory: int) -> None:
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, ALL)
    try:
        check_sealed(memory, SIZE_BYTES)
    finally:
        os.close(memory)
