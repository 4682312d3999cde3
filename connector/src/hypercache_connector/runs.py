"""Runs: small chunks that one thread moves, those in a row on a device by one system call.

Much of what a chunk of 256 KiB costs is that call, and that the interpreter lock changes hands around it; one
of 4 KiB takes less time to move than to hand over to a thread.

Rules:
1. One call for many chunks is an attempt. Where it did not move all of its bytes nothing is known of any
   chunk, and each moves alone: that tells what is wrong with which.
2. On a device only whole blocks that lie in a row are joined. Where transfers are direct, they must be
   page-aligned in memory too: others take a copy each, and a thread would wait for one after the other.
3. RAM chunks, each a file of its own, are joined as they come, for no device is waited for there; but only
   those below SMALL_BYTES: to move a larger one takes longer than to hand it over, and other cores could.
4. No run is larger than RUN_BYTES, so neither is what a deadline, `close` or the other direction waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise, zip_longest
from typing import TypeVar

from hypercache_protocol import Tier

from .direct_io import ALIGNMENT
from .layouts import ChunkTransfer
from .workers import ChunkWorkers

RUN_BYTES = 1 << 20
"""A quarter of a full chunk. Twice as much is no faster, and leaves some threads of a batch without work."""

SMALL_BYTES = 128 << 10
"""Of a RAM chunk. In batches of 16 and 256 those of 4, 16 and 64 KiB gained, and those of 256 KiB did not."""

Run = list[ChunkTransfer]
"""At least one chunk, all of one tier; of the tier NVME in a row on one device."""

R = TypeVar("R")


def in_runs(planned: Sequence[ChunkTransfer], needs_alignment: Callable[[str], bool]) -> list[Run]:
    """All transfers in runs, with the devices taking turns, so that all of them have work at once.

    Args:
        needs_alignment: whether a device moves only page-aligned memory without a copy.
    """
    by_device: dict[str | None, list[ChunkTransfer]] = {}
    for transfer in planned:
        # All RAM chunks are one device here, with a name that none has.
        chunk = transfer.chunk
        by_device.setdefault(chunk.device if chunk.tier is Tier.NVME else None, []).append(transfer)
    queues = [_cut(queue, _belongs_to(device, needs_alignment)) for device, queue in by_device.items()]
    if len(queues) == 1:
        return list(queues[0])
    return list(_present(chain.from_iterable(zip_longest(*queues))))


def mapped(
    workers: ChunkWorkers, move: Callable[[Run], list[R]], runs: Sequence[Run], skipped: R
) -> list[tuple[ChunkTransfer, R]]:
    """Each transfer with what `move` gave for it; `skipped` where its run was not begun before `close`."""
    results = workers.map(move, runs, None)
    return [
        pair
        for run, result in zip(runs, results, strict=True)
        for pair in zip(run, [skipped] * len(run) if result is None else result, strict=True)
    ]


_Joins = Callable[[ChunkTransfer, ChunkTransfer], bool]
"""Whether the second of two transfers may be in the run that the first one ends so far."""


def _cut(queue: Sequence[ChunkTransfer], joins: _Joins) -> Iterator[Run]:
    run, size_bytes = [queue[0]], queue[0].chunk.length
    for last, transfer in pairwise(queue):
        size_bytes += transfer.chunk.length
        if size_bytes <= RUN_BYTES and joins(last, transfer):
            run.append(transfer)
        else:
            yield run
            run, size_bytes = [transfer], transfer.chunk.length
    yield run


def _belongs_to(device: str | None, needs_alignment: Callable[[str], bool]) -> _Joins:
    if device is None:
        return _are_small
    return _continues_aligned if needs_alignment(device) else _continues


def _are_small(last: ChunkTransfer, transfer: ChunkTransfer) -> bool:
    return max(last.chunk.length, transfer.chunk.length) < SMALL_BYTES


def _continues_aligned(last: ChunkTransfer, transfer: ChunkTransfer) -> bool:
    return not (last.part.address | transfer.part.address) % ALIGNMENT and _continues(last, transfer)


def _continues(last: ChunkTransfer, transfer: ChunkTransfer) -> bool:
    before, chunk = last.chunk, transfer.chunk
    is_whole_blocks = not (before.length | chunk.offset | chunk.length) % ALIGNMENT
    return is_whole_blocks and before.offset + before.length == chunk.offset


def _present(turns: Iterator[Run | None]) -> Iterator[Run]:
    return (run for run in turns if run is not None)
