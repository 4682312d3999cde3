"""Parameters, checked once at the start: what LMCache's JSON gives as `adapter_params`, what a KVStore is
given, and what both have in common.

A wrong parameter stops the start with one sentence. A daemon that is merely down does not.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from hypercache_protocol import Tier, WireVersion
from hypercache_protocol.versions import LATEST, RELEASED

from .keys import MAX_NAMESPACE_BYTES

MAX_SOCKET_PATH_BYTES = 107
"""What fits into a Unix socket's address."""

SOCKET_PATH = "/run/hypercache/hypercache.sock"
_OTHER_SOCKET_PATHS = ("/tmp/hypercache/hypercache.sock", "/tmp/hypercache.sock")

Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]
Threads = Annotated[int, Field(ge=1, le=256)]
Share = Annotated[float, Field(gt=0, le=1)]


class ConfigError(ValueError):
    """A parameter is wrong; the text says which and what to change."""


class DirectIo(str, Enum):
    """Where transfers bypass the page cache: on block devices only, on files too, or nowhere."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def _word(kind: type[Enum]) -> BeforeValidator:
    """Takes an enum's member by its value; strict models would want the member itself."""

    def member(value: object) -> object:
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"must be one of {', '.join(repr(each.value) for each in kind)}") from None

    return BeforeValidator(member)


def _wire_version(value: object) -> WireVersion:
    for version in RELEASED:
        if value == str(version):
            return version
    raise ValueError(f"must be one of {', '.join(repr(str(version)) for version in RELEASED)}")


def _path(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class ClientConfig(BaseModel):
    """What everybody who talks to a daemon has in common, with defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    socket_path: Annotated[str, BeforeValidator(_path)] = SOCKET_PATH
    timeout_s: Seconds = 5.0
    probe_interval_s: Seconds = 1.0

    @field_validator("socket_path")
    @classmethod
    def _check_socket_path(cls, socket_path: str) -> str:
        problem = _socket_problem(socket_path)
        if problem is not None:
            raise ValueError(problem)
        return socket_path


class EngineConfig(ClientConfig):
    """What connector and KVStore have in common, with defaults."""

    direct_io: Annotated[DirectIo, _word(DirectIo)] = DirectIo.AUTO
    wire: Annotated[WireVersion, BeforeValidator(_wire_version)] = LATEST
    transfer_timeout_s: Seconds = 30.0
    close_timeout_s: Seconds = 10.0
    read_workers: Threads = 16
    write_workers: Threads = 16
    write_share: Share = 0.2


class Config(EngineConfig):
    """Every parameter of the connector with its default; README.md says what each one is for."""

    namespace: str
    tier: Annotated[Tier, _word(Tier)] = Tier.NVME
    overwrite: bool = False
    seal_for_old_daemons: bool = False
    lookup_threads: Threads = 4
    load_threads: Threads = 8
    store_threads: Threads = 8
    queue_limit: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    batch_timeout_s: Seconds = 240.0

    @field_validator("namespace")
    @classmethod
    def _check_namespace(cls, namespace: str) -> str:
        size_bytes = len(namespace.encode("utf-8", "surrogatepass"))
        if not 1 <= size_bytes <= MAX_NAMESPACE_BYTES:
            raise ValueError(f"must be 1 to {MAX_NAMESPACE_BYTES} bytes long, not {size_bytes}")
        return namespace


class KVStoreConfig(EngineConfig):
    """Every parameter of a KVStore with its default; docs/kv_store.md says what each one is for."""

    default_tier: Annotated[Tier, _word(Tier)] = Tier.RAM
    write_through: bool = False
    overwrite: bool = True


_Config = TypeVar("_Config", bound=ClientConfig)


def parse(adapter_params: Mapping[str, Any]) -> Config:
    """The checked parameters of LMCache's JSON.

    Raises:
        ConfigError: one sentence that says what to change.
    """
    return checked(Config, adapter_params, "adapter_params")


def checked(model: type[_Config], given: Mapping[str, Any], where: str) -> _Config:
    """The parameters that were given `where`, checked.

    Raises:
        ConfigError: one sentence that says what to change.
    """
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise ConfigError(f"hypercache_connector: {_sentence(first, model, where)}") from None


def find_socket() -> str:
    """The daemon's socket where none was named: the first that is there of those where hypercache-io looks.
    Those in /tmp, where anybody may put one, count only if they are root's or this user's."""
    if _status_of(SOCKET_PATH) is None:
        for path in _OTHER_SOCKET_PATHS:
            found = _status_of(path)
            if found and stat.S_ISSOCK(found.st_mode) and found.st_uid in (0, os.geteuid()):
                return path
    return SOCKET_PATH


def _status_of(path: str) -> os.stat_result | None:
    try:
        return Path(path).lstat()
    except OSError:  # not there, or not for this user to know
        return None


def what_is_wrong(error: ErrorDetails, where: str) -> str:
    """A sentence about a value that was given `where`."""
    name = ".".join(str(part) for part in error["loc"])
    wrong = error["msg"].removeprefix("Value error, ")
    return f"{where}: {name!r} is wrong: {wrong} (got {repr(error['input'])[:80]})"


def _sentence(error: ErrorDetails, model: type[ClientConfig], where: str) -> str:
    name = ".".join(str(part) for part in error["loc"])
    match error["type"], name:
        case "missing", "namespace":
            return (
                f"{where} needs 'namespace', a text that tells apart what LMCache's keys do not: "
                "model revision, dtype and layout (for instance 'llama-3.1-8b-rev2-bf16')"
            )
        case "extra_forbidden", _:
            return (
                f"{where} has an unknown parameter {name!r}: remove it or correct its name; "
                f"known are {', '.join(sorted(model.model_fields))}"
            )
        case _:
            return what_is_wrong(error, where)


def _socket_problem(socket_path: str) -> str | None:
    """Why this path can never be the daemon's socket, or None where it is or may become it."""
    if "\0" in socket_path or not socket_path:
        return "give the path of the daemon's socket"
    if len(os.fsencode(socket_path)) > MAX_SOCKET_PATH_BYTES:
        return f"a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter one"
    try:
        mode = Path(socket_path).stat().st_mode
    except PermissionError:
        return "this user may not look into its folder; give it permission or another path"
    except NotADirectoryError:
        return "part of this path is a file and no folder; give the daemon's --socket path"
    except OSError:
        return None  # not there yet: the daemon is merely down
    if not stat.S_ISSOCK(mode):
        return "there is something at this path that is not a socket; give the daemon's --socket path"
    if _is_forbidden(socket_path):
        return "this user may not write to the socket; add it to the group of hypercached's --group"
    return None


def _is_forbidden(socket_path: str) -> bool:
    """Whether this user may not write to it. One that has gone meanwhile is not forbidden."""
    return not os.access(socket_path, os.W_OK, effective_ids=True) and os.path.lexists(socket_path)
