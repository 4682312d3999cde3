"""The static checker is red for each kind of change that would break a released peer, and for no other."""

import json
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any

import pytest
from pydantic import Field, StrictInt, StrictStr, create_model

from hypercache_compat import golden
from hypercache_protocol import layout
from hypercache_protocol.fields import Since, Tier
from hypercache_protocol.messages import Locate, MissReply, Pin
from hypercache_protocol.states import SyncStatus
from hypercache_protocol.versions import LATEST, RELEASED, WIRE_1_1, WireVersion

CURRENT = Since(WireVersion(2, 99))


def frozen(name: str) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((golden.FOLDER / f"schemas/{name}.json").read_text(encoding="utf-8"))
    return held


def pin_like(**fields: Any) -> type[Any]:
    """A request with the fields of Pin, changed."""
    held = {name: (info.annotation, info) for name, info in Pin.model_fields.items()}
    held = {name: field for name, field in {**held, **fields}.items() if field is not None}
    return create_model("PinLike", **held)


def faults(model: type[Any], version: WireVersion = RELEASED[0]) -> list[str]:
    """What the checker says of a pin request that is `model` from now on."""
    then = frozen(f"wire-{version}")["requests"]["pin"]["fields"]
    return list(golden.lost(then, golden.field_schema(model, version)))


def test_nothing_changed_is_no_fault() -> None:
    assert faults(pin_like()) == []


def test_a_renamed_field_is_told() -> None:
    told = faults(pin_like(uri=None, name=(StrictStr, ...)))
    assert any(fault.startswith("/uri was {") and fault.endswith("is nothing") for fault in told)
    assert "/name is newly required" in told


def test_a_field_that_is_gone_is_told() -> None:
    (told,) = faults(pin_like(pinned=None))
    assert told.startswith("/pinned was {")


def test_a_re_typed_field_is_told() -> None:
    assert "/uri/kind was string and is integer" in faults(pin_like(uri=(StrictInt, ...)))


def test_a_field_that_became_required_is_told() -> None:
    assert "/pinned/required was False and is True" in faults(pin_like(pinned=(bool, ...)))


def test_another_default_is_told() -> None:
    assert "/pinned/default was True and is False" in faults(pin_like(pinned=(bool, False)))


def test_a_new_field_that_is_required_is_told() -> None:
    assert faults(pin_like(region=(StrictStr, ...))) == ["/region is newly required"]
    marked = pin_like(region=(Annotated[StrictStr, CURRENT], ...))
    assert "region" not in golden.field_schema(marked, RELEASED[0])


def test_a_new_field_that_names_no_version_is_told() -> None:
    told = faults(pin_like(region=(StrictStr | None, None)))
    assert told == ["/region is new and does not name the version that brought it"]


def test_a_new_field_that_names_a_released_version_is_told() -> None:
    model = pin_like(region=(Annotated[StrictStr | None, Since(WIRE_1_1)], None))
    assert faults(model) == []
    assert faults(model, WIRE_1_1) == ["/region is new and does not name the version that brought it"]


def test_a_new_field_that_names_a_later_version_is_none() -> None:
    model = pin_like(region=(Annotated[StrictStr | None, CURRENT], None))
    assert [fault for version in RELEASED[:2] for fault in faults(model, version)] == []


def test_an_answer_that_is_no_longer_given_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(golden.ALL_REPLIES, Locate, (MissReply,))
    told = list(golden.lost(frozen("wire-1.0"), golden.schema_of(RELEASED[0])))
    assert any("HIT" in fault for fault in told)


# -- limits --------------------------------------------------------------------------------------------


def limit_faults(**fields: Any) -> list[str]:
    """What the checker says of the limits of a pin request with these fields from now on."""
    then = frozen("limits-1.0")["requests"]["pin"]
    return list(golden.lost(then, golden._limits_in(pin_like(**fields), RELEASED[0])))


def test_limits_are_as_they_were_frozen() -> None:
    for version in RELEASED:
        assert list(golden.lost(frozen(f"limits-{version}"), golden.limits_of(version))) == []


@pytest.mark.parametrize(
    ("held", "now"),
    [
        (Annotated[StrictStr, Field(max_length=100)], "at most 100 characters"),
        (Annotated[StrictStr, Field(pattern="^[a-z]+$")], "matches ^[a-z]+$"),
        (StrictStr, "any value"),
    ],
)
def test_another_limit_is_told_be_it_narrower_or_wider(held: Any, now: str) -> None:
    assert limit_faults() == []
    assert limit_faults(uri=(held, ...)) == [f"/uri was 1 to 8192 bytes of UTF-8, no NUL and is {now}"]


def test_a_limit_of_what_had_none_is_told() -> None:
    frozen_reply = frozen("limits-1.0")["replies"]["ERROR to pin"]
    model = create_model("ErrorLike", error_message=(Annotated[StrictStr, Field(max_length=9)], ...))
    told = list(golden.lost(frozen_reply, golden._limits_in(model, RELEASED[0])))
    assert told == ["/error_message was any value and is at most 9 characters"]


def test_a_word_that_is_added_to_a_list_of_words_is_no_limit() -> None:
    for version in RELEASED:
        for held in frozen(f"limits-{version}")["replies"].values():
            assert not {"sync_status", "error_code", "tier"} & held.keys()


# -- codes ---------------------------------------------------------------------------------------------


def code_faults() -> list[str]:
    return list(golden.lost(frozen(f"codes-{LATEST}"), golden.codes_of(LATEST)))


def test_codes_are_as_they_were_frozen() -> None:
    for version in RELEASED:
        assert list(golden.lost(frozen(f"codes-{version}"), golden.codes_of(version))) == []


@pytest.fixture
def numbers() -> Iterator[tuple[dict[SyncStatus, int], dict[Tier, int]]]:
    """The columns' codes, put back afterwards."""
    kept = dict(layout.STATUS_CODES), dict(layout.TIER_CODES)
    yield layout.STATUS_CODES, layout.TIER_CODES
    layout.STATUS_CODES.clear()
    layout.STATUS_CODES.update(kept[0])
    layout.TIER_CODES.clear()
    layout.TIER_CODES.update(kept[1])


def test_a_code_that_is_used_again_is_told(numbers: tuple[dict[SyncStatus, int], dict[Tier, int]]) -> None:
    statuses, tiers = numbers
    del statuses[SyncStatus.COMMITTED]
    statuses[SyncStatus.STAGED] = 1
    tiers[Tier.NVME], tiers[Tier.RAM] = tiers[Tier.RAM], tiers[Tier.NVME]
    assert code_faults() == [
        "/sync_status codes/0 was STAGED and is nothing",
        "/sync_status codes/1 was COMMITTED and is STAGED",
        "/tier codes/0 was nvme and is ram",
        "/tier codes/1 was ram and is nvme",
    ]


class FewerCodes(str, Enum):
    """Some of the words of an error code, one of them renamed."""

    BAD_REQUEST = "BAD_REQUEST"
    NO_ROOM = "NO_ROOM"


def test_an_error_code_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "ErrorCode", FewerCodes)
    told = code_faults()
    assert "/error codes lacks NO_SPACE" in told
    assert "/error codes lacks BAD_REQUEST" not in told


def test_a_field_that_may_be_dropped_from_now_on_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "since_marks", lambda model: {"local_only": Since(WIRE_1_1)})
    assert "/never dropped lacks commit_write.local_only" in code_faults()


def test_a_word_that_is_no_longer_taken_for_another_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "STATUS_ALIASES", {})
    assert any(fault.startswith("/other spellings/WRITESTAGED was") for fault in code_faults())
