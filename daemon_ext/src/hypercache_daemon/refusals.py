"""Why writes are refused, in words that say what to do."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeVar

from hypercache_protocol.errors import ErrorCode

from .core.objects import NoRoom
from .core.staged_writes import NotStaged
from .errors import DaemonError

log = logging.getLogger(__name__)

_T = TypeVar("_T")


def no_backend(uri: str) -> DaemonError:
    """Write-through is asked for and would reach no backend."""
    return DaemonError(
        ErrorCode.NO_BACKEND,
        f"write_through: this daemon has no backend for {uri}; start it with --backend, or write "
        "without write_through",
    )


def not_through(uri: str, problem: str, is_here: bool) -> DaemonError:
    """A write-through did not reach the backend; `is_here`: the cache has the object all the same."""
    if is_here:
        return DaemonError(
            ErrorCode.BACKEND_FAILED,
            f"commit_write: {uri} is committed in the cache, but the backend did not take it and "
            f"will be tried again: {problem}",
        )
    return DaemonError(
        ErrorCode.UNAVAILABLE,
        f"commit_write: {uri} did not reach the backend, and is not found in the cache any more: {problem}; "
        "stage and commit it again",
    )


def refuse_rest(
    results: dict[int, _T | DaemonError], indexes: Iterable[int], what: str, error: Exception
) -> None:
    """What could not be written down is refused; what has its result keeps it."""
    log.error("%s failed: %s", what, error)
    for index in indexes:
        results.setdefault(index, DaemonError(ErrorCode.UNAVAILABLE, f"{what}: {error}"))


def no_space(report: NoRoom, *, is_kept_for_good: bool) -> DaemonError:
    """There is no room, and none can be made; `is_kept_for_good`: what no backend has never leaves."""
    hint = (
        "; there is no backend, and without --evict-unflushed what is not yet in one stays until a client "
        "evicts it"
    )
    says_so = is_kept_for_good and report.dirty_bytes > 0
    return DaemonError(ErrorCode.NO_SPACE, report.sentence() + hint * says_so)


def too_many_chunks(uri: str, has: int, most: int) -> DaemonError:
    """An append would bring an object, of which `has` chunks are there, to more than `most` needless ones."""
    return DaemonError(
        ErrorCode.NO_SPACE,
        f"append_write: {uri} has {has} chunks, and with this more than {most} beyond what its bytes need; "
        "append pieces of 4 MiB, or write several objects",
    )


def too_many_objects(most: int) -> DaemonError:
    """As many objects and staged writes are kept as may be, and none of them may be evicted."""
    return DaemonError(
        ErrorCode.NO_SPACE,
        f"the daemon keeps {most} objects and staged writes already, its limit, and cannot evict enough of "
        "them now (pinned, not yet in a backend, or staged); commit or evict some, or raise --max-objects",
    )


def not_staged(found: NotStaged, stage_id: str | None) -> DaemonError:
    """There is no staged write that the request could mean."""
    if found.stale:
        return DaemonError(
            ErrorCode.STALE_STAGE,
            f"the staged write {stage_id} of {found.uri} is gone (committed, expired, or the daemon was "
            "restarted); stage it again",
        )
    if found.dropped:
        return DaemonError(
            ErrorCode.NOT_STAGED,
            f"what this connection staged under {found.uri} is gone (evicted, expired, or on a device that "
            "failed); stage it again",
        )
    return DaemonError(ErrorCode.NOT_STAGED, f"nothing is staged under {found.uri}; call stage_write first")
