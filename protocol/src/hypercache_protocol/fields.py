"""Constrained scalars that messages are made of.

Strictness sits here, on the scalars, and not on the models: strict models refuse msgpack's lists for
tuples, lax scalars take "5" for an int.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from .versions import WireVersion

KIB = 1024
MIB = 1024 * KIB
CHUNK_SIZE = 4 * MIB
"""The largest chunk, in bytes."""

MAX_OBJECT_BYTES = 1 << 46
"""64 TiB: above any pool this runs on; a size beyond it is a mistake, not a request."""

MAX_URI_BYTES = 8192


class Tier(str, Enum):
    """Where blocks lie: `nvme` (devices) or `ram` (files in a memory file system)."""

    NVME = "nvme"
    RAM = "ram"


@dataclass(frozen=True)
class Since:
    """Marks an optional field with the wire version that brought it.

    `safe_to_drop` says whether an encoder may leave the field out for a peer that does not know it; where
    it may not, a message that sets it cannot be sent to such a peer at all.
    """

    version: WireVersion
    safe_to_drop: bool = True


def _checked_uri(uri: str) -> str:
    size_bytes = len(uri.encode())  # cannot fail: a lone surrogate is refused as no string at all
    if size_bytes > MAX_URI_BYTES:
        raise ValueError(f"must be at most {MAX_URI_BYTES} bytes long, not {size_bytes}")
    if "\0" in uri:
        raise ValueError("must not hold a NUL character")
    return uri


def _lower_case(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


Uri = Annotated[
    StrictStr,
    Field(min_length=1, description=f"1 to {MAX_URI_BYTES} bytes of UTF-8, no NUL"),
    AfterValidator(_checked_uri),
]
"""An object's name: an opaque string."""

TierField = Annotated[Tier, BeforeValidator(_lower_case)]
Flag = StrictBool
SizeBytes = Annotated[StrictInt, Field(ge=0, le=MAX_OBJECT_BYTES)]
MAX_OFFSET = 1 << 62
Offset = Annotated[StrictInt, Field(ge=0, le=MAX_OFFSET)]
ChunkLength = Annotated[StrictInt, Field(ge=1, le=CHUNK_SIZE)]
Crc32 = Annotated[StrictInt, Field(ge=0, le=0xFFFFFFFF)]
"""CRC-32 with zlib's polynomial, unsigned."""

MAX_GENERATION = (1 << 63) - 1
Generation = Annotated[StrictInt, Field(ge=0, le=MAX_GENERATION)]
"""Grows with each commit of a uri."""

StageId = Annotated[StrictStr, Field(min_length=1, max_length=64)]
Sha256 = Annotated[StrictStr, Field(pattern=r"^[0-9a-fA-F]{64}$")]
Count = Annotated[StrictInt, Field(ge=0, le=(1 << 63) - 1)]
Word = Annotated[StrictStr, Field(max_length=MAX_URI_BYTES)]
Number = Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False)]
Percent = Annotated[StrictFloat, Field(ge=0, le=100, allow_inf_nan=False)]
Int32 = Annotated[StrictInt, Field(ge=-(1 << 31), le=(1 << 31) - 1)]
