"""The Unix socket: who may use it from its first instant, and what is never replaced or removed."""

from __future__ import annotations

import errno
import grp
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

import pytest
from umasks import umask

from hypercache_daemon.access import Access
from hypercache_daemon.server import SocketError, bind, remove_socket, socket_identity

MASKS = pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@MASKS
def test_only_the_owner_gets_in_whatever_the_umask(short_dir: Path, mask: int) -> None:
    with umask(mask), closing(bind(short_dir / "s", Access())):
        assert mode(short_dir / "s") == 0o600
        assert os.umask(mask) == mask, "the process's umask is as it was"


@MASKS
def test_a_group_gets_in_where_one_is_configured(short_dir: Path, mask: int) -> None:
    gid = some_group()
    with umask(mask), closing(bind(short_dir / "s", Access(gid))):
        assert mode(short_dir / "s") == 0o660
        assert (short_dir / "s").stat().st_gid == gid


@contextmanager
def access_seen(path: Path) -> Iterator[set[tuple[int, int]]]:
    """Mode and group of what is at `path` after each call into the kernel, or anything else in C."""
    seen: set[tuple[int, int]] = set()

    def look(_frame: FrameType, event: str, _called: object) -> None:
        if event == "c_return" and path.exists():
            seen.add((mode(path), path.stat().st_gid))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(before)


@MASKS
@pytest.mark.parametrize("is_for_a_group", [False, True], ids=["owner", "group"])
def test_no_instant_lets_in_anybody_else(short_dir: Path, mask: int, is_for_a_group: bool) -> None:
    gid = some_group() if is_for_a_group else None
    own = short_dir.stat().st_gid
    with umask(mask), access_seen(short_dir / "s") as seen:
        bind(short_dir / "s", Access(gid)).close()
    let_in = {(0o600, own)} if gid is None else {(0o600, own), (0o600, gid), (0o660, gid)}
    assert seen, "the socket was looked at"
    assert seen <= let_in


def some_group() -> int:
    """A group that this process may give a file to, and another than its own where there is one."""
    others = [group.gr_gid for group in grp.getgrall()] if os.geteuid() == 0 else os.getgroups()
    return next((gid for gid in others if gid != os.getegid()), os.getegid())


def test_the_folder_is_made_where_there_is_none(short_dir: Path) -> None:
    with umask(0), closing(bind(short_dir / "a" / "b" / "s", Access())):
        assert mode(short_dir / "a" / "b") == 0o755
        assert answers(short_dir / "a" / "b" / "s")


def test_a_socket_that_nobody_answers_is_replaced(short_dir: Path) -> None:
    path = short_dir / "s"
    bind(path, Access()).close()
    assert path.is_socket()
    assert not answers(path)
    with closing(bind(path, Access())):
        assert answers(path)


def test_a_socket_that_somebody_answers_is_refused_and_goes_on(short_dir: Path) -> None:
    path = short_dir / "s"
    with closing(bind(path, Access())):
        inode = path.stat().st_ino
        with pytest.raises(SocketError, match=f"already answers at {path}.*--socket"):
            bind(path, Access())
        assert path.stat().st_ino == inode
        assert answers(path)


def test_a_socket_whose_backlog_is_full_is_somebodys_all_the_same(short_dir: Path) -> None:
    path = short_dir / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        queued = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for waiting in queued:
            waiting.setblocking(False)
            waiting.connect_ex(str(path))
        with pytest.raises(SocketError, match="already answers"):
            bind(path, Access())
        assert path.is_socket()
        for waiting in queued:
            waiting.close()


def a_file(path: Path) -> None:
    path.write_text("precious")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_link_to_a_file(path: Path) -> None:
    path.with_name("target").write_text("precious")
    path.symlink_to("target")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def a_link_to_a_stale_socket(path: Path) -> None:
    bind(path.with_name("real"), Access()).close()
    path.symlink_to("real")


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "make", [a_file, a_folder, a_link_to_a_file, a_link_to_nothing, a_link_to_a_stale_socket, a_fifo]
)
def test_what_is_no_socket_is_left_alone(short_dir: Path, make: Callable[[Path], None]) -> None:
    path = short_dir / "s"
    make(path)
    before = path.lstat()
    with pytest.raises(SocketError, match=f"{path} exists and is not a socket"):
        bind(path, Access())
    after = path.lstat()
    assert (before.st_ino, before.st_mode, before.st_size) == (after.st_ino, after.st_mode, after.st_size)


def test_a_path_of_107_bytes_works_and_a_longer_one_is_refused_in_words(short_dir: Path) -> None:
    longest = short_dir / ("s" * (107 - len(str(short_dir)) - 1))
    with closing(bind(longest, Access())):
        assert answers(longest)
    with pytest.raises(SocketError, match="longer than 107 bytes; choose a shorter one"):
        bind(longest.with_name(longest.name + "s"), Access())
    umlauts = short_dir / ("ü" * 50)
    with pytest.raises(SocketError, match="longer than 107 bytes"):
        bind(umlauts, Access())


def test_a_folder_that_cannot_be_made_is_named(short_dir: Path) -> None:
    (short_dir / "file").write_text("")
    with pytest.raises(SocketError, match=r"file/s cannot be made: .*; give a --socket in a folder that "):
        bind(short_dir / "file" / "s", Access())


def test_a_group_that_cannot_be_given_leaves_no_socket(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    with pytest.raises(SocketError, match="start it as a member of --group, or as root"):
        bind(short_dir / "s", Access(gid=os.getgid()))
    assert not (short_dir / "s").exists()


def test_at_the_end_only_the_daemons_own_socket_is_removed(short_dir: Path) -> None:
    path = short_dir / "s"
    with closing(bind(path, Access())):
        own = socket_identity(path)
        remove_socket(path, own)
        assert not path.exists()
        remove_socket(path, own)
    with closing(bind(path, Access())):
        remove_socket(path, own)
        assert path.is_socket(), "another daemon's"
        own = socket_identity(path)
        path.chmod(0o666)  # as far as numbers go: the next socket gets the inode of one that was removed
        remove_socket(path, own)
        assert path.is_socket()
