"""Which uri lies where, and which lies nowhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hypercache_daemon.backend import Backend, BackendError
from hypercache_daemon.backend_names import HYPERCACHE, object_path

AWKWARD = st.text(alphabet="ab./%\\?~:* \n\0é2EF", max_size=12)


def url_of(backend: Backend, uri: str) -> str | None:
    target = backend.upload_target(uri)
    source = backend.ingest_source(uri)
    assert (target is None) == (source is None)
    assert (target is None) == (backend.refusal(uri) is not None)
    return None if target is None else target.url


def original(path: str) -> str:
    """The uri that a path belongs to: there is one, so the mapping is injective."""
    segments = []
    for segment in path.split("/"):
        if segment in ("%", "%.", "%.."):
            segments.append(segment[1:])
        else:
            segments.append(re.sub("%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), segment))
    return HYPERCACHE + "/".join(segments)


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("hypercache://a/b", "a/b"),
        ("hypercache://kv_cache/Meta Llama@3.1#x=1.kv", "kv_cache/Meta Llama@3.1#x=1.kv"),
        ("hypercache://modèle/重み", "modèle/重み"),
        ("hypercache:///etc/passwd", "%/etc/passwd"),
        ("hypercache://a//b/", "a/%/b/%"),
        ("hypercache://../../etc", "%../%../etc"),
        ("hypercache://a/./b", "a/%./b"),
        ("hypercache://.../..a", ".../..a"),
        ("hypercache://a%2Fb", "a%252Fb"),
        ("hypercache://%tmp-0123", "%25tmp-0123"),
        ("hypercache://a\\..\\b", "a%5C..%5Cb"),
        ("hypercache://a?versionId=1\n\0", "a%3FversionId=1%0A%00"),
        ("hypercache://", "%"),
    ],
)
def test_a_hypercache_uri_lies_under_the_backend_at_its_own_name_with_dangerous_parts_escaped(
    uri: str, path: str
) -> None:
    assert url_of(Backend("memory://root"), uri) == f"memory://root/{path}"


@settings(max_examples=100)
@given(AWKWARD)
@example("%")
@example("%25/..")
def test_no_two_uris_share_a_path_and_none_leaves_the_root(name: str) -> None:
    path = object_path(HYPERCACHE + name)
    assert isinstance(path, str)
    assert original(path) == HYPERCACHE + name
    assert not {"", ".", ".."} & set(path.split("/"))
    assert not re.search(r"[\\\x00-\x1f?]", path)
    assert not any(segment.startswith("%tmp-") for segment in path.split("/"))


def test_a_hypercache_uri_that_is_no_unicode_lies_nowhere() -> None:
    assert url_of(Backend("memory://root"), "hypercache://a/\ud800") is None


@pytest.mark.parametrize(
    ("prefix", "uri"),
    [
        ("file:///data", "file:///data/x"),
        ("file:///data/", "file:///data/deep/x y%2E#?.bin"),
        ("FILE:///data", "file:///data/x"),
        ("file:///", "file:///x"),
        ("s3://bucket", "s3://bucket/x"),
        ("s3://bucket/models", "s3://bucket/models/a/b"),
        ("memory://m", "memory://m/x"),
        ("nfs://host/export=/mnt/nfs", "nfs://host/export/x"),
    ],
)
def test_a_uri_that_names_its_own_place_is_allowed_under_a_prefix_only(prefix: str, uri: str) -> None:
    assert url_of(Backend(None), uri) is None
    assert url_of(Backend("memory://root"), uri) is None
    assert url_of(Backend(None, [prefix]), uri) == uri


@pytest.mark.parametrize(
    "uri",
    [
        "file:///database/x",
        "file:///data",
        "file:///data/",
        "file:///data//x",
        "file:///data/../etc/passwd",
        "file:///data/..",
        "file:///data/./x",
        "file:////data/x",
        "file://data/x",
        "file://localhost/data/x",
        "file:/data/x",
        "FILE:///data/x",
        "file:///data/a\\b",
        "file:///data/a\0b",
        "file:///data/%tmp-0123",
        "file:///DATA/x",
        "file:///data/\ud800",
        "s3://bucket2/models/x",
        "s3://bucket/x",
        "s3://bucket/modelsx/y",
        "s3://key:secret@bucket/models/x",
        "s3://bucket/models/x?versionId=1",
        "s3a://bucket/models/x",
        "nfs://other/export/x",
        "http://bucket/models/x",
        "data/x",
        "/data/x",
        "hypercache:/x",
        "",
    ],
)
def test_a_uri_outside_the_prefixes_or_spelled_oddly_lies_nowhere(uri: str) -> None:
    prefixes = ["file:///data", "s3://bucket/models", "nfs://host/export=/mnt/nfs"]
    assert url_of(Backend(None, prefixes), uri) is None


def test_the_backends_own_root_counts_as_allowed(tmp_path: Path) -> None:
    backend = Backend(str(tmp_path))
    assert url_of(backend, f"file://{tmp_path}/x") == f"file://{tmp_path}/x"
    assert url_of(backend, f"file://{tmp_path}x/x") is None


def test_without_a_backend_a_hypercache_uri_lies_nowhere_and_the_reason_says_what_to_do() -> None:
    backend = Backend(None, ["file:///data"])
    assert url_of(backend, "hypercache://a/b") is None
    assert "--backend" in str(backend.refusal("hypercache://a/b"))


def test_an_nfs_share_is_read_where_the_prefix_says_it_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/x").write_bytes(b"abc")
    backend = Backend(None, [f"nfs://host/export={tmp_path}"])
    source = backend.ingest_source("nfs://host/export/deep/x")
    assert source is not None
    assert backend.size_bytes(source) == 3


def test_the_deepest_prefix_decides(tmp_path: Path) -> None:
    (tmp_path / "outer").mkdir()
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/x").write_bytes(b"abc")
    prefixes = [f"nfs://host/a={tmp_path}/outer", f"nfs://host/a/b={tmp_path}/inner"]
    for order in (prefixes, prefixes[::-1]):
        backend = Backend(None, order)
        source = backend.ingest_source("nfs://host/a/b/x")
        assert source is not None
        assert backend.size_bytes(source) == 3


@pytest.mark.parametrize(
    ("root", "longest", "too_long"),
    [
        ("file:///srv", "n" * 255, "n" * 256),
        ("file:///srv", "é" * 127, "é" * 128),
        ("file:///srv", "n/" * 2047 + "n", "n/" * 2048 + "n"),
        ("s3://bucket", "n" * 1024, "n" * 1025),
        ("s3://bucket/pre", "n" * 1020, "n" * 1021),
        ("s3://bucket", "%" * 341, "%" * 342),
    ],
)
def test_a_name_that_the_store_cannot_hold_lies_nowhere(root: str, longest: str, too_long: str) -> None:
    backend = Backend(root)
    assert url_of(backend, HYPERCACHE + longest) is not None
    assert url_of(backend, HYPERCACHE + too_long) is None
    assert "too long" in str(backend.refusal(HYPERCACHE + too_long))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gopher://host/x", "scheme gopher is not supported; use file"),
        ("simplecache::s3://bucket", "chained"),
        ("file://srv/x", "file:///folder"),
        ("file:///srv/../etc", "'..'"),
        ("s3://", "names no bucket"),
        ("nfs://host/export", "nfs://host/export=/mount/point"),
        ("nfs://host/export=/mnt/..", "'..'"),
        ("s3://key:hush-hush@bucket/x", "storage options"),
    ],
)
def test_a_root_that_cannot_be_used_is_refused_with_what_to_change(url: str, words: str) -> None:
    for arguments in ((url,), (None, [url])):
        with pytest.raises(BackendError, match=re.escape(words)) as refused:
            Backend(*arguments)
        assert "hush" not in str(refused.value)


def test_an_ingest_prefix_needs_a_scheme() -> None:
    with pytest.raises(BackendError, match=r"ingest prefix .*data.* file:///folder"):
        Backend(None, ["/data"])


def test_a_missing_driver_is_named_with_the_command_that_installs_it() -> None:
    program = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from hypercache_daemon.backend import Backend, BackendError\n"
        "try: Backend('s3://bucket/x')\n"
        "except BackendError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "cannot use backend s3://bucket/x" in done.stdout
    assert 'pip install "hypercache-ext[s3]"' in done.stdout


def test_a_relative_folder_is_taken_from_where_the_daemon_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert url_of(Backend("store"), "hypercache://a") == f"file://{tmp_path}/store/a"
