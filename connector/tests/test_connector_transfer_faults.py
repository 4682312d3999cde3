"""Devices and daemons that fail: what fails with them, and that nothing else does."""

import errno
import os
import threading
import zlib
from pathlib import Path

import pytest
from deadline_clock import DeadlineClock
from keyed_buffers import MIB, empty, keys_for, path_of, payloads, uri, with_chunks

from hypercache_compat.waiting import wait_until
from hypercache_connector.direct_io import own_pages
from hypercache_protocol import ErrorCode, SyncStatus
from hypercache_protocol.messages import (
    ChunkLocation,
    CommittedReply,
    ErrorReply,
    HitReply,
    Locate,
    Ping,
    Reply,
    Request,
    StagedReply,
)

# -- faults of devices ---------------------------------------------------------------------------------------


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


def test_chunks_that_have_not_begun_when_time_is_up_are_given_up(
    scripted, connect, clock: DeadlineClock
) -> None:
    driver = connect(scripted.socket_path, transfer_timeout_s=30, read_workers=1)
    scripted.chunk_bytes = 4096
    driver.store(["k"], payloads([40 * 4096]))
    read = clock.slow_down("preadv", 31)
    assert driver.load(["k"], empty([40 * 4096])) == [False]
    assert len(read) <= 2  # its one thread, and the one that waits for it
    assert driver.count("loads", "transfer_late") == 1
    assert driver.exists(["k"]) == [True]


def test_chunks_of_a_store_that_have_not_begun_when_time_is_up_are_given_up_too(
    scripted, connect, clock: DeadlineClock
) -> None:
    driver = connect(scripted.socket_path, transfer_timeout_s=30, write_workers=1)
    scripted.chunk_bytes = 4096
    written = clock.slow_down("pwritev", 31)
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
    wait_until(lambda: not driver.connector.status()["daemon"]["breaker_open"])
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
