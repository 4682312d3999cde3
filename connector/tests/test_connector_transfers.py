"""Store, lookup, load and delete: each key by itself, in as few exchanges as it takes."""

import errno
import os
import threading
import zlib
from collections.abc import Callable

import pytest
from keyed_buffers import MIB, empty, keys_for, path_of, payloads, uri

from hypercache_protocol import checksum
from hypercache_protocol.messages import (
    CommitWrite,
    ErrorReply,
    Locate,
    Reply,
    Request,
    StagedReply,
    StageWrite,
)

SIZES = [1, 4095, 4096, 4097, 100_000, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 17]


# -- the way there and back ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters", [{}, {"tier": "ram"}, {"direct_io": "on"}], ids=["nvme", "ram", "direct"]
)
def test_mixed_sizes_in_one_batch_come_back_as_they_were(scripted, connect, parameters) -> None:
    driver = connect(scripted.socket_path, **parameters)
    keys, data, back = keys_for(SIZES), payloads(SIZES), empty(SIZES)
    assert driver.exists(keys) == [False] * len(SIZES)
    assert driver.store(keys, data).ok
    assert driver.exists(keys) == [True] * len(SIZES)
    assert driver.load(keys, back) == [True] * len(SIZES)
    assert back == data


def test_the_order_of_a_load_is_free_and_duplicates_each_get_their_bytes(scripted, driver) -> None:
    keys, data = keys_for(SIZES), payloads(SIZES)
    assert driver.store(keys, data).ok
    order = [3, 3, 0, 8, 5, 3]
    back = empty([SIZES[number] for number in order])
    assert driver.load([keys[number] for number in order], back) == [True] * len(order)
    assert back == [data[number] for number in order]


def test_empty_batches_complete(driver) -> None:
    assert driver.store([], []).ok
    assert driver.load([], []) == []
    assert driver.exists([]) == []
    assert driver.delete([]) == []


def test_an_object_of_no_bytes_is_one_too(driver) -> None:
    assert driver.store(["k"], [bytearray()]).ok
    assert driver.load(["k"], [bytearray()]) == [True]
    assert driver.load(["k"], [bytearray(1)]) == [False]


def test_a_commit_is_local_only_names_its_stage_and_carries_the_sum_of_every_chunk(scripted, driver) -> None:
    (data,) = payloads([9 * MIB + 17])
    assert driver.store(["k"], [data]).ok
    (stage,) = [request for request in scripted.requests if isinstance(request, StageWrite)]
    (commit,) = [request for request in scripted.requests if isinstance(request, CommitWrite)]
    assert (stage.size_bytes, stage.auto_flush_s3, stage.write_through) == (9 * MIB + 17, False, False)
    assert commit.local_only is True
    assert commit.stage_id is not None
    assert commit.write_through is False
    pieces = [data[start : start + 4 * MIB] for start in range(0, len(data), 4 * MIB)]
    assert commit.chunk_checksums == tuple(zlib.crc32(piece) for piece in pieces)


def test_nothing_is_ever_fetched_from_a_backend(scripted, driver) -> None:
    driver.store(["k"], payloads([10]))
    driver.exists(["k", "l"])
    driver.load(["k", "l"], empty([10, 10]))
    asked = [request for request in scripted.requests if isinstance(request, Locate)]
    assert len(asked) == 5
    assert not any(request.auto_ingest or request.pinned for request in asked)


def test_lookup_and_load_of_64_keys_are_one_exchange_each(scripted, driver) -> None:
    keys, data = [f"k{number}" for number in range(64)], payloads([512] * 64)
    assert driver.store(keys, data).ok
    scripted.hold = 64  # nothing is answered before all 64 are asked
    assert driver.exists(keys) == [True] * 64
    assert driver.load(keys, empty([512] * 64)) == [True] * 64


# -- what is stored already ----------------------------------------------------------------------------------


def test_what_is_stored_already_is_not_written_again(scripted, driver) -> None:
    first, second = payloads([5000, 5000])
    assert driver.store(["k"], [first]).ok
    assert driver.store(["k"], [second]).ok
    assert scripted.counted()["stage_write"] == 1
    assert driver.count("stores", "already_stored") == 1
    (back,) = empty([5000])
    assert driver.load(["k"], [back]) == [True]
    assert back == first


def test_overwrite_writes_it_again(scripted, connect) -> None:
    driver = connect(scripted.socket_path, overwrite=True)
    first, second = payloads([5000, 5000])
    assert driver.store(["k"], [first]).ok
    assert driver.store(["k"], [second]).ok
    (back,) = empty([5000])
    assert driver.load(["k"], [back]) == [True]
    assert back == second


