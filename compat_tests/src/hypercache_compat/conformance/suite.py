"""Runs the checks against a daemon and cleans up behind each of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hypercache_protocol.negotiation import parsed, spoken
from hypercache_protocol.versions import LATEST, RELEASED, WIRE_1_0, WIRE_1_1, WIRE_2_0, WireVersion

from . import (
    actions,
    additions,
    frames,
    hello,
    hostile,
    many,
    presence,
    restarts,
    sessions,
    transport,
    writing,
)
from .checks import Bench, Check, Offer, Restart
from .shell import CheckFailed, Connection, Exchange, Fields, NotOffered, expect

CHECKS: tuple[Check, ...] = (
    *transport.CHECKS,
    *actions.CHECKS,
    *writing.CHECKS,
    *additions.CHECKS,
    *hello.CHECKS,
    *frames.CHECKS,
    *hostile.CHECKS,
    *sessions.CHECKS,
    *many.CHECKS,
    *presence.CHECKS,
    *restarts.CHECKS,
)

PREFIX = "hypercache://hypercache-compat/"
"""Every uri of a run begins with this and with a word that no other run has."""

_TRIES = 4  # to commit and to remove what a check left: more is the fault of a daemon that always says yes


class Outcome(str, Enum):
    """What became of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_OFFERED = "not offered"


@dataclass(frozen=True)
class Result:
    """One check's outcome; `reason` says what was seen, or why it was not run."""

    check: Check
    outcome: Outcome
    reason: str = ""
    exchange: Exchange = field(default_factory=Exchange)
    left_behind: tuple[str, ...] = ()

    @property
    def is_fatal(self) -> bool:
        """Whether a daemon with this result does not conform."""
        return self.outcome is Outcome.FAILED and self.check.required


@dataclass(frozen=True)
class Report:
    """A whole run."""

    socket_path: str
    offer: Offer
    results: tuple[Result, ...]

    @property
    def conforms(self) -> bool:
        """Whether nothing that is required failed."""
        return not any(result.is_fatal for result in self.results)

    @property
    def left_behind(self) -> list[str]:
        """Uris that could not be removed."""
        return [uri for result in self.results for uri in result.left_behind]

    def count(self, outcome: Outcome) -> int:
        """How many checks came out so."""
        return sum(result.outcome is outcome for result in self.results)


class Unreachable(Exception):
    """There is no daemon to check; the sentence says why."""


class Interrupted(KeyboardInterrupt):
    """The run was stopped amid a check, whose uris were removed but for `left_behind`."""

    def __init__(self, left_behind: list[str]) -> None:
        super().__init__()
        self.left_behind = left_behind


def run(
    socket_path: str,
    *,
    wanted: WireVersion | None = None,
    timeout_s: float = 10.0,
    may_purge: bool = False,
    restart: Restart | None = None,
    checks: Sequence[Check] = CHECKS,
    progress: Callable[[int, int, Result], None] = lambda *_: None,
) -> Report:
    """Check the daemon that answers on `socket_path`.

    Args:
        wanted: the wire that it must speak; nothing later is checked. None: whatever it says it speaks.
        timeout_s: how long to wait for each answer.
        may_purge: whether the check that empties the whole cache may run.
        restart: restarts the daemon, and returns once it answers; without it no check does that.
        progress: called after each check with its number, how many there are, and its result.

    Raises:
        Unreachable: no daemon answers there.
        Interrupted: KeyboardInterrupt came amid a check.
    """
    exchange = Exchange()
    offer = _ask_offer(socket_path, timeout_s, exchange)
    chosen = [check for check in checks if check.since <= (wanted or LATEST)]
    prefix = f"{PREFIX}{secrets.token_hex(6)}/"
    results: list[Result] = []

    def note(result: Result) -> None:
        results.append(result)
        progress(len(results), len(chosen) + (wanted is not None), result)

    if wanted is not None:
        note(_spoken(offer, wanted, exchange))
    for check in chosen:
        why_not = _not_offered(check, offer, may_purge, restart is not None)
        if why_not:
            note(Result(check, Outcome.NOT_OFFERED, why_not))
        else:
            note(_run_one(check, Bench(socket_path, timeout_s, f"{prefix}{check.name}/", restart)))
    return Report(socket_path, offer, tuple(results))


# -- what the daemon offers ----------------------------------------------------------------------------


def _ask_offer(socket_path: str, timeout_s: float, exchange: Exchange) -> Offer:
    """What the daemon says of itself; `exchange` keeps the bytes.

    Raises:
        Unreachable: no daemon answers there.
    """
    try:
        with Connection(socket_path, timeout_s, exchange, 1) as connection:
            pong = connection.ask_fields(action="ping")
            if _turns_away(connection, pong):
                raise Unreachable(f"{socket_path} does not let this client in: {pong.get('error_message')}")
    except OSError as error:
        raise Unreachable(f"{socket_path} cannot be connected to: {error.strerror or error}") from error
    except CheckFailed as error:
        raise Unreachable(f"what listens on {socket_path} does not answer a ping: {error}") from error
    features = pong.get("features")
    words = (
        frozenset(word for word in features if isinstance(word, str)) if isinstance(features, list) else ()
    )
    version = _spoken_version(socket_path, timeout_s, exchange, pong)
    return Offer(version, frozenset(words), str(pong.get("daemon", "")))


