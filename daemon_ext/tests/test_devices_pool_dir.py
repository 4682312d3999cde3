"""Pools in files that the daemon makes: what it makes, what it keeps, and what it refuses by name."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from umasks import umask

from hypercache_daemon.devices import Access, DeviceError, Pool, open_pool_dir

MIB = 1 << 20
SHARE = 17 * MIB
PRIVATE = Access()


@pytest.fixture(autouse=True)
def gives_room_back(tmp_path: Path) -> Iterator[None]:
    yield
    shutil.rmtree(tmp_path)


def open_two(folder: Path, *, format: bool = False, access: Access = PRIVATE) -> Pool:
    return open_pool_dir(folder, 2 * SHARE, 2, format=format, access=access)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode(path: Path | str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def write(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


# -- making --------------------------------------------------------------------------------------------


def test_a_new_pool_has_the_devices_that_were_asked_for(tmp_path: Path) -> None:
    with open_pool_dir(tmp_path / "pool", 3 * SHARE + 5000, 3, access=PRIVATE) as pool:
        assert pool.formatted
        assert re.fullmatch("[0-9a-f]{32}", pool.pool_id)
        assert [device.index for device in pool.devices] == [0, 1, 2]
        for device in pool.devices:
            state = Path(device.path).stat()
            assert Path(device.path).is_absolute()
            assert device.size_bytes == state.st_size == SHARE
            assert state.st_blocks * 512 >= SHARE, "the room is taken at once, not when clients write"
            assert device.info.path == device.path
            assert device.info.size_bytes == SHARE
            assert (device.info.is_virtual, device.info.is_nvme, device.info.is_partition) == (
                True,
                False,
                False,
            )


def test_shares_are_whole_pages(tmp_path: Path) -> None:
    with open_pool_dir(tmp_path / "pool", 3 * SHARE + 3 * 4096 + 4095, 3, access=PRIVATE) as pool:
        assert {device.size_bytes for device in pool.devices} == {SHARE + 4096}


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
@pytest.mark.parametrize(
    ("access", "file_mode", "folder_mode"),
    [(PRIVATE, 0o600, 0o700), (Access(gid=os.getgid()), 0o660, 0o750)],
    ids=["private", "group"],
)
def test_modes_are_right_under_any_umask(
    tmp_path: Path, mask: int, access: Access, file_mode: int, folder_mode: int
) -> None:
    (tmp_path / "there").mkdir(mode=0o700)
    with umask(mask), open_two(tmp_path / "there", access=access) as pool:
        assert {mode(device.path) for device in pool.devices} == {file_mode}
        assert mode(tmp_path / "there") == folder_mode


def test_a_group_that_is_configured_later_gets_in_and_out_again(tmp_path: Path) -> None:
    open_two(tmp_path / "pool").close()
    for access, expected in ((Access(gid=os.getgid()), 0o660), (PRIVATE, 0o600)):
        with open_two(tmp_path / "pool", access=access) as pool:
            assert not pool.formatted
            assert {mode(device.path) for device in pool.devices} == {expected}


def test_a_pool_folder_with_a_mode_of_its_own_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool").chmod(0o755)
    open_two(tmp_path / "pool", access=Access(gid=os.getgid())).close()
    assert mode(tmp_path / "pool") == 0o755


# -- keeping -------------------------------------------------------------------------------------------


def test_a_second_start_finds_the_same_pool_and_its_bytes(tmp_path: Path) -> None:
    with open_two(tmp_path / "pool") as first:
        write(first.devices[1].path, SHARE - 8, b"the last")
    with open_two(tmp_path / "pool") as second:
        assert not second.formatted
        assert (second.pool_id, second.devices) == (first.pool_id, first.devices)
        assert Path(second.devices[1].path).read_bytes()[-8:] == b"the last"


def test_ten_devices_and_more_stay_in_order(tmp_path: Path) -> None:
    open_pool_dir(tmp_path / "pool", 11 * SHARE, 11, access=PRIVATE).close()
    with open_pool_dir(tmp_path / "pool", 11 * SHARE, 11, access=PRIVATE) as pool:
        assert [Path(device.path).name.split("-")[1] for device in pool.devices] == [
            str(n) for n in range(11)
        ]


def test_format_starts_a_new_pool_under_names_that_no_client_holds_open(tmp_path: Path) -> None:
    """A client of wire 1 keeps one descriptor per path: the old name must not lead to new bytes."""
    with open_two(tmp_path / "pool") as old:
        write(old.devices[0].path, 2 * MIB, b"old")
    with open_two(tmp_path / "pool", format=True) as new:
        assert new.formatted
        assert new.pool_id != old.pool_id
        assert not {device.path for device in new.devices} & {device.path for device in old.devices}
        assert files(tmp_path / "pool") == sorted(Path(device.path).name for device in new.devices)
        assert Path(new.devices[0].path).read_bytes()[2 * MIB :].strip(b"\0") == b""


def test_format_gives_the_room_of_the_old_files_back(tmp_path: Path) -> None:
    open_two(tmp_path / "pool").close()
    with open_two(tmp_path / "pool", format=True):
        held = [
            link.readlink() for link in Path("/proc/self/fd").iterdir() if link.exists() or link.is_symlink()
        ]
    assert not [path for path in held if str(path).startswith(str(tmp_path)) and "(deleted)" in str(path)]


def test_format_may_change_number_and_size(tmp_path: Path) -> None:
    open_two(tmp_path / "pool").close()
    with open_pool_dir(tmp_path / "pool", 3 * SHARE, 1, format=True, access=PRIVATE) as pool:
        assert [device.size_bytes for device in pool.devices] == [3 * SHARE]
    assert len(files(tmp_path / "pool")) == 1


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    for name in ("catalog.sqlite", "device-0.hc", "device-0-12345678.hc.bak", "notes.new"):
        (tmp_path / "pool" / name).write_bytes(b"keep")
    with open_two(tmp_path / "pool", format=True) as pool:
        made = {Path(device.path).name for device in pool.devices}
    left = set(files(tmp_path / "pool")) - made
    assert left == {"catalog.sqlite", "device-0.hc", "device-0-12345678.hc.bak", "notes.new"}


# -- refusing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size_bytes", "count", "words"),
    [
        (2 * SHARE, 1, r"has 2 devices of 17\.0 MiB, not 1 of 34\.0 MiB"),
        (3 * SHARE, 3, r"has 2 devices of 17\.0 MiB, not 3 of 17\.0 MiB"),
        (4 * SHARE, 2, r"has 2 devices of 17\.0 MiB, not 2 of 34\.0 MiB"),
    ],
)
def test_other_numbers_than_the_pool_has_are_refused_with_the_ones_that_keep_it(
    tmp_path: Path, size_bytes: int, count: int, words: str
) -> None:
    with open_two(tmp_path / "pool") as pool:
        pass
    with pytest.raises(DeviceError, match=words) as refused:
        open_pool_dir(tmp_path / "pool", size_bytes, count, access=PRIVATE)
    said = re.search(r"--pool-size (\d+) --devices (\d+) .*--format", str(refused.value))
    assert said is not None
    with open_pool_dir(tmp_path / "pool", int(said[1]), int(said[2]), access=PRIVATE) as again:
        assert again.pool_id == pool.pool_id


@pytest.mark.parametrize(
    ("size_bytes", "count", "words"),
    [
        (SHARE - 1, 1, r"--pool-size"),
        (8 * SHARE, 9, r"too small for 9 devices, which need 17\.0 MiB"),
        (SHARE, 0, r"at least one device, not 0"),
        (SHARE, -1, r"at least one device, not -1"),
    ],
)
def test_a_pool_too_small_is_refused(tmp_path: Path, size_bytes: int, count: int, words: str) -> None:
    with pytest.raises(DeviceError, match=words):
        open_pool_dir(tmp_path / "pool", size_bytes, count, access=PRIVATE)
    assert not (tmp_path / "pool").exists()


def test_a_pool_larger_than_the_file_system_is_refused_before_anything_is_removed(tmp_path: Path) -> None:
    with open_two(tmp_path / "pool") as pool:
        pass
    with pytest.raises(
        DeviceError, match=r"needs 1024\.0 PiB but the file system of .* has .* free.*--pool-dir"
    ):
        open_pool_dir(tmp_path / "pool", 1 << 60, 4, format=True, access=PRIVATE)
    with open_two(tmp_path / "pool") as again:
        assert again.pool_id == pool.pool_id


def test_room_that_ends_midway_leaves_no_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SHARE, hard))
    try:
        with pytest.raises(DeviceError, match=r"cannot make 2 device files of 34\.0 MiB.*--pool-size"):
            open_pool_dir(tmp_path / "pool", 4 * SHARE, 2, access=PRIVATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path / "pool") == []


def test_two_daemons_never_share_a_pool(tmp_path: Path) -> None:
    with open_two(tmp_path / "pool") as pool:
        for format in (False, True):
            with pytest.raises(DeviceError, match=rf"{tmp_path}/pool is in use by another hypercached"):
                open_two(tmp_path / "pool", format=format)
    with open_two(tmp_path / "pool") as again:
        assert again.pool_id == pool.pool_id


def test_a_missing_file_is_refused_by_number(tmp_path: Path) -> None:
    with open_two(tmp_path / "pool") as pool:
        Path(pool.devices[0].path).unlink()
    with pytest.raises(DeviceError, match=r"has 2 devices and number 0 of it is missing.*--format"):
        open_two(tmp_path / "pool")


def test_a_file_of_another_pool_is_refused(tmp_path: Path) -> None:
    with open_two(tmp_path / "one") as one, open_two(tmp_path / "two") as two:
        Path(two.devices[1].path).replace(one.devices[1].path)
    with pytest.raises(DeviceError, match=rf"{one.devices[1].path} belongs to pool {two.pool_id}"):
        open_two(tmp_path / "one")


@pytest.mark.parametrize("left_bytes", [0, 4096, SHARE // 2])
def test_a_file_cut_off_is_refused_and_not_formatted(tmp_path: Path, left_bytes: int) -> None:
    with open_pool_dir(tmp_path / "pool", 2 * SHARE, 1, access=PRIVATE) as pool:
        path = pool.devices[0].path
    os.truncate(path, left_bytes)
    with pytest.raises(DeviceError, match=rf"{path} was cut off.*--format"):
        open_pool_dir(tmp_path / "pool", 2 * SHARE, 1, access=PRIVATE)
    assert Path(path).stat().st_size == left_bytes


def test_a_file_that_shrank_is_refused_with_both_sizes(tmp_path: Path) -> None:
    with open_pool_dir(tmp_path / "pool", 2 * SHARE, 1, access=PRIVATE) as pool:
        os.truncate(pool.devices[0].path, SHARE)
    with pytest.raises(DeviceError, match=r"has 17\.0 MiB but had 34\.0 MiB"):
        open_pool_dir(tmp_path / "pool", 2 * SHARE, 1, access=PRIVATE)


def test_a_wiped_superblock_is_refused(tmp_path: Path) -> None:
    with open_two(tmp_path / "pool") as pool:
        write(pool.devices[0].path, 0, bytes(4096))
    with pytest.raises(DeviceError, match=rf"{pool.devices[0].path} is blank, while"):
        open_two(tmp_path / "pool")


@pytest.mark.parametrize("format", [False, True])
def test_a_symlink_in_a_device_files_place_is_never_followed(tmp_path: Path, format: bool) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(SHARE))
    (tmp_path / "pool").mkdir(mode=0o700)
    (tmp_path / "pool" / "device-0-12345678.hc").symlink_to(victim)
    with pytest.raises(DeviceError, match=r"device-0-12345678\.hc is no regular file"):
        open_two(tmp_path / "pool", format=format)
    assert victim.read_bytes() == bytes(SHARE)


def test_a_folder_that_everybody_may_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool").chmod(0o777)
    with pytest.raises(DeviceError, match=rf"chmod o-w {tmp_path}/pool"):
        open_two(tmp_path / "pool")


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pool").write_bytes(b"")
    with pytest.raises(DeviceError, match=r"pool folder .*--pool-dir"):
        open_two(tmp_path / "pool")


# -- a format that is killed ---------------------------------------------------------------------------

# Dies at the n-th call that changes the disk, for n = 0, 1, 2 … until a start comes through. After each
# death it starts again without --format, and says what that gave.
SWEEP = """
import json, os, pathlib, signal, sys
from hypercache_daemon.devices import Access, DeviceError, open_pool_dir

