"""Every method of the released client's class, against the real daemon."""

from __future__ import annotations

import pytest

from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, running_daemon
from hypercache_compat.payloads import MIB, payload
from hypercache_compat.raw_wire import RawConnection, fetch, write_layout
from hypercache_compat.scenario_process import ScenarioProcess

ODD_SIZES = [1, 511, 512, 1920, 4096, 70_001, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 17 * MIB + 333]


def test_each_version_is_the_one_that_was_asked_for(old_clients: dict[str, ScenarioProcess]) -> None:
    seen = {version: client.call("client_calls.version") for version, client in old_clients.items()}
    assert seen == {"0.9.0": "0.9.0", "0.9.0b1": "0.9.0-beta"}


def test_every_public_method_gets_an_answer_that_it_understands(old: ScenarioProcess) -> None:
    with running_daemon() as daemon:
        names = old.call("client_calls.every_method", socket_path=daemon.socket_path, uri="hypercache://a")
    assert len(names) == 15


@pytest.mark.parametrize("tier", [None, "nvme", "ram"])
@pytest.mark.parametrize("size_bytes", ODD_SIZES)
def test_bytes_come_back_and_the_write_status_follows(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str, size_bytes: int, tier: str | None
) -> None:
    seen = old.call(
        "client_calls.life_of_an_object",
        socket_path=daemon.socket_path,
        uri=uri,
        size_bytes=size_bytes,
        tier=tier,
    )
    assert seen == ["UNKNOWN", "STAGED", "COMMITTED", "MISS"]


def test_what_an_old_client_wrote_lies_where_locate_says(
    old: ScenarioProcess, daemon: DaemonProcess, raw: RawConnection, uri: str
) -> None:
    old.call("client_calls.store", socket_path=daemon.socket_path, uri=uri, size_bytes=9 * MIB + 1920)
    assert fetch(raw, uri) == payload(uri, 9 * MIB + 1920)


def test_each_version_reads_what_the_other_wrote(
    old_clients: dict[str, ScenarioProcess], daemon: DaemonProcess, uri: str
) -> None:
    for writer, client in old_clients.items():
        client.call(
            "client_calls.store", socket_path=daemon.socket_path, uri=uri + writer, size_bytes=5 * MIB
        )
    for reader in old_clients.values():
        for writer in old_clients:
            assert reader.call(
                "client_calls.fetch", socket_path=daemon.socket_path, uri=uri + writer, size_bytes=5 * MIB
            )


def test_chunks_are_at_most_4_mib_and_striped_over_the_devices(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str
) -> None:
    staged = old.call("client_calls.store", socket_path=daemon.socket_path, uri=uri, size_bytes=17 * MIB)
    lengths = [chunk["length"] for chunk in staged["chunk_layout"]]
    assert lengths == [4 * MIB] * 4 + [MIB]
    assert staged["chunk_size"] == 4 * MIB
    assert len({chunk["device"] for chunk in staged["chunk_layout"]}) == 4


def test_nothing_under_a_uri_is_a_miss_or_an_error_with_a_sentence(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str
) -> None:
    said = old.call("client_calls.unknown_uri", socket_path=daemon.socket_path, uri=uri)
    assert said["locate"] == said["locate_no_ingest"] == "MISS"
    assert said["ingest"][0] == "ERROR"
    assert uri in said["ingest"][1]
    assert said["append"][0] == "ERROR"
    assert uri in said["append"][1]
    assert [said["pin"], said["evict"], said["commit"]] == [False, False, False]
    assert said["write_status"] == {"status": "UNKNOWN", "progress_percent": 0.0}


def test_a_reader_gets_the_committed_bytes_until_the_next_commit(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str
) -> None:
    for old_size, new_size in ((5 * MIB, 3000), (3000, 9 * MIB + 1)):
        old.call(
            "client_calls.replace_while_read",
            socket_path=daemon.socket_path,
            uri=f"{uri}{old_size}",
            old_size=old_size,
            new_size=new_size,
        )


def test_devices_and_status_are_facts(old: ScenarioProcess) -> None:
    with running_daemon() as daemon:
        for number, tier in enumerate(("nvme", "nvme", "ram")):
            old.call(
                "client_calls.store",
                socket_path=daemon.socket_path,
                uri=f"a{number}",
                size_bytes=5 * MIB,
                tier=tier,
            )
        facts = old.call("client_calls.facts", socket_path=daemon.socket_path)
        sizes = {str(path): path.stat().st_size for path in daemon.pool_folder.glob("*.hc")}
    assert {device["path"]: device["size_bytes"] for device in facts["devices"]} == sizes
    assert len(sizes) == 4
    status = facts["status"]
    assert status["objects"] == 3
    assert status["pools"]["nvme"]["used_bytes"] == 10 * MIB
    assert status["pools"]["ram"]["used_bytes"] == 5 * MIB
    assert 1000 * MIB < status["pools"]["nvme"]["total_bytes"] <= 1024 * MIB


def test_telemetry_is_counted(old: ScenarioProcess) -> None:
    with running_daemon() as daemon:
        for duration_us in (100, 250):
            assert old.call(
                "client_calls.report_a_transfer", socket_path=daemon.socket_path, duration_us=duration_us
            )
        status = old.call("client_calls.facts", socket_path=daemon.socket_path)["status"]
    assert status["telemetry"]["demo_read"]["events"] == 2
    assert status["telemetry"]["demo_read"]["duration_us"] == 350


def test_a_staged_object_is_a_hit_that_says_staged(
    old: ScenarioProcess, daemon: DaemonProcess, raw: RawConnection, uri: str
) -> None:
    staged = raw.ask("stage_write", uri=uri, size_bytes=5 * MIB)
    write_layout(staged["chunk_layout"], payload(uri, 5 * MIB))
    assert raw.ask("locate", uri=uri)["sync_status"] == "STAGED"
    assert old.call("client_calls.fetch", socket_path=daemon.socket_path, uri=uri, size_bytes=5 * MIB) is True


def test_a_pinned_object_stays_when_the_pool_is_too_small(old: ScenarioProcess) -> None:
    with running_daemon(DaemonOptions(pool_size="80MiB", pool_devices=2)) as daemon:
        seen = old.call(
            "client_calls.pinned_survives_pressure",
            socket_path=daemon.socket_path,
            prefix="hypercache://pressure",
            count=40,
            size_bytes=4 * MIB,
        )
    assert seen["present"][0] == 0
    assert seen["present"][-1] == 39
    assert len(seen["present"]) < 30


def test_purge_leaves_nothing(old: ScenarioProcess) -> None:
    with running_daemon() as daemon:
        path = daemon.socket_path
        for number in range(5):
            tier = "ram" if number % 2 else None
            old.call("client_calls.store", socket_path=path, uri=f"a{number}", size_bytes=5 * MIB, tier=tier)
        assert old.call("client_calls.purge", socket_path=path)
        gone = [
            old.call("client_calls.fetch", socket_path=path, uri=f"a{n}", size_bytes=5 * MIB)
            for n in range(5)
        ]
    assert gone == [False] * 5


def test_ping_of_a_daemon_that_is_down_is_false(old: ScenarioProcess) -> None:
    with running_daemon() as daemon:
        assert old.call("client_calls.ping", socket_path=daemon.socket_path) is True
        daemon.stop()
        assert old.call("client_calls.ping", socket_path=daemon.socket_path) is False
