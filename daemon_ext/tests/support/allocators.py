"""Allocators of devices of a test's sizes, and how to take what they have."""

from __future__ import annotations

from hypercache_daemon.core.allocator import Allocator
from hypercache_daemon.core.extents import Extent
from hypercache_protocol.fields import MIB

GIB = 1024 * MIB
SUPERBLOCK_BYTES = MIB


def pool(*usable_bytes: int) -> Allocator:
    """Devices 0, 1, … with so much room behind the reserved start."""
    return Allocator({i: SUPERBLOCK_BYTES + size for i, size in enumerate(usable_bytes)}, SUPERBLOCK_BYTES)


def allocated(allocator: Allocator, size_bytes: int) -> tuple[Extent, ...]:
    extents = allocator.allocate(size_bytes)
    assert extents is not None
    return extents


def filled(allocator: Allocator, size_bytes: int) -> list[tuple[Extent, ...]]:
    """Objects of one size until none fits."""
    objects = []
    while extents := allocator.allocate(size_bytes):
        objects.append(extents)
    return objects
