"""The RAM tier's files: names, modes, whose folder it is, and what a start sweeps away."""

from __future__ import annotations

import mmap
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from umasks import umask

from hypercache_daemon.devices import Access, DeviceError, RamFiles, read_chunk, write_chunk

PRIVATE = Access()
GROUP = Access(gid=os.getgid())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ram"


@pytest.fixture
def ram(folder: Path) -> Iterator[RamFiles]:
    with closing(RamFiles(folder, PRIVATE)) as files:
        yield files


def mode(path: Path | str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- names and modes -----------------------------------------------------------------------------------


def test_paths_are_absolute_and_end_in_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(RamFiles(Path("ram"), PRIVATE)) as ram:
        assert ram.path(0) == f"{tmp_path}/ram/0000000000000000.shm"
        assert ram.path(2**64 - 1) == f"{tmp_path}/ram/ffffffffffffffff.shm"


@pytest.mark.parametrize("serial", [-1, 2**64])
def test_a_serial_out_of_range_is_no_name(ram: RamFiles, serial: int) -> None:
    for use in (ram.path, ram.create, lambda serial: ram.remove([serial])):
        with pytest.raises(ValueError, match="serial"):
            use(serial)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
@pytest.mark.parametrize(
    ("access", "file_mode", "folder_mode"), [(PRIVATE, 0o600, 0o700), (GROUP, 0o660, 0o750)]
)
def test_modes_are_right_under_any_umask(
    folder: Path, mask: int, access: Access, file_mode: int, folder_mode: int
) -> None:
    folder.mkdir(mode=0o700)
    with umask(mask), closing(RamFiles(folder, access)) as ram:
        ram.create(7)
        assert (mode(folder), mode(ram.path(7))) == (folder_mode, file_mode)
        assert Path(ram.path(7)).stat().st_size == 0


SEEN_MODES = """
import os, sys, pathlib
from hypercache_daemon.devices import Access, RamFiles

seen = []
def seeing(call):
    def instead(*args, **kwargs):
        result = call(*args, **kwargs)
        if ram:
            state = os.stat(ram[0].path(7))
            seen.append((state.st_mode & 0o777, state.st_gid))
        return result
    return instead

ram = []
os.umask(0)
gid = int(sys.argv[2])
ram.append(RamFiles(pathlib.Path(sys.argv[1]), Access(gid=gid)))
for name in ("open", "fchmod", "fchown", "close"):
    setattr(os, name, seeing(getattr(os, name)))
ram[0].create(7)
allowed = {(0o600, os.getgid()), (0o600, gid), (0o660, gid)}
assert len(seen) >= 3 and set(seen) <= allowed, seen
print("narrow", seen[-1])
"""


def test_no_instant_lets_in_anybody_else(folder: Path) -> None:
    """After every call that makes or changes the file, under umask 0."""
    gid = next(iter([gid for gid in os.getgroups() if gid != os.getgid()] or [os.getgid() + 1]))
    if os.geteuid() != 0 and gid not in os.getgroups():
        gid = os.getgid()
    command = [sys.executable, "-c", SEEN_MODES, str(folder), str(gid)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said == f"narrow ({0o660}, {gid})\n"


def test_a_name_is_never_used_twice(ram: RamFiles) -> None:
    ram.create(1)
    write_chunk(ram.path(1), 0, b"kept")
    with pytest.raises(FileExistsError):
        ram.create(1)
    assert read_chunk(ram.path(1), 0, 4) == b"kept"


def test_a_symlink_in_a_files_place_is_never_followed(ram: RamFiles, folder: Path, tmp_path: Path) -> None:
    Path(ram.path(1)).symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        ram.create(1)
    assert not (tmp_path / "victim").exists()


def test_a_file_whose_group_cannot_be_set_is_not_left_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(RamFiles(folder, PRIVATE)) as ram:
        monkeypatch.setattr(ram, "_access", Access(gid=(1 << 32) - 2))
        monkeypatch.setattr(os, "fchown", refuse)
        with pytest.raises(PermissionError):
            ram.create(1)
        assert names(folder) == []


def refuse(*args: object) -> None:
    raise PermissionError(1, "Operation not permitted")


# -- bytes ---------------------------------------------------------------------------------------------


def test_a_removed_file_stays_whole_for_who_has_it_mapped(ram: RamFiles) -> None:
    ram.create(1)
    write_chunk(ram.path(1), 0, b"x" * 8192)
    with open(ram.path(1), "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        ram.remove([1])
        assert mapped[:] == b"x" * 8192
    assert not Path(ram.path(1)).exists()


def test_removing_what_is_gone_is_fine(ram: RamFiles, folder: Path) -> None:
    ram.create(1)
    ram.create(3)
    ram.remove(iter([1, 2, 1]))
    assert names(folder) == ["0000000000000003.shm"]


def test_there_is_room_for_what_the_file_system_gives_to_us_and_for_what_is_there(
    ram: RamFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(fd: int) -> os.statvfs_result:
        assert os.path.sameopenfile(fd, opened)
        return os.statvfs_result((8192, 4096, 1000, 99, 10, 7, 7, 7, 0, 255))

    opened = os.open(folder, os.O_RDONLY)
    monkeypatch.setattr(os, "fstatvfs", small)
    assert ram.room_bytes() == 10 * 4096
    ram.create(1)
    write_chunk(ram.path(1), 0, bytes(4097))
    (folder / "notes.txt").write_bytes(bytes(4096))
    assert ram.room_bytes() == 12 * 4096
    os.close(opened)


# -- what a start finds --------------------------------------------------------------------------------


def test_a_start_keeps_what_objects_own_and_sweeps_the_rest(folder: Path) -> None:
    with closing(RamFiles(folder, PRIVATE)) as ram:
        for serial, size_bytes in ((1, 100), (2, 100), (3, 99), (4, 0), (5, 100)):
            ram.create(serial)
            write_chunk(ram.path(serial), 0, bytes(size_bytes))
    with closing(RamFiles(folder, PRIVATE)) as ram:
        assert ram.lost({1: 100, 2: 64, 3: 100, 6: 100}) == {3, 6}
        assert names(folder) == [f"{serial:016x}.shm" for serial in (1, 2, 3, 4, 5)]
        ram.sweep({1, 2})
        assert names(folder) == [f"{serial:016x}.shm" for serial in (1, 2)]
        assert read_chunk(ram.path(1), 0, 100) == bytes(100)


def test_a_sweep_never_touches_names_that_are_not_ours(ram: RamFiles, folder: Path) -> None:
    strangers = [
        "notes.txt",
        "1.shm",
        "000000000000000A.shm",
        "00000000000000001.shm",
        "0000000000000001.shm.bak",
        "x0000000000000001.shm",
        "0000000000000001.shm\n",
    ]
    for name in strangers:
        (folder / name).write_bytes(b"keep")
    (folder / "0000000000000002.shm").mkdir()
    (folder / "0000000000000003.shm").symlink_to(folder / "notes.txt")
    ram.sweep(set())
    assert names(folder) == sorted([*strangers, "0000000000000002.shm"])
    assert (folder / "notes.txt").read_bytes() == b"keep"


def test_what_is_no_file_holds_no_object(ram: RamFiles, folder: Path) -> None:
    (folder / "0000000000000001.shm").symlink_to("/etc/passwd")
    (folder / "0000000000000002.shm").mkdir()
    os.mkfifo(folder / "0000000000000003.shm")
    assert ram.lost({1: 1, 2: 1, 3: 0}) == {1, 2, 3}


def test_kept_files_get_the_access_of_today(folder: Path) -> None:
    with closing(RamFiles(folder, GROUP)) as ram:
        ram.create(1)
    with closing(RamFiles(folder, PRIVATE)) as ram:
        ram.sweep({1})
        assert (mode(ram.path(1)), mode(folder)) == (0o600, 0o700)


# -- the folder ----------------------------------------------------------------------------------------


def test_two_daemons_never_share_a_folder(folder: Path, ram: RamFiles) -> None:
    ram.create(1)
    with pytest.raises(DeviceError, match=rf"{folder} is in use by another hypercached"):
        RamFiles(folder, PRIVATE)
    assert names(folder) == ["0000000000000001.shm"]


def test_a_folder_that_serves_others_keeps_its_mode(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    RamFiles(folder, GROUP).close()
    assert mode(folder) == 0o755


@pytest.mark.parametrize("shared", [0o1777, 0o770])
def test_a_folder_in_which_others_may_make_files_is_refused_and_kept(folder: Path, shared: int) -> None:
    """Somebody may well give /dev/shm itself."""
    folder.mkdir()
    folder.chmod(shared)
    with pytest.raises(DeviceError, match=rf"others may make files in the RAM folder {folder}.*--ram-dir"):
        RamFiles(folder, PRIVATE)
    assert stat.S_IMODE(folder.stat().st_mode) == shared


def test_a_symlink_is_no_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeviceError, match=rf"{folder} is a symlink or no folder.*--ram-dir"):
        RamFiles(folder, PRIVATE)


def test_a_file_is_no_folder(folder: Path) -> None:
    folder.write_bytes(b"")
    with pytest.raises(DeviceError, match=rf"{folder} is a symlink or no folder.*--ram-dir"):
        RamFiles(folder, PRIVATE)


def test_a_folder_below_one_that_is_missing_is_refused(folder: Path) -> None:
    with pytest.raises(DeviceError, match=r"cannot make the RAM folder .*--ram-dir"):
        RamFiles(folder / "deeper", PRIVATE)


AS_NOBODY = """
import os, pathlib, sys
from hypercache_daemon.devices import Access, DeviceError, RamFiles
if os.geteuid() == 0:
    os.setgroups([]); os.setegid(65534); os.seteuid(65534)
elif sys.argv[2:]:
    another = os.geteuid() + 1
    os.geteuid = lambda: another
try:
    RamFiles(pathlib.Path(sys.argv[1]), Access())
except DeviceError as error:
    print(error)
"""


def as_nobody(folder: str, *pretend: str) -> str:
    """What a daemon of another user says; only root can make one, and anybody else pretends."""
    command = [sys.executable, "-c", AS_NOBODY, folder, *pretend]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_folder_of_another_user_is_refused() -> None:
    """As in /dev/shm, where anybody may make a folder of the name that we would use."""
    with tempfile.TemporaryDirectory(prefix="hc", dir="/tmp") as made:
        Path(made).chmod(0o755)
        said = as_nobody(made, "pretend")
    assert re.match(rf"the RAM folder {made} belongs to user {os.geteuid()}, not to .*--ram-dir", said)


def test_a_folder_that_cannot_be_opened_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="hc", dir="/tmp") as made:
        Path(made).chmod(0o000)
        said = as_nobody(made)
        Path(made).chmod(0o700)
    assert said == f"cannot open the RAM folder {made}: Permission denied: give another --ram-dir\n"
