"""Arguments and a TOML file become a configuration, or one sentence that says what to change."""

from __future__ import annotations

import grp
import math
import re
import sys
from pathlib import Path

import pytest

from hypercache_daemon.__main__ import main as start
from hypercache_daemon.command import main
from hypercache_daemon.config import Config, ConfigError, parse
from hypercache_protocol.versions import LATEST, RELEASED

MIB = 1 << 20
POOL = ["--pool-dir", "/pool"]
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
USERS_OF_SQLITE = ("command", "catalog", "catalog_file")


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_pool_folder_is_all_that_must_be_given() -> None:
    config = parse(POOL)
    assert config.pool_dir == config.catalog_dir == Path("/pool")
    assert config.socket == Path("/run/hypercache/hypercache.sock")
    assert (config.pool_size, config.devices, config.ram_size) == (8 << 30, 4, 256 * MIB)
    assert config.wire_version == LATEST
    assert not config.format
    assert config.gid() is None
    assert not config.ram_size_was_given


def test_what_nobody_sets_is_as_the_documents_promise() -> None:
    config = parse(POOL)
    assert (config.stage_expiry_s, config.quarantine_s, config.quarantine_share) == (3600, 10, 0.1)
    assert (config.evict_above, config.evict_down_to, config.eviction) == (0.95, 0.9, "return-rate")
    assert (config.max_connections, config.max_objects, config.idle_s) == (4096, 10_000_000, math.inf)
    assert (config.verify_on_commit, config.scrub_mib_s) == (False, 16)
    assert not config.evict_unflushed, "what was to be flushed is never dropped"
    assert config.ingest_prefix == (), "nothing is fetched from where nobody said so"
    assert config.metrics is None


def test_every_setting_may_be_an_argument() -> None:
    config = parse(
        [
            *("--device", "/dev/a", "--device", "/dev/b", "--state-dir", "/state", "--socket", "/s"),
            *("--ram-dir", "/ram", "--ram-size", "1GiB", "--backend", "file:///b", "--format"),
            *("--ingest-prefix", "file:///x", "--ingest-prefix", "s3://y", "--wire", "1.0"),
            *("--log-level", "debug", "--max-connections", "7", "--quarantine-s", "1.5"),
            *("--quarantine-share", "0.2", "--stage-expiry-s", "60", "--evict-above", "0.8"),
            *("--evict-down-to", "0.7", "--eviction", "lru", "--shutdown-grace-s", "3"),
        ]
    )
    assert config.device == ("/dev/a", "/dev/b")
    assert config.catalog_dir == Path("/state")
    assert (config.ram_dir, config.ram_size, config.ram_size_was_given) == (Path("/ram"), 1 << 30, True)
    assert (config.backend, config.ingest_prefix) == ("file:///b", ("file:///x", "s3://y"))
    assert (config.format, config.max_connections, config.log_level) == (True, 7, "debug")
    assert config.wire_version == RELEASED[0]
    assert (config.quarantine_s, config.quarantine_share, config.stage_expiry_s) == (1.5, 0.2, 60)
    assert (config.eviction, config.evict_above, config.evict_down_to) == ("lru", 0.8, 0.7)
    assert config.shutdown_grace_s == 3


@pytest.mark.parametrize("size", ["34MiB", "35651584", "34 mib"])
def test_sizes_are_bytes_or_words(size: str) -> None:
    assert parse([*POOL, "--pool-size", size]).pool_size == 34 * MIB


