"""Any doubt about what lies where, or about its bytes, is a miss for that key alone."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from keyed_buffers import MIB, empty, keys_for, payloads, uri, with_chunks

from hypercache_protocol import SyncStatus
from hypercache_protocol.messages import HitReply, Locate, Reply, Request


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
