"""Golden bytes and schemas of every released wire version: added to, never edited.

    python -m hypercache_compat.golden            add what is missing
    python -m hypercache_compat.golden --check    add nothing; fail where something is missing or differs

Rules:
1. A file that exists is never written again. Where the code no longer makes it, the code is wrong: a
   field was renamed, re-typed or dropped, or an encoder changed what old peers are sent.
2. FROZEN.sha256 names every frozen file with its digest, so that an edit shows in review as two edits.
3. A new version has a new folder. What a later build adds to an old one is made by the old encoder.
4. A frozen schema is broken by a field that is gone, renamed, re-typed, of other limits or newly required, by
   a new field that does not name the version that brought it, and by a code or word that is gone or means
   another thing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypercache_protocol.actions import ALL_REPLIES, actions_in_frames, actions_on_lines
from hypercache_protocol.batches import HelloLimits, ItemError, LayoutColumns
from hypercache_protocol.codecs import msgpack_frames
from hypercache_protocol.codecs.json_lines import decode_reply, decode_request, encode_reply, encode_request
from hypercache_protocol.errors import ErrorCode, InvalidMessage, LocalProtocolError
from hypercache_protocol.fields import Tier
from hypercache_protocol.layout import STATUS_CODES, TIER_CODES
from hypercache_protocol.messages import (
    STATUS_ALIASES,
    ChunkLocation,
    DeviceInfo,
    Message,
    Reply,
    Request,
)
from hypercache_protocol.schema import field_rows, newer_fields, possible_replies, since_marks
from hypercache_protocol.states import SyncStatus
from hypercache_protocol.versions import RELEASED, WIRE_1_0, WIRE_2_0, WireVersion, features_of

from .golden_examples import REPLY_EXAMPLES, REQUEST_EXAMPLES

FOLDER = Path(__file__).parents[2]
MANIFEST = "FROZEN.sha256"
FRAME_ID = 7
"""The id in every frozen frame."""

ACTIONS = {request.action: request for request in ALL_REPLIES}
PARTS: tuple[type[Message], ...] = (ChunkLocation, DeviceInfo, HelloLimits, ItemError, LayoutColumns)
FROZEN_FOLDERS = ("schemas", "vectors", "transcripts")


# -- vectors -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vector:
    """One frozen line or frame: what it answers or asks, its bytes, and the fields that a reader must find
    in it (bytes among them as hexadecimal digits)."""

    direction: str
    action: str
    line: bytes
    fields: dict[str, Any]
    is_frame: bool = False

    def as_json(self) -> dict[str, Any]:
        """The vector as its file holds it."""
        return {
            "direction": self.direction,
            "action": self.action,
            **({"frame": self.line.hex()} if self.is_frame else {"line": self.line.decode()}),
            "fields": self.fields,
        }

    def faults(self, version: WireVersion) -> Iterator[str]:
        """What this build reads or writes otherwise than `version` did."""
        try:
            message, unknown = self.decoded(version)
        except InvalidMessage as error:
            yield f"is no longer read: {error.message}"
            return
        if unknown:
            yield f"holds {unknown} fields that are no longer known"
        if fields_of(message) != self.fields:
            yield f"is read as {fields_of(message)}"
        if (written := _bytes_of(message, version, self.is_frame)) != self.line:
            yield f"is written as {written!r}"

    def decoded(self, version: WireVersion) -> tuple[Request | Reply, int]:
        """The message that a side held to `version` reads, and how many unknown fields it had."""
        # Only the type of the request says how its reply is read.
        request = ACTIONS[self.action].model_construct()
        if not self.is_frame:
            if self.direction == "request":
                return decode_request(self.line, version)
            return decode_reply(self.line, request, version)
        request_id, word, fields = msgpack_frames.decode_envelope(self.line[4:])
        if request_id != FRAME_ID or int.from_bytes(self.line[:4], "big") != len(self.line) - 4:
            raise InvalidMessage("the frame's length or its id is not what was frozen")
        if self.direction == "request":
            return msgpack_frames.decode_request(word, fields, version)
        return msgpack_frames.decode_reply(word, fields, request, version)

    def word(self) -> str:
        """The action or the status that the bytes begin with."""
        if self.is_frame:
            return msgpack_frames.decode_envelope(self.line[4:])[1]
        held = json.loads(self.line)
        return str(held["action" if self.direction == "request" else "status"])


def read_vector(path: Path) -> Vector:
    """The vector that the file at `path` holds."""
    held = json.loads(path.read_text(encoding="utf-8"))
    is_frame = "frame" in held
    data = bytes.fromhex(held["frame"]) if is_frame else held["line"].encode()
    return Vector(held["direction"], held["action"], data, held["fields"], is_frame)


def _bytes_of(message: Request | Reply, version: WireVersion, is_frame: bool) -> bytes:
    if isinstance(message, Request):
        if is_frame:
            return msgpack_frames.encode_request(FRAME_ID, message, version)
        return encode_request(message, version)
    if is_frame:
        return msgpack_frames.encode_reply(FRAME_ID, message, version)
    return encode_reply(message, version)


def fields_of(message: Request | Reply) -> dict[str, Any]:
    """What a vector's file says of the fields of a message."""
    fields: dict[str, Any] = json.loads(json.dumps(message.model_dump(exclude_none=True), default=bytes.hex))
    return fields


