"""The released client's KV store on both tiers, against the real daemon."""

from __future__ import annotations

import pytest

from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, running_daemon
from hypercache_compat.payloads import MIB
from hypercache_compat.scenario_process import ScenarioProcess

TIERS = ["ram", "nvme"]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("size_bytes", [1, 1920, 70_000, 4 * MIB, 4 * MIB + 1, 9 * MIB + 13])
def test_a_block_comes_back_from_the_tier_that_was_asked_for(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str, size_bytes: int, tier: str
) -> None:
    seen = old.call(
        "kv_blocks.put_and_get", socket_path=daemon.socket_path, key=uri, size_bytes=size_bytes, tier=tier
    )
    assert seen == {"tiers": [tier], "absent": None}


@pytest.mark.parametrize("tier", TIERS)
def test_tensors_come_back_with_their_types(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str, tier: str
) -> None:
    old.call("kv_blocks.tensors", socket_path=daemon.socket_path, prefix=uri, tier=tier)


@pytest.mark.parametrize("tier", TIERS)
def test_the_newest_block_under_a_key_is_the_one_there(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str, tier: str
) -> None:
    sizes = [5 * MIB, 10, 4 * MIB + 1, 10, 9 * MIB]
    old.call(
        "kv_blocks.replace", socket_path=daemon.socket_path, key="replaced" + tier, sizes=sizes, tier=tier
    )


def test_with_the_ram_tier_off_its_users_are_served_from_the_devices(old: ScenarioProcess) -> None:
    with running_daemon(DaemonOptions(ram_size="0")) as daemon:
        seen = old.call(
            "kv_blocks.put_and_get", socket_path=daemon.socket_path, key="k", size_bytes=MIB, tier="ram"
        )
    assert seen["tiers"] == ["nvme"]


def test_a_full_ram_tier_gives_a_block_or_a_miss_but_never_wrong_bytes(old: ScenarioProcess) -> None:
    with running_daemon(DaemonOptions(ram_size="32MiB")) as daemon:
        path = daemon.socket_path
        for number in range(30):
            old.call("kv_blocks.put", socket_path=path, key=f"k{number}", size_bytes=3 * MIB, tier="ram")
        there = [
            old.call("kv_blocks.get", socket_path=path, key=f"k{number}", size_bytes=3 * MIB)
            for number in range(30)
        ]
        used = sum(file.stat().st_size for file in daemon.ram_folder.rglob("*") if file.is_file())
    assert there[-1]
    assert not all(there)
    assert used <= 32 * MIB
