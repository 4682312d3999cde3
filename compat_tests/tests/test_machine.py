"""Where the machine lacks something, what is lacking is named, and what can do without it does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from safety.places import kind, places

from hypercache_compat import disks
from hypercache_compat.loop_devices import can_make_loop_devices
from hypercache_compat.machine import lacks

PROGRAMS = ("losetup", "mkfs.ext4", "mount", "umount", "fsfreeze")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH of a root, with all that is asked for; a test takes away what it likes."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in PROGRAMS:
        (folder / name).symlink_to(shutil.which(name) or "/bin/false")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return folder


def test_all_that_is_lacking_is_named(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacks(*PROGRAMS, files=["/dev/null"]) == ""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert lacks("mount", "rabbit", files=["/dev/null", "/dev/rabbit"]) == (
        "root, the program rabbit (not on the PATH), /dev/rabbit (not there)"
    )


def test_without_losetup_the_safety_suite_works_on_plain_files_and_says_why(programs: Path) -> None:
    (programs / "losetup").unlink()
    assert not can_make_loop_devices()
    assert kind().startswith("plain files, since loop devices take the program losetup (not on the PATH)")
    with places(2) as made:
        assert made.devices == tuple(map(str, made.files))
        assert all(map(Path.is_file, made.files))


@pytest.mark.parametrize("program", ["mount", "umount"])
def test_without_a_program_to_mount_with_that_is_the_reason(programs: Path, program: str) -> None:
    (programs / program).unlink()
    words = f"the program {program} (not on the PATH)"
    assert disks.lacks_to_mount() == words
    assert disks.lacks_to_freeze().startswith(words)


@pytest.mark.parametrize("program", ["mkfs.ext4", "fsfreeze"])
def test_without_a_program_to_freeze_with_that_is_the_reason(programs: Path, program: str) -> None:
    (programs / program).unlink()
    assert disks.lacks_to_freeze().startswith(f"the program {program} (not on the PATH)")


def test_what_mounting_ends_with_is_the_reason_where_nothing_is_lacking(programs: Path) -> None:
    (programs / "mount").unlink()
    (programs / "mount").write_text("#!/bin/sh\necho mount: not in this house >&2\nexit 1\n")
    (programs / "mount").chmod(0o755)
    assert disks.lacks_to_mount() == "a machine that lets root do it (mount: not in this house)"
