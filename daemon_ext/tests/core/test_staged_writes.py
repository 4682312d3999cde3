"""Which staged write a request means, and which ones nobody touches any more."""

from __future__ import annotations

import pytest

from hypercache_daemon.core.objects import StagedWrite
from hypercache_daemon.core.staged_writes import NotStaged, StagedWrites
from hypercache_protocol.fields import Tier

UNKNOWN = NotStaged("a", stale=False)
STALE = NotStaged("a", stale=True)
DROPPED = NotStaged("a", stale=False, dropped=True)


def write(stage_id: str, connection_id: int | None, uri: str = "a", touched_at: float = 0) -> StagedWrite:
    return StagedWrite(stage_id, uri, Tier.NVME, connection_id, False, False, False, touched_at, b"", 0)


def writes_of(*writes: StagedWrite) -> StagedWrites:
    staged = StagedWrites()
    staged.add(writes)
    return staged


def found(staged: StagedWrites, connection_id: int, stage_id: str | None = None) -> str | NotStaged:
    it = staged.find("a", connection_id, stage_id)
    return it if isinstance(it, NotStaged) else it.stage_id


@pytest.mark.parametrize(
    ("stage_id", "expected"),
    [("first", "first"), ("others", "others"), ("own", STALE), ("elsewhere", STALE), ("never", STALE)],
)
def test_a_stage_id_means_that_write_of_any_client_or_none(stage_id: str, expected: str | NotStaged) -> None:
    staged = writes_of(write("first", 1), write("others", 2), write("own", None), write("elsewhere", 1, "b"))
    assert found(staged, 1, stage_id) == expected


def test_without_one_the_connections_newest_is_meant_and_else_the_newest_of_all() -> None:
    staged = writes_of(write("old", 1), write("mine", 1), write("others", 2), write("own", None))
    assert [found(staged, connection_id) for connection_id in (1, 2, 3)] == ["mine", "others", "others"]
    assert found(writes_of(write("own", None)), 1) == UNKNOWN
    assert found(StagedWrites(), 1) == UNKNOWN


def test_who_lost_its_newest_write_gets_no_other_until_it_has_staged_again() -> None:
    older, newer = write("older", 1), write("newer", 1)
    staged = writes_of(older, newer, write("others", 2))
    staged.drop(newer)
    assert [found(staged, connection_id) for connection_id in (1, 2, 3)] == [DROPPED, "others", "others"]
    staged.add([write("again", 1)])
    assert found(staged, 1) == "again"


def test_who_lost_an_older_write_still_has_its_newest() -> None:
    older = write("older", 1)
    staged = writes_of(older, write("newer", 1))
    staged.drop(older)
    assert found(staged, 1) == "newer"


def test_what_is_removed_since_it_was_committed_is_not_remembered_as_lost() -> None:
    (only,) = writes = [write("only", 1)]
    staged = writes_of(*writes, write("others", 2))
    staged.remove(only)
    assert found(staged, 1) == "others"


def test_to_drop_what_the_daemon_itself_staged_takes_nothing_from_a_client() -> None:
    own = write("own", None)
    staged = writes_of(own, write("mine", 1))
    staged.drop(own)
    assert (staged.own_of("a"), found(staged, 1)) == ((), "mine")


def test_untouched_are_those_of_clients_alone_and_those_of_the_very_moment_too() -> None:
    times = {"before": 4.0, "then": 5.0, "after": 6.0}
    staged = writes_of(*[write(name, 1, touched_at=at) for name, at in times.items()], write("own", None))
    assert [it.stage_id for it in staged.untouched_since(5.0)] == ["before", "then"]
