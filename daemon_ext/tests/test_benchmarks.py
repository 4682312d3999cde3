"""Each benchmark still fits the code that it measures: those of the long form run nowhere else in CI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "name", ["allocator", "eviction", "failing_device", "hung_neighbours", "run", "start"]
)
def test_it_imports_what_it_needs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
