"""Results: once each, announced by the eventfd, and never an exception."""

import os
import select
import threading

import pytest

from hypercache_connector.completions import Completion, Completions


def is_signalled(completions: Completions) -> bool:
    return bool(select.select([completions.event_fd], [], [], 0)[0])


@pytest.fixture
def completions():
    made = Completions()
    yield made
    made.close()


def test_a_result_is_announced_taken_once_and_leaves_the_eventfd_clear(completions: Completions) -> None:
    assert not is_signalled(completions)
    first, second = completions.begin(2), completions.begin(None)
    completions.complete(Completion(first, True, "", [True, False]))
    completions.complete(Completion(second, False, "why", None))
    assert is_signalled(completions)
    assert completions.drain() == [(first, True, "", [True, False]), (second, False, "why", None)]
    assert not is_signalled(completions)
    assert completions.drain() == []


def test_an_id_completes_once_whoever_tries_again(completions: Completions) -> None:
    future_id = completions.begin(1)
    completions.complete(Completion(future_id, True, "", [True]))
    completions.complete(Completion(future_id, False, "again", [False]))
    assert completions.drain() == [(future_id, True, "", [True])]
    completions.complete(Completion(future_id, False, "again", [False]))
    completions.complete(Completion(987654, False, "never begun", None))
    assert completions.drain() == []
    assert not is_signalled(completions)


def test_one_write_announces_all_until_they_are_drained(completions: Completions) -> None:
    first, second, third = (completions.begin(None) for _ in range(3))
    for each in (first, second):
        completions.complete(Completion(each, True, "", None))
    completions.announce()
    assert os.eventfd_read(completions.event_fd) == 1
    os.eventfd_write(completions.event_fd, 1)
    assert [each.future_id for each in completions.drain()] == [first, second]
    assert not is_signalled(completions)
    completions.announce()
    assert is_signalled(completions)
    completions.complete(Completion(third, True, "", None))
    assert [each.future_id for each in completions.drain()] == [third]
    assert not is_signalled(completions)


def test_who_drains_takes_only_what_has_no_result_yet(completions: Completions) -> None:
    first, second = completions.begin(1), completions.begin(1)
    completions.complete(Completion(first, False, "late", [False]))
    found = [Completion(each, True, "", [True]) for each in (first, second, 987654)]
    assert completions.settle(found) == [found[1]]
    assert not completions.pending


def test_close_fails_what_is_pending_and_frees_the_descriptor(open_descriptors) -> None:
    before = open_descriptors()
    completions = Completions()
    of_three, of_set = completions.begin(3), completions.begin(None)
    completions.close()
    completions.close()
    assert open_descriptors() == before
    results = {result.future_id: result for result in completions.drain()}
    assert results[of_three].result_bools == [False, False, False]
    assert results[of_set].result_bools is None
    assert not any(result.ok for result in results.values())
    assert completions.drain() == []


def test_ids_stay_unique_and_none_is_lost_under_many_threads(completions: Completions) -> None:
    begun: list[int] = []
    taken: list[Completion] = []

    def work() -> None:
        for _ in range(500):
            future_id = completions.begin(0)
            begun.append(future_id)
            completions.complete(Completion(future_id, True, "", []))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        select.select([completions.event_fd], [], [], 0.05)
        taken += completions.drain()
    taken += completions.drain()
    assert len(set(begun)) == 2000
    assert sorted(result.future_id for result in taken) == sorted(begun)
    assert completions.pending == 0
