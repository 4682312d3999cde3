"""Store, lookup, load and delete: each key by itself, and any doubt about one is a miss."""

import errno
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hypercache_connector import storing
from hypercache_connector.direct_io import own_pages
from hypercache_connector.keys import UriMapping
from hypercache_protocol import ErrorCode, SyncStatus, checksum
from hypercache_protocol.messages import (
    ChunkLocation,
    CommittedReply,
    CommitWrite,
    ErrorReply,
    HitReply,
    Locate,
    Ping,
    Reply,
    Request,
    StagedReply,
    StageWrite,
)

MIB = 1 << 20
SIZES = [1, 4095, 4096, 4097, 100_000, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 17]
MAPPING = UriMapping("test")


def uri(key: str) -> str:
    return MAPPING.uri(key)


def payloads(sizes: list[int]) -> list[bytearray]:
    return [bytearray(os.urandom(size)) for size in sizes]


def keys_for(sizes: list[int]) -> list[str]:
    return [f"org/model@00000001@0@{number:04x}" for number in range(len(sizes))]


def empty(sizes: list[int]) -> list[bytearray]:
    return [bytearray(size) for size in sizes]


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


# -- any doubt is a miss for that key alone ------------------------------------------------------------------


def with_chunks(hit: HitReply, **update: object) -> HitReply:
    chunks = tuple(chunk.model_copy(update=update) for chunk in hit.chunk_layout)
    return hit.model_copy(update={"chunk_layout": chunks})


def without_last_chunk(hit: HitReply) -> HitReply:
    return hit.model_copy(update={"chunk_layout": hit.chunk_layout[:-1]})


def last_chunk_twice(hit: HitReply) -> HitReply:
    return hit.model_copy(update={"chunk_layout": (*hit.chunk_layout, hit.chunk_layout[-1])})


def chunks_swapped(hit: HitReply) -> HitReply:
    first, second, *rest = hit.chunk_layout
    moved = (
        second.model_copy(update={"checksum": first.checksum}),
        first.model_copy(update={"checksum": second.checksum}),
    )
    return hit.model_copy(update={"chunk_layout": (*moved, *rest)})


def last_checksum_missing(hit: HitReply) -> HitReply:
    *rest, last = hit.chunk_layout
    return hit.model_copy(update={"chunk_layout": (*rest, last.model_copy(update={"checksum": None}))})


