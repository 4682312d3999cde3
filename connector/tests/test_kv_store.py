"""The KVStore: right bytes or a miss, what it asks the daemon for, and what it refuses."""

import copy
import errno
import gc
import hashlib
import mmap
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forking import numbered, run_forking

from hypercache_compat.waiting import wait_until
from hypercache_connector import ConfigError, KVStore, direct_io, kv_store
from hypercache_connector import config as configuration
from hypercache_connector.config import KVStoreConfig
from hypercache_connector.workers import join_all
from hypercache_protocol import ErrorCode, SyncStatus, Tier
from hypercache_protocol.messages import (
    CommittedReply,
    CommitWrite,
    ErrorReply,
    Evict,
    HitReply,
    Locate,
    Reply,
    Request,
    StageWrite,
)

MIB = 1 << 20
SIZES = [1, 4096, 70_001, 4 * MIB + 1]
MakeStore = Callable[..., KVStore]


def payload(name: str, size: int) -> bytes:
    """Bytes that say whose they are."""
    unit = f"{name}:{size};".encode()
    return (unit * (size // len(unit) + 1))[:size]


@pytest.fixture
def make(scripted) -> Iterator[MakeStore]:
    """Makes stores over the scripted daemon that are closed at the end."""
    with ExitStack() as stack:

        def store(**parameters: Any) -> KVStore:
            given = {"socket_path": scripted.socket_path, "timeout_s": 10.0} | parameters
            return stack.enter_context(KVStore(**given))

        yield store


@pytest.fixture
def store(make: MakeStore) -> KVStore:
    """A store with nothing but defaults."""
    return make()


def asked(scripted, kind: type[Request]) -> list[Any]:
    """The requests of one kind so far."""
    return [request for request in scripted.requests if isinstance(request, kind)]


# -- putting and getting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("direct_io", ["auto", "on"])
@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_blocks_of_every_size_come_back_from_either_tier(make: MakeStore, tier: str, direct_io: str) -> None:
    store = make(default_tier=tier, direct_io=direct_io)
    keys = [f"{tier}-{size}" for size in SIZES]
    assert store.exists_many(keys) == [False] * len(keys)
    blocks = [payload(key, size) for key, size in zip(keys, SIZES, strict=True)]
    assert store.put_many(keys, blocks) == [True] * len(keys)
    assert store.exists_many(keys) == [True] * len(keys)
    back = store.get_many(keys)
    assert back == blocks
    assert {type(block) for block in back} == {bytes}


def test_one_block_in_every_way(store: KVStore) -> None:
    assert store.get("a") is None
    assert not store.exists("a")
    assert store.put("a", b"abc")
    assert store.exists("a")
    assert store.get("a") == b"abc"
    target = bytearray(3)
    assert store.get("a", target) is target
    assert target == b"abc"
    assert store.delete("a")
    assert store.get("a") is None


def test_an_empty_block_is_a_block(store: KVStore) -> None:
    assert store.get_many(["empty"]) == [None]
    assert store.put("empty", b"")
    assert store.get("empty") == b""


def test_the_names_of_hypercache_io_are_the_same_methods() -> None:
    assert KVStore.put_kv_block is KVStore.put
    assert KVStore.get_kv_block is KVStore.get
    assert KVStore.exists_kv_block is KVStore.exists


def test_keys_blocks_and_targets_may_come_from_anything_that_gives_them_once(store: KVStore) -> None:
    assert store.put_many(iter(["a", "b"]), iter([b"1", b"2"])) == [True, True]
    assert store.put_many({"c": 3}, {1: b"3"}.values()) == [True]
    targets = [bytearray(1), bytearray(1)]
    assert store.get_many(iter(["a", "b"]), iter(targets)) == [b"1", b"2"]
    assert targets == [b"1", b"2"]
    assert store.get_many(iter(["c"])) == [b"3"]
    assert store.exists_many(iter("abcd")) == [True, True, True, False]
    assert store.delete_many(iter("ab")) == [True, True]


class Part(str, Enum):
    """Keys as a program may name them."""

    KEYS = "keys of layer 1"


def test_a_member_of_an_enum_of_texts_is_its_text_in_every_python(scripted, store: KVStore) -> None:
    assert store.put_many([Part.KEYS, "other"], [b"1", b"2"], pinned=np.True_) == [True, True]
    assert store.get("keys of layer 1") == b"1"
    assert store.get(Part.KEYS) == b"1"


def test_a_path_is_a_path_to_the_socket_too(scripted) -> None:
    with KVStore(Path(scripted.socket_path)) as store:
        assert store.socket_path == scripted.socket_path
        assert store.put("k", b"1")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_store_is_not_copied_but_made_anew(store: KVStore, copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"a KVStore has threads .* make one in each process"):
        copied(store)


def test_empty_batches_ask_nobody(scripted, store: KVStore) -> None:
    assert store.put_many([], []) == []
    assert store.get_many([]) == []
    assert store.get_many([], []) == []
    assert store.exists_many([]) == []
    assert store.delete_many([]) == []
    assert scripted.requests == []


def test_the_newest_block_under_a_key_is_the_one_there(store: KVStore) -> None:
    for size in (5000, 10, 10, 70_000):
        data = os.urandom(size)
        assert store.put("k", data)
        assert store.get("k") == data
    assert store.put_many(["k", "k"], [b"first", b"second"]) == [True, True]
    assert store.get("k") == b"second"


def test_without_overwrite_what_is_there_in_the_same_size_stays(scripted, make: MakeStore) -> None:
    store = make(overwrite=False)
    assert store.put("k", b"one")
    assert store.put("k", b"two")
    assert store.get("k") == b"one"
    assert store.put("k", b"three")
    assert store.get("k") == b"three"
    assert scripted.counted()["stage_write"] == 2


def test_many_threads_share_one_store(store: KVStore) -> None:
    wrong: list[object] = []

    def work(thread: int) -> None:
        keys = [f"{thread}-{number}" for number in range(8)]
        blocks = [payload(key, 3000) for key in keys]
        if store.put_many(keys, blocks) != [True] * 8 or store.get_many(keys) != blocks:
            wrong.append(thread)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- what the daemon is asked for --------------------------------------------------------------------------


def test_a_block_lies_where_hypercache_io_looks_for_it(scripted, store: KVStore) -> None:
    assert store.put_many(["a/b", "hypercache://own/name"], [b"1", b"2"]) == [True, True]
    assert sorted(scripted.objects) == ["hypercache://kv_cache/a/b.kv", "hypercache://own/name"]


def test_the_key_of_a_prefix_is_that_of_hypercache_io() -> None:
    assert KVStore.compute_prefix_hash([]) == hashlib.sha256(b"default::").hexdigest()
    assert (
        KVStore.compute_prefix_hash(range(3), "m/ü", 0)
        == hashlib.sha256("m/ü::layer_0::0,1,2".encode()).hexdigest()
    )


def test_by_default_a_block_is_local_only_unpinned_and_in_ram(scripted, store: KVStore) -> None:
    assert store.put("k", b"x")
    (stage,) = asked(scripted, StageWrite)
    (commit,) = asked(scripted, CommitWrite)
    assert (stage.tier, stage.pinned, stage.auto_flush_s3, stage.write_through) == (
        Tier.RAM,
        False,
        False,
        False,
    )
    assert (commit.local_only, commit.write_through) == (True, False)
    assert commit.chunk_checksums


def test_tier_and_pin_are_said_for_each_put(scripted, store: KVStore) -> None:
    assert store.put("k", b"x", "NVMe", True)
    assert store.put("k", b"x")
    assert [(stage.tier, stage.pinned) for stage in asked(scripted, StageWrite)] == [
        (Tier.NVME, True),
        (Tier.RAM, False),
    ]


def test_the_default_tier_may_be_in_capitals_as_for_hypercache_io(scripted, make: MakeStore) -> None:
    store = make(default_tier="NVME")
    assert store.default_tier == "nvme"
    assert store.put("k", b"x")
    assert [stage.tier for stage in asked(scripted, StageWrite)] == [Tier.NVME]


def test_the_longest_key_is_as_long_as_is_said(store: KVStore) -> None:
    assert store.put("a" * 8167, b"x")


def test_write_through_is_said_twice_and_never_beside_local_only(scripted, make: MakeStore) -> None:
    assert make(write_through=True).put("k", b"x")
    (stage,) = asked(scripted, StageWrite)
    (commit,) = asked(scripted, CommitWrite)
    assert (stage.auto_flush_s3, stage.write_through) == (False, True)
    assert (commit.local_only, commit.write_through) == (False, True)


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_the_backend_did_not_take_stays_committed_here(
    scripted, make: MakeStore, overwrite: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(request: Request, reply: Reply) -> Reply:
        return ErrorReply(error_message="the backend is down") if isinstance(reply, CommittedReply) else reply

    scripted.change = refuse
    store = make(write_through=True, overwrite=overwrite)
    assert not store.put("k", b"abc")
    assert store.get("k") == b"abc"
    assert store.status()["stores"] == {"daemon_refused": 1}
    assert "the daemon refuses: the backend is down" in caplog.text


@pytest.mark.parametrize("state", [SyncStatus.LOCAL_ONLY, SyncStatus.COMMITTED, SyncStatus.SYNCING_BACKEND])
def test_what_no_backend_has_is_written_through_though_it_is_here(scripted2, state: SyncStatus) -> None:
    with KVStore(scripted2.socket_path) as plain:
        assert plain.put("k", b"abc")
    ((uri, hit),) = scripted2.objects.items()
    scripted2.objects[uri] = hit.model_copy(update={"sync_status": state})
    with KVStore(scripted2.socket_path, write_through=True, overwrite=False) as store:
        assert store.put("k", b"abc")
        assert store.status()["stores"] == {"ok": 1}
        scripted2.objects[uri] = hit.model_copy(update={"sync_status": SyncStatus.SYNCED_BACKEND})
        assert store.put("k", b"abc")
        assert store.status()["stores"] == {"ok": 1, "already_stored": 1}


def test_a_refusal_of_the_moment_is_counted_and_not_logged(
    scripted, store: KVStore, caplog: pytest.LogCaptureFixture
) -> None:
    overtaken = ErrorReply(error_message="overtaken", error_code=ErrorCode.STALE_STAGE)
    scripted.change = lambda request, reply: overtaken if isinstance(request, CommitWrite) else reply
    assert not store.put("k", b"abc")
    assert store.status()["stores"] == {"stale_stage": 1}
    assert caplog.text == ""


def test_why_there_is_no_room_is_logged_beside_other_refusals(
    scripted, store: KVStore, caplog: pytest.LogCaptureFixture
) -> None:
    replies = iter(
        [
            ErrorReply(error_message="full of what is pinned", error_code=ErrorCode.NO_SPACE),
            ErrorReply(error_message="a fault", error_code=ErrorCode.INTERNAL),
            ErrorReply(error_message="full again", error_code=ErrorCode.NO_SPACE),
        ]
    )
    scripted.change = lambda request, reply: next(replies) if isinstance(request, StageWrite) else reply
    assert not any(store.put("k", b"abc") for _ in range(3))
    assert store.status()["stores"] == {"no_space": 2, "daemon_refused": 1}
    assert "the daemon refuses: full of what is pinned" in caplog.text
    assert "the daemon refuses: a fault" in caplog.text
    assert "full again" not in caplog.text, "once a minute"


def test_reads_never_ask_a_backend(scripted, store: KVStore) -> None:
    store.get("k")
    store.get("k", bytearray(1))
    store.exists("k")
    assert {request.auto_ingest for request in asked(scripted, Locate)} == {False}


# -- misses ------------------------------------------------------------------------------------------------


def without_checksums(reply: HitReply) -> HitReply:
    layout = tuple(chunk.model_copy(update={"checksum": None}) for chunk in reply.chunk_layout)
    return reply.model_copy(update={"chunk_layout": layout})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_checksums, "no_checksum"),
        (lambda reply: reply.model_copy(update={"sync_status": SyncStatus.STAGED}), "staged"),
        (lambda reply: reply.model_copy(update={"sync_status": None}), "no_sync_status"),
        (lambda reply: reply.model_copy(update={"chunk_layout": ()}), "bad_layout"),
    ],
    ids=["no checksums", "staged", "no state", "a layout without its chunks"],
)
def test_a_block_in_doubt_is_a_miss_however_it_is_asked_for(
    scripted, store: KVStore, change: Callable[[HitReply], HitReply], reason: str
) -> None:
    assert store.put("k", b"abc")
    scripted.change = lambda request, reply: change(reply) if isinstance(reply, HitReply) else reply
    assert store.get("k") is None
    assert store.get("k", bytearray(3)) is None
    assert not store.exists("k")
    assert store.status()["loads"] == {reason: 2}


