"""Safetensors, checkpoints and loaders of the released client, against the real daemon."""

from __future__ import annotations

import pytest

from hypercache_compat.daemon_process import DaemonProcess
from hypercache_compat.payloads import MIB
from hypercache_compat.scenario_process import ScenarioProcess

TIERS = [None, "ram"]


@pytest.mark.parametrize("tier", TIERS)
def test_safetensors_come_back_whole_and_selected(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str, tier: str | None
) -> None:
    old.call("tensor_files.safetensors", socket_path=daemon.socket_path, uri=uri, tier=tier)


def test_the_weight_loader_gives_every_shard(old: ScenarioProcess, daemon: DaemonProcess, uri: str) -> None:
    old.call("tensor_files.weight_loader", socket_path=daemon.socket_path, prefix=uri)


@pytest.mark.parametrize("tier", TIERS)
def test_each_rank_of_a_checkpoint_gets_its_shard_back(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str, tier: str | None
) -> None:
    last = old.call("tensor_files.checkpoint", socket_path=daemon.socket_path, base_uri=uri, tier=tier)
    assert last == f"{uri}/shard_rank_00001_of_00002.pt"


def test_the_pipelined_loader_misses_no_byte(old: ScenarioProcess, daemon: DaemonProcess, uri: str) -> None:
    old.call("tensor_files.pipelined", socket_path=daemon.socket_path, uri=uri, size_bytes=13 * MIB + 77)


def test_the_pipelined_loader_says_that_an_object_is_missing(
    old: ScenarioProcess, daemon: DaemonProcess, uri: str
) -> None:
    said = old.call("tensor_files.pipelined_missing", socket_path=daemon.socket_path, uri=uri)
    assert "MISS" in said
