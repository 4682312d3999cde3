"""benchmarks/eviction.py: traces it reads, makes up and refuses, and the figures it prints."""

from __future__ import annotations

import gzip
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("block_traces")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("eviction")
    for name in ("eviction", "cache_replay"):
        del sys.modules[name]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCHMARKS / "eviction.py", *arguments], capture_output=True, text=True, check=False
    )


def rows(output: str) -> dict[str, list[float]]:
    """The first table: policy -> figures."""
    table = output.partition("with all before")[0].splitlines()[2:]
    return {line[:20].strip(): [float(word) for word in line[20:].split()] for line in table}


def write_trace(path: Path, requests: Sequence[Sequence[int]]) -> Path:
    lines = "".join(
        json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ids}) + "\n"
        for ids in requests
    )
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


# -- traces --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_mooncake_file_is_read_as_batches_of_blocks(traces: ModuleType, tmp_path: Path, name: str) -> None:
    path = write_trace(tmp_path / name, [[0, 1, 2], [0, 3]])
    assert traces.read_mooncake(path) == [["0", "1", "2"], ["0", "3"]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["no request"]),
        (b'{"hash_ids": []}\n', ["no request"]),
        (b'{"hash_ids": [1]}\nnot json\n', ["line 2", "hash_ids"]),
        (b'{"other": [1]}\n', ["line 1", "hash_ids"]),
        (b"[1, 2]\n", ["line 1", "JSON object"]),
        (b'{"hash_ids": 7}\n', ["line 1", "list of whole numbers"]),
        (b'{"hash_ids": [1, "2"]}\n', ["line 1", "list of whole numbers"]),
        (b'{"hash_ids": [true]}\n', ["line 1", "list of whole numbers"]),
        (b"\xff\xfe\n", ["cannot be read"]),
    ],
)
def test_what_is_no_trace_is_refused_in_one_sentence(
    traces: ModuleType, tmp_path: Path, content: bytes, words: list[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(traces.TraceError) as refused:
        traces.read_mooncake(path)
    for word in [str(path), *words]:
        assert word in str(refused.value)


@pytest.mark.parametrize("damage", ["cut", "not gzip"])
def test_a_damaged_gz_file_is_refused(traces: ModuleType, tmp_path: Path, damage: str) -> None:
    path = write_trace(tmp_path / "trace.jsonl.gz", [[number, number + 1] for number in range(500)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"plain text")
    with pytest.raises(traces.TraceError, match="cannot be read"):
        traces.read_mooncake(path)


def test_the_same_seed_makes_up_the_same_trace(traces: ModuleType) -> None:
    assert traces.made_up(1, 300) == traces.made_up(1, 300)
    assert traces.made_up(1, 300) != traces.made_up(2, 300)


def test_a_made_up_trace_has_conversations_that_grow_and_blocks_that_never_return(traces: ModuleType) -> None:
    trace = traces.made_up(1, 4000)
    assert len(trace) == 4000
    uses: dict[str, int] = {}
    grown = 0
    for batch in trace:
        assert len(set(batch)) == len(batch)
        grown += len(batch) > 8 and sum(block in uses for block in batch) > 8
        for block in batch:
            uses[block] = uses.get(block, 0) + 1
    assert grown > 400
    once = sum(count == 1 for count in uses.values())
    assert 0.4 < once / len(uses) < 0.9


# -- policies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [7, 8])
def test_the_default_is_above_the_others_on_made_up_loads(
    benchmark: ModuleType, traces: ModuleType, seed: int
) -> None:
    trace = traces.made_up(seed, 5000)
    capacity = len({block for batch in trace for block in batch}) // 5
    found = {
        name: benchmark.replay(make(capacity), trace, capacity) for name, make in benchmark.POLICIES.items()
    }
    best_of_others = max(each.blocks for name, each in found.items() if name != "return rate")
    assert found["return rate"].blocks > 1.01 * best_of_others
    assert all(each.usable <= each.blocks for each in found.values())


@pytest.mark.parametrize("share", [0.05, 0.3])
@pytest.mark.parametrize("name", ["LRU", "ARC", "GDSF", "return rate"])
def test_the_daemons_own_cache_finds_what_the_policy_alone_does(
    benchmark: ModuleType, traces: ModuleType, name: str, share: float
) -> None:
    trace = traces.made_up(4, 150)
    capacity = int(share * len({block for batch in trace for block in batch}))
    alone, through = (
        benchmark.replay(benchmark.POLICIES[name](capacity), trace, capacity, through_cache=through_cache)
        for through_cache in (False, True)
    )
    assert through == alone
    assert through.blocks > 0


@pytest.mark.parametrize("name", ["LRU", "ARC", "GDSF", "return rate"])
def test_a_cache_that_holds_all_finds_all_that_was_there(
    benchmark: ModuleType, traces: ModuleType, name: str
) -> None:
    trace = traces.made_up(3, 800)
    distinct = len({block for batch in trace for block in batch})
    found = benchmark.replay(benchmark.POLICIES[name](distinct), trace, distinct)
    assert found.blocks == found.usable == sum(map(len, trace)) - distinct


@pytest.mark.parametrize("name", ["LRU", "ARC", "GDSF", "return rate"])
def test_a_batch_larger_than_the_cache_is_stored_as_far_as_it_fits(benchmark: ModuleType, name: str) -> None:
    batch = [str(number) for number in range(10)]
    assert benchmark.replay(benchmark.POLICIES[name](4), [batch, batch], 4).blocks == 4


def test_arc_keeps_what_was_seen_again_from_a_scan(benchmark: ModuleType) -> None:
    hot = [str(number) for number in range(50)]
    scan = [[f"scan{number}"] for number in range(500)]
    trace = [hot, hot, *scan, hot]
    assert benchmark.replay(benchmark.Arc(100), trace, 100).blocks == 100
    assert benchmark.replay(benchmark.Lru(), trace, 100).blocks == 50


def test_gdsf_keeps_what_was_used_often_until_others_are_worth_as_much(benchmark: ModuleType) -> None:
    policy = benchmark.Gdsf()
    for key in ("often", "once"):
        policy.inserted(key, 1)
    for _ in range(3):
        policy.touched(["often", "absent"])
    assert list(policy.victims()) == list(policy.victims()) == ["once", "often"]
    for number in range(3):
        (*_, victim) = [next(policy.victims())]
        policy.removed(victim)
        policy.inserted(f"new{number}", 1)
    assert list(policy.victims()) == ["often", "new2"]


# -- the command ---------------------------------------------------------------------------------------


def test_the_command_prints_hit_ratios_for_each_policy_and_size(tmp_path: Path) -> None:
    requests = [[0, number % 50 + 1, number + 1000] for number in range(2000)]
    done = run(write_trace(tmp_path / "t.jsonl", requests), "--sizes", "1", "10", "100")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2000 requests, 6000 look-ups of 2051 distinct blocks" in done.stdout
    table = rows(done.stdout)
    assert list(table) == ["LRU", "ARC", "GDSF", "return rate"]
    without_end = 1 - 2051 / 6000
    for figures in table.values():
        assert figures == sorted(figures)
        assert figures[-1] == pytest.approx(without_end, abs=1e-4)


def test_the_command_prints_the_same_through_the_daemons_cache(tmp_path: Path) -> None:
    requests = [[0, number % 50 + 1, number + 1000] for number in range(300)]
    path = write_trace(tmp_path / "t.jsonl", requests)
    through = run(path, "--sizes", "10", "--through-cache")
    assert (through.returncode, through.stderr) == (0, "")
    assert through.stdout == run(path, "--sizes", "10").stdout


def test_the_command_takes_a_part_of_the_trace(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [[1, 2], [3], [1, 2], [4]])
    for part, counts in (("1/2", "2 requests, 3 look-ups"), ("2/2", "2 requests, 3 look-ups")):
        assert run(path, "--part", part).stdout.startswith(counts)


def test_the_command_can_leave_out_last_blocks(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [[1, 2, 3], [4], [1, 2, 5]])
    assert run(path, "--full-blocks").stdout.startswith("2 requests, 4 look-ups of 2 distinct blocks")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere.jsonl"], "/nowhere.jsonl cannot be read"),
        (["--made-up", "1", "--requests", "9", "--part", "3/2"], "--part 3/2"),
        (["--made-up", "1", "--requests", "9", "--part", "half"], "--part half"),
        ([], "required"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_measures_what_a_policy_costs() -> None:
    done = run("--cost", "--keys", "3000")
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line[:44].strip(): line[44:].split() for line in done.stdout.splitlines()[1:]}
    assert all(len(figures) == 2 and float(min(figures, key=float)) >= 0 for figures in lines.values())
    assert float(lines["memory, bytes a key"][1]) > 10
