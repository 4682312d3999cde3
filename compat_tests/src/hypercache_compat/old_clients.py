"""Real old clients, unchanged: hypercache-io as it was released, each version in a process of its own."""

from __future__ import annotations

from .releases import release_folder
from .scenario_process import ScenarioProcess


def old_client(version: str) -> ScenarioProcess:
    """A process with hypercache-io `version` that runs `old_client_scenarios`."""
    folder = release_folder(f"hypercache-io=={version}")
    return ScenarioProcess(f"hypercache-io {version}", "hypercache_compat.old_client_scenarios", folder)
