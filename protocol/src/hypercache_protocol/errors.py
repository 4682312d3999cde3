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


ERROR_MEANINGS: dict[ErrorCode, str] = {
    ErrorCode.BAD_REQUEST: "not JSON, not an object, or a field is missing, wrongly typed or out of range",
    ErrorCode.UNKNOWN_ACTION: "the daemon does not know the action; the connection lives",
    ErrorCode.TOO_LARGE: "the line or frame is longer than one request may be; the connection is closed",
    ErrorCode.NOT_FOUND: "there is no object of that name",
    ErrorCode.NOT_STAGED: "there is no staged write of that name to append to or to commit",
    ErrorCode.STALE_STAGE: "`stage_id` names a staged write that is gone; newer ones are untouched",
    ErrorCode.CONTRADICTION: "two fields exclude each other; what is staged stays staged",
    ErrorCode.CHECKSUM_MISMATCH: "the bytes are not those that the given checksum is of",
    ErrorCode.NO_SPACE: "there is no room, and nothing that may be evicted makes enough of it",
    ErrorCode.NO_BACKEND: "the request needs a backend and there is none for this name",
    ErrorCode.BACKEND_FAILED: "the backend did not do what it was asked",
    ErrorCode.FORBIDDEN: "the daemon's settings do not allow it",
    ErrorCode.UNAVAILABLE: "it cannot be done now; asking again later may help",
    ErrorCode.INTERNAL: "a fault in the daemon; its log says more",
}


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

    def __init__(self, message: str, code: ErrorCode = ErrorCode.BAD_REQUEST) -> None:
        super().__init__(message)
        self.code = code


class LocalProtocolError(ProtocolError):
    """This side asked for something that the wire cannot carry. Nothing was sent."""