def test_another_size_or_an_unverifiable_object_is_stored_anew(scripted, driver) -> None:
    (short, long) = payloads([5000, 6000])
    assert driver.store(["k"], [short]).ok
    assert driver.store(["k"], [long]).ok
    (back,) = empty([6000])
    assert driver.load(["k"], [back]) == [True]
    assert back == long
    stored = scripted.objects[uri("k")]
    bare = stored.chunk_layout[0].model_copy(update={"checksum": None})
    scripted.objects[uri("k")] = stored.model_copy(update={"chunk_layout": (bare,)})
    assert driver.store(["k"], [long]).ok
    assert driver.load(["k"], [back]) == [True]


def test_a_key_twice_in_one_batch_is_stored_once(scripted, driver) -> None:
    (data,) = payloads([5000])
    assert driver.store(["k", "l", "k"], [data, data, data]).ok
    assert scripted.counted()["stage_write"] == 2
    assert driver.exists(["k", "l"]) == [True, True]


# -- delete --------------------------------------------------------------------------------------------------


def test_delete_tells_of_each_key_that_it_is_gone(scripted, driver) -> None:
    driver.store(["k", "l"], payloads([10, 10]))
    assert driver.delete(["k", "absent", "l"]) == [True, True, True]
    assert driver.exists(["k", "l"]) == [False, False]
    assert (driver.count("deletes", "ok"), driver.count("deletes", "absent")) == (2, 1)


def test_a_delete_that_is_refused_or_unanswered_is_no_delete(scripted, driver) -> None:
    driver.store(["k"], payloads([10]))
    scripted.change = lambda request, reply: (
        ErrorReply(error_message="no") if request.action == "evict" else reply
    )
    assert driver.delete(["k"]) == [False]
    scripted.stop()
    assert driver.delete(["k"]) == [False]
    assert driver.count("deletes", "daemon_gone") == 1
    scripted.start()


# -- devices take turns --------------------------------------------------------------------------------------


def test_all_devices_have_work_from_the_first_chunk_on(scripted, connect, monkeypatch) -> None:
    driver = connect(scripted.socket_path, write_workers=1, store_threads=1, read_workers=1, load_threads=1)
    scripted.chunk_bytes = 5000  # no whole blocks, which would be moved in runs, by one thread each

    def one_device_after_the_other(request: Request, reply: Reply) -> Reply:
        if not isinstance(reply, StagedReply):
            return reply
        chunks = [
            chunk.model_copy(update={"device": scripted.devices[number // 10]})
            for number, chunk in enumerate(reply.chunk_layout)
        ]
        staged = reply.model_copy(update={"chunk_layout": tuple(chunks)})
        scripted.staged[request.uri] = (staged.stage_id, staged)
        return staged

    order: list[str] = []

    def noted(move: Callable[..., int]) -> Callable[..., int]:
        def note(descriptor: int, pieces: list[memoryview], offset: int) -> int:
            order.append(path_of(descriptor))
            return move(descriptor, pieces, offset)

        return note

    scripted.change = one_device_after_the_other
    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    data = bytearray(20 * 5000)
    assert driver.store(["k"], [data]).ok
    assert driver.load(["k"], [data]) == [True]
    assert len(order) == 40
    for one_way in (order[:20], order[20:]):
        assert all(set(one_way[: count * 2]) == set(scripted.devices) for count in range(2, 10))


def test_status_counts_and_shows_what_matters(scripted, driver) -> None:
    driver.store(["k"], payloads([1000]))
    driver.load(["k", "l"], empty([1000, 1000]))
    status = driver.connector.status()
    assert status["loads"] == {"ok": 1, "absent": 1}
    assert status["stores"] == {"ok": 1}
    assert status["bytes"] == {"stored": 1000, "loaded": 1000}
    assert status["daemon"]["instance_id"] == "instance-1"
    assert status["daemon"]["breaker_open"] is False
    assert status["checksum_library"] == checksum.LIBRARY
    assert status["pending"] == 0
    assert set(status["waiting"]) == {"lookup", "load", "store", "delete"}


def test_a_file_system_that_refuses_direct_io_costs_no_byte_and_is_in_the_status(
    scripted, connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refusing(path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", refusing)
    driver = connect(scripted.socket_path, direct_io="on")
    data, back = payloads([5 * MIB]), empty([5 * MIB])
    assert driver.store(["k"], data).ok
    assert driver.load(["k"], back) == [True]
    assert back == data
    status = driver.connector.status()
    assert status["devices_refusing_direct_io"] == scripted.devices
    assert status["transfers"] == {"fallback": 4, "buffered": 4}


@pytest.mark.parametrize("workers", [1, 16])
def test_many_batches_from_many_threads_stay_apart(scripted, connect, workers: int) -> None:
    driver = connect(scripted.socket_path, read_workers=workers, write_workers=workers)
    good: list[int] = []

    def work(thread: int) -> None:
        for turn in range(5):
            sizes = [1000 + thread, 70_000 + turn]
            keys = [f"{thread}-{turn}-{number}" for number in range(2)]
            data, back = payloads(sizes), empty(sizes)
            assert driver.store(keys, data).ok
            assert driver.load(keys, back) == [True, True]
            assert back == data
        good.append(thread)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(good) == list(range(6))
