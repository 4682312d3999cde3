"""What `make faults` does for a minute, once for each fault; and that it would see a loss or a wrong byte."""

from __future__ import annotations

from collections.abc import Callable

import inject_faults
import pytest
from faults import FAULTS, Fault
from forked_daemons import BlockingClient
from inject_faults import scene_for
from random_clients import Ledger, RandomClient
from scene import Scene

POSSIBLE = [fault for fault in FAULTS if not fault.needs]
QUICK = [fault for fault in POSSIBLE if not fault.is_slow]  # test_device_health.py has the rest


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.title)
def test_no_fault_loses_an_acknowledged_commit_or_passes_a_wrong_byte(fault: Fault) -> None:
    with scene_for(fault, seed=3, longest_pause_s=0.05) as scene:
        fault.inject(scene)
        assert (scene.lost, scene.wrong) == ([], [])
        assert scene.acknowledged > 0
    assert not scene.folder.exists()


def test_all_but_a_backend_that_hangs_can_be_injected_by_anybody() -> None:
    impossible = [fault.title for fault in FAULTS if fault not in POSSIBLE]
    assert impossible in ([], ["the backend hangs"])


# -- what it would say ---------------------------------------------------------------------------------


def behind_its_clients_back(change: Callable[[Scene, BlockingClient, str], None]) -> Fault:
    """A fault that does something to an object that a client knows of."""

    def inject(scene: Scene) -> None:
        daemon = scene.start()
        with daemon.connect() as client:
            RandomClient(client, scene.ledgers[0], scene.chance).store("hypercache://0/1")
            change(scene, client, "hypercache://0/1")
        scene.check(daemon)

    return Fault("a trick", inject)


def take(_: Scene, client: BlockingClient, uri: str) -> None:
    client.ask("evict", uri=uri)


def replace(scene: Scene, client: BlockingClient, uri: str) -> None:
    RandomClient(client, Ledger(0), scene.chance).store(uri)


def leave(_: Scene, client: BlockingClient, uri: str) -> None:
    assert client.ask("locate", uri=uri)["status"] == "HIT"


@pytest.mark.parametrize(
    ("change", "figures", "status"),
    [(take, "1 | 1 | 1 | 0", 1), (replace, "1 | 1 | 0 | 1", 1), (leave, "1 | 1 | 0 | 0", 0)],
    ids=["lost", "wrong", "neither"],
)
def test_a_loss_and_a_wrong_byte_are_counted_and_fail(
    change: Callable[[Scene, BlockingClient, str], None],
    figures: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    unable = Fault("an earthquake", lambda _: None, needs="a planet")
    monkeypatch.setattr(inject_faults, "FAULTS", (behind_its_clients_back(change), unable))
    assert inject_faults.main(["--seconds", "0"]) == status
    output = capsys.readouterr().out
    assert f"| a trick | {figures} |" in output
    assert "Not injected: an earthquake; that takes a planet." in output
    assert ("hypercache://0/1" in output) == bool(status)


def test_where_a_fault_breaks_off_the_daemons_log_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_off(scene: Scene) -> None:
        scene.start().connect().close()
        raise AssertionError("what was waited for did not happen")

    monkeypatch.setattr(inject_faults, "FAULTS", (Fault("a trick", break_off),))
    with pytest.raises(AssertionError, match="what was waited for"):
        inject_faults.main(["--seconds", "0"])
    output = capsys.readouterr().out
    assert "a trick: broke off" in output
    assert "ready: serving" in output


def test_what_was_to_be_flushed_and_is_not_in_the_backend_counts() -> None:
    def change(scene: Scene) -> None:
        daemon = scene.start()
        with daemon.connect() as client:
            worker = RandomClient(client, scene.ledgers[0], scene.chance)
            while not any(content.flushed for content in scene.ledgers[0].objects.values()):
                worker.store("hypercache://0/1")
        scene.check_backend(daemon)
        assert scene.lost == []
        copy = scene.backend / "0" / "1"
        copy.write_bytes(b"other bytes")
        scene.check_backend(daemon)
        copy.unlink()
        scene.check_backend(daemon)

    with scene_for(Fault("a trick", change), seed=1) as scene:
        change(scene)
        assert (scene.lost, scene.wrong) == (["the backend's hypercache://0/1"],) * 2
