"""A local folder as the backend: nothing leads out of it, and what can fail on a real file system."""

from __future__ import annotations

import os
import re
import resource
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from umasks import umask

from hypercache_compat.disks import lacks_to_mount
from hypercache_daemon.backend import Backend, BackendError, Target

MIB = 1024 * 1024
IS_ROOT = os.geteuid() == 0
NO_MOUNTS = lacks_to_mount()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "root-outside"
    folder.mkdir()
    (folder / "secret").write_bytes(b"secret")
    return folder


def place(backend: Backend, uri: str) -> Target:
    target = backend.upload_target(uri)
    assert target is not None
    return target


def read(backend: Backend, target: Target) -> bytes:
    size_bytes, pieces = backend.download(target)
    whole = b"".join(pieces)
    assert len(whole) == size_bytes
    return whole


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_a_link_that_stays_inside_is_followed(root: Path) -> None:
    (root / "blobs").mkdir()
    (root / "blobs/1").write_bytes(b"blob")
    (root / "snapshots").mkdir()
    (root / "snapshots/model").symlink_to("../blobs/1")
    (root / "latest").symlink_to("snapshots")
    backend = Backend(str(root))
    assert read(backend, place(backend, "hypercache://latest/model")) == b"blob"
    backend.upload(place(backend, "hypercache://latest/new"), [b"new"], 3)
    assert (root / "snapshots/new").read_bytes() == b"new"


@pytest.mark.parametrize("uri", ["hypercache://link/secret", "hypercache://file", "hypercache://far"])
def test_a_link_that_leads_out_is_refused_for_reading(root: Path, outside: Path, uri: str) -> None:
    (root / "link").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    (root / "far").symlink_to("../root-outside/secret")
    backend = Backend(str(root))
    target = place(backend, uri)
    with pytest.raises(BackendError, match="leads out of the allowed folder"):
        backend.size_bytes(target)
    with pytest.raises(BackendError, match="leads out of the allowed folder"):
        backend.download(target)


def test_a_folder_link_that_leads_out_is_refused_for_writing(root: Path, outside: Path) -> None:
    (root / "link").symlink_to(outside)
    backend = Backend(str(root))
    for name in ("link/new", "link/deep/new", "link/secret"):
        with pytest.raises(BackendError, match="leads out of the allowed folder"):
            backend.upload(place(backend, f"hypercache://{name}"), [b"x"], 1)
    assert files_in(outside) == ["secret"]
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]


def test_an_upload_over_a_link_replaces_the_link_and_not_what_it_leads_to(root: Path, outside: Path) -> None:
    (root / "file").symlink_to(outside / "secret")
    backend = Backend(str(root))
    backend.upload(place(backend, "hypercache://file"), [b"mine"], 4)
    assert (outside / "secret").read_bytes() == b"secret"
    assert not (root / "file").is_symlink()
    assert (root / "file").read_bytes() == b"mine"


def test_swapping_a_folder_for_a_link_while_it_is_read_shows_nothing_from_outside(
    root: Path, outside: Path
) -> None:
    (root / "a").mkdir()
    (root / "a/secret").write_bytes(b"inside")
    (root / "link").symlink_to(outside)
    backend = Backend(str(root))
    target = place(backend, "hypercache://a/secret")
    stop = threading.Event()
    swapper = threading.Thread(target=_swap_until, args=(root, stop))
    swapper.start()
    seen: Counter[bytes] = Counter()
    deadline = time.monotonic() + 60
    try:
        while seen.total() < 2000 or not (seen[b"inside"] and seen[b"refused"]):
            assert time.monotonic() < deadline, "the swap was never met"
            seen[_read_or_refused(backend, target)] += 1
    finally:
        stop.set()
        swapper.join()
    assert set(seen) <= {b"inside", b"refused", b"absent"}


