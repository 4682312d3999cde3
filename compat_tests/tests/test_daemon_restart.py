"""What a restart of the daemon, orderly or by a crash, leaves of what clients wrote."""

from __future__ import annotations

import pytest

from hypercache_compat.daemon_process import running_daemon
from hypercache_compat.payloads import MIB, payload
from hypercache_compat.raw_wire import fetch, store
from hypercache_compat.scenario_process import ScenarioProcess

CRASH = pytest.mark.parametrize("crash", [False, True], ids=["stopped", "killed"])
TIERS = ("nvme", "ram")
SIZE = 9 * MIB + 1920


@CRASH
def test_an_acknowledged_commit_is_there(old: ScenarioProcess, crash: bool) -> None:
    with running_daemon() as daemon:
        arguments = {"socket_path": daemon.socket_path, "size_bytes": SIZE}
        for tier in TIERS:
            old.call("client_calls.store", **arguments, uri=f"kept-{tier}", tier=tier)
        daemon.restart(crash=crash)
        for tier in TIERS:
            assert old.call("client_calls.fetch", **arguments, uri=f"kept-{tier}") is True


@CRASH
def test_a_staged_write_is_gone_and_its_uri_is_free(old: ScenarioProcess, crash: bool) -> None:
    with running_daemon() as daemon:
        uris = {f"hypercache://open/{tier}": tier for tier in TIERS}
        for uri, tier in uris.items():
            arguments = {"socket_path": daemon.socket_path, "uri": uri}
            old.call("file_system.write_and_never_close", **arguments, size_bytes=9 * MIB, tier=tier)
        daemon.restart(crash=crash)
        with daemon.connect() as connection:
            for uri in uris:
                assert connection.ask("locate", uri=uri, auto_ingest=False)["status"] == "MISS"
                assert connection.ask("commit_write", uri=uri)["status"] == "ERROR"
                assert connection.ask("append_write", uri=uri, size_bytes=1)["status"] == "ERROR"
        for uri, tier in uris.items():
            arguments = {"socket_path": daemon.socket_path, "uri": uri, "size_bytes": 5000}
            old.call("client_calls.store", **arguments, tier=tier)
            assert old.call("client_calls.fetch", **arguments) is True


@CRASH
def test_a_write_staged_over_a_committed_object_leaves_that_object(crash: bool) -> None:
    data = {tier: payload(tier, SIZE) for tier in TIERS}
    with running_daemon() as daemon:
        with daemon.connect() as connection:
            for tier in TIERS:
                store(connection, tier, data[tier], tier=tier)
                staged = connection.ask("stage_write", uri=tier, size_bytes=77, tier=tier)
                assert staged["status"] == "WRITESTAGED"
        daemon.restart(crash=crash)
        with daemon.connect() as connection:
            assert {tier: fetch(connection, tier) for tier in TIERS} == data


@CRASH
def test_new_writes_after_a_restart_touch_none_of_the_old_objects(crash: bool) -> None:
    with running_daemon() as daemon:
        for generation in range(3):
            with daemon.connect() as connection:
                for number in range(8):
                    name = f"{generation}-{number}"
                    tier = "ram" if number % 4 == 0 else "nvme"
                    assert store(connection, name, payload(name, MIB + number), tier=tier)["status"]
            daemon.restart(crash=crash)
        with daemon.connect() as connection:
            for generation in range(3):
                for number in range(8):
                    name = f"{generation}-{number}"
                    assert fetch(connection, name) == payload(name, MIB + number)


@CRASH
def test_evicted_and_purged_objects_do_not_come_back(crash: bool) -> None:
    with running_daemon() as daemon:
        with daemon.connect() as connection:
            for name in ("a", "b", "c"):
                store(connection, name, b"x" * 5000)
            assert connection.ask("evict", uri="a")["status"] == "EVICTED"
        daemon.restart(crash=crash)
        with daemon.connect() as connection:
            assert fetch(connection, "a") is None
            assert fetch(connection, "b") == b"x" * 5000
            assert connection.ask("purge")["status"] == "PURGED"
        daemon.restart(crash=crash)
        with daemon.connect() as connection:
            assert [fetch(connection, name) for name in ("a", "b", "c")] == [None] * 3


@CRASH
def test_a_client_that_stayed_connected_sees_one_error_and_then_works(
    old: ScenarioProcess, crash: bool
) -> None:
    with running_daemon() as daemon:
        old.call("client_calls.store", socket_path=daemon.socket_path, uri="a", size_bytes=SIZE)
        assert old.call("client_calls.stay_connected", socket_path=daemon.socket_path)
        daemon.restart(crash=crash)
        seen = old.call("client_calls.after_a_restart", uri="a", size_bytes=SIZE)
    assert seen[0] in ("BrokenPipeError", "ConnectionResetError")
    assert seen[1] == "HIT"


def test_the_instance_id_is_new_at_every_start() -> None:
    with running_daemon() as daemon:
        with daemon.connect() as connection:
            first = connection.ask("ping")
        daemon.restart()
        with daemon.connect() as connection:
            second = connection.ask("ping")
    assert first["instance_id"] != second["instance_id"]
    assert first["wire"] == second["wire"]


def test_an_orderly_stop_ends_with_0_and_leaves_no_socket() -> None:
    with running_daemon() as daemon:
        assert daemon.stop() == 0
        assert not list(daemon.folder.glob("s"))
