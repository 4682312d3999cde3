"""The transition table, the versions, and the tables that the documents and the codec share."""

from itertools import product

import pytest
from pydantic import ValidationError

from hypercache_protocol.actions import ALL_REPLIES
from hypercache_protocol.batches import FRAMED_REPLIES, BatchRequest, Hello
from hypercache_protocol.errors import ERROR_MEANINGS, ErrorCode, InvalidMessage, ProtocolError
from hypercache_protocol.fields import CHUNK_SIZE
from hypercache_protocol.messages import (
    REPLIES,
    REQUESTS,
    ErrorReply,
    Locate,
    Message,
    PongReply,
    Reply,
    Request,
)
from hypercache_protocol.schema import field_rows, possible_replies, reply_words, since_marks
from hypercache_protocol.states import (
    DIRTY,
    EVICTABLE,
    STATE_MEANINGS,
    TRANSITIONS,
    StateEvent,
    SyncStatus,
    next_state,
)
from hypercache_protocol.versions import (
    FEATURES,
    LATEST,
    RELEASED,
    WIRE_1_0,
    WIRE_1_1,
    WireVersion,
    features_of,
    majors_up_to,
)

# -- states --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "event"), list(product(SyncStatus, StateEvent)))
def test_an_event_leads_where_the_table_says_or_is_a_bug(state: SyncStatus, event: StateEvent) -> None:
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(ValueError, match=f"state {state.value} cannot take the event '{event.value}'"):
            next_state(state, event)


def test_every_state_is_reached_from_staged_and_nothing_returns_there() -> None:
    reached = {SyncStatus.STAGED}
    while more := {after for (before, _), after in TRANSITIONS.items() if before in reached} - reached:
        reached |= more
    assert reached == set(SyncStatus)
    assert SyncStatus.STAGED not in TRANSITIONS.values()


def test_local_only_is_never_left() -> None:
    assert not [event for state, event in TRANSITIONS if state is SyncStatus.LOCAL_ONLY]


def test_what_only_this_cache_has_is_never_evictable() -> None:
    assert not DIRTY & EVICTABLE
    assert set(SyncStatus) == {SyncStatus.STAGED} | DIRTY | EVICTABLE


def test_every_state_and_every_error_code_has_its_meaning() -> None:
    assert set(STATE_MEANINGS) == set(SyncStatus)
    assert set(ERROR_MEANINGS) == set(ErrorCode)


# -- versions ------------------------------------------------------------------------------------------


def test_versions_compare_by_their_numbers() -> None:
    assert WIRE_1_0 < WIRE_1_1 < WireVersion(1, 10) < WireVersion(2, 0)
    assert str(WIRE_1_1) == "1.1"
    assert list(RELEASED) == sorted(RELEASED)
    assert RELEASED[-1] == LATEST


def test_a_version_has_the_features_of_those_before_it() -> None:
    assert features_of(WIRE_1_0) == frozenset()
    assert features_of(WIRE_1_1) >= {"local_only", "chunk_checksums", "stage_id"}
    assert features_of(WireVersion(9, 9)) == frozenset().union(*FEATURES.values())
    assert set(FEATURES) == set(RELEASED)


def test_a_daemon_tells_the_majors_that_it_speaks() -> None:
    assert majors_up_to(WIRE_1_0) == (1,)
    assert majors_up_to(WIRE_1_1) == (1,)
    assert majors_up_to(LATEST) == (1, 2)


# -- tables --------------------------------------------------------------------------------------------


def every_model(base: type[Message]) -> set[type[Message]]:
    return set(base.__subclasses__()).union(*map(every_model, base.__subclasses__()))


def test_no_request_and_no_reply_is_outside_the_tables() -> None:
    assert set(ALL_REPLIES) == every_model(Request) - {BatchRequest}
    assert set(ALL_REPLIES) == {*REPLIES, Hello, *FRAMED_REPLIES}
    replies = {reply for replies in ALL_REPLIES.values() for reply in replies} | {ErrorReply}
    assert replies == {model for model in every_model(Reply) if not model.__name__.startswith("_")}
    assert {action: model.action for action, model in REQUESTS.items()} == {
        action: action for action in REQUESTS
    }
    assert len({model.action for model in ALL_REPLIES}) == len(ALL_REPLIES)


@pytest.mark.parametrize("request_", ALL_REPLIES, ids=lambda model: model.action)
def test_a_status_word_stands_for_one_reply_to_a_request(request_: type[Request]) -> None:
    words = reply_words(request_)
    assert {model.status: model for model in possible_replies(request_)}.items() <= words.items()
    assert len({model.status for model in possible_replies(request_)}) == len(possible_replies(request_))
    assert set(words.values()) == set(possible_replies(request_))


def test_every_later_field_is_optional_and_without_a_value_of_its_own() -> None:
    # A default that is sent would be told to every old peer; one that is assumed would change old messages.
    for model in [*every_model(Request), *every_model(Reply)]:
        for row in field_rows(model):
            if row.since > model.since:
                assert not row.required
                assert row.default is None
        assert {row.name for row in field_rows(model) if row.since > model.since} == since_marks(model).keys()


def test_messages_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(Locate(uri="a"), "uri", "b")  # noqa: B010 - as an assignment mypy refuses it first
    assert hash(Locate(uri="a")) == hash(Locate(uri="a"))
    assert {PongReply(), PongReply()} == {PongReply()}


def test_the_chunk_size_is_4_mib() -> None:
    assert CHUNK_SIZE == 4194304


def test_an_invalid_message_carries_its_code() -> None:
    error = InvalidMessage("no", ErrorCode.TOO_LARGE)
    assert isinstance(error, ProtocolError)
    assert (str(error), error.message, error.code) == ("no", "no", ErrorCode.TOO_LARGE)
    assert InvalidMessage("no").code is ErrorCode.BAD_REQUEST
