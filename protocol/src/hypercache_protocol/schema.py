"""What the models say about themselves: since-marks, models inside models, and the words of replies.

The codec, the tables in docs/wire.md and the frozen schemas all read it here, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .actions import ALL_REPLIES
from .fields import Since
from .messages import STATUS_ALIASES, ErrorReply, Message, Reply, Request
from .versions import WIRE_1_0, WireVersion


@cache
def since_marks(model: type[BaseModel]) -> dict[str, Since]:
    """Field name -> its mark, for the fields of `model` that came after wire 1.0."""
    marks = {name: _mark(info) for name, info in model.model_fields.items()}
    return {name: mark for name, mark in marks.items() if mark is not None}


@cache
def newer_fields(model: type[BaseModel], version: WireVersion) -> dict[str, Since]:
    """The fields of `model` that a peer of `version` does not know."""
    return {name: mark for name, mark in since_marks(model).items() if mark.version > version}


class Held(NamedTuple):
    """A model inside another one: itself, or `many` of it in a list."""

    model: type[Message]
    many: bool


@cache
def held_models(model: type[BaseModel]) -> dict[str, Held]:
    """Field name -> what it holds, for the fields of `model` that hold models."""
    held = {name: _held_in(info.annotation) for name, info in model.model_fields.items()}
    return {name: found for name, found in held.items() if found is not None}


def _held_in(annotation: Any) -> Held | None:
    # On Python 3.10 a tuple[...] passes for a class, so what has an origin is asked for its parts first.
    origin = get_origin(annotation)
    if origin is None:
        is_model = isinstance(annotation, type) and issubclass(annotation, Message)
        return Held(annotation, False) if is_model else None
    found = next((found for part in get_args(annotation) if (found := _held_in(part))), None)
    return found and Held(found.model, found.many or origin is tuple)


def possible_replies(request: type[Request]) -> tuple[type[Reply], ...]:
    """Every reply that `request` may have."""
    return (*ALL_REPLIES[request], ErrorReply)


@cache
def reply_words(request: type[Request]) -> dict[str, type[Reply]]:
    """Status word -> the reply that it stands for in an answer to `request`, other spellings included."""
    possible = possible_replies(request)
    aliases = {alias: model for model in possible for alias in STATUS_ALIASES.get(model, ())}
    return aliases | {model.status: model for model in possible}


@cache
def required_fields(model: type[BaseModel]) -> frozenset[str]:
    """The fields without which there is no such message."""
    return frozenset(name for name, info in model.model_fields.items() if info.is_required())


# -- for people and for the frozen schemas -------------------------------------------------------------


@dataclass(frozen=True)
class FieldRow:
    """One field of a message in words: `kind` is its JSON type, `limits` what its values keep to."""

    name: str
    kind: str
    limits: str
    required: bool
    default: Any
    since: WireVersion
    safe_to_drop: bool


def field_rows(model: type[BaseModel]) -> list[FieldRow]:
    """Every field of `model`, in its order on the wire."""
    schema = model.model_json_schema()
    parts = schema.get("$defs", {})
    first = model.since if issubclass(model, Message) else WIRE_1_0
    rows = []
    for name, field in schema.get("properties", {}).items():
        shape = _resolved(field, parts)
        mark = since_marks(model).get(name, Since(first, safe_to_drop=False))
        required = name in required_fields(model)
        row = FieldRow(
            name,
            _kind(shape, parts),
            _limits(shape),
            required,
            field.get("default"),
            mark.version,
            mark.safe_to_drop,
        )
        rows.append(row)
    return rows


def _resolved(shape: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """The shape itself where it is given by name, or beside null."""
    found: dict[str, Any] = next(
        (choice for choice in shape.get("anyOf", ()) if choice != {"type": "null"}), shape
    )
    return parts[found["$ref"].rpartition("/")[2]] if "$ref" in found else found


def _kind(shape: dict[str, Any], parts: dict[str, Any]) -> str:
    if shape.get("format") == "binary":
        return "bytes"
    if shape["type"] == "array":
        return f"list of {_kind(_resolved(shape['items'], parts), parts)}"
    return str(shape["title"] if shape["type"] == "object" else shape["type"])


def _limits(shape: dict[str, Any]) -> str:
    """What a value keeps to beyond its type: the model's own words for it, else its bounds."""
    if "enum" in shape:
        return ", ".join(shape["enum"])
    if "description" in shape and shape["type"] != "object":
        return str(shape["description"])
    if "pattern" in shape:
        return f"matches {shape['pattern']}"
    of = " characters" if shape["type"] == "string" else ""
    low = _whole(shape.get("minimum", shape.get("minLength")))
    high = _whole(shape.get("maximum", shape.get("maxLength")))
    match low, high:
        case None, None:
            return _limits(shape["items"]) if "items" in shape and "type" in shape["items"] else ""
        case None, _:
            return f"at most {high}{of}"
        case _, None:
            return f"at least {low}{of}"
        case _:
            return f"{low} to {high}{of}"


def _whole(bound: float | None) -> float | None:
    """Releases of pydantic differ in whether a bound of 0 on a float is 0 or 0.0."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _mark(info: FieldInfo) -> Since | None:
    return next((item for item in info.metadata if isinstance(item, Since)), None)
