"""A wrong parameter stops the start with one sentence; a daemon that is down does not."""

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hypercache_connector import ConfigError, HyperCacheConnector, start_check
from hypercache_connector.config import DirectIo, parse
from hypercache_connector.workers import join_all
from hypercache_protocol import WIRE_1_1, ErrorCode, Tier
from hypercache_protocol.messages import DeviceInfo, DevicesReply, ErrorReply, GetDevices
from hypercache_protocol.versions import LATEST

GOOD: dict[str, Any] = {"namespace": "n", "socket_path": "/nowhere/s"}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"namespace": None}, "'namespace' is wrong"),
        ({"namespace": ""}, "must be 1 to 512 bytes long, not 0"),
        ({"namespace": "x" * 513}, "must be 1 to 512 bytes long, not 513"),
        ({"tiem_out": 1}, "unknown parameter 'tiem_out': remove it or correct its name; known are batch"),
        ({"timeout_s": 0}, "'timeout_s' is wrong: Input should be greater than 0"),
        ({"timeout_s": "5"}, "'timeout_s' is wrong"),
        ({"timeout_s": float("nan")}, "'timeout_s' is wrong"),
        ({"read_workers": 0}, "'read_workers' is wrong"),
        ({"read_workers": 1.5}, "'read_workers' is wrong"),
        ({"queue_limit": True}, "'queue_limit' is wrong"),
        ({"overwrite": "yes"}, "'overwrite' is wrong"),
        ({"tier": "disk"}, "must be one of 'nvme', 'ram' (got 'disk')"),
        ({"direct_io": "maybe"}, "must be one of 'auto', 'on', 'off'"),
        ({"wire": "3.0"}, "must be one of '1.0', '1.1', '2.0'"),
        ({"wire": 2.0}, "(got 2.0)"),
        ({"socket_path": ""}, "give the path of the daemon's socket"),
        ({"socket_path": "/" + "s" * 107}, "at most 107 bytes"),
    ],
)
def test_a_wrong_parameter_is_named_in_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(GOOD | wrong)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("hypercache_connector: ")


def test_a_missing_namespace_stops_the_start_and_says_what_it_is_for() -> None:
    with pytest.raises(ConfigError, match="adapter_params needs 'namespace', a text that tells apart"):
        HyperCacheConnector(socket_path="/nowhere/s")


def test_good_parameters_are_taken_as_json_gives_them() -> None:
    config = parse(GOOD | {"timeout_s": 2, "tier": "ram", "direct_io": "on", "overwrite": True})
    assert (config.timeout_s, config.tier, config.direct_io) == (2.0, Tier.RAM, DirectIo.ON)
    assert config.wire == LATEST
    assert parse(GOOD | {"wire": "1.1"}).wire == WIRE_1_1
    with pytest.raises(ValidationError):
        config.tier = Tier.NVME


def test_each_kind_of_work_has_as_many_threads_as_it_was_given(folder: Path) -> None:
    given = {
        "read_workers": 5,
        "write_workers": 6,
        "lookup_threads": 2,
        "load_threads": 3,
        "store_threads": 4,
    }
    before = set(threading.enumerate())
    connector = HyperCacheConnector(namespace="n", socket_path=str(folder / "s"), **given)
    begun = Counter(each.name.rpartition("-")[0] for each in set(threading.enumerate()) - before)
    connector.close()
    expected = {f"hypercache-{name.partition('_')[0]}": count for name, count in given.items()}
    assert expected.items() <= begun.items()


@pytest.mark.parametrize("had", [0, 20, 32, 33, 40])
def test_where_threads_run_out_a_connector_leaves_none_behind_and_no_descriptor(
    folder: Path,
    only_so_many_threads: Callable[[int], list[threading.Thread]],
    open_descriptors: Callable[[], int],
    had: int,
) -> None:
    started, before = only_so_many_threads(had), open_descriptors()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        HyperCacheConnector(namespace="n", socket_path=str(folder / "s"))
    assert join_all(started, time.monotonic() + 10) == []
    assert open_descriptors() <= before


def test_the_engine_has_the_times_that_it_was_given(folder: Path) -> None:
    given = {"timeout_s": 2.5, "probe_interval_s": 0.5, "transfer_timeout_s": 7.5, "close_timeout_s": 3.5}
    connector = HyperCacheConnector(namespace="n", socket_path=str(folder / "s"), **given)
    engine = connector._engine
    connector.close()
    client = engine.client
    taken = (client._timeout_s, client._probe_interval_s, engine.transfer_timeout_s, engine.close_timeout_s)
    assert taken == tuple(given.values())


def test_a_socket_path_that_is_a_plain_file_is_refused(folder: Path) -> None:
    plain = folder / "plain"
    plain.touch()
    with pytest.raises(ConfigError, match="not a socket; give the daemon's --socket path"):
        parse(GOOD | {"socket_path": str(plain)})


def test_a_path_below_a_plain_file_is_refused(folder: Path) -> None:
    plain = folder / "plain"
    plain.touch()
    with pytest.raises(ConfigError, match="part of this path is a file and no folder"):
        parse(GOOD | {"socket_path": str(plain / "s")})


