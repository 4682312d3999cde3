"""One connection to the daemon: a socket and the Session that gives its bytes their meaning.

Rules:
1. After any error, late reply or interruption the connection is closed and never used again: a reply
   that was not read would be taken for the answer to the next request.
2. Requests go out many at a time, in windows; replies come in their order. While a window is written the
   replies are read already, so full socket buffers on both sides can't hold each other up.
3. Only `DeadBeforeSending` says that the daemon has seen nothing of an exchange.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hypercache_protocol import (
    NEED_DATA,
    WIRE_1_0,
    WIRE_2_0,
    ConnectionClosed,
    InvalidMessage,
    ProtocolError,
    ReplyReceived,
    Role,
    Session,
    WireVersion,
)
from hypercache_protocol.batches import (
    BatchRequest,
    GetPresenceTable,
    HelloLimits,
    HelloReply,
    LocateMany,
    PresenceTableReply,
)
from hypercache_protocol.messages import Ping, PongReply, Reply, Request
from hypercache_protocol.negotiation import parsed
from hypercache_protocol.versions import features_of

from .batch_replies import answers_of, replies_of
from .batching import Batch, batched, once_each, pieces, singles, waves
from .dialing import connected
from .greeting import hello_of, turned_away, wire_of, within_own
from .layouts import Answer, answer_of, doubt_about
from .lookups import presence, presence_batch, presence_batches
from .outcomes import DaemonUnavailable, Outcome
from .presence import PresenceTable

_T = TypeVar("_T")

WINDOW_REQUESTS = 64
WINDOW_BYTES = 64 * 1024
_RECEIVE_BYTES = 64 * 1024
_MOST_ENCLOSED = 4
_DEAD = (errno.EPIPE, errno.ECONNRESET)


class DeadBeforeSending(DaemonUnavailable):
    """A kept connection turned out to be dead before the daemon could get any of this exchange."""

    def __init__(self) -> None:
        super().__init__(Outcome.DAEMON_GONE, "the daemon closed the connection while it was not in use")


@dataclass(frozen=True, slots=True)
class Posted:
    """A lookup's request as it goes out, and what its reply will be about."""

    request_id: int
    data: bytes
    batch: Batch


