"""Sealed objects on the real daemon, held to an old wire, upgraded and held again: right bytes or a miss."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hypercache_compat import raw_wire
from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, running_daemon
from hypercache_compat.waiting import wait_until
from hypercache_connector import sealed_objects
from hypercache_connector.keys import UriMapping
from hypercache_connector.sealed_objects import SealedObject
from hypercache_connector.sealing import body_bytes, seal, sealed_bytes

MIB = 1 << 20
DEADLINE_S = 30.0
SIZES = [1, 4095, 4096, 4097, 70_001, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 17]
KEYS = [f"org/m@0@0@{number}" for number in range(len(SIZES))]
MAPPING = UriMapping("test")

Sealing = Callable[..., Any]


def uri(key: str) -> str:
    return MAPPING.uri(key)


def payload(key: str, size: int) -> bytes:
    """Bytes that say whose they are."""
    unit = f"{key}:{size};".encode()
    return (unit * (size // len(unit) + 1))[:size]


def image(key: str, data: bytes) -> bytes:
    """The sealed object of `data` under `key`."""
    return data[: body_bytes(len(data))] + seal(uri(key), memoryview(data))


def store(driver: Any, keys: list[str], sizes: list[int]) -> bool:
    return bool(driver.store(keys, [payload(key, size) for key, size in zip(keys, sizes, strict=True)]).ok)


def load(driver: Any, keys: list[str], sizes: list[int]) -> list[bool]:
    """Which were loaded; of these no byte is wrong."""
    back = [bytearray(size) for size in sizes]
    loaded = driver.load(keys, back)
    for key, size, ok, data in zip(keys, sizes, loaded, back, strict=True):
        assert not ok or data == payload(key, size)
    return list(loaded)


@contextmanager
def daemon_of(wire: str, **options: Any) -> Iterator[DaemonProcess]:
    with running_daemon(DaemonOptions(extra=("--wire", wire), **options)) as daemon:
        yield daemon


def change_wire(daemon: DaemonProcess, wire: str) -> None:
    """Restart it on its folders, held to another wire."""
    daemon.options = replace(daemon.options, extra=("--wire", wire))
    daemon.restart()


@pytest.fixture(scope="module")
def running() -> Iterator[Callable[[str], DaemonProcess]]:
    """Daemons by the wire that they are held to, each started when first asked for."""
    with ExitStack() as stack:
        daemons: dict[str, DaemonProcess] = {}

        def of(wire: str) -> DaemonProcess:
            if wire not in daemons:
                daemons[wire] = stack.enter_context(daemon_of(wire))
            return daemons[wire]

        yield of


@pytest.fixture
def of_wire(running: Callable[[str], DaemonProcess]) -> Callable[[str], DaemonProcess]:
    """Such a daemon, with nothing in it."""

    def emptied(wire: str) -> DaemonProcess:
        with running(wire).connect() as raw:
            assert raw.ask("purge")["status"] == "PURGED"
        return running(wire)

    return emptied


@pytest.fixture
def old(of_wire: Callable[[str], DaemonProcess]) -> DaemonProcess:
    """A daemon that has nothing of wire 1.1."""
    return of_wire("1.0")


@pytest.fixture
def upgradable() -> Iterator[DaemonProcess]:
    """One that a test may restart with another wire."""
    with daemon_of("1.0") as daemon:
        yield daemon


@pytest.fixture
def sealing(connect) -> Sealing:
    """Makes drivers of connectors that seal."""
    return lambda daemon, **parameters: connect(
        daemon.socket_path, **{"seal_for_old_daemons": True, "timeout_s": 20.0} | parameters
    )


def ask(daemon: DaemonProcess, action: str, key: str, **fields: Any) -> dict[str, Any]:
    """One request by hand, on a connection of its own."""
    with daemon.connect() as raw:
        return raw.ask(action, uri=uri(key), **fields)


def layout(daemon: DaemonProcess, key: str) -> list[dict[str, Any]]:
    return list(ask(daemon, "locate", key, auto_ingest=False)["chunk_layout"])


def overwrite(daemon: DaemonProcess, key: str, change: Callable[[bytes], bytes]) -> None:
    """Change what lies on the devices, behind everybody's back."""
    chunks = layout(daemon, key)
    raw_wire.write_layout(chunks, change(raw_wire.read_layout(chunks)))


