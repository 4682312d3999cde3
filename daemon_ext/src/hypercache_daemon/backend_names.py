"""Where a uri lies in a store: pure rules, no I/O.

A uri is an opaque string from a client, so nothing in it may lead out of the place that the operator gave.

`hypercache://a/b` lies at `<backend>/a/b`. Ordinary names stay as they are. What a store could misread is
escaped, and no two uris share a path:

- `%`, `?`, the backslash and control characters become `%XX` (two upper-case hexadecimal digits);
- a segment that is empty, `.` or `..` gets a `%` in front: `%`, `%.`, `%..`. No escaped segment can begin so,
  since `%` is otherwise followed by two digits. `%..` and not `%2E%2E`: some clients decode the latter.
- `%tmp-…` is therefore no uri's name either; the local store uses it for what is not yet whole.

Every other uri names its own place (`file:///data/x`, `s3://bucket/x`) and is taken literally: never decoded,
refused where a segment is empty, `.`, `..`, holds a backslash or a control character, or begins with `%tmp-`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HYPERCACHE = "hypercache://"
TEMPORARY_PREFIX = "%tmp-"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_TO_ESCAPE = re.compile(r"[%?\\\x00-\x1f\x7f]")
_FORBIDDEN = re.compile(r"[\\\x00-\x1f\x7f]")
_CREDENTIALS = re.compile(r"//[^/\s]*@")


class StoreError(Exception):
    """Why a store or a place cannot be used: a reason for people, without the place's name."""


@dataclass(frozen=True)
class Refusal:
    """Why a uri has no place: half a sentence that may go into an error reply."""

    reason: str


@dataclass(frozen=True)
class Place:
    """A parsed location; two places compare by scheme, host (a bucket, for S3) and whole segments."""

    scheme: str
    host: str
    segments: tuple[str, ...]

    @property
    def url(self) -> str:
        return "/".join([f"{self.scheme}://{self.host}", *self.segments])

    def below(self, root: Place) -> str | None:
        """The path of this place under `root`; None where it is `root` itself or lies elsewhere."""
        depth = len(root.segments)
        if (self.scheme, self.host) != (root.scheme, root.host) or self.segments[:depth] != root.segments:
            return None
        return "/".join(self.segments[depth:]) or None


def object_path(uri: str) -> str | Refusal:
    """The path under the backend's root of a `hypercache://` uri."""
    if not _encodable(uri):
        return Refusal("it is not valid Unicode")
    return "/".join(_escaped(segment) for segment in uri[len(HYPERCACHE) :].split("/"))


def _escaped(segment: str) -> str:
    if segment in ("", ".", ".."):
        return "%" + segment
    return _TO_ESCAPE.sub(lambda match: f"%{ord(match[0]):02X}", segment)


def parse_uri(uri: str) -> Place | Refusal:
    """The place that a client's uri names by itself."""
    scheme, separator, rest = uri.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        return Refusal("it has no scheme")
    if not _encodable(uri):
        return Refusal("it is not valid Unicode")
    host, _, path = rest.partition("/")
    segments = tuple(path.split("/"))
    reason = _forbidden(segments)
    return Refusal(reason) if reason else Place(scheme, host, segments)


def parse_root(url: str) -> tuple[Place, str]:
    """The place of a root that the operator configures, and the folder where that place is mounted.

    The folder is "" but for `file` (the place itself) and `nfs`, whose URL must name it:
    `nfs://host/export=/mount/point`. Raises StoreError.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise StoreError("it has no scheme; write file:///folder for a local folder")
    if "::" in url:
        raise StoreError("chained URLs (::) are not supported, since a cache in between may show old objects")
    location, _, mount = rest.partition("=/") if scheme.lower() == "nfs" else (rest, "", "")
    host, _, path = location.partition("/")
    if "@" in host:
        raise StoreError("it carries credentials; give those as storage options or in the environment")
    segments = _root_segments(path)
    place = Place(scheme.lower(), host, segments)
    return place, _mounted_at(place, mount)


def _root_segments(path: str) -> tuple[str, ...]:
    stripped = path.rstrip("/")
    segments = tuple(stripped.split("/")) if stripped else ()
    if reason := _forbidden(segments):
        raise StoreError(reason)
    return segments


def _mounted_at(place: Place, mount: str) -> str:
    match place.scheme:
        case "file" if place.host:
            raise StoreError("a local folder has no host; write file:///folder with three slashes")
        case "file":
            return "/" + "/".join(place.segments)
        case "nfs" if not mount:
            raise StoreError(
                "it does not say where the share is mounted; write nfs://host/export=/mount/point"
            )
        case "nfs":
            return "/" + "/".join(_root_segments(mount))
        case _:
            return ""


def _forbidden(segments: tuple[str, ...]) -> str:
    for segment in segments:
        if segment in ("", ".", ".."):
            return f"it holds the segment {segment!r}" if segment else "it holds an empty segment"
        if _FORBIDDEN.search(segment):
            return "it holds a backslash or a control character"
        if segment.startswith(TEMPORARY_PREFIX):
            return f"names that begin with {TEMPORARY_PREFIX} are the daemon's own"
        if "?versionId=" in segment:
            return "it names a version, and versions are not supported"
    return ""


def _encodable(uri: str) -> bool:
    try:
        uri.encode()
    except UnicodeEncodeError:
        return False
    return True


def without_credentials(text: str) -> str:
    """`text` with `user:password@` taken out of every URL in it."""
    return _CREDENTIALS.sub("//", text)
