"""Which names of devices may be links."""

import pytest

from hypercache_protocol.device_paths import may_be_a_link


@pytest.mark.parametrize("path", ["/dev/nvme0n1", "/dev/disk/by-id/nvme-1", "/dev/vg/lv", "/dev/shmem"])
def test_names_that_only_root_makes_may_be_links(path: str) -> None:
    assert may_be_a_link(path)


@pytest.mark.parametrize(
    "path", ["/dev/shm/x", "/dev/shm", "/dev/../tmp/x", "/device/x", "/tmp/dev/x", "dev/x", "", "/DEV/x"]
)
def test_names_that_others_make_may_not(path: str) -> None:
    assert not may_be_a_link(path)
