"""What a request costs the daemon: wall time and the daemon's own CPU time, on a real hypercached.

    python benchmarks/daemon_requests.py [--requests N] [--only-hung]

"alone": the next request is sent once the last is answered. "64 together": 64 requests in one write, as a
lookup or store of 64 keys sends them. The client writes prepared bytes and counts lines, so what it costs
itself is hardly in the figures. "locate_many" is wire 2's: 512 keys in a frame, 16 frames in flight, made
once and sent again and again, and its figures are for one key. "256 of 256 KiB" is the way of a batch of
objects, one request after the other, and its figures are for one object. CPU time tells more than wall time
where the machine is busy otherwise. A second table has what a client waits while the disk or the backend of
others hangs: see hung_neighbours.py.
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hung_neighbours

from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, running_daemon
from hypercache_compat.process_figures import cpu_seconds
from hypercache_protocol import ReplyReceived, Role, Session
from hypercache_protocol.batches import (
    CommitMany,
    CommittedMany,
    EvictMany,
    Hello,
    LocatedMany,
    LocateMany,
    StagedMany,
    StageMany,
)
from hypercache_protocol.codecs.msgpack_frames import decode_envelope, decode_reply, encode_request
from hypercache_protocol.fields import MIB
from hypercache_protocol.layout import U32, packed, packed_bits
from hypercache_protocol.messages import Reply, Request
from hypercache_protocol.versions import LATEST

TOGETHER = 64
BATCH_KEYS = 512
IN_FLIGHT = 16
OBJECT_BYTES = 14 * MIB
SMALL_BYTES = 256 * 1024
SMALL_BATCH = 256
SMALL_ROUNDS = 24
POOL_SIZE = "8GiB"  # no payload is written


@dataclass(frozen=True)
class Cost:
    """Microseconds for each request."""

    wall_us: float
    daemon_cpu_us: float


class Line:
    """A connection that sends prepared lines and reads as many back."""

    def __init__(self, socket_path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60.0)
        self._socket.connect(socket_path)
        self._file = self._socket.makefile("rb")

    def ask(self, lines: Sequence[bytes]) -> list[bytes]:
        """The reply to each line."""
        self._socket.sendall(b"".join(lines))
        return [self._file.readline() for _ in lines]

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Frames:
    """A connection of wire 2 that has many requests in flight."""

    def __init__(self, socket_path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60.0)
        self._socket.connect(socket_path)
        self._file = self._socket.makefile("rb")
        self._session = Session(Role.CLIENT)
        self.ask([Hello(versions=("2.0",))])

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """The reply to each request, all of them in flight together."""
        sent = [self._session.send_request(request) for request in requests]
        self._socket.sendall(b"".join(data for _, data in sent))
        replies: dict[int, Reply] = {}
        while len(replies) < len(sent):
            match self._session.next_event():
                case ReplyReceived(request_id=request_id, reply=reply):
                    replies[request_id] = reply
                case _:
                    self._session.receive_data(self._socket.recv(1 << 20))
        return [replies[request_id] for request_id, _ in sent]

    def ask_again(self, request: Request, times: int) -> list[Reply]:
        """Have `IN_FLIGHT` of `request` answered so many times; returns the replies of the last time. The
        same bytes go out each time, ids included, which an answered request lets go of; of the replies only
        the lengths are read meanwhile. So what is measured is the daemon and not this client."""
        frames = b"".join(encode_request(number, request, LATEST) for number in range(1, IN_FLIGHT + 1))
        for _ in range(times):
            self._socket.sendall(frames)
            bodies = [self._body() for _ in range(IN_FLIGHT)]
        return [self._decoded(body, request) for body in bodies]

    def _body(self) -> bytes:
        (length,) = struct.unpack(">I", self._file.read(4))
        return self._file.read(length)

    def _decoded(self, body: bytes, request: Request) -> Reply:
        _, status, fields = decode_envelope(body)
        return decode_reply(status, fields, request, LATEST)[0]

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def request(action: str, **fields: Any) -> bytes:
    return json.dumps({"action": action, **fields}).encode() + b"\n"


def grouped(lines: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(lines), size):
        yield lines[start : start + size]


def cost(
    daemon: DaemonProcess, line: Line, lines: Sequence[bytes], together: int
) -> tuple[Cost, list[bytes]]:
    """Send all lines, `together` at a time. Returns the cost of each and the replies."""
    replies = []
    cpu, begun = cpu_seconds(daemon.pid), time.perf_counter()
    for group in grouped(lines, together):
        replies += line.ask(group)
    wall = time.perf_counter() - begun
    used = cpu_seconds(daemon.pid) - cpu
    return Cost(wall / len(lines) * 1e6, used / len(lines) * 1e6), replies


def commits(uris: Sequence[str], staged: Sequence[bytes]) -> list[bytes]:
    """The commit of each staged write, as the connector sends it."""
    lines = []
    for uri, reply in zip(uris, staged, strict=True):
        stage = json.loads(reply)
        lines.append(
            request(
                "commit_write",
                uri=uri,
                local_only=True,
                chunk_checksums=[number * 2**20 for number, _ in enumerate(stage["chunk_layout"])],
                stage_id=stage["stage_id"],
            )
        )
    return lines


def measure(requests: int) -> dict[str, Cost]:
    """Each action's cost, by a name that says how it was asked."""
    costs: dict[str, Cost] = {}
    options = DaemonOptions(pool_size=POOL_SIZE, ram_size="0", extra=("--log-level", "warning"))
    with running_daemon(options) as daemon:
        line = Line(daemon.socket_path)
        for name, together in (("alone", 1), (f"{TOGETHER} together", TOGETHER)):
            costs |= _measure_way(daemon, line, name, together, requests)
        line.close()
        costs |= _measure_batches(daemon, requests)
        costs |= _measure_stores(daemon)
    return costs