DOUBTS: dict[str, tuple[Callable[[HitReply], HitReply], str, bool]] = {
    # name: what is wrong, the counter, whether a lookup can know
    "staged": (lambda hit: hit.model_copy(update={"sync_status": SyncStatus.STAGED}), "staged", True),
    "no state": (lambda hit: hit.model_copy(update={"sync_status": None}), "no_sync_status", True),
    "no checksums": (lambda hit: with_chunks(hit, checksum=None), "no_checksum", True),
    "one checksum missing": (last_checksum_missing, "no_checksum", True),
    "chunk missing": (without_last_chunk, "bad_layout", True),
    "chunk too many": (last_chunk_twice, "bad_layout", True),
    "larger": (lambda hit: hit.model_copy(update={"object_size": hit.object_size + 1}), "wrong_size", True),
    "smaller": (lambda hit: hit.model_copy(update={"object_size": hit.object_size - 1}), "wrong_size", True),
    "chunks swapped": (chunks_swapped, "checksum_mismatch", False),
    "other place": (lambda hit: with_chunks(hit, offset=128 * MIB), "checksum_mismatch", False),
    "device gone": (lambda hit: with_chunks(hit, device="/nowhere/device"), "device_failed", False),
    "relative device": (lambda hit: with_chunks(hit, device="device-0"), "device_failed", False),
    "device is a folder": (lambda hit: with_chunks(hit, device="/"), "device_failed", False),
    "beyond the end": (lambda hit: with_chunks(hit, offset=1 << 40), "short_transfer", False),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_any_doubt_is_a_miss_for_that_key_alone(scripted, driver, name: str) -> None:
    spoil, counter, known_to_lookup = DOUBTS[name]
    sizes = [8 * MIB] * 3
    keys, data, back = keys_for(sizes), payloads(sizes), empty(sizes)
    assert driver.store(keys, data).ok

    def change(request: Request, reply: Reply) -> Reply:
        return spoil(reply) if isinstance(reply, HitReply) and request == spoiled else reply

    spoiled = Locate(uri=uri(keys[1]), auto_ingest=False)
    scripted.change = change
    assert driver.load(keys, back) == [True, False, True]
    assert (back[0], back[2]) == (data[0], data[2])
    assert driver.count("loads", counter) == 1
    if known_to_lookup:
        assert driver.exists(keys) == [True, False, True]


def test_a_buffer_of_another_size_is_a_miss_and_not_touched(scripted, driver) -> None:
    driver.store(["k"], payloads([5000]))
    for size in (0, 1, 4999, 5001, 8192):
        buffer = bytearray(b"\xa5" * size)
        assert driver.load(["k"], [buffer]) == [False]
        assert buffer == b"\xa5" * size
    assert driver.count("loads", "wrong_size") == 5


@pytest.mark.parametrize("position", [0, 1, 4 * MIB - 1, 4 * MIB, 9 * MIB + 16])
def test_one_flipped_byte_anywhere_is_a_miss_and_a_store_heals_it(scripted, driver, position: int) -> None:
    sizes = [9 * MIB + 17] * 2
    keys, data, back = keys_for(sizes), payloads(sizes), empty(sizes)
    assert driver.store(keys, data).ok
    scripted.flip_byte(uri(keys[0]), position)
    assert driver.exists(keys) == [True, True]
    assert driver.load(keys, back) == [False, True]
    assert back[1] == data[1]
    assert driver.exists(keys) == [False, True]
    assert driver.count("healing", "evicted") == 1
    assert driver.store(keys, data).ok
    assert driver.load(keys, back) == [True, True]
    assert back == data


@pytest.mark.parametrize("damage", ["a flipped byte", "a short device"])
@pytest.mark.parametrize("state", [SyncStatus.COMMITTED, SyncStatus.SYNCING_BACKEND])
def test_what_no_backend_has_is_a_miss_when_it_is_damaged_and_not_evicted(
    scripted, driver, damage: str, state: SyncStatus
) -> None:
    assert driver.store(["k"], payloads([1000])).ok
    kept = scripted.objects[uri("k")].model_copy(update={"sync_status": state})
    scripted.objects[uri("k")] = kept
    if damage == "a flipped byte":
        scripted.flip_byte(uri("k"), 0)
    else:
        os.truncate(kept.chunk_layout[0].device, 0)
    assert driver.load(["k"], empty([1000])) == [False]
    assert scripted.objects[uri("k")] == kept
    assert driver.count("healing", "evicted") == 0


def test_a_device_file_that_was_replaced_is_opened_anew_after_one_miss(scripted, driver, connect) -> None:
    (device,) = scripted.devices = scripted.devices[:1]
    (data,) = payloads([5000])
    driver.store(["old"], [data])
    assert driver.load(["old"], empty([5000])) == [True]
    shutil.copy(device, f"{device}.copy")
    Path(f"{device}.copy").rename(device)
    other = connect(scripted.socket_path)
    other.store(["k"], [data])
    assert driver.load(["k"], empty([5000])) == [False]
    other.store(["k"], [data])
    assert driver.load(["k"], empty([5000])) == [True]


def test_a_truncated_device_is_a_miss_and_healed(scripted, driver) -> None:
    (data,) = payloads([1000])
    driver.store(["k"], [data])
    os.truncate(scripted.objects[uri("k")].chunk_layout[0].device, 0)
    assert driver.load(["k"], empty([1000])) == [False]
    assert driver.count("loads", "short_transfer") == 1
    assert driver.exists(["k"]) == [False]


def test_an_object_replaced_while_it_was_read_misses_once_and_stays(scripted, driver) -> None:
    sizes = [5000]
    (old,), (new,) = payloads(sizes), payloads(sizes)
    driver.store(["k"], [old])
    stale = scripted.objects[uri("k")]
    driver.delete(["k"])
    driver.store(["k"], [new])
    scripted.flip_byte(uri("k"), 0)
    current, scripted.objects[uri("k")] = scripted.objects[uri("k")], stale
    (path,) = {chunk.device for chunk in stale.chunk_layout}
    with open(path, "r+b") as file:  # the old blocks were reused
        file.seek(stale.chunk_layout[0].offset)
        file.write(os.urandom(5000))
    located: list[int] = []

    def replace_after_first_look(request: Request, reply: Reply) -> Reply:
        if isinstance(request, Locate):
            located.append(1)
            scripted.objects[uri("k")] = current
        return reply

    scripted.change = replace_after_first_look
    assert driver.load(["k"], empty(sizes)) == [False]
    assert len(located) == 2
    assert scripted.counted()["evict"] == 1  # the test's own
    assert scripted.objects[uri("k")] is current


def test_a_device_this_user_may_not_read_costs_nobody_the_object(
    scripted, driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.store(["k"], payloads([1000]))
    driver.connector._engine.devices.forget_all()
    real_open = os.open

    def forbidden(path: str, flags: int) -> int:
        if "device-" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real_open(path, flags)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", forbidden)
        assert driver.load(["k"], empty([1000])) == [False]
    assert driver.count("loads", "device_failed") == 1
    assert driver.exists(["k"]) == [True]
    assert driver.load(["k"], empty([1000])) == [True]


# -- faults of devices ---------------------------------------------------------------------------------------


def path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def fail_once_on(path: str, number: int, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the first transfer to or from `path` fail with this error."""
    real = getattr(os, name)
    left = [None]

    def failing(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        if path_of(descriptor) == path and left:
            left.clear()
            raise OSError(number, os.strerror(number))
        return real(descriptor, pieces, offset)

    monkeypatch.setattr(os, name, failing)


@pytest.mark.parametrize(
    ("number", "counter"),
    [
        (errno.EIO, "io_error"),
        (errno.ENOSPC, "no_space"),
        (errno.EDQUOT, "no_space"),
        (errno.ENXIO, "device_failed"),
    ],
)
def test_a_write_that_fails_is_that_key_s_failure_alone_and_leaves_nothing_staged(
    scripted, driver, monkeypatch: pytest.MonkeyPatch, number: int, counter: str
) -> None:
    sizes = [1000, 1000]
    keys, data = keys_for(sizes), payloads(sizes)
    fail_once_on(scripted.devices[0], number, monkeypatch, "pwritev")
    result = driver.store(keys, data)
    assert not result.ok
    assert result.error == f"{counter}: 1"
    assert sorted(driver.exists(keys)) == [False, True]
    assert scripted.counted()["evict"] == 1
    assert scripted.counted()["commit_write"] == 1
    assert driver.store(keys, data).ok
    assert driver.exists(keys) == [True, True]


@pytest.mark.parametrize("direct_io", ["off", "on"])
def test_a_write_that_ends_early_is_never_committed(
    scripted, connect, monkeypatch: pytest.MonkeyPatch, direct_io: str
) -> None:
    driver = connect(scripted.socket_path, direct_io=direct_io)
    real = os.pwritev
    # All but the last block of a chunk, and then no more: the device ends there.
    taken = iter([8192])
    monkeypatch.setattr(
        os, "pwritev", lambda fd, pieces, offset: real(fd, [pieces[0][: next(taken, 0)]], offset)
    )
    (data,) = payloads([12288])
    assert driver.store(["k"], [data]).error == "short_transfer: 1"
    assert scripted.counted()["commit_write"] == 0
    assert scripted.counted()["evict"] == 1
    assert driver.exists(["k"]) == [False]


def test_a_read_that_fails_is_that_key_s_miss_alone(
    scripted, driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [1000, 1000]
    keys, data, back = keys_for(sizes), payloads(sizes), empty(sizes)
    driver.store(keys, data)
    fail_once_on(scripted.devices[0], errno.EIO, monkeypatch, "preadv")
    loaded = driver.load(keys, back)
    assert sorted(loaded) == [False, True]
    assert driver.count("loads", "io_error") == 1
    assert driver.exists(keys) == loaded  # what can't be read is dropped, so that a store heals it
    assert driver.store(keys, data).ok
    assert driver.load(keys, back) == [True, True]


def test_chunks_that_have_not_begun_when_time_is_up_are_given_up(scripted, connect, monkeypatch) -> None:
    driver = connect(scripted.socket_path, transfer_timeout_s=0.2, read_workers=1)
    sizes = [8 * MIB]
    driver.store(["k"], payloads(sizes))
    real = os.preadv

    def slow(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        time.sleep(0.3)
        return real(descriptor, pieces, offset)

    chunks = 40
    scripted.chunk_bytes = 4096
    driver.store(["many"], payloads([chunks * 4096]))
    monkeypatch.setattr(os, "preadv", slow)
    began = time.monotonic()
    assert driver.load(["many"], empty([chunks * 4096])) == [False]
    assert time.monotonic() - began < 5
    assert driver.count("loads", "transfer_late") == 1
    assert driver.exists(["many"]) == [True]


def test_chunks_of_a_store_that_have_not_begun_when_time_is_up_are_given_up_too(
    scripted, connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = connect(scripted.socket_path, transfer_timeout_s=30, write_workers=1)
    scripted.chunk_bytes = 4096
    now, written, real = [0.0], [], os.pwritev

    def slow(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        written.append(offset)
        now[0] += 31
        return real(descriptor, pieces, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    monkeypatch.setattr(storing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    unaligned = memoryview(own_pages(40 * 4096 + 1))[1:]
    assert driver.store(["k"], [unaligned]).error == "transfer_late: 1"
    assert len(written) <= 2  # its one thread, and the one that waits for it
    assert scripted.objects == {}
    assert scripted.counted()["evict"] == 1  # what was staged is given back


# -- faults of the daemon ------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["locate", "stage_write", "commit_write"])
@pytest.mark.parametrize("end", ["closed", "garbage", "late"])
def test_a_store_whose_exchange_breaks_off_fails_and_the_next_one_works(
    scripted, connect, action: str, end: str
) -> None:
    driver = connect(scripted.socket_path, timeout_s=0.5, probe_interval_s=0.01)
    sizes = [1000] * 3
    keys, data = keys_for(sizes), payloads(sizes)
    broken = threading.Event()

    def break_off(request: Request, reply_data: bytes) -> bytes | None:
        if request.action != action or broken.is_set():
            return reply_data
        broken.set()
        return {"closed": None, "garbage": b"}\n", "late": b""}[end]

    scripted.garble = break_off
    assert not driver.store(keys, data).ok
    assert broken.is_set()
    deadline = time.monotonic() + 20
    while driver.connector.status()["daemon"]["breaker_open"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert driver.store(keys, data).ok
    back = empty(sizes)
    assert driver.load(keys, back) == [True] * 3
    assert back == data


def test_a_commit_that_is_turned_away_is_no_reason_to_evict_what_is_staged_there_now(
    scripted, driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The daemon was restarted meanwhile, and what is staged under the name is another client's.
    real, full = os.pwritev, ErrorReply(error_message="full", error_code=ErrorCode.UNAVAILABLE)

    def restart(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        scripted.drop_connections()
        turned_away = iter([full, full])  # after its hello, and on a connection of wire 1
        scripted.change = lambda request, reply: (
            next(turned_away, reply) if isinstance(request, Ping) else reply
        )
        return real(descriptor, pieces, offset)

    monkeypatch.setattr(os, "pwritev", restart)
    assert driver.store(["k"], payloads([1000])).error == "turned_away: 1"
    assert scripted.staged
    assert driver.exists(["k"]) == [False]
    assert (scripted.counted()["commit_write"], scripted.counted()["evict"]) == (0, 0)


def test_an_exchange_that_breaks_off_part_way_finds_no_key_at_all(scripted, driver) -> None:
    keys, data = [f"k{number}" for number in range(10)], payloads([10] * 10)
    driver.store(keys, data)
    scripted.garble = lambda request, reply_data: (
        None if request == Locate(uri=uri("k7"), auto_ingest=False) else reply_data
    )
    assert driver.exists(keys) == [False] * 10
    assert driver.load(keys, empty([10] * 10)) == [False] * 10
    scripted.garble = lambda request, reply_data: reply_data
    assert driver.exists(keys) == [True] * 10


@pytest.mark.parametrize("features", [None, (), ("chunk_checksums", "sync_status"), ("local_only",)])
def test_an_old_daemon_is_a_miss_that_says_why_once(
    scripted, driver, caplog: pytest.LogCaptureFixture, features: tuple[str, ...] | None
) -> None:
    driver.store(["k"], payloads([10]))
    scripted.stop()
    scripted.features = features
    scripted.start()
    before = scripted.counted()
    for _ in range(3):
        assert not driver.store(["l"], payloads([10])).ok
    assert scripted.counted()["stage_write"] == before["stage_write"]
    complete = features is not None and {"chunk_checksums", "sync_status"} <= set(features)
    for _ in range(3):
        assert driver.load(["k"], empty([10])) == [complete]
        assert driver.exists(["k"]) == [complete]
    said = [record.getMessage() for record in caplog.records if "the daemon lacks" in record.getMessage()]
    assert len(said) == 1
    assert "upgrade it to wire 1.1" in said[0]
    assert driver.count("stores", "daemon_too_old") == 3


def test_a_stage_without_a_name_is_not_committed(scripted, driver) -> None:
    scripted.change = lambda request, reply: (
        reply.model_copy(update={"stage_id": None}) if isinstance(reply, StagedReply) else reply
    )
    assert not driver.store(["k"], payloads([10])).ok
    assert scripted.counted()["commit_write"] == 0
    assert driver.count("stores", "no_stage_id") == 1


@pytest.mark.parametrize(
    ("code", "counter"),
    [
        (ErrorCode.NO_SPACE, "no_space"),
        (ErrorCode.STALE_STAGE, "stale_stage"),
        (ErrorCode.INTERNAL, "daemon_refused"),
        (None, "daemon_refused"),
    ],
)
@pytest.mark.parametrize("action", ["stage_write", "commit_write"])
def test_a_refusal_fails_its_key_alone(
    scripted, driver, action: str, code: ErrorCode | None, counter: str
) -> None:
    refused = uri("k1")

    def refuse(request: Request, reply: Reply) -> Reply:
        if request.action == action and getattr(request, "uri", "") == refused:
            return ErrorReply(error_message="no", error_code=code)
        return reply

    scripted.change = refuse
    result = driver.store(["k0", "k1", "k2"], payloads([10, 10, 10]))
    assert (result.ok, result.error) == (False, f"{counter}: 1")
    scripted.change = lambda request, reply: reply
    assert driver.count("stores", "ok") == 2
    assert driver.exists(["k0", "k2"]) == [True, True]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda reply: reply.model_copy(update={"object_size": reply.object_size - 1}),
        lambda reply: reply.model_copy(update={"chunk_layout": reply.chunk_layout[:-1]}),
        lambda reply: reply.model_copy(update={"chunk_layout": reply.chunk_layout * 2}),
    ],
    ids=["size", "chunk missing", "chunks twice"],
)
def test_blocks_that_do_not_fit_are_not_written(scripted, driver, spoil) -> None:
    scripted.change = lambda request, reply: spoil(reply) if isinstance(reply, StagedReply) else reply
    assert not driver.store(["k"], payloads([9 * MIB])).ok
    assert scripted.counted()["commit_write"] == 0
    assert driver.connector.status().get("transfers") is None


def test_a_commit_of_another_size_is_no_success(scripted, driver) -> None:
    scripted.change = lambda request, reply: (
        reply.model_copy(update={"object_size": 9}) if isinstance(reply, CommittedReply) else reply
    )
    assert not driver.store(["k"], payloads([10])).ok


def test_ram_files_are_written_where_they_are_and_never_created(scripted, connect) -> None:
    driver = connect(scripted.socket_path, tier="ram")

    def remove_file(request: Request, reply: Reply) -> Reply:
        if isinstance(reply, StagedReply):
            Path(reply.chunk_layout[0].device).unlink()
        return reply

    scripted.change = remove_file
    assert not driver.store(["k"], payloads([10])).ok
    assert driver.count("stores", "ram_file_gone") == 1
    assert not list(scripted.folder.glob("ram-*"))
    scripted.change = lambda request, reply: reply
    assert driver.store(["k"], payloads([10])).ok
    for path in scripted.folder.glob("ram-*"):
        path.unlink()
    assert driver.load(["k"], empty([10])) == [False]
    assert driver.exists(["k"]) == [False]  # lost for good, so a store may heal it
    assert driver.store(["k"], payloads([10])).ok
    assert driver.load(["k"], empty([10])) == [True]


def test_ram_files_in_a_file_system_that_is_not_ours_cost_nobody_the_object(scripted, connect) -> None:
    driver = connect(scripted.socket_path, tier="ram")
    driver.store(["k"], payloads([10]))
    ours = scripted.objects[uri("k")]
    scripted.objects[uri("k")] = with_chunks(ours, device="/not/mounted/here/ram-0")
    assert driver.load(["k"], empty([10])) == [False]
    assert driver.count("loads", "device_failed") == 1
    assert driver.exists(["k"]) == [True]


def test_the_log_stays_small_however_many_faults_there_are(scripted, connect, caplog) -> None:
    driver = connect(scripted.socket_path, tier="ram")
    keys = [f"k{number}" for number in range(100)]
    driver.store(keys, payloads([10] * 100))
    for key in keys:
        scripted.objects[uri(key)] = with_chunks(scripted.objects[uri(key)], device=f"/not/here/{key}")
    assert driver.load(keys, empty([10] * 100)) == [False] * 100
    assert len([record for record in caplog.records if "/not/here/" in record.getMessage()]) == 1


def test_ram_chunks_are_read_at_their_offset(scripted, connect) -> None:
    driver = connect(scripted.socket_path, tier="ram")
    data = os.urandom(100)
    path = scripted.folder / "ram-file"
    path.write_bytes(b"before" + data)
    chunk = ChunkLocation(device=str(path), offset=6, length=100, tier="ram", checksum=zlib.crc32(data))
    scripted.objects[uri("k")] = HitReply(
        object_size=100, chunk_layout=(chunk,), sync_status=SyncStatus.LOCAL_ONLY
    )
    (back,) = empty([100])
    assert driver.load(["k"], [back]) == [True]
    assert back == data


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
