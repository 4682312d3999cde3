"""Who this daemon is and what it speaks: the answers to ping and to hello."""

from __future__ import annotations

from dataclasses import dataclass

from hypercache_protocol.batches import MAX_BATCH, Hello, HelloLimits, HelloReply
from hypercache_protocol.messages import PongReply
from hypercache_protocol.negotiation import choose, spoken, unknown_words
from hypercache_protocol.session import Limits
from hypercache_protocol.versions import WireVersion, features_of, majors_up_to


@dataclass(frozen=True)
class Identity:
    """One start of a daemon. `version` is the newest wire that it speaks."""

    version: WireVersion
    daemon: str
    instance_id: str
    device_paths: tuple[str, ...]
    limits: Limits
    max_in_flight: int

    def pong(self) -> PongReply:
        """What a ping is told."""
        return PongReply(
            wire=majors_up_to(self.version),
            daemon=self.daemon,
            instance_id=self.instance_id,
            features=tuple(sorted(features_of(self.version))),
        )

    def hello(self, request: Hello) -> HelloReply:
        """What a client that asks for a wire is told."""
        return HelloReply(
            version=str(choose(request.versions, self.version)),
            versions=spoken(self.version),
            features=tuple(sorted(features_of(self.version))),
            limits=HelloLimits(
                max_request_bytes=self.limits.max_request_bytes,
                max_reply_bytes=self.limits.max_reply_bytes,
                max_in_flight=self.max_in_flight,
                max_batch=MAX_BATCH,
            ),
            devices=self.device_paths,
            instance_id=self.instance_id,
            daemon=self.daemon,
            unknown=unknown_words(request.versions, request.features, self.version),
        )
