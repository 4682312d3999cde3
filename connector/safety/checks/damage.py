"""Bytes that change on a device behind everybody's back, at the places that `locate` names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

from hypercache_compat.payloads import MIB

from ..check import Check
from ..places import Chunk, flip, peek, poke, swap, whole
from ..scene import OVERWRITING, Block, Scene, block, blocks
from .trust import BELIEVING

THEME = "damage"
CHUNK = 4 * MIB
PAGE = 4096


def damaged(scene: Scene, sizes: Sequence[int], hurt: Sequence[Callable[[list[Chunk]], None]]) -> None:
    """Each of `hurt` is done to a block of its own; all of those are misses, and one that was spared is not.
    What was damaged is dropped, so that a store heals it."""
    items = blocks(*sizes)
    spared = block(sizes[0])
    scene.store([*items, spared])
    for layout, do in zip(scene.chunks(items), hurt, strict=True):
        do(layout)
    scene.expect_loaded([*items, spared], [*[False] * len(items), True])
    healed(scene, items)


def healed(scene: Scene, items: Sequence[Block]) -> None:
    """They are gone, and can be stored again."""
    scene.expect_found(items, False)
    scene.store(items)
    scene.expect_kept(items)


def every_bit(scene: Scene) -> None:
    size = 32
    bits = range(8 * size)
    damaged(scene, [size] * len(bits), [partial(flip_in, 0, bit) for bit in bits])


def flip_in(number: int, bit: int, layout: list[Chunk]) -> None:
    """One bit of one chunk; counted from its end where negative."""
    flip(layout[number], bit % (8 * layout[number]["length"]))


def swap_in(one: int, other: int, layout: list[Chunk]) -> None:
    """Two chunks in each other's place."""
    swap(layout[one], layout[other])


def zero(number: int, layout: list[Chunk]) -> None:
    """One chunk is all zeros."""
    poke(layout[number], 0, bytes(layout[number]["length"]))


def ends_of_every_chunk(scene: Scene) -> None:
    bits = (0, 8 * 512 - 1, 8 * (PAGE + 1), -1)
    places = [(number, bit) for number in range(2) for bit in bits]
    hurt = [partial(flip_in, number, bit) for number, bit in places]
    damaged(scene, [CHUNK + 2 * PAGE + 1] * len(places), hurt)


def swapped_within(scene: Scene) -> None:
    pairs = list(combinations(range(3), 2))
    damaged(
        scene,
        [3 * CHUNK] * len(pairs),
        [partial(swap_in, i, j) for i, j in pairs],
    )


