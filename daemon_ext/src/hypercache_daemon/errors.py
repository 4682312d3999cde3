"""What the daemon refuses, in the words of the protocol. `handlers.py` turns it into a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypercache_protocol.errors import ErrorCode

_T = TypeVar("_T")


class DaemonError(Exception):
    """A request that is not carried out; nothing was changed unless the sentence says so."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def sole(results: Sequence[_T | DaemonError]) -> _T:
    """The one result of a batch of one, or its refusal raised."""
    (result,) = results
    if isinstance(result, DaemonError):
        raise result
    return result
