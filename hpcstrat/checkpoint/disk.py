"""File operations of Linux, with the fallbacks that some file systems need.

See open(2) for O_DIRECT, fallocate(2), fsync(2), link(2), rename(2) and statfs(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Iterator

__all__ = [
    "NO_DESCRIPTORS",
    "PASSING",
    "closing",
    "create",
    "file_system_name",
    "flush",
    "flush_folder",
    "forget_pages",
    "gives_back",
    "goes_direct",
    "is_local",
    "open_to_read",
    "open_to_write",
    "publish",
    "remove",
    "require_descriptors",
    "wait_for_room",
]

PASSING = (
    *(errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT),
    *(errno.EAGAIN, errno.EINTR),
)
"""Errors that may be temporary, and do not mean that a file is damaged."""

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Errors of `PASSING` that mean that too many files are open."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_RESERVATION = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_DIRECT = os.O_DIRECT
# Shared memory uses up to 6 descriptors, and MPI's connections to hosts use some, too.
_SPARE_DESCRIPTORS = 32
_NO_LINKS = (
    *(errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EINVAL),
)
# Threads that close removed files, of all managers: a save of one manager may need the
# space that another manager's threads free.
_freeing: list[threading.Thread] = []
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
# File systems (ext4, XFS) on which O_DIRECT writes of several processes are fast.
_LOCAL_TYPES = (0xEF53, 0x58465342)


def create(path: str, nbytes: int) -> None:
    """Make a file and reserve its space, to detect a full disk before data are written.

    Call this on one rank; the file must not exist. After an OSError no file is left.
    """
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        # Some network file systems report a full disk only in close().
        with closing(file):
            _reserve_with_patience(file, nbytes)
    except BaseException:
        os.unlink(path)
        raise


def _reserve_with_patience(file: int, nbytes: int) -> None:
    try:
        _reserve(file, nbytes)
    except OSError as error:
        # The space of a checkpoint that was just removed may not be free yet.
        if error.errno not in _NO_ROOM or not wait_for_room():
            raise
        _reserve(file, nbytes)


def _reserve(file: int, nbytes: int) -> None:
    try:
        _allocate(file, nbytes)
    except OSError as error:
        if error.errno not in _NO_RESERVATION:
            raise
        # This file system cannot reserve space: compare the size with its free space.
        space = os.fstatvfs(file)
        if space.f_blocks and space.f_bavail * space.f_frsize < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        os.ftruncate(file, nbytes)


def _allocate(file: int, nbytes: int) -> None:
    """Reserve space by fallocate, because posix_fallocate might write every page."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None:
        os.posix_fallocate(file, 0, nbytes)
        return
    number = ctypes.c_int64
    if call(ctypes.c_int(file), ctypes.c_int(0), number(0), number(nbytes)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def open_to_write(path: str, direct: bool) -> int:
    """Open a file to write; ``direct`` bypasses the page cache, if that is possible."""
    return _open(path, os.O_RDWR, direct)


def open_to_read(path: str, direct: bool) -> int:
    """Open a file to read; ``direct`` bypasses the page cache, if that is possible."""
    return _open(path, os.O_RDONLY, direct)


def _open(path: str, flags: int, direct: bool) -> int:
    flags |= os.O_CLOEXEC
    if direct and _DIRECT:
        try:
            return os.open(path, flags | _DIRECT)
        except OSError as error:
            # File systems without O_DIRECT, such as an old tmpfs, report EINVAL.
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags)


@contextlib.contextmanager
def closing(file: int) -> Iterator[int]:
    """Close a file descriptor at the end of a ``with`` block."""
    try:
        yield file
    finally:
        os.close(file)


def require_descriptors() -> None:
    """Raise OSError if so few descriptors are free that MPI would abort the job."""
    held: list[int] = []
    try:
        for _ in range(_SPARE_DESCRIPTORS):
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for file in held:
            os.close(file)


def forget_pages(file: int, start: int, stop: int) -> None:
    """Drop a written and flushed range of a file from the page cache, if possible."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(file, start, stop - start, os.POSIX_FADV_DONTNEED)


def flush(file: int) -> None:
    """Write a file's content to the disk; do not retry after an OSError."""
    # A second fsync can succeed although the data are lost.
    os.fsync(file)


def flush_folder(path: str) -> None:
    """Write the names in a folder to the disk."""
    with closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as folder:
        os.fsync(folder)


def remove(path: str) -> None:
    """Remove a file, on one rank; a thread frees its disk space, which can be slow."""
    with _freed_later(path):
        os.unlink(path)


@contextlib.contextmanager
def _freed_later(path: str) -> Iterator[None]:
    """Keep a file open while its last name is removed; then close it in a thread."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # The file is unreadable or missing: the block of this context raises any error.
        file = -1
    try:
        yield
    finally:
        if file >= 0:
            _close_later(file)


def _close_later(file: int) -> None:
    thread = threading.Thread(
        target=os.close, args=(file,), name="hpcstrat-remove", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:
        # The system refuses another thread: close the file here, although that is slow.
        os.close(file)
        return
    _freeing[:] = [*filter(threading.Thread.is_alive, _freeing), thread]


def gives_back() -> bool:
    """Return whether threads are still freeing the disk space of removed files."""
    return any(thread.is_alive() for thread in _freeing)


def wait_for_room() -> bool:
    """Wait for threads that free removed files; return whether there were any."""
    threads = list(_freeing)
    for thread in threads:
        thread.join()
    return bool(threads)


def publish(temporary: str, path: str, replaces: bool) -> None:
    """Give a finished file its final name, and remove its temporary name.

    Call this on one rank. Raises FileExistsError if ``path`` exists and ``replaces`` is
    False.
    """
    if replaces:
        with _freed_later(path):
            os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS repeats a link() whose reply was lost, so that it finds its own ``path``.
        if not os.path.samefile(temporary, path):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # This file system has no hard links: rename the file instead.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "File exists", path) from error
        os.rename(temporary, path)
        return
    # If this fails, the checkpoint is complete, and a later job removes the name.
    with contextlib.suppress(OSError):
        os.unlink(temporary)


def _type(path: str) -> int | None:
    # The type is the first word of struct statfs, which is shorter than 64 words.
    words = (ctypes.c_ulong * 64)()
    if ctypes.CDLL(None).statfs(os.fsencode(path), words):
        return None
    return int(words[0]) & 0xFFFFFFFF


def file_system_name(path: str) -> str:
    """Return the name of a path's file system, such as ``Lustre``, or else its type."""
    number = _type(path)
    if number is None:
        return "unknown"
    return _NAMES.get(number, f"of type {number:#x}")


def is_local(path: str) -> bool:
    """Return whether a path is on ext2 to ext4 or XFS, where direct writes are fast."""
    return _type(path) in _LOCAL_TYPES


def goes_direct(choice: str | None, path: str) -> bool:
    """Return whether the setting ``direct_io`` bypasses the page cache at a path."""
    return choice == "on" or (choice == "auto" and is_local(path))
