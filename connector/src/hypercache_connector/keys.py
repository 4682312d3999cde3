"""The mapping from LMCache's keys to uris: version 1, frozen.

Rules:
1. Two different pairs of namespace and key never share a uri: both are percent-encoded, so the one "/"
   between them is where the namespace ends, and "%" itself is always encoded. Only where a uri would be
   longer than the wire allows does the key's SHA-256 stand for it, under a path of its own.
2. A key is opaque: nothing in it is parsed, folded or normalised.
3. The mapping never changes under its version number; a change needs a new number in the path, and the
   golden strings of the tests stay.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import quote

from .prefixes import shared_prefix, shared_up_to

MAPPING_VERSION = 1
MAX_NAMESPACE_BYTES = 512
"""So that even a fully encoded namespace leaves room for a key."""

_LONGEST_URI_BYTES = 8192  # the wire's limit when version 1 was frozen; part of the mapping
_SAFE = (string.ascii_letters + string.digits + "_.~@-").encode()
_UNSAFE = re.compile(rf"[^{re.escape(_SAFE.decode())}]")


class UriMapping:
    """Gives the uris of one namespace's keys."""

    def __init__(self, namespace: str) -> None:
        encoded = _encoded(namespace)
        self._plain = f"hypercache://lmcache/v{MAPPING_VERSION}/{encoded}/"
        self._hashed = f"hypercache://lmcache/v{MAPPING_VERSION}-sha256/{encoded}/"

    def uri(self, key: str) -> str:
        """The uri that names `key`: ASCII, at most 8,192 bytes."""
        uri = self._plain + _encoded(key)
        if len(uri) <= _LONGEST_URI_BYTES:
            return uri
        return self._hashed + hashlib.sha256(_utf8(key)).hexdigest()

    def uris(self, keys: Sequence[str]) -> list[str]:
        """The uri of each key, in order."""
        prefix, suffixes = self.split(keys)
        return [prefix + suffix for suffix in suffixes]

    def encoded(self, keys: Sequence[str]) -> list[bytes]:
        """The same in UTF-8."""
        # Whether there is something to encode in a key is seen of all at once.
        together = "".join(keys).encode("utf-8", "surrogatepass")
        if not together.translate(None, delete=_SAFE):
            plain = self._plain.encode()
            if len(plain) + max(map(len, keys), default=0) <= _LONGEST_URI_BYTES:
                return [plain + key.encode() for key in keys]
        return [uri.encode() for uri in self.uris(keys)]

    def split(self, keys: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """The same as what all of them begin with and the rest of each."""
        # Each character is encoded by itself, so a key may be cut anywhere. What LMCache's keys of one batch
        # share is at least the model, their first part; the others stay as they are.
        shared, rests = shared_up_to("@", keys) or shared_prefix(keys)
        prefix, together = self._plain + _encoded_again(shared), "".join(rests)
        # Not even all of them together are too long, mostly.
        longest = together if len(prefix) + len(together) <= _LONGEST_URI_BYTES else max(rests, key=len)
        if len(prefix) + len(longest) > _LONGEST_URI_BYTES or not _stays_as_it_is(together):
            return shared_prefix([self.uri(key) for key in keys])
        return prefix, rests


def _stays_as_it_is(text: str) -> bool:
    # As bytes: what is a letter is a matter of one look there, and of Unicode's tables in a str.
    return text.isascii() and text.encode().replace(b"@", b"").isalnum()


def _encoded(text: str) -> str:
    # The same as quote(text, safe="@"), five times faster for the ASCII that keys are made of.
    if text.isascii():
        return _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", text)
    return quote(_utf8(text), safe="@")


_encoded_again = lru_cache(maxsize=64)(_encoded)
"""For what the keys of one batch share, and mostly those of the next."""


def _utf8(text: str) -> bytes:
    # Lone surrogates have no UTF-8; surrogatepass gives each its own bytes, so nothing falls together.
    return text.encode("utf-8", "surrogatepass")
