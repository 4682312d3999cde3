"""`hypercache-compat`: check a daemon, record what clients and a daemon say, and read such a record.

Exit status: 0 where nothing required failed, 1 where something did, 2 where the command could not be run,
130 where it was stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import IO

from hypercache_protocol.negotiation import parsed

from .capture import NoCapture, decoded, read_capture
from .conformance import report as reports
from .conformance.restarts import restart_with
from .conformance.suite import Interrupted, Outcome, Report, Result, Unreachable, run, wires
from .printable import printable
from .recording import Recorder, check_sockets, private
from .relay import Noting, relaying
from .stopping import STOPPED, interrupt, on_signals

_FORMATS: dict[str, Callable[[Report], str]] = {
    "json": reports.as_json,
    "junit": reports.as_junit,
    "markdown": reports.as_markdown,
}
_REFUSALS = (Unreachable, NoCapture, OSError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Not every terminal has all the letters that a daemon may say.
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    given = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = given.command
    try:
        return command(given)
    except BrokenPipeError:  # the reader of a pipe has seen enough, and not the result
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _REFUSALS as refusal:
        print(f"hypercache-compat: {printable(_in_words(refusal))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("hypercache-compat: stopped", file=sys.stderr)
        if isinstance(stop, Interrupted) and stop.left_behind:
            print("\n".join(reports.left_behind_lines(stop.left_behind)), file=sys.stderr)
        return STOPPED


def _in_words(refusal: Exception) -> str:
    """What could not be done; of what the system refused which file it was and why, without its number."""
    if isinstance(refusal, OSError) and refusal.strerror:
        return ": ".join(str(word) for word in (refusal.filename, refusal.strerror) if word)
    return str(refusal)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hypercache-compat", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_check(commands)
    _add_decode(commands)
    _add_record(commands)
    return parser


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "check",
        allow_abbrev=False,  # --with is no word for emptying the whole cache
        help="run the conformance suite against a live daemon",
        description="Run the conformance suite against a live daemon. It works under a name prefix of its "
        "own and removes what it wrote, also where it is stopped; it needs a pool of 64 MiB, sends nothing "
        "to a backend, and leaves a trace in the daemon's counters only.",
        epilog="Exit status: 0 nothing required failed, 1 something did, 2 no daemon answers or lets you in, "
        "130 stopped by Ctrl-C or SIGTERM.",
    )
    parser.add_argument("--socket", required=True, metavar="PATH", help="the daemon's Unix socket")
    parser.add_argument(
        "--wire",
        choices=[*wires(), "all"],
        default="all",
        help="the wire that the daemon must speak; later ones are not checked. "
        "all (the default): whatever it says it speaks",
    )
    parser.add_argument("--format", choices=["table", *_FORMATS], default="table", help="default: table")
    parser.add_argument(
        "--timeout", type=_seconds, default=10.0, metavar="S", help="seconds to wait for one answer (10)"
    )
    parser.add_argument(
        "--with-purge", action="store_true", help="also check purge, which EMPTIES THE WHOLE CACHE"
    )
    parser.add_argument(
        "--restart-with",
        metavar="COMMAND",
        help="also check what a restart keeps and forgets: COMMAND, run by the shell, must end the daemon "
        "and start it again, which happens once for each of these checks",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress on stderr")
    parser.set_defaults(command=_check)


def _add_decode(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "decode",
        help="show a capture, of either wire, for people",
        description="Show what a capture holds: each message with its fields, > from a client, < from the "
        "daemon, with the number of the connection.",
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a capture of `record`, or a frozen transcript; - is stdin"
    )
    parser.add_argument("--full", action="store_true", help="do not cut long values")
    parser.set_defaults(command=_decode)


def _add_record(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "record",
        help="record what clients and a daemon say to each other",
        description="Listen on a socket of its own, pass every byte on to the daemon and back, and record "
        "it. Point clients at the new socket; Ctrl-C ends it. A capture holds the names of objects, and no "
        "object's bytes: those never pass through the socket.",
    )
    parser.add_argument("--listen", required=True, metavar="A", help="socket to make for the clients")
    parser.add_argument("--to", required=True, metavar="B", help="the daemon's socket")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file to make for the capture (default: stdout)"
    )
    parser.set_defaults(command=_record)


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {word!r}")
    return seconds


# -- check ---------------------------------------------------------------------------------------------


def _check(given: argparse.Namespace) -> int:
    progress = Progress(sys.stderr, is_quiet=given.quiet)
    with progress, on_signals(interrupt):
        report = run(
            given.socket,
            wanted=parsed(given.wire),
            timeout_s=given.timeout,
            may_purge=given.with_purge,
            restart=given.restart_with and partial(restart_with, given.restart_with, given.socket),
            progress=progress.show,
        )
    as_text = _FORMATS.get(given.format)
    if as_text is None:
        paint = reports.painted if has_colours(sys.stdout) else reports.plain
        sys.stdout.write(reports.as_table(report, paint))
    else:
        sys.stdout.write(as_text(report))
    sys.stdout.flush()
    return 0 if report.conforms else 1


def has_colours(stream: IO[str]) -> bool:
    """Whether it is a terminal that shows colours, and the user has not turned them off."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Progress:
    """One line that is written over on a terminal; elsewhere a line for each tenth of the way."""

    def __init__(self, stream: IO[str], *, is_quiet: bool) -> None:
        self._stream = stream
        self._is_quiet = is_quiet
        self._is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._failed = 0

    def show(self, number: int, count: int, result: Result) -> None:
        """Say how far it is."""
        self._failed += result.outcome is Outcome.FAILED
        text = f"{number} of {count} checks, {self._failed} failed"
        if self._is_quiet:
            return
        if self._is_terminal:
            self._stream.write(f"\r\x1b[K{text}: {result.check.name}")
        elif number == count or number * 10 // count != (number - 1) * 10 // count:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and not self._is_quiet:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


# -- decode and record ---------------------------------------------------------------------------------


def _decode(given: argparse.Namespace) -> int:
    with _opened(given.file) as lines:
        for line in decoded(read_capture(lines.read()), cut=not given.full):
            print(line)
    sys.stdout.flush()
    return 0


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    if str(path) == "-":
        yield sys.stdin
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield lines


def _record(given: argparse.Namespace) -> int:
    stopped = threading.Event()

    def stop(_: int, __: FrameType | None) -> None:
        stopped.set()

    check_sockets(given.listen, given.to)
    with on_signals(stop), _made(given.output) as capture:
        recorder = Recorder(capture, given.to, stopped)
        with private(), relaying(given.listen, given.to, partial(Noting, recorder.note), stopped.set):
            _say(f"recording what passes between {given.listen} and {given.to}; Ctrl-C ends it")
            stopped.wait()
    _say(f"{recorder.count} pieces, {recorder.size_bytes} bytes")
    if recorder.error is not None:
        raise recorder.error
    return 0


@contextmanager
def _made(path: Path | None) -> Iterator[IO[str]]:
    """A new file for this user alone; or stdout."""
    if path is None:
        yield sys.stdout
        return
    if os.path.lexists(path):
        raise FileExistsError(f"{path} is there already, and is not written over; choose another --output")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as capture:
        yield capture


def _say(text: str) -> None:
    print(f"hypercache-compat: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
