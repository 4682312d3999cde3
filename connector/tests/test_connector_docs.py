"""The pages say what the code does: parameters, defaults, counters, figures and examples."""

import ast
import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic.fields import FieldInfo

import hypercache_connector
from hypercache_compat.daemon_process import DaemonProcess, running_daemon
from hypercache_connector import KVStore, Outcome
from hypercache_connector.config import ClientConfig, Config, EngineConfig, KVStoreConfig, parse
from hypercache_connector.devices import COUNTS
from hypercache_protocol.versions import LATEST

README = Path(__file__).parents[1] / "README.md"
KV_STORE = Path(__file__).parents[2] / "docs" / "kv_store.md"
SOURCE = Path(hypercache_connector.__file__).parent
NAMES = re.compile(r"`([\w.]+)`")

UNITS = {"Seconds": "seconds", "Threads": "threads", "Share": "share, up to 1", "bool": "true, false"}
"""By the name of the type; for others the words are free."""

PAGES = {"connector": (README, Config), "KVStore": (KV_STORE, KVStoreConfig)}
ELSEWHERE = {"prefer_gds": ["`prefer_gds`", "true, false", "`true`"]}
"""What KVStore takes without its being a setting, and its row without the last cell."""


def table(page: Path, heading: str) -> list[list[str]]:
    """The cells of each row of the first table whose heading begins so."""
    lines = page.read_text().split(f"| {heading} |")[1].splitlines()[2:]
    rows = [line for line in lines[: next(n for n, line in enumerate(lines) if line[:1] != "|")] if line]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def named(rows: list[list[str]]) -> list[str]:
    """The names in the first cells."""
    return [name for row in rows for name in NAMES.findall(row[0])]


# -- parameters --------------------------------------------------------------------------------------------


def shown_default(name: str, field: FieldInfo, page: Path) -> str:
    if field.is_required():
        return "required"
    if page is KV_STORE and name == "socket_path":
        return "None"  # it is looked for
    if field.default == LATEST:
        return "the newest"
    value = field.default.value if isinstance(field.default, Enum) else field.default
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


@pytest.mark.parametrize("owner", list(PAGES))
def test_every_parameter_has_a_row_with_its_unit_and_default_and_no_other_has(owner: str) -> None:
    page, model = PAGES[owner]
    rows = {row[0].strip("`"): row for row in table(page, "parameter")}
    types = ClientConfig.__annotations__ | EngineConfig.__annotations__ | model.__annotations__
    assert sorted(rows) == sorted([*model.model_fields, *(ELSEWHERE if page is KV_STORE else ())])
    for name, field in model.model_fields.items():
        _, shown_unit, default, says = rows[name]
        assert default.replace("`", "").split(";")[0] == shown_default(name, field, page), name
        assert shown_unit == UNITS.get(types[name], shown_unit) != "", name
        assert says, name
    if page is KV_STORE:
        assert {name: rows[name][:3] for name in ELSEWHERE} == ELSEWHERE


def test_the_command_line_in_the_readme_is_taken() -> None:
    (spec,) = re.findall(r"--l2-adapter '(.*?)'\n", README.read_text(), re.DOTALL)
    adapter = json.loads(spec)
    assert getattr(hypercache_connector, adapter["class_name"]).__name__ == "HyperCacheConnector"
    assert adapter["module_path"] == "hypercache_connector"
    assert parse(adapter["adapter_params"]).namespace == "llama-3.1-8b-rev2-bf16"


# -- counters ----------------------------------------------------------------------------------------------


