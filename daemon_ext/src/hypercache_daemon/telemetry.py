"""What clients report of their own transfers, added up per kind of event."""

from __future__ import annotations

from dataclasses import dataclass

from hypercache_protocol.messages import RecordTelemetry

_MAX_KINDS = 64  # names come from clients, so their number is bounded
_OTHERS = "(other)"


@dataclass
class _Total:
    events: int = 0
    object_size_bytes: int = 0
    duration_us: int = 0
    chunk_count: int = 0
    time_saved_ms: int = 0
    failures: int = 0


class Telemetry:
    """Totals since the start of the daemon."""

    def __init__(self) -> None:
        self._totals: dict[str, _Total] = {}

    def record(self, event: RecordTelemetry) -> None:
        """Add one event; kinds beyond the first 64 are added up together."""
        name = event.event_type[:64]
        if name not in self._totals and len(self._totals) >= _MAX_KINDS:
            name = _OTHERS
        total = self._totals.setdefault(name, _Total())
        total.events += 1
        total.object_size_bytes += event.object_size_bytes
        total.duration_us += event.duration_us
        total.chunk_count += event.chunk_count
        total.time_saved_ms += event.time_saved_ms
        total.failures += event.status != "OK"

    def report(self) -> dict[str, dict[str, int]]:
        """Kind of event -> its totals."""
        return {name: dict(vars(total)) for name, total in self._totals.items()}
