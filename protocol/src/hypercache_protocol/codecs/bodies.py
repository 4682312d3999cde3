"""Words and field maps to models and back, the same for every codec: what is known, what may be dropped for
an older peer, and what is wrong, in a sentence.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..actions import ALL_REPLIES
from ..errors import ErrorCode, InvalidMessage, LocalProtocolError
from ..messages import STATUS_FREE, ErrorReply, Message, Reply, Request
from ..schema import held_models, newer_fields, reply_words, required_fields
from ..versions import LATEST, WireVersion

_M = TypeVar("_M", bound=Message)


# -- sending -------------------------------------------------------------------------------------------


def refuse_unsendable(request: Request, version: WireVersion) -> None:
    """Nothing, where a peer of `version` understands all of `request` that it must.

    Raises:
        LocalProtocolError: it sets a field that such a peer does not know and that may not be dropped.
    """
    for name, mark in newer_fields(type(request), version).items():
        if getattr(request, name) is not None and not mark.safe_to_drop:
            raise LocalProtocolError(
                f"{request.action}: {name} needs wire {mark.version} and this connection speaks wire "
                f"{version}; leave it out or upgrade the older side"
            )


def exclusions(model: type[BaseModel], version: WireVersion) -> dict[str, Any] | None:
    """What to leave out for a peer of `version`, as pydantic's `exclude` takes it; None where nothing."""
    return None if version >= LATEST else _exclusions(model, version)


@cache
def _exclusions(model: type[BaseModel], version: WireVersion) -> dict[str, Any]:
    own: dict[str, Any] = dict.fromkeys(newer_fields(model, version), True)
    for name, held in held_models(model).items():
        inner = _exclusions(held.model, version)
        if inner:
            own.setdefault(name, {"__all__": inner} if held.many else inner)
    return own


# -- receiving -----------------------------------------------------------------------------------------


def request_from(
    action: str, fields: dict[str, Any], known: Mapping[str, type[Request]], version: WireVersion
) -> tuple[Request, int]:
    """The request that an action and its fields are, and how many unknown fields it had.

    Args:
        known: the actions of this wire.
        version: what this side is held to; fields of later versions count as unknown.

    Raises:
        InvalidMessage: with a sentence that names what is wrong.
    """
    model = known.get(action)
    if model is None:
        names = ", ".join(sorted(known))
        raise InvalidMessage(f"unknown action {action[:64]!r}; known are {names}", ErrorCode.UNKNOWN_ACTION)
    return _validated(model, action, fields, version)


def reply_from(
    status: object, fields: dict[str, Any], request: Request, version: WireVersion
) -> tuple[Reply, int]:
    """The reply to `request` that a status and its fields are, and how many unknown fields it had.

    A status that this side does not know becomes an ErrorReply that says so.

    Raises:
        InvalidMessage: it is no reply, or none to this request.
    """
    model = _reply_model(type(request), status, fields)
    if model is not None and model is not ErrorReply:
        return _validated(model, f"the reply to {request.action}", fields, version)
    if not isinstance(status, str):
        raise InvalidMessage(f"the reply to {request.action} has no field 'status' that holds a string")
    # An error stays an error however little it says: the request it answers is known.
    if not isinstance(fields.get("error_message"), str):
        fields["error_message"] = f"the daemon answered {request.action} with {status[:64]!r} and no reason"
    return _validated(ErrorReply, f"the error reply to {request.action}", fields, version)


def _reply_model(request: type[Request], status: object, fields: dict[str, Any]) -> type[Reply] | None:
    model = reply_words(request).get(status) if isinstance(status, str) else None
    if model is not None or request not in STATUS_FREE or "error_message" in fields:
        return model
    sole = ALL_REPLIES[request][0]
    return sole if required_fields(sole) <= fields.keys() else None


def _validated(model: type[_M], what: str, fields: dict[str, Any], version: WireVersion) -> tuple[_M, int]:
    seen = fields if version >= LATEST else _as_seen_by(model, fields, version)
    try:
        message = model.model_validate(seen)
    except ValidationError as error:
        raise InvalidMessage(f"{what}: {_sentence(error)}") from None
    return message, _count_unknown(message, fields)


def _as_seen_by(model: type[BaseModel], fields: dict[str, Any], version: WireVersion) -> dict[str, Any]:
    """The same fields without those that came after `version`, in the items of lists too."""
    hidden = newer_fields(model, version)
    seen = {name: value for name, value in fields.items() if name not in hidden}
    for name in held_models(model).keys() & seen.keys():
        seen[name] = _value_as_seen_by(held_models(model)[name].model, seen[name], version)
    return seen


def _value_as_seen_by(model: type[BaseModel], value: Any, version: WireVersion) -> Any:
    if isinstance(value, list):
        return [_value_as_seen_by(model, item, version) for item in value]
    return _as_seen_by(model, value, version) if isinstance(value, dict) else value


def _count_unknown(message: Message, fields: Mapping[str, Any]) -> int:
    """How many of `fields`, those of models inside among them, `message` did not take."""
    if message.model_extra is not None:
        return 0
    unknown = len(fields) - len(message.model_fields_set)
    for name, held in held_models(type(message)).items():
        taken = getattr(message, name)
        if not taken or name not in fields:
            continue
        pairs = zip(fields[name], taken, strict=True) if held.many else [(fields[name], taken)]
        unknown += sum(len(item) - len(inner.model_fields_set) for item, inner in pairs)
    return unknown


def _sentence(error: ValidationError) -> str:
    """The first thing that is wrong, as 'field: what', with the value cut short."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return f"the field {path!r} is missing"
    if first["type"] == "tuple_type":
        return f"{path}: must be a list (got {_short(first['input'])})"
    return f"{path}: {first['msg'].removeprefix('Value error, ')} (got {_short(first['input'])})"


def _short(value: object) -> str:
    return reprlib.repr(value)[:64]  # abbreviates before it builds: the value may be a whole line long
