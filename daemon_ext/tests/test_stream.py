"""The stream under a connection: what it reads and writes, and whom it tells."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from hypercache_daemon.stream import LONG_READ_BYTES, READ_BYTES, Stream


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Stream, socket.socket]]:
    """A stream and the peer's end of it."""
    own, peer = socket.socketpair()
    own.setblocking(False)
    stream = Stream(trio.socket.from_stdlib_socket(own))
    peer.settimeout(10.0)
    with peer:
        yield stream, peer
    stream.close()


async def test_it_receives_what_came_and_then_the_end(ends: tuple[Stream, socket.socket]) -> None:
    stream, peer = ends
    peer.sendall(b"abcdef")
    peer.close()
    assert [await stream.receive(), await stream.receive()] == [b"abcdef", b""]


async def test_who_sends_much_is_read_in_larger_pieces_until_little_comes(
    ends: tuple[Stream, socket.socket],
) -> None:
    stream, peer = ends
    peer.setblocking(False)
    data = bytes(range(256)) * (LONG_READ_BYTES // 256)
    pieces = []
    for _ in range(2):
        left = sent = peer.send(data)
        assert sent > 2 * READ_BYTES
        while left:
            pieces.append(await stream.receive())
            left -= len(pieces[-1])
        peer.send(b"little")
        assert await stream.receive() == b"little"
    lengths = list(map(len, pieces))
    assert lengths == [READ_BYTES, sent - READ_BYTES] * 2
    assert b"".join(pieces) == data[:sent] * 2


async def test_it_sends_at_once_what_the_kernel_takes_and_waits_for_the_rest(
    ends: tuple[Stream, socket.socket],
) -> None:
    stream, peer = ends
    data = bytes(range(256)) * 8192
    sent = stream.send_now(data)
    assert 0 < sent < len(data)
    while more := stream.send_now(data[sent:]):
        sent += more
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, data[sent:])
            received = bytearray()
            while len(received) < len(data):
                received += await trio.to_thread.run_sync(peer.recv, 65536)
    assert received == data


async def test_once_told_to_stop_it_still_gives_what_had_arrived_and_the_peer_learns_of_it(
    ends: tuple[Stream, socket.socket],
) -> None:
    stream, peer = ends
    peer.sendall(b"before")
    stream.stop_receiving()
    with pytest.raises(BrokenPipeError):
        peer.sendall(b"after")
    assert [await stream.receive(), await stream.receive()] == [b"before", b""]
    assert stream.send_now(b"answer") == 6
    assert peer.recv(64) == b"answer"


@pytest.mark.parametrize("end", ["stop_receiving", "close"])
async def test_whoever_waits_hears_of_the_end(ends: tuple[Stream, socket.socket], end: str) -> None:
    stream, _ = ends
    heard = trio.Event()

    async def wait() -> None:
        try:
            assert await stream.receive() == b""
        except trio.ClosedResourceError:
            assert end == "close"
        heard.set()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            getattr(stream, end)()
            await heard.wait()


async def test_a_peer_that_is_gone_is_told_as_such(ends: tuple[Stream, socket.socket]) -> None:
    stream, peer = ends
    peer.close()
    with pytest.raises(trio.BrokenResourceError):
        stream.send_now(b"x")
    with pytest.raises(trio.BrokenResourceError):
        await stream.send_all(b"x")


async def test_after_close_everything_says_so(ends: tuple[Stream, socket.socket]) -> None:
    stream, _ = ends
    stream.close()
    stream.close()
    with pytest.raises(trio.ClosedResourceError):
        await stream.receive()
    with pytest.raises(trio.ClosedResourceError):
        stream.send_now(b"x")
    with pytest.raises(trio.ClosedResourceError):
        await stream.send_all(b"x")