def test_a_file_gives_what_the_arguments_do_not(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('pool_dir = "/pool"\ndevices = 2\nram_size = "0"\ningest_prefix = ["s3://a", "s3://b"]\n')
    config = parse(["--config", str(file), "--devices", "3"])
    assert (config.pool_dir, config.devices, config.ram_size) == (Path("/pool"), 3, 0)
    assert config.ingest_prefix == ("s3://a", "s3://b")
    assert config.ram_size_was_given


def test_limits_of_prefixes_may_be_given_several_times_or_as_a_list(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('pool_dir = "/pool"\ncapacity = ["s3://a=b=1KiB", "hypercache://= 0"]\n')
    assert parse(["--config", str(file)]).capacities == {"s3://a=b/": 1024, "hypercache://": 0}
    given = parse([*POOL, "--capacity", "s3://x=1", "--capacity", "s3://x/y/=2 MiB"])
    assert given.capacities == {"s3://x/": 1, "s3://x/y/": 2 * MIB}


def test_a_group_is_known_by_its_name() -> None:
    group = grp.getgrgid(0)
    assert parse([*POOL, "--group", group.gr_name]).gid() == 0
    with pytest.raises(ConfigError, match="there is no group 'no such group' on this machine"):
        parse([*POOL, "--group", "no such group"]).gid()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--pool-dir or --device"]),
        ([*POOL, "--device", "/dev/a"], ["--pool-dir or --device", "not both"]),
        (["--device", "/dev/a"], ["--device needs --state-dir"]),
        ([*POOL, "--pool-size", "much"], ["--pool-size", "'much' is no size; write bytes, or words such as"]),
        ([*POOL, "--pool-size", "-5"], ["--pool-size"]),
        ([*POOL, "--ram-size", "8"], ["--ram-size", "less than a block", "such as 8GiB"]),
        ([*POOL, "--ram-size=-1GiB"], ["--ram-size", "'-1GiB' is no size"]),
        ([*POOL, "--presence-table-size", "8 cats"], ["--presence-table-size", "'8 cats' is no size"]),
        ([*POOL, "--devices", "0"], ["--devices", "1"]),
        ([*POOL, "--devices", "many"], ["--devices"]),
        ([*POOL, "--wire", "0.9"], ["--wire", "1.0", "1.1"]),
        ([*POOL, "--log-level", "loud"], ["--log-level", "'debug', 'info', 'warning' or 'error'", "'loud'"]),
        ([*POOL, "--max-connections", "0"], ["--max-connections"]),
        ([*POOL, "--evict-unflushed", "--backend", "file:///b"], ["--evict-unflushed is for a daemon"]),
        ([*POOL, "--evict-unflushed", "--ingest-prefix", "s3://a"], ["--ingest-prefix", "leave it out"]),
        ([*POOL, "--quarantine-s", "-1"], ["--quarantine-s"]),
        ([*POOL, "--quarantine-s", "nan"], ["--quarantine-s"]),
        ([*POOL, "--quarantine-share", "1.5"], ["--quarantine-share"]),
        ([*POOL, "--stage-expiry-s", "0"], ["--stage-expiry-s"]),
        ([*POOL, "--eviction", "LRU"], ["--eviction", "'return-rate' or 'lru'", "'LRU'"]),
        ([*POOL, "--evict-above", "0.5", "--evict-down-to", "0.6"], ["--evict-down-to", "--evict-above"]),
        ([*POOL, "--shutdown-grace-s", "soon"], ["--shutdown-grace-s"]),
        ([*POOL, "--capacity", "hypercache://a"], ["--capacity", "says not how much; write PREFIX=SIZE"]),
        ([*POOL, "--capacity", "=1GiB"], ["--capacity", "says not how much"]),
        ([*POOL, "--capacity", "a=1GiB"], ["--capacity", "'a' is no prefix of uris"]),
        ([*POOL, "--capacity", "s3://a=much"], ["--capacity", "'much' is no size"]),
        ([*POOL, "--capacity", "s3://a=-1"], ["--capacity", "'-1' is no size"]),
        (
            [*POOL, "--capacity", "s3://a=1", "--capacity", "s3://a/=2"],
            ["--capacity", "s3://a/ is given twice"],
        ),
        (["--pool-dir", ""], ["--pool-dir", "is empty; give a value, or leave it out"]),
        (["--device", "", "--state-dir", "/state"], ["--device", "is empty"]),
        ([*POOL, "--backend", ""], ["--backend", "is empty"]),
        ([*POOL, "--ram-dir="], ["--ram-dir", "is empty"]),
        ([*POOL, "--metrics", ""], ["--metrics", "is empty"]),
        (["--config", "/nowhere.toml"], ["--config", "/nowhere.toml", "cannot be read"]),
    ],
)
def test_what_is_wrong_is_named_in_one_sentence(arguments: list[str], words: list[str]) -> None:
    sentence = refusal(*arguments)
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("devices = ", "is not TOML"),
        ("\x00", "is not TOML"),
        ('pool_dir = "/p"\npool_sise = 5\n', "there is no setting 'pool_sise'; known are socket"),
        ('pool_dir = "/p"\ndevices = "x"\n', "--devices"),
        ('pool_dir = ["/p"]\n', "--pool-dir"),
        ('device = "/dev/a"\nstate_dir = "/s"\n', "--device: write a list, such as device = ['/dev/a']"),
        ('pool_dir = "/p"\ncapacity = {"s3://a" = 5}\n', "--capacity: write a list"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    assert words in refusal("--config", str(file))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    assert "is not TOML" in refusal("--config", str(tmp_path / "c.toml"))


def test_an_unknown_argument_ends_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*POOL, "--pool-sise", "5"])
    assert ended.value.code == 2
    assert "--pool-sise" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--form", "--scrub", "--max-c"])
