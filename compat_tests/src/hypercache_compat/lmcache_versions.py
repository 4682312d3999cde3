"""LMCache releases: the one in this environment, and an older one laid over it from a folder of its own."""

from __future__ import annotations

from pathlib import Path

from .payloads import MIB
from .releases import (
    LMCACHE_IN_ENVIRONMENT,
    LMCACHE_IN_FOLDER,
    LMCACHE_VERSIONS,
    environment_with,
    release_folder,
)
from .scenario_process import ScenarioProcess

_RAW_BLOCK_HEADER_BYTES = 4096


def _folder(version: str) -> Path | None:
    if version == LMCACHE_IN_ENVIRONMENT:
        return None
    if version == LMCACHE_IN_FOLDER:
        return release_folder(f"lmcache=={version}")
    raise ValueError(f"LMCache {version} is not one of {', '.join(LMCACHE_VERSIONS)}")


def lmcache_environment(version: str) -> dict[str, str]:
    """The environment variables with which `import lmcache` gives `version`, quiet and without telemetry."""
    quiet = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
    return environment_with(_folder(version)) | quiet


def lmcache_process(version: str, log: Path | None = None) -> ScenarioProcess:
    """A process with LMCache `version` that runs `lmcache_scenarios`; what it prints goes to `log`."""
    return ScenarioProcess(f"LMCache {version}", "hypercache_compat.lmcache_scenarios", _folder(version), log)


def connector_spec(socket_path: str, namespace: str, **parameters: object) -> dict[str, object]:
    """What LMCache's configuration says to load the connector, with further `parameters` of it."""
    return {
        "type": "native_plugin",
        "module_path": "hypercache_connector",
        "class_name": "HyperCacheConnector",
        "adapter_params": {"socket_path": socket_path, "namespace": namespace, **parameters},
    }


def raw_block_spec(
    device: str, object_bytes: int, *, direct: bool, engine: str = "posix"
) -> dict[str, object]:
    """The same for LMCache's own raw_block, with room for objects of up to `object_bytes`."""
    return {
        "type": "raw_block",
        "device_path": device,
        "slot_bytes": object_bytes + _RAW_BLOCK_HEADER_BYTES,
        "meta_total_bytes": 32 * MIB,
        "use_odirect": direct,
        "io_engine": engine,
    }


def files_spec(kind: str, folder: Path, *, direct: bool) -> dict[str, object]:
    """The same for `fs_native` or `fs`, which keep files in a folder."""
    return {"type": kind, "base_path": str(folder), "use_odirect": direct}
