"""One client's connection: bytes to the session, requests to the handlers, replies back.

Rules:
1. On wire 1 requests are answered one by one, in order. On wire 2 those that wait are answered side by
   side, up to a limit; at it nothing more is read.
2. Nothing that a client sends or fails to read costs another client anything but its share of the CPU.
3. Replies that are ready are never held back behind a request that waits.
4. A client that sends nothing while nothing is asked of the daemon is idle. Where idle ones are closed, what
   they sent until then is answered; nothing is said, for on wire 1 it would pass for an answer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import trio

from hypercache_protocol.batches import BatchRequest, LocateMany, PresenceTableReply
from hypercache_protocol.errors import ErrorCode, LocalProtocolError
from hypercache_protocol.messages import ErrorReply, Reply, Request
from hypercache_protocol.session import (
    ConnectionClosed,
    Limits,
    NeedData,
    ReplyReceived,
    RequestReceived,
    RequestRejected,
    Role,
    Session,
)
from hypercache_protocol.versions import WireVersion

from .handlers import Caller, Handlers
from .rights import Rights
from .stream import Stream

log = logging.getLogger(__name__)

_FLUSH_BYTES = 64 * 1024
_TURN = 64  # requests answered or refused before other connections get their turn …
_LOOKED_UP = 32  # … where so many keys that are only looked up count as one more …
_KEYS = 8  # … and so many keys of any other batch


@dataclass(frozen=True)
class ConnectionLimits:
    """What one client may cost."""

    session: Limits
    max_in_flight: int = 64
    send_timeout_s: float = 60.0
    drain_s: float = 2.0
    drain_bytes: int = 16 * 1024 * 1024
    idle_timeout_s: float = math.inf


DEFAULT_LIMITS = ConnectionLimits(Limits())


class Connection:
    """Serves one client until it closes, breaks the wire, or the daemon stops."""

    def __init__(
        self,
        stream: Stream,
        connection_id: int,
        rights: Rights,
        handlers: Handlers,
        version: WireVersion,
        limits: ConnectionLimits,
    ) -> None:
        self._stream = stream
        self._id = connection_id
        self._caller = Caller(connection_id, rights)
        self._handlers = handlers
        self._limits = limits
        self._session = Session(Role.DAEMON, version=version, limits=limits.session)
        self._out = bytearray()
        self._sending = trio.Lock()
        self._slots = trio.Semaphore(limits.max_in_flight)
        self._has_enclosed = False
        self.was_idle = False
        """True once the connection was closed because nothing came on it."""

    @property
    def unknown_fields(self) -> int:
        """Fields of requests so far that this daemon does not know, and ignored."""
        return self._session.unknown_fields

    def stop(self) -> None:
        """Close once all is answered that was asked by now."""
        try:
            self._stream.stop_receiving()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("connection %d was gone before it was stopped", self._id)

    async def serve(self) -> None:
        """Serve until the end; the stream is closed on every way out."""
        with closing(self._stream):
            async with trio.open_nursery() as answering:
                with self._farewell():
                    await self._serve(answering)

    @contextmanager
    def _farewell(self) -> Iterator[None]:
        """Takes it that the client is gone, or does not read."""
        try:
            yield
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("connection %d went away", self._id)
        except trio.TooSlowError:
            log.warning(
                "connection %d did not read its replies for %g s and was closed",
                self._id,
                self._limits.send_timeout_s,
            )
            # Half a reply may be out; what another task sent after it would be read as its rest.
            self._stream.close()
        else:
            return
        self.stop()

    async def _serve(self, answering: trio.Nursery) -> None:
        work = 0
        while True:
            event = self._session.next_event()
            match event:
                case NeedData():
                    work += 1
                    await self._flush()
                    self._session.receive_data(await self._receive())
                case RequestReceived():
                    await self._answer(event, answering)
                    work += _weight(event.request)
                case RequestRejected():
                    work += 1
                    await self._reply(event.request_id, event.reply)
                    if event.fatal:
                        await self._refuse()
                        return
                case ConnectionClosed():
                    return
                case ReplyReceived():
                    raise AssertionError("a daemon's session receives no replies")
            if work >= _TURN:
                work = 0
                await trio.lowlevel.checkpoint()

    async def _receive(self) -> bytes:
        idle_s = self._limits.idle_timeout_s
        while idle_s < math.inf:  # the usual connection is spared the cost of a deadline
            with trio.move_on_after(idle_s):
                return await self._stream.receive()
            if self._slots.value == self._limits.max_in_flight:  # else a request is under way
                log.info("connection %d was idle for %g s and is closed", self._id, idle_s)
                self.was_idle, idle_s = True, math.inf
                self.stop()
        return await self._stream.receive()

    async def _answer(self, event: RequestReceived, answering: trio.Nursery) -> None:
        reply = self._handlers.answer_now(event.request, self._caller)
        if reply is not None:
            await self._reply(event.request_id, reply)
            return
        await self._flush()
        if self._session.is_framed:
            await self._slots.acquire()
            answering.start_soon(self._answer_later, event)
        else:
            await self._reply(event.request_id, await self._handlers.answer(event.request, self._caller))

    async def _answer_later(self, event: RequestReceived) -> None:
        try:
            reply = await self._handlers.answer(event.request, self._caller)
            with self._farewell():
                await self._reply(event.request_id, reply)
                await self._flush()
        finally:
            self._slots.release()

    async def _reply(self, request_id: int, reply: Reply) -> None:
        if type(reply) is PresenceTableReply:
            await self._enclose(request_id, reply)
            return
        try:
            self._out += self._session.send_reply(request_id, reply)
        except LocalProtocolError as error:  # the layout of a huge, scattered object may be too long
            log.error("connection %d cannot be answered: %s", self._id, error)
            refusal = ErrorReply(error_message=f"no reply: {error}", error_code=ErrorCode.INTERNAL)
            self._out += self._session.send_reply(request_id, refusal)
        if len(self._out) >= _FLUSH_BYTES:
            await self._flush()
            await trio.lowlevel.checkpoint()  # a long reply is long work, and sending may give no turn

    async def _enclose(self, request_id: int, reply: PresenceTableReply) -> None:
        data = self._session.send_reply(request_id, reply)
        async with self._sending:  # what waits to be sent has not begun, so the order doesn't matter
            with trio.fail_after(self._limits.send_timeout_s):
                # The kernel bounds how many are on their way, and counts those of all clients together: one
                # for each that does not read is enough.
                if self._has_enclosed and self._stream.has_unread():
                    await self._stream.send_all(data)
                else:
                    self._has_enclosed = True
                    await self._stream.send_enclosing(data, self._handlers.enclosed)

    async def _flush(self) -> None:
        if self._out and not self._sending.locked():
            del self._out[: self._stream.send_now(self._out)]
        if not self._out:
            return
        async with self._sending:
            while self._out:
                out, self._out = self._out, bytearray()
                with trio.fail_after(self._limits.send_timeout_s):
                    await self._stream.send_all(out)

    async def _refuse(self) -> None:
        """Send what is left, then read on for a moment: closing on unread bytes would reset the
        connection before the client has seen why."""
        await self._flush()
        self._stream.send_eof()
        left = self._limits.drain_bytes
        with trio.move_on_after(self._limits.drain_s):
            while left > 0 and (data := await self._stream.receive()):
                left -= len(data)


def _weight(request: Request) -> int:
    """How many small requests it costs as much as."""
    match request:
        case LocateMany(layouts=False):
            return 1 + len(request.suffixes) // _LOOKED_UP
        case BatchRequest():
            return 1 + len(request.suffixes) // _KEYS
        case _:
            return 1
