"""`make demo`: the whole system at work on one machine, in plain words and figures.

Ends with 0 only where every byte that was compared is the byte that was written.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .daemon_process import DaemonFailed, DaemonOptions, DaemonProcess, running_daemon
from .lmcache_bench import BenchReport, BenchSize, run_bench
from .lmcache_versions import connector_spec
from .old_clients import old_client
from .payloads import MIB, first_difference, payload
from .raw_wire import fetch
from .releases import LMCACHE_IN_ENVIRONMENT, InstallFailed
from .scenario_process import ScenarioFailed, running
from .stopping import stoppable

OLD_VERSION = "0.9.0"
OLD_URI = "hypercache://demo/checkpoint.bin"


_BENCH = BenchSize(keys=16, kib_per_key=4096, rounds=3)


@dataclass(frozen=True)
class DemoSize:
    """How much the demo moves. `between` runs after the old client wrote and before anyone reads."""

    bench: BenchSize = _BENCH
    object_bytes: int = 9 * MIB + 1920
    between: Callable[[DaemonProcess], None] = lambda _: None


Part = Callable[[DaemonProcess, DemoSize], list[str]]


def say(text: str) -> None:
    print(text, flush=True)


def run(size: DemoSize | None = None, parts: Sequence[Part] = ()) -> int:
    """Run the demo, or only some `parts` of it; gives the exit status."""
    size = size or DemoSize()
    parts = parts or (lmcache_part, old_client_part)
    began = time.monotonic()
    say("HyperCache demo: a daemon, real LMCache, and a real hypercache-io client on one machine.\n")
    say("1. Starting hypercached on four files that stand in for four NVMe drives.")
    with running_daemon(DaemonOptions(pool_size="2GiB", pool_devices=4)) as daemon:
        say(f"   It answers on {daemon.socket_path}.\n")
        failures = [failure for part in parts for failure in part(daemon, size)]
    say(f"\nDaemon stopped, its files removed. {time.monotonic() - began:.0f} s in all.")
    for failure in failures:
        say(f"FAILED: {failure}")
    say("The demo failed." if failures else "Every byte that was compared was right.")
    return 1 if failures else 0


def lmcache_part(daemon: DaemonProcess, size: DemoSize) -> list[str]:
    """LMCache's own benchmark over the connector; gives what failed."""
    amount = size.bench
    say(
        f"2. LMCache {LMCACHE_IN_ENVIRONMENT} loads the connector (native_plugin) and runs its own benchmark:"
    )
    say(f"   {amount.keys} objects of {amount.kib_per_key} KiB a round, stored, looked up, loaded, compared.")
    say("   The first round is to warm up, and not counted below.")
    spec = connector_spec(daemon.socket_path, "demo/revision-1/bf16")
    report = run_bench(spec, amount, show=_show_progress)
    for line in _bench_lines(report, amount):
        say(f"   {line}")
    say("")
    if report.verified and not _shortfalls(report):
        return []
    return [
        *_shortfalls(report),
        f"lmcache bench l2 ended with {report.exit_status}:\n{report.output[-3000:]}",
    ]


def _show_progress(line: str) -> None:
    words = line.strip()
    if words.startswith(("[Store]", "[Lookup]", "[Load]", "[Verify]")) and not words.endswith("..."):
        say(f"     {words}")


def _bench_lines(report: BenchReport, amount: BenchSize) -> list[str]:
    lines = []
    if report.store is not None:
        lines.append(f"stored     {_moved(report.store.succeeded, amount, report.store.megabytes_per_s)}")
    if report.lookup is not None:
        lookup = report.lookup
        found = f"{lookup.succeeded} of {lookup.keys} found (half were never stored)"
        lines.append(f"looked up  {found}, {lookup.ms_per_key * 1000:.1f} us a key")
    if report.load is not None:
        lines.append(f"loaded     {_moved(report.load.succeeded, amount, report.load.megabytes_per_s)}")
    compared = f"all {amount.keys} objects of the last round" if report.verified else "NOT confirmed"
    return [*lines, f"verified   {compared}, byte for byte, by LMCache itself"]


def _moved(count: int, amount: BenchSize, megabytes_per_s: float) -> str:
    return f"{count} objects, {count * amount.kib_per_key / 1024:.0f} MiB, {megabytes_per_s / 1000:.2f} GB/s"


def _shortfalls(report: BenchReport) -> list[str]:
    parts = (("stored", report.store, 1.0), ("looked up", report.lookup, 0.5), ("loaded", report.load, 1.0))
    return [
        f"LMCache {word} {0 if part is None else part.succeeded} objects and not all that it should have"
        for word, part, share in parts
        if part is None or part.succeeded != part.keys * share
    ]


def old_client_part(daemon: DaemonProcess, size: DemoSize) -> list[str]:
    """An object that the released client writes and reads back; gives what failed."""
    say(f"3. hypercache-io {OLD_VERSION}, as released, writes a file and reads it back from the same daemon:")
    try:
        client = old_client(OLD_VERSION)
    except InstallFailed as error:
        return [str(error)]
    arguments = {"socket_path": daemon.socket_path, "uri": OLD_URI, "size_bytes": size.object_bytes}
    with running(client):
        try:
            client.call("file_system.write_in_pieces", **arguments, write_bytes=MIB)
            say(f"   wrote      {OLD_URI}, {size.object_bytes:,} bytes in pieces of 1 MiB")
            size.between(daemon)
            there = client.call("file_system.read_whole", **arguments)
        except ScenarioFailed as error:
            return [str(error)]
    return _compare_with_devices(daemon, size) if there else [f"{OLD_URI} is not there after it was written"]


def _compare_with_devices(daemon: DaemonProcess, size: DemoSize) -> list[str]:
    """Read the object without any client, straight from where the daemon says that it lies."""
    want = payload(OLD_URI, size.object_bytes)
    with daemon.connect() as connection:
        got = fetch(connection, OLD_URI)
        devices = connection.ask("locate", uri=OLD_URI)["chunk_layout"]
    difference = first_difference(got or b"", want)
    if difference is not None:
        return [f"read from the devices without a client, {difference}"]
    places = len({chunk["device"] for chunk in devices})
    say(f"   read       the same {len(want):,} bytes, with the client and from the devices without it")
    say(f"   lies in    {len(devices)} chunks on {places} devices")
    say(f"   verified   SHA-256 {hashlib.sha256(want).hexdigest()}")
    return []


def main() -> int:
    """Run the demo as a command; the exit status."""
    try:
        return run()
    except DaemonFailed as error:
        say(f"FAILED: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(stoppable(main))