def counters_in_the_source() -> set[str]:
    """group.name of every `add` to the counters."""
    calls = [
        node
        for path in sorted(SOURCE.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add"
    ]
    return {
        f"{group}.{name}"
        for call in calls
        if len(call.args) > 1
        for group in texts(call.args[0])
        for name in texts(call.args[1])
    }


def texts(expression: ast.expr) -> list[str]:
    """The words that an expression may be."""
    if isinstance(expression, ast.Name):
        assert expression.id == "COUNTS"
        return [COUNTS]
    return [
        node.value
        for node in ast.walk(expression)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_the_readme_explains_every_outcome_and_no_other() -> None:
    assert sorted(named(table(README, "outcome"))) == sorted(outcome.value for outcome in Outcome)


def test_the_readme_explains_every_counter_and_no_other(scripted2, connect) -> None:
    found = counters_in_the_source()
    assert len(found) > 8
    ignored = connect(scripted2.socket_path).connector.status()["ignored"]
    found |= {f"ignored.{name}" for name in ignored}  # counted by the sessions
    assert sorted(named(table(README, "counter"))) == sorted(found)


def test_the_readme_explains_all_that_the_status_shows(scripted2, connect) -> None:
    driver = connect(scripted2.socket_path)
    assert driver.store(["k"], [bytearray(8)]).ok
    status = driver.connector.status()
    shown = [f"daemon.{name}" for name in status.pop("daemon")]
    shown += [name for name in status if name not in ("stores", "bytes", "transfers", "ignored")]
    assert sorted(shown) == sorted(named(table(README, "status")))
    with KVStore(scripted2.socket_path) as store:
        left = set(driver.connector.status()) - set(store.status()) - {"stores", "bytes", "transfers"}
        assert left == {"waiting", "pending"}


# -- figures -----------------------------------------------------------------------------------------------


def test_the_figures_of_the_sizing_are_right() -> None:
    rows = {row[0].split(":")[0]: row for row in table(README, "model, 16-bit numbers")}
    tokens = {
        "Llama 3.1 8B": 2 * 32 * 8 * 128 * 2,
        "Llama 3.1 70B": 2 * 80 * 8 * 128 * 2,
        "DeepSeek V3": 61 * (512 + 64) * 2,
    }
    for model, size_bytes in tokens.items():
        assert rows[model][1] == f"{size_bytes:,}"
        assert rows[model][2].startswith(f"{round(size_bytes * 256 / 2**20, 1):g} MiB")
    text = " ".join(README.read_text().split())
    kept = 4 * 3.84e12 * 0.90 / tokens["Llama 3.1 70B"]
    assert f"are {kept / 1e6:.1f} million tokens" in text
    assert f"or {round(kept / 8192, -1):,.0f} prompts of 8,192 tokens" in text
    assert f"that is {4 * 3.84e12 * 0.90 / (20 << 20):,.0f} of them" in text
    assert f"prompt is {8192 * tokens['Llama 3.1 70B'] / 1e9:.1f} GB" in text


# -- examples ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon() as process:
        yield process


def run(page: Path, number: int, daemon: DaemonProcess, **given: Any) -> dict[str, Any]:
    """Run one of a page's examples and give its names."""
    example = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[number]
    names = dict(given)
    exec(example.replace("/run/hypercache/hypercache.sock", daemon.socket_path), names)
    return names


def test_the_example_of_a_store_runs(daemon: DaemonProcess) -> None:
    run(README, 0, daemon, array=np.arange(100))


def test_the_example_of_a_client_runs(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    with KVStore(daemon.socket_path) as store:
        assert store.put("hypercache://datasets/a", b"abc")
    names = run(README, 1, daemon)
    assert names["hit"].object_size == 3
    assert names["found"] == [Outcome.ABSENT, Outcome.ABSENT]
    assert "chunk_checksums" in capsys.readouterr().out


def test_the_example_of_prefix_blocks_runs(daemon: DaemonProcess) -> None:
    tensor = np.zeros(1000)
    computed: list[object] = []
    given = {"token_ids": [1, 2], "tensor": tensor, "compute": computed.append, "keys": ["none"]}
    assert run(KV_STORE, 0, daemon, **given)["blocks"] == [None]
    assert run(KV_STORE, 0, daemon, **given)["blocks"] == [None]
    assert len(computed) == 1