# -- the way there and back ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters",
    [{}, {"tier": "ram"}, {"direct_io": "on"}, {"overwrite": True}, {"wire": "1.0"}],
    ids=["nvme", "ram", "direct", "overwrite", "pinned"],
)
def test_on_an_old_daemon_mixed_sizes_come_back_as_they_were(
    old: DaemonProcess, sealing: Sealing, parameters: dict[str, Any]
) -> None:
    driver = sealing(old, **parameters)
    assert driver.exists(KEYS) == [False] * len(KEYS)
    assert store(driver, KEYS, SIZES)
    assert driver.exists(KEYS) == [True] * len(KEYS)
    assert load(driver, KEYS, SIZES) == [True] * len(KEYS)
    assert load(driver, KEYS, [size + 1 for size in SIZES]) == [False] * len(KEYS)
    status = driver.connector.status()
    assert status["sealed"] == {"stored": len(KEYS), "loaded": len(KEYS)}
    assert status["bytes"] == {"stored": sum(SIZES), "loaded": sum(SIZES)}
    assert driver.delete(KEYS) == [True] * len(KEYS)
    assert driver.exists(KEYS) == [False] * len(KEYS)


def test_an_object_without_memory_for_its_tail_fails_alone_each_way(
    old: DaemonProcess, sealing: Sealing, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, keys, sizes = sealing(old), KEYS[:3], SIZES[:3]

    real = SealedObject.__init__

    def scarce(self: SealedObject, uri_: str, payload_: Any) -> None:
        if uri_ == uri(keys[1]):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        real(self, uri_, payload_)

    with monkeypatch.context() as patch:
        patch.setattr(SealedObject, "__init__", scarce)
        assert not store(driver, keys, sizes)
        assert driver.exists(keys) == [True, False, True]
    assert store(driver, keys, sizes)
    monkeypatch.setattr(SealedObject, "__init__", scarce)
    assert load(driver, keys, sizes) == [True, False, True]
    assert (driver.count("stores", "no_memory"), driver.count("loads", "no_memory")) == (1, 1)


def test_what_lies_on_the_devices_is_the_payload_and_its_seal(old: DaemonProcess, sealing: Sealing) -> None:
    assert store(sealing(old), KEYS, SIZES)
    for key, size in zip(KEYS, SIZES, strict=True):
        found = raw_wire.read_layout(layout(old, key))
        assert found == image(key, payload(key, size))
        assert len(found) == sealed_bytes(uri(key), size)


def test_a_payload_of_no_bytes_is_one_too(old: DaemonProcess, sealing: Sealing) -> None:
    driver = sealing(old)
    assert store(driver, ["k"], [0])
    assert load(driver, ["k"], [0]) == [True]
    assert load(driver, ["k"], [1]) == [False]


@pytest.mark.parametrize("wire", ["1.1", "2.0"])
def test_a_daemon_that_has_all_it_needs_gets_what_it_always_got(of_wire, sealing: Sealing, wire: str) -> None:
    daemon = of_wire(wire)
    driver = sealing(daemon)
    assert store(driver, KEYS, SIZES)
    assert driver.exists(KEYS) == [True] * len(KEYS)
    assert load(driver, KEYS, SIZES) == [True] * len(KEYS)
    assert "sealed" not in driver.connector.status()
    for key, size in zip(KEYS, SIZES, strict=True):
        found = ask(daemon, "locate", key, auto_ingest=False)
        assert found["object_size"] == size
        assert found["sync_status"] == "LOCAL_ONLY"
        assert all("checksum" in chunk for chunk in found["chunk_layout"])


def test_without_the_mode_an_old_daemon_is_misses_and_one_line_that_names_the_mode(
    old: DaemonProcess, sealing: Sealing, connect, caplog: pytest.LogCaptureFixture
) -> None:
    assert store(sealing(old), ["k"], [5000])
    assert not caplog.records
    driver = connect(old.socket_path, timeout_s=20.0)
    for _ in range(3):
        assert driver.exists(["k"]) == [False]
        assert load(driver, ["k"], [5000]) == [False]
        assert not store(driver, ["l"], [5000])
    (said,) = [record.getMessage() for record in caplog.records]
    assert "lacks chunk_checksums, sync_status; upgrade it to wire 1.1 or newer" in said
    assert said.endswith("or turn on 'seal_for_old_daemons'")
    assert driver.count("lookups", "daemon_too_old") == driver.count("loads", "daemon_too_old") == 3


# -- upgrades ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["1.1", "2.0"])
def test_what_was_sealed_is_found_and_loaded_after_an_upgrade(
    upgradable: DaemonProcess, sealing: Sealing, wire: str
) -> None:
    driver = sealing(upgradable)
    assert store(driver, KEYS, SIZES)
    change_wire(upgradable, wire)
    for _ in range(3):
        assert driver.exists([*KEYS, "never"]) == [True] * len(KEYS) + [False]
    assert load(driver, KEYS, SIZES) == [True] * len(KEYS)
    assert store(driver, KEYS, SIZES)
    assert driver.count("stores", "already_stored") == len(KEYS)
    assert load(sealing(upgradable, wire="1.0"), KEYS, SIZES) == [True] * len(KEYS)


@pytest.mark.parametrize("wire", ["1.1", "2.0"])
def test_after_an_upgrade_without_the_mode_it_misses_says_why_once_and_is_stored_anew(
    upgradable: DaemonProcess, sealing: Sealing, connect, caplog: pytest.LogCaptureFixture, wire: str
) -> None:
    assert store(sealing(upgradable), KEYS, SIZES)
    change_wire(upgradable, wire)
    driver = connect(upgradable.socket_path, timeout_s=20.0)
    for _ in range(3):
        assert driver.exists(KEYS) == [False] * len(KEYS)
        assert load(driver, KEYS, SIZES) == [False] * len(KEYS)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        f"{upgradable.socket_path}: {len(KEYS)} of {len(KEYS)} objects have no checksums or no commit, so "
        "they are misses until stored anew; those that were sealed can be loaded with 'seal_for_old_daemons'"
    )
    assert driver.count("loads", "no_checksum") == 3 * len(KEYS)
    assert store(driver, KEYS, SIZES)
    assert load(driver, KEYS, SIZES) == [True] * len(KEYS)


