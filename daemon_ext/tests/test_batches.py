"""Wire 2's batches over a real socket: each uri has its own result, and what many say is what one says."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from daemon_harness import CHUNK, MIB, Daemon, Message, line, pattern, running, sums_of
from frames import FrameClient, bits, column, framed, layouts_of

from hypercache_compat.raw_wire import read_layout, write_layout
from hypercache_daemon.catalog import CatalogError
from hypercache_daemon.catalog_rows import Change

NOTHING: Message = {
    "object_sizes": b"",
    "generations": b"",
    "sync_statuses": b"",
    "chunk_counts": b"",
    "checksummed": b"",
    "paths": [],
    "path_tiers": b"",
    "chunk_paths": b"",
    "chunk_offsets": b"",
    "chunk_lengths": b"",
    "chunk_checksums": b"",
}


def summed(*objects: bytes) -> Message:
    """The fields of a commit of many that give all checksums."""
    sums = [sums_of(data) for data in objects]
    words = [word for each in sums for word in each]
    return {
        "checksum_counts": struct.pack(f"<{len(sums)}I", *map(len, sums)),
        "checksums": struct.pack(f"<{len(words)}I", *words),
    }


def codes(reply: Message) -> dict[int, str]:
    """Index -> error code, of what was refused; every sentence says something."""
    assert all(error["error_message"] for error in reply["errors"])
    return {error["index"]: error["error_code"] for error in reply["errors"]}


# -- the way there and back ----------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["nvme", "ram"])
async def test_many_objects_go_in_and_come_out_with_their_checksums(short_dir: Path, tier: str) -> None:
    objects = {f"u{number}": pattern(number, size) for number, size in enumerate([1, 0, 4096, CHUNK + 7])}
    async with running(short_dir) as daemon:
        client = await framed(daemon)
        sizes = [len(data) for data in objects.values()]
        staged = await client.ask("stage_many", prefix="", suffixes=list(objects), sizes=sizes, tier=tier)
        assert (staged["status"], bits(staged["done"], 4), staged["errors"]) == (
            "STAGED_MANY",
            [True] * 4,
            [],
        )
        assert len(set(staged["stage_ids"])) == 4
        for layout, data in zip(layouts_of(staged["layouts"]), objects.values(), strict=True):
            assert (layout["object_size"], layout["sync_status"]) == (len(data), "STAGED")
            assert {chunk["tier"] for chunk in layout["chunk_layout"]} <= {tier}
            assert not any("checksum" in chunk for chunk in layout["chunk_layout"])
            write_layout(layout["chunk_layout"], data)
        committed = await client.ask(
            "commit_many",
            suffixes=list(objects),
            stage_ids=staged["stage_ids"],
            local_only=True,
            **summed(*objects.values()),
        )
        assert committed["status"] == "COMMITTED_MANY"
        assert bits(committed["done"], 4) == [True] * 4
        assert column(committed["object_sizes"], "Q") == sizes
        assert committed["sync_statuses"] == b"\x04" * 4, "LOCAL_ONLY"
        located = await client.ask("locate_many", suffixes=list(objects), layouts=True)
        assert bits(located["present"], 4) == bits(located["verifiable"], 4) == [True] * 4
        layouts = layouts_of(located["layouts"])
        assert [layout["generation"] for layout in layouts] == column(committed["generations"], "Q")
        for layout, data in zip(layouts, objects.values(), strict=True):
            assert read_layout(layout["chunk_layout"]) == data
            assert [chunk["checksum"] for chunk in layout["chunk_layout"]] == sums_of(data)
        evicted = await client.ask("evict_many", suffixes=[*objects, "none"])
        assert (evicted["status"], bits(evicted["done"], 5)) == ("EVICTED_MANY", [True] * 4 + [False])
        assert bits((await client.ask("locate_many", suffixes=list(objects)))["present"], 4) == [False] * 4


async def test_presence_and_layouts_are_those_that_single_locates_give(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        await old.store("plain", b"no checksums", commit={})
        for uri, data in {"summed": b"checksums", "replaced": b"first"}.items():
            await old.store(uri, data, commit={"chunk_checksums": sums_of(data), "local_only": True})
        await old.store("ram", pattern(1, CHUNK + 9), tier="ram")
        await old.store("empty", b"")
        await old.stage("staged", b"nothing committed")
        await old.stage("staged twice", b"older")
        await old.stage("staged twice", b"newer, which counts")
        await old.stage("replaced", b"to come")
        uris = ["absent", "plain", "summed", "ram", "staged", "empty", "staged twice", "replaced", "plain"]
        singles = [await old.ask("locate", uri=uri, auto_ingest=False) for uri in uris]
        located = await client.ask("locate_many", suffixes=uris, layouts=True)
        present = bits(located["present"], len(uris))
        assert present == [single["status"] == "HIT" for single in singles]
        verifiable = {"summed": True, "replaced": True}
        assert bits(located["verifiable"], len(uris)) == [verifiable.get(uri, False) for uri in uris]
        layouts = layouts_of(located["layouts"])
        hits = [single for single in singles if single["status"] == "HIT"]
        for layout, single in zip(layouts, hits, strict=True):
            assert {"generation": 0, **single} == {"status": "HIT", "chunk_size": CHUNK, **layout}
        again = [await client.ask("locate", uri=uri, auto_ingest=False) for uri in uris]
        assert again == singles, "single actions have the same fields on either wire"
        brief = await client.ask("locate_many", suffixes=uris)
        assert brief == {name: value for name, value in located.items() if name != "layouts"}


async def test_an_empty_object_is_verifiable_where_its_commit_gave_its_no_checksums(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await framed(daemon)
        await client.store({"with": b""}, checksum_counts=b"\0\0\0\0", checksums=b"")
        await client.store({"without": b""})
        located = await client.ask("locate_many", suffixes=["with", "without"])
        assert bits(located["present"], 2) == [True, True]
        assert bits(located["verifiable"], 2) == [True, False]


async def test_a_prefix_stands_before_every_uri(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        await old.store("hypercache://a/b", b"bytes")
        for prefix, suffixes in [("hypercache://a/", ["b", "c"]), ("hypercache://a/b", ["", "x"])]:
            located = await client.ask("locate_many", prefix=prefix, suffixes=suffixes)
            assert bits(located["present"], 2) == [True, False]


async def test_a_locate_of_many_fetches_and_pins_nothing(short_dir: Path) -> None:
    source = short_dir / "source"
    source.mkdir()
    (source / "x").write_bytes(b"bytes")
    async with running(short_dir, ingest_prefix=(f"file://{source}/",)) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        located = await client.ask("locate_many", suffixes=[f"file://{source}/x"])
        assert bits(located["present"], 1) == [False]
        assert (await old.status())["objects"] == 0
        assert (await old.ask("locate", uri=f"file://{source}/x"))["status"] == "HIT", "a locate fetches it"


async def test_batches_of_nothing_are_answered(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await framed(daemon)
        located = await client.ask("locate_many", suffixes=[], layouts=True)
        assert located == {
            "status": "LOCATED_MANY",
            "present": b"",
            "verifiable": b"",
            "layouts": NOTHING,
        }
        staged = await client.ask("stage_many", suffixes=[], sizes=[])
        assert staged == {
            "status": "STAGED_MANY",
            "done": b"",
            "stage_ids": [],
            "layouts": NOTHING,
            "errors": [],
        }
        committed = await client.ask("commit_many", suffixes=[], stage_ids=[])
        assert (committed["status"], committed["done"], committed["errors"]) == ("COMMITTED_MANY", b"", [])
        assert (await client.ask("evict_many", suffixes=[]))["done"] == b""


# -- staging what is not stored (wire 2.1) -------------------------------------------------------------


async def test_unless_stored_stages_all_but_what_is_committed_with_checksums_in_that_size(
    short_dir: Path,
) -> None:
    async with running(short_dir) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        commit = {"chunk_checksums": sums_of(b"12345"), "local_only": True}
        await old.store("whole", b"12345", commit=commit)
        await old.store("other size", b"12345", commit=commit)
        await old.store("plain", b"12345", commit={})
        await old.store("empty", b"", commit={"chunk_checksums": [], "local_only": True})
        await old.stage("staged", b"12345")
        uris, sizes = ["whole", "other size", "plain", "empty", "staged", "absent", ""], [5, 4, 5, 0, 5, 5, 5]
        staged = await client.ask("stage_many", suffixes=uris, sizes=sizes, unless_stored=True)
        assert bits(staged["stored"], 7) == [True, False, False, True, False, False, False]
        assert bits(staged["done"], 7) == [False, True, True, False, True, True, False]
        assert codes(staged) == {6: "BAD_REQUEST"}
        assert len(staged["stage_ids"]) == 4
        assert [layout["object_size"] for layout in layouts_of(staged["layouts"])] == [4, 5, 5, 5]
        assert await client.fetch("whole") == b"12345"


async def test_what_the_request_itself_evicts_is_not_said_to_be_stored(short_dir: Path) -> None:
    sizes = {"head": CHUNK, "tail": 2 * CHUNK, "new": 6 * CHUNK}  # of eight; "new" takes the place of "tail"
    async with running(short_dir, eviction="lru", evict_above=1, evict_down_to=1) as daemon:
        client = await framed(daemon)
        for uri in ("head", "tail"):
            data = pattern(1, sizes[uri])
            await client.store({uri: data}, local_only=True, **summed(data))
        staged = await client.ask(
            "stage_many", suffixes=list(sizes), sizes=list(sizes.values()), unless_stored=True
        )
        assert bits(staged["stored"], 3) == [False, False, False]
        assert bits(staged["done"], 3) == [False, True, True], "tail anew, for which head had to go"
        assert codes(staged) == {0: "NO_SPACE"}
        assert not any(bits((await client.ask("locate_many", suffixes=["head"]))["present"], 1))


async def test_without_unless_stored_all_is_staged_and_nothing_is_said_of_it(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await framed(daemon)
        data = b"12345"
        await client.store({"a": data}, local_only=True, **summed(data))
        for fields in ({}, {"unless_stored": False}, {"unless_stored": None}):
            staged = await client.ask("stage_many", suffixes=["a"], sizes=[5], **fields)
            assert bits(staged["done"], 1) == [True]
            assert "stored" not in staged


async def test_what_need_not_be_stored_again_counts_as_used(short_dir: Path) -> None:
    async with running(short_dir, eviction="lru", pool_size=8 * CHUNK, devices=1) as daemon:
        client = await framed(daemon)
        await client.store({"old": b"1" * CHUNK}, local_only=True, **summed(b"1" * CHUNK))
        await client.store({"newer": b"2" * CHUNK}, local_only=True, **summed(b"2" * CHUNK))
        await client.ask("stage_many", suffixes=["old"], sizes=[CHUNK], unless_stored=True)
        policy = next(pool.policy for pool in daemon.parts.store.cache.pools.values() if pool.used_bytes)
        assert next(iter(policy.victims())) == "newer"


async def test_a_daemon_held_to_2_0_does_not_know_unless_stored_and_stages_all(short_dir: Path) -> None:
    async with running(short_dir, wire="2.0") as daemon:
        client = await framed(daemon)
        assert "unless_stored" not in client.hello["features"]
        await client.store({"a": b"12345"}, local_only=True, **summed(b"12345"))
        staged = await client.ask("stage_many", suffixes=["a"], sizes=[5], unless_stored=True)
        assert bits(staged["done"], 1) == [True]
        assert "stored" not in staged


# -- one uri that fails --------------------------------------------------------------------------------


async def test_a_stage_of_many_refuses_each_bad_uri_alone(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        uris = ["good", "", "n\0l", "u" * 8193, "huge", "ü" * 4096, "last"]
        sizes = [10, 10, 10, 10, 1 << 46, 10, 0]
        staged = await client.ask("stage_many", suffixes=uris, sizes=sizes)
        assert bits(staged["done"], 7) == [True, False, False, False, False, True, True]
        assert codes(staged) == {1: "BAD_REQUEST", 2: "BAD_REQUEST", 3: "BAD_REQUEST", 4: "NO_SPACE"}
        assert [layout["object_size"] for layout in layouts_of(staged["layouts"])] == [10, 10, 0]
        committed = await client.ask(
            "commit_many", suffixes=["good", "ü" * 4096, "last"], stage_ids=staged["stage_ids"]
        )
        assert bits(committed["done"], 3) == [True] * 3
        assert (await old.status())["pools"]["nvme"]["staged_bytes"] == 0


async def test_what_does_not_fit_is_refused_and_the_rest_of_the_batch_is_staged(short_dir: Path) -> None:
    async with running(short_dir, pool_size=34 * MIB) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        for number in range(4):
            await old.store(f"dirty{number}", pattern(number, 6 * MIB), commit={})  # can't be evicted
        staged = await client.ask("stage_many", suffixes=["a", "b", "c"], sizes=[MIB, 20 * MIB, MIB])
        assert bits(staged["done"], 3) == [True, False, True]
        assert codes(staged) == {1: "NO_SPACE"}


async def test_a_stage_of_many_evicts_to_make_room_for_all(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        for number in range(7):
            await old.store(f"old{number}", pattern(number, CHUNK))
        staged = await client.ask("stage_many", suffixes=["a", "b", "c", "d"], sizes=[CHUNK] * 4)
        assert bits(staged["done"], 4) == [True] * 4
        located = await client.ask("locate_many", suffixes=[f"old{number}" for number in range(7)])
        assert 1 <= sum(bits(located["present"], 7)) <= 4


async def test_a_commit_of_many_refuses_each_wrong_one_alone_and_its_stage_stays(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        uris = ["a", "stale", "count", "b", "never staged"]
        staged = await client.ask("stage_many", suffixes=uris[:4], sizes=[5, 5, 5, 5])
        for layout in layouts_of(staged["layouts"]):
            write_layout(layout["chunk_layout"], b"bytes")
        ids = [*staged["stage_ids"], "who?"]
        ids[1] = "gone"
        word = zlib.crc32(b"bytes")
        committed = await client.ask(
            "commit_many",
            suffixes=uris,
            stage_ids=ids,
            local_only=True,
            checksum_counts=struct.pack("<5I", 1, 1, 2, 1, 0),
            checksums=struct.pack("<5I", word, word, word, word, word),
        )
        assert bits(committed["done"], 5) == [True, False, False, True, False]
        assert codes(committed) == {1: "STALE_STAGE", 2: "BAD_REQUEST", 4: "STALE_STAGE"}
        assert column(committed["object_sizes"], "Q") == [5, 5]
        assert [await old.fetch(uri) for uri in ("a", "b")] == [b"bytes"] * 2
        for uri, number in {"stale": 1, "count": 2}.items():
            reply = await old.ask("commit_write", uri=uri, stage_id=staged["stage_ids"][number])
            assert reply["status"] == "WRITECOMMITTED", "the staged write stayed"


async def test_a_write_through_that_no_backend_takes_is_refused_for_each(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await framed(daemon)
        staged = await client.ask("stage_many", suffixes=["a", "b"], sizes=[1, 1], write_through=True)
        assert codes(staged) == {0: "NO_BACKEND", 1: "NO_BACKEND"}
        staged = await client.ask("stage_many", suffixes=["a", "b"], sizes=[1, 1])
        fields: Message = {"suffixes": ["a", "b"], "stage_ids": staged["stage_ids"], "write_through": True}
        assert codes(await client.ask("commit_many", **fields)) == {0: "NO_BACKEND", 1: "NO_BACKEND"}
        both = await client.ask("commit_many", **fields, local_only=True)
        assert codes(both) == {0: "CONTRADICTION", 1: "CONTRADICTION"}


# -- one uri twice -------------------------------------------------------------------------------------


async def test_a_uri_that_is_staged_twice_in_a_batch_has_two_writes_and_the_later_commit_wins(
    short_dir: Path,
) -> None:
    async with running(short_dir) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        staged = await client.ask("stage_many", suffixes=["u", "v", "u"], sizes=[5, 5, 6])
        for layout, data in zip(layouts_of(staged["layouts"]), (b"first", b"other", b"second"), strict=True):
            write_layout(layout["chunk_layout"], data)
        committed = await client.ask(
            "commit_many", suffixes=["u", "v", "u"], stage_ids=staged["stage_ids"], local_only=True
        )
        assert bits(committed["done"], 3) == [True] * 3
        generations = column(committed["generations"], "Q")
        assert generations[2] > generations[0]
        assert await old.fetch("u") == b"second"
        assert await old.fetch("v") == b"other"


async def test_a_stage_that_is_committed_twice_in_a_batch_is_committed_once(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await framed(daemon)
        (stage_id,) = (await client.ask("stage_many", suffixes=["u"], sizes=[0]))["stage_ids"]
        committed = await client.ask("commit_many", suffixes=["u", "u"], stage_ids=[stage_id] * 2)
        assert bits(committed["done"], 2) == [True, False]
        assert codes(committed) == {1: "STALE_STAGE"}


async def test_a_uri_that_is_evicted_twice_in_a_batch_is_evicted_once_and_both_say_so(
    short_dir: Path,
) -> None:
    async with running(short_dir) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        await old.store("stored", b"bytes")
        await old.stage("stored", b"staged over it")
        await old.stage("staged", b"bytes")
        evicted = await client.ask(
            "evict_many", suffixes=["stored", "staged", "none", "stored", "staged", "none"]
        )
        assert bits(evicted["done"], 6) == [True, True, False] * 2
        located = await client.ask("locate_many", suffixes=["stored", "staged"])
        assert bits(located["present"], 2) == [True, False], "the write over it is still staged"


# -- batches that are refused whole --------------------------------------------------------------------

REFUSED: list[tuple[str, Message, str]] = [
    ("locate_many", {}, "'suffixes' is missing"),
    ("locate_many", {"suffixes": "uvw"}, "must be a list"),
    ("locate_many", {"suffixes": ["a", 5]}, "suffixes[1]"),
    ("locate_many", {"suffixes": ["a"], "prefix": 5}, "prefix"),
    ("locate_many", {"suffixes": ["a"], "layouts": 1}, "layouts"),
    ("locate_many", {"suffixes": ["a"] * 4097}, "4096"),
    ("stage_many", {"suffixes": ["a", "b"], "sizes": [1]}, "sizes has 1 entries for 2 uris"),
    ("stage_many", {"suffixes": ["a"], "sizes": [1, 2]}, "sizes has 2 entries for 1 uris"),
    ("stage_many", {"suffixes": ["a"], "sizes": [-1]}, "sizes[0]"),
    ("stage_many", {"suffixes": ["a"], "sizes": [(1 << 46) + 1]}, "sizes[0]"),
    ("stage_many", {"suffixes": ["a"], "sizes": [1], "tier": "tape"}, "tier"),
    ("commit_many", {"suffixes": ["a", "b"], "stage_ids": ["x"]}, "stage_ids has 1 entries for 2 uris"),
    ("commit_many", {"suffixes": ["a"], "stage_ids": [""]}, "stage_ids[0]"),
    ("commit_many", {"suffixes": ["a"], "stage_ids": ["x"], "checksums": b""}, "both"),
    ("commit_many", {"suffixes": ["a"], "stage_ids": ["x"], "checksum_counts": b"\0\0\0\0"}, "both"),
    (
        "commit_many",
        {"suffixes": ["a"], "stage_ids": ["x"], "checksum_counts": b"\0", "checksums": b""},
        "checksum_counts must have 1 values",
    ),
    (
        "commit_many",
        {"suffixes": ["a"], "stage_ids": ["x"], "checksum_counts": b"\xff" * 4, "checksums": b"\0" * 4},
        "checksums must have 4294967295 values",
    ),
    ("commit_many", {"suffixes": ["a"], "stage_ids": ["x"], "checksums": "text"}, "checksums"),
    ("evict_many", {"suffixes": [None]}, "suffixes[0]"),
]


async def test_a_batch_whose_columns_do_not_fit_is_refused_in_words_and_the_connection_lives(
    short_dir: Path,
) -> None:
    async with running(short_dir) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        await old.store("a", b"kept")
        before = (await old.status())["pools"]
        for action, fields, words in REFUSED:
            reply = await client.ask(action, **fields)
            assert (reply["status"], reply["error_code"]) == ("ERROR", "BAD_REQUEST"), (action, fields)
            assert words in reply["error_message"], (words, reply)
        assert (await old.status())["pools"] == before
        assert await client.fetch("a") == b"kept"


async def test_as_many_uris_as_the_hello_announced_are_taken(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client = await framed(daemon)
        most = client.hello["limits"]["max_batch"]
        uris = [f"u{number}" for number in range(most)]
        staged = await client.ask("stage_many", suffixes=uris, sizes=[0] * most)
        assert bits(staged["done"], most) == [True] * most
        committed = await client.ask(
            "commit_many", suffixes=uris, stage_ids=staged["stage_ids"], local_only=True
        )
        assert bits(committed["done"], most) == [True] * most
        assert bits((await client.ask("locate_many", suffixes=uris))["present"], most) == [True] * most
        assert bits((await client.ask("evict_many", suffixes=uris))["done"], most) == [True] * most


# -- durably -------------------------------------------------------------------------------------------


async def transactions(client: FrameClient) -> int:
    status = await client.ask("get_status")
    return int(status["catalog"]["transactions"])


async def test_each_change_of_many_is_one_transaction_of_the_catalog(short_dir: Path) -> None:
    uris = [f"u{number}" for number in range(200)]
    async with running(short_dir, quarantine_s=3600) as daemon:  # so that nothing else is written
        client = await framed(daemon)
        counts = [await transactions(client)]
        staged = await client.ask("stage_many", suffixes=uris, sizes=[10] * 200)
        counts.append(await transactions(client))
        for layout in layouts_of(staged["layouts"]):
            write_layout(layout["chunk_layout"], b"0123456789")
        counts.append(await transactions(client))
        await client.ask("commit_many", suffixes=uris, stage_ids=staged["stage_ids"], local_only=True)
        counts.append(await transactions(client))
        await client.ask("evict_many", suffixes=uris[:100])
        counts.append(await transactions(client))
        assert [after - before for before, after in pairwise(counts)] == [1, 0, 1, 1]
    async with running(short_dir, quarantine_s=3600) as daemon:
        client = await framed(daemon)
        located = await client.ask("locate_many", suffixes=uris)
        assert bits(located["present"], 200) == [False] * 100 + [True] * 100
        assert await client.fetch("u150") == b"0123456789"


async def test_a_catalog_that_cannot_write_refuses_each_and_leaves_nothing(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(short_dir) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        before = (await old.status())["pools"]
        with monkeypatch.context() as patch:
            patch.setattr(daemon.parts.store, "make_durable", failing_after(0))
            reply = await client.ask("stage_many", suffixes=["a", "b"], sizes=[10, 10])
            assert codes(reply) == {0: "UNAVAILABLE", 1: "UNAVAILABLE"}
            assert "no space left" in reply["errors"][0]["error_message"]
        assert (await old.status())["pools"] == before
        staged = await client.ask("stage_many", suffixes=["a", "b"], sizes=[10, 10])
        fields = {"suffixes": ["a", "b"], "stage_ids": staged["stage_ids"]}
        with monkeypatch.context() as patch:
            patch.setattr(daemon.parts.store, "make_durable", failing_after(0))
            assert codes(await client.ask("commit_many", **fields)) == {0: "UNAVAILABLE", 1: "UNAVAILABLE"}
        assert bits((await client.ask("commit_many", **fields))["done"], 2) == [True, True]


async def test_a_catalog_that_fails_half_way_takes_back_nothing_that_it_wrote(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(short_dir) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        staged = await client.ask("stage_many", suffixes=["u", "v", "u"], sizes=[5, 5, 5])
        for layout, data in zip(layouts_of(staged["layouts"]), (b"first", b"other", b"again"), strict=True):
            write_layout(layout["chunk_layout"], data)
        fields = {"suffixes": ["u", "v", "u"], "stage_ids": staged["stage_ids"], "local_only": True}
        with monkeypatch.context() as patch:
            patch.setattr(daemon.parts.store, "make_durable", failing_after(1, daemon))
            reply = await client.ask("commit_many", **fields)
        assert bits(reply["done"], 3) == [True, True, False]
        assert codes(reply) == {2: "UNAVAILABLE"}
        assert await old.fetch("u") == b"first"


def failing_after(
    successes: int, daemon: Daemon | None = None
) -> Callable[[Sequence[Change]], Awaitable[None]]:
    """A store's make_durable that succeeds so many times and then never again."""
    left = [successes]
    real = daemon.parts.store.make_durable if daemon else None

    async def make_durable(changes: Sequence[Change]) -> None:
        if not left[0] or real is None:
            raise CatalogError("no space left on the catalog's disk")
        left[0] -= 1
        await real(changes)

    return make_durable


async def test_batches_are_counted_by_what_came_of_them(short_dir: Path) -> None:
    async with running(short_dir) as daemon:
        client, old = await framed(daemon), await daemon.connect()
        await client.ask("locate_many", suffixes=["a"])
        await client.ask("stage_many", suffixes=["a"], sizes=[])
        await old.send(line("locate_many", suffixes=["a"]))
        assert (await old.receive())["error_code"] == "UNKNOWN_ACTION", "lines carry no batches"
        counted = (await old.status())["requests"]
        assert (counted["locate_many.LOCATED_MANY"], counted["stage_many.ERROR"]) == (1, 1)
