"""`python -m safety`."""

import sys

if __name__ == "__main__":
    from .run import main  # not for the daemons, which are forked from a process with this module in it

    sys.exit(main())
