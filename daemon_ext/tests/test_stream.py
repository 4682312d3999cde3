"""The stream under a connection: what it reads and writes, and whom it tells."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from hypercache_daemon.stream import Stream


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
    assert [await stream.receive(4), await stream.receive(4), await stream.receive(4)] == [
        b"abcd",
        b"ef",
        b"",
    ]


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
    assert [await stream.receive(64), await stream.receive(64)] == [b"before", b""]
    assert stream.send_now(b"answer") == 6
    assert peer.recv(64) == b"answer"


@pytest.mark.parametrize("end", ["stop_receiving", "close"])
async def test_whoever_waits_hears_of_the_end(ends: tuple[Stream, socket.socket], end: str) -> None:
    stream, _ = ends
    heard = trio.Event()

    async def wait() -> None:
        try:
            assert await stream.receive(64) == b""
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
        await stream.receive(1)
    with pytest.raises(trio.ClosedResourceError):
        stream.send_now(b"x")
    with pytest.raises(trio.ClosedResourceError):
        await stream.send_all(b"x")
