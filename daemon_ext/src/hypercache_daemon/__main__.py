"""`hypercached`, or what to do where what the daemon needs is not there; command.py is the daemon's."""

from __future__ import annotations

import sys


def main() -> int:
    """The exit status: that of the daemon, or 2 where it cannot be imported."""
    try:
        from .command import main as run
    except ModuleNotFoundError as missing:
        name = str(missing.name)
        if name.startswith("hypercache_"):  # then the installation is broken, not incomplete
            raise
        print(f"hypercached: {_what_to_do_about(name)}", file=sys.stderr)
        return 2
    return run()


def _what_to_do_about(missing: str) -> str:
    if missing.partition(".")[0] in sys.stdlib_module_names:
        return f"this Python was built without its own module {missing}; take one that has it"
    return (
        f"the module {missing} is not installed; the daemon's come with pip install 'hypercache-ext[daemon]'"
    )


if __name__ == "__main__":
    sys.exit(main())
