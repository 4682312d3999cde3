"""A client's socket, read and written with no more turns of the event loop than there is to wait for.

Trio's own SocketStream goes around the loop for every write, even one that the kernel takes at once, and
looks before it waits. That is safe anywhere, and two thirds of what a small request costs. Here the rules
are:
1. `receive` always gives other tasks a turn; `send_now` never does, so its caller has to, now and then.
2. Whoever sends much is read in larger pieces, so that its requests cost fewer turns. To all others so much
   memory for each read would be a loss.
3. One task receives and one sends at a time. `stop_receiving` and `close` may come from any task.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import termios
from array import array

import trio

READ_BYTES = 64 * 1024
LONG_READ_BYTES = 256 * 1024
"""More than the kernel keeps, mostly, of what one peer sent."""


class Stream:
    """Wraps a connected stream socket, and owns it."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock
        self._next_read_bytes = READ_BYTES

    async def receive(self) -> bytes:
        """What came by now, once something did; b"" at the end.

        Raises:
            trio.BrokenResourceError: the peer is gone.
            trio.ClosedResourceError: this side was closed.
        """
        while True:
            await trio.lowlevel.wait_readable(self._descriptor())
            try:
                data = os.read(self._descriptor(), self._next_read_bytes)
            except BlockingIOError:  # the kernel may change its mind
                continue
            except OSError as error:
                raise trio.BrokenResourceError from error
            self._next_read_bytes = LONG_READ_BYTES if len(data) >= READ_BYTES else READ_BYTES
            return data

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        """How many bytes the kernel took without waiting.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError: as for `receive`.
        """
        try:
            return os.write(self._descriptor(), data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise trio.BrokenResourceError from error

    async def send_all(self, data: bytes | bytearray) -> None:
        """Send everything, waiting for the peer to read.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError: as for `receive`.
        """
        with memoryview(data) as view:
            sent = 0
            while sent < len(view):
                await trio.lowlevel.wait_writable(self._descriptor())
                sent += self.send_now(view[sent:])

    def has_unread(self) -> bool:
        """Whether the peer has not read yet all that it was sent."""
        (unread,) = struct.unpack("i", fcntl.ioctl(self._descriptor(), termios.TIOCOUTQ, bytes(4)))
        return bool(unread)

    async def send_enclosing(self, data: bytes, descriptor: int) -> None:
        """Send everything, and with its first byte the descriptor; without it where more are on their way
        to this user than the kernel allows, which others may be to blame for.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError: as for `receive`.
        """
        enclosed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
        sent = 0
        try:
            sent = await self._socket.sendmsg([data], [enclosed])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise trio.BrokenResourceError from error
        await self.send_all(data[sent:])

    def stop_receiving(self) -> None:
        """Take nothing more: what has arrived can still be received and then comes the end. What the peer
        sends from now on fails at once over there, so it knows that nothing of it was seen."""
        self._shut(socket.SHUT_RD)

    def send_eof(self) -> None:
        """Tell the peer that nothing more comes."""
        self._shut(socket.SHUT_WR)

    def close(self) -> None:
        """Close at once; whoever waits in here gets a ClosedResourceError. A second time does nothing."""
        self._socket.close()

    def _shut(self, direction: int) -> None:
        try:
            self._socket.shutdown(direction)
        except OSError as error:
            raise trio.BrokenResourceError from error

    def _descriptor(self) -> int:
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise trio.ClosedResourceError
        return descriptor
