"""A daemon on a folder of its own, clients at work, and what is checked after each fault."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from daemon_harness import MIB
from forked_daemons import BlockingClient, ForkedDaemon, Forks, Gone, Message, checked_status
from killed_daemon import KillAt
from random_clients import CLIENTS, Ledger, at_work, read_verified

from hypercache_compat.waiting import wait_until

POOL_BYTES = 128 * MIB  # several times what clients write: none of it may be evicted for space
RAM_BYTES = 64 * MIB


class Scene:
    """What goes on from one injection of a fault to the next.

    Args:
        folder: short, for the socket; its file system may be in memory, for nothing here cuts the power.
        longest_pause_s: how long clients work at most before and after a fault.
    """

    def __init__(self, folder: Path, chance: random.Random, longest_pause_s: float) -> None:
        self.folder = folder
        self.chance = chance
        self._longest_pause_s = longest_pause_s
        self.ledgers = [Ledger(number) for number in range(CLIENTS)]
        self.state = folder / "state"
        self.backend = folder / "backend"
        for each in (self.state, self.backend):
            each.mkdir()
        self._forks = Forks()

    def start(self, kill: KillAt | None = None) -> ForkedDaemon:
        """A daemon on what the one before it left."""
        words = [
            *("--pool-dir", str(self.folder / "pool"), "--pool-size", str(POOL_BYTES), "--devices", "2"),
            *("--ram-dir", str(self.folder / "ram"), "--ram-size", str(RAM_BYTES)),
            *("--state-dir", str(self.state), "--backend", str(self.backend)),
            *("--stage-expiry-s", "3", "--quarantine-s", "0.05"),
        ]
        return self._forks.start(self.folder, words, kill)

    def close(self) -> None:
        """End the daemon."""
        self._forks.close()

    def log_tail(self) -> str:
        """The end of what all its daemons printed."""
        return (self.folder / "log").read_text()[-2000:]

    @contextmanager
    def clients_at_work(
        self, daemon: ForkedDaemon, ledgers: Sequence[Ledger] | None = None
    ) -> Iterator[None]:
        """All clients or some, until the end or until the daemon is gone."""
        with at_work(daemon, ledgers or self.ledgers, self.chance.random()):
            yield

    def pause(self) -> None:
        """Let clients work for a random time, once they got one more commit acknowledged."""
        before = self.acknowledged
        wait_until(lambda: self.acknowledged > before, "a commit was acknowledged")
        self.random_time()

    def random_time(self) -> None:
        """Faults come at any moment: this is no wait for something."""
        time.sleep(self.chance.uniform(0, self._longest_pause_s))

    @property
    def lost(self) -> list[str]:
        """Acknowledged commits that are gone."""
        return [uri for ledger in self.ledgers for uri in ledger.lost]

    @property
    def wrong(self) -> list[str]:
        """Readings of wrong bytes that had the right checksums."""
        return [uri for ledger in self.ledgers for uri in ledger.wrong]

    @property
    def acknowledged(self) -> int:
        return sum(ledger.acknowledged for ledger in self.ledgers)

    @property
    def refused(self) -> int:
        return sum(ledger.refused for ledger in self.ledgers)

    @contextmanager
    def misses_allowed(self) -> Iterator[None]:
        """Misses say nothing meanwhile, for the daemon is without one of its devices. What no backend was to
        have, or has, may be gone afterwards; the rest may not."""
        for ledger in self.ledgers:
            ledger.may_miss = True
        yield
        for ledger in self.ledgers:
            ledger.may_miss = False
            for uri, content in ledger.objects.items():
                if not content.flushed or self.copy_of(uri) == content.data:
                    ledger.uncertain[uri] = [None, content]

    # -- what is checked -------------------------------------------------------------------------------

    def check(self, daemon: ForkedDaemon) -> None:
        """Count what is none of what the clients were told; every pool's sum is right."""
        with connected(daemon) as client:
            checked_status(client)
            for ledger in self.ledgers:
                for uri in ledger.uris():
                    ledger.judge(uri, read_verified(client, uri))

    def check_after_restart(self) -> None:
        """The same, of the daemon that comes after the one that was killed."""
        daemon = self.start()
        self.check(daemon)
        self.check_backend(daemon)

    def check_backend(self, daemon: ForkedDaemon) -> None:
        """What was to be flushed is in the backend in the end."""
        with daemon.connect() as client:
            wait_until(lambda: not dirty(checked_status(client)), "all was written to the backend")
        for ledger in self.ledgers:
            for uri, content in ledger.objects.items():
                if content.flushed:
                    copy = self.copy_of(uri)
                    if copy is None:
                        ledger.lost.append(f"the backend's {uri}")
                    elif copy != content.data:
                        ledger.wrong.append(f"the backend's {uri}")

    def copy_of(self, uri: str) -> bytes | None:
        """What the backend has under this uri."""
        path = self.backend / uri.removeprefix("hypercache://")
        return path.read_bytes() if path.exists() else None


def connected(daemon: ForkedDaemon) -> BlockingClient:
    """A connection to a daemon that has no reason not to come up."""
    try:
        return daemon.connect()
    except Gone:
        status = daemon.wait()
        raise AssertionError(f"the daemon ended with {status}:\n{daemon.log()[-2000:]}") from None


def dirty(status: Message) -> int:
    states = status["objects_by_state"]
    return int(states["COMMITTED"] + states["SYNCING_BACKEND"])
