"""The processor time of another process."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """What the process has used so far, its threads included, its children not; in steps of a clock tick,
    which is 10 ms as a rule."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = after_name[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
