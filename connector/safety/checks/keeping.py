"""What stays, where, and for whom: backends, restarts, and several connectors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypercache_compat.payloads import MIB, payload
from hypercache_compat.raw_wire import store as store_as_old_client
from hypercache_compat.raw_wire import write_layout
from hypercache_compat.scenario_process import ScenarioProcess

from ..check import Check, require, wait_until
from ..scene import OVERWRITING, PLAIN, Block, Scene, block, blocks

THEME = "keeping"
SIZE = 4 * MIB + 1


def local_only(scene: Scene) -> None:
    items, before = blocks(SIZE, 100), backed_up(scene)
    scene.store(items)
    # Uploads go in the order of commits: once this one is there, theirs would have been.
    with scene.by_hand() as writer:
        store_as_old_client(writer, "hypercache://control", b"to be flushed", auto_flush_s3=True)
        wait_until(lambda: "control" in backed_up(scene), "the control was uploaded")
        states = [writer.ask("get_write_status", uri=scene.uri(item))["sync_status"] for item in items]
    require(states == ["LOCAL_ONLY"] * 2, f"the daemon calls blocks {states}")
    uploaded = backed_up(scene) - before
    require(uploaded == {"control"}, f"the backend got {sorted(uploaded)}")
    scene.expect_kept(items)


def backed_up(scene: Scene) -> set[str]:
    """What the backend has."""
    files = (path for path in scene.backend.rglob("*") if path.is_file())
    return {str(path.relative_to(scene.backend)) for path in files if "%tmp-" not in path.name}


def restarted(scene: Scene, crash: bool) -> None:
    with scene.anew() as own:
        items = blocks(1, 4096, SIZE)
        own.store(items)
        own.daemon.restart(crash=crash)
        own.expect_kept(items)


def staged_before_a_restart(scene: Scene) -> None:
    with scene.anew() as own:
        item = block(SIZE)
        uri = own.uri(item)
        with own.by_hand() as writer:
            reply = writer.ask("stage_write", uri=uri, size_bytes=SIZE, tier=own.cell.tier)
            write_layout(reply["chunk_layout"], payload("half a write", SIZE))
        own.expect_missed([item])
        own.daemon.restart(crash=True)
        own.expect_missed([item])
        own.store([item])
        own.expect_kept([item])


def made_anew(scene: Scene) -> None:
    items = blocks(1, 4096, SIZE)
    scene.store(items, "first")
    scene.disconnect("first")
    scene.expect_kept(items, "second")
    scene.disconnect("second")


# -- two processes ---------------------------------------------------------------------------------------


class Neighbour:
    """The connector in another process, of another release of LMCache."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.process: ScenarioProcess = scene.other()
        scene.connect(self.process, "neighbour", overwrite=True)

    def arguments(self, items: list[Block]) -> dict[str, object]:
        """What scenarios take."""
        return {
            "names": [item.key for item in items],
            "sizes": [item.size_bytes for item in items],
            "connection": f"{self._scene.prefix}neighbour",
        }

    def store(self, items: list[Block]) -> None:
        contents = [item.payload for item in items]
        stored = self.process.call("adapter.store", **self.arguments(items), contents=contents)
        require(stored, "the other process could not store")

    def load(self, items: list[Block]) -> list[bool]:
        contents = [[item.payload] for item in items]
        got = self.process.call("adapter.load", **self.arguments(items), contents=contents)
        require(not got["wrong"], f"the other process was given wrong bytes: {got['wrong'][:3]}")
        loaded: list[bool] = got["loaded"]
        return loaded

    def close(self) -> None:
        self._scene.disconnect("neighbour")


def each_others(scene: Scene) -> None:
    neighbour = Neighbour(scene)
    mine, theirs = blocks(1, 4096, SIZE), blocks(1, 4096, SIZE)
    scene.store(mine)
    neighbour.store(theirs)
    scene.expect_kept(theirs)
    require(all(neighbour.load(mine)), "the other process missed what was stored here")
    scene.delete(mine)
    require(not any(neighbour.load(mine)), "the other process loaded what was deleted here")
    neighbour.close()


def the_same_key_at_once(scene: Scene) -> None:
    neighbour = Neighbour(scene)
    items = blocks(SIZE, 4096, 100)
    theirs = [replace(item, content="theirs 8") for item in items]
    scene.store([replace(item, content="mine 0") for item in items], OVERWRITING)
    neighbour.process.begin(
        "adapter.store_versions", **neighbour.arguments(items), rounds=8, contents="theirs"
    )
    all_of_them = [f"{whose} {number}" for whose in ("mine", "theirs") for number in range(9)]
    for number in range(1, 9):
        scene.tried_to_store([replace(item, content=f"mine {number}") for item in items], OVERWRITING)
        scene.loaded(items, PLAIN, contents=[all_of_them] * len(items))
    neighbour.process.result()
    neighbour.store(theirs)
    scene.expect_kept(theirs)
    neighbour.close()


CHECKS = (
    Check(
        "local-only",
        THEME,
        local_only,
        "Blocks never reach the backend, while another client's object does.",
        "stores are flushed",
    ),
    Check(
        "connector-made-anew",
        THEME,
        made_anew,
        "What one connector stored, the next one of the same namespace loads.",
        "stores say yes",
        is_long=True,
    ),
    Check(
        "restart",
        THEME,
        partial(restarted, crash=False),
        "After a restart of the daemon between store and load blocks are there and right, in either tier.",
        "stores say yes",
        is_long=True,
    ),
    Check(
        "restart-killed",
        THEME,
        partial(restarted, crash=True),
        "The same where the daemon was killed.",
        "stores say yes",
        is_long=True,
    ),
    Check(
        "restart-staged",
        THEME,
        staged_before_a_restart,
        "What was staged when the daemon was killed is a miss, and can be stored.",
        "loads say yes",
        is_long=True,
    ),
    Check(
        "two-processes",
        THEME,
        each_others,
        "Connectors in two processes, of two releases of LMCache, load and delete each other's blocks.",
        "stores say yes",
        is_long=True,
    ),
    Check(
        "two-processes-one-key",
        THEME,
        the_same_key_at_once,
        "While two processes store the same keys a load gives one version of either, whole.",
        "loads give halves",
        is_long=True,
    ),
)
