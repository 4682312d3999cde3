"""A released package in a process of its own that runs scenarios on request.

The process has the release's folder first on its path and runs `scenario_host`. A call names a function of
the process's scenario package and gives its JSON-able result, or raises with the traceback from there.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

from .releases import environment_with

CALL_DEADLINE_S = 100.0


class ScenarioFailed(AssertionError):
    """The scenario failed in its process; the message holds the traceback from there."""


class ScenarioProcess:
    """One process with one release in it, and the scenarios of `package` to run.

    Args:
        log: gets what it prints, after what is there; without it that goes where this process's goes.
    """

    def __init__(self, label: str, package: str, release: Path | None, log: Path | None = None) -> None:
        self.label = label
        with nullcontext() if log is None else log.open("ab") as printed:
            self._process = self._started(package, release, printed)
        self._answers = bytearray()
        self._calls = 0

    def _started(self, package: str, release: Path | None, log: IO[bytes] | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "hypercache_compat.scenario_host", package],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment_with(release),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, scenario: str, **arguments: object) -> Any:
        """Run `module.function` with `arguments` and give what it returns.

        Raises:
            ScenarioFailed: it raised, or gave no answer within CALL_DEADLINE_S.
        """
        self.begin(scenario, **arguments)
        return self.result()

    def begin(self, scenario: str, **arguments: object) -> None:
        """Start a scenario and leave it running; `result` waits for it."""
        assert self._process.stdin is not None
        self._calls += 1
        call = {"number": self._calls, "scenario": scenario, "arguments": arguments}
        self._process.stdin.write(json.dumps(call).encode() + b"\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """What the scenario that was begun returned."""
        deadline = time.monotonic() + CALL_DEADLINE_S
        answer = json.loads(self._next_line(deadline))
        while answer["number"] != self._calls:  # a call before this one was given up
            answer = json.loads(self._next_line(deadline))
        if "error" in answer:
            raise ScenarioFailed(f"{self.label}:\n{answer['error']}")
        return answer["value"]

    def kill(self) -> None:
        """End the process at once, whatever it is doing."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Let the process end by itself; one that does not is ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # a call that a dead process never took may be left in it
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _next_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._answers:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ScenarioFailed(f"{self.label}: no answer within {CALL_DEADLINE_S} s")
                data = os.read(self._process.stdout.fileno(), 65536)
                if not data:
                    raise ScenarioFailed(f"{self.label}: the process ended")
                self._answers += data
        line, _, rest = bytes(self._answers).partition(b"\n")
        self._answers = bytearray(rest)
        return line


@contextmanager
def running(process: ScenarioProcess) -> Iterator[ScenarioProcess]:
    """The process, which ends with the block."""
    try:
        yield process
    finally:
        process.close()
