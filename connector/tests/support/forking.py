"""Programs that fork, each with the path of the daemon's socket for its argument; one fails where an
assertion in it does."""

from __future__ import annotations

import subprocess
import sys

import pytest

DEADLINE_S = 30.0

numbered = pytest.mark.parametrize(
    "numbers", ["", "import os; number = os.getpid(); os.getpid = lambda: number"], ids=["own", "same"]
)
"""What comes before a program: parent and child have numbers of their own, or the same one, as the first
processes of two namespaces have."""


def run_forking(program: str, socket_path: str, numbers: str = "") -> None:
    """Run it to its end."""
    words = [sys.executable, "-c", f"{numbers}\n{program}", socket_path]
    subprocess.run(words, check=True, timeout=DEADLINE_S)
