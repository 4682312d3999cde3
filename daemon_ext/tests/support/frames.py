"""A raw client of wire 2: frames made and read with nothing but `msgpack` and `struct`."""

from __future__ import annotations

import json
import struct

import msgpack
import trio
from daemon_harness import DEADLINE_S, Client, Daemon, Message, line

from hypercache_compat.raw_wire import read_layout, write_layout

HELLO = {"versions": ["1.0", "1.1", "2.0", "2.1", "2.2"], "features": ["batches"], "name": "a test"}
STATUSES = ["STAGED", "COMMITTED", "SYNCING_BACKEND", "SYNCED_BACKEND", "LOCAL_ONLY"]
TIERS = ["nvme", "ram"]


class FrameClient:
    """One connection that has gone on to wire 2; every read has a deadline."""

    def __init__(self, client: Client, hello: Message) -> None:
        self.hello = hello
        self._client = client
        self._buffer = b""
        self._last_id = 0
        self._early: dict[int, tuple[str, Message]] = {}

    async def send(self, action: str, **fields: object) -> int:
        """Ask; returns the id to wait for."""
        self._last_id += 1
        await self.send_frame([self._last_id, action, fields])
        return self._last_id

    async def send_frame(self, value: object) -> None:
        await self.send_body(msgpack.packb(value))

    async def send_body(self, body: bytes) -> None:
        await self.send_bytes(struct.pack(">I", len(body)) + body)

    async def send_bytes(self, data: bytes) -> None:
        await self._client.send(data)

    async def receive(self) -> tuple[int, str, Message] | None:
        """The next frame, whichever request it answers; None where the daemon closed the connection."""
        head = await self._exactly(4)
        if not head:
            return None
        request_id, status, fields = msgpack.unpackb(await self._exactly(struct.unpack(">I", head)[0]))
        return request_id, status, fields

    async def reply(self, request_id: int) -> Message:
        """The reply to that request, with its word as `status`, whatever comes before it."""
        while request_id not in self._early:
            frame = await self.receive()
            assert frame is not None, "the daemon closed the connection instead of answering"
            self._early[frame[0]] = frame[1:]
        status, fields = self._early.pop(request_id)
        return {"status": status, **fields}

    async def ask(self, action: str, **fields: object) -> Message:
        return await self.reply(await self.send(action, **fields))

    async def store(self, objects: dict[str, bytes], **commit: object) -> Message:
        """Stage, write and commit all in two batches; returns the reply to the commit."""
        sizes = [len(data) for data in objects.values()]
        staged = await self.ask("stage_many", suffixes=list(objects), sizes=sizes)
        assert staged["errors"] == [], staged
        for layout, data in zip(layouts_of(staged["layouts"]), objects.values(), strict=True):
            write_layout(layout["chunk_layout"], data)
        choices = commit or {"local_only": True}
        return await self.ask("commit_many", suffixes=list(objects), stage_ids=staged["stage_ids"], **choices)

    async def fetch(self, uri: str) -> bytes | None:
        """The bytes that a locate of many finds; None on a miss."""
        located = await self.ask("locate_many", suffixes=[uri], layouts=True)
        if located["present"] == b"\0":
            return None
        return read_layout(layouts_of(located["layouts"])[0]["chunk_layout"])

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _exactly(self, count: int) -> bytes:
        with trio.fail_after(DEADLINE_S):
            while len(self._buffer) < count:
                try:
                    data = await self._client.stream.receive_some(65536)
                except trio.BrokenResourceError:
                    data = b""
                if not data:
                    assert not self._buffer, f"half a frame: {self._buffer!r}"
                    return b""
                self._buffer += data
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data


async def framed(daemon: Daemon, **hello: object) -> FrameClient:
    """A new connection in wire 2."""
    client = await daemon.connect()
    await client.send(line("hello", **{**HELLO, **hello}))
    reply: Message = json.loads(await client.receive_line())
    assert reply["status"] == "HELLO", reply
    assert reply["version"].startswith("2."), reply
    return FrameClient(client, reply)


def bits(bitmap: bytes, count: int) -> list[bool]:
    """The bits of a bitmap, which must have exactly the bytes for that many."""
    assert len(bitmap) == (count + 7) // 8
    return [bool(bitmap[index // 8] >> index % 8 & 1) for index in range(count)]


def column(data: bytes, kind: str) -> list[int]:
    """A column of `kind`: B, I or Q."""
    return list(struct.unpack(f"<{len(data) // struct.calcsize('<' + kind)}{kind}", data))


def layouts_of(columns: Message) -> list[Message]:
    """The layouts that the columns hold, as the replies to single locates would say them."""
    counts = column(columns["chunk_counts"], "I")
    summed = bits(columns["checksummed"], len(counts))
    chunks = iter(
        zip(
            column(columns["chunk_paths"], "I"),
            column(columns["chunk_offsets"], "Q"),
            column(columns["chunk_lengths"], "I"),
            column(columns["chunk_checksums"], "I"),
            strict=True,
        )
    )
    objects = zip(
        column(columns["object_sizes"], "Q"),
        column(columns["generations"], "Q"),
        columns["sync_statuses"],
        counts,
        summed,
        strict=True,
    )
    found = []
    for size_bytes, generation, status, count, has_sums in objects:
        layout = []
        for path, offset, length, checksum in [next(chunks) for _ in range(count)]:
            chunk = {"device": columns["paths"][path], "offset": offset, "length": length}
            chunk["tier"] = TIERS[columns["path_tiers"][path]]
            layout.append(chunk | ({"checksum": checksum} if has_sums else {}))
        found.append(
            {
                "object_size": size_bytes,
                "generation": generation,
                "sync_status": STATUSES[status],
                "chunk_layout": layout,
            }
        )
    assert next(chunks, None) is None
    return found
