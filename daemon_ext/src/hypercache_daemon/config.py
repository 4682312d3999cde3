"""Arguments and a TOML file become one frozen Config, or one sentence that says what to change."""

from __future__ import annotations

import argparse
import grp
import math
import sys
from collections.abc import Sequence
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hypercache_protocol.fields import MIB
from hypercache_protocol.versions import LATEST, RELEASED, WireVersion

from .core.free_space import BLOCK_SIZE
from .rights import Rules, rules, whole_prefix

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GIB = 1024 * MIB

_SIZE: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)


def _size(value: object) -> ByteSize:
    try:
        return _SIZE.validate_python(value)
    except ValidationError:
        raise ValueError(f"{value!r} is no size; write bytes, or words such as 2GiB") from None


def _several(value: object, info: ValidationInfo) -> object:
    if isinstance(value, (list, tuple)):
        return value
    such_as = f", such as {info.field_name} = {[value]!r}" if isinstance(value, str) else ""
    raise ValueError(f"write a list{such_as}")


Size = Annotated[ByteSize, BeforeValidator(_size)]
Several = Annotated[tuple[str, ...], BeforeValidator(_several)]
"""An argument that may be given several times, which is a list in the file."""


class ConfigError(Exception):
    """The configuration is refused; the sentence says what to change."""


class Config(BaseModel):
    """Everything that an operator may set. A field's name is its TOML key and, with `-` for `_`, its
    argument; sizes are bytes or words such as 8GiB, times are seconds, shares are 0 to 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    socket: Path = Path("/run/hypercache/hypercache.sock")
    pool_dir: Path | None = None
    pool_size: Size = ByteSize(8 * GIB)
    devices: Annotated[int, Field(ge=1, le=1024)] = 4
    device: Several = ()
    ram_dir: Path | None = None
    ram_size: Size = ByteSize(256 * MIB)
    state_dir: Path | None = None
    backend: str | None = None
    ingest_prefix: Several = ()
    group: str | None = None
    allow: Several = ()
    restrict: Several = ()
    owner: Several = ()
    capacity: Several = ()
    format: bool = False
    forget_unverifiable: bool = False
    wire: str = str(LATEST)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics: str | None = None
    max_connections: Annotated[int, Field(ge=1)] = 4096
    max_objects: Annotated[int, Field(ge=1)] = 10_000_000
    idle_timeout_s: Annotated[float, Field(ge=0)] = 0.0
    quarantine_s: Annotated[float, Field(ge=0)] = 10.0
    quarantine_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    stage_expiry_s: Annotated[float, Field(gt=0)] = 3600.0
    verify_on_commit: bool = False
    scrub_mib_s: Annotated[float, Field(ge=0)] = 16.0
    eviction: Literal["return-rate", "lru"] = "return-rate"
    evict_unflushed: bool = False
    evict_above: Annotated[float, Field(gt=0, le=1)] = 0.95
    evict_down_to: Annotated[float, Field(gt=0, le=1)] = 0.90
    presence_table_size: Size = ByteSize(128 * MIB)
    shutdown_grace_s: Annotated[float, Field(ge=0)] = 10.0

    @field_validator("*", mode="before")
    @classmethod
    def _given(cls, value: object) -> object:
        # An empty path would be the folder that the daemon happens to be started in.
        if value == "" or (isinstance(value, list) and "" in value):
            raise ValueError("is empty; give a value, or leave it out")
        return value

    @field_validator("ram_size")
    @classmethod
    def _holds_something(cls, size: ByteSize) -> ByteSize:
        if 0 < size < BLOCK_SIZE:
            raise ValueError(f"is less than a block of {BLOCK_SIZE} bytes; write its unit, such as {size}GiB")
        return size

    @field_validator("capacity")
    @classmethod
    def _capacities(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        _limits(entries)
        return entries

    @field_validator("metrics")
    @classmethod
    def _metrics(cls, address: str | None) -> str | None:
        _address(address)
        return address

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if (self.pool_dir is None) == (not self.device):
            raise ValueError("give either --pool-dir or --device (repeated), and not both")
        if self.device and self.state_dir is None:
            raise ValueError("--device needs --state-dir, the folder for the catalog")
        if self.evict_unflushed and not self.has_no_backend:
            raise ValueError(
                "--evict-unflushed is for a daemon without --backend and --ingest-prefix: what is to be "
                "flushed there is never dropped before; leave it out"
            )
        if self.evict_down_to > self.evict_above:
            raise ValueError("--evict-down-to must not be above --evict-above")
        if self.wire not in {str(version) for version in RELEASED}:
            raise ValueError(f"--wire must be one of {', '.join(map(str, RELEASED))}")
        return self

    @property
    def has_no_backend(self) -> bool:
        """Whether nothing can be flushed anywhere."""
        return self.backend is None and not self.ingest_prefix

    @property
    def catalog_dir(self) -> Path:
        """Where the catalog lies."""
        folder = self.state_dir or self.pool_dir
        assert folder is not None, "checked by _consistent"
        return folder

    @property
    def wire_version(self) -> WireVersion:
        """The newest wire version to speak."""
        return next(version for version in RELEASED if str(version) == self.wire)

    @property
    def ram_size_was_given(self) -> bool:
        """True where the operator asked for this size of RAM tier."""
        return "ram_size" in self.model_fields_set

    @property
    def idle_s(self) -> float:
        """Seconds after which an idle connection is closed."""
        return self.idle_timeout_s or math.inf

    @property
    def capacities(self) -> dict[str, int]:
        """Prefix, ending with "/" -> how many bytes may lie under it."""
        return _limits(self.capacity)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port on which metrics are told; None: nowhere."""
        return _address(self.metrics)

    def rules(self) -> Rules:
        """Who may connect and do what. ConfigError where a rule is wrong."""
        if "allow" in self.model_fields_set and not self.allow:
            raise ConfigError(
                "--allow: the list is empty; name somebody, or leave it out to let in everybody"
            )
        try:
            return rules(self.allow, self.restrict, self.owner)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def gid(self) -> int | None:
        """The number of the configured group, if one is. ConfigError where there is none of that name."""
        if self.group is None:
            return None
        try:
            return grp.getgrnam(self.group).gr_gid
        except KeyError:
            raise ConfigError(f"--group: there is no group {self.group!r} on this machine") from None