def vectors_of(version: WireVersion) -> dict[str, Vector]:
    """File name -> vector, for every example that a peer of `version` can say."""
    said: list[tuple[str, tuple[str, str], Request | Reply]] = [
        *(("request", key, request) for key, request in REQUEST_EXAMPLES.items()),
        *(("reply", key, reply) for key, reply in REPLY_EXAMPLES.items()),
    ]
    return {
        f"{direction}-{action}-{name}.json": Vector(
            direction,
            action,
            _bytes_of(message, version, _is_framed(action, version)),
            fields_of(message),
            _is_framed(action, version),
        )
        for direction, (action, name), message in said
        if actions_of(version).get(action) and _fits(message, version, _is_framed(action, version))
    }


def actions_of(version: WireVersion) -> dict[str, type[Request]]:
    """Action -> request, of all that a peer of `version` knows, on a line or in a frame."""
    return {**actions_on_lines(version), **actions_in_frames(version)}


def _is_framed(action: str, version: WireVersion) -> bool:
    return version >= WIRE_2_0 and action in actions_in_frames(version)


def _fits(message: Request | Reply, version: WireVersion, is_frame: bool) -> bool:
    """Whether the whole of `message` passes through the encoder of `version`."""
    try:
        return _bytes_of(message, version, is_frame) == _bytes_of(message, RELEASED[-1], is_frame)
    except LocalProtocolError:
        return False


# -- schemas -------------------------------------------------------------------------------------------


def schema_of(version: WireVersion) -> dict[str, Any]:
    """What every later build must keep: the fields of each message, and the answers of each action."""
    requests = list(actions_of(version).values())
    return {
        "requests": {
            model.action: {"answers": _words(model), "fields": field_schema(model, version)}
            for model in requests
        },
        "replies": {
            f"{reply.status} to {request.action}": field_schema(reply, version)
            for request in requests
            for reply in possible_replies(request)
        },
        "parts": {model.__name__: field_schema(model, version) for model in PARTS if model.since <= version},
    }


def _words(model: type[Request]) -> list[str]:
    return [reply.status for reply in possible_replies(model)]


def field_schema(model: Any, version: WireVersion) -> dict[str, Any]:
    """Field name -> what a peer of `version` must be able to count on."""
    hidden = newer_fields(model, version)
    return {
        row.name: {
            "kind": row.kind,
            "required": row.required,
            "default": row.default,
            "since": str(row.since),
        }
        for row in field_rows(model)
        if row.name not in hidden
    }


def limits_of(version: WireVersion) -> dict[str, Any]:
    """What the values of each field keep to. Narrower ones would refuse what a released peer sends, wider
    ones would send what it refuses; what is chosen from a list of words is among the codes."""
    requests = list(actions_of(version).values())
    return {
        "requests": {model.action: _limits_in(model, version) for model in requests},
        "replies": {
            f"{reply.status} to {request.action}": _limits_in(reply, version)
            for request in requests
            for reply in possible_replies(request)
        },
        "parts": {model.__name__: _limits_in(model, version) for model in PARTS if model.since <= version},
    }


def _limits_in(model: type[Message], version: WireVersion) -> dict[str, str]:
    words = {", ".join(word.value for word in kind) for kind in (Tier, SyncStatus, ErrorCode)}
    hidden = newer_fields(model, version)
    rows = [row for row in field_rows(model) if row.name not in hidden]
    return {row.name: row.limits or "any value" for row in rows if row.limits not in words}


def codes_of(version: WireVersion) -> dict[str, Any]:
    """The numbers and words of `version` that stand for something, and the fields that may not be dropped
    for an older peer. None is ever used again for something else."""
    codes: dict[str, Any] = {
        "sync_status words": [status.value for status in SyncStatus],
        "tier words": [tier.value for tier in Tier],
        "features": sorted(features_of(version)),
        "error codes": [code.value for code in ErrorCode] if version > WIRE_1_0 else [],
        "never dropped": sorted(_never_dropped(version)),
        "other spellings": {reply.status: list(words) for reply, words in STATUS_ALIASES.items()},
    }
    if version >= WIRE_2_0:
        codes["sync_status codes"] = {str(code): status.value for status, code in STATUS_CODES.items()}
        codes["tier codes"] = {str(code): tier.value for tier, code in TIER_CODES.items()}
    return codes


