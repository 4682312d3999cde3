"""What every kind of backend keeps to, S3 over a real API included; and a server that hangs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from hypercache_daemon.backend import Backend, BackendError, Target

MIB = 1024 * 1024
BUCKET = "bucket"


@dataclass
class Server:
    """A running S3 server."""

    process: subprocess.Popen[str]
    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        return s3_options(self.endpoint)

    def other_client(self) -> Any:
        """Somebody else who uses the same bucket."""
        return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False, **self.options)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """It is there, but answers nothing."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


def s3_options(endpoint: str) -> dict[str, Any]:
    return {
        "endpoint_url": endpoint,
        "key": "AKIDEXAMPLE",
        "secret": "hush-hush",
        "client_kwargs": {"region_name": "us-east-1"},
    }


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        found = next(match for line in lines if (match := re.search(r"Running on (http://\S+)", line)))
        drain = threading.Thread(target=lambda: [None for _ in lines])  # a full pipe would stop it
        drain.start()
        running = Server(process, found[1])
        running.other_client().call_s3("create_bucket", Bucket=BUCKET)
        yield running
        process.kill()
        drain.join()


MakeBackend = Callable[[], Backend]


@pytest.fixture(params=["local", "memory", "s3"])
def make_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeBackend]:
    """Makes backends on one new store."""
    match request.param:
        case "local":
            yield lambda: Backend(str(tmp_path))
        case "memory":
            url = f"memory://{uuid.uuid4().hex}"
            yield lambda: Backend(url)
            memory = fsspec.filesystem("memory")
            if memory.exists(url):
                memory.rm(url, recursive=True)
        case _:
            server: Server = request.getfixturevalue("server")
            url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
            yield lambda: Backend(url, storage_options=server.options)


def place(backend: Backend, uri: str = "hypercache://folder/x") -> Target:
    target = backend.upload_target(uri)
    assert target is not None
    return target


def in_pieces(whole: bytes, piece_bytes: int = 4 * MIB) -> list[bytes]:
    return [whole[start : start + piece_bytes] for start in range(0, len(whole), piece_bytes)]


def upload(backend: Backend, whole: bytes, uri: str = "hypercache://folder/x") -> None:
    sha256 = hashlib.sha256(whole).hexdigest().upper()
    backend.upload(place(backend, uri), in_pieces(whole), len(whole), sha256)


def read(backend: Backend, target: Target) -> bytes:
    size_bytes, pieces = backend.download(target)
    received = list(pieces)
    assert max(map(len, received), default=0) <= 4 * MIB
    assert size_bytes == sum(map(len, received))
    return b"".join(received)


@pytest.mark.parametrize("size_bytes", [0, 1, 4 * MIB + 1, 17 * MIB, 36 * MIB + 3])
def test_what_was_uploaded_is_downloaded(make_backend: MakeBackend, size_bytes: int) -> None:
    whole = os.urandom(size_bytes)
    upload(make_backend(), whole)
    reader = make_backend()
    assert reader.size_bytes(place(reader)) == size_bytes
    assert read(reader, place(reader)) == whole


def test_what_is_not_there_is_absent_and_a_folder_is_no_object(make_backend: MakeBackend) -> None:
    backend = make_backend()
    upload(backend, b"abc", "hypercache://a/b/c")
    for uri in ("hypercache://none", "hypercache://a/b/c2", "hypercache://a/b", "hypercache://a/b/c/d"):
        assert backend.size_bytes(place(backend, uri)) is None
        with pytest.raises(BackendError, match=r"cannot download \w+:///?\S+: it is not there"):
            backend.download(place(backend, uri))