def test_no_memory_is_taken_for_a_size_that_is_only_claimed(scripted, store: KVStore) -> None:
    assert store.put("k", b"abc")
    scripted.change = lambda request, reply: (
        reply.model_copy(update={"object_size": 1 << 46}) if isinstance(reply, HitReply) else reply
    )
    assert store.get("k") is None  # so much can't be mapped
    assert store.status()["loads"] == {"bad_layout": 1}


def test_a_block_for_which_there_is_no_memory_is_a_miss_of_its_own(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [payload("a", 5000), payload("b", 70_001), payload("c", 5000)]
    assert store.put_many(["a", "b", "c"], blocks) == [True] * 3
    real = kv_store.own_pages

    def scarce(size_bytes: int) -> mmap.mmap:
        if size_bytes > 5000:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(size_bytes)

    monkeypatch.setattr(kv_store, "own_pages", scarce)
    assert store.get_many(["a", "b", "c", "d"]) == [blocks[0], None, blocks[2], None]
    assert store.status()["loads"] == {"ok": 2, "no_memory": 1, "absent": 1}
    assert store.exists_many(["b"]) == [True]  # nothing is wrong with it


def test_a_block_that_cannot_be_copied_out_is_a_miss_of_its_own(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(view: memoryview) -> bytes:
        if len(view) > 5000:
            raise MemoryError
        return bytes(view)

    assert store.put_many(["a", "b"], [payload("a", 5000), payload("b", 70_001)]) == [True, True]
    monkeypatch.setattr(kv_store, "bytes", scarce, raising=False)
    assert store.get_many(["a", "b"]) == [payload("a", 5000), None]
    status = store.status()
    assert (status["loads"], status["bytes"]["loaded"]) == ({"ok": 1, "no_memory": 1}, 5000)
    assert "healing" not in status  # nothing is wrong with it


def test_a_chunk_without_memory_for_its_copy_fails_its_block_alone(
    scripted, make: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(default_tier="nvme", direct_io="on", read_workers=1, write_workers=1)
    blocks = [payload("a", 5000), payload("b", 70_001)]

    def scarce(size_bytes: int) -> mmap.mmap:
        if size_bytes > 8192:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return mmap.mmap(-1, size_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(direct_io, "own_pages", scarce)
        assert store.put_many(["a", "b"], [odd(block) for block in blocks]) == [True, False]
    assert [evict.uri for evict in asked(scripted, Evict)] == ["hypercache://kv_cache/b.kv"]  # given back
    assert store.put("b", blocks[1])
    monkeypatch.setattr(direct_io, "_bounce", direct_io._Bounce())
    monkeypatch.setattr(direct_io, "own_pages", scarce)
    targets = [odd(bytes(len(block))) for block in blocks]
    assert [got is not None for got in store.get_many(["a", "b"], targets)] == [True, False]
    assert targets[0] == blocks[0]
    status = store.status()
    assert (status["stores"]["no_memory"], status["loads"]["no_memory"]) == (1, 1)
    assert "healing" not in status


def odd(block: bytes) -> memoryview:
    """A writable copy that no page begins with."""
    memory = memoryview(mmap.mmap(-1, len(block) + 1))[1:]
    memory[:] = block
    return memory


def test_a_damaged_block_is_a_miss_and_the_next_put_heals_it(scripted, store: KVStore) -> None:
    data = [payload("a", 70_001), payload("b", 70_001)]
    assert store.put_many(["a", "b"], data) == [True, True]
    scripted.flip_byte("hypercache://kv_cache/a.kv", 70_000)
    assert store.get_many(["a", "b"]) == [None, data[1]]
    assert store.status()["healing"] == {"evicted": 1}
    assert store.exists_many(["a", "b"]) == [False, True]
    assert store.put("a", data[0])
    assert store.get("a") == data[0]


OVERLAPPING = {
    "the same": lambda memory: (memory, memory),
    "a part": lambda memory: (memory, memory[3:5]),
    "a part first": lambda memory: (memory[3:5], memory),
    "an end": lambda memory: (memory[:6], memory[5:]),
}


@pytest.mark.parametrize("name", list(OVERLAPPING))
def test_targets_that_share_memory_are_refused_before_anything_is_read(store: KVStore, name: str) -> None:
    memory = memoryview(bytearray(10))
    targets = OVERLAPPING[name](memory)
    with pytest.raises(ValueError, match=r"'[ab]': it shares memory with what '[ab]' is to fill: give each"):
        store.get_many(["a", "c", "b"], [targets[0], bytearray(10), targets[1]])


def test_targets_side_by_side_share_nothing(store: KVStore) -> None:
    memory = memoryview(bytearray(6))
    assert store.put_many(["a", "b", "empty"], [b"abc", b"def", b""]) == [True] * 3
    assert None not in store.get_many(["b", "empty", "a"], [memory[3:], memory[1:1], memory[:3]])
    assert memory == b"abcdef"


def test_a_target_of_another_size_is_a_miss_that_is_counted(store: KVStore) -> None:
    assert store.put("k", b"abc")
    assert store.get_many(["k", "k"], [bytearray(2), bytearray(4)]) == [None, None]
    assert store.status()["loads"] == {"wrong_size": 2}
    assert store.get("k") == b"abc"


def test_a_daemon_without_checksums_is_all_misses_and_the_log_says_what_to_do(
    scripted, store: KVStore, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.features = None
    assert not store.put("k", b"abc")
    assert store.get("k") is None
    assert store.status()["stores"] == {"daemon_too_old": 1}
    assert "upgrade it to wire 1.1" in caplog.text
    assert "seal_for_old_daemons" not in caplog.text  # which it has not


def test_a_daemon_that_is_down_is_misses_and_no_exception(scripted, store: KVStore) -> None:
    scripted.stop()
    assert not store.put("k", b"abc")
    assert store.get("k") is None
    assert store.get("k", bytearray(3)) is None
    assert not store.exists("k")
    assert not store.delete("k")
    scripted.start()
    assert store.put("k", b"abc")
    assert store.get("k") == b"abc"


def test_deleting_tells_whether_the_block_is_gone(scripted, store: KVStore) -> None:
    assert store.put_many(["a", "b"], [b"1", b"2"]) == [True, True]
    assert store.delete_many(["a", "never there"]) == [True, True]
    assert store.exists_many(["a", "b"]) == [False, True]
    scripted.change = lambda request, reply: ErrorReply(error_message="not for you")
    assert not store.delete("b")


# -- wrong calls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda store: store.put_many(["a", "b"], [b"x", [1]]), TypeError, "'b': a block is bytes-like"),
        (lambda store: store.put("a", memoryview(b"xyz")[::2]), ValueError, "'a': its memory is not cont"),
        (lambda store: store.put_many(["a", "b"], [b"x"]), ValueError, "kv_data has 1 items for 2 keys"),
        (lambda store: store.put("a", b"x", "disk"), ValueError, "one of 'nvme', 'ram', not 'disk'"),
        (lambda store: store.put("a", b"x", 5), ValueError, "one of 'nvme', 'ram', not 5"),
        (
            lambda store: store.put_many(["a", "b"], [b"x"] * 2, None, "no"),
            TypeError,
            "pinned must be True or",
        ),
        (lambda store: store.put("a", b"x", None, 1), TypeError, "pinned must be True or False, not 1"),
        (lambda store: store.get("a", b"xyz"), ValueError, "'a': its memory is read-only"),
        (lambda store: store.get_many(["a"], []), ValueError, "out_tensors has 0 items for 1 keys"),
        (lambda store: store.get("a\0"), ValueError, "give one without NUL, and of at most 8167 bytes"),
        (lambda store: store.exists("a" * 8168), ValueError, "makes no uri"),
        (lambda store: store.get("hypercache://" + "a" * 8192), ValueError, "at most 8192 bytes of UTF-8"),
        (lambda store: store.compute_prefix_hash([1], None), TypeError, "model_id is a str, not NoneType"),
        (lambda store: store.exists("\ud800"), ValueError, "makes no uri"),
        (lambda store: store.delete(b"a"), TypeError, "a block's key is a str, not bytes"),
        (lambda store: store.get_many("abc"), TypeError, "a sequence of keys, not one key"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_call_raises_and_nothing_of_it_is_done(
    scripted, store: KVStore, call: Callable[[KVStore], object], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        call(store)
    assert scripted.requests == []


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"default_tier": "disk"}, "KVStore: 'default_tier' is wrong: must be one of 'nvme', 'ram'"),
        ({"namespace": "n"}, "KVStore has an unknown parameter 'namespace'"),
        ({"seal_for_old_daemons": True}, "known are close_timeout_s, default_tier, direct_io, overwrite"),
        ({"direct_io": "maybe"}, "KVStore: 'direct_io' is wrong"),
        ({"write_through": 1}, "KVStore: 'write_through' is wrong"),
        ({"socket_path": "/dev/null"}, "not a socket; give the daemon's --socket path"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_parameter_is_named_and_leaves_no_thread(wrong: dict[str, Any], sentence: str) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=sentence):
        KVStore(**{"socket_path": "/nowhere/s"} | wrong)
    assert threading.active_count() <= before


@pytest.mark.parametrize("had", [0, 5, 16, 31])
def test_where_threads_run_out_a_store_leaves_none_behind(
    only_so_many_threads: Callable[[int], list[threading.Thread]], had: int
) -> None:
    started = only_so_many_threads(had)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        KVStore("/nowhere/s")
    assert join_all(started, time.monotonic() + 10) == []


def test_the_first_four_parameters_are_in_hypercache_io_s_order() -> None:
    with KVStore("/nowhere/s", "nvme", False, True) as store:
        assert (store.socket_path, store.default_tier) == ("/nowhere/s", "nvme")
        assert (store.prefer_gds, store.write_through) == (False, True)


# -- the socket that is found ------------------------------------------------------------------------------


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Path]:
    """Where sockets are looked for, in a folder of the test's own."""
    paths = [folder / name for name in ("run", "tmp-1", "tmp-2")]
    monkeypatch.setattr(configuration, "SOCKET_PATH", str(paths[0]))
    monkeypatch.setattr(configuration, "_OTHER_SOCKET_PATHS", tuple(map(str, paths[1:])))
    return paths


def test_the_first_socket_that_is_there_is_taken(scripted, places: list[Path]) -> None:
    os.link(scripted.socket_path, places[2])
    with KVStore() as store:
        assert store.socket_path == str(places[2])
        assert store.put("k", b"abc")
    os.link(scripted.socket_path, places[1])
    assert configuration.find_socket() == str(places[1])
    places[0].touch()
    assert configuration.find_socket() == str(places[0])  # in /run nobody else puts anything


def test_what_others_may_have_put_in_tmp_is_passed_by(
    scripted, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    places[1].symlink_to(scripted.socket_path)
    assert configuration.find_socket() == str(places[0])
    os.link(scripted.socket_path, places[2])
    owner = places[2].stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert configuration.find_socket() == str(places[2])


# -- the end, and other processes --------------------------------------------------------------------------


def test_after_close_everything_is_a_miss_and_no_thread_is_left(scripted) -> None:
    store = KVStore(scripted.socket_path)
    assert store.put_many(["a", "b"], [b"1", b"2"]) == [True, True]
    threads = [*store._engine.readers.threads, *store._engine.writers.threads]
    store.close()
    store.close()
    assert not any(thread.is_alive() for thread in threads)
    assert store.get_many(["a", "b"]) == [None, None]
    assert not store.put("a", b"1")
    assert store.status()["loads"] == {"closed": 2}


def test_a_store_that_is_forgotten_leaves_no_thread_and_no_descriptor(
    scripted, open_descriptors: Callable[[], int]
) -> None:
    before = open_descriptors()
    store = KVStore(scripted.socket_path, "nvme")
    assert store.put_many(["a", "b"], [b"1", b"2"]) == [True, True]
    threads = [*store._engine.readers.threads, *store._engine.writers.threads]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the socket
        del store
        gc.collect()
    assert join_all(threads, time.monotonic() + 10) == []
    gc.collect()
    wait_until(lambda: open_descriptors() <= before)  # the scripted daemon has its end here too


def test_close_ends_what_another_thread_waits_for(scripted) -> None:
    store = KVStore(scripted.socket_path, timeout_s=60.0)
    assert store.put("a", b"1")
    scripted.freeze()
    got: list[object] = []
    waiting = threading.Thread(target=lambda: got.append(store.get("a")))
    before = len(scripted.requests)
    waiting.start()
    while len(scripted.requests) == before:
        waiting.join(0.005)
        assert waiting.is_alive()
    store.close()
    waiting.join(10)
    assert got == [None]


_FORKING = """
import os, sys
from hypercache_connector import KVStore

store = KVStore(sys.argv[1])
assert store.put("a", b"abc")
child = os.fork()
if child == 0:
    said = []
    for call in (lambda: store.get("a"), store.status):
        try:
            call()
        except RuntimeError as error:
            said.append(f"made by process {os.getppid()}" in str(error))
    store.close()
    with KVStore(sys.argv[1]) as own:
        os._exit(0 if said == [True, True] and own.get("a") == b"abc" else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert store.get("a") == b"abc"
store.close()
"""


@numbered
def test_a_forked_child_is_told_to_make_its_own(scripted, numbers: str) -> None:
    run_forking(_FORKING, scripted.socket_path, numbers)


def test_no_device_stays_open(scripted) -> None:
    with KVStore(scripted.socket_path, "nvme") as store:
        assert store.put("a", b"abc")
        assert store.get("a") == b"abc"
        assert open_files() & set(scripted.devices)
    assert not open_files() & set(scripted.devices)


def open_files() -> set[str]:
    """The paths of what this process has open."""
    links = Path("/proc/self/fd").iterdir()
    return {os.readlink(link) for link in links if os.path.lexists(link)}  # noqa: PTH115 - sockets are no paths


def test_every_parameter_has_a_row_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kv_store.md").read_text()
    assert [name for name in KVStoreConfig.model_fields if f"| `{name}` |" not in page] == []
