"""A lookup as requests for two bits a uri, and what their replies say: it needs no layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypercache_protocol import InvalidMessage
from hypercache_protocol.batches import HelloLimits, LocatedMany, LocateMany
from hypercache_protocol.layout import bit_array
from hypercache_protocol.messages import Reply

from .batching import CHARACTER_BYTES, FRAME_BYTES, ITEM_BYTES, Batch
from .layouts import refusal
from .outcomes import Outcome
from .prefixes import shared_prefix


def presence_batches(uris: Sequence[str], limits: HelloLimits) -> Iterator[Batch]:
    """The requests that ask which of these could be verified if they were loaded now, within the daemon's
    limits."""
    widest = 1 if all(map(str.isascii, uris)) else CHARACTER_BYTES
    longest_bytes = max(map(len, uris), default=0) * widest + ITEM_BYTES
    most = max(1, min(limits.max_batch, (limits.max_request_bytes - FRAME_BYTES) // longest_bytes))
    for start in range(0, len(uris), most):
        part = uris[start : start + most]
        yield _presence_of(*shared_prefix(part))


def presence_batch(prefix: str, suffixes: tuple[str, ...], limits: HelloLimits) -> Batch | None:
    """The same as one request, with what the uris begin with and the rest of each; None where it may take
    more than one."""
    characters = len(prefix) + sum(map(len, suffixes))
    size_bytes = FRAME_BYTES + ITEM_BYTES * len(suffixes) + CHARACTER_BYTES * characters
    if not suffixes or len(suffixes) > limits.max_batch or size_bytes > limits.max_request_bytes:
        return None
    return _presence_of(prefix, suffixes)


def _presence_of(prefix: str, suffixes: tuple[str, ...]) -> Batch:
    return Batch(LocateMany.trusted(prefix=prefix, suffixes=suffixes), len(suffixes))


def presence(batch: Batch, reply: Reply) -> list[Outcome]:
    """What the reply to one of these requests says of each uri: OK where a load could verify it now.

    Raises:
        InvalidMessage: the reply does not fit the batch.
    """
    if not isinstance(reply, LocatedMany):
        return [refusal(reply)] * batch.count
    # Two bits make the index of what they say, so that one pass in C goes over the keys.
    bits = 2 * bit_array(reply.present, batch.count) + bit_array(reply.verifiable, batch.count)
    codes: list[int] = bits.tolist()
    if _CONTRADICTION in codes:
        raise InvalidMessage("the reply to locate_many calls verifiable what is not present")
    return list(map(_PRESENCE.__getitem__, codes))


_CONTRADICTION = 1
_PRESENCE = (Outcome.ABSENT, Outcome.INTERNAL_ERROR, Outcome.UNVERIFIABLE, Outcome.OK)
"""By 2 * present + verifiable."""
