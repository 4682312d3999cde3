"""The figures of a status on a metrics page, as a scrape of the process's registry sees them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hypercache_connector import HyperCacheConnector, metrics
from hypercache_connector.metrics import figures

Samples = dict[tuple[str, ...], float]


def page() -> dict[str, Samples]:
    """Sample name -> labels' values -> value, of the connectors' metrics."""
    families = text_string_to_metric_families(generate_latest(REGISTRY).decode())
    found: dict[str, Samples] = {}
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith("hypercache_connector"):
            labels = [sample.labels.pop("namespace"), *(value for _, value in sorted(sample.labels.items()))]
            found.setdefault(sample.name, {})[tuple(labels)] = sample.value
    return found


def test_a_page_has_what_the_status_has(scripted2, connect) -> None:
    driver = connect(scripted2.socket_path, namespace="of this test")
    assert driver.store(["a", "b"], [bytearray(5), bytearray(6)]).ok
    assert driver.exists(["a", "c"]) == [True, False]
    assert driver.load(["a", "b"], [bytearray(5), bytearray(7)]) == [True, False]
    assert driver.delete(["a", "c"]) == [True, True]
    shown, status = page(), driver.connector.status()
    keys = shown["hypercache_connector_keys_total"]
    for operation in ("stores", "lookups", "loads", "deletes"):
        for outcome, count in status[operation].items():
            assert keys["of this test", operation, outcome] == count
    assert keys["of this test", "lookups", "absent"] == 1
    assert keys["of this test", "loads", "wrong_size"] == 1
    events = shown["hypercache_connector_events_total"]
    assert events["of this test", "bytes", "stored"] == 11
    now = shown["hypercache_connector_now"]
    assert now["of this test", "daemon", "breaker_open"] == 0
    assert now["of this test", "waiting", "load"] == 0
    assert now["of this test", "pending", ""] == 0


def test_two_of_one_namespace_are_added_up_and_what_is_closed_is_off_the_page(scripted2, connect) -> None:
    drivers = [connect(scripted2.socket_path, namespace="twice") for _ in range(2)]
    for driver in drivers:
        driver.exists(["a"])
    assert page()["hypercache_connector_keys_total"]["twice", "lookups", "absent"] == 2
    drivers[0].connector.close()
    assert page()["hypercache_connector_keys_total"]["twice", "lookups", "absent"] == 1
    drivers[1].connector.close()
    assert not any("twice" in labels for samples in page().values() for labels in samples)


def test_a_connector_that_nobody_has_any_more_is_off_the_page(scripted2) -> None:
    class Source:
        namespace = "forgotten"

        def status(self) -> dict[str, Any]:
            return {"lookups": {"ok": 1}}

    source = Source()
    metrics.PAGE.show(source)
    assert page()["hypercache_connector_keys_total"]["forgotten", "lookups", "ok"] == 1
    del source
    assert not any("forgotten" in labels for samples in page().values() for labels in samples)


def test_words_and_lists_are_no_figures() -> None:
    status = {
        "daemon": {"instance_id": "i", "breaker_open": True},
        "devices_refusing_direct_io": ["/a"],
        "pending": 3,
    }
    assert list(figures(status)) == [("now", ("daemon", "breaker_open"), True), ("now", ("pending", ""), 3)]


def test_a_forked_child_shows_its_own_and_nothing_of_its_parent(scripted2, connect) -> None:
    connect(scripted2.socket_path, namespace="of the parent").exists(["a"])
    # A thread that collects at the moment of the fork has the lock, and the child has nobody to release it.
    with metrics.PAGE._lock:
        child = os.fork()
        if child == 0:
            os._exit(exit_code_of(lambda: shows_only_its_own(scripted2.socket_path)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def exit_code_of(check: Callable[[], bool]) -> int:
    """0 where it holds; by a signal where it never ends."""
    signal.alarm(20)
    try:
        return 0 if check() else 1
    except BaseException:  # noqa: BLE001 - boundary: a child must not go on with the parent's tests
        return 2


def shows_only_its_own(socket_path: str) -> bool:
    if any(page().values()):
        return False
    connector = HyperCacheConnector(socket_path=socket_path, namespace="of the child")
    shown = {labels[0] for samples in page().values() for labels in samples}
    connector.close()
    return shown == {"of the child"}


def test_without_the_library_there_is_no_page_and_all_else_works(scripted2) -> None:
    script = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from hypercache_connector import HyperCacheConnector\n"
        "connector = HyperCacheConnector(socket_path=sys.argv[1], namespace='n')\n"
        "connector.close()\n"
    )
    subprocess.run([sys.executable, "-c", script, scripted2.socket_path], check=True, timeout=60)