def _measure_way(
    daemon: DaemonProcess, line: Line, name: str, together: int, requests: int
) -> dict[str, Cost]:
    count = min(requests, 256)  # so that the pool holds them twice: freed blocks rest for some seconds
    prefix = f"hypercache://lmcache/v1/benchmark/model@00000000@0@{together}"
    uris = [f"{prefix}-{each:032x}" for each in range(count)]
    stages = [request("stage_write", uri=uri, size_bytes=OBJECT_BYTES, auto_flush_s3=False) for uri in uris]
    times = max(1, requests // count)
    absent = [request("locate", uri=uri + "-absent", auto_ingest=False) for uri in uris] * times
    present = [request("locate", uri=uri, auto_ingest=False) for uri in uris] * times
    costs = {}
    costs[f"ping, {name}"], _ = cost(daemon, line, [request("ping")] * requests, together)
    costs[f"locate, absent, {name}"], _ = cost(daemon, line, absent, together)
    costs[f"stage_write, 14 MiB, {name}"], staged = cost(daemon, line, stages, together)
    costs[f"commit_write, 14 MiB, {name}"], done = cost(daemon, line, commits(uris, staged), together)
    assert all(json.loads(reply)["status"] == "WRITECOMMITTED" for reply in done), done[-1]
    costs[f"locate, 14 MiB, {name}"], _ = cost(daemon, line, present, together)
    evicts = [request("evict", uri=uri) for uri in uris]
    costs[f"evict, 14 MiB, {name}"], _ = cost(daemon, line, evicts, together)
    return costs


def _measure_batches(daemon: DaemonProcess, requests: int) -> dict[str, Cost]:
    """Lookups of many keys in a frame; the cost is that of one key."""
    frames = Frames(daemon.socket_path)
    prefix = "hypercache://lmcache/v1/benchmark/model@00000000@0@"
    keys = [f"{number:064x}" for number in range(BATCH_KEYS)]
    staged = frames.ask(
        [StageMany(prefix=prefix, suffixes=keys, sizes=[4096] * BATCH_KEYS, auto_flush_s3=False)]
    )
    assert isinstance(staged[0], StagedMany)
    ones = packed([1] * BATCH_KEYS, U32)
    commit = CommitMany(
        prefix=prefix,
        suffixes=keys,
        stage_ids=staged[0].stage_ids,
        local_only=True,
        checksum_counts=ones,
        checksums=ones,
    )
    (done,) = frames.ask([commit])
    assert isinstance(done, CommittedMany), done
    costs = {}
    for name, suffixes in (("hits", keys), ("misses", [f"x{key}" for key in keys])):
        lookup = LocateMany(prefix=prefix, suffixes=suffixes)
        cpu, begun = cpu_seconds(daemon.pid), time.perf_counter()
        rounds = max(1, requests // IN_FLIGHT)
        replies = frames.ask_again(lookup, rounds)
        wall = time.perf_counter() - begun
        count = rounds * IN_FLIGHT * BATCH_KEYS
        found = packed_bits([name == "hits"] * BATCH_KEYS)
        assert all(isinstance(reply, LocatedMany) and reply.present == found for reply in replies)
        used = cpu_seconds(daemon.pid) - cpu
        costs[f"locate_many, {BATCH_KEYS} {name}, a key"] = Cost(wall / count * 1e6, used / count * 1e6)
    frames.close()
    return costs


def _measure_stores(daemon: DaemonProcess) -> dict[str, Cost]:
    """What a batch of small objects costs from its staging to its end, for each of them."""
    frames = Frames(daemon.socket_path)
    used: Counter[str] = Counter()
    passed: Counter[str] = Counter()

    def ask(request: Request) -> Reply:
        cpu, begun = cpu_seconds(daemon.pid), time.perf_counter()
        (reply,) = frames.ask([request])
        passed[request.action] += time.perf_counter() - begun
        used[request.action] += cpu_seconds(daemon.pid) - cpu
        return reply

    sizes, ones = [SMALL_BYTES] * SMALL_BATCH, packed([1] * SMALL_BATCH, U32)
    for number in range(SMALL_ROUNDS):
        uris: dict[str, Any] = {
            "prefix": f"hypercache://lmcache/v1/benchmark/model@00000000@0@{number}-",
            "suffixes": [f"{each:064x}" for each in range(SMALL_BATCH)],
        }
        staged = ask(StageMany(**uris, sizes=sizes, auto_flush_s3=False))
        assert isinstance(staged, StagedMany)
        sums = {"checksum_counts": ones, "checksums": ones}
        done = ask(CommitMany(**uris, stage_ids=staged.stage_ids, local_only=True, **sums))
        assert isinstance(done, CommittedMany)
        assert not done.errors
        ask(LocateMany(**uris, layouts=True))
        ask(EvictMany(**uris))
    frames.close()
    count = SMALL_ROUNDS * SMALL_BATCH
    return {
        f"{action}, {SMALL_BATCH} of 256 KiB, an object": Cost(
            passed[action] / count * 1e6, used[action] / count * 1e6
        )
        for action in passed
    }


def table(costs: Mapping[str, Cost]) -> str:
    """Markdown."""
    rows = ["| request | wall µs | daemon's CPU µs | a second |", "| --- | ---: | ---: | ---: |"]
    for name, each in costs.items():
        rows.append(f"| {name} | {each.wall_us:.1f} | {each.daemon_cpu_us:.1f} | {1e6 / each.wall_us:,.0f} |")
    return "\n".join(rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2048, help="of each kind (default: 2048)")
    parser.add_argument("--only-hung", action="store_true", help="print the second table alone")
    arguments = parser.parse_args()
    if not arguments.only_hung:
        print(table(measure(arguments.requests)) + "\n")
    print(hung_neighbours.table(hung_neighbours.measure(arguments.requests)))


if __name__ == "__main__":
    main()
