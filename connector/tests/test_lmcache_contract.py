"""LMCache's side of the contract: its own adapter, made from its own JSON, around the connector.

One test per promise that LMCache's native_plugin adapter relies on, against a scripted daemon where
something has to go wrong and the real one where nothing has to.
"""

import argparse
import json
import os
import select
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hypercache_compat.daemon_process import DaemonProcess, running_daemon
from hypercache_compat.waiting import wait_until
from hypercache_connector import HyperCacheConnector
from hypercache_connector.keys import UriMapping
from hypercache_protocol.messages import ErrorReply, Evict

MIB = 1 << 20
DEADLINE_S = 30.0


class LMCache:
    """LMCache's adapter and what its controllers do with it."""

    def __init__(self, **adapter_params: Any) -> None:
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

        spec = {
            "type": "native_plugin",
            "module_path": "hypercache_connector",
            "class_name": "HyperCacheConnector",
            "adapter_params": adapter_params,
        }
        config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))
        self.adapter = create_l2_adapter(config.adapters[0])
        self.connector: HyperCacheConnector = self.adapter._client

    def store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        task = self.adapter.submit_store_task(list(keys), list(objects))
        return self._result(self.adapter.get_store_event_fd(), lambda: self._stored(task))

    def lookup(self, keys: Sequence[Any]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(list(keys), {})
        bits = self._result(
            self.adapter.get_lookup_and_lock_event_fd(),
            lambda: self.adapter.query_lookup_and_lock_result(task),
        )
        return [bool(bits.test(number)) for number in range(len(keys))]

    def load(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(list(keys), list(objects))
        bits = self._result(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task))
        return [bool(bits.test(number)) for number in range(len(keys))]

    def _stored(self, task: int) -> Any:
        return self.adapter.pop_completed_store_tasks().get(task)

    def _result(self, event_fd: int, pop: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while (result := pop()) is None:
            assert time.monotonic() < deadline, "LMCache never heard of it"
            select.select([event_fd], [], [], 0.05)
        return result


def key(name: str, **fields: Any) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(**{"chunk_hash": name.encode(), "model_name": "org/model-7B", "kv_rank": 1} | fields)


def memory(content: bytes | int) -> Any:
    """A memory object as LMCache's allocator makes them: of this content, or of so many bytes."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    size = content if isinstance(content, int) else len(content)
    backing = torch.zeros(size + 2 * 4096, dtype=torch.uint8)
    start = -backing.data_ptr() % 4096
    tensor = backing[start : start + size]
    if isinstance(content, bytes):
        tensor.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    metadata = MemoryObjMetadata(
        shape=torch.Size([size]),
        dtype=torch.uint8,
        address=start,
        phy_size=-(-size // 4096) * 4096,
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    return TensorMemoryObj(tensor, metadata, parent_allocator=None)


def bytes_of(item: Any) -> bytes:
    return bytes(item.byte_array)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """LMCache and what it brings warn about things of their own, when they are first used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LMCache(socket_path="/nowhere/s", namespace="n").adapter.close()
        memory(1)


@pytest.fixture
def over(scripted) -> Iterator[LMCache]:
    """LMCache over a scripted daemon."""
    made = LMCache(socket_path=scripted.socket_path, namespace="test", timeout_s=10.0)
    yield made
    made.adapter.close()


@pytest.fixture(scope="module")
def real_daemon() -> Iterator[DaemonProcess]:
    with running_daemon() as daemon:
        yield daemon


# -- loading -----------------------------------------------------------------------------------------------


def test_lmcache_makes_the_adapter_from_its_json_and_finds_delete(over: LMCache) -> None:
    assert type(over.adapter).__name__ == "NativeConnectorL2Adapter"
    assert over.adapter._has_delete
    assert over.adapter.report_status()["is_healthy"]
    assert over.adapter.report_status()["type"] == "HyperCacheConnector"


@pytest.mark.parametrize("wrong", [{}, {"namespace": "n", "sokcet": 1}])
def test_a_wrong_parameter_stops_lmcache_s_start(folder, wrong: dict[str, Any]) -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="hypercache_connector: adapter_params"):
        LMCache(socket_path=str(folder / "s"), **wrong)
    assert threading.active_count() <= before  # one of an earlier test may have ended meanwhile


def test_a_daemon_that_is_down_does_not(folder) -> None:
    made = LMCache(socket_path=str(folder / "s"), namespace="n")
    assert made.lookup([key("a")]) == [False]
    assert made.load([key("a")], [memory(8)]) == [False]
    assert not made.store([key("a")], [memory(8)]).is_successful()
    made.adapter.close()


# -- results -----------------------------------------------------------------------------------------------


def test_a_load_tells_of_each_key_and_never_claims_one_by_silence(scripted, over: LMCache) -> None:
    content = [os.urandom(size) for size in (5000, 5000, 5000)]
    keys = [key(name) for name in "abc"]
    assert over.store(keys, [memory(each) for each in content]).is_successful()
    uri = UriMapping("test").uri(f"org/model-7B@00000001@0@{b'b'.hex()}")
    assert uri in scripted.objects
    scripted.flip_byte(uri, 4999)
    back = [memory(5000) for _ in keys]
    assert over.load(keys, back) == [True, False, True]
    assert [bytes_of(back[0]), bytes_of(back[2])] == [content[0], content[2]]


@pytest.mark.parametrize("fault", ["gone", "garbage", "bug", "closed"])
def test_a_load_that_fails_as_a_whole_loads_nothing(
    scripted, over: LMCache, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    from hypercache_connector import adapter as adapter_module

    keys = [key(name) for name in "ab"]
    assert over.store(keys, [memory(b"x" * 100)] * 2).is_successful()
    match fault:
        case "gone":
            scripted.garble = lambda request, data: None
        case "garbage":
            scripted.garble = lambda request, data: b"!\n"
        case "bug":
            monkeypatch.setattr(adapter_module, "load", lambda *_: 1 / 0)
        case "closed":
            over.connector.close()
            raw = over.connector.submit_batch_get(["k", "l"], [bytearray(1)] * 2)
            results = {each.future_id: each for each in over.connector.drain_completions()}
            assert (results[raw].ok, results[raw].result_bools) == (False, [False, False])
            return
    assert over.load(keys, [memory(100), memory(100)]) == [False, False]


def test_a_lookup_tells_of_each_key(over: LMCache) -> None:
    assert over.store([key("a"), key("c")], [memory(b"1"), memory(b"2")]).is_successful()
    assert over.lookup([key("a"), key("b"), key("c")]) == [True, False, True]


def test_a_store_is_a_success_only_as_a_whole(scripted, over: LMCache) -> None:
    scripted.change = lambda request, reply: (
        ErrorReply(error_message="full") if getattr(request, "size_bytes", 0) == 7 else reply
    )
    result = over.store([key("a"), key("b")], [memory(b"12345"), memory(b"1234567")])
    assert not result.is_successful()
    assert over.adapter.get_usage().total_bytes_used == 0
    result = over.store([key("a")], [memory(b"12345")])
    assert result.is_successful()
    assert over.adapter.get_usage().total_bytes_used == 5


def test_a_delete_frees_what_lmcache_counts_even_where_the_daemon_evicted_first(
    scripted, over: LMCache
) -> None:
    keys = [key("a"), key("b")]
    over.store(keys, [memory(b"12345"), memory(b"123")])
    assert over.adapter.get_usage().total_bytes_used == 8
    evicted = next(iter(scripted.objects))
    del scripted.objects[evicted]
    over.adapter.delete(keys)
    assert over.adapter.get_usage().total_bytes_used == 0
    assert over.lookup(keys) == [False, False]


def test_a_delete_that_fails_frees_nothing_and_takes_no_30_seconds(scripted, over: LMCache) -> None:
    over.store([key("a")], [memory(b"12345")])
    scripted.garble = lambda request, data: None if isinstance(request, Evict) else data
    began = time.monotonic()
    over.adapter.delete([key("a")])
    assert time.monotonic() - began < 15
    assert over.adapter.get_usage().total_bytes_used == 5


# -- submitting and draining ---------------------------------------------------------------------------------


def test_draining_clears_the_eventfd_which_lmcache_never_reads(over: LMCache) -> None:
    for _ in range(3):
        over.lookup([key("a")])
        # LMCache's thread has drained by now; a counter left standing would make it spin.
        assert select.select([over.connector.event_fd()], [], [], 0)[0] == []


def test_submitting_under_lmcache_s_lock_takes_no_time_whatever_the_daemon_does(
    scripted, over: LMCache
) -> None:
    scripted.freeze()
    began = time.monotonic()
    tasks = [over.adapter.submit_lookup_and_lock_task([key("a")], {}) for _ in range(200)]
    tasks += [over.adapter.submit_load_task([key("a")], [memory(8)]) for _ in range(50)]
    tasks += [over.adapter.submit_store_task([key("a")], [memory(8)]) for _ in range(50)]
    assert time.monotonic() - began < 2
    assert len(set(tasks)) == 300
    assert over.adapter._lock.acquire(timeout=1)  # and the completion thread can have it
    over.adapter._lock.release()


def test_every_task_completes_once(scripted, over: LMCache) -> None:
    seen: list[int] = []
    real = over.connector.drain_completions

    def noting() -> Any:
        taken = real()
        seen.extend(completion.future_id for completion in taken)
        return taken

    over.connector.drain_completions = noting
    tasks = [over.adapter.submit_lookup_and_lock_task([key("a")], {}) for _ in range(100)]
    wait_until(lambda: not over.adapter._pending_ops)
    results = [over.adapter.query_lookup_and_lock_result(task) for task in tasks]
    assert None not in results
    assert len(seen) == len(set(seen)) == 100


def test_an_eviction_between_lookup_and_load_is_a_legal_miss_and_unlock_is_not_our_affair(
    scripted, over: LMCache
) -> None:
    over.store([key("a")], [memory(b"12345")])
    assert over.lookup([key("a")]) == [True]
    before = scripted.counted()
    scripted.objects.clear()
    assert over.load([key("a")], [memory(5)]) == [False]
    over.adapter.submit_unlock([key("a")])
    assert scripted.counted() - before == {"locate": 1}


# -- close -------------------------------------------------------------------------------------------------


def test_no_buffer_is_written_after_close_returned(scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    made = LMCache(socket_path=scripted.socket_path, namespace="test", timeout_s=10.0)
    made.store([key("a")], [memory(os.urandom(20 * MIB))])
    real, begun, going = os.preadv, threading.Event(), threading.Event()

    def held(*arguments: Any) -> int:
        begun.set()
        assert going.wait(DEADLINE_S)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", held)
    target = memory(20 * MIB)
    made.adapter.submit_load_task([key("a")], [target])
    assert begun.wait(DEADLINE_S)
    closing = threading.Thread(target=made.adapter.close)
    closing.start()
    wait_until(made.connector._engine.readers._closing.is_set)
    assert closing.is_alive()
    going.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    after = bytes_of(target)
    assert not [each for each in threading.enumerate() if each.name.startswith("hypercache")]
    assert bytes_of(target) == after


def test_lmcache_s_close_is_quick_with_a_frozen_daemon(scripted) -> None:
    made = LMCache(socket_path=scripted.socket_path, namespace="test", timeout_s=60.0)
    scripted.freeze()
    made.adapter.submit_lookup_and_lock_task([key("a")], {})
    made.adapter.submit_load_task([key("a")], [memory(8)])
    began = time.monotonic()
    made.adapter.close()
    assert time.monotonic() - began < 10


# -- keys --------------------------------------------------------------------------------------------------


def test_every_part_of_a_key_and_the_namespace_keep_objects_apart(real_daemon: DaemonProcess) -> None:
    variants = [
        {},
        {"model_name": "org/model-7b"},
        {"model_name": "org%2Fmodel-7B"},
        {"model_name": "模型/7B"},
        {"kv_rank": 2},
        {"object_group_id": 1},
        {"chunk_hash": b"other"},
        {"cache_salt": "salt"},
        {"cache_salt": "Salt"},
        {"cache_salt": "x" * 128},
        {"model_name": "m" * 1000},
    ]
    keys = [key("same", **fields) for fields in variants]
    one = LMCache(socket_path=real_daemon.socket_path, namespace="rev-1", timeout_s=20.0)
    other = LMCache(socket_path=real_daemon.socket_path, namespace="rev-2", timeout_s=20.0)
    for number in range(len(keys)):
        assert one.lookup(keys) == [each < number for each in range(len(keys))]
        assert one.store([keys[number]], [memory(b"%05d" % number)]).is_successful()
    back = [memory(5) for _ in keys]
    assert one.load(keys, back) == [True] * len(keys)
    assert [bytes_of(each) for each in back] == [b"%05d" % number for number in range(len(keys))]
    assert other.lookup(keys) == [False] * len(keys)
    one.adapter.close()
    other.adapter.close()


# -- buffers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [{}, {"direct_io": "on"}, {"tier": "ram"}], ids=str)
def test_buffers_of_any_size_mix_in_one_batch(real_daemon: DaemonProcess, parameters: dict[str, Any]) -> None:
    sizes = [1, 511, 4095, 4096, 4097, 1_000_003, 4 * MIB, 4 * MIB + 1, 20 * MIB + 123]
    names = [f"{parameters}-{size}" for size in sizes]
    keys, content = [key(name) for name in names], [os.urandom(size) for size in sizes]
    made = LMCache(socket_path=real_daemon.socket_path, namespace="sizes", timeout_s=20.0, **parameters)
    assert made.store(keys, [memory(each) for each in content]).is_successful()
    assert made.lookup(keys) == [True] * len(keys)
    back = [memory(size) for size in sizes]
    assert made.load(keys, back) == [True] * len(keys)
    assert [bytes_of(each) for each in back] == content
    assert made.load(keys[:2], [memory(2), memory(510)]) == [False, False]
    made.adapter.delete(keys)
    assert made.lookup(keys) == [False] * len(keys)
    made.adapter.close()
