"""A process that benchmarks LMCache's adapters as often as it is asked to, on one import of LMCache.

    python benchmarks/lmcache_host.py     (spoken to by bench_host.py, over standard input and output)

Each line of standard input is a JSON object with one name in it:

* `bench`: a list of arguments for the `lmcache` command. The answer says how it ended and how long every
  round of every operation took, as LMCache's own runner measured it. LMCache prints these times rounded to
  0.01 ms, too coarse for a lookup; so they are taken from the runner's results instead.
* `traffic`: an adapter, and how much to load and store (traffic.py). The answer has the rates, or what went
  wrong.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from lmcache.cli.commands.bench.l2_adapter_bench import runner
from lmcache.cli.main import main as lmcache
from lmcache_traffic import TrafficFailed, rates
from traffic import Traffic

Rounds = dict[str, dict[str, list[float]]]


def record_rounds(rounds: Rounds) -> None:
    """From now on each operation that the benchmark runs leaves its rounds in `rounds`, by its name."""

    def recording(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            rounds[result.operation] = {
                "seconds": list(result.round_durations),
                "succeeded": list(result.success_counts),
            }
            return result

        return recorded

    for name in ("bench_store", "bench_lookup", "bench_load"):
        setattr(runner, name, recording(getattr(runner, name)))


def exit_status(arguments: list[str]) -> int:
    """Run the command and give what its process would have ended with."""
    try:
        lmcache(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def bench(arguments: list[str], rounds: Rounds) -> dict[str, Any]:
    """Run the command; its rounds come in `rounds`."""
    rounds.clear()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = exit_status(arguments)
    return {"exit_status": status, "rounds": rounds, "output": output.getvalue()}


def traffic(spec: str, amounts: dict[str, Any]) -> dict[str, Any]:
    """Load and store, alone and together."""
    try:
        return {"rates": rates(spec, Traffic(**amounts))}
    except TrafficFailed as error:
        return {"problem": str(error)}


def serve() -> None:
    """Answer until standard input ends."""
    # Whatever LMCache or a native library writes to descriptor 1 must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rounds: Rounds = {}
    record_rounds(rounds)
    answers.write('{"ready": true}\n')
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        answer = bench(request["bench"], rounds) if "bench" in request else traffic(**request["traffic"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
