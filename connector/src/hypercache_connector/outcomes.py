"""What became of one key in one operation, and how often.

Rules:
1. A key's outcome begins as a failure and becomes OK only where every check passed.
2. Each outcome that is not OK names one reason; `status()` shows how often each was met.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from hypercache_protocol import ErrorCode

logger = logging.getLogger("hypercache_connector")

_T = TypeVar("_T", bound=Hashable)

_LOG_AGAIN_S = 60.0


class Outcome(str, Enum):
    """What became of one key; the value is the counter's name."""

    __hash__ = str.__hash__  # Enum's is Python, and each lookup hashes some hundred outcomes

    OK = "ok"
    ALREADY_STORED = "already_stored"

    ABSENT = "absent"
    STAGED = "staged"
    NO_SYNC_STATUS = "no_sync_status"
    NO_CHECKSUM = "no_checksum"
    UNVERIFIABLE = "unverifiable"
    WRONG_SIZE = "wrong_size"
    BAD_LAYOUT = "bad_layout"
    DEVICE_FAILED = "device_failed"
    IO_ERROR = "io_error"
    RAM_FILE_GONE = "ram_file_gone"
    SHORT_TRANSFER = "short_transfer"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    SEAL_BROKEN = "seal_broken"

    NO_SPACE = "no_space"
    STALE_STAGE = "stale_stage"
    NO_STAGE_ID = "no_stage_id"
    DAEMON_REFUSED = "daemon_refused"

    DAEMON_GONE = "daemon_gone"
    DAEMON_LATE = "daemon_late"
    DAEMON_GARBLED = "daemon_garbled"
    DAEMON_TOO_OLD = "daemon_too_old"
    TURNED_AWAY = "turned_away"
    BREAKER_OPEN = "breaker_open"

    TRANSFER_LATE = "transfer_late"
    QUEUE_FULL = "queue_full"
    BAD_BUFFER = "bad_buffer"
    NO_MEMORY = "no_memory"
    CLOSED = "closed"
    INTERNAL_ERROR = "internal_error"

    @property
    def good(self) -> bool:
        """Whether the caller got what it asked for."""
        return self in _GOOD


_GOOD = frozenset({Outcome.OK, Outcome.ALREADY_STORED})


def which_are_good(outcomes: Iterable[Outcome]) -> list[bool]:
    """`good` of each."""
    return list(map(_GOOD.__contains__, outcomes))


def tally(values: Sequence[_T]) -> dict[_T, int]:
    """How often each value is there."""
    # Mostly all are the same, which is seen ten times faster than they are counted.
    if values and values.count(values[0]) == len(values):
        return {values[0]: len(values)}
    return dict(Counter(values))


def reasons(outcomes: Sequence[Outcome]) -> str:
    """What those came to that are not good, in words, and how often; "" where all are good."""
    bad = {outcome.value: count for outcome, count in tally(outcomes).items() if outcome not in _GOOD}
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(bad.items()))


class DaemonUnavailable(Exception):
    """There is no answer from the daemon that can be trusted; `outcome` says of which kind. Where the daemon
    did not let this process in (TURNED_AWAY), `code` is its word for why."""

    def __init__(self, outcome: Outcome, message: str, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.code = code


class Counters:
    """Counts by group and name, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, group: str, name: str, amount: int = 1) -> None:
        """Count `amount` more of `name`."""
        with self._lock:
            self._groups[group][name] += amount

    def add_outcomes(self, group: str, counted: Mapping[Outcome, int]) -> None:
        """Count each outcome as often as it was there."""
        with self._lock:
            counts = self._groups[group]
            for outcome, count in counted.items():
                counts[outcome.value] += count

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Every count so far, by group and name."""
        with self._lock:
            return {group: dict(names) for group, names in self._groups.items()}


class ThrottledLog:
    """Logs a sentence at most once a minute for each subject: faults come in thousands, and one line says it
    all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}

    def note(self, subject: str, message: str, *values: object, fault: Exception | None = None) -> None:
        """Log `message` unless `subject` was logged within that time; with the traceback of `fault`, which
        makes it an error."""
        now = time.monotonic()
        with self._lock:
            if now - self._last.get(subject, -_LOG_AGAIN_S) < _LOG_AGAIN_S:
                return
            self._last[subject] = now
        logger.log(logging.ERROR if fault else logging.WARNING, message, *values, exc_info=fault)
