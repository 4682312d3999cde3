"""What else may lie on a device: a table of magic bytes, with the names that blkid gives them.

A device whose first and last MiB are not all zero is refused whatever they hold; this table only gives
the refusal a name, so an entry that is missing here costs a word and no data.
"""

from __future__ import annotations

_KIB = 1024
_SWAP_PAGES = (4 * _KIB, 8 * _KIB, 16 * _KIB, 64 * _KIB)
_MD_MAGIC = b"\xfc\x4e\x2b\xa9"
_ZFS_RING = range(128 * _KIB, 256 * _KIB, _KIB)
_ZFS_MAGICS = (b"\x0c\xb1\xba\x00\x00\x00\x00\x00", b"\x00\x00\x00\x00\x00\xba\xb1\x0c")
_BCACHE_MAGIC = bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81")
_EXT_MAGIC_AT = 0x438
_EXT_COMPATIBLE_AT, _EXT_INCOMPATIBLE_AT = 0x45C, 0x460
_EXT_HAS_JOURNAL = 0x4
_EXT4_ONLY = 0x40 | 0x80 | 0x200  # extents, 64 bit, flexible block groups

# name, offset from the front, magic; the vague ones come last
_AT_FRONT: tuple[tuple[str, int, bytes], ...] = (
    ("crypto_LUKS", 0, b"LUKS\xba\xbe"),
    ("xfs", 0, b"XFSB"),
    ("btrfs", 0x10040, b"_BHRfS_M"),
    *(("LVM2_member", sector * 512, b"LABELONE") for sector in range(4)),
    *(("swap", page - 10, magic) for page in _SWAP_PAGES for magic in (b"SWAPSPACE2", b"SWAP-SPACE")),
    ("linux_raid_member", 0, _MD_MAGIC),
    ("linux_raid_member", 4 * _KIB, _MD_MAGIC),
    ("bcache", 4 * _KIB + 24, _BCACHE_MAGIC),
    *(("zfs_member", offset, magic) for offset in _ZFS_RING for magic in _ZFS_MAGICS),
    ("f2fs", 1024, b"\x10\x20\xf5\xf2"),
    ("squashfs", 0, b"hsqs"),
    ("erofs", 1024, b"\xe2\xe1\xf5\xe0"),
    ("iso9660", 0x8001, b"CD001"),
    ("ntfs", 3, b"NTFS    "),
    ("exfat", 3, b"EXFAT   "),
    ("vfat", 82, b"FAT32   "),
    ("vfat", 54, b"FAT1"),
    ("ext", _EXT_MAGIC_AT, b"\x53\xef"),
    ("gpt", 512, b"EFI PART"),
    ("gpt", 4 * _KIB, b"EFI PART"),
    ("dos", 510, b"\x55\xaa"),
)


def _at_end(size_bytes: int) -> tuple[tuple[str, int, bytes], ...]:
    # md 1.0 lies at least 8 KiB before the end on a 4 KiB line, md 0.90 in the last whole 64 KiB.
    md_1_0 = (size_bytes // 512 - 16) // 8 * 8 * 512
    md_0_90 = size_bytes // (64 * _KIB) * (64 * _KIB) - 64 * _KIB
    return (
        ("linux_raid_member", md_1_0 - size_bytes, _MD_MAGIC),
        ("linux_raid_member", md_0_90 - size_bytes, _MD_MAGIC),
        ("gpt", -512, b"EFI PART"),
        ("gpt", -4 * _KIB, b"EFI PART"),
    )


def find_signature(front: bytes, back: bytes, size_bytes: int) -> str | None:
    """The name of what lies on a device, or None where the table knows none of it.

    Args:
        front: the device's first MiB.
        back: its last MiB.
        size_bytes: its whole size.
    """
    for name, offset, magic in _AT_FRONT:
        if front.startswith(magic, offset):
            return _which_ext(front) if name == "ext" else name
    for name, offset, magic in _at_end(size_bytes):
        if back.startswith(magic, len(back) + offset):
            return name
    return None


def _which_ext(front: bytes) -> str:
    compatible = int.from_bytes(front[_EXT_COMPATIBLE_AT : _EXT_COMPATIBLE_AT + 4], "little")
    incompatible = int.from_bytes(front[_EXT_INCOMPATIBLE_AT : _EXT_INCOMPATIBLE_AT + 4], "little")
    if incompatible & _EXT4_ONLY:
        return "ext4"
    return "ext3" if compatible & _EXT_HAS_JOURNAL else "ext2"
