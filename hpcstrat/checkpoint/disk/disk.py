"""Files at the level of the operating system: what Python's own ``os`` leaves open.

Linux manual: open(2) for O_DIRECT, fallocate(2), fsync(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os

from hpcstrat.checkpoint.disk.file_names import wait_for_room

__all__ = [
    "NO_DESCRIPTORS",
    "PAGE_BYTES",
    "PASSING",
    "create",
    "flush",
    "forget_pages",
    "is_direct",
    "open_to_read",
    "open_to_write",
    "read_exactly",
    "read_into",
    "require_descriptors",
    "write_all",
]

PAGE_BYTES = 4096
"""To which blocks are aligned: what direct reads and writes ask for."""

PASSING = (
    *(errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT),
    *(errno.EAGAIN, errno.EINTR),
)
"""Errors that say nothing of a file."""

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Those of them that say that too many files are open."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_RESERVATION = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_DIRECT = getattr(os, "O_DIRECT", 0)
# By one call, Linux writes at most a page less than 2 GiB.
_MOST_BYTES = 1 << 30
# Shared memory takes one, or 6 where MPI gives it; connections to other hosts, some.
_SPARE_DESCRIPTORS = 32


def create(path: str, nbytes: int) -> None:
    """Make a file and reserve its space, so that a full disk is found at once.

    One rank calls it; the file must not exist. Raises OSError where there is no room,
    or no such folder; no file is left then.
    """
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        try:
            _reserve_with_patience(file, nbytes)
        finally:
            # On network file systems, this may be what finds the disk full.
            os.close(file)
    except BaseException:
        os.unlink(path)
        raise


def _reserve_with_patience(file: int, nbytes: int) -> None:
    try:
        _reserve(file, nbytes)
    except OSError as error:
        # A checkpoint that was just removed may still hold the room.
        if error.errno not in _NO_ROOM or not wait_for_room():
            raise
        _reserve(file, nbytes)


def _reserve(file: int, nbytes: int) -> None:
    try:
        _allocate(file, nbytes)
    except OSError as error:
        if error.errno not in _NO_RESERVATION:
            raise
        # Not on this file system: the best there is.
        space = os.fstatvfs(file)
        if space.f_blocks and space.f_bavail * space.f_frsize < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        os.ftruncate(file, nbytes)


def _allocate(file: int, nbytes: int) -> None:
    """Call fallocate itself: posix_fallocate writes every page where there is none."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None:
        os.posix_fallocate(file, 0, nbytes)
        return
    number = ctypes.c_int64
    if call(ctypes.c_int(file), ctypes.c_int(0), number(0), number(nbytes)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def open_to_write(path: str, direct: bool) -> int:
    """Return the descriptor of a file that exists, for the caller to close.

    ``direct`` goes past the page cache, if the file system does so.
    """
    return _open(path, os.O_RDWR, direct)


def open_to_read(path: str, direct: bool) -> int:
    """Return the descriptor of a file, as `open_to_write` does, for reading."""
    return _open(path, os.O_RDONLY, direct)


def _open(path: str, flags: int, direct: bool) -> int:
    flags |= os.O_CLOEXEC
    if direct and _DIRECT:
        try:
            return os.open(path, flags | _DIRECT)
        except OSError as error:
            # File systems without it say EINVAL, such as tmpfs of older kernels.
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags)


def require_descriptors() -> None:
    """Raise OSError where MPI could not open files: it would end the process."""
    held: list[int] = []
    try:
        for _ in range(_SPARE_DESCRIPTORS):
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for file in held:
            os.close(file)


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write a buffer at a place of a file, in as many calls as it takes.

    Other threads run meanwhile. The buffer is contiguous; for O_DIRECT, its address,
    length and place are multiples of a page.
    """
    done = 0
    while done < data.nbytes:
        part, direct = data[done : done + _MOST_BYTES], is_direct(file)
        try:
            written = os.pwrite(file, part, offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            _stop_direct(file)
            continue
        if written == 0:
            raise OSError(errno.EIO, "nothing was written")
        done += written
        if written % PAGE_BYTES:
            # The rest is not aligned any more.
            _stop_direct(file)


def read_into(file: int, buffer: memoryview, offset: int) -> None:
    """Fill a buffer from a place of a file, in as many calls as it takes.

    As `write_all`. Raises EOFError where the file ends before.
    """
    done = 0
    while done < buffer.nbytes:
        part, direct = buffer[done : done + _MOST_BYTES], is_direct(file)
        try:
            count = os.preadv(file, [part], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            _stop_direct(file)
            continue
        if count == 0:
            raise EOFError(f"the file ends at {offset + done}")
        done += count
        if count % PAGE_BYTES and done < buffer.nbytes:
            # As in `write_all`.
            _stop_direct(file)


def is_direct(file: int) -> bool:
    """Whether a file goes past the page cache; not where the system has refused to."""
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & _DIRECT)


def _stop_direct(file: int) -> None:
    """Go through the page cache from here on; another thread may have said so, too."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)


def read_exactly(file: int, offset: int, nbytes: int) -> bytes:
    """Return a part of a file, open without O_DIRECT; EOFError if it ends before."""
    data = bytearray(nbytes)
    read_into(file, memoryview(data), offset)
    return bytes(data)


def forget_pages(file: int, start: int, stop: int) -> None:
    """Give back the page cache of what was written and flushed."""
    # Advice only: whoever does not take it has written as well.
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(file, start, stop - start, os.POSIX_FADV_DONTNEED)


def flush(file: int) -> None:
    """Bring a file's content to the disk.

    An OSError is final: to try again could succeed, but the kernel may have dropped the
    pages.
    """
    os.fsync(file)
