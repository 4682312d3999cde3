"""What released clients said, said again: today's daemon answers as they understand it."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from hypercache_compat import transcripts
from hypercache_compat.daemon_process import DaemonOptions, DaemonProcess, running_daemon
from hypercache_compat.golden import FOLDER, frozen_files
from hypercache_compat.releases import OLD_CLIENT_VERSIONS, release_folder
from hypercache_compat.scenario_process import ScenarioProcess
from hypercache_compat.transcripts import INNER, LOOKED_AT, SCENARIOS, differences, file_name
from hypercache_protocol.messages import REQUESTS
from hypercache_protocol.versions import RELEASED

FILES = {
    (version, name): FOLDER / file_name(version, name)
    for version in OLD_CLIENT_VERSIONS
    for name in SCENARIOS
}
IDS = [f"{version}-{name}" for version, name in FILES]


def held(path: Path) -> dict[str, Any]:
    transcript: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return transcript


@pytest.fixture(scope="module", params=RELEASED, ids=str)
def daemon(request: pytest.FixtureRequest) -> Iterator[DaemonProcess]:
    """A daemon held to each wire in turn."""
    with running_daemon(DaemonOptions(extra=("--wire", str(request.param)))) as process:
        yield process


@pytest.mark.parametrize("path", FILES.values(), ids=IDS)
def test_a_released_client_reads_in_the_answers_what_it_read_then(daemon: DaemonProcess, path: Path) -> None:
    assert transcripts.replay(held(path), daemon) == []


def test_the_transcripts_are_frozen() -> None:
    frozen = {name for name in frozen_files() if name.startswith("transcripts/")}
    assert {path.relative_to(FOLDER).as_posix() for path in FILES.values()} <= frozen


def test_every_action_of_a_client_is_in_its_transcripts() -> None:
    for version in OLD_CLIENT_VERSIONS:
        turns = [turn for name in SCENARIOS for turn in held(FILES[version, name])["turns"]]
        asked = {json.loads(line)["action"] for _, side, line in turns if side == "client"}
        assert asked == REQUESTS.keys() == LOOKED_AT.keys()


@pytest.mark.parametrize("version", OLD_CLIENT_VERSIONS)
def test_every_field_that_a_client_reads_is_looked_at(version: str) -> None:
    source = release_folder(f"hypercache-io=={version}") / "hypercache"
    client = (source / "client.py").read_text()
    reads = set(re.findall(r'(?:resp|data)\.get\("(\w+)"', client))
    chunk = (source / "datapath.py").read_text().partition("class ChunkLocation")[2].partition("\nclass ")[0]
    reads |= set(re.findall(r'data(?:\.get\(|\[)"(\w+)"', chunk))
    assert {"status", "chunk_layout", "numa_node", "length", "tier"} <= reads
    looked_at = {name for names in (*LOOKED_AT.values(), *INNER.values()) for name in names}
    assert reads - looked_at == set()


def test_a_recording_holds_every_byte_in_order(tmp_path: Path, old: ScenarioProcess) -> None:
    with running_daemon() as process:
        made = transcripts.record(old, process, "pin")
    then = held(FILES[old.label.rpartition(" ")[2], "pin"])
    told = [(number, text) for number, side, text in made["turns"] if side == "client"]
    assert told == [(number, text) for number, side, text in then["turns"] if side == "client"]
    assert [turn[:2] for turn in made["turns"]] == [turn[:2] for turn in then["turns"]]
    assert "/srv/hypercache/" in json.dumps(made)
    assert str(process.folder) not in json.dumps(made)


def test_what_is_there_is_not_recorded_again() -> None:
    assert transcripts.record_missing() == []


# -- a daemon that answers otherwise is told of --------------------------------------------------------

CHUNK = {"device": "/d", "offset": 0, "length": 5, "tier": "nvme"}
HIT = {
    "status": "HIT",
    "object_size": 5,
    "chunk_size": 4194304,
    "chunk_layout": [CHUNK],
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**deepcopy(HIT), **fields}


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (changed(news=1, generation=5), []),
        (changed(chunk_layout=[{**CHUNK, "device": "/e", "offset": 4096, "checksum": 7}]), []),
        (changed(status="FOUND"), ["locate.status was 'HIT' and is 'FOUND'"]),
        (changed(object_size=6), ["locate.object_size was 5 and is 6"]),
        (changed(object_size="5"), ["locate.object_size was a number and is str"]),
        (changed(object_size=True), ["locate.object_size was a number and is bool"]),
        (changed(chunk_layout=[]), ["locate.chunk_layout had 1 items and has 0"]),
        (changed(error_message="no"), ["locate.error_message was not there and would be read as 'no'"]),
        (
            changed(chunk_layout=[{"device": 3, "offset": 0, "length": 4}]),
            [
                "locate.chunk_layout[0].device was str and is a number",
                "locate.chunk_layout[0].length was 5 and is 4",
                "locate.chunk_layout[0].tier is gone",
            ],
        ),
    ],
)
def test_a_reply_that_would_be_read_otherwise_is_told(now: dict[str, Any], told: list[str]) -> None:
    assert list(differences("locate", HIT, now)) == told


def test_a_missing_field_is_told() -> None:
    now = {name: value for name, value in HIT.items() if name != "object_size"}
    assert list(differences("locate", HIT, now)) == ["locate.object_size is gone"]


def test_a_replay_reads_the_answer_of_the_daemon(daemon: DaemonProcess) -> None:
    transcript = {
        "turns": [
            [0, "client", '{"action":"ping"}\n'],
            [0, "daemon", '{"status":"PING"}\n'],
        ]
    }
    assert transcripts.replay(transcript, daemon) == ["ping.status was 'PING' and is 'PONG'"]
