"""Did the machine go down under the daemon before this one, as it does at a power loss? Then what clients had
written and not synced never reached the devices, whatever the catalog says of it.

A daemon notes at its start in which boot of the machine it runs, and takes that back when it stops in order:
a machine that is shut down in order syncs its disks. That a daemon was killed is no matter while the machine
runs on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .catalog_rows import Remember

_RUNS_IN = "runs in boot"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def begun() -> Remember:
    """What the catalog is to keep before anybody is served."""
    return Remember(_RUNS_IN, _this_boot(), casual=False)


def ended() -> Remember:
    """What it is to keep once nobody is served any more."""
    return Remember(_RUNS_IN, "")


def went_down(remembered: Mapping[str, str]) -> bool:
    """Whether the machine did, by what the catalog remembers."""
    before = remembered.get(_RUNS_IN, "")
    return before not in ("", _this_boot())


def _this_boot() -> str:
    """An empty word where the kernel does not tell."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""
