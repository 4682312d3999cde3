"""Sizes around every boundary, and buffers at every address."""

from __future__ import annotations

from hypercache_compat.payloads import MIB

from ..check import Check
from ..scene import Scene, block, blocks

THEME = "sizes"
SECTOR, PAGE, CHUNK = 512, 4096, 4 * MIB
MIXED = (1, SECTOR, PAGE - 1, PAGE + 1, MIB, CHUNK + 1, 2 * CHUNK)


def there_and_back(scene: Scene, *sizes: int, align_bytes: int = PAGE) -> None:
    """Absent, stored, found, loaded with the right bytes."""
    items = blocks(*sizes)
    scene.expect_missed(items)
    scene.store(items, align_bytes=align_bytes)
    scene.expect_kept(items, align_bytes=align_bytes)


def around(boundary: int, *distances: int) -> list[int]:
    """Sizes on both sides of a boundary, and on it."""
    return [boundary + each for distance in distances for each in sorted({-distance, distance})]


def every_small_size(scene: Scene) -> None:
    there_and_back(scene, *range(1, SECTOR + 9))


def around_a_sector(scene: Scene) -> None:
    there_and_back(scene, *around(SECTOR, 0, 1), *around(2 * SECTOR, 0, 1), *around(7 * SECTOR, 0, 1))


def around_a_page(scene: Scene) -> None:
    there_and_back(scene, *around(PAGE, 0, 1, SECTOR), *around(2 * PAGE, 0, 1), *around(255 * PAGE, 0, 1))


def around_a_chunk(scene: Scene) -> None:
    there_and_back(scene, *around(CHUNK, 0, 1, SECTOR, PAGE))


def around_more_chunks(scene: Scene) -> None:
    there_and_back(scene, *around(2 * CHUNK, 0, 1), *around(3 * CHUNK, 1, PAGE))


def around_many_chunks(scene: Scene) -> None:
    there_and_back(scene, *around(16 * CHUNK, 1))


def on_big_sectors(scene: Scene) -> None:
    with scene.anew(sector_bytes=PAGE) as own:
        sizes = (*MIXED, SECTOR + 1, 3 * PAGE - 1, CHUNK + SECTOR)
        there_and_back(own, *sizes)
        there_and_back(own, *sizes, align_bytes=1)


def mixed_in_one_batch(scene: Scene) -> None:
    there_and_back(scene, *MIXED)


def at_odd_addresses(scene: Scene) -> None:
    there_and_back(scene, *MIXED, align_bytes=1)


def at_every_address_in_a_sector(scene: Scene) -> None:
    # A block and the byte behind it move the next one's address on by one, in sectors.
    there_and_back(scene, *[SECTOR] * SECTOR, align_bytes=1)


def stored_at_one_address_and_loaded_at_another(scene: Scene) -> None:
    items = blocks(*MIXED[:-1])
    scene.store(items[::2], align_bytes=PAGE)
    scene.store(items[1::2], align_bytes=1)
    for align_bytes in (1, 8, SECTOR, PAGE):
        scene.expect_loaded(items, True, align_bytes=align_bytes)


def nothing_behind_the_buffer(scene: Scene) -> None:
    items = blocks(1, SECTOR - 1, SECTOR, PAGE - 1, PAGE, PAGE + 1, CHUNK, CHUNK + 1)
    scene.store(items)
    for align_bytes in (1, PAGE):
        scene.expect_loaded(items, True, align_bytes=align_bytes)


def wrong_size(scene: Scene) -> None:
    kept = blocks(5000, CHUNK + 4)
    scene.store(kept)
    for item in kept:
        wrong = {
            1,
            item.size_bytes // 2,
            item.size_bytes + SECTOR,
            item.size_bytes + PAGE,
            2 * item.size_bytes,
        }
        wrong |= {item.size_bytes - 1, item.size_bytes + 1, CHUNK - PAGE}
        asked = [block(size, chunk_hash=item.chunk_hash) for size in sorted(wrong)]
        scene.expect_loaded([kept[0], *asked, kept[1]], [True, *[False] * len(asked), True])
    scene.expect_kept(kept)


CHECKS = (
    Check(
        "sizes-small",
        THEME,
        every_small_size,
        "A block of each size from 1 byte to a sector and some comes back as it was, all in one batch.",
        "reads end early",
    ),
    Check(
        "sizes-sector",
        THEME,
        around_a_sector,
        "Blocks of one, two and seven sectors, and a byte less or more, come back as they were.",
        "reads end early",
    ),
    Check(
        "sizes-page",
        THEME,
        around_a_page,
        "Blocks of 1, 2 and 255 pages of 4,096 bytes, and a byte less or more, come back as they were.",
        "reads end early",
    ),
    Check(
        "sizes-chunk",
        THEME,
        around_a_chunk,
        "Blocks of one chunk of 4 MiB, and a byte, a sector or a page less or more, come back as they were.",
        "reads end early",
    ),
    Check(
        "sizes-chunks",
        THEME,
        around_more_chunks,
        "Blocks of two and three chunks, and a byte or a page less or more, come back as they were.",
        "reads end early",
        is_long=True,
    ),
    Check(
        "sizes-many-chunks",
        THEME,
        around_many_chunks,
        "Blocks of sixteen chunks, a byte less and a byte more, come back as they were.",
        "reads end early",
        is_long=True,
    ),
    Check(
        "sizes-big-sectors",
        THEME,
        on_big_sectors,
        "On loop devices with sectors of 4,096 bytes blocks come back as they were, from and to any address.",
        "reads end early",
        is_long=True,
    ),
    Check(
        "sizes-mixed",
        THEME,
        mixed_in_one_batch,
        "One batch of sizes from 1 byte to 8 MiB gives each key its own bytes.",
        "reads end early",
    ),
    Check(
        "buffers-odd",
        THEME,
        at_odd_addresses,
        "Buffers at odd addresses are stored and loaded as those at whole pages are.",
        "stores say yes",
    ),
    Check(
        "buffers-every-address",
        THEME,
        at_every_address_in_a_sector,
        "Buffers at each address within a sector are stored and loaded, all in one batch.",
        "stores say yes",
        is_long=True,
    ),
    Check(
        "buffers-crossed",
        THEME,
        stored_at_one_address_and_loaded_at_another,
        "What was stored from one alignment is loaded to any other.",
        "stores say yes",
    ),
    Check(
        "buffers-bounds",
        THEME,
        nothing_behind_the_buffer,
        "A load writes nothing behind its buffer, wherever that lies.",
        "loads write past the buffer",
    ),
    Check(
        "wrong-size",
        THEME,
        wrong_size,
        "A buffer of another size than the block's is a miss for that key alone, and leaves the block alone.",
        "loads believe daemon and devices",
    ),
)