def test_an_argument_is_not_guessed_from_its_beginning(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--form would give up everything, and a later release may have two arguments that begin so."""
    with pytest.raises(SystemExit):
        parse([*POOL, f"{word}=1" if word != "--form" else word])
    assert word in capsys.readouterr().err


def test_the_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in Config.model_fields:
        assert f"--{name.replace('_', '-')}" in text


@pytest.mark.parametrize("name", Config.model_fields)
def test_every_setting_is_explained_to_operators(name: str) -> None:
    assert re.search(rf"--{name.replace('_', '-')}\b(?!-)", OPERATIONS.read_text()), "in docs/operations.md"


def test_the_version_names_the_wires_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--version"])
    assert ended.value.code == 0
    wires = re.escape(", ".join(map(str, RELEASED)))
    assert re.fullmatch(rf"hypercached \d+\.\d+\.\d+\S* \(speaks wire {wires}\)\n", capsys.readouterr().out)


def test_what_is_not_installed_is_said_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "hypercache_daemon.command", raising=False)
    monkeypatch.setitem(sys.modules, "trio", None)
    assert start() == 2
    assert "the module trio is not installed" in capsys.readouterr().err


def test_what_python_itself_lacks_is_not_put_down_to_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sqlite3", "sqlite3.dbapi2", *(f"hypercache_daemon.{own}" for own in USERS_OF_SQLITE)):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "_sqlite3", None)
    assert start() == 2
    said = "this Python was built without its own module _sqlite3; take one that has it"
    assert capsys.readouterr().err == f"hypercached: {said}\n"


def test_a_broken_installation_is_not_taken_for_an_incomplete_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hypercache_daemon.command", raising=False)
    monkeypatch.setitem(sys.modules, "hypercache_daemon.config", None)
    with pytest.raises(ModuleNotFoundError, match="config"):
        start()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--pool-dir"),
        ([*POOL, "--group", "no such group"], "--group"),
        ([*POOL, "--backend", "ftp://x/y"], "backend ftp://x/y"),
        ([*POOL, "--socket", "/tmp/" + "s" * 200], "longer than 107 bytes"),
        ([*POOL, "--socket", "/etc/passwd"], "is not a socket"),
    ],
)
def test_main_says_what_is_wrong_and_ends_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("hypercached: ")
    assert words in error
    assert "Traceback" not in error
