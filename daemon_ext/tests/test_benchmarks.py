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
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


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