root, format = pathlib.Path(sys.argv[1]), sys.argv[2] == "format"
SHARE = 17 << 20

def start(folder, format, prepare=None):
    with open_pool_dir(folder, 2 * SHARE, 2, format=format, access=Access(), prepare=prepare) as pool:
        return pool.pool_id, pool.formatted

def note(folder):
    return lambda pool_id: (folder / "catalog").write_text(pool_id)

def dying(call, left):
    def instead(*args, **kwargs):
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left.pop()
        return call(*args, **kwargs)
    return instead

def die_after(calls):
    left = [None] * calls
    for name in ("pwrite", "fsync", "posix_fallocate", "unlink", "rename", "fchmod", "mkdir"):
        setattr(os, name, dying(getattr(os, name), left))

def again(folder):
    try:
        pool_id, formatted = start(folder, False, note(folder))
    except DeviceError as error:
        return {"refused": str(error), "with_format": start(folder, True, note(folder))[1]}
    return {"formatted": formatted, "known": (folder / "catalog").read_text() == pool_id, "pool_id": pool_id}

def sweep():
    for calls in range(1000):
        folder = root / str(calls)
        old = start(folder, False, note(folder))[0] if format else None
        child = os.fork()
        if not child:
            die_after(calls)
            start(folder, format, note(folder))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        yield {"old": old, **again(folder)}
        for path in folder.iterdir():
            path.unlink()