def test_a_socket_that_goes_while_it_is_looked_at_is_no_error(
    scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone_by_now(path: str, *_: object, **__: object) -> bool:
        Path(path).unlink()
        return False

    monkeypatch.setattr(os, "access", gone_by_now)
    assert parse(GOOD | {"socket_path": scripted.socket_path}).socket_path == scripted.socket_path


def test_a_socket_nobody_listens_on_is_no_error(folder: Path) -> None:
    path = str(folder / "s")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    assert parse(GOOD | {"socket_path": path}).socket_path == path


# -- what this user may not do -----------------------------------------------------------------------------


@contextmanager
def a_plain_user() -> Iterator[None]:
    """Be nobody in particular meanwhile; who is no root is that already."""
    distribution_version("hypercache-ext")  # imports what the interpreter keeps where only root may look
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(41_001)
    try:
        yield
    finally:
        os.seteuid(0)


def pool_of(scripted, *paths: str) -> None:
    """Let the daemon tell that these are its devices."""
    devices = [
        DeviceInfo(
            path=path, is_nvme=True, is_virtual=False, is_partition=False, is_rotational=False, size_bytes=1
        )
        for path in paths
    ]
    reply = DevicesReply(devices=tuple(devices))
    scripted.change = lambda request, given: reply if isinstance(request, GetDevices) else given


def open_to_all(scripted) -> None:
    scripted.folder.chmod(0o755)
    Path(scripted.socket_path).chmod(0o666)
    for path in scripted.devices:
        Path(path).chmod(0o666)


def refusal(scripted, **parameters: Any) -> str:
    """The one sentence with which a connector does not start, and leaves no thread behind."""
    before = set(threading.enumerate())
    given = {"namespace": "n", "socket_path": scripted.socket_path} | parameters
    with a_plain_user(), pytest.raises(ConfigError) as caught:
        HyperCacheConnector(**given)
    own = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("hypercache")]
    assert own == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def starts(scripted, **parameters: Any) -> bool:
    with a_plain_user():
        given = {"namespace": "n", "socket_path": scripted.socket_path} | parameters
        HyperCacheConnector(**given).close()
    return True


def test_a_socket_that_this_user_may_not_write_to_stops_the_start(scripted) -> None:
    open_to_all(scripted)
    assert starts(scripted)
    Path(scripted.socket_path).chmod(0)
    said = "this user may not write to the socket; add it to the group of hypercached's --group"
    assert said in refusal(scripted)


def test_a_folder_that_this_user_may_not_look_into_stops_the_start(scripted) -> None:
    open_to_all(scripted)
    scripted.folder.chmod(0)
    try:
        assert "this user may not look into its folder; give it permission" in refusal(scripted)
    finally:
        scripted.folder.chmod(0o755)


def test_a_device_that_this_user_may_not_open_stops_the_start(scripted) -> None:
    open_to_all(scripted)
    pool_of(scripted, *scripted.devices)
    assert starts(scripted)
    Path(scripted.devices[1]).chmod(0o444)
    assert f"this user may not open the daemon's device {scripted.devices[1]} (Permission denied): add" in (
        refusal(scripted)
    )
    assert starts(scripted, tier="ram"), "who stores in RAM may do without the devices"


def test_a_device_that_is_gone_or_no_device_is_a_warning(scripted, caplog: pytest.LogCaptureFixture) -> None:
    open_to_all(scripted)
    pool_of(scripted, "/nowhere/device", "relative")
    assert starts(scripted)
    assert (
        "/nowhere/device cannot be opened: No such file or directory; what lies there is a miss"
        in caplog.text
    )
    assert "relative cannot be opened" in caplog.text


@pytest.mark.parametrize("tier", ["nvme", "ram"])
def test_a_daemon_that_does_not_let_this_user_in_stops_the_start(scripted, tier: str) -> None:
    open_to_all(scripted)
    refused = ErrorReply(error_message="not you", error_code=ErrorCode.FORBIDDEN)
    scripted.change = lambda request, reply: refused
    assert f"{scripted.socket_path}: the daemon refuses: not you" in refusal(scripted, tier=tier)


def test_a_daemon_that_is_full_for_the_moment_stops_no_start(
    scripted, caplog: pytest.LogCaptureFixture
) -> None:
    open_to_all(scripted)
    full = ErrorReply(error_message="too many", error_code=ErrorCode.UNAVAILABLE)
    scripted.change = lambda request, reply: full
    assert starts(scripted)
    assert "no daemon yet, so all is a miss: the daemon refuses: too many" in caplog.text


@pytest.mark.parametrize("trouble", ["refuses", "closes", "is frozen", "is down"])
def test_a_daemon_that_does_not_tell_its_devices_stops_no_start(
    scripted, trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_check, "_CHECK_TIMEOUT_S", 0.1)
    open_to_all(scripted)
    match trouble:
        case "refuses":
            pass  # the scripted daemon does not know the action
        case "closes":
            scripted.garble = lambda request, data: None
        case "is frozen":
            scripted.freeze()
        case "is down":
            Path(scripted.socket_path).unlink()
    assert starts(scripted)
    assert ("no daemon yet, so all is a miss" in caplog.text) == (trouble != "refuses")
