"""The new KVStore beside the released clients' own, over one daemon: each reads what can be verified."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, running_daemon
from hypercache_compat.payloads import MIB, payload, require_same
from hypercache_compat.scenario_process import ScenarioProcess
from hypercache_connector import KVStore

TIERS = ["ram", "nvme"]
SIZES = [1, 1920, 70_000, 4 * MIB + 1]


@pytest.fixture
def store(daemon: DaemonProcess) -> Iterator[KVStore]:
    """A store with nothing but defaults."""
    with KVStore(daemon.socket_path) as made:
        yield made


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("wire", ["1.1", "2.0"])
def test_old_clients_read_what_the_new_store_put(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str, wire: str, tier: str
) -> None:
    keys = [f"{uri}-{size}" for size in SIZES]
    with KVStore(daemon.socket_path, tier, wire=wire, timeout_s=20.0) as store:
        blocks = [payload(key, size) for key, size in zip(keys, SIZES, strict=True)]
        assert store.put_many(keys, blocks) == [True] * len(keys)
        for key, size, block in zip(keys, SIZES, store.get_many(keys), strict=True):
            require_same(block, payload(key, size))
    for key, size in zip(keys, SIZES, strict=True):
        assert old.call("kv_blocks.get", socket_path=daemon.socket_path, key=key, size_bytes=size)


@pytest.mark.parametrize("tier", TIERS)
def test_old_blocks_have_no_checksums_so_they_are_misses_until_they_are_put_anew(
    old: ScenarioProcess, daemon: DaemonProcess, store: KVStore, uri: str, tier: str
) -> None:
    block = {"socket_path": daemon.socket_path, "key": "block " + tier, "size_bytes": 70_000}
    assert old.call("kv_blocks.put", **block, tier=tier)
    assert not store.exists("block " + tier)
    assert store.get("block " + tier) is None
    assert store.get("block " + tier, bytearray(70_000)) is None
    assert store.status()["loads"] == {"no_checksum": 2}
    assert old.call("kv_blocks.get", **block), "whoever wrote it still has it"

    assert store.put("block " + tier, payload("block " + tier, 70_000), tier)
    require_same(store.get("block " + tier), payload("block " + tier, 70_000))
    assert old.call("kv_blocks.get", **block)


@pytest.mark.parametrize("tier", TIERS)
def test_a_block_that_an_old_client_replaced_is_a_miss_and_never_the_one_before(
    old: ScenarioProcess, daemon: DaemonProcess, store: KVStore, tier: str
) -> None:
    assert store.put("replaced" + tier, payload("before", 70_000), tier)
    assert old.call(
        "kv_blocks.put",
        socket_path=daemon.socket_path,
        key="replaced" + tier,
        size_bytes=70_000,
        tier=tier,
    )
    assert store.get("replaced" + tier) is None
    assert not store.exists("replaced" + tier)


@pytest.mark.parametrize("tier", TIERS)
def test_while_an_old_client_replaces_a_block_reads_give_the_own_one_or_nothing(
    old: ScenarioProcess, daemon: DaemonProcess, store: KVStore, tier: str
) -> None:
    before = payload("before", 70_000)
    assert store.put("busy" + tier, before, tier)
    sizes = [70_000] * 30
    old.begin("kv_blocks.replace", socket_path=daemon.socket_path, key="busy" + tier, sizes=sizes, tier=tier)
    with ThreadPoolExecutor(1) as waiting:
        ended = waiting.submit(old.result)
        seen = {store.get("busy" + tier)}
        while not ended.done():
            seen.add(store.get("busy" + tier))
    ended.result()
    assert seen <= {before, None}
    assert store.get("busy" + tier) is None


def test_an_old_client_sees_that_the_new_store_deleted_its_block(
    old: ScenarioProcess, daemon: DaemonProcess, store: KVStore
) -> None:
    block = {"socket_path": daemon.socket_path, "key": "deleted", "size_bytes": 1000}
    assert old.call("kv_blocks.put", **block, tier="ram")
    assert store.delete("deleted")
    assert not old.call("kv_blocks.get", **block)


@pytest.mark.parametrize(("dtype", "width"), [("float32", np.float32), ("int8", np.int8)])
def test_an_array_that_the_new_store_put_is_an_old_client_s_tensor(
    old: ScenarioProcess, daemon: DaemonProcess, store: KVStore, dtype: str, width: type[np.generic]
) -> None:
    shape = (3, 5, 7)
    assert store.put("array " + dtype, np.arange(105).reshape(shape).astype(width))
    assert old.call(
        "kv_blocks.get_tensor",
        socket_path=daemon.socket_path,
        key="array " + dtype,
        dtype=dtype,
        shape=list(shape),
    )


@pytest.mark.parametrize("named", [{}, {"model_id": "org/möbel"}, {"model_id": "m", "layer_idx": 0}])
def test_both_make_the_same_key_of_a_prefix(old: ScenarioProcess, named: dict[str, object]) -> None:
    for tokens in ([], [1], [5, 0, 128_000]):
        key = KVStore.compute_prefix_hash(tokens, **named)
        assert old.call("kv_blocks.prefix_hash", token_ids=tokens, **named) == key


def test_every_method_takes_what_an_old_call_gives_it(old: ScenarioProcess) -> None:
    signatures = old.call("kv_blocks.signatures")
    assert len(signatures) == 6
    for name, parameters in signatures.items():
        own = inspect.signature(getattr(KVStore, name)).parameters.values()
        assert [[each.name, repr(each.default)] for each in own][: len(parameters)] == parameters, name


def test_without_a_backend_nothing_is_written_through(daemon: DaemonProcess) -> None:
    with KVStore(daemon.socket_path, write_through=True) as store:
        assert not store.put("through", b"abc")
        assert store.status()["stores"] == {"daemon_refused": 1}


def test_write_through_puts_the_block_into_the_backend_too(tmp_path: Path) -> None:
    backend = tmp_path / "backend"
    backend.mkdir()
    with running_daemon(DaemonOptions(backend=str(backend))) as daemon:
        with KVStore(daemon.socket_path, write_through=True) as store:
            assert store.put("k", b"abc")
            assert (backend / "kv_cache" / "k.kv").read_bytes() == b"abc"
            assert store.get("k") == b"abc"
            backend.rename(tmp_path / "away")
            assert not store.put("untaken", b"abc")
            assert store.get("untaken") == b"abc", "it is committed here all the same"
            (tmp_path / "away").rename(backend)
        with KVStore(daemon.socket_path) as local:
            assert local.put("local", b"abc")
            assert not (backend / "kv_cache" / "local.kv").exists()
            assert local.delete("k")
            assert local.get("k") is None, "a read asks no backend"


@pytest.mark.parametrize("tier", TIERS)
def test_a_restart_of_the_daemon_costs_no_block_and_no_call(tier: str) -> None:
    with running_daemon() as daemon, KVStore(daemon.socket_path, tier) as store:
        data = payload(tier, 70_000)
        assert store.put_many(["a", "b"], [data, data], pinned=True) == [True, True]
        daemon.restart(crash=True)
        assert store.get_many(["a", "b", "c"]) == [data, data, None]
        assert store.delete_many(["a", "b"]) == [True, True], "pinned or not"
        assert store.exists_many(["a", "b"]) == [False, False]
