"""The safety suite: named checks that no load of LMCache's is ever given a wrong byte.

    make safety
    python -m safety --help        (with `connector` on Python's path)

Each check goes through the adapter that LMCache makes of its JSON. docs/safety.md lists them.
"""