def swapped_between(scene: Scene, size_bytes: int) -> None:
    chunks = -(-size_bytes // CHUNK)
    items = blocks(*[size_bytes] * 2 * chunks)
    scene.store(items)
    layouts = scene.chunks(items)
    for number in range(chunks):
        swap(layouts[2 * number][number], layouts[2 * number + 1][number])
    scene.expect_loaded(items, False)
    healed(scene, items)


def shifted(scene: Scene, by_bytes: int) -> None:
    def move(layout: list[Chunk]) -> None:
        data = whole(layout[0])
        poke(layout[0], 0, data[by_bytes:] + data[:by_bytes])

    damaged(scene, [CHUNK + PAGE], [move])


def zeroed(scene: Scene) -> None:
    damaged(
        scene,
        [2 * CHUNK + PAGE] * 3,
        [partial(zero, number) for number in range(3)],
    )


def torn(scene: Scene) -> None:
    """Half of the new version reached the device and half of the old one is still there."""
    old = block(2 * CHUNK, content="old")
    new = replace(old, content="new")
    scene.store([old], OVERWRITING)
    before = [whole(chunk) for chunk in scene.chunks([old])[0]]
    scene.store([new], OVERWRITING)
    layout = scene.chunks([new])[0]
    poke(layout[0], CHUNK // 2, before[0][CHUNK // 2 :])
    scene.expect_loaded([new], False)
    scene.store([new], OVERWRITING)
    layout = scene.chunks([new])[0]
    for chunk, data in zip(layout, before, strict=True):
        poke(chunk, 0, data)
    scene.expect_loaded([new], False)  # all of the old version, where the daemon promised the new one


def alone_in_its_batch(scene: Scene) -> None:
    items = blocks(*[PAGE, 100, PAGE + 1] * 3, *[CHUNK + 1] * 3)
    scene.store(items)
    layouts = scene.chunks(items)
    hurt = [0, 4, 5, 11]
    for number in hurt:
        flip_in(-1, -1, layouts[number])
    scene.expect_loaded(items, [number not in hurt for number in range(len(items))])


def healing(scene: Scene) -> None:
    items = blocks(700, 2 * PAGE, CHUNK + 1)
    scene.store(items)
    for layout in scene.chunks(items):
        flip_in(0, 0, layout)
    scene.expect_loaded(items, False)
    healed(scene, items)


def restored(scene: Scene) -> None:
    """Checked when it is loaded, and not when it was looked at last."""
    item = block(PAGE)
    scene.store([item])
    scene.expect_kept([item])
    (layout,) = scene.chunks([item])
    first = peek(layout[0], 0, 1)
    flip_in(0, 3, layout)
    poke(layout[0], 0, first)
    scene.expect_kept([item])
    flip_in(0, 3, layout)
    scene.expect_loaded([item], False)


def truncated(scene: Scene) -> None:
    with scene.anew() as own:
        items = blocks(CHUNK + 513, 2 * CHUNK, PAGE, 100)
        own.store(items)
        for item, layout in zip(items, own.chunks(items), strict=True):
            last = layout[-1]
            if own.cell.tier == "nvme":
                own.places.truncate(last["device"], last["offset"])
            else:
                os.truncate(last["device"], last["length"] - 1)  # a chunk in RAM is a file of its own
            own.expect_loaded([item], False)


CHECKS = (
    Check(
        "flip-every-bit",
        THEME,
        every_bit,
        "A block of 32 bytes with any one of its 256 bits turned over is a miss.",
        BELIEVING,
    ),
    Check(
        "flip-every-chunk",
        THEME,
        ends_of_every_chunk,
        "A bit turned over at the ends of a chunk, of its first sector or in its second page makes a miss.",
        BELIEVING,
    ),
    Check(
        "swap-within",
        THEME,
        swapped_within,
        "Any two chunks of a block in each other's place make a miss.",
        BELIEVING,
        is_long=True,
    ),
    Check(
        "swap-between",
        THEME,
        partial(swapped_between, size_bytes=3 * CHUNK),
        "Chunks of two blocks in each other's place, at each position, make misses of both.",
        BELIEVING,
        is_long=True,
    ),
    Check(
        "swap-blocks",
        THEME,
        partial(swapped_between, size_bytes=PAGE),
        "Two whole blocks of one size in each other's place are misses.",
        BELIEVING,
    ),
    Check(
        "shift-a-byte",
        THEME,
        partial(shifted, by_bytes=1),
        "A chunk whose bytes moved on by one is a miss.",
        BELIEVING,
    ),
    Check(
        "shift-a-sector",
        THEME,
        partial(shifted, by_bytes=512),
        "A chunk whose bytes moved on by a sector is a miss.",
        BELIEVING,
    ),
    Check(
        "zeroed",
        THEME,
        zeroed,
        "A block with any of its chunks zeroed, as by a trim, is a miss.",
        BELIEVING,
        is_long=True,
    ),
    Check(
        "torn",
        THEME,
        torn,
        "A block in whose place half or all of its older version lies is a miss.",
        BELIEVING,
    ),
    Check(
        "damage-alone",
        THEME,
        alone_in_its_batch,
        "Damaged keys are misses alone; all others of the batch are loaded.",
        "loads miss together",
    ),
    Check(
        "damage-heals",
        THEME,
        healing,
        "After a load that found damage the block is not found, and a store heals it.",
        "damage is left",
    ),
    Check(
        "damage-late",
        THEME,
        restored,
        "Damage after a load that was right is found by the next load.",
        BELIEVING,
    ),
    Check(
        "truncated",
        THEME,
        truncated,
        "Blocks behind the end of a device that was cut short are misses.",
        BELIEVING,
        is_long=True,
    ),
)
