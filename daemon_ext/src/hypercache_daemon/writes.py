"""Staging, appending and committing: the way of an object into the cache."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from hypercache_protocol.errors import ErrorCode
from hypercache_protocol.fields import Tier
from hypercache_protocol.messages import AppendWrite, CommitWrite, StageWrite
from hypercache_protocol.states import DIRTY, StateEvent

from .access import DeviceError
from .catalog_rows import Change, DropHold, Put
from .core.allocator import Extent
from .core.cache import NotStaged, StageOptions
from .core.objects import NoSpace, StagedWrite, StoredObject
from .errors import DaemonError
from .flusher import Flusher
from .removal import Remover
from .store import Store, hold_change, writer_hold

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_TRIES = 4


@dataclass
class Writer:
    """Carries out the three steps of a write."""

    store: Store
    remover: Remover
    flusher: Flusher

    async def stage(self, request: StageWrite, connection_id: int) -> StagedWrite:
        """Blocks for a new write.

        Raises:
            DaemonError: no space, or a write-through that no backend would take.
        """
        if request.write_through:
            self._require_backend(request.uri)
        tier = self._tier(request.tier)
        options = StageOptions(request.auto_flush_s3, request.write_through, request.pinned)
        return await self._stage(request.uri, request.size_bytes, tier, connection_id, options)

    async def stage_internal(self, uri: str, size_bytes: int, tier: Tier | None) -> StagedWrite:
        """Blocks for an object that the daemon itself fetches."""
        options = StageOptions(auto_flush=False, write_through=False, pinned=False)
        return await self._stage(uri, size_bytes, self._tier(tier), None, options)

    async def append(
        self, request: AppendWrite, connection_id: int
    ) -> tuple[StagedWrite, tuple[Extent, ...]]:
        """More blocks for a staged write, and only the new ones.

        Raises:
            DaemonError: nothing is staged, another tier is asked for, or there is no space.
        """

        async def attempt() -> tuple[StagedWrite, tuple[Extent, ...]] | NoSpace:
            async with self.store.locks.hold(request.uri):
                staged = self._found(request.uri, connection_id, request.stage_id)
                self._check_append(request, staged)
                return await self._append(staged, request.size_bytes)

        return await self._with_room(attempt)

    async def commit(self, request: CommitWrite, connection_id: int) -> StoredObject:
        """Make a staged write the object, durably; with write-through, in the backend too.

        Raises:
            DaemonError: nothing is staged, the request contradicts itself or the layout, the sha256 does
                not match (the staged write stays in all these cases), or the backend failed (the object is
                committed here and goes on trying).
        """
        async with self.store.locks.hold(request.uri):
            staged = self._found(request.uri, connection_id, request.stage_id)
            write_through = request.write_through or staged.write_through
            self._check_commit(request, staged, write_through)
            await self._check_sha256(request, staged)
            stored = await self._commit(request, staged, write_through)
        self.remover.check_watermark()
        if write_through:
            return await self._through(stored)
        if stored.state in DIRTY:
            self.flusher.submit(stored.uri)
        return stored

    def discard_internal(self, staged: StagedWrite) -> None:
        """Drop what `stage_internal` staged."""
        self.store.cache.discard(staged, self.store.clock(), self.store.times.quarantine_s)

    # -- staging ---------------------------------------------------------------------------------------

    def _tier(self, wanted: Tier | None) -> Tier:
        # The reply's layout names the tier of each chunk and clients go by that, so with the RAM tier
        # turned off its users are served from the devices.
        if wanted is None or wanted not in self.store.cache.pools:
            return Tier.NVME
        return wanted

    def _require_backend(self, uri: str) -> None:
        if not self.flusher.has_target(uri):
            raise DaemonError(
                ErrorCode.NO_BACKEND,
                f"write_through: this daemon has no backend for {uri}; start it with --backend, or write "
                "without write_through",
            )

    async def _stage(
        self, uri: str, size_bytes: int, tier: Tier, connection_id: int | None, options: StageOptions
    ) -> StagedWrite:
        store = self.store

        async def attempt() -> StagedWrite | NoSpace:
            async with store.locks.hold(uri):
                staged = store.cache.stage(uri, size_bytes, tier, connection_id, options, store.clock())
                if isinstance(staged, StagedWrite):
                    await self._record(staged, 0, lambda: store.cache.undo_stage(staged))
                return staged

        return await self._with_room(attempt)

    async def _with_room(self, attempt: Callable[[], Awaitable[_T | NoSpace]]) -> _T:
        """What `attempt` gives, evicting where it finds no space. Others may take the room that was made,
        so it is tried again, but not for ever."""
        self.store.release_due()
        result = await attempt()
        for _ in range(_TRIES):
            if not isinstance(result, NoSpace):
                return result
            if not await self.remover.make_room(result.tier, result.wanted_bytes):
                break
            result = await attempt()
        if isinstance(result, NoSpace):
            raise _no_space(result)
        return result

    async def _record(self, staged: StagedWrite, first: int, undo: Callable[[], None]) -> None:
        """Make the blocks of a staged write from number `first` on known to the catalog and the RAM tier."""
        extents = tuple(staged.extents[first:])
        staged.busy = True
        try:
            self.store.create_ram_files(staged.tier, extents)
            await self.store.make_durable([writer_hold(staged, first)])
        except BaseException:
            self.store.remove_ram_files(staged.tier, extents)
            undo()
            raise
        finally:
            staged.busy = False

    def _check_append(self, request: AppendWrite, staged: StagedWrite) -> None:
        if request.tier is not None and self._tier(request.tier) is not staged.tier:
            raise DaemonError(
                ErrorCode.CONTRADICTION,
                f"append_write: {request.uri} is staged in the {staged.tier.value} tier and cannot go on in "
                f"{request.tier.value}",
            )

    async def _append(
        self, staged: StagedWrite, size_bytes: int
    ) -> tuple[StagedWrite, tuple[Extent, ...]] | NoSpace:
        first = len(staged.extents)
        extents = self.store.cache.append(staged, size_bytes, self.store.clock())
        if isinstance(extents, NoSpace):
            return extents
        await self._record(staged, first, lambda: self.store.cache.undo_append(staged, extents))
        return staged, extents

    # -- committing ------------------------------------------------------------------------------------

    def _found(self, uri: str, connection_id: int, stage_id: str | None) -> StagedWrite:
        found = self.store.cache.find_staged(uri, connection_id, stage_id)
        if isinstance(found, StagedWrite):
            return found
        raise _not_staged(found, stage_id)

    def _check_commit(self, request: CommitWrite, staged: StagedWrite, write_through: bool) -> None:
        if write_through and request.local_only:
            raise DaemonError(
                ErrorCode.CONTRADICTION,
                f"commit_write: {request.uri} cannot be both local_only and write_through; leave one out",
            )
        if write_through:
            self._require_backend(request.uri)
        checksums = request.chunk_checksums
        if checksums is not None and len(checksums) != len(staged.extents):
            raise DaemonError(
                ErrorCode.BAD_REQUEST,
                f"commit_write: chunk_checksums has {len(checksums)} entries and {request.uri} was staged "
                f"with {len(staged.extents)} chunks; give one CRC-32 per chunk, in layout order",
            )

    async def _check_sha256(self, request: CommitWrite, staged: StagedWrite) -> None:
        if request.sha256 is None:
            return
        staged.busy = True
        try:
            found = await self.store.sha256_of(staged)
        except (DeviceError, OSError) as error:
            raise DaemonError(
                ErrorCode.UNAVAILABLE, f"commit_write: {request.uri} cannot be read back: {error}"
            ) from error
        finally:
            staged.busy = False
        if found != request.sha256.lower():
            raise DaemonError(
                ErrorCode.CHECKSUM_MISMATCH,
                f"commit_write: the blocks of {request.uri} have the SHA-256 {found}, not {request.sha256}; "
                "write them again, then commit",
            )

    async def _commit(self, request: CommitWrite, staged: StagedWrite, write_through: bool) -> StoredObject:
        store = self.store
        unflushed = not staged.auto_flush and not write_through
        event = StateEvent.COMMIT_LOCAL_ONLY if request.local_only or unflushed else StateEvent.COMMIT
        stored = store.cache.plan_commit(
            staged,
            event,
            checksums=request.chunk_checksums,
            sha256=request.sha256,
            announce_committed=not request.local_only,
        )
        await self.swap_in(staged, stored)
        return stored

    async def swap_in(self, staged: StagedWrite, stored: StoredObject) -> None:
        """Make `stored`, which a staged write became, the object of its uri. The caller holds its lock."""
        store = self.store
        now = store.clock()
        replaced = store.cache.get(stored.uri)
        # What a power loss would bring back is a miss, unless blocks changed hands.
        casual = replaced is None and stored.state not in DIRTY
        changes: list[Change] = [Put(stored, casual), DropHold(staged.stage_id)]
        if replaced is not None:
            changes.append(hold_change(store.cache.plan_hold(replaced, now)))
        staged.busy = True
        try:
            await store.make_durable(changes)
        finally:
            staged.busy = False
        store.cache.apply_commit(staged, stored, now)

    async def _through(self, stored: StoredObject) -> StoredObject:
        problem = await self.flusher.upload(stored.uri, stored.generation)
        if problem is not None:
            self.flusher.submit(stored.uri)
            raise DaemonError(
                ErrorCode.BACKEND_FAILED,
                f"commit_write: {stored.uri} is committed in the cache, but the backend did not take it and "
                f"will be tried again: {problem}",
            )
        now = self.store.cache.get(stored.uri)
        return now if now is not None and now.generation == stored.generation else stored


def _no_space(report: NoSpace) -> DaemonError:
    return DaemonError(ErrorCode.NO_SPACE, report.sentence())


def _not_staged(found: NotStaged, stage_id: str | None) -> DaemonError:
    if found.stale:
        return DaemonError(
            ErrorCode.STALE_STAGE,
            f"the staged write {stage_id} of {found.uri} is gone (committed, expired, or the daemon was "
            "restarted); stage it again",
        )
    return DaemonError(ErrorCode.NOT_STAGED, f"nothing is staged under {found.uri}; call stage_write first")
