"""What the machine lacks for a test or a check: root, programs, device files. Asked here, so that whoever
falls back on something else, or leaves something out, gives the right reason."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path


def lacks(*programs: str, files: Sequence[str] = ()) -> str:
    """Of root, these programs and these files, what this process has not, as words that go on after "takes":
    "root, the program losetup (not on the PATH)"; "" where it has all."""
    there = {
        "root": os.geteuid() == 0,
        **{f"the program {name} (not on the PATH)": shutil.which(name) is not None for name in programs},
        **{f"{path} (not there)": Path(path).exists() for path in files},
    }
    return ", ".join(name for name, is_there in there.items() if not is_there)
