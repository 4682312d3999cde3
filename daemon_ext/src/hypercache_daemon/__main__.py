"""`hypercached`, or what to install where what the daemon needs is not there; command.py is the daemon's."""

from __future__ import annotations

import sys


def main() -> int:
    """The exit status: that of the daemon, or 2 where it cannot be imported."""
    try:
        from .command import main as run
    except ModuleNotFoundError as missing:
        if str(missing.name).startswith("hypercache_"):  # then the installation is broken, not incomplete
            raise
        print(
            f"hypercached: the module {missing.name} is not installed; the daemon's come with "
            "pip install 'hypercache-ext[daemon]'",
            file=sys.stderr,
        )
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
