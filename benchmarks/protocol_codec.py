"""How long wire 1 takes to encode and decode: microseconds per message, the best of several rounds.

    python benchmarks/protocol_codec.py

Beside each figure: what the standard library's json needs for the same line, with nothing checked.
"""

from __future__ import annotations

import json
import timeit
from collections.abc import Callable

from hypercache_protocol import WIRE_1_0, Role, Session
from hypercache_protocol.codecs.json_lines import decode_reply, decode_request, encode_reply, encode_request
from hypercache_protocol.fields import CHUNK_SIZE
from hypercache_protocol.messages import ChunkLocation, HitReply, Locate
from hypercache_protocol.states import SyncStatus

ROUNDS = 7
TURNS = 2000

LOCATE = Locate(uri="hypercache://kv/llama-3-8b@main/9f86d081884c7d659a2feaa0c55ad015", auto_ingest=False)
HIT = HitReply(
    object_size=14 << 20,
    chunk_layout=tuple(
        ChunkLocation(
            device=f"/dev/nvme{index}n1",
            offset=(1 << 40) + index * CHUNK_SIZE,
            length=CHUNK_SIZE if index < 3 else 2 << 20,
            checksum=0xDEADBEEF - index,
        )
        for index in range(4)
    ),
    sync_status=SyncStatus.LOCAL_ONLY,
    generation=12345,
)


def microseconds(work: Callable[[], object]) -> float:
    """The best round's time for one call of `work`."""
    return min(timeit.repeat(work, number=TURNS, repeat=ROUNDS)) / TURNS * 1e6


def round_trip() -> Callable[[], object]:
    """One locate and its hit through two sessions, all four conversions and the queues included."""
    client, daemon = Session(Role.CLIENT), Session(Role.DAEMON)

    def work() -> object:
        request_id, line = client.send_request(LOCATE)
        daemon.receive_data(line)
        daemon.next_event()
        client.receive_data(daemon.send_reply(request_id, HIT))
        return client.next_event()

    return work


def main() -> None:
    """Print the table."""
    request, reply = encode_request(LOCATE), encode_reply(HIT)
    plain_request, plain_reply = json.loads(request), json.loads(reply)
    rows: list[tuple[str, Callable[[], object], Callable[[], object] | None]] = [
        ("encode locate", lambda: encode_request(LOCATE), lambda: json.dumps(plain_request).encode()),
        ("decode locate", lambda: decode_request(request), lambda: json.loads(request)),
        ("encode 4-chunk hit", lambda: encode_reply(HIT), lambda: json.dumps(plain_reply).encode()),
        ("decode 4-chunk hit", lambda: decode_reply(reply, LOCATE), lambda: json.loads(reply)),
        ("encode 4-chunk hit, held to 1.0", lambda: encode_reply(HIT, WIRE_1_0), None),
        ("decode 4-chunk hit, held to 1.0", lambda: decode_reply(reply, LOCATE, WIRE_1_0), None),
        ("one exchange, both ends", round_trip(), None),
    ]
    print(f"{'':32} {'µs':>8} {'json alone':>12}")
    for name, work, floor in rows:
        beside = "" if floor is None else f"{microseconds(floor):12.1f}"
        print(f"{name:32} {microseconds(work):8.1f} {beside}")


if __name__ == "__main__":
    main()
