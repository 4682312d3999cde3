"""Locks of uris: who gets them in which order, and that none stays behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from hypercache_daemon.locks import UriLocks


@pytest.fixture
def locks() -> Iterator[UriLocks]:
    """All free at the end, and nothing is kept of who had them."""
    locks = UriLocks()
    yield locks
    assert (locks._holders, locks._queues) == ({}, {})


async def hold_until(locks: UriLocks, uris: str, log: list[str], end: trio.Event) -> None:
    async with locks.hold_all(uris):
        log.append(uris)
        await end.wait()


async def test_who_wants_what_is_free_waits_for_nobody(locks: UriLocks) -> None:
    async with locks.hold_all("ab"):
        with trio.fail_after(1):
            async with locks.hold_all("cdc"):
                assert [uri for uri in "abcde" if locks.is_free(uri)] == ["e"]
            with locks.hold_now("cd"):
                assert not locks.is_free("d")
        with pytest.raises(AssertionError, match="others hold"), locks.hold_now("bc"):
            pass
        assert locks.is_free("c"), "all or none"


async def test_each_waits_for_all_that_came_before_and_want_the_same(locks: UriLocks) -> None:
    log: list[str] = []
    ends = {uris: trio.Event() for uris in ("ab", "bc", "a", "cd", "e")}
    async with trio.open_nursery() as nursery:
        for uris, end in ends.items():
            nursery.start_soon(hold_until, locks, uris, log, end)
            await wait_all_tasks_blocked()
        assert log == ["ab", "e"]
        for first, then in (("e", []), ("ab", ["bc", "a"]), ("a", []), ("bc", ["cd"]), ("cd", [])):
            del log[:]
            ends[first].set()
            await wait_all_tasks_blocked()
            assert sorted(log) == sorted(then)


async def test_who_is_cancelled_while_it_waits_gives_up_its_place_and_what_it_has(locks: UriLocks) -> None:
    log: list[str] = []
    end = trio.Event()
    async with trio.open_nursery() as nursery:
        async with locks.hold_all("ab"):
            async with trio.open_nursery() as given_up:
                given_up.start_soon(hold_until, locks, "ac", log, end)
                await wait_all_tasks_blocked()
                nursery.start_soon(hold_until, locks, "c", log, end)
                nursery.start_soon(hold_until, locks, "a", log, end)
                await wait_all_tasks_blocked()
                assert log == []
                given_up.cancel_scope.cancel()
            await wait_all_tasks_blocked()
            assert log == ["c"]
        await wait_all_tasks_blocked()
        assert log == ["c", "a"]
        end.set()


async def test_who_is_cancelled_when_its_turn_has_come_passes_it_on(locks: UriLocks) -> None:
    log: list[str] = []
    end = trio.Event()
    end.set()
    async with trio.open_nursery() as nursery:
        async with locks.hold("a"):
            given_up = trio.CancelScope()

            async def wait() -> None:
                with given_up:
                    await hold_until(locks, "ab", log, trio.Event())

            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            nursery.start_soon(hold_until, locks, "ba", log, end)
            await wait_all_tasks_blocked()
        given_up.cancel()  # after it got the lock and before it knows
        await wait_all_tasks_blocked()
        assert log[-1] == "ba"