print(json.dumps(list(sweep())))
"""


def swept(folder: Path, how: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-c", SWEEP, str(folder), how], check=True, capture_output=True, text=True
    )
    outcomes: list[dict[str, object]] = json.loads(done.stdout)
    print(f"{how}: killed at {len(outcomes)} steps")
    return outcomes


def test_a_first_format_killed_at_any_step_goes_on_unasked_and_with_its_catalog(tmp_path: Path) -> None:
    outcomes = swept(tmp_path, "first")
    assert len(outcomes) > 12
    assert not [outcome for outcome in outcomes if "refused" in outcome]
    assert all(outcome["known"] for outcome in outcomes), "the pool that is there is the one prepared for"
    assert [outcome["formatted"] for outcome in outcomes[:-1]] == [True] * (len(outcomes) - 1)


def test_a_format_over_a_pool_killed_at_any_step_gives_one_whole_pool_or_asks(tmp_path: Path) -> None:
    outcomes = swept(tmp_path, "format")
    assert len(outcomes) > 12
    for outcome in outcomes:
        if "refused" in outcome:
            assert "--format" in str(outcome["refused"])
            assert outcome["with_format"] is True
        else:
            assert outcome["known"]
            assert (
                outcome["formatted"] is True
                or outcome["pool_id"] == outcome["old"]
                or outcome is outcomes[-1]
            )
