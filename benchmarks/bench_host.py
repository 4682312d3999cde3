"""A process with LMCache in it (lmcache_host.py), asked to benchmark one adapter after another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from traffic import Rates, Traffic

from hypercache_compat.lmcache_bench import BenchSize, bench_arguments
from hypercache_compat.lmcache_versions import lmcache_environment
from hypercache_compat.releases import LMCACHE_IN_ENVIRONMENT

_HOST = Path(__file__).with_name("lmcache_host.py")


class HostFailed(RuntimeError):
    """The process ended or said what it never says."""


@dataclass(frozen=True)
class Rounds:
    """The rounds of one operation, warm-up included: seconds each, and keys that succeeded in each."""

    seconds: tuple[float, ...]
    succeeded: tuple[int, ...]


@dataclass(frozen=True)
class BenchRun:
    """What one run of `lmcache bench l2` gave. `exit_status` is 0 only where every byte that it compared
    was right."""

    exit_status: int
    rounds: Mapping[str, Rounds]
    output: str


class Host(Protocol):
    """Where a peer's figures come from: LMCache's own benchmark, and traffic in both directions."""

    def run(self, spec: Mapping[str, object], size: BenchSize, *, verify: bool = True) -> BenchRun: ...
    def traffic(self, spec: Mapping[str, object], traffic: Traffic) -> Rates | str: ...


class BenchHost:
    """The process. Start it early: it takes some seconds to import LMCache."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(_HOST)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=lmcache_environment(LMCACHE_IN_ENVIRONMENT),
            )
        self._ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, spec: Mapping[str, object], size: BenchSize, *, verify: bool = True) -> BenchRun:
        """Run the benchmark once on the adapter that `spec` describes, which LMCache creates and closes.

        Raises:
            HostFailed: the process ended; the message holds the end of its log.
        """
        answer = self._asked({"bench": bench_arguments(spec, size, verify=verify)})
        rounds = {
            name: Rounds(tuple(each["seconds"]), tuple(int(count) for count in each["succeeded"]))
            for name, each in answer["rounds"].items()
        }
        return BenchRun(answer["exit_status"], rounds, answer["output"])

    def traffic(self, spec: Mapping[str, object], traffic: Traffic) -> Rates | str:
        """The rates of the adapter that `spec` describes, or what went wrong.

        Raises:
            HostFailed: as above.
        """
        answer = self._asked({"traffic": {"spec": json.dumps(spec), "amounts": asdict(traffic)}})
        rates: Rates | str = answer.get("rates") or answer["problem"]
        return rates

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> BenchHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _asked(self, request: Mapping[str, object]) -> dict[str, Any]:
        if not self._ready:
            self._answer()
            self._ready = True
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log_path.read_text(errors="replace").splitlines()[-30:])
            raise HostFailed(f"the process that runs LMCache ended:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer
