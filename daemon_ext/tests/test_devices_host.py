"""What is read from /sys and /proc, on trees laid out as hosts with other hardware have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypercache_daemon import claims
from hypercache_daemon.access import DeviceError
from hypercache_daemon.block_info import Host, number_of

NVME = "pci0000:40/0000:40:01.1/0000:41:00.0/nvme/nvme0/nvme0n1"
SHARED_NVME = "virtual/nvme-subsystem/nvme-subsys1/nvme1n1"  # as kernels with native multipath show it
DISK = "pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda"
MAPPED = "virtual/block/dm-0"
RAID = "virtual/block/md127"
LOOP = "virtual/block/loop0"

MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:44 / /data rw shared:2 master:1 - btrfs {btrfs} rw
31 22 259:9 / /my\\040disk rw - xfs /dev/nvme9n1 rw
32 22 0:5 / /dev rw - devtmpfs udev rw
"""


@pytest.fixture
def host(tmp_path: Path) -> Host:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/mountinfo").write_text("")
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    host = Host(tmp_path / "sys", proc)
    add(host, NVME, "259:0", device="..")
    add(host, f"{NVME}/nvme0n1p1", "259:1", partition="1")
    write(host, f"{NVME}/../model", "Micron_7450_MTFDKCC3T2TFS               \n")
    write(host, f"{NVME}/../numa_node", "1\n")
    write(host, f"{NVME}/../../../numa_node", "1\n")
    add(host, SHARED_NVME, "259:4", device="..")
    write(host, f"{SHARED_NVME}/../model", "SAMSUNG MZQL21T9HCJR-00A07              \n")
    add(host, DISK, "8:0", rotational="1", device="../..")
    add(host, f"{DISK}/sda1", "8:1", partition="1")
    add(host, f"{DISK}/sda2", "8:2", partition="2")
    write(host, f"{DISK}/../../model", "ST4000NM0035\n")
    write(host, f"{DISK}/../../../../../../numa_node", "-1\n")
    add(host, MAPPED, "253:0")
    add(host, RAID, "9:127")
    add(host, LOOP, "7:0")
    return host


def write(host: Host, name: str, text: str) -> None:
    path = host.sys / "devices" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def add(
    host: Host, name: str, number: str, rotational: str = "0", device: str | None = None, partition: str = ""
) -> None:
    folder = host.sys / "devices" / name
    (folder / "holders").mkdir(parents=True)
    (folder / "dev").write_text(f"{number}\n")
    if partition:
        (folder / "partition").write_text(f"{partition}\n")
    else:
        (folder / "queue").mkdir()
        (folder / "queue/rotational").write_text(f"{rotational}\n")
        (folder / "queue/logical_block_size").write_text("512\n")
    if device is not None:
        (folder / "device").symlink_to(device)
    (host.sys / "dev/block" / number).symlink_to(folder)


# -- facts ---------------------------------------------------------------------------------------------

FACTS = {
    # number: nvme, virtual, partition, rotational, model, NUMA node
    "259:0": (True, False, False, False, "Micron_7450_MTFDKCC3T2TFS", 1),
    "259:1": (True, False, True, False, "Micron_7450_MTFDKCC3T2TFS", 1),
    "259:4": (True, False, False, False, "SAMSUNG MZQL21T9HCJR-00A07", None),
    "8:0": (False, False, False, True, "ST4000NM0035", None),
    "8:2": (False, False, True, True, "ST4000NM0035", None),
    "253:0": (False, True, False, False, None, None),
    "9:127": (False, True, False, False, None, None),
    "7:0": (False, True, False, False, None, None),
    "1:99": (False, False, False, False, None, None),  # no such node: a container without /sys
}


@pytest.mark.parametrize("number", FACTS)
def test_facts_are_those_that_sysfs_shows(host: Host, number: str) -> None:
    info = host.describe_block("/dev/x", number, 1 << 40)
    facts = (
        info.is_nvme,
        info.is_virtual,
        info.is_partition,
        info.is_rotational,
        info.model,
        info.numa_node,
    )
    assert facts == FACTS[number]
    assert (info.path, info.size_bytes, info.existing_fs) == ("/dev/x", 1 << 40, None)


@pytest.mark.parametrize(("number", "rotational"), [("8:1", True), ("259:1", False), ("0:44", False)])
def test_a_file_is_as_rotational_as_the_disk_below_it(host: Host, number: str, rotational: bool) -> None:
    info = host.describe_file("/pool/device-0.hc", number, 1 << 30)
    assert (info.is_virtual, info.is_rotational, info.is_nvme) == (True, rotational, False)


def test_partitions_know_their_disk_and_disks_their_partitions(host: Host) -> None:
    assert host.partitions("8:0") == {"8:1": "sda1", "8:2": "sda2"}
    assert host.partitions("8:1") == host.partitions("7:0") == {}
    assert (host.disk_of("8:2"), host.disk_of("8:0"), host.disk_of("1:99")) == ("8:0", None, None)


# -- users ---------------------------------------------------------------------------------------------


def test_what_is_mounted_is_found_with_its_disk_and_partitions(host: Host, tmp_path: Path) -> None:
    (host.proc / "self/mountinfo").write_text(MOUNTINFO.format(btrfs="/dev/gone"))
    assert host.use_of_block("8:1") == "it is mounted at /"
    assert host.use_of_block("8:0") == "its partition sda1 is mounted at /"
    assert host.use_of_block("8:2") is None, "a neighbour on the same disk is free"
    assert host.use_of_block("259:9") == "it is mounted at /my disk"
    assert host.use_of_block("259:0") is None


def test_a_device_that_sysfs_does_not_show_has_no_use_that_is_known(host: Host) -> None:
    assert host.use_of_block("1:99") is None


def test_a_partition_of_a_mounted_disk_is_in_use(host: Host) -> None:
    (host.proc / "self/mountinfo").write_text("22 1 8:0 / /mnt rw - ext4 /dev/sda rw\n")
    assert host.use_of_block("8:2") == "the disk sda that it is part of is mounted at /mnt"


def test_a_mount_that_hides_its_device_number_is_found_by_its_source(host: Host) -> None:
    """btrfs shows a number of its own; any node in /dev serves here."""
    (host.proc / "self/mountinfo").write_text(MOUNTINFO.format(btrfs="/dev/null"))
    state = Path("/dev/null").stat()
    assert (f"file {state.st_dev} {state.st_ino}", "is mounted at /data") in list(host._mounts())


@pytest.mark.parametrize("asked", ["8:0", "8:1"])
def test_what_device_mapper_or_md_holds_is_in_use(host: Host, asked: str) -> None:
    (host.sys / "devices" / DISK / "sda1/holders/dm-0").symlink_to(host.sys / "devices" / MAPPED)
    name = "it" if asked == "8:1" else "its partition sda1"
    assert host.use_of_block(asked) == f"{name} is held by dm-0"
    assert host.use_of_block("8:2") is None


def test_the_disk_of_a_held_whole_is_in_use_through_its_partitions(host: Host) -> None:
    (host.sys / "devices" / DISK / "holders/md127").symlink_to(host.sys / "devices" / RAID)
    assert host.use_of_block("8:2") == "the disk sda that it is part of is held by md127"


def test_a_file_under_a_loop_device_is_in_use(host: Host, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"")
    (host.sys / "block").mkdir()
    (host.sys / "block/loop0").symlink_to(host.sys / "devices" / LOOP)
    write(host, f"{LOOP}/loop/backing_file", f"{image}\n")
    assert host.use_of_file(image.stat()) == "it is what /dev/loop0 lies on"
    assert host.use_of_file(tmp_path.stat()) is None


# -- what is refused for what it is --------------------------------------------------------------------


def test_blocks_larger_than_a_page_are_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    write(host, f"{NVME}/queue/logical_block_size", "16384\n")
    monkeypatch.setattr(claims, "HOST", host)
    for number in ("259:0", "259:1"):
        with pytest.raises(DeviceError, match=r"/dev/x has blocks of 16384 bytes"):
            claims._refuse_odd_block("/dev/x", number)
    claims._refuse_odd_block("/dev/x", "8:0")


@pytest.mark.parametrize("path", ["/dev/shm/nvme", "/dev/disk.shm"])
def test_a_name_that_clients_take_for_memory_is_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(claims, "HOST", host)
    with pytest.raises(DeviceError, match=r"which clients take for memory"):
        claims._refuse_odd_block(path, "8:0")


def test_this_host_answers_for_the_disk_below_the_tests(tmp_path: Path) -> None:
    number = number_of(tmp_path.stat().st_dev)
    info = Host().describe_file(str(tmp_path), number, 1)
    assert info.is_virtual
    assert Host().use_of_file(tmp_path.stat()) is None
