"""Each benchmark still fits the code that it measures, and is what the documents call it: those of the long
form run nowhere else in CI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "name", ["allocator", "eviction", "failing_device", "hung_neighbours", "run", "start"]
)
def test_it_imports_what_it_needs(name: str) -> None:
    assert imported(name).returncode == 0


def imported(name: str, code: str = "") -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", f"import {name}{code}"]
    return subprocess.run(arguments, cwd=FOLDER, stdout=subprocess.PIPE, text=True, check=False)


def test_what_was_aimed_at_is_compared_with_the_best_of_those_it_names() -> None:
    measured = {
        "load, 14 MiB": {"HyperCache": [3.0], "raw_block posix": [1.0, 2.0, 9.0], "fs": [9.0], "fio": [4.0]},
        "lookup, 64 keys, 64 in flight, hits": {"HyperCache": [1.0], "raw_block posix": [2.0]},
        "load beside stores, of alone, 14 MiB": {"HyperCache": [0.7], "fs": [0.9]},
    }
    code = f"import aims; print(aims.table({{'RAM': {measured}, 'disk, files': {measured}}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[2:] == [
        "| lookup, 64 keys, 64 in flight, hits | raw_block posix | at most 0.5 | **0.50** |",
        "| load, 14 MiB | raw_block posix | at least 1.15 | **1.50** |",
        "| load, 14 MiB | fio | at least 1.0 | **0.75** |",
        "| load beside stores, of alone, 14 MiB | itself | at least 0.8 | **0.70** |",
    ]


def test_the_documents_name_commands_that_are_there_and_find_their_modules() -> None:
    root = FOLDER.parent
    documents = [root / "README.md", *(root / "docs").rglob("*.md")]
    commands = {
        (python, script)
        for document in documents
        for python, script in re.findall(r"(\S*python) (\S+\.py)", document.read_text())
    }
    assert len(commands) > 5
    for python, script in commands:
        assert python.strip("`") == ".venv/bin/python", f"another one has not what {script} imports"
        assert (root / script).is_file()
