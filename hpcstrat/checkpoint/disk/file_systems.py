"""The type of the file system that a path is on.

Linux manual: statfs(2), f_type.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["file_system_name", "goes_direct", "is_local"]

_NAMES = {
    0xEF53: "ext4",
    0x58465342: "XFS",
    0x9123683E: "Btrfs",
    0x2FC12FC1: "ZFS",
    0x01021994: "tmpfs",
    0x794C7630: "overlayfs",
    0x6969: "NFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x00C36400: "Ceph",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x65735546: "FUSE",
}
# ext4 and XFS, where direct writes of several processes into one file are both allowed
# and faster. Parallel file systems have their own ways.
_LOCAL_TYPES = (0xEF53, 0x58465342)


def _type(path: str) -> int | None:
    # The type is the first word of struct statfs; the rest fits by far.
    words = (ctypes.c_ulong * 64)()
    call = getattr(ctypes.CDLL(None), "statfs", None)
    if call is None or call(os.fsencode(path), words):
        return None
    return int(words[0]) & 0xFFFFFFFF


def file_system_name(path: str) -> str:
    """Return the name of the type of a path's file system, such as ``Lustre``.

    For others the number of statfs(2). ``ext4`` is also said of ext2 and ext3.
    """
    number = _type(path)
    if number is None:
        return "unknown"
    return _NAMES.get(number, f"of type {number:#x}")


def is_local(path: str) -> bool:
    """Whether a path is on a file system of this machine, known to write directly well.

    True for ext2 to ext4 and XFS; False where the type cannot be found out.
    """
    return _type(path) in _LOCAL_TYPES


def goes_direct(choice: str | None, path: str) -> bool:
    """Whether files at a path are read and written past the page cache.

    ``choice`` is the setting ``direct_io``.
    """
    return choice == "on" or (choice == "auto" and is_local(path))
