"""Devices that the operator gives, here as files: what is formatted, kept, and refused by name."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hypercache_daemon import claims
from hypercache_daemon.block_info import Host
from hypercache_daemon.devices import (
    MIN_DEVICE_BYTES,
    RESERVED_BYTES,
    Access,
    DeviceError,
    open_devices,
)

MIB = 1 << 20
SIZE = 20 * MIB
PRIVATE = Access()

Make = Callable[..., str]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a sparse file and gives its path."""

    def one(name: str = "a", size_bytes: int = SIZE) -> str:
        path = tmp_path / name
        with path.open("xb") as file:
            file.truncate(size_bytes)
        path.chmod(0o644)
        return str(path)

    yield one
    shutil.rmtree(tmp_path)


def patch(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        file.write(data)


def content(path: str) -> bytes:
    return Path(path).read_bytes()


# -- formatting ----------------------------------------------------------------------------------------


def test_blank_files_become_a_pool_and_stay_one(make: Make) -> None:
    paths = [make("a"), make("b", SIZE + 4095)]
    with open_devices(paths, access=PRIVATE) as pool:
        assert pool.formatted
        assert [(device.index, device.path, device.size_bytes) for device in pool.devices] == [
            (0, paths[0], SIZE),
            (1, paths[1], SIZE),
        ]
        assert pool.devices[1].info.size_bytes == SIZE + 4095
        assert pool.devices[0].info.existing_fs is None
    with open_devices(paths, access=PRIVATE) as again:
        assert not again.formatted
        assert (again.pool_id, again.devices) == (pool.pool_id, pool.devices)


def test_relative_paths_become_absolute(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("a")
    monkeypatch.chdir(tmp_path)
    with open_devices(["a"], access=PRIVATE) as pool:
        assert pool.devices[0].path == str(tmp_path / "a")


@pytest.mark.parametrize("offset", [0, 4096, MIB - 1, -1, -MIB], ids=str)
def test_one_byte_of_unknown_data_is_refused_and_kept(make: Make, offset: int) -> None:
    path = make()
    patch(path, offset, b"x")
    before = content(path)
    with pytest.raises(DeviceError, match=rf"{path} holds data of a kind unknown here.*--format"):
        open_devices([path], access=PRIVATE)
    assert content(path) == before


def test_one_foreign_device_keeps_its_blank_neighbours_blank(make: Make) -> None:
    paths = [make("a"), make("b"), make("c")]
    patch(paths[1], 0, b"XFSB")
    with pytest.raises(DeviceError, match=rf"{paths[1]} holds something already \(xfs\)"):
        open_devices(paths, access=PRIVATE)
    assert [content(path).strip(b"\0") for path in paths] == [b"", b"XFSB", b""]


def test_format_replaces_foreign_data_and_leaves_no_mark_of_it(make: Make) -> None:
    path = make()
    for offset in (0, 510, 0x438, 65600, -512, -8192, -65536):
        patch(path, offset, b"\xaa\x55 some mark")
    with open_devices([path], format=True, access=PRIVATE) as pool:
        assert pool.formatted
    data = content(path)
    assert data[4096:RESERVED_BYTES].strip(b"\0") == data[-MIB:].strip(b"\0") == b""
    with open_devices([path], access=PRIVATE) as again:
        assert again.pool_id == pool.pool_id


def test_format_makes_a_new_pool_of_an_old_one(make: Make) -> None:
    path = make()
    with open_devices([path], access=PRIVATE) as old:
        pass
    with open_devices([path], format=True, access=PRIVATE) as new:
        assert new.formatted
        assert new.pool_id != old.pool_id


def test_a_format_whose_preparation_fails_goes_on_unasked_with_the_same_id(make: Make) -> None:
    paths = [make("a"), make("b")]
    seen: list[str] = []

    def fail(pool_id: str) -> None:
        seen.append(pool_id)
        raise OSError(28, "no space for the catalog")

    with pytest.raises(OSError, match="no space for the catalog"):
        open_devices(paths, access=PRIVATE, prepare=fail)
    with open_devices(paths, access=PRIVATE, prepare=seen.append) as pool:
        assert pool.formatted
    with open_devices(paths, access=PRIVATE, prepare=seen.append):
        pass
    assert seen == [pool.pool_id] * 2, "prepared again after the failure, and never once it is there"


# -- refusing ------------------------------------------------------------------------------------------


def test_no_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="--device"):
        open_devices([], access=PRIVATE)


def odd_things(tmp_path: Path) -> dict[str, tuple[str, str]]:
    os.mkfifo(tmp_path / "pipe")
    return {
        "missing": (str(tmp_path / "none"), "does not exist"),
        "folder": (str(tmp_path), "neither a block device nor a regular file"),
        "pipe": (str(tmp_path / "pipe"), "neither a block device nor a regular file"),
        "char": ("/dev/zero", "neither a block device nor a regular file"),
        "below a file": ("/dev/zero/x", "cannot open"),
    }


@pytest.mark.parametrize("name", ["missing", "folder", "pipe", "char", "below a file"])
@pytest.mark.parametrize("format", [False, True])
def test_what_cannot_be_a_device_is_refused_by_name(tmp_path: Path, name: str, format: bool) -> None:
    path, words = odd_things(tmp_path)[name]
    with pytest.raises(DeviceError, match=words) as refused:
        open_devices([path], format=format, access=PRIVATE)
    assert path in str(refused.value)


@pytest.mark.parametrize("format", [False, True])
def test_a_device_too_small_is_refused_by_name(make: Make, format: bool) -> None:
    paths = [make("a"), make("b", MIN_DEVICE_BYTES - 1)]
    with pytest.raises(
        DeviceError, match=rf"{paths[1]} is too small, it has 17\.0 MiB: .* at least 17\.0 MiB"
    ):
        open_devices(paths, format=format, access=PRIVATE)
    os.truncate(paths[1], MIN_DEVICE_BYTES)
    open_devices(paths, format=format, access=PRIVATE).close()


@pytest.mark.parametrize("how", ["same path", "symlink", "hard link"])
@pytest.mark.parametrize("format", [False, True])
def test_a_device_given_twice_is_refused(make: Make, tmp_path: Path, how: str, format: bool) -> None:
    path, twin = make(), tmp_path / "twin"
    match how:
        case "same path":
            twin = Path(path)
        case "symlink":
            twin.symlink_to(path)
        case _:
            twin.hardlink_to(path)
    with pytest.raises(DeviceError, match=rf"{twin} and {path} are the same device"):
        open_devices([path, str(twin)], format=format, access=PRIVATE)


@pytest.mark.parametrize("format", [False, True])
def test_a_link_that_clients_do_not_follow_is_refused(make: Make, tmp_path: Path, format: bool) -> None:
    path, link = make(), tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(DeviceError, match=rf"{link} is a symbolic link.* only in /dev: .* to, {path}$"):
        open_devices([str(link)], format=format, access=PRIVATE)
    open_devices([path], access=PRIVATE).close()


@pytest.mark.parametrize("format", [False, True])
def test_two_daemons_never_share_a_device(make: Make, format: bool) -> None:
    shared, other = make("shared"), make("other")
    in_use = pytest.raises(DeviceError, match=rf"{shared} is in use by another hypercached")
    with open_devices([shared], access=PRIVATE) as pool, in_use:
        open_devices([other, shared], format=format, access=PRIVATE)
    with open_devices([shared], access=PRIVATE) as again:
        assert again.pool_id == pool.pool_id
    open_devices([other], access=PRIVATE).close()  # a refused start keeps hold of nothing


@pytest.mark.parametrize("becomes", ["another file", "a pipe"])
def test_a_path_that_changes_between_check_and_open_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    path, other = make(), make("other")
    really_open = os.open

    def late(name: str, flags: int) -> int:
        Path(path).unlink()
        if becomes == "a pipe":
            os.mkfifo(path)
        else:
            Path(other).replace(path)
        return really_open(name, flags)

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(DeviceError, match=rf"{path} became another device"):
        open_devices([path], access=PRIVATE)
    monkeypatch.undo()
    assert becomes == "a pipe" or content(path) == bytes(SIZE)


def test_devices_in_another_order_are_refused_with_the_right_one(make: Make) -> None:
    paths = [make("a"), make("b"), make("c")]
    open_devices(paths, access=PRIVATE).close()
    swapped = [paths[2], paths[1], paths[0]]
    with pytest.raises(DeviceError, match=rf"order: {', '.join(paths)}$"):
        open_devices(swapped, access=PRIVATE)


def test_a_part_of_a_pool_is_refused(make: Make) -> None:
    paths = [make("a"), make("b"), make("c")]
    open_devices(paths, access=PRIVATE).close()
    with pytest.raises(DeviceError, match=r"has 3 devices and number 1, 2 of it is missing"):
        open_devices(paths[:1], access=PRIVATE)


def test_devices_of_two_pools_are_refused(make: Make) -> None:
    a, b = make("a"), make("b")
    open_devices([a], access=PRIVATE).close()
    open_devices([b], access=PRIVATE).close()
    with pytest.raises(DeviceError, match=rf"{b} belongs to pool \w+, but {a} to pool"):
        open_devices([a, b], access=PRIVATE)


def test_a_blank_device_in_the_place_of_one_is_refused_and_stays_blank(make: Make) -> None:
    a, b, new = make("a"), make("b"), make("new")
    open_devices([a, b], access=PRIVATE).close()
    for paths in ([a, new], [a, b, new]):
        with pytest.raises(DeviceError, match=rf"{new} is blank, while {a} belongs to a pool"):
            open_devices(paths, access=PRIVATE)
    assert content(new) == bytes(SIZE)


def test_a_copy_of_a_device_is_refused(make: Make, tmp_path: Path) -> None:
    a, b = make("a"), make("b")
    open_devices([a, b], access=PRIVATE).close()
    copy = shutil.copy(a, tmp_path / "copy")
    with pytest.raises(DeviceError, match=rf"{copy} is a copy of {a}"):
        open_devices([a, str(copy)], access=PRIVATE)


@pytest.mark.parametrize("size_bytes", [SIZE - MIB, SIZE + MIB])
def test_a_resized_device_is_refused(make: Make, size_bytes: int) -> None:
    path = make()
    open_devices([path], access=PRIVATE).close()
    os.truncate(path, size_bytes)
    with pytest.raises(DeviceError, match=rf"{path} has \S+ MiB but had 20\.0 MiB \({SIZE} bytes\)"):
        open_devices([path], access=PRIVATE)


def test_a_torn_superblock_is_refused_and_kept(make: Make) -> None:
    path = make()
    open_devices([path], access=PRIVATE).close()
    patch(path, 512, b"torn")
    before = content(path)
    with pytest.raises(DeviceError, match=rf"superblock of {path} is damaged"):
        open_devices([path], access=PRIVATE)
    assert content(path) == before


def test_a_swap_file_in_use_is_refused_even_with_format(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make("my swap")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("")
    line = f"{path} file 20476 0 -2\n".replace("my swap", "my\\040swap")
    (tmp_path / "proc/swaps").write_text("Filename Type Size Used Priority\n" + line)
    monkeypatch.setattr(claims, "HOST", Host(proc=tmp_path / "proc"))
    with pytest.raises(DeviceError, match=r"my swap cannot be used, since it is in use as swap space"):
        open_devices([path], format=True, access=PRIVATE)


# -- access --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("access", "expected"), [(PRIVATE, 0o600), (Access(gid=os.getgid()), 0o660)])
def test_a_given_file_gets_the_daemons_access(make: Make, access: Access, expected: int) -> None:
    path = make()
    with open_devices([path], access=access):
        state = Path(path).stat()
        assert (stat.S_IMODE(state.st_mode), state.st_gid) == (expected, os.getgid())


def test_a_refused_file_keeps_its_mode(make: Make) -> None:
    path = make()
    patch(path, 0, b"mine")
    with pytest.raises(DeviceError):
        open_devices([path], access=PRIVATE)
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o644


AS_NOBODY = """
import os, sys
from hypercache_daemon.devices import Access, DeviceError, open_devices
path, gid = sys.argv[1], int(sys.argv[2])
if os.geteuid() == 0:
    os.setgroups([]); os.setegid(65534); os.seteuid(65534)
try:
    open_devices([path], access=Access(gid if gid >= 0 else None)).close()
    print("opened", oct(os.stat(path).st_mode & 0o777))
except DeviceError as error:
    print(error)
"""


def as_nobody(path: str, gid: int = -1) -> str:
    """What a daemon without privileges says; one that tests start as root gives them up first."""
    command = [sys.executable, "-c", AS_NOBODY, path, str(gid)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_group_that_cannot_be_set_is_refused(open_make: Make) -> None:
    path = open_make()
    stranger = next(gid for gid in range(3, 1000) if gid not in (*os.getgroups(), os.getgid()))
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    said = as_nobody(path, stranger)
    assert re.match(rf"cannot set the group and mode of {path}: .*: run hypercached as a member", said)


@pytest.fixture
def open_make(make: Make, tmp_path: Path) -> Make:
    """Like make, in folders that any user may enter."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    return make


def test_a_file_that_the_daemon_may_not_open_is_refused_by_name(open_make: Make) -> None:
    path = open_make()
    Path(path).chmod(0o000)
    assert re.match(rf"cannot open {path}: Permission denied: give one that", as_nobody(path))
