"""The errors of the protocol.

    ProtocolError
    +-- InvalidMessage        one message is wrong; the connection goes on
    +-- RemoteProtocolError   the peer broke the wire; the connection must be closed
    +-- LocalProtocolError    this side asked for something the wire cannot carry; nothing was sent

Anything else that comes out of this package is a bug in it.
"""

from __future__ import annotations

from enum import Enum


class ErrorCode(str, Enum):
    """The closed list of words that an error reply may carry in `error_code` (since wire 1.1)."""

    BAD_REQUEST = "BAD_REQUEST"
    UNKNOWN_ACTION = "UNKNOWN_ACTION"
    TOO_LARGE = "TOO_LARGE"
    NOT_FOUND = "NOT_FOUND"
    NOT_STAGED = "NOT_STAGED"
    STALE_STAGE = "STALE_STAGE"
    CONTRADICTION = "CONTRADICTION"
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    NO_SPACE = "NO_SPACE"
    NO_BACKEND = "NO_BACKEND"
    BACKEND_FAILED = "BACKEND_FAILED"
    FORBIDDEN = "FORBIDDEN"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"


class ProtocolError(Exception):
    """Base of every error this package raises."""


class InvalidMessage(ProtocolError):
    """One message cannot be understood; the session is still in step and goes on."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.BAD_REQUEST) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class RemoteProtocolError(ProtocolError):
    """The peer broke the wire: nothing it sends from here on can be trusted, so close."""


class LocalProtocolError(ProtocolError):
    """This side asked for something that the wire cannot carry. Nothing was sent."""