def test_names_that_differ_in_dangerous_parts_only_are_different_objects(make_backend: MakeBackend) -> None:
    backend = make_backend()
    names = [
        "a",
        "a/",
        "/a",
        "//a",
        "../a",
        "./a",
        "a%",
        "a%25",
        "a?versionId=1",
        "a?",
        "a\\b",
        "a b",
        "a+b",
        "é",
    ]
    uris = [f"hypercache://dir-{number}/{name}" for number, name in enumerate(names)]
    uris += [
        "hypercache://q/a",
        "hypercache://q/%61",
        "hypercache://q/a?versionId=1",
        "hypercache://q/../q/a",
    ]
    for uri in uris:
        upload(backend, uri.encode(), uri)
    for uri in uris:
        assert read(backend, place(backend, uri)) == uri.encode()


def test_what_another_host_wrote_or_replaced_is_seen_at_once(make_backend: MakeBackend) -> None:
    here, there = make_backend(), make_backend()
    assert here.size_bytes(place(here)) is None
    upload(there, b"old")
    assert here.size_bytes(place(here)) == 3
    upload(there, b"newer")
    assert here.size_bytes(place(here)) == 5
    assert read(here, place(here)) == b"newer"


@pytest.mark.parametrize("size_bytes", [5 * MIB, 33 * MIB])
def test_a_reader_never_sees_half_an_object(make_backend: MakeBackend, size_bytes: int) -> None:
    old, new = b"o" * (size_bytes - 1), b"n" * size_bytes
    writer, reader = make_backend(), make_backend()
    seen = []

    def watched(pieces: list[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            seen.append(reader.size_bytes(place(reader)))
            yield piece
        seen.append(reader.size_bytes(place(reader)))

    writer.upload(place(writer), watched(in_pieces(old)), len(old))
    assert set(seen) == {None}
    seen.clear()
    writer.upload(place(writer), watched(in_pieces(new)), len(new))
    assert set(seen) == {len(old)}
    assert read(reader, place(reader)) == new


class DiskBroke(Exception):
    pass


def broken_after(pieces: list[bytes]) -> Iterator[bytes]:
    yield from pieces
    raise DiskBroke


@pytest.mark.parametrize("size_bytes", [9 * MIB, 33 * MIB])
def test_pieces_that_do_not_add_up_change_nothing(make_backend: MakeBackend, size_bytes: int) -> None:
    backend = make_backend()
    upload(backend, b"old")
    pieces = in_pieces(b"n" * size_bytes)
    wrong_sha256 = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(BackendError, match=f"have the sha256 [0-9a-f]+, not {wrong_sha256}"):
        backend.upload(place(backend), pieces, size_bytes, wrong_sha256)
    with pytest.raises(BackendError, match=f"have {size_bytes} bytes, not {size_bytes + 1}"):
        backend.upload(place(backend), pieces, size_bytes + 1)
    with pytest.raises(BackendError, match=f"have more bytes, not {size_bytes - 1}"):
        backend.upload(place(backend), pieces, size_bytes - 1)
    with pytest.raises(DiskBroke):
        backend.upload(place(backend), broken_after(pieces), size_bytes)
    assert read(backend, place(backend)) == b"old"


def test_a_failed_upload_leaves_nothing_behind(server: Server, tmp_path: Path) -> None:
    pieces = in_pieces(b"n" * (70 * MIB))
    local, s3 = Backend(str(tmp_path)), Backend(f"s3://{BUCKET}/left", storage_options=server.options)
    for backend in (local, s3):
        with pytest.raises(DiskBroke):
            backend.upload(place(backend), broken_after(pieces), 71 * MIB)
    assert list((tmp_path / "folder").iterdir()) == []
    listed = server.other_client().call_s3("list_multipart_uploads", Bucket=BUCKET, Prefix="left/")
    assert listed.get("Uploads", []) == []


def test_many_threads_at_once_get_their_own_bytes(make_backend: MakeBackend) -> None:
    backend = make_backend()
    contents = {f"hypercache://t/{number}": os.urandom(5 * MIB + number) for number in range(8)}

    def there_and_back(uri: str) -> bool:
        upload(backend, contents[uri], uri)
        return all(read(backend, place(backend, uri)) == contents[uri] for _ in range(3))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(there_and_back, contents))
        shared = list(threads.map(lambda _: read(backend, place(backend, "hypercache://t/0")), range(24)))
    assert shared == [contents["hypercache://t/0"]] * 24


# S3 alone


def on(server: Server, folder: str = "", **options: Any) -> Backend:
    url = f"s3://{BUCKET}/{folder or uuid.uuid4().hex}"
    return Backend(url, storage_options=server.options, **options)


def test_s3_an_object_that_is_replaced_while_it_is_downloaded_is_an_error(server: Server) -> None:
    backend = on(server)
    for replacement in (b"b" * (20 * MIB), b"b" * (12 * MIB), b"b" * (21 * MIB)):
        upload(backend, b"a" * (20 * MIB))
        _, pieces = backend.download(place(backend))
        received = [next(pieces)]
        upload(backend, replacement)
        with pytest.raises(BackendError, match="cannot download"):
            received.extend(pieces)
        assert sum(map(len, received)) < 20 * MIB


def test_s3_an_ingest_prefix_reads_and_writes_the_bucket_that_the_uri_names(server: Server) -> None:
    server.other_client().call_s3("put_object", Bucket=BUCKET, Key="models/a%20b//odd/x", Body=b"abc")
    server.other_client().call_s3("put_object", Bucket=BUCKET, Key="models/a%20b/x", Body=b"abcd")
    backend = Backend(None, [f"s3://{BUCKET}/models"], server.options)
    source = backend.ingest_source(f"s3://{BUCKET}/models/a%20b/x")
    assert source is not None
    assert read(backend, source) == b"abcd"
    assert backend.ingest_source(f"s3://{BUCKET}/models/a%20b//odd/x") is None
    backend.upload(place(backend, f"s3://{BUCKET}/models/new"), [b"new"], 3)
    assert server.other_client().cat_file(f"{BUCKET}/models/new") == b"new"


def test_s3_a_missing_bucket_fails_the_upload(server: Server) -> None:
    backend = Backend("s3://no-such-bucket/x", storage_options=server.options)
    for size_bytes in (1, 40 * MIB):
        with pytest.raises(BackendError, match="cannot upload s3://no-such-bucket/x/folder/x"):
            upload(backend, b"x" * size_bytes)


def within(limit_s: float, call: Callable[[], object]) -> BackendError:
    began = time.monotonic()
    with pytest.raises(BackendError) as failed:
        call()
    assert time.monotonic() - began < limit_s
    return failed.value


def test_s3_a_server_that_answers_nothing_is_given_up_in_time_and_works_again_after(server: Server) -> None:
    patient, hasty = on(server, "silent"), on(server, "silent", request_timeout_s=1.0)
    upload(patient, b"o" * (20 * MIB))
    begun = on(server, "silent", request_timeout_s=5.0)
    target = place(begun)
    _, pieces = begun.download(target)
    with server.silent():
        for call in (
            lambda: hasty.size_bytes(place(hasty)),
            lambda: hasty.download(place(hasty)),
            lambda: upload(hasty, b"n" * (30 * MIB)),
            lambda: upload(hasty, b"n" * (70 * MIB)),
        ):
            assert "no answer within 1 s" in str(within(8.0, call))
        assert "no answer within 5 s" in str(within(12.0, lambda: list(pieces)))
    # Each upload that was given up came whole after all, or not at all.
    assert patient.size_bytes(target) in (20 * MIB, 30 * MIB)
    upload(patient, b"again", "hypercache://other")
    assert read(patient, place(patient, "hypercache://other")) == b"again"


def test_s3_a_server_that_falls_silent_amid_a_large_upload_is_given_up_in_time(server: Server) -> None:
    backend = on(server, request_timeout_s=3.0)

    def pieces() -> Iterator[bytes]:
        yield from in_pieces(b"n" * (36 * MIB))
        server.process.send_signal(signal.SIGSTOP)
        yield from in_pieces(b"n" * (34 * MIB))

    try:
        error = within(12.0, lambda: backend.upload(place(backend), pieces(), 70 * MIB))
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert "no answer within 3 s" in str(error)
    assert server.other_client().exists(place(backend).url) is False
