"""benchmarks/start.py: it measures a real start, and leaves nothing behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "start.py"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCHMARK, "--folder", folder, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_it_prints_what_a_start_took_and_removes_what_it_made(short_dir: Path) -> None:
    done = run(short_dir, "--objects", "300", "--starts", "2", "--profile")
    assert done.returncode == 0, done.stderr
    assert "300 objects, 50% of them of 14 MiB" in done.stdout
    starts = re.findall(r"start \d: ([\d.]+) s .* CPU ([\d.]+) s; peak RSS (\d+) MiB", done.stdout)
    assert len(starts) == 2
    assert all(float(figure) > 0 for start in starts for figure in start)
    assert re.search(r"median [\d.]+ s .* bytes an object", done.stdout)
    assert "open_all" in done.stdout, "the profile is of the load"
    assert list(short_dir.iterdir()) == []


def test_a_daemon_that_refuses_to_start_is_shown_and_what_was_made_is_removed(short_dir: Path) -> None:
    done = run(short_dir, "--objects", "10", "--daemon-argument=--wire=7.0")
    assert done.returncode == 1
    assert "--wire must be one of" in done.stderr
    assert list(short_dir.iterdir()) == []
