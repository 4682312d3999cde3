"""fio on the devices that HyperCache gets: what they give to a program that keeps nothing and checks nothing.

It answers the two questions that a process with LMCache in it answers (bench_host.Host), with the connector's
block size and depth: blocks of at most 4 MiB, 16 of them under way in each direction.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench_host import BenchRun, Rounds
from traffic import LOAD_ALONE, LOAD_BESIDE, STORE_ALONE, STORE_BESIDE, Rates, Traffic

from hypercache_compat.lmcache_bench import BenchSize

ABSENT = "fio is not installed, so it is left out (Debian: apt-get install fio)"
BLOCK_BYTES = 4 << 20
THREADS, DEPTH = 4, 4
"""Each thread has so many blocks under way. One thread alone would be the limit before the devices are."""
ROUND_S = 0.2
FILL_BYTES = 256 << 20
"""What is written before anything is measured, and then gone round, each thread on a part of its own: much
more than the processor's caches hold."""

_READ, _WRITE = "read", "write"


def is_installed() -> bool:
    """Whether there is a fio to run."""
    return shutil.which("fio") is not None


class FioHost:
    """Runs fio anew for each question."""

    def run(self, spec: Mapping[str, object], size: BenchSize, *, verify: bool = True) -> BenchRun:
        """So many rounds of writes, then of reads. The time of each is that of one batch at its rate."""
        del verify  # fio keeps nothing that could be wrong
        count = size.warmup_rounds + size.rounds
        batch_bytes = size.keys * size.in_flight * size.kib_per_key * 1024
        kinds = [_WRITE] * count + [_READ] * count
        rates, output = _run(spec, size.kib_per_key * 1024, [[_job(kind, ROUND_S)] for kind in kinds])
        seconds = [batch_bytes / rate[kind] for rate, kind in zip(rates, kinds, strict=False)]
        succeeded = (size.keys * size.in_flight,) * count
        rounds = {
            "Store": Rounds(tuple(seconds[:count]), succeeded),
            "Load": Rounds(tuple(seconds[count:]), succeeded),
        }
        return BenchRun(0 if rates else 1, rounds, output)

    def traffic(self, spec: Mapping[str, object], traffic: Traffic) -> Rates | str:
        """Reads alone, writes alone, both together; or what fio said instead."""
        load, store = _job(_READ, traffic.window_s), _job(_WRITE, traffic.window_s)
        rates, output = _run(spec, traffic.object_bytes, [[load], [store], [load, store]])
        if not rates:
            return f"fio failed: {output}"
        loads, stores, both = rates
        return {
            LOAD_ALONE: loads[_READ] / 1e9,
            STORE_ALONE: stores[_WRITE] / 1e9,
            LOAD_BESIDE: both[_READ] / 1e9,
            STORE_BESIDE: both[_WRITE] / 1e9,
        }


def _job(kind: str, seconds: float) -> str:
    return f"[{kind}]\nrw={kind}\ntime_based=1\nruntime={int(seconds * 1000)}ms"


def _together(group: Sequence[str]) -> str:
    """Jobs that begin when all before them have ended."""
    first, *others = group
    return "\n".join([first, "stonewall", *others])


def _run(
    spec: Mapping[str, object], object_bytes: int, groups: Sequence[Sequence[str]]
) -> tuple[list[dict[str, float]], str]:
    """Bytes a second read and written by each group of jobs, and what fio printed where it failed. All is
    written once before the first group begins."""
    parts = [_settings(spec, object_bytes), f"[fill]\nrw={_WRITE}", *(_together(group) for group in groups)]
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        jobs, report = Path(folder, "jobs"), Path(folder, "report.json")
        jobs.write_text("\n".join(parts))
        done = subprocess.run(
            ["fio", "--output-format=json", f"--output={report}", str(jobs)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        printed = report.read_text() if report.exists() else ""
    if done.returncode != 0:
        return [], f"{done.stdout}{done.stderr}{printed}"[:1000]
    # What fio has to say about its jobs comes before the report.
    found = json.loads(printed[printed.index("{") :])["jobs"]
    return [{kind: job[kind]["bw_bytes"] for kind in (_READ, _WRITE)} for job in found[1:]], ""


def _settings(spec: Mapping[str, object], object_bytes: int) -> str:
    devices = spec["devices"]
    assert isinstance(devices, tuple)
    settings = {
        "filename": ":".join(devices),
        "direct": int(bool(spec["direct"])),
        "ioengine": "io_uring",
        "bs": min(object_bytes, BLOCK_BYTES),
        "iodepth": DEPTH,
        "numjobs": THREADS,
        "size": FILL_BYTES // THREADS,
        "offset_increment": FILL_BYTES // THREADS // len(devices),
        "thread": 1,
        "group_reporting": 1,
        "allow_file_create": 0,
    }
    return "\n".join(["[global]", *(f"{name}={value}" for name, value in settings.items())])
