"""Did the machine go down under the daemon before this one, as it does at a power loss? Then what clients had
written and not synced never reached the devices, whatever the catalog says of it.

A daemon notes at its start in which boot of the machine it runs, and takes that back when it stops in order
and all that was written has reached the devices. That a daemon was killed is no matter while the machine runs
on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import trio

from .catalog_rows import Remember

log = logging.getLogger(__name__)

_RUNS_IN = "runs in boot"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LONGEST_SYNC_S = 10.0


def begun() -> Remember:
    """What the catalog is to keep before anybody is served."""
    return Remember(_RUNS_IN, _this_boot(), casual=False)


def ended() -> Remember:
    """What it is to keep once nobody is served any more."""
    return Remember(_RUNS_IN, "")


async def reached_the_devices(descriptors: Iterable[int]) -> bool:
    """Sync all devices; whether that ended well, and while a stop can wait for it."""
    reason = f"that takes longer than {_LONGEST_SYNC_S:g} s"
    with trio.move_on_after(_LONGEST_SYNC_S):
        try:
            for descriptor in descriptors:
                await trio.to_thread.run_sync(os.fdatasync, descriptor, abandon_on_cancel=True)
            return True
        except OSError as error:
            reason = f"{error}"
    log.warning(
        "the devices were not synced (%s): should the machine go down before the next start, what has no"
        " checksums will be given up",
        reason,
    )
    return False


def went_down(remembered: Mapping[str, str]) -> bool:
    """Whether the machine did, by what the catalog remembers."""
    before = remembered.get(_RUNS_IN, "")
    return before not in ("", _this_boot())


def _this_boot() -> str:
    """An empty word where the kernel does not tell."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""
