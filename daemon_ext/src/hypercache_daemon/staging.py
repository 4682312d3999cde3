"""Staging and appending: blocks for what clients are about to write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from hypercache_protocol.errors import ErrorCode
from hypercache_protocol.fields import CHUNK_SIZE, Tier
from hypercache_protocol.messages import AppendWrite

from .catalog import CatalogError
from .catalog_rows import AddHold
from .core.extents import Extent, rounded_up
from .core.objects import NoRoom, StagedWrite
from .core.rooms import Room, Want
from .core.staged_writes import NotStaged
from .errors import DaemonError
from .flusher import Flusher
from .orders import StageOrder
from .refusals import (
    no_backend,
    no_space,
    not_staged,
    refuse_rest,
    too_many_chunks,
    too_many_objects,
)
from .removal import Remover
from .store import Store, appended_hold, writer_hold

_TRIES = 4
MOST_SPARE_CHUNKS = 1 << 18
"""Of an object, beyond those that its bytes need: none where whole chunks are appended, as every released
client does. One of many tiny pieces would take memory, and have all wait for the reply to who asks for it."""


@dataclass
class Stager:
    """Finds blocks for new writes and for what is appended to them, evicting as much as that takes."""

    store: Store
    remover: Remover
    flusher: Flusher
    keeps_unflushed: bool
    """Without a backend, what was committed to be flushed to one is never evicted."""

    async def stage(self, order: StageOrder) -> list[StagedWrite | DaemonError]:
        """Blocks for each new write, or why there are none: no space, or a write-through that no backend
        would take."""
        results: dict[int, StagedWrite | DaemonError] = {}
        if order.options.write_through:
            has_target = self.flusher.has_target
            results |= {i: no_backend(uri) for i, uri in enumerate(order.uris) if not has_target(uri)}
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
            CatalogError, OSError: the new blocks could not be written down, or their RAM files made.
        """
        self.store.release_due()
        appended = await self._append(request, connection_id)
        for _ in range(self._tries):
            if isinstance(appended, tuple):
                return appended
            room = self.store.cache.rooms.of(appended)
            if not await self.remover.make_room(room, appended.wanted_bytes):
                break
            appended = await self._append(request, connection_id)
        if not isinstance(appended, tuple):
            raise self._no_space(appended)
        return appended

    # -- inside ----------------------------------------------------------------------------------------

    def _tier(self, wanted: Tier | None) -> Tier:
        # The reply's layout names the tier of each chunk and clients go by that, so with the RAM tier
        # turned off its users are served from the devices.
        if wanted is None or wanted not in self.store.cache.pools:
            return Tier.NVME
        return wanted

    async def _stage_all(self, order: StageOrder, results: dict[int, StagedWrite | DaemonError]) -> None:
        """Stage what has no result yet, evicting as much as that takes."""
        left = _without_result(order, results)
        if self.remover.object_room() < len(left):
            fit = self.store.cache.rooms.that_fit_together([self._want(order, index) for index in left])
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
        report = self.store.cache.rooms.misfit(want)
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
        fit = cache.rooms.that_fit_together([self._want(order, index) for index in reports])
        wanted: Counter[Room] = Counter()
        for report in compress(reports.values(), fit):
            wanted[cache.rooms.of(report)] += rounded_up(report.wanted_bytes)
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
        except BaseException:  # a cancelled one too: nobody hears of these blocks
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
            staged = self.store.cache.staged.find(request.uri, connection_id, request.stage_id)
            if isinstance(staged, NotStaged):
                raise not_staged(staged, request.stage_id)
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


def _chunks(size_bytes: int) -> int:
    """How many chunks so many bytes are, where no free space is broken."""
    return -(-size_bytes // CHUNK_SIZE)


def _without_result(order: StageOrder, results: Mapping[int, object]) -> list[int]:
    return [index for index in range(len(order.uris)) if index not in results]
