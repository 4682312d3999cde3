"""What a relay between connector and daemon does to the replies, from one moment to another."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypercache_compat.altered_replies import Altered, Fields
from hypercache_compat.relay import FROM_DAEMON, HangUp


class Meddled:
    """One connection. Rules get whole messages of the daemon's and give what the client gets."""

    def __init__(self, number: int, meddler: Meddler) -> None:
        self.number = number
        self.sent = 0
        self._meddler = meddler
        self._altered = Altered(meddler.asked, meddler.answered)

    def passed(self, side: str, data: bytes) -> bytes:
        """What to send on."""
        data = self._altered.passed(side, data)
        if side != FROM_DAEMON or not data:
            return data
        self._meddler.hello_bytes = self._meddler.hello_bytes or len(data)
        rule = self._meddler.rule
        return data if rule is None else rule(self, data)


Rule = Callable[[Meddled, bytes], bytes]


class Meddler:
    """All connections of a relay."""

    def __init__(self) -> None:
        self.rule: Rule | None = None
        self.connections = 0
        self.hello_bytes = 0
        """How long the daemon's first reply on a connection is."""
        self._on_request: Callable[[Fields], None] | None = None
        self._on_reply: Callable[[Fields, Fields], None] | None = None

    def passage(self, number: int) -> Meddled:
        """For the relay."""
        self.connections = number + 1
        return Meddled(number, self)

    @contextmanager
    def meddling(self, rule: Rule) -> Iterator[None]:
        """The rule holds meanwhile."""
        self.rule = rule
        try:
            yield
        finally:
            self.rule = None

    @contextmanager
    def seeing(
        self,
        request: Callable[[Fields], None] | None = None,
        reply: Callable[[Fields, Fields], None] | None = None,
    ) -> Iterator[None]:
        """These see what passes meanwhile, before it passes."""
        self._on_request, self._on_reply = request, reply
        try:
            yield
        finally:
            self._on_request = self._on_reply = None

    def asked(self, request: Fields) -> Fields:
        """A request comes by."""
        if see := self._on_request:
            see(request)
        return request

    def answered(self, request: Fields, reply: Fields) -> Fields:
        """A reply comes by."""
        if see := self._on_reply:
            see(request, reply)
        return reply


# -- rules -----------------------------------------------------------------------------------------------


def cut_at_every_byte(first: int) -> Rule:
    """Connection `first` ends before any byte of a reply, the next one after one byte, and so on; those
    before it end at once."""

    def rule(connection: Meddled, data: bytes) -> bytes:
        left = max(0, connection.number - first - connection.sent)
        if left < len(data):
            raise HangUp("cut", data[:left])
        connection.sent += len(data)
        return data

    return rule


def hang_up(_: Meddled, data: bytes) -> bytes:
    """Every connection ends."""
    raise HangUp("enough", data[:0])


def halve(_: Meddled, data: bytes) -> bytes:
    """The second half of what came never comes."""
    return data[: len(data) // 2]


def garble(chance: random.Random) -> Rule:
    """Other bytes, as many: at random, printable, or none but zeros."""

    def rule(_: Meddled, data: bytes) -> bytes:
        kind = chance.randrange(3)
        if kind == 0:
            return chance.randbytes(len(data))
        return bytes(chance.randrange(32, 127) for _ in data) + b"\n" if kind == 1 else bytes(len(data))

    return rule


def delay(over: threading.Event, by_s: float) -> Rule:
    """Replies come so much later, or when it is over."""

    def rule(_: Meddled, data: bytes) -> bytes:
        over.wait(by_s)
        return data

    return rule


# -- at a certain message --------------------------------------------------------------------------------


class KillAt:
    """Ends a process when a certain request, or its reply, comes by."""

    def __init__(self, is_it: Callable[[Fields], bool], pid: int) -> None:
        self._is_it = is_it
        self._pid = pid
        self._once = threading.Lock()
        self.done = threading.Event()

    def at_request(self, request: Fields) -> None:
        """Before the daemon gets it."""
        if self._is_it(request) and self._once.acquire(blocking=False):
            os.kill(self._pid, 9)
            self.done.set()

    def at_reply(self, request: Fields, _: Fields) -> None:
        """When the daemon has done it, and nobody knows."""
        self.at_request(request)
