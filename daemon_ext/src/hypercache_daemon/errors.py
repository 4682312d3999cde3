"""What the daemon refuses, in the words of the protocol. `handlers.py` turns it into a reply."""

from __future__ import annotations

from hypercache_protocol.errors import ErrorCode


class DaemonError(Exception):
    """A request that is not carried out; nothing was changed unless the sentence says so."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
