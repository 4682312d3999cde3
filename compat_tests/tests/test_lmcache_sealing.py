"""Real LMCache on a daemon that keeps no checksums: what it stores comes back verified all the same."""

from __future__ import annotations

from hypercache_compat.daemon_process import DaemonOptions, running_daemon
from hypercache_compat.lmcache_bench import BenchSize, run_bench
from hypercache_compat.lmcache_versions import LMCACHE_VERSIONS, connector_spec


def test_lmcaches_own_benchmark_verifies_every_byte_on_an_old_daemon() -> None:
    with running_daemon(DaemonOptions(extra=("--wire", "1.0"))) as old:
        spec = connector_spec(old.socket_path, "bench")
        spec["adapter_params"]["seal_for_old_daemons"] = True
        report = run_bench(spec, BenchSize(keys=8, kib_per_key=14 * 1024, rounds=2), LMCACHE_VERSIONS[0])
    assert report.verified, report.output
    assert report.store is not None
    assert report.lookup is not None
    assert report.load is not None
    assert (report.store.succeeded, report.load.succeeded) == (16, 16)
    assert report.lookup.succeeded == 8
