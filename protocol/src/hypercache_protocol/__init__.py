"""HyperCache's wire protocol: messages, versions, states, and a Session that does no I/O."""

from .errors import ErrorCode, InvalidMessage, LocalProtocolError, ProtocolError, RemoteProtocolError
from .fields import CHUNK_SIZE, Tier
from .session import (
    NEED_DATA,
    ConnectionClosed,
    Event,
    Limits,
    ReplyReceived,
    RequestReceived,
    RequestRejected,
    Role,
    Session,
)
from .states import SyncStatus
from .versions import WIRE_1_0, WIRE_1_1, WIRE_2_0, WIRE_2_1, WIRE_2_2, WireVersion

__all__ = [
    "CHUNK_SIZE",
    "NEED_DATA",
    "WIRE_1_0",
    "WIRE_1_1",
    "WIRE_2_0",
    "WIRE_2_1",
    "WIRE_2_2",
    "ConnectionClosed",
    "ErrorCode",
    "Event",
    "InvalidMessage",
    "Limits",
    "LocalProtocolError",
    "ProtocolError",
    "RemoteProtocolError",
    "ReplyReceived",
    "RequestReceived",
    "RequestRejected",
    "Role",
    "Session",
    "SyncStatus",
    "Tier",
    "WireVersion",
]
