"""Batches that are empty, huge, or name a key twice."""

from __future__ import annotations

from dataclasses import replace

from hypercache_compat.payloads import MIB

from ..check import Check, require
from ..places import flip
from ..scene import OVERWRITING, PLAIN, Scene, block, blocks

THEME = "batches"
MANY = 10_000


def empty(scene: Scene) -> None:
    kept = blocks(4096)
    scene.store(kept)
    require(scene.tried_to_store([]), "an empty batch was not stored")
    require(scene.found([]) == [], "an empty lookup found something")
    require(scene.loaded([]) == [], "an empty load gave something")
    scene.delete([])
    scene.expect_kept(kept)


def ten_thousand(scene: Scene) -> None:
    items = blocks(*[64] * MANY)
    scene.expect_found(items, False)
    scene.store(items)
    absent = blocks(*[64] * 100)
    scene.expect_found([*items, *absent], [True] * MANY + [False] * 100)
    scene.expect_loaded([*absent, *items], [False] * 100 + [True] * MANY)
    scene.delete(items[::2])
    scene.expect_found(items, [bool(number % 2) for number in range(MANY)])


def any_order(scene: Scene) -> None:
    items = blocks(*[1, 100, 4096, 4097] * 8, MIB + 1)
    scene.store(items)
    for order in (items[::-1], items[1:] + items[:1], items[::3] + items[1::3] + items[2::3]):
        scene.expect_loaded(order, True)


def twins_stored(scene: Scene) -> None:
    for connection in (PLAIN, OVERWRITING):
        item, other = block(4 * MIB + 1, content="one"), block(100)
        twin = replace(item, content="other")
        scene.store([item, other, twin], connection)
        scene.expect_found([item, other], True)
        contents = [["one", "other"], [other.payload]]
        require(
            scene.loaded([item, other], contents=contents) == [True, True], "a key that came twice was lost"
        )


def twins_asked_for(scene: Scene) -> None:
    here, absent = block(4 * MIB + 1), block(100)
    scene.store([here])
    batch = [here, absent, here, here, absent]
    want = [item is here for item in batch]
    scene.expect_found(batch, want)
    scene.expect_loaded(batch, want)
    scene.delete(batch)
    scene.expect_missed(batch)


def of_all_sorts(scene: Scene) -> None:
    """Hits, misses, wrong sizes and damage, each at the beginning, in the middle and at the end."""
    for first in range(4):
        right, absent, damaged, other = blocks(4096), blocks(4096), blocks(4096), blocks(4096)
        scene.store([*right, *damaged, *other])
        flip(scene.chunks(damaged)[0][0], 77)
        batch = [*right, *absent, *damaged, replace(other[0], size_bytes=4095)]
        want = [True, False, False, False]
        scene.expect_loaded(batch[first:] + batch[:first], want[first:] + want[:first])


CHECKS = (
    Check(
        "batch-empty",
        THEME,
        empty,
        "Empty stores, lookups, loads and deletes complete, and change nothing.",
        "stores fail without keys",
    ),
    Check(
        "batch-10000",
        THEME,
        ten_thousand,
        "10,000 keys in one batch are each stored, found, loaded and deleted as themselves.",
        "loads mix up their buffers",
        is_long=True,
    ),
    Check(
        "batch-order",
        THEME,
        any_order,
        "Keys loaded in another order than they were stored in get their own bytes.",
        "loads mix up their buffers",
    ),
    Check(
        "batch-twins-stored",
        THEME,
        twins_stored,
        "A key that comes twice in one store with different bytes holds one of them, whole.",
        "loads give halves",
    ),
    Check(
        "batch-twins-loaded",
        THEME,
        twins_asked_for,
        "A key that comes twice in a lookup, load or delete is answered twice.",
        "lookups say yes",
    ),
    Check(
        "batch-all-sorts",
        THEME,
        of_all_sorts,
        "In a batch of hits, misses, wrong sizes and damage each key gets what is its own, in any order.",
        "loads hit together",
    ),
)
