"""The folder of the socket: others must not be able to put a socket of theirs in its place."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from identities import FREE_ID
from umasks import umask

from hypercache_daemon.access import Access
from hypercache_daemon.server import SocketError, bind


@pytest.fixture
def folder(short_dir: Path) -> Iterator[Path]:
    made = short_dir / "run"
    made.mkdir()
    yield made
    made.chmod(0o700)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (0o777, "everybody may write to the folder"),
        (0o702, "everybody may write to the folder"),
        (0o770, f"group {os.getegid()} may write to the folder"),
        (0o2775, f"group {os.getegid()} may write to the folder"),
    ],
)
def test_a_folder_in_which_others_may_replace_the_socket_is_refused(
    folder: Path, mode: int, words: str
) -> None:
    folder.chmod(mode)
    with pytest.raises(SocketError, match=f"^{words} {re.escape(str(folder))}.*choose a --socket"):
        bind(folder / "s", Access())
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777, 0o1770])
def test_a_folder_in_which_they_may_not_is_fine(
    folder: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder.chmod(mode)
    bind(folder / "s", Access()).close()
    assert caplog.text == ""


def test_a_folder_that_belongs_to_somebody_else_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(folder, FREE_ID, -1)
    else:  # only root can give a folder away; so be somebody else
        monkeypatch.setattr(os, "geteuid", lambda: FREE_ID)
    with pytest.raises(SocketError, match=f"{folder} belongs to user {folder.stat().st_uid}.*--socket"):
        bind(folder / "s", Access())
    assert list(folder.iterdir()) == []


def test_a_folder_above_in_which_others_may_move_things_is_named_in_the_log(
    folder: Path, short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "a").mkdir(mode=0o755)
    (short_dir / "link").symlink_to(folder / "a")
    folder.chmod(0o777)
    for socket_folder in (folder / "a", short_dir / "link"):
        caplog.clear()
        with closing(bind(socket_folder / "s", Access())):
            assert f"everybody may write to the folder {folder}" in caplog.text
            assert "choose another --socket" in caplog.text


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])
def test_folders_that_are_made_are_for_the_daemon_to_change_and_others_to_pass(
    short_dir: Path, mask: int
) -> None:
    with umask(mask):
        bind(short_dir / "a" / "b" / "s", Access()).close()
        assert os.umask(mask) == mask, "the process's umask is as it was"
    for made in (short_dir / "a", short_dir / "a" / "b"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o755
