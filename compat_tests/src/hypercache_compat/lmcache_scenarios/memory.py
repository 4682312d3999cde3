"""LMCache's memory objects, watched: what is in them, and that nothing around them changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from ..payloads import first_difference, payload

UNTOUCHED = 0xA5

right = lru_cache(maxsize=64)(payload)
"""The bytes that belong to a name; what is stored is mostly loaded soon after."""


class Memory:
    """Memory objects of `sizes` bytes in one buffer that is filled with UNTOUCHED, each at a multiple of
    `align_bytes` from its start, with at least a byte that is nobody's behind each."""

    def __init__(self, sizes: Sequence[int], align_bytes: int) -> None:
        slots = [(size // align_bytes + 1) * align_bytes for size in sizes]
        self._buffer = _aligned_buffer(sum(slots) + 1)
        self._buffer.fill_(UNTOUCHED)
        self._around: list[Any] = []
        self.objects: list[Any] = []
        start = 0 if align_bytes > 1 else 1
        for size, slot in zip(sizes, slots, strict=True):
            metadata = MemoryObjMetadata(
                shape=torch.Size([size]),
                dtype=torch.uint8,
                address=start,
                phy_size=slot,
                fmt=MemoryFormat.KV_2LTD,
                ref_count=1,
            )
            data = self._buffer[start : start + size]
            self.objects.append(TensorMemoryObj(data, metadata, parent_allocator=None))
            self._around.append(self._buffer[start + size : start + slot])
            start += slot

    def fill(self, contents: Sequence[str]) -> None:
        """Put the payload of each name into its object."""
        for item, name in zip(self.objects, contents, strict=True):
            data = np.frombuffer(right(name, item.get_size()), dtype=np.uint8)
            item.raw_data.numpy()[:] = data

    def differences(self, loaded: Sequence[bool], contents: Sequence[Sequence[str]]) -> list[str]:
        """What is wrong with those that are called loaded: they hold none of their contents."""
        wrong = []
        for item, is_loaded, names in zip(self.objects, loaded, contents, strict=True):
            if is_loaded:
                found = [
                    first_difference(item.raw_data.numpy(), right(name, item.get_size())) for name in names
                ]
                if None not in found:
                    wrong.append(f"{names[0]} ({item.get_size()} bytes): {found[0]}")
        return wrong

    def changed_around(self) -> list[str]:
        """What was written that is nobody's."""
        return [
            f"memory behind object {number} of {item.get_size()} bytes was written to"
            for number, (item, rest) in enumerate(zip(self.objects, self._around, strict=True))
            if not bool((rest == UNTOUCHED).all())
        ]


def _aligned_buffer(size_bytes: int) -> Any:
    backing = torch.empty(size_bytes + 4096, dtype=torch.uint8)
    skip = -backing.data_ptr() % 4096
    return backing[skip : skip + size_bytes]
