"""The demo that newcomers run first: it passes, it cleans up, and it fails where a byte is wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hypercache_compat.daemon_process import DaemonProcess
from hypercache_compat.demo import OLD_URI, DemoSize, old_client_part, run
from hypercache_compat.lmcache_bench import BenchSize
from hypercache_compat.payloads import MIB

SMALL = BenchSize(keys=4, kib_per_key=512, rounds=1)


def _left_behind(said: str) -> list[str]:
    """The folders and processes that are left of the daemon that the demo named."""
    named = re.search(r"It answers on (/tmp/hc\w+)/s", said)
    assert named is not None, said
    folders = [Path(named[1]), Path("/dev/shm") / Path(named[1]).name]
    command_lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    left = [str(folder) for folder in folders if folder.exists()]
    return left + [line.decode() for line in command_lines if named[1].encode() in line]


def test_the_demo_passes_says_so_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DemoSize(bench=SMALL, object_bytes=5 * MIB + 7)) == 0
    said = capsys.readouterr().out
    for words in (
        "stored     4 objects",
        "2 of 4 found",
        "loaded     4 objects",
        "all 4 objects",
        "5,242,887",
    ):
        assert words in said, said
    assert said.endswith("Every byte that was compared was right.\n")
    assert _left_behind(said) == []


def test_the_demo_fails_where_one_byte_on_a_device_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    def flip_a_byte(daemon: DaemonProcess) -> None:
        with daemon.connect() as connection:
            chunk = connection.ask("locate", uri=OLD_URI)["chunk_layout"][1]
        with Path(chunk["device"]).open("r+b") as device:
            device.seek(chunk["offset"] + 1000)
            byte = device.read(1)
            device.seek(chunk["offset"] + 1000)
            device.write(bytes([byte[0] ^ 1]))

    assert run(DemoSize(object_bytes=5 * MIB, between=flip_a_byte), parts=[old_client_part]) == 1
    said = capsys.readouterr().out
    assert f"byte {4 * MIB + 1000} of {5 * MIB}" in said
    assert said.endswith("The demo failed.\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_stops_its_daemon_and_leaves_nothing(number: signal.Signals) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-u", "-m", "hypercache_compat.demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with demo:
        assert demo.stdout is not None
        said = ""
        while "runs its own benchmark" not in said:
            said += demo.stdout.readline() or pytest.fail(said)
        os.kill(demo.pid, number)
        said += demo.stdout.read()
    assert demo.returncode == 130
    assert "stopped; what was started is ended" in said
    assert _left_behind(said) == []