def _swap_until(root: Path, stop: threading.Event) -> None:
    while not stop.is_set():
        (root / "a").rename(root / "b")
        (root / "link").rename(root / "a")
        (root / "a").rename(root / "link")
        (root / "b").rename(root / "a")


def _read_or_refused(backend: Backend, target: Target) -> bytes:
    try:
        return read(backend, target)
    except BackendError as error:
        return b"refused" if "leads out" in str(error) else b"absent"


def test_what_is_no_regular_file_is_absent_and_never_blocks(root: Path) -> None:
    (root / "folder").mkdir()
    os.mkfifo(root / "fifo")
    backend = Backend(str(root))
    for name in ("folder", "fifo"):
        target = place(backend, f"hypercache://{name}")
        assert backend.size_bytes(target) is None
        with pytest.raises(BackendError, match="not there"):
            backend.download(target)


def test_a_loop_of_links_is_an_error(root: Path) -> None:
    (root / "a").symlink_to("a")
    backend = Backend(str(root))
    with pytest.raises(BackendError, match="Too many levels of symbolic links"):
        backend.size_bytes(place(backend, "hypercache://a"))


def test_a_folder_that_is_not_mounted_is_an_error_and_not_an_empty_backend(tmp_path: Path) -> None:
    backend = Backend(str(tmp_path / "away"))
    target = place(backend, "hypercache://x")
    for call in (
        lambda: backend.size_bytes(target),
        lambda: backend.download(target),
        lambda: backend.upload(target, [b"x"], 1),
    ):
        with pytest.raises(BackendError, match="does not exist; create or mount it"):
            call()
    assert not (tmp_path / "away").exists()


def test_a_file_where_a_folder_is_needed_and_the_reverse_are_errors(root: Path) -> None:
    backend = Backend(str(root))
    backend.upload(place(backend, "hypercache://a"), [b"x"], 1)
    backend.upload(place(backend, "hypercache://b/c"), [b"x"], 1)
    with pytest.raises(BackendError, match="Not a directory"):
        backend.upload(place(backend, "hypercache://a/b"), [b"x"], 1)
    with pytest.raises(BackendError, match="Is a directory"):
        backend.upload(place(backend, "hypercache://b"), [b"x"], 1)
    assert backend.size_bytes(place(backend, "hypercache://a/b")) is None
    assert files_in(root) == ["a", "b/c"]


@pytest.mark.parametrize(
    ("root_mode", "file_mode", "folder_mode"), [(0o700, 0o600, 0o700), (0o775, 0o660, 0o770)]
)
def test_objects_are_the_owners_alone_and_the_groups_where_the_root_is(
    root: Path, root_mode: int, file_mode: int, folder_mode: int
) -> None:
    root.chmod(root_mode)
    backend = Backend(str(root))
    seen: list[int] = []

    def pieces() -> Iterator[bytes]:
        (temporary,) = (root / "deep").iterdir()
        seen.append(stat.S_IMODE(temporary.stat().st_mode))
        yield b"x"

    with umask(0):
        backend.upload(place(backend, "hypercache://deep/x"), pieces(), 1)
    assert seen == [file_mode]
    assert stat.S_IMODE((root / "deep/x").stat().st_mode) == file_mode
    assert stat.S_IMODE((root / "deep").stat().st_mode) == folder_mode


def test_a_file_that_shrinks_grows_or_changes_while_it_is_read_is_an_error(root: Path) -> None:
    backend = Backend(str(root))
    target = place(backend, "hypercache://x")
    size_bytes = 9 * MIB
    for change in (_shrink, _grow, _overwrite_first_byte):
        (root / "x").write_bytes(os.urandom(size_bytes))
        _, pieces = backend.download(target)
        received = [next(pieces)]
        change(root / "x")
        with pytest.raises(BackendError, match="changed while it was read"):
            received.extend(pieces)
        assert sum(map(len, received)) < size_bytes


def _shrink(path: Path) -> None:
    os.truncate(path, 5 * MIB)


