"""`python -m safety`."""

import sys

if __name__ == "__main__":
    # Not for the daemons, which are forked from a process with this module in it.
    from hypercache_compat.stopping import stoppable

    from .run import main

    sys.exit(stoppable(main))
