"""Staging, appending and committing: the way of an object into the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import trio

from hypercache_protocol.errors import ErrorCode
from hypercache_protocol.fields import CHUNK_SIZE, Tier
from hypercache_protocol.messages import AppendWrite, CommitWrite, StageWrite
from hypercache_protocol.states import DIRTY, StateEvent

from .access import DeviceError
from .catalog import CatalogError
from .catalog_rows import AddHold, DropHold, Put
from .core.allocator import Extent
from .core.cache import Room, StageOptions, Want
from .core.extents import rounded_up
from .core.objects import NoRoom, StagedWrite, StoredObject
from .errors import DaemonError
from .flusher import Flusher
from .refusals import (
    no_backend,
    no_space,
    not_staged,
    not_through,
    refuse_rest,
    too_many_chunks,
    too_many_objects,
)
from .removal import Remover
from .store import Store, hold_change, writer_hold

_TRIES = 4
MOST_SPARE_CHUNKS = 1 << 18
"""Of an object, beyond those that its bytes need: none where whole chunks are appended, as every released
client does. One of many tiny pieces would take memory, and have all wait for the reply to who asks for it."""


@dataclass
class Writer:
    """Carries out the three steps of a write. With `verify_on_commit` what is committed with
    `chunk_checksums` is read back first."""

    store: Store
    remover: Remover
    flusher: Flusher
    verify_on_commit: bool = False
    keeps_unflushed: bool = False
    """Without a backend, what was committed to be flushed to one is never evicted."""

    async def stage(
        self, requests: Sequence[StageWrite], connection_id: int | None
    ) -> list[StagedWrite | DaemonError]:
        """Blocks for each new write, or why there are none: no space, or a write-through that no backend
        would take. `connection_id` None is the daemon itself."""
        results: dict[int, StagedWrite | DaemonError] = {}
        for index, request in enumerate(requests):
            if request.write_through and (refusal := self._no_backend(request.uri)):
                results[index] = refusal
        self.store.release_due()
        try:
            await self._stage_all(requests, connection_id, results)
        except (CatalogError, OSError) as error:
            refuse_rest(results, range(len(requests)), "stage_write", error)
        return [results[index] for index in range(len(requests))]

    async def append(
        self, request: AppendWrite, connection_id: int
    ) -> tuple[StagedWrite, tuple[Extent, ...]]:
        """More blocks for a staged write, and only the new ones.

        Raises:
            DaemonError: nothing is staged, another tier is asked for, it would have too many chunks, or there
                is no space.
        """
        self.store.release_due()
        appended = await self._append(request, connection_id)
        for _ in range(self._tries):
            if isinstance(appended, tuple):
                return appended
            room = self.store.cache.room(appended)
            if not await self.remover.make_room(room, appended.wanted_bytes):
                break
            appended = await self._append(request, connection_id)
        if not isinstance(appended, tuple):
            raise self._no_space(appended)
        return appended

    async def commit(
        self, requests: Sequence[CommitWrite], connection_id: int
    ) -> list[StoredObject | DaemonError]:
        """Make each staged write the object, durably; with write-through, in the backend too.

        Each is refused by itself where nothing is staged, the request contradicts itself or the layout,
        or the sha256 does not match (the staged write stays), or where a write-through did not reach the
        backend (the object is committed here and goes on trying, unless it was removed meanwhile).
        """
        results: dict[int, StoredObject | DaemonError] = {}
        for indexes in _rounds_of_distinct([request.uri for request in requests]):
            await self._commit_round(requests, indexes, connection_id, results)
        self.remover.check_watermarks(request.uri for request in requests)
        return [results[index] for index in range(len(requests))]

    def discard_internal(self, staged: StagedWrite) -> None:
        """Drop what the daemon itself staged."""
        self.store.cache.discard(staged, self.store.clock(), self.store.times.quarantine_s)

    # -- staging ---------------------------------------------------------------------------------------

    def _tier(self, wanted: Tier | None) -> Tier:
        # The reply's layout names the tier of each chunk and clients go by that, so with the RAM tier
        # turned off its users are served from the devices.
        if wanted is None or wanted not in self.store.cache.pools:
            return Tier.NVME
        return wanted

    def _no_backend(self, uri: str) -> DaemonError | None:
        return None if self.flusher.has_target(uri) else no_backend(uri)

    async def _stage_all(
        self,
        requests: Sequence[StageWrite],
        connection_id: int | None,
        results: dict[int, StagedWrite | DaemonError],
    ) -> None:
        """Stage what has no result yet, evicting as much as that takes."""
        left = [request for index, request in enumerate(requests) if index not in results]
        if self.remover.object_room() < len(left):
            fit = self.store.cache.that_fit_together(list(map(self._want, left)))
            await self.remover.make_object_room(sum(fit))
        reports = await self._stage(requests, connection_id, results)
        for _ in range(self._tries):
            if not reports or not await self._make_room(requests, reports):
                break
            reports = await self._stage(requests, connection_id, results)
        results.update({index: self._no_space(report) for index, report in reports.items()})

    async def _stage(
        self,
        requests: Sequence[StageWrite],
        connection_id: int | None,
        results: dict[int, StagedWrite | DaemonError],
    ) -> dict[int, NoRoom]:
        """Stage what has no result yet; returns what did not fit. It takes the locks of the uris itself:
        an eviction waits for those of others, so none may be held around this."""
        reports: dict[int, NoRoom] = {}
        left = [index for index in range(len(requests)) if index not in results]
        async with self.store.locks.hold_all(requests[index].uri for index in left):
            fresh: dict[int, StagedWrite] = {}
            room = self.remover.object_room()
            for index in left:
                if len(fresh) >= room:
                    results[index] = self._too_many_or_too_much(requests[index])
                    continue
                staged = self._stage_one(requests[index], connection_id)
                if isinstance(staged, StagedWrite):
                    fresh[index] = staged
                else:
                    reports[index] = staged
            await self._record([(staged, 0) for staged in fresh.values()], self.store.cache.undo_stage)
        results.update(fresh)
        return reports

    def _no_space(self, report: NoRoom) -> DaemonError:
        return no_space(report, is_kept_for_good=self.keeps_unflushed)

    def _too_many_or_too_much(self, request: StageWrite) -> DaemonError:
        report = self.store.cache.misfit(self._want(request))
        return too_many_objects(self.remover.max_objects) if report is None else self._no_space(report)

    def _want(self, request: StageWrite) -> Want:
        return request.uri, request.size_bytes, self._tier(request.tier)

    def _stage_one(self, request: StageWrite, connection_id: int | None) -> StagedWrite | NoRoom:
        options = StageOptions(request.auto_flush_s3, request.write_through, request.pinned)
        tier = self._tier(request.tier)
        now = self.store.clock()
        return self.store.cache.stage(request.uri, request.size_bytes, tier, connection_id, options, now)

    @property
    def _tries(self) -> int:
        """How often room is made: each time the next prefix may turn out to be full, or others may have taken
        what was made."""
        return _TRIES + self.store.cache.capacities.nesting

    async def _make_room(self, requests: Sequence[StageWrite], reports: Mapping[int, NoRoom]) -> bool:
        """Evict for as much of what did not fit as everything that limits it can hold together; False where
        nothing can be."""
        cache = self.store.cache
        fit = cache.that_fit_together([self._want(requests[index]) for index in reports])
        wanted: Counter[Room] = Counter()
        for report in compress(reports.values(), fit):
            wanted[cache.room(report)] += rounded_up(report.wanted_bytes)
        made = [await self.remover.make_room(room, wanted_bytes) for room, wanted_bytes in wanted.items()]
        return any(made)

    async def _record(
        self, fresh: Sequence[tuple[StagedWrite, int]], undo: Callable[[StagedWrite], None]
    ) -> None:
        """Make the blocks of staged writes, each from number `first` on, known to the catalog and the RAM
        tier; where that fails nothing of it stays."""
        if not fresh:
            return
        made: list[tuple[StagedWrite, int]] = []
        try:
            for staged, first in fresh:
                self.store.create_ram_files(staged.tier, staged.extents[first:])
                made.append((staged, first))
            await self.store.make_durable([writer_hold(staged, first) for staged, first in fresh])
        except BaseException:
            for staged, first in made:
                self.store.remove_ram_files(staged.tier, staged.extents[first:])
            for staged, _ in fresh:
                undo(staged)
            raise

    def _check_append(self, request: AppendWrite, staged: StagedWrite) -> None:
        if request.tier is not None and self._tier(request.tier) is not staged.tier:
            raise DaemonError(
                ErrorCode.CONTRADICTION,
                f"append_write: {request.uri} is staged in the {staged.tier.value} tier and cannot go on in "
                f"{request.tier.value}",
            )

    async def _append(
        self, request: AppendWrite, connection_id: int
    ) -> tuple[StagedWrite, tuple[Extent, ...]] | NoRoom:
        async with self.store.locks.hold(request.uri):
            staged = self._found(request.uri, connection_id, request.stage_id)
            self._check_append(request, staged)
            first = len(staged.extents)
            fewest = _chunks(staged.size_bytes + request.size_bytes)
            if first + _chunks(request.size_bytes) - fewest > MOST_SPARE_CHUNKS:
                raise too_many_chunks(request.uri, first, MOST_SPARE_CHUNKS)
            extents = self.store.cache.append(staged, request.size_bytes, self.store.clock())
            if not isinstance(extents, tuple):
                return extents
            await self._record([(staged, first)], lambda it: self.store.cache.undo_append(it, extents))
            return staged, extents

    # -- committing ------------------------------------------------------------------------------------

    async def _commit_round(
        self,
        requests: Sequence[CommitWrite],
        indexes: Sequence[int],
        connection_id: int,
        results: dict[int, StoredObject | DaemonError],
    ) -> None:
        """Commit requests of different uris, all in one transaction."""
        async with self.store.locks.hold_all(requests[index].uri for index in indexes):
            planned = await self._planned(requests, indexes, connection_id, results)
            try:
                await self.swap_in(list(planned.values()))
            except (CatalogError, OSError) as error:
                refuse_rest(results, planned, "commit_write", error)
                return
        async with trio.open_nursery() as nursery:
            for index, (staged, stored) in planned.items():
                results[index] = stored
                if _is_through(requests[index], staged):
                    nursery.start_soon(self._through, index, stored, results)
                elif stored.state in DIRTY:
                    self.flusher.submit(stored.uri)

    async def _planned(
        self,
        requests: Sequence[CommitWrite],
        indexes: Sequence[int],
        connection_id: int,
        results: dict[int, StoredObject | DaemonError],
    ) -> dict[int, tuple[StagedWrite, StoredObject]]:
        """What each request would commit and what that becomes; those that are refused have results."""
        planned: dict[int, tuple[StagedWrite, StoredObject]] = {}
        for index in indexes:
            request = requests[index]
            try:
                staged = self._found(request.uri, connection_id, request.stage_id)
                self._check_commit(request, staged)
                await self._check_bytes(request, staged)
            except DaemonError as refusal:
                results[index] = refusal
                continue
            planned[index] = staged, self._plan(request, staged)
        return planned

    def _found(self, uri: str, connection_id: int, stage_id: str | None) -> StagedWrite:
        found = self.store.cache.find_staged(uri, connection_id, stage_id)
        if isinstance(found, StagedWrite):
            return found
        raise not_staged(found, stage_id)

    def _check_commit(self, request: CommitWrite, staged: StagedWrite) -> None:
        through = _is_through(request, staged)
        if through and request.local_only:
            raise DaemonError(
                ErrorCode.CONTRADICTION,
                f"commit_write: {request.uri} cannot be both local_only and write_through; leave one out",
            )
        if through and (refusal := self._no_backend(request.uri)):
            raise refusal
        checksums = request.chunk_checksums
        if checksums is not None and len(checksums) != len(staged.extents):
            raise DaemonError(
                ErrorCode.BAD_REQUEST,
                f"commit_write: chunk_checksums has {len(checksums)} entries and {request.uri} was staged "
                f"with {len(staged.extents)} chunks; give one CRC-32 per chunk, in layout order",
            )

    async def _check_bytes(self, request: CommitWrite, staged: StagedWrite) -> None:
        """Read back what is to be verified, in a worker thread."""
        try:
            await self._check_sha256(request, staged)
            await self._check_chunks(request, staged)
        except (DeviceError, OSError) as error:
            raise DaemonError(
                ErrorCode.UNAVAILABLE, f"commit_write: {request.uri} cannot be read back: {error}"
            ) from error

    async def _check_sha256(self, request: CommitWrite, staged: StagedWrite) -> None:
        if request.sha256 is None:
            return
        found = await self.store.sha256_of(staged)
        if found != request.sha256.lower():
            raise DaemonError(
                ErrorCode.CHECKSUM_MISMATCH,
                f"commit_write: the blocks of {request.uri} have the SHA-256 {found}, not {request.sha256}; "
                "write them again, then commit",
            )

    async def _check_chunks(self, request: CommitWrite, staged: StagedWrite) -> None:
        if not self.verify_on_commit or request.chunk_checksums is None:
            return
        wrong = await self.store.wrong_chunks(staged, request.chunk_checksums)
        if wrong:
            raise DaemonError(
                ErrorCode.CHECKSUM_MISMATCH,
                f"commit_write: {len(wrong)} of {len(staged.extents)} chunks of {request.uri} don't have the "
                f"CRC-32 that chunk_checksums gives, the first of them chunk {wrong[0]} (counted from 0); "
                "write them again, then commit",
            )

    def _plan(self, request: CommitWrite, staged: StagedWrite) -> StoredObject:
        unflushed = not staged.auto_flush and not _is_through(request, staged)
        event = StateEvent.COMMIT_LOCAL_ONLY if request.local_only or unflushed else StateEvent.COMMIT
        return self.store.cache.plan_commit(
            staged,
            event,
            checksums=request.chunk_checksums,
            sha256=request.sha256,
            announce_committed=not request.local_only,
        )

    async def swap_in(self, planned: Sequence[tuple[StagedWrite, StoredObject]]) -> None:
        """Make what staged writes became the objects of their uris. The caller holds the locks of these."""
        if not planned:
            return
        store = self.store
        now = store.clock()
        puts: list[Put] = []
        holds: list[AddHold] = []
        for _, stored in planned:
            replaced = store.cache.owner(stored.uri)
            if replaced is not None:
                holds.append(hold_change(store.cache.plan_hold(replaced, now)))
            # What a power loss would bring back is a miss, unless blocks changed hands.
            puts.append(Put(stored, casual=replaced is None and stored.state not in DIRTY))
        drops = [DropHold(staged.stage_id) for staged, _ in planned]
        await store.make_durable([*puts, *drops, *holds])
        for staged, stored in planned:
            store.cache.apply_commit(staged, stored, now)

    async def _through(
        self, index: int, stored: StoredObject, results: dict[int, StoredObject | DaemonError]
    ) -> None:
        problem = await self.flusher.upload(stored.uri, stored.generation)
        if problem is not None:
            self.flusher.submit(stored.uri)
        found = self.store.cache.get(stored.uri)
        now = found if found is not None and found.generation == stored.generation else None
        if problem is not None:
            results[index] = not_through(stored.uri, problem, is_here=now is not None)
        elif now is not None:
            results[index] = now


def _chunks(size_bytes: int) -> int:
    """How many chunks so many bytes are, where no free space is broken."""
    return -(-size_bytes // CHUNK_SIZE)


def _is_through(request: CommitWrite, staged: StagedWrite) -> bool:
    return request.write_through or staged.write_through


def _rounds_of_distinct(uris: Sequence[str]) -> Iterator[list[int]]:
    """The indexes of `uris` such that no uri comes twice in one round, in order."""
    rounds: list[list[int]] = []
    seen: Counter[str] = Counter()
    for index, uri in enumerate(uris):
        if seen[uri] == len(rounds):
            rounds.append([])
        rounds[seen[uri]].append(index)
        seen[uri] += 1
    return iter(rounds)
