"""What a restart of the daemon must keep, and what it must forget.

Only whoever runs a daemon can restart it, so these checks need a command of the operator's.
"""

from __future__ import annotations

import subprocess
import time

from hypercache_protocol.messages import CommittedReply, CommitWrite, Ping, PongReply
from hypercache_protocol.versions import WIRE_1_1

from .checks import ODD_SIZE, Bench, Check, check_places, locate, stage, store
from .shell import CheckFailed, Connection, Exchange, expect

RESTART_S = 60.0
"""How long a daemon may take to end, and again to answer."""

_LOOK_AGAIN_S = 0.05
_SHOWN_LETTERS = 200
_NOT_SEEN = "the check ends here, and what a restart does was not seen"


def restart_with(command: str, socket_path: str, timeout_s: float = RESTART_S) -> None:
    """Run `command` in a shell, and return once a daemon answers that is not the one of before.

    Raises:
        CheckFailed: the command fails, the old daemon does not end, or no new one answers.
    """
    with Connection(socket_path, timeout_s, Exchange(), 0) as old:
        _run(command, timeout_s)
        # The end of a connection is told by daemons of every wire; instance_id is not.
        try:
            is_ended = old.read_body() is None
        except CheckFailed:
            is_ended = False
        still_open = f"{command!r} did not end the daemon: a connection to it is still open"
        expect(is_ended, f"{still_open}; {_NOT_SEEN}")
    last_s = time.monotonic() + timeout_s
    while not _answers(socket_path, timeout_s):
        expect(time.monotonic() < last_s, f"no daemon answered within {timeout_s:g} s after {command!r}")
        time.sleep(_LOOK_AGAIN_S)


def _run(command: str, timeout_s: float) -> None:
    try:
        ended = subprocess.run(
            command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise CheckFailed(f"{command!r} did not end within {timeout_s:g} s; {_NOT_SEEN}") from None
    said = ended.stderr.decode(errors="replace").strip()[-_SHOWN_LETTERS:] or "it said nothing"
    expect(ended.returncode == 0, f"{command!r} ended with status {ended.returncode}: {said}; {_NOT_SEEN}")


def _answers(socket_path: str, timeout_s: float) -> bool:
    try:
        with Connection(socket_path, timeout_s, Exchange(), 0) as connection:
            return bool(connection.ask_fields(action="ping"))
    except (OSError, CheckFailed):  # not yet
        return False


def committed(bench: Bench) -> None:
    """What was committed before a restart is found after it, where it was."""
    stored = store(bench.connect(), bench.uri("kept"), ODD_SIZE)
    bench.restart()
    hit = locate(bench.connect(), stored.uri)
    check_places("the layout of locate after a restart", hit.chunk_layout, stored.chunks)


def instance(bench: Bench) -> None:
    """instance_id is another one after a restart."""
    before = bench.connect().get(Ping(), PongReply).instance_id
    bench.restart()
    after = bench.connect().get(Ping(), PongReply).instance_id
    expect(before != after, f"instance_id is {after!r} before and after a restart")


def staged(bench: Bench) -> None:
    """A commit of a write that was staged before a restart is an error, and a newer write is untouched."""
    uri = bench.uri("staged")
    old = stage(bench.connect(), uri, 10)
    bench.restart()
    connection = bench.connect()
    newer = stage(connection, uri, 20)
    connection.refused(CommitWrite(uri=uri, stage_id=old.stage_id))
    reply = connection.get(CommitWrite(uri=uri, stage_id=newer.stage_id), CommittedReply)
    expect(reply.object_size == 20, f"the newer write has {reply.object_size} bytes now, 20 were staged")


def generation(bench: Bench) -> None:
    """A commit after a restart has a higher generation than the one of that name before it."""
    uri = bench.uri("generations")
    before = store(bench.connect(), uri, 10).committed.generation
    bench.restart()
    after = store(bench.connect(), uri, 10).committed.generation
    expect(
        before is not None and after is not None and after > before,
        f"the generation after a restart is {after} and was {before} before",
    )


CHECKS = (
    Check(
        "restart.committed",
        committed,
        "Objects whose write was told as successful are gone after a restart, or other bytes are read in "
        "their place. Do not run this daemon.",
        needs_restart=True,
    ),
    Check(
        "restart.instance",
        instance,
        "Clients cannot see that the daemon was restarted: they go on with layouts that hold no longer.",
        WIRE_1_1,
        needs_restart=True,
    ),
    Check(
        "restart.staged",
        staged,
        "A writer that outlives a restart commits another's unfinished write: half written bytes become the "
        "object. Do not run this daemon.",
        WIRE_1_1,
        feature="stage_id",
        needs_restart=True,
    ),
    Check(
        "restart.generation",
        generation,
        "A client that kept a layout over a restart cannot see that the object was replaced: it reads old or "
        "foreign bytes.",
        WIRE_1_1,
        feature="generation",
        needs_restart=True,
    ),
)
