"""Runs in the process of a released package: one scenario a line on standard input, one answer a line on
standard output.

See `scenario_process` for the other end.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any


def main(package: str) -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the package prints must not look like an answer
    for line in sys.stdin:
        call = json.loads(line)
        answers.write(json.dumps({"number": call["number"], **_answer(package, call)}) + "\n")
        answers.flush()


def _answer(package: str, call: dict[str, Any]) -> dict[str, Any]:
    module, _, function = call["scenario"].rpartition(".")
    try:
        scenario = getattr(importlib.import_module(f"{package}.{module}"), function)
        value = scenario(**call["arguments"])
        importlib.import_module(package).after_each()
        return {"value": value}
    except Exception:  # noqa: BLE001 - the boundary of this process: the test gets the traceback
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    main(sys.argv[1])
