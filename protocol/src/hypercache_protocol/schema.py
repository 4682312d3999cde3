"""What the models say about themselves: since-marks, models inside models, and the words of replies.

The codec, the tables in docs/wire.md and the frozen schemas all read it here, so they cannot disagree.
"""

from __future__ import annotations

from functools import cache
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .fields import Since
from .messages import REPLIES, STATUS_ALIASES, ErrorReply, Reply, Request
from .versions import WireVersion


@cache
def since_marks(model: type[BaseModel]) -> dict[str, Since]:
    """Field name -> its mark, for the fields of `model` that came after wire 1.0."""
    marks = {name: _mark(info) for name, info in model.model_fields.items()}
    return {name: mark for name, mark in marks.items() if mark is not None}


@cache
def newer_fields(model: type[BaseModel], version: WireVersion) -> dict[str, Since]:
    """The fields of `model` that a peer of `version` does not know."""
    return {name: mark for name, mark in since_marks(model).items() if mark.version > version}


@cache
def item_models(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Field name -> the model of its items, for the fields of `model` that hold a list of models."""
    found = {}
    for name, info in model.model_fields.items():
        for argument in get_args(info.annotation):
            if isinstance(argument, type) and issubclass(argument, BaseModel):
                found[name] = argument
    return found


@cache
def reply_words(request: type[Request]) -> dict[str, type[Reply]]:
    """Status word -> the reply that it stands for in an answer to `request`, other spellings included."""
    possible: list[type[Reply]] = [*REPLIES[request], ErrorReply]
    aliases = {alias: model for model in possible for alias in STATUS_ALIASES.get(model, ())}
    return aliases | {model.status: model for model in possible}


@cache
def required_fields(model: type[BaseModel]) -> frozenset[str]:
    """The fields without which there is no such message."""
    return frozenset(name for name, info in model.model_fields.items() if info.is_required())


def _mark(info: FieldInfo) -> Since | None:
    return next((item for item in info.metadata if isinstance(item, Since)), None)
