"""What an old client does, as functions that run in its own process (see `scenario_host`).

Each takes a socket path and names, drives the released package as its users would, compares bytes, and gives
JSON-able facts for the test to look at. They import `hypercache`, which only that process has.
"""

from __future__ import annotations


def after_each() -> None:
    """Close the descriptors that the client's shared readers keep, or a removed pool's space stays taken."""
    from hypercache import datapath

    for reader in datapath._SHARED_READERS.values():
        reader.close()
