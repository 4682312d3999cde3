"""Committing: what staged writes hold becomes the objects of their uris, durably."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import trio

from hypercache_protocol.errors import ErrorCode
from hypercache_protocol.states import DIRTY, StateEvent

from .access import DeviceError
from .catalog import CatalogError
from .catalog_rows import AddHold, Delete, DropHold, Put
from .core.objects import CHECKSUM_BYTES, StagedWrite, StoredObject, unpacked_checksums
from .core.staged_writes import NotStaged
from .errors import DaemonError
from .flusher import Flusher
from .orders import CommitOrder
from .refusals import no_backend, not_staged, not_through, refuse_rest
from .removal import Remover
from .store import Store, hold_change


@dataclass
class Committer:
    """Makes objects of staged writes. With `verify_on_commit` what is committed with `chunk_checksums` is
    read back first."""

    store: Store
    remover: Remover
    flusher: Flusher
    verify_on_commit: bool

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

    async def swap_in(self, planned: Sequence[tuple[StagedWrite, StoredObject]]) -> None:
        """Make what staged writes became the objects of their uris. The caller holds the locks of these.

        Raises:
            CatalogError: none of them became one.
        """
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
            # A cache entry that a power loss takes back is a miss. (Where one is replaced its blocks change
            # hands: what deletes it is never casual.)
            puts.append(Put(stored, casual=stored.state not in DIRTY))
        drops = [DropHold(staged.stage_id) for staged, _ in planned]
        await store.make_durable([*deletes, *puts, *drops, *holds])
        # Until here readers found what is replaced: its rest begins now.
        store.cache.apply_commits(planned, store.clock())

    # -- inside ----------------------------------------------------------------------------------------

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
                staged = self._found(order, index)
                self._check_commit(order, staged, checksums)
                if order.sha256 is not None or (self.verify_on_commit and checksums is not None):
                    await self._check_bytes(staged, order.sha256, checksums)
            except DaemonError as refusal:
                results[index] = refusal
                continue
            planned[index] = staged, self._plan(order, staged, checksums)
        return planned

    def _found(self, order: CommitOrder, index: int) -> StagedWrite:
        stage_id = order.stage_ids[index]
        found = self.store.cache.staged.find(order.uris[index], order.connection_id, stage_id)
        if isinstance(found, NotStaged):
            raise not_staged(found, stage_id)
        return found

    def _check_commit(self, order: CommitOrder, staged: StagedWrite, checksums: bytes | None) -> None:
        through = order.is_through(staged)
        if through and order.local_only:
            raise DaemonError(
                ErrorCode.CONTRADICTION,
                f"commit_write: {staged.uri} cannot be both local_only and write_through; leave one out",
            )
        if through and not self.flusher.has_target(staged.uri):
            raise no_backend(staged.uri)
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