def _grow(path: Path) -> None:
    os.truncate(path, 9 * MIB + 1)


def _overwrite_first_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"?")


def test_a_download_goes_on_with_the_object_it_began_with_when_another_replaces_it(root: Path) -> None:
    backend = Backend(str(root))
    target = place(backend, "hypercache://x")
    backend.upload(target, [b"a" * (9 * MIB)], 9 * MIB)
    _, pieces = backend.download(target)
    first = next(pieces)
    backend.upload(target, [b"b" * (9 * MIB)], 9 * MIB)
    assert first + b"".join(pieces) == b"a" * (9 * MIB)


def test_a_download_that_nobody_reads_leaves_no_descriptor_open(root: Path) -> None:
    backend = Backend(str(root))
    target = place(backend, "hypercache://x")
    backend.upload(target, [b"a" * (9 * MIB)], 9 * MIB)
    before = len(list(Path("/proc/self/fd").iterdir()))
    untouched = backend.download(target)
    begun = backend.download(target)
    next(begun[1])
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 2
    del untouched, begun
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.fixture
def read_only(root: Path) -> Iterator[Path]:
    """A folder that even this user may not write to."""
    if not IS_ROOT:
        root.chmod(0o500)
        yield root
        root.chmod(0o700)
        return
    if NO_MOUNTS:
        pytest.fail(f"root may write to any folder but on a file system of its own: that takes {NO_MOUNTS}")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(root)], check=True)
    yield root
    subprocess.run(["umount", str(root)], check=True)


def test_a_read_only_folder_is_an_error_that_says_so(read_only: Path) -> None:
    backend = Backend(str(read_only))
    for name in ("x", "deep/x"):
        with pytest.raises(
            BackendError, match=r"cannot upload file:///.*x: (Read-only file|Permission denied)"
        ):
            backend.upload(place(backend, f"hypercache://{name}"), [b"x"], 1)


@pytest.fixture
def full() -> Iterator[Path]:
    """A folder that holds less than 2 MiB: a small file system where we may mount, else a file size limit."""
    folder = Path(tempfile.mkdtemp(prefix="hc", dir="/tmp"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not NO_MOUNTS:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    yield folder
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if not NO_MOUNTS:
        subprocess.run(["umount", str(folder)], check=True)
    shutil.rmtree(folder)


def test_a_full_file_system_is_an_error_and_the_former_object_stays_whole(full: Path) -> None:
    backend = Backend(str(full))
    target = place(backend, "hypercache://x")
    backend.upload(target, [b"old"], 3)
    with pytest.raises(BackendError, match=r"No space left|File too large"):
        backend.upload(target, [b"n" * MIB, b"n" * MIB], 2 * MIB)
    assert files_in(full) == ["x"]
    assert read(backend, target) == b"old"
    backend.upload(target, [b"next"], 4)
    assert read(backend, target) == b"next"


def test_a_temporary_file_that_cannot_be_removed_is_logged_and_the_first_error_reported(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def pieces() -> Iterator[bytes]:
        (temporary,) = root.iterdir()
        temporary.unlink()
        yield b"too long"

    backend = Backend(str(root))
    with pytest.raises(BackendError, match="have more bytes, not 1"):
        backend.upload(place(backend, "hypercache://x"), pieces(), 1)
    assert re.search("temporary file %tmp-[0-9a-f]+ stays behind: No such file", caplog.text)


def test_uploads_of_one_object_at_once_leave_one_of_them_whole(root: Path) -> None:
    backend = Backend(str(root))
    target = place(backend, "hypercache://deep/er/x")
    contents = [bytes([number]) * (3 * MIB) for number in range(8)]
    threads = [
        threading.Thread(target=backend.upload, args=(target, [content[:MIB], content[MIB:]], 3 * MIB))
        for content in contents
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (root / "deep/er/x").read_bytes() in contents
    assert files_in(root) == ["deep/er/x"]