def _limits(entries: Sequence[str]) -> dict[str, int]:
    limits: dict[str, int] = {}
    for entry in entries:
        word, _, size = entry.rpartition("=")  # a uri may hold "=", a size does not
        if not word:
            raise ValueError(f"{entry!r} says not how much; write PREFIX=SIZE")
        prefix = whole_prefix(word)
        if prefix in limits:
            raise ValueError(f"{prefix} is given twice; give it one limit")
        limits[prefix] = _size(size)
    return limits


def _address(word: str | None) -> tuple[str, int] | None:
    if word is None:
        return None
    host, _, port = word.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _LAST_PORT:
        raise ValueError("write HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464")
    return host.removeprefix("[").removesuffix("]"), int(port)


_LAST_PORT = 65535

_HELP: dict[str, str] = {
    "socket": "Unix socket to answer on",
    "pool_dir": "folder for device files that the daemon makes itself",
    "pool_size": "size of all device files in --pool-dir together",
    "devices": "number of device files in --pool-dir",
    "device": "block device, loop device or existing file to use; repeat for more",
    "ram_dir": "folder for the RAM tier's files (default: one of its own under /dev/shm)",
    "ram_size": "size of the RAM tier; 0 turns it off",
    "state_dir": "folder for the catalog (default: --pool-dir)",
    "backend": "authoritative store behind the cache: a URL that begins with file, nfs, s3, s3a or memory",
    "ingest_prefix": "place outside the backend that objects may be fetched from; repeat for more",
    "group": "group that may use the socket, devices and RAM files",
    "allow": "user (name or number) or @group that may connect, and nobody else then; repeat for more",
    "restrict": "ACTION=USER,@GROUP: who alone may purge, evict, get_devices or get_status; repeat for more",
    "owner": "PREFIX=USER,@GROUP: who alone may change what lies under this prefix of uris; repeat for more",
    "capacity": "PREFIX=SIZE: how much may lie under this prefix of uris, in all tiers; repeat for more",
    "format": "give up everything on the devices and in the catalog, and start empty",
    "forget_unverifiable": "give up every object without checksums: once, after a restore from an older copy",
    "wire": f"newest wire version to speak: {', '.join(map(str, RELEASED))}",
    "log_level": "debug, info, warning or error",
    "metrics": "HOST:PORT, of loopback, at which Prometheus is told what get_status reports (default: none)",
    "max_connections": "connections served at once",
    "max_objects": "objects and staged writes kept at once; each costs the daemon memory",
    "idle_timeout_s": "seconds after which a connection on which nothing is asked is closed; 0: never",
    "quarantine_s": "seconds that freed blocks rest before they are used again",
    "quarantine_share": "share of a pool that may rest; above it the oldest are used again sooner",
    "stage_expiry_s": "seconds after which a staged write that nobody touched is dropped",
    "verify_on_commit": "read back what is committed with checksums before the commit is acknowledged",
    "scrub_mib_s": "MiB per second that are read to find corrupt objects, once a day all of them; 0: none",
    "eviction": "who leaves first: return-rate (the kind that seldom comes back) or lru",
    "evict_unflushed": "without a backend: evict also what was committed to be flushed to one",
    "evict_above": "share of a pool, or of a --capacity, above which eviction starts",
    "evict_down_to": "share of it down to which eviction goes on",
    "presence_table_size": "most memory for the table in which clients look objects up themselves; 0: none",
    "shutdown_grace_s": "seconds that requests under way get when the daemon stops",
}


def parse(arguments: Sequence[str]) -> Config:
    """The configuration that the arguments, and the TOML file they may name, describe.

    Raises:
        ConfigError: something in it is wrong.
        SystemExit: --help, or an argument that does not exist.
    """
    given = {
        name: value for name, value in vars(_parser().parse_args(arguments)).items() if value is not None
    }
    path = given.pop("config", None)
    try:
        return Config.model_validate({**(_from_file(path) if path else {}), **given})
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hypercached",
        description="HyperCache's control plane: answers over a Unix socket where an object's bytes lie.",
        allow_abbrev=False,  # --form is no word for giving up everything; and more may begin so one day
    )
    wires = ", ".join(map(str, RELEASED))
    version = f"hypercached {distribution_version('hypercache-ext')} (speaks wire {wires})"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with any of these settings")
    for name, info in Config.model_fields.items():
        flag = "--" + name.replace("_", "-")
        if info.annotation is bool:
            parser.add_argument(flag, dest=name, action="store_true", default=None, help=_HELP[name])
        elif info.annotation == tuple[str, ...]:
            parser.add_argument(flag, dest=name, action="append", metavar="…", help=_HELP[name])
        else:
            default = "" if info.default is None else f" (default: {_shown(info.default)})"
            parser.add_argument(flag, dest=name, metavar="…", help=_HELP[name] + default)
    return parser


def _shown(default: object) -> str:
    return default.human_readable() if isinstance(default, ByteSize) else str(default)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = tomllib.loads(path.read_text())
        return settings
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not TOML: {error}") from error


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"there is no setting {name!r}; known are {', '.join(Config.model_fields)}"
    return f"--{name.replace('_', '-')}: {message} (got {first['input']!r})"
