"""What else may lie on a device is called by its name: real file systems, and marks put where each lies."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest

from hypercache_daemon.signatures import find_signature
from hypercache_daemon.superblock import Superblock, encode

MIB = 1 << 20
SIZE = 24 * MIB
MD = struct.pack("<I", 0xA92B4EFC)

MAKERS = {
    "ext2": ["mkfs.ext2", "-q", "-F"],
    "ext3": ["mkfs.ext3", "-q", "-F"],
    "ext4": ["mkfs.ext4", "-q", "-F"],
    "swap": ["mkswap"],
}

# Where each puts its mark, from the on-disk format of each; negative counts from the end.
MARKS = [
    ("xfs", 0, b"XFSB"),
    ("btrfs", 65536 + 64, b"_BHRfS_M"),
    ("crypto_LUKS", 0, b"LUKS\xba\xbe\x00\x02"),
    ("LVM2_member", 512, b"LABELONE"),
    ("LVM2_member", 1536, b"LABELONE"),
    ("linux_raid_member", 0, MD),
    ("linux_raid_member", 4096, MD),
    ("linux_raid_member", -8192, MD),
    ("linux_raid_member", -65536, MD),
    ("zfs_member", 128 * 1024, struct.pack("<Q", 0x00BAB10C)),
    ("zfs_member", 128 * 1024 + 8192, struct.pack(">Q", 0x00BAB10C)),
    ("swap", 65536 - 10, b"SWAPSPACE2"),
    ("gpt", 512, b"EFI PART"),
    ("gpt", 4096, b"EFI PART"),
    ("gpt", -512, b"EFI PART"),
    ("dos", 510, b"\x55\xaa"),
    ("vfat", 82, b"FAT32   "),
    ("ntfs", 3, b"NTFS    "),
]


def run(*command: str) -> str:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    return done.stdout.strip()


def edges(data: bytes) -> tuple[bytes, bytes, int]:
    return data[:MIB], data[-MIB:], len(data)


def marked(size_bytes: int, *marks: tuple[int, bytes]) -> bytes:
    data = bytearray(size_bytes)
    for offset, magic in marks:
        start = offset % size_bytes
        data[start : start + len(magic)] = magic
    return bytes(data)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_real_file_system_is_called_what_blkid_calls_it(kind: str, tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(SIZE)
    image.chmod(0o600)
    run(*MAKERS[kind], str(image))
    asked = run("blkid", "-p", "-o", "value", "-s", "TYPE", str(image))
    assert find_signature(*edges(image.read_bytes())) == asked == kind


@pytest.mark.parametrize(("kind", "offset", "magic"), MARKS)
def test_a_mark_is_found_where_its_format_puts_it(kind: str, offset: int, magic: bytes) -> None:
    assert find_signature(*edges(marked(SIZE, (offset, magic)))) == kind


@pytest.mark.parametrize("odd_bytes", [512, 4096, 65536 - 512])
def test_md_superblocks_are_found_on_devices_of_any_length(odd_bytes: int) -> None:
    size_bytes = SIZE + odd_bytes
    version_0_90 = (size_bytes & ~65535) - 65536
    version_1_0 = ((size_bytes // 512 - 16) & ~7) * 512
    for offset in (version_0_90, version_1_0):
        assert find_signature(*edges(marked(size_bytes, (offset, MD)))) == "linux_raid_member"


def test_a_file_system_with_a_boot_sector_is_not_called_a_partition_table() -> None:
    assert find_signature(*edges(marked(SIZE, (510, b"\x55\xaa"), (0x438, b"\x53\xef")))) == "ext2"


def test_blank_and_our_own_have_no_signature() -> None:
    ours = encode(Superblock("11" * 16, "22" * 16, 0, 1, SIZE))
    assert find_signature(*edges(bytes(SIZE))) is None
    assert find_signature(*edges(marked(SIZE, (0, ours)))) is None
