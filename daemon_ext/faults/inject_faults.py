"""Injects faults into a real hypercached while clients work, and counts what they lost.

    make faults [SECONDS=60]
    python daemon_ext/faults/inject_faults.py [--seconds 60] [--seed 1]

Faults take turns until the time is up, and each is injected at least once. No commit that was acknowledged
may be lost, and no reader that verifies checksums may take wrong bytes for right ones: the exit status is 1
where that happened. A frozen file system takes root; what could not be injected is said.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path

_TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(_TESTS / "support"))  # the daemons that can be killed, and clients of them

from faults import FAULTS, Fault  # noqa: E402
from scene import Scene  # noqa: E402

from hypercache_compat.stopping import stoppable  # noqa: E402

LONGEST_PAUSE_S = 0.4


@contextmanager
def scene_for(fault: Fault, seed: int, longest_pause_s: float = LONGEST_PAUSE_S) -> Iterator[Scene]:
    """Where a fault is injected again and again; nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="hc", dir="/dev/shm"))
    with ExitStack() as held:
        held.callback(shutil.rmtree, folder)
        scene = Scene(folder, random.Random(f"{seed} {fault.title}"), longest_pause_s)
        held.callback(scene.close)
        held.enter_context(fault.prepared(scene))
        yield scene


def inject(faults: Sequence[Fault], seconds: float, seed: int) -> dict[Fault, tuple[Scene, int]]:
    """Each fault's scene, and how often it was injected."""
    end = time.monotonic() + seconds
    with ExitStack() as held:
        scenes = {fault: held.enter_context(scene_for(fault, seed)) for fault in faults}
        times = dict.fromkeys(faults, 0)
        for fault in cycle(faults):
            if times[fault] and time.monotonic() > end:
                break
            try:
                fault.inject(scenes[fault])
            except BaseException:  # a deadline or Ctrl-C too: without the log nobody could tell why
                print(f"{fault.title}: broke off. The daemon's log ends so:\n{scenes[fault].log_tail()}")
                raise
            times[fault] += 1
        return {fault: (scenes[fault], times[fault]) for fault in faults}


def table(found: Mapping[Fault, tuple[Scene, int]]) -> str:
    """Markdown."""
    rows = [
        "| fault | times injected | commits acknowledged | lost | wrong bytes |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for fault, (scene, injected) in found.items():
        figures = (injected, scene.acknowledged, len(scene.lost), len(scene.wrong))
        rows.append(f"| {fault.title} | {' | '.join(map(str, figures))} |")
    rows += [f"\n{fault.title}: lost {scene.lost}, wrong {scene.wrong}" for fault, scene in failed(found)]
    return "\n".join(rows)


def failed(found: Mapping[Fault, tuple[Scene, int]]) -> list[tuple[Fault, Scene]]:
    """Where something was lost or wrong."""
    return [(fault, scene) for fault, (scene, _) in found.items() if scene.lost or scene.wrong]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long, about (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random but the time (default: 1)")
    options = parser.parse_args(arguments)
    found = inject([fault for fault in FAULTS if not fault.needs], options.seconds, options.seed)
    print(table(found))
    for fault in FAULTS:
        if fault.needs:
            print(f"\nNot injected: {fault.title}; that takes {fault.needs}.")
    return 1 if failed(found) else 0


if __name__ == "__main__":
    sys.exit(stoppable(main))
