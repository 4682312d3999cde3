"""Feeds a session what no honest peer sends, guided by coverage, on both wires and from both ends.

    make fuzz [SECONDS=60]

The first byte of an input chooses the end, the wire and whether a client waits for the answer to its hello,
and how the rest is cut into pieces. Whatever comes, a session gives events; a daemon's answers what it read,
and a client's may raise a RemoteProtocolError. Anything else is a crash, and its input is written to the
folder it was started in.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["hypercache_protocol"]):
    from hypercache_protocol import NEED_DATA, ConnectionClosed, RemoteProtocolError, Role, Session
    from hypercache_protocol.batches import Hello, HelloLimits, HelloReply, LocateMany
    from hypercache_protocol.messages import Locate, MissReply
    from hypercache_protocol.session import RequestReceived, RequestRejected

_WELCOME = HelloReply(
    version="2.0",
    versions=("2.0",),
    features=(),
    limits=HelloLimits(max_request_bytes=1 << 20, max_reply_bytes=1 << 20, max_in_flight=8, max_batch=8),
    devices=(),
    instance_id="i",
)
_MAX_EVENTS = 1 << 16


def _greeted() -> tuple[Session, Session]:
    client, daemon = Session(Role.CLIENT), Session(Role.DAEMON)
    request_id, hello = client.send_request(Hello(versions=("2.0",)))
    daemon.receive_data(hello)
    daemon.next_event()
    client.receive_data(daemon.send_reply(request_id, _WELCOME))
    client.next_event()
    return client, daemon


def _session(choice: int) -> Session:
    client, daemon = _greeted() if choice & 1 else (Session(Role.CLIENT), Session(Role.DAEMON))
    if choice & 2:
        return daemon
    on_lines = Hello(versions=("2.0",)) if choice & 4 else Locate(uri="a")
    client.send_request(LocateMany(suffixes=("a", "b"), layouts=True) if choice & 1 else on_lines)
    return client


def _drain(session: Session) -> bool:
    """True where the session is over."""
    for _ in range(_MAX_EVENTS):
        event = session.next_event()
        if event is NEED_DATA:
            return False
        if isinstance(event, ConnectionClosed):
            return True
        if isinstance(event, RequestReceived):
            session.send_reply(event.request_id, MissReply())
        if isinstance(event, RequestRejected):
            session.send_reply(event.request_id, event.reply)
            if event.fatal:
                return True
    raise AssertionError("a session makes events without end")


def one_input(data: bytes) -> None:
    """One run of the fuzzer."""
    if not data:
        return
    choice, rest = data[0], data[1:]
    session = _session(choice)
    step = (choice >> 3) + 1
    try:
        for start in range(0, len(rest), step):
            session.receive_data(rest[start : start + step])
            if _drain(session):
                return
        session.receive_data(b"")
        _drain(session)
    except RemoteProtocolError:
        if session.role is Role.DAEMON:  # which has events for all that its client may send
            raise


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
