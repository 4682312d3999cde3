"""What a running process of this user's has, and has used so far: all its threads together, no children."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """The processor time that it used, in steps of a clock tick, which is 10 ms as a rule."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = after_name[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """The memory that it has now."""
    return _status_bytes(pid, "VmRSS:")


def peak_bytes(pid: int) -> int:
    """The most memory that it had at once."""
    return _status_bytes(pid, "VmHWM:")


def open_descriptors(pid: int) -> int:
    """How many it has."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _status_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