def _turns_away(connection: Connection, pong: Fields) -> bool:
    """Whether the daemon said why it does not let this client in, and closed."""
    try:
        return pong.get("status") == "ERROR" and connection.read_body() is None
    except CheckFailed:
        return False


def _spoken_version(socket_path: str, timeout_s: float, exchange: Exchange, pong: Fields) -> WireVersion:
    try:
        with Connection(socket_path, timeout_s, exchange, 2) as connection:
            reply = connection.ask_fields(action="hello", versions=spoken(LATEST), name="hypercache-compat")
    except (CheckFailed, OSError):  # an old daemon may do anything with a hello
        reply = {}
    chosen = parsed(str(reply.get("version", ""))) if reply.get("status") == "HELLO" else None
    if chosen is not None and chosen >= WIRE_2_0:
        return min(chosen, LATEST)
    majors = pong.get("wire")
    if isinstance(majors, list) and 2 in majors:  # then the checks tell what is wrong with its hello
        return WIRE_2_0
    told = {"wire", "daemon", "instance_id", "features"} & pong.keys()
    return WIRE_1_1 if told else WIRE_1_0


def _not_offered(check: Check, offer: Offer, may_purge: bool, can_restart: bool) -> str:
    """Why a check is not run; empty where it is."""
    if check.since > offer.version:
        return f"needs wire {check.since}; this daemon speaks {offer.version}"
    if check.feature is not None and check.feature not in offer.features:
        return f"the daemon does not list the feature {check.feature}"
    if check.empties_cache and not may_purge:
        return "it would empty the whole cache; --with-purge runs it"
    if check.needs_restart and not can_restart:
        return "the daemon must be restarted for it; --restart-with COMMAND does that"
    return ""


def _spoken(offer: Offer, wanted: WireVersion, exchange: Exchange) -> Result:
    def spoken(_: Bench) -> None:
        """The daemon speaks the wire that was asked for."""
        expect(offer.version >= wanted, f"it speaks wire {offer.version} and {wanted} was asked for")

    means = (
        f"This daemon is older than you expect. It serves clients of wire {offer.version} and those who can "
        f"fall back to it; upgrade it, or check it with --wire {offer.version}."
    )
    # The one check that needs no daemon: what it looks at is already known.
    bench = Bench("", 1.0, PREFIX)
    bench.exchange = exchange
    return _run_one(Check("wire.spoken", spoken, means, WIRE_1_0), bench)


# -- one check -----------------------------------------------------------------------------------------


def _run_one(check: Check, bench: Bench) -> Result:
    outcome, reason = Outcome.PASSED, ""
    is_stopped = False
    try:
        check.run(bench)
    except NotOffered as error:
        outcome, reason = Outcome.NOT_OFFERED, str(error)
    except CheckFailed as error:
        outcome, reason = Outcome.FAILED, str(error)
    except OSError as error:
        outcome, reason = Outcome.FAILED, f"the connection broke: {error}"
    except KeyboardInterrupt:
        is_stopped = True
    except Exception as error:  # noqa: BLE001 - the boundary: a daemon under test may send anything
        outcome, reason = Outcome.FAILED, f"the check cannot go on: {type(error).__name__}: {error}"
    left_behind, was_stopped = _clean_up(bench)
    if is_stopped or was_stopped:
        raise Interrupted(left_behind)
    return Result(check, outcome, reason, bench.exchange, tuple(left_behind))


def _clean_up(bench: Bench) -> tuple[list[str], bool]:
    """Remove whatever a check may have written; gives what could not be, and whether it was interrupted.

    One interruption is no reason to leave anything in a cache; a second one is.
    """
    left = list(dict.fromkeys(bench.uris))
    was_stopped = False
    for _ in range(2):
        try:
            bench.close()
            _remove_all(bench, left)
            break
        except KeyboardInterrupt:
            was_stopped = True
    return left, was_stopped


def _remove_all(bench: Bench, left: list[str]) -> None:
    """Take from `left` what is there no more."""
    try:
        with bench.connect_apart() as connection:
            for uri in list(left):
                if _remove(connection, uri):
                    left.remove(uri)
    except (CheckFailed, OSError):  # what is left is told to the caller
        return


def _remove(connection: Connection, uri: str) -> bool:
    """Whether nothing is there any more. Committed first, because the blocks of a committed object are
    free sooner than those of a write that may still go on."""
    for _ in range(_TRIES):
        if connection.ask_fields(action="commit_write", uri=uri).get("status") == "ERROR":
            break
    return any(
        connection.ask_fields(action="evict", uri=uri).get("status") in ("MISS", "ERROR")
        for _ in range(_TRIES)
    )


def wires() -> list[str]:
    """The wires that may be asked for."""
    return [str(version) for version in RELEASED]
