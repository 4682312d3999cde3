"""The file in which the operator names the devices to drain: one path a line, `#` begins a remark.

It says what is wanted and not what to do, so it holds after a restart as well.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

log = logging.getLogger(__name__)

DRAIN_FILE_NAME = "drain"


def devices_to_drain(path: Path, known: Collection[str]) -> frozenset[str] | None:
    """Those of the `known` devices that the file at `path` names: none where there is no file, and None where
    it cannot be obeyed, which the log says."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return frozenset()
    except (OSError, UnicodeDecodeError) as error:
        log.error("%s cannot be read, so nothing changes: %s", path, error)
        return None
    named = {line.partition("#")[0].strip() for line in lines} - {""}
    strange = sorted(named - set(known))
    if strange:
        log.error(
            "%s names %s, which is no device of this pool, so nothing changes; its devices are %s",
            path,
            ", ".join(strange),
            ", ".join(known),
        )
        return None
    return frozenset(named)