def _never_dropped(version: WireVersion) -> Iterator[str]:
    for model in ALL_REPLIES:
        for name, mark in since_marks(model).items():
            if mark.version <= version and not mark.safe_to_drop:
                yield f"{model.action}.{name}"


def lost(frozen: Any, now: Any, path: str = "") -> Iterator[str]:
    """What `frozen` has and `now` has not, or has otherwise; `now` may have more, but no more that a peer
    of the frozen version would have to know."""
    if isinstance(frozen, dict) and isinstance(now, dict):
        for key, value in frozen.items():
            yield from lost(value, now.get(key, "nothing"), f"{path}/{key}")
        for key in now.keys() - frozen.keys():
            yield from _burdens(now[key], f"{path}/{key}")
    elif isinstance(frozen, list) and isinstance(now, list):
        yield from (f"{path} lacks {item}" for item in frozen if item not in now)
    elif frozen != now:
        yield f"{path} was {frozen} and is {now}"


def _burdens(added: Any, path: str) -> Iterator[str]:
    """What is wrong with a field that was added to a message after it was frozen."""
    if not isinstance(added, dict) or "kind" not in added:
        return
    if added.get("required"):
        yield f"{path} is newly required"
    else:
        yield f"{path} is new and does not name the version that brought it"


# -- files ---------------------------------------------------------------------------------------------


def wanted_files() -> dict[str, str]:
    """Path under compat_tests -> text, for everything that this build can freeze."""
    files: dict[str, str] = {}
    for version in RELEASED:
        files[f"schemas/wire-{version}.json"] = _text(schema_of(version))
        files[f"schemas/limits-{version}.json"] = _text(limits_of(version))
        files[f"schemas/codes-{version}.json"] = _text(codes_of(version))
        for name, vector in vectors_of(version).items():
            files[f"vectors/wire-{version}/{name}"] = _text(vector.as_json())
    return files


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def frozen_files(folder: Path = FOLDER) -> dict[str, str]:
    """Path under compat_tests -> SHA-256, as the manifest has them."""
    path = folder / MANIFEST
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}


def problems(folder: Path = FOLDER) -> list[str]:
    """Every frozen file that was edited or is gone, and every file that is not frozen."""
    frozen = frozen_files(folder)
    there = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for kind in FROZEN_FOLDERS
        for path in (folder / kind).rglob("*.json")
    }
    gone = [f"{name} is gone" for name in sorted(frozen.keys() - there.keys())]
    loose = [f"{name} is not in {MANIFEST}" for name in sorted(there.keys() - frozen.keys())]
    edited = [f"{name} was edited" for name in sorted(frozen.keys() & there) if frozen[name] != there[name]]
    return gone + loose + edited


def differing(folder: Path = FOLDER) -> list[str]:
    """Every frozen file that this build makes otherwise, or no longer keeps to."""
    wanted = wanted_files()
    found = []
    for name in sorted(frozen_files(folder).keys() & wanted.keys()):
        frozen, now = json.loads((folder / name).read_text(encoding="utf-8")), json.loads(wanted[name])
        if name.startswith("schemas/"):
            found += [f"{name}: {fault}" for fault in lost(frozen, now)]
        elif frozen != now:
            found.append(f"{name} is not what this build makes")
    return found


def missing(folder: Path = FOLDER) -> dict[str, str]:
    """What this build can freeze and no file holds yet."""
    return {name: text for name, text in wanted_files().items() if not (folder / name).exists()}


def add(folder: Path = FOLDER) -> list[str]:
    """Write and freeze what is missing; the names of the new files."""
    return freeze(missing(folder), folder)


def freeze(new: dict[str, str], folder: Path = FOLDER) -> list[str]:
    """Write these files, none of which may be there, and name them in the manifest; their names."""
    for name, text in new.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:  # "x": never over what is there
            file.write(text)
        with (folder / MANIFEST).open("a", encoding="utf-8") as manifest:
            manifest.write(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n")
    return sorted(new)


def main() -> int:
    """Add what is missing, or only check; 1 where something differs, or is missing and was only checked."""
    parser = argparse.ArgumentParser(description="Add to the golden bytes and schemas; never edit them.")
    parser.add_argument(
        "--check", action="store_true", help="add nothing and fail where something is missing"
    )
    check = parser.parse_args().check
    faults = problems() + differing()
    if check:
        faults += [f"{name} is missing" for name in sorted(missing())]
    for line in faults:
        print(line)
    if faults:
        return 1
    for name in [] if check else add():
        print(f"added {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
