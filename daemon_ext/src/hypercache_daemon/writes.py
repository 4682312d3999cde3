"""Staging, appending and committing: the way of an object into the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import trio

from hypercache_protocol.errors import ErrorCode
from hypercache_protocol.fields import CHUNK_SIZE, Tier
from hypercache_protocol.messages import AppendWrite
from hypercache_protocol.states import DIRTY, StateEvent

from .access import DeviceError
from .catalog import CatalogError
from .catalog_rows import AddHold, Delete, DropHold, Put
from .core.allocator import Extent
from .core.cache import Room, Want
from .core.extents import rounded_up
from .core.objects import (
    CHECKSUM_BYTES,
    NoRoom,
    StagedWrite,
    StoredObject,
    unpacked_checksums,
)
from .errors import DaemonError
from .flusher import Flusher
from .orders import CommitOrder, StageOrder
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
from .store import Store, appended_hold, hold_change, writer_hold

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

    async def stage(self, order: StageOrder) -> list[StagedWrite | DaemonError]:
        """Blocks for each new write, or why there are none: no space, or a write-through that no backend
        would take."""
        results: dict[int, StagedWrite | DaemonError] = {}
        if order.options.write_through:
            refusals = enumerate(map(self._no_backend, order.uris))
            results |= {index: refusal for index, refusal in refusals if refusal is not None}
        self.store.release_due()
        try:
            await self._stage_all(order, results)
        except (CatalogError, OSError) as error:
            refuse_rest(results, range(len(order.uris)), "stage_write", error)
        return [results[index] for index in range(len(order.uris))]

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

    async def commit(self, order: CommitOrder) -> list[StoredObject | DaemonError]:
        """Make each staged write the object, durably; with write-through, in the backend too.

        Each is refused by itself where nothing is staged, the request contradicts itself or the layout,
        or the sha256 does not match (the staged write stays), or where a write-through did not reach the
        backend (the object is committed here and goes on trying, unless it was removed meanwhile).
        """
        results: dict[int, StoredObject | DaemonError] = {}
        for indexes in _rounds_of_distinct(order.uris):
            await self._commit_round(order, indexes, results)
        self.remover.check_watermarks(order.uris)
        return [results[index] for index in range(len(order.uris))]

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

    async def _stage_all(self, order: StageOrder, results: dict[int, StagedWrite | DaemonError]) -> None:
        """Stage what has no result yet, evicting as much as that takes."""
        left = _without_result(order, results)
        if self.remover.object_room() < len(left):
            fit = self.store.cache.that_fit_together([self._want(order, index) for index in left])
            await self.remover.make_object_room(sum(fit))
        reports = await self._stage(order, results)
        for _ in range(self._tries):
            if not reports or not await self._make_room(order, reports):
                break
            reports = await self._stage(order, results)
        results.update({index: self._no_space(report) for index, report in reports.items()})

    async def _stage(
        self, order: StageOrder, results: dict[int, StagedWrite | DaemonError]
    ) -> dict[int, NoRoom]:
        """Stage what has no result yet; returns what did not fit. It takes the locks of the uris itself:
        an eviction waits for those of others, so none may be held around this."""
        left = _without_result(order, results)
        async with self.store.locks.hold_all([order.uris[index] for index in left]):
            fresh = self._stage_together(order, left)
            reports: dict[int, NoRoom] = {}
            if fresh is None:
                fresh = {}
                self._stage_one_by_one(order, left, fresh, reports, results)
            whole = list(fresh.values())
            await self._record(whole, list(map(writer_hold, whole)), self.store.cache.undo_stage)
        results.update(fresh)
        return reports

    def _stage_together(self, order: StageOrder, left: Sequence[int]) -> dict[int, StagedWrite] | None:
        """All that are left; None where each needs a look of its own."""
        if self.remover.object_room() < len(left):
            return None
        fresh = self.store.cache.stage_all(
            [order.uris[index] for index in left],
            [order.sizes_bytes[index] for index in left],
            self._tier(order.tier),
            order.connection_id,
            order.options,
            self.store.clock(),
        )
        return None if fresh is None else dict(zip(left, fresh, strict=True))

    def _stage_one_by_one(
        self,
        order: StageOrder,
        left: Sequence[int],
        fresh: dict[int, StagedWrite],
        reports: dict[int, NoRoom],
        results: dict[int, StagedWrite | DaemonError],
    ) -> None:
        room = self.remover.object_room()
        for index in left:
            want = self._want(order, index)
            if len(fresh) >= room:
                results[index] = self._too_many_or_too_much(want)
                continue
            staged = self.store.cache.stage(*want, order.connection_id, order.options, self.store.clock())
            if isinstance(staged, StagedWrite):
                fresh[index] = staged
            else:
                reports[index] = staged

    def _no_space(self, report: NoRoom) -> DaemonError:
        return no_space(report, is_kept_for_good=self.keeps_unflushed)

    def _too_many_or_too_much(self, want: Want) -> DaemonError:
        report = self.store.cache.misfit(want)
        return too_many_objects(self.remover.max_objects) if report is None else self._no_space(report)

    def _want(self, order: StageOrder, index: int) -> Want:
        return order.uris[index], order.sizes_bytes[index], self._tier(order.tier)

    @property
    def _tries(self) -> int:
        """How often room is made: each time the next prefix may turn out to be full, or others may have taken
        what was made."""
        return _TRIES + self.store.cache.capacities.nesting

    async def _make_room(self, order: StageOrder, reports: Mapping[int, NoRoom]) -> bool:
        """Evict for as much of what did not fit as everything that limits it can hold together; False where
        nothing can be."""
        cache = self.store.cache
        fit = cache.that_fit_together([self._want(order, index) for index in reports])
        wanted: Counter[Room] = Counter()
        for report in compress(reports.values(), fit):
            wanted[cache.room(report)] += rounded_up(report.wanted_bytes)
        made = [await self.remover.make_room(room, wanted_bytes) for room, wanted_bytes in wanted.items()]
        return any(made)

    async def _record(
        self, fresh: Sequence[StagedWrite], holds: Sequence[AddHold], undo: Callable[[StagedWrite], None]
    ) -> None:
        """Make new blocks of staged writes, which `holds` has, known to the catalog and the RAM tier; where
        that fails nothing of it stays."""
        if not fresh:
            return
        made: list[AddHold] = []
        try:
            for hold in holds:
                if hold.tier is Tier.RAM:
                    self.store.create_ram_files(hold.tier, hold.extents)
                    made.append(hold)
            await self.store.make_durable(holds)
        except BaseException:
            for hold in made:
                self.store.remove_ram_files(hold.tier, hold.extents)
            for staged in fresh:
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
            first = staged.chunk_count
            fewest = _chunks(staged.size_bytes + request.size_bytes)
            if first + _chunks(request.size_bytes) - fewest > MOST_SPARE_CHUNKS:
                raise too_many_chunks(request.uri, first, MOST_SPARE_CHUNKS)
            extents = self.store.cache.append(staged, request.size_bytes, self.store.clock())
            if not isinstance(extents, tuple):
                return extents
            hold = appended_hold(staged, first)
            await self._record([staged], [hold], lambda it: self.store.cache.undo_append(it, extents))
            return staged, extents

    # -- committing ------------------------------------------------------------------------------------

    async def _commit_round(
        self, order: CommitOrder, indexes: Sequence[int], results: dict[int, StoredObject | DaemonError]
    ) -> None:
        """Commit staged writes of different uris, all in one transaction."""
        async with self.store.locks.hold_all([order.uris[index] for index in indexes]):
            planned = await self._planned(order, indexes, results)
            try:
                await self.swap_in(list(planned.values()))
            except (CatalogError, OSError) as error:
                refuse_rest(results, planned, "commit_write", error)
                return
        results.update({index: stored for index, (_, stored) in planned.items()})
        dirty = {index: both for index, both in planned.items() if both[1].state in DIRTY}
        if not dirty:
            return
        async with trio.open_nursery() as nursery:
            for index, (staged, stored) in dirty.items():
                if order.is_through(staged):
                    nursery.start_soon(self._through, index, stored, results)
                else:
                    self.flusher.submit(stored.uri)

    async def _planned(
        self, order: CommitOrder, indexes: Sequence[int], results: dict[int, StoredObject | DaemonError]
    ) -> dict[int, tuple[StagedWrite, StoredObject]]:
        """What each would commit and what that becomes; those that are refused have results."""
        planned: dict[int, tuple[StagedWrite, StoredObject]] = {}
        for index in indexes:
            checksums = order.checksums[index]
            try:
                staged = self._found(order.uris[index], order.connection_id, order.stage_ids[index])
                self._check_commit(order, staged, checksums)
                if order.sha256 is not None or (self.verify_on_commit and checksums is not None):
                    await self._check_bytes(staged, order.sha256, checksums)
            except DaemonError as refusal:
                results[index] = refusal
                continue
            planned[index] = staged, self._plan(order, staged, checksums)
        return planned

    def _found(self, uri: str, connection_id: int, stage_id: str | None) -> StagedWrite:
        found = self.store.cache.find_staged(uri, connection_id, stage_id)
        if isinstance(found, StagedWrite):
            return found
        raise not_staged(found, stage_id)

    def _check_commit(self, order: CommitOrder, staged: StagedWrite, checksums: bytes | None) -> None:
        through = order.is_through(staged)
        if through and order.local_only:
            raise DaemonError(
                ErrorCode.CONTRADICTION,
                f"commit_write: {staged.uri} cannot be both local_only and write_through; leave one out",
            )
        if through and (refusal := self._no_backend(staged.uri)):
            raise refusal
        if checksums is not None and len(checksums) != CHECKSUM_BYTES * staged.chunk_count:
            raise DaemonError(
                ErrorCode.BAD_REQUEST,
                f"commit_write: chunk_checksums has {len(checksums) // CHECKSUM_BYTES} entries and "
                f"{staged.uri} was staged with {staged.chunk_count} chunks; give one CRC-32 per chunk, in "
                "layout order",
            )

    async def _check_bytes(self, staged: StagedWrite, sha256: str | None, checksums: bytes | None) -> None:
        """Read back what is to be verified, in a worker thread."""
        try:
            await self._check_sha256(staged, sha256)
            await self._check_chunks(staged, checksums)
        except (DeviceError, OSError) as error:
            raise DaemonError(
                ErrorCode.UNAVAILABLE, f"commit_write: {staged.uri} cannot be read back: {error}"
            ) from error

    async def _check_sha256(self, staged: StagedWrite, sha256: str | None) -> None:
        if sha256 is None:
            return
        found = await self.store.sha256_of(staged)
        if found != sha256.lower():
            raise DaemonError(
                ErrorCode.CHECKSUM_MISMATCH,
                f"commit_write: the blocks of {staged.uri} have the SHA-256 {found}, not {sha256}; "
                "write them again, then commit",
            )

    async def _check_chunks(self, staged: StagedWrite, checksums: bytes | None) -> None:
        if not self.verify_on_commit or checksums is None:
            return
        wrong = await self.store.wrong_chunks(staged, unpacked_checksums(checksums))
        if wrong:
            raise DaemonError(
                ErrorCode.CHECKSUM_MISMATCH,
                f"commit_write: {len(wrong)} of {staged.chunk_count} chunks of {staged.uri} don't have the "
                f"CRC-32 that chunk_checksums gives, the first of them chunk {wrong[0]} (counted from 0); "
                "write them again, then commit",
            )

    def _plan(self, order: CommitOrder, staged: StagedWrite, checksums: bytes | None) -> StoredObject:
        unflushed = not staged.auto_flush and not order.is_through(staged)
        event = StateEvent.COMMIT_LOCAL_ONLY if order.local_only or unflushed else StateEvent.COMMIT
        return self.store.cache.plan_commit(
            staged,
            event,
            checksums=checksums,
            sha256=order.sha256,
            announce_committed=not order.local_only,
        )

    async def swap_in(self, planned: Sequence[tuple[StagedWrite, StoredObject]]) -> None:
        """Make what staged writes became the objects of their uris. The caller holds the locks of these."""
        if not planned:
            return
        store = self.store
        now = store.clock()
        uris = [stored.uri for _, stored in planned]
        puts: list[Put] = []
        deletes: list[Delete] = []
        holds: list[AddHold] = []
        for (_, stored), replaced in zip(planned, store.cache.owners(uris), strict=True):
            if replaced is not None:
                deletes.append(Delete(replaced.generation))
                holds.append(hold_change(store.cache.plan_hold(replaced, now)))
            # What a power loss would bring back is a miss, unless blocks changed hands.
            puts.append(Put(stored, casual=replaced is None and stored.state not in DIRTY))
        drops = [DropHold(staged.stage_id) for staged, _ in planned]
        await store.make_durable([*deletes, *puts, *drops, *holds])
        # Until here readers found what is replaced: its rest begins now.
        store.cache.apply_commits(planned, store.clock())

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


def _without_result(order: StageOrder, results: Mapping[int, object]) -> list[int]:
    return [index for index in range(len(order.uris)) if index not in results]


def _rounds_of_distinct(uris: Sequence[str]) -> Iterable[Sequence[int]]:
    """The indexes of `uris` such that no uri comes twice in one round, in order."""
    if len(set(uris)) == len(uris):
        return [range(len(uris))]
    rounds: list[list[int]] = []
    seen: Counter[str] = Counter()
    for index, uri in enumerate(uris):
        if seen[uri] == len(rounds):
            rounds.append([])
        rounds[seen[uri]].append(index)
        seen[uri] += 1
    return rounds
