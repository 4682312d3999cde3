"""Object states and the transition table: the only place that says what may follow what.

Rules:
1. A write begins STAGED. A staged write is nobody's object yet; it either commits or is dropped.
2. COMMITTED and SYNCING_BACKEND are dirty: this cache holds the only copy, so it never evicts them.
3. LOCAL_ONLY never goes to a backend and never leaves its state but by being dropped.
4. An upload that fails goes back to COMMITTED; nothing is lost and it is tried again.
"""

from __future__ import annotations

from enum import Enum


class SyncStatus(str, Enum):
    """Where an object's bytes are, as `sync_status` says it on the wire."""

    STAGED = "STAGED"
    COMMITTED = "COMMITTED"
    SYNCING_BACKEND = "SYNCING_BACKEND"
    SYNCED_BACKEND = "SYNCED_BACKEND"
    LOCAL_ONLY = "LOCAL_ONLY"


STATE_MEANINGS: dict[SyncStatus, str] = {
    SyncStatus.STAGED: "blocks are reserved and being written; nothing is committed; gone after a restart",
    SyncStatus.COMMITTED: "committed, and still to be written to the backend; never evicted",
    SyncStatus.SYNCING_BACKEND: "being written to the backend now; never evicted",
    SyncStatus.SYNCED_BACKEND: "the backend has it; may be evicted",
    SyncStatus.LOCAL_ONLY: "committed and never written to a backend; may be evicted",
}


class StateEvent(str, Enum):
    """What happens to an object."""

    COMMIT = "commit"
    COMMIT_LOCAL_ONLY = "commit local-only"
    INGESTED = "ingested"
    UPLOAD_STARTED = "upload started"
    UPLOAD_CONFIRMED = "upload confirmed"
    UPLOAD_FAILED = "upload failed"


TRANSITIONS: dict[tuple[SyncStatus, StateEvent], SyncStatus] = {
    (SyncStatus.STAGED, StateEvent.COMMIT): SyncStatus.COMMITTED,
    (SyncStatus.STAGED, StateEvent.COMMIT_LOCAL_ONLY): SyncStatus.LOCAL_ONLY,
    (SyncStatus.STAGED, StateEvent.INGESTED): SyncStatus.SYNCED_BACKEND,
    (SyncStatus.COMMITTED, StateEvent.UPLOAD_STARTED): SyncStatus.SYNCING_BACKEND,
    (SyncStatus.SYNCING_BACKEND, StateEvent.UPLOAD_CONFIRMED): SyncStatus.SYNCED_BACKEND,
    (SyncStatus.SYNCING_BACKEND, StateEvent.UPLOAD_FAILED): SyncStatus.COMMITTED,
}

DIRTY = frozenset({SyncStatus.COMMITTED, SyncStatus.SYNCING_BACKEND})
EVICTABLE = frozenset({SyncStatus.SYNCED_BACKEND, SyncStatus.LOCAL_ONLY})


def next_state(state: SyncStatus, event: StateEvent) -> SyncStatus:
    """The state after `event`.

    Raises:
        ValueError: the table has no such transition: a bug in the caller.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"an object in state {state.value} cannot take the event {event.value!r}") from None