def test_what_has_checksums_is_a_miss_while_the_daemon_is_held_back_and_stays(
    sealing: Sealing, connect
) -> None:
    with daemon_of("2.0") as daemon:
        driver = sealing(daemon)
        assert store(driver, KEYS, SIZES)
        change_wire(daemon, "1.0")
        assert load(driver, KEYS, SIZES) == [False] * len(KEYS)
        assert driver.count("loads", "no_checksum") == len(KEYS)
        change_wire(daemon, "2.0")
        assert load(driver, KEYS, SIZES) == [True] * len(KEYS)
        assert "healing" not in driver.connector.status()
        change_wire(daemon, "1.0")
        assert store(driver, KEYS, SIZES)  # sealed now, in the place of what could not be verified
        assert load(driver, KEYS, SIZES) == [True] * len(KEYS)


@pytest.mark.parametrize("wire", ["1.0", "1.1", "2.0"])
def test_a_payload_that_looks_like_a_sealed_object_is_itself(of_wire, sealing: Sealing, wire: str) -> None:
    inner = payload("k", 5000)
    data = image("k", inner)
    driver = sealing(of_wire(wire))
    assert driver.store(["k"], [data]).ok
    assert driver.load(["k"], [bytearray(len(inner))]) == [False]
    back = bytearray(len(data))
    assert driver.load(["k"], [back]) == [True]
    assert back == data