class Connection:
    """A connected socket and its Session; used by one thread at a time, `interrupt` by any."""

    def __init__(
        self, socket_path: str, deadline: float, stop: threading.Event, version: WireVersion
    ) -> None:
        """Connect; `greet` comes next.

        Args:
            deadline: on the monotonic clock.
            stop: gives up the attempt when set.
            version: the newest wire to speak.

        Raises:
            DaemonUnavailable: nobody listens there, or accepts in time.
        """
        self._session = Session(Role.CLIENT, version=version)
        self._limits: HelloLimits | None = None
        self._socket = connected(socket_path, deadline, stop)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._enclosed: list[int] | None = None  # descriptors that came with what is awaited
        self.instance_id: str | None = None
        self.features: frozenset[str] = frozenset()
        self.wire = WIRE_1_0
        """What both sides speak, once they have greeted each other."""
        self.majors: frozenset[int] = frozenset()
        """Which wires the daemon says that it speaks, where it was asked on wire 1."""

    def greet(self, deadline: float) -> None:
        """Ask the daemon which one it is and what it can do; go on in wire 2 if both sides can.

        Raises:
            DaemonUnavailable: it does not answer in time, not like a daemon, or lets nobody in.
        """
        if self._session.version.major >= WIRE_2_0.major and self._is_welcomed(deadline):
            return
        (reply,) = self._pipelined([Ping()], deadline)
        if not isinstance(reply, PongReply):
            raise turned_away(reply)
        self.instance_id = reply.instance_id
        self.majors = frozenset(reply.wire or ())
        self.wire = min(self._session.version, wire_of(reply))
        # From here on what such a daemon would drop unread is refused before it is sent.
        self._session.version = self.wire
        self.features = frozenset(reply.features or ()) & features_of(self.wire)

    def _is_welcomed(self, deadline: float) -> bool:
        """Say hello; False where the daemon is of wire 1 and said so."""
        version = self._session.version
        (reply,) = self._pipelined([hello_of(version)], deadline)
        if not isinstance(reply, HelloReply) or not self._session.is_framed:
            return False
        self.instance_id = reply.instance_id
        # The session refuses what is no version, or above its own.
        self.wire = parsed(reply.version) or version
        self._session.version = self.wire
        self.features = frozenset(reply.features) & features_of(self.wire)
        self._limits = within_own(reply.limits)
        return True

    def exchange(self, requests: Sequence[Request], deadline: float) -> list[Reply]:
        """One reply for each request, in order; each is carried out after those before it.

        Raises:
            DaemonUnavailable: close the connection; no reply that came before it may be used.
            LocalProtocolError: the wire can't carry a request; close the connection too.
        """
        if self._limits is None:
            return self._pipelined(requests, deadline)
        replies: list[Reply] = []
        for wave in waves(requests):
            batches = list(batched(wave, self._limits))
            replies += self._in_batches(batches, deadline, replies_of, first=not replies)
        return replies

    def ask(self, many: BatchRequest, deadline: float) -> list[Answer]:
        """What came of each uri of a batch, in order; `layouts` of a LocateMany must be on.

        Raises:
            DaemonUnavailable, LocalProtocolError: as for `exchange`.
        """
        asked = once_each(many)
        if self._limits is None:
            answers = list(map(answer_of, self._pipelined(singles(asked), deadline)))
        else:
            answers = self._in_batches(list(pieces(asked, self._limits)), deadline, answers_of)
        if len(answers) == len(many.suffixes):
            return answers
        by_uri = dict(zip(asked.uris(), answers, strict=True))
        return [by_uri[uri] for uri in many.uris()]

    def lookup(self, uris: Sequence[str], deadline: float) -> list[Outcome]:
        """OK for each uri that a load could verify now, else why not.

        Raises:
            DaemonUnavailable, LocalProtocolError: as for `exchange`.
        """
        if self._limits is None:
            many = LocateMany.trusted(suffixes=tuple(uris), layouts=True)
            return list(map(doubt_about, self.ask(many, deadline)))
        return self._in_batches(list(presence_batches(uris, self._limits)), deadline, presence)

    def presence_table(self, deadline: float) -> PresenceTable | None:
        """The daemon's table, where it has that feature and gives one.

        Raises:
            UnusableTable: it gave one that this side does not use; the connection goes on.
            DaemonUnavailable: as for `exchange`.
        """
        self._enclosed = []
        try:
            (reply,) = self._pipelined([GetPresenceTable()], deadline)
            if not isinstance(reply, PresenceTableReply) or len(self._enclosed) != 1:
                return None  # it says that it has none, or something between the two let it fall
            return PresenceTable(reply, self._enclosed[0])
        finally:
            for descriptor in self._enclosed:
                os.close(descriptor)
            self._enclosed = None

    def _in_batches(
        self,
        batches: Sequence[Batch],
        deadline: float,
        split: Callable[[Batch, Reply], list[_T]],
        *,
        first: bool = True,
    ) -> list[_T]:
        replies = self._pipelined([batch.request for batch in batches], deadline, first=first)
        return _split(batches, replies, split)

    def _pipelined(self, requests: Sequence[Request], deadline: float, *, first: bool = True) -> list[Reply]:
        """One reply for each request, in order. `first`: nothing of the exchange was sent before."""
        replies: list[Reply] = []
        for data, ids in self._windows(requests):
            replies += self._round_trip(data, ids, deadline, first=first and not replies)
        return replies

    def is_out_of_step(self) -> bool:
        """Whether the idle connection is dead, or holds bytes that nobody asked for."""
        return bool(self._poll.poll(0))

    def is_hung_up(self) -> bool:
        """Whether the daemon closed it, or this side did."""
        descriptor = self._socket.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()  # a new one: any thread may ask, and each serves one at a time
        poll.register(descriptor, select.POLLRDHUP)
        return bool(poll.poll(0))

    def interrupt(self) -> None:
        """Make a running exchange fail at once."""
        with contextlib.suppress(OSError):  # it is dead already, which is what was wanted
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; a second time does nothing."""
        self._socket.close()

    @property
    def ignored(self) -> dict[str, int]:
        """How much came so far that nobody used: fields of later versions, replies that nobody waited for."""
        return {
            "unknown_fields": self._session.unknown_fields,
            "dropped_replies": self._session.dropped_replies,
        }

    # -- without waiting, where both sides speak frames ---------------------------------------------------

    @property
    def max_in_flight(self) -> int:
        """How many requests in frames the daemon takes at once; 0 on wire 1."""
        return self._limits.max_in_flight if self._limits else 0

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def post_lookup(self, prefix: str, suffixes: tuple[str, ...]) -> Posted | None:
        """A lookup to be sent, of uris that begin with `prefix`; None where it may take more than one frame.

        Raises:
            LocalProtocolError: the wire can't carry it.
        """
        batch = presence_batch(prefix, suffixes, self._limits) if self._limits else None
        return Posted(*self._session.send_request(batch.request), batch) if batch else None

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        """How many bytes the kernel took at once.

        Raises:
            DaemonUnavailable: close the connection.
        """
        return self._send(data, untouched=False)

    def receive_into(self, replies: dict[int, Reply]) -> None:
        """Add what has arrived by now to `replies`, by request id.

        Raises:
            DaemonUnavailable: close the connection.
        """
        data = self._received()
        if data is None:
            return
        was_asked = self._session.pending > 0
        self._session.receive_data(data)
        try:
            while (event := self._session.next_event()) is not NEED_DATA:
                match event:
                    case ReplyReceived(request_id=request_id, reply=reply):
                        replies[request_id] = reply
                    case ConnectionClosed():
                        raise DaemonUnavailable(Outcome.DAEMON_GONE, "the daemon closed the connection")
        except ProtocolError as error:
            raise DaemonUnavailable(Outcome.DAEMON_GARBLED, str(error)) from None
        if not was_asked or (not self._session.pending and self._session.has_unread_bytes):
            raise DaemonUnavailable(Outcome.DAEMON_GARBLED, "the daemon sent more than it was asked for")

    def presence(self, posted: Posted, reply: Reply) -> list[Outcome]:
        """What `reply` says of each uri that was posted.

        Raises:
            DaemonUnavailable: close the connection.
        """
        return _split([posted.batch], [reply], presence)

    # -- one window --------------------------------------------------------------------------------------

    def _windows(self, requests: Sequence[Request]) -> Iterator[tuple[bytes, list[int]]]:
        pieces: list[bytes] = []
        ids: list[int] = []
        size_bytes = 0
        for request in requests:
            if pieces and (len(pieces) == self._window_requests or size_bytes >= WINDOW_BYTES):
                yield b"".join(pieces), ids
                pieces, ids, size_bytes = [], [], 0
            request_id, piece = self._session.send_request(request)
            ids.append(request_id)
            pieces.append(piece)
            size_bytes += len(piece)
        if pieces:
            yield b"".join(pieces), ids

    @property
    def _window_requests(self) -> int:
        return min(WINDOW_REQUESTS, self._limits.max_in_flight) if self._limits else WINDOW_REQUESTS

    def _round_trip(self, data: bytes, ids: Sequence[int], deadline: float, *, first: bool) -> list[Reply]:
        unsent = memoryview(data)
        unsent = unsent[self._send(unsent, untouched=first) :]
        replies: dict[int, Reply] = {}
        while unsent or len(replies) < len(ids):
            ready = self._wait(deadline, writing=bool(unsent))
            if ready & ~select.POLLOUT:
                self.receive_into(replies)
            if unsent and ready & select.POLLOUT:
                unsent = unsent[self._send(unsent, untouched=False) :]
        return [replies[request_id] for request_id in ids]

    def _send(self, data: bytes | bytearray | memoryview, *, untouched: bool) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            if untouched and error.errno in _DEAD:
                raise DeadBeforeSending from None
            raise DaemonUnavailable(Outcome.DAEMON_GONE, f"writing to the daemon failed: {error}") from None

    def _wait(self, deadline: float, *, writing: bool) -> int:
        if writing:
            self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)
        left_s = deadline - time.monotonic()
        # A peer that trickles bytes is always ready to be read, and late all the same.
        ready = self._poll.poll(left_s * 1000) if left_s > 0 else []
        if writing:
            self._poll.modify(self._socket, select.POLLIN)
        if not ready:
            raise DaemonUnavailable(Outcome.DAEMON_LATE, "the daemon did not answer in time")
        return ready[0][1]

    def _received(self) -> bytes | None:
        try:
            if self._enclosed is None:  # whatever else comes enclosed the kernel throws away
                return self._socket.recv(_RECEIVE_BYTES)
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, _RECEIVE_BYTES, _MOST_ENCLOSED, socket.MSG_CMSG_CLOEXEC
            )
            self._enclosed += descriptors
            return data
        except BlockingIOError:
            return None
        except OSError as error:
            raise DaemonUnavailable(Outcome.DAEMON_GONE, f"reading from the daemon failed: {error}") from None


def _split(
    batches: Sequence[Batch], replies: Sequence[Reply], split: Callable[[Batch, Reply], list[_T]]
) -> list[_T]:
    try:
        return [one for batch, reply in zip(batches, replies, strict=True) for one in split(batch, reply)]
    except InvalidMessage as error:
        raise DaemonUnavailable(Outcome.DAEMON_GARBLED, error.message) from None
