"""Released packages in folders of their own, so that several versions can be driven side by side.

A folder is filled once and kept between runs under `.cache` (or where HYPERCACHE_COMPAT_CACHE says), apart
for each version of Python. `python -m hypercache_compat.releases` fills all of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

OLD_CLIENT_VERSIONS = ("0.9.0", "0.9.0b1")
LMCACHE_IN_ENVIRONMENT = "0.5.6"
LMCACHE_IN_FOLDER = "0.5.5"
LMCACHE_VERSIONS = (LMCACHE_IN_FOLDER, LMCACHE_IN_ENVIRONMENT)

REQUIREMENTS = (
    *(f"hypercache-io=={version}" for version in OLD_CLIENT_VERSIONS),
    f"lmcache=={LMCACHE_IN_FOLDER}",
)


class InstallFailed(RuntimeError):
    """pip could not install a release; the message holds what it said."""


def release_folder(requirement: str, announce: Callable[[str], None] = lambda _: None) -> Path:
    """The folder that holds `requirement` ("name==version") and nothing else, filled if it is not there yet.

    Raises:
        InstallFailed: pip could not install it.
    """
    folder = _cache_root() / requirement.replace("==", "-")
    if not folder.exists():
        announce(f"installing {requirement} into {folder}")
        _install(requirement, folder)
    return folder


def environment_with(folder: Path | None) -> dict[str, str]:
    """This process's environment with `folder`, if there is one, first on Python's path."""
    if folder is None:
        return dict(os.environ)
    rest = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": str(folder) if not rest else f"{folder}{os.pathsep}{rest}"}


def _cache_root() -> Path:
    root = Path(os.environ.get("HYPERCACHE_COMPAT_CACHE", ".cache"))
    return (root / (sys.implementation.cache_tag or "python")).absolute()


def _install(requirement: str, folder: Path) -> None:
    """Install beside `folder` and rename: a folder with that name is always whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="install-", dir=folder.parent))
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    try:
        done = subprocess.run(
            [*pip, "--target", str(scratch), requirement], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise InstallFailed(f"pip could not install {requirement}:\n{done.stdout}{done.stderr}")
        if not folder.exists():
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    """Fill the folder of every release that the suite drives, saying so on the way."""
    for requirement in REQUIREMENTS:
        folder = release_folder(requirement, announce=lambda text: print(text, flush=True))
        print(f"{requirement} is in {folder}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
