"""Real LMCache, two releases of it, with the connector loaded by LMCache's own factory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, running_daemon
from hypercache_compat.lmcache_bench import BenchSize, run_bench
from hypercache_compat.lmcache_versions import connector_spec
from hypercache_compat.payloads import MIB, payload
from hypercache_compat.releases import LMCACHE_VERSIONS
from hypercache_compat.scenario_process import ScenarioProcess

MIXED = {
    "one-byte": 1,
    "below-a-sector": 511,
    "a-sector": 512,
    "below-a-page": 4095,
    "a-page": 4096,
    "above-a-page": 4097,
    "a-mebibyte": MIB,
    "below-a-chunk": 4 * MIB - 1,
    "a-chunk": 4 * MIB,
    "above-a-chunk": 4 * MIB + 1,
    "fourteen": 14 * MIB,
    "sixty-four": 64 * MIB,
}
NAMES, SIZES = list(MIXED), list(MIXED.values())


@pytest.fixture
def connected(
    lmcache: ScenarioProcess, daemon: DaemonProcess, request: pytest.FixtureRequest
) -> Iterator[ScenarioProcess]:
    """The same, with the connector on the shared daemon and a namespace that no other test uses."""
    name = lmcache.call("adapter.connect", socket_path=daemon.socket_path, namespace=request.node.name)
    assert name == "NativeConnectorL2Adapter"
    yield lmcache
    lmcache.call("adapter.close")


def test_each_process_has_the_release_that_was_asked_for(lmcaches: dict[str, ScenarioProcess]) -> None:
    for version, process in lmcaches.items():
        assert process.call("adapter.version")["version"] == version


@pytest.mark.parametrize("version", LMCACHE_VERSIONS)
def test_lmcaches_own_benchmark_verifies_every_byte(daemon: DaemonProcess, version: str) -> None:
    spec = connector_spec(daemon.socket_path, f"bench/{version}")
    report = run_bench(spec, BenchSize(keys=8, kib_per_key=14 * 1024, rounds=2), version)
    assert report.verified, report.output
    assert report.store is not None
    assert report.lookup is not None
    assert report.load is not None
    assert (report.store.succeeded, report.load.succeeded) == (16, 16)
    assert report.lookup.succeeded == 8
    assert report.store.timed_out_rounds == report.load.timed_out_rounds == 0


@pytest.mark.parametrize("align_bytes", [4096, 1], ids=["aligned", "packed"])
def test_mixed_sizes_in_one_batch_are_stored_found_loaded_and_deleted(
    connected: ScenarioProcess, align_bytes: int
) -> None:
    assert connected.call("adapter.lookup", names=NAMES) == [False] * len(NAMES)
    assert connected.call("adapter.store", names=NAMES, sizes=SIZES, align_bytes=align_bytes)
    assert connected.call("adapter.lookup", names=NAMES) == [True] * len(NAMES)
    got = connected.call("adapter.load", names=NAMES, sizes=SIZES, align_bytes=align_bytes)
    assert got == {"loaded": [True] * len(NAMES), "wrong": []}
    half, rest = NAMES[::2], NAMES[1::2]
    used = connected.call("adapter.delete", names=half)
    assert used == sum(MIXED[name] for name in rest)
    assert connected.call("adapter.lookup", names=NAMES) == [name in rest for name in NAMES]
    got = connected.call("adapter.load", names=NAMES, sizes=SIZES, align_bytes=align_bytes)
    assert got == {"loaded": [name in rest for name in NAMES], "wrong": []}
    assert connected.call("adapter.delete", names=rest) == 0


def test_on_a_daemon_without_checksums_what_was_sealed_comes_back_right(lmcache: ScenarioProcess) -> None:
    with running_daemon(DaemonOptions(extra=("--wire", "1.0"))) as old:
        arguments = {"socket_path": old.socket_path, "namespace": "sealed"}
        lmcache.call("adapter.connect", **arguments, seal_for_old_daemons=True)
        assert lmcache.call("adapter.store", names=NAMES, sizes=SIZES)
        assert lmcache.call("adapter.lookup", names=[*NAMES, "absent"]) == [*[True] * len(NAMES), False]
        got = lmcache.call("adapter.load", names=NAMES, sizes=SIZES)
        assert got == {"loaded": [True] * len(NAMES), "wrong": []}
        lmcache.call("adapter.close")


def test_storing_again_under_the_same_keys_succeeds(connected: ScenarioProcess) -> None:
    names, sizes = ["twice-a", "twice-b"], [5 * MIB, 4097]
    for _ in range(2):
        assert connected.call("adapter.store", names=names, sizes=sizes)
        assert connected.call("adapter.load", names=names, sizes=sizes)["loaded"] == [True, True]


@pytest.mark.parametrize("wanted", [4096, 4095, 8192])
def test_a_buffer_of_another_size_is_a_miss_for_that_key_alone(
    connected: ScenarioProcess, wanted: int
) -> None:
    names = ["size-a", "size-b", "size-c"]
    assert connected.call("adapter.store", names=names, sizes=[5000, 4096, 5000])
    got = connected.call("adapter.load", names=names, sizes=[5000, wanted, 5000])
    assert got == {"loaded": [True, wanted == 4096, True], "wrong": []}


def test_another_namespace_sees_nothing(lmcache: ScenarioProcess, daemon: DaemonProcess) -> None:
    names, sizes = ["apart"], [4096]
    for namespace, there in (("revision-1", True), ("revision-2", False), ("revision-1", True)):
        lmcache.call(
            "adapter.connect", socket_path=daemon.socket_path, namespace=f"{namespace}{lmcache.label}"
        )
        if there:
            assert lmcache.call("adapter.store", names=names, sizes=sizes)
        assert lmcache.call("adapter.lookup", names=names) == [there]
        assert lmcache.call("adapter.load", names=names, sizes=sizes)["loaded"] == [there]
        lmcache.call("adapter.close")


def test_each_release_loads_what_the_other_stored(
    lmcaches: dict[str, ScenarioProcess], daemon: DaemonProcess
) -> None:
    for process in lmcaches.values():
        process.call("adapter.connect", socket_path=daemon.socket_path, namespace="across")
    for number, (writer, reader) in enumerate((LMCACHE_VERSIONS, LMCACHE_VERSIONS[::-1])):
        names = [f"{name}-{number}" for name in NAMES[:10]]
        assert lmcaches[writer].call("adapter.store", names=names, sizes=SIZES[:10])
        got = lmcaches[reader].call("adapter.load", names=names, sizes=SIZES[:10])
        assert got == {"loaded": [True] * 10, "wrong": []}
    for process in lmcaches.values():
        process.call("adapter.close")


def test_a_byte_flipped_behind_the_connector_is_a_miss_for_that_key_alone_until_it_is_stored_again(
    lmcache: ScenarioProcess,
) -> None:
    sizes = {"flip-small": 700, "flip-page": 8192, "flip-big": 9 * MIB, "whole-a": 8192, "whole-b": 9 * MIB}
    names = list(sizes)
    flipped = [name for name in names if name.startswith("flip")]
    with running_daemon(DaemonOptions(pool_size="128MiB", pool_devices=2)) as own:
        lmcache.call("adapter.connect", socket_path=own.socket_path, namespace="flips")
        assert lmcache.call("adapter.store", names=names, sizes=list(sizes.values()))
        for name in flipped:
            _flip_last_byte(own.pool_folder, payload(name, sizes[name])[-64:])
        got = lmcache.call("adapter.load", names=names, sizes=list(sizes.values()))
        assert got == {"loaded": [name not in flipped for name in names], "wrong": []}
        assert lmcache.call("adapter.store", names=names, sizes=list(sizes.values()))
        got = lmcache.call("adapter.load", names=names, sizes=list(sizes.values()))
        assert got == {"loaded": [True] * len(names), "wrong": []}
        lmcache.call("adapter.close")


def _flip_last_byte(pool_folder: Path, tail: bytes) -> None:
    """Find the `tail` of a payload on the devices and change its last byte."""
    flips = 0
    for path in (path for path in pool_folder.rglob("*") if path.is_file() and path.stat().st_size > MIB):
        with path.open("r+b") as device:
            content = device.read()
            at = content.find(tail)
            while at >= 0:
                device.seek(at + len(tail) - 1)
                device.write(bytes([tail[-1] ^ 1]))
                flips += 1
                at = content.find(tail, at + 1)
    assert flips >= 1, "the payload was not found on any device"


@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "killed"])
def test_after_a_restart_of_the_daemon_every_load_is_right_and_new_stores_work(
    lmcache: ScenarioProcess, crash: bool
) -> None:
    names, sizes = NAMES[:10], SIZES[:10]
    with running_daemon() as own:
        lmcache.call("adapter.connect", socket_path=own.socket_path, namespace="restart")
        assert lmcache.call("adapter.store", names=names, sizes=sizes)
        own.restart(crash=crash)
        got = lmcache.call("adapter.load", names=names, sizes=sizes)
        assert got == {"loaded": [True] * 10, "wrong": []}
        assert lmcache.call("adapter.store", names=["new"], sizes=[5 * MIB])
        assert lmcache.call("adapter.load", names=["new"], sizes=[5 * MIB])["loaded"] == [True]
        lmcache.call("adapter.close")


def test_clients_of_all_sorts_at_the_same_time_get_their_own_bytes(
    old_clients: dict[str, ScenarioProcess], lmcaches: dict[str, ScenarioProcess], daemon: DaemonProcess
) -> None:
    for version, client in old_clients.items():
        prefix = f"hypercache://crowd/{version}"
        client.begin(
            "crowd.write_and_read", socket_path=daemon.socket_path, prefix=prefix, clients=8, rounds=20
        )
    for version, process in lmcaches.items():
        process.begin("adapter.soak", socket_path=daemon.socket_path, namespace=f"crowd/{version}", rounds=6)
    assert [client.result() for client in old_clients.values()] == [8 * 20] * 2
    assert [process.result() for process in lmcaches.values()] == [[]] * 2


def test_with_the_daemon_down_everything_is_a_miss_and_nothing_raises(lmcache: ScenarioProcess) -> None:
    with running_daemon() as own:
        lmcache.call("adapter.connect", socket_path=own.socket_path, namespace="down")
        assert lmcache.call("adapter.store", names=["a"], sizes=[4096])
        own.stop()
        assert lmcache.call("adapter.lookup", names=["a"]) == [False]
        assert lmcache.call("adapter.load", names=["a"], sizes=[4096]) == {"loaded": [False], "wrong": []}
        assert lmcache.call("adapter.store", names=["b"], sizes=[4096]) is False
        own.start()
        assert lmcache.call("adapter.load", names=["a"], sizes=[4096])["loaded"] == [True]
        lmcache.call("adapter.close")
