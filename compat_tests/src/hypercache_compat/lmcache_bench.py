"""LMCache's own benchmark of an L2 adapter, with its own verification, run and read."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .lmcache_versions import lmcache_environment
from .releases import LMCACHE_IN_ENVIRONMENT


@dataclass(frozen=True)
class Operation:
    """One measured operation; times and rates are LMCache's own."""

    keys: int
    succeeded: int
    timed_out_rounds: int
    megabytes_per_s: float
    ms_per_key: float


@dataclass(frozen=True)
class BenchReport:
    """What a run said. `exit_status` is 0 only where every loaded byte is the stored one."""

    exit_status: int
    store: Operation | None
    lookup: Operation | None
    load: Operation | None
    output: str

    @property
    def verified(self) -> bool:
        """Did LMCache compare what it loaded with what it stored, and find it the same?"""
        return self.exit_status == 0 and "data verified OK" in self.output


@dataclass(frozen=True)
class BenchSize:
    """How much a run does: each round submits `in_flight` batches of `keys` keys. Of the lookups, `hit_rate`
    ask for what was stored. `only` names the one operation to run, if not all three are."""

    keys: int = 16
    kib_per_key: int = 4096
    rounds: int = 2
    warmup_rounds: int = 1
    in_flight: int = 1
    hit_rate: float = 0.5
    only: str | None = None


def run_bench(
    spec: Mapping[str, object],
    size: BenchSize | None = None,
    version: str = LMCACHE_IN_ENVIRONMENT,
    show: Callable[[str], None] = lambda _: None,
) -> BenchReport:
    """Run `lmcache bench l2` on the adapter that `spec` describes, verified.

    `show` gets every line that it prints, while it runs.
    """
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        report = Path(folder, "report.json")
        arguments = bench_arguments(spec, size or BenchSize(), "--format", "json", "--output", str(report))
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", "-u", "-m", "lmcache.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=lmcache_environment(version),
        ) as process:
            output = _follow(process, show)
        sections = json.loads(report.read_text())["metrics"] if report.exists() else {}
    named = {section["operation"]: section for section in sections.values() if "operation" in section}
    store, lookup, load = (_operation(named.get(name)) for name in ("Store", "Lookup", "Load"))
    return BenchReport(process.returncode, store, lookup, load, output)


def bench_arguments(
    spec: Mapping[str, object], size: BenchSize, *more: str, verify: bool = True
) -> list[str]:
    """The arguments of the `lmcache` command for a benchmark of the adapter that `spec` describes."""
    amounts = {
        "--num-keys": size.keys,
        "--in-flight": size.in_flight,
        "--data-size-kb": size.kib_per_key,
        "--rounds": size.rounds,
        "--warmup-rounds": size.warmup_rounds,
        "--lookup-max-hit-rate": size.hit_rate,
        "--l1-align-bytes": 4096 if size.kib_per_key % 4 == 0 else 1,
    }
    words = ["bench", "l2", "--l2-adapter", json.dumps(spec)]
    words += ["--no-skip-verify"] if verify else []
    words += ["--only", size.only] if size.only else []
    return [*words, *more, *(str(word) for pair in amounts.items() for word in pair)]


def _follow(process: subprocess.Popen[str], show: Callable[[str], None]) -> str:
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            show(line.rstrip("\n"))
    except BaseException:  # Ctrl-C too: the benchmark must not outlive the one who asked for it
        process.kill()
        raise
    process.wait()
    return "".join(lines)


def _operation(section: Mapping[str, Any] | None) -> Operation | None:
    if section is None:
        return None
    return Operation(
        keys=section["total_keys"],
        succeeded=section["total_success"],
        timed_out_rounds=section["rounds_timed_out"],
        megabytes_per_s=section["throughput_avg_mbps"],
        ms_per_key=section["latency_per_key_ms"],
    )
