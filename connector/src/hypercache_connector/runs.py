"""Runs: small chunks that lie in a row on a device, moved by one system call from or to as many buffers.

Much of what a chunk of 256 KiB costs is that call, and that the interpreter lock changes hands around it.

Rules:
1. A run is an attempt. Where it did not move all of its bytes nothing is known of any chunk, and each moves
   alone: that tells what is wrong with which.
2. Only whole blocks to and from page-aligned memory are joined, which direct transfers need no copy for.
3. No run is larger than RUN_BYTES, so neither is what a deadline, `close` or the other direction waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import TypeVar

from hypercache_protocol import Tier

from .direct_io import ALIGNMENT
from .layouts import ChunkTransfer
from .workers import ChunkWorkers

RUN_BYTES = 1 << 20
"""A quarter of a full chunk. Twice as much is no faster, and leaves some threads of a batch without work."""

Run = list[ChunkTransfer]
"""At least one chunk; where there are more, of the tier NVME."""

R = TypeVar("R")


def in_runs(planned: Sequence[ChunkTransfer]) -> list[Run]:
    """All transfers in runs, with the devices taking turns, so that all of them have work at once."""
    queues: dict[str | None, list[Run]] = {}
    for transfer in planned:
        # A RAM chunk is a file of its own; all of them are one device here, with a name that none has.
        chunk = transfer.chunk
        queue = queues.setdefault(chunk.device if chunk.tier is Tier.NVME else None, [])
        if queue and _continues(queue[-1], transfer):
            queue[-1].append(transfer)
        else:
            queue.append([transfer])
    if len(queues) < 2:
        return list(chain.from_iterable(queues.values()))
    return list(_present(chain.from_iterable(zip_longest(*queues.values()))))


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


def _continues(run: Run, transfer: ChunkTransfer) -> bool:
    first, last, chunk = run[0].chunk, run[-1].chunk, transfer.chunk
    return (
        last.offset + last.length == chunk.offset
        and chunk.offset + chunk.length - first.offset <= RUN_BYTES
        and chunk.tier is Tier.NVME
        and _is_whole_blocks(transfer)
        and (len(run) > 1 or _is_whole_blocks(run[-1]))
    )


def _is_whole_blocks(transfer: ChunkTransfer) -> bool:
    chunk = transfer.chunk
    return not (transfer.part.address | chunk.length | chunk.offset) % ALIGNMENT


def _present(turns: Iterator[Run | None]) -> Iterator[Run]:
    return (run for run in turns if run is not None)