# -- damage --------------------------------------------------------------------------------------------------

SIZE = 9 * MIB + 17
POSITIONS: dict[str, Callable[[int], int]] = {
    # by the size of the sealed object
    "first byte": lambda sealed: 0,
    "end of a chunk": lambda sealed: 4 * MIB - 1,
    "start of a chunk": lambda sealed: 4 * MIB,
    "last whole block": lambda sealed: SIZE // 4096 * 4096 - 1,
    "the rest": lambda sealed: SIZE - 1,
    "padding": lambda sealed: SIZE,
    "magic": lambda sealed: sealed - 4096,
    "uri": lambda sealed: sealed - 4096 + 36,
    "zeros": lambda sealed: sealed - 100,
    "last byte": lambda sealed: sealed - 1,
}


@pytest.mark.parametrize("upgraded", [False, True])
def test_one_flipped_byte_anywhere_is_a_miss_and_goes_and_a_store_heals_it(
    upgradable: DaemonProcess, sealing: Sealing, upgraded: bool
) -> None:
    driver = sealing(upgradable)
    keys = [*POSITIONS, "intact"]
    sizes, whole = [SIZE] * len(keys), [True] * len(keys)
    assert store(driver, keys, sizes)
    for key, position in POSITIONS.items():
        at = position(sealed_bytes(uri(key), SIZE))
        overwrite(upgradable, key, lambda data, at=at: data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
    if upgraded:
        change_wire(upgradable, "2.0")
    assert driver.exists(keys) == whole
    assert load(driver, keys, sizes) == [False] * len(POSITIONS) + [True]
    assert driver.count("loads", "seal_broken") == driver.count("healing", "evicted") == len(POSITIONS)
    assert driver.exists(keys) == [False] * len(POSITIONS) + [True]
    assert store(driver, keys, sizes)
    assert load(driver, keys, sizes) == whole


HOSTILE: dict[str, Callable[[str, bytes], bytes]] = {
    # what lies where the sealed object of 5,000 bytes should be: 8,192 bytes and a trailer of 4,096
    "another key's object": lambda key, data: image("other", payload("other", len(data))),
    "the same bytes under another key": lambda key, data: image("other", data),
    "a shorter payload": lambda key, data: image(key, data[:-1]),
    "a longer payload": lambda key, data: image(key, data + b"x"),
    "no seal": lambda key, data: data.ljust(8192 + 4096, b"\0"),
    "nothing": lambda key, data: bytes(8192 + 4096),
    "noise": lambda key, data: os.urandom(8192 + 4096),
    "the seal first": lambda key, data: image(key, data)[8192:] + image(key, data)[:8192],
    "new bytes and an old seal": lambda key, data: (
        image(key, bytes(len(data)))[:8192] + image(key, data)[8192:]
    ),
}


@pytest.mark.parametrize("wire", ["1.0", "1.1", "2.0"])
def test_what_another_wrote_in_the_same_size_is_a_miss_and_goes(of_wire, sealing: Sealing, wire: str) -> None:
    daemon = of_wire(wire)
    driver = sealing(daemon)
    keys, sizes = list(HOSTILE), [5000] * len(HOSTILE)
    with daemon.connect() as raw:
        for key, found in HOSTILE.items():
            raw_wire.store(raw, uri(key), found(key, payload(key, 5000)), auto_flush_s3=False)
    assert driver.exists(keys) == [True] * len(keys)
    assert load(driver, keys, sizes) == [False] * len(keys)
    assert driver.count("loads", "seal_broken") == len(keys)
    assert driver.exists(keys) == [False] * len(keys)
    assert store(driver, keys, sizes)
    assert load(driver, keys, sizes) == [True] * len(keys)


@pytest.mark.parametrize("wire", ["1.0", "1.1", "2.0"])
def test_what_another_wrote_in_another_size_is_a_miss_and_stays(of_wire, sealing: Sealing, wire: str) -> None:
    daemon = of_wire(wire)
    driver = sealing(daemon)
    written = [0, 1, 4999, 5000, 5001, 4096, 8192, 16384]
    keys, sizes = [f"k{size}" for size in written], [5000] * len(written)
    with daemon.connect() as raw:
        for key, size in zip(keys, written, strict=True):
            raw_wire.store(raw, uri(key), payload(key, size), auto_flush_s3=False)
    assert load(driver, keys, sizes) == [False] * len(keys)
    for key, size in zip(keys, written, strict=True):
        assert raw_wire.read_layout(layout(daemon, key)) == payload(key, size)
    assert store(driver, keys, sizes)
    assert load(driver, keys, sizes) == [True] * len(keys)


def test_a_device_that_was_truncated_is_a_miss(sealing: Sealing) -> None:
    with daemon_of("1.0", pool_devices=1) as daemon:
        driver = sealing(daemon)
        assert store(driver, ["k"], [SIZE])
        (device,) = {chunk["device"] for chunk in layout(daemon, "k")}
        size = Path(device).stat().st_size
        os.truncate(device, layout(daemon, "k")[-1]["offset"])
        try:
            assert load(driver, ["k"], [SIZE]) == [False]
        finally:
            os.truncate(device, size)
        assert driver.count("loads", "short_transfer") == 1
        assert driver.exists(["k"]) == [False]


# -- staged writes, and two at once -------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["1.0", "1.1", "2.0"])
def test_what_is_merely_staged_is_a_miss_and_its_writer_is_left_alone(
    of_wire, sealing: Sealing, wire: str
) -> None:
    daemon = of_wire(wire)
    driver = sealing(daemon)
    data = image("k", payload("k", 5000))
    staged = ask(daemon, "stage_write", "k", size_bytes=len(data), auto_flush_s3=False)
    raw_wire.write_layout(staged["chunk_layout"], data[:-1] + b"\0")
    assert driver.exists(["k"]) == [False]
    assert load(driver, ["k"], [5000]) == [False]
    assert driver.count("loads", "seal_broken" if wire == "1.0" else "staged") == 1
    raw_wire.write_layout(staged["chunk_layout"], data)
    assert ask(daemon, "commit_write", "k")["status"] == "WRITECOMMITTED"
    assert driver.exists(["k"]) == [True]
    assert load(driver, ["k"], [5000]) == [True]


@pytest.mark.parametrize("wire", ["1.0", "1.1", "2.0"])
def test_what_is_merely_staged_is_not_taken_for_stored(of_wire, sealing: Sealing, wire: str) -> None:
    daemon = of_wire(wire)
    driver = sealing(daemon)
    size_bytes = sealed_bytes(uri("k"), 5000)
    ask(daemon, "stage_write", "k", size_bytes=size_bytes, auto_flush_s3=False)
    assert store(driver, ["k"], [5000])
    assert driver.count("stores", "ok") == 1
    assert load(driver, ["k"], [5000]) == [True]


def test_a_commit_that_takes_another_writer_s_blocks_is_caught_by_the_seal(
    old: DaemonProcess, sealing: Sealing
) -> None:
    driver = sealing(old)
    data = image("k", payload("k", 5000))
    first = ask(old, "stage_write", "k", size_bytes=len(data), auto_flush_s3=False)
    second = ask(old, "stage_write", "k", size_bytes=len(data), auto_flush_s3=False)
    raw_wire.write_layout(first["chunk_layout"], data)
    raw_wire.write_layout(second["chunk_layout"], data[:4096] + bytes(len(data) - 4096))
    ask(old, "commit_write", "k")  # of the first writer: without a name it gets the newest
    assert layout(old, "k") == second["chunk_layout"]
    assert driver.exists(["k"]) == [True]
    assert load(driver, ["k"], [5000]) == [False]
    assert driver.count("loads", "seal_broken") == 1
    assert store(driver, ["k"], [5000])
    assert load(driver, ["k"], [5000]) == [True]


def test_writers_of_the_same_keys_at_once_never_give_a_mixture(old: DaemonProcess, sealing: Sealing) -> None:
    keys, size = ["k0", "k1", "k2"], 70_001
    values = {bytes([number]) * size for number in range(1, 4)}
    stop = threading.Event()
    failures: list[str] = []
    rounds: list[int] = []

    def write(value: bytes) -> None:
        driver = sealing(old, overwrite=True)
        for turn in range(15):
            driver.store(keys, [value] * 3)
            rounds.append(turn)

    def read() -> None:
        driver = sealing(old)
        while not stop.is_set():
            back = [bytearray(size) for _ in keys]
            for ok, data in zip(driver.load(keys, back), back, strict=True):
                if ok and bytes(data) not in values:
                    failures.append(f"a mixture of {sorted(set(data))}")

    with ExitStack() as stack:
        stack.callback(stop.set)
        reader = threading.Thread(target=read)
        reader.start()
        writers = [threading.Thread(target=write, args=(value,)) for value in sorted(values)]
        for thread in writers:
            thread.start()
        for thread in writers:
            thread.join(DEADLINE_S)
    reader.join(DEADLINE_S)
    assert failures == []
    assert len(rounds) == 45
    driver = sealing(old, overwrite=True)
    assert driver.store(keys, [b"\x01" * size] * 3).ok
    back = [bytearray(size) for _ in keys]
    assert driver.load(keys, back) == [True] * 3
    assert back == [b"\x01" * size] * 3


# -- close ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["load", "store"])
def test_close_waits_for_the_seal_that_is_being_looked_at_and_begins_no_other(
    old: DaemonProcess, sealing: Sealing, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    keys, sizes = [f"k{number}" for number in range(12)], [5000] * 12
    assert store(sealing(old), keys, sizes)
    driver = sealing(old, read_workers=1, write_workers=1, overwrite=True)
    begun, go_on = threading.Semaphore(0), threading.Event()
    name = {"load": "unseal", "store": "seal"}[operation]
    real = getattr(sealed_objects, name)

    def slow(*arguments: Any) -> Any:
        begun.release()
        assert go_on.wait(DEADLINE_S)
        return real(*arguments)

    monkeypatch.setattr(sealed_objects, name, slow)
    submit = {"load": driver.connector.submit_batch_get, "store": driver.connector.submit_batch_set}
    submit[operation](keys, [bytearray(5000) for _ in keys])
    assert begun.acquire(timeout=DEADLINE_S)
    closing = threading.Thread(target=driver.connector.close)
    closing.start()
    workers = driver.connector._engine.readers if operation == "load" else driver.connector._engine.writers
    wait_until(workers._closing.is_set)
    go_on.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    counts = driver.connector.status()[f"{operation}s"]
    assert counts.keys() <= {"ok", "closed"}
    assert (sum(counts.values()), counts["closed"] >= 9) == (12, True)


# -- a backend -----------------------------------------------------------------------------------------------


def test_an_old_daemon_with_a_backend_is_asked_not_to_upload_what_is_sealed(
    tmp_path: Path, sealing: Sealing
) -> None:
    with daemon_of("1.0", backend=f"file://{tmp_path}") as daemon:
        driver = sealing(daemon)
        assert store(driver, ["k"], [5000])
        with daemon.connect() as raw:
            raw_wire.store(raw, "hypercache://plain", b"any")
            plain = {"action": "get_write_status", "uri": "hypercache://plain"}
            wait_until(lambda: raw.ask(**plain)["sync_status"] == "SYNCED_BACKEND")
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["plain"]
        assert load(driver, ["k"], [5000]) == [True]
