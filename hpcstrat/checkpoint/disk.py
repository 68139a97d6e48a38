"""Files at the level of the operating system: what Python's own ``os`` leaves open.

Linux manual: open(2) for O_DIRECT, fallocate(2), link(2), fsync(2), statfs(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import sys
import threading
from collections.abc import Iterator

from hpcstrat.checkpoint.plan import PAGE_BYTES

__all__ = [
    "create",
    "flush",
    "flush_folder",
    "forget_pages",
    "is_local",
    "open_to_read",
    "open_to_write",
    "publish",
    "read_exactly",
    "read_into",
    "remove",
    "write_all",
]

# ext2 to ext4, and XFS: where direct writes of several processes into one file are both
# allowed and faster. Parallel file systems have their own ways (statfs(2), f_type).
_LOCAL_TYPES = (0xEF53, 0x58465342)
_NO_LINKS = (
    *(errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EINVAL),
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_RESERVATION = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_DIRECT = getattr(os, "O_DIRECT", 0)
_MOST_BYTES = 1 << 30


def is_local(path: str) -> bool:
    """Whether a path is on a file system of this machine, known to write directly well.

    Not collective.

    Parameters
    ----------
    path : str
        Of a file or folder.

    Returns
    -------
    bool
        False where that cannot be found out.
    """
    if not sys.platform.startswith("linux"):
        return False
    # The type is the first word of struct statfs; the rest fits by far.
    words = (ctypes.c_ulong * 64)()
    if ctypes.CDLL(None).statfs(os.fsencode(path), words):
        return False
    return int(words[0]) in _LOCAL_TYPES


def create(path: str, nbytes: int) -> None:
    """Make a file and reserve its space, so that a full disk is found at once.

    Not collective: one rank calls it.

    Parameters
    ----------
    path : str
        Must not exist.
    nbytes : int
        Size of the file.

    Raises
    ------
    OSError
        If there is no room, or no such folder; no file is left then.
    """
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        try:
            _reserve(file, nbytes)
        except OSError as error:
            if error.errno not in _NO_ROOM or not _wait_for_room():
                raise
            _reserve(file, nbytes)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(file)


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
    """Open an existing file for writing.

    Not collective.

    Parameters
    ----------
    path : str
        The file.
    direct : bool
        Whether to go past the page cache, if the file system does so.

    Returns
    -------
    int
        Descriptor, to be closed by the caller.

    Raises
    ------
    OSError
        If it cannot be opened.
    """
    return _open(path, os.O_RDWR, direct)


def open_to_read(path: str, direct: bool) -> int:
    """Open a file for reading.

    Not collective.

    Parameters
    ----------
    path : str
        The file.
    direct : bool
        Whether to go past the page cache, if the file system does so.

    Returns
    -------
    int
        Descriptor, to be closed by the caller.

    Raises
    ------
    OSError
        If it cannot be opened.
    """
    return _open(path, os.O_RDONLY, direct)


def _open(path: str, flags: int, direct: bool) -> int:
    flags |= os.O_CLOEXEC
    if direct and _DIRECT:
        try:
            return os.open(path, flags | _DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags)


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write a buffer at a place of a file, in as many calls as it takes.

    Not collective. Lets other threads run meanwhile.

    Parameters
    ----------
    file : int
        Descriptor.
    data : memoryview of bytes
        Contiguous; for O_DIRECT, its address, length and place are multiples of a page.
    offset : int
        Where in the file.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    done = 0
    while done < data.nbytes:
        part, direct = data[done : done + _MOST_BYTES], _is_direct(file)
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

    Not collective. Lets other threads run meanwhile.

    Parameters
    ----------
    file : int
        Descriptor.
    buffer : memoryview of bytes
        Contiguous; for O_DIRECT, its address, length and place are multiples of a page.
    offset : int
        Where in the file.

    Raises
    ------
    OSError
        If it cannot be read.
    EOFError
        If the file ends before.
    """
    done = 0
    while done < buffer.nbytes:
        part, direct = buffer[done : done + _MOST_BYTES], _is_direct(file)
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
            _stop_direct(file)


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & _DIRECT)


def _stop_direct(file: int) -> None:
    """Go through the page cache from here on; another thread may have said so, too."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)


def read_exactly(file: int, offset: int, nbytes: int) -> bytes:
    """Return a part of a file.

    Not collective.

    Parameters
    ----------
    file : int
        Descriptor, without O_DIRECT.
    offset : int
        Where.
    nbytes : int
        How much.

    Returns
    -------
    bytes
        All of it.

    Raises
    ------
    OSError
        If it cannot be read.
    EOFError
        If the file ends before.
    """
    data = bytearray(nbytes)
    read_into(file, memoryview(data), offset)
    return bytes(data)


def forget_pages(file: int, start: int, stop: int) -> None:
    """Give back the page cache of what was written and flushed.

    Not collective.

    Parameters
    ----------
    file : int
        Descriptor.
    start, stop : int
        Which part.
    """
    # Advice only: whoever does not take it has written as well.
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(file, start, stop - start, os.POSIX_FADV_DONTNEED)


def flush(file: int) -> None:
    """Bring a file's content to the disk.

    Not collective.

    Parameters
    ----------
    file : int
        Descriptor.

    Raises
    ------
    OSError
        If it cannot be. It is not tried again: the kernel may have dropped the pages.
    """
    os.fsync(file)


def flush_folder(path: str) -> None:
    """Bring the names in a folder to the disk.

    Not collective.

    Parameters
    ----------
    path : str
        The folder.

    Raises
    ------
    OSError
        If it cannot be.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


_freeing: list[threading.Thread] = []


def remove(path: str) -> None:
    """Remove a file; a thread gives back its blocks, which takes long for large ones.

    Not collective: one rank calls it.

    Parameters
    ----------
    path : str
        The file; its name is gone on return.

    Raises
    ------
    OSError
        If it cannot be removed.
    """
    with _freed_later(path):
        os.unlink(path)


@contextlib.contextmanager
def _freed_later(path: str) -> Iterator[None]:
    """Keep a file open that loses its last name meanwhile; a thread closes it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # Not readable, or not there: whoever removes it finds out.
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
        # The system gives no more threads.
        os.close(file)
        return
    _freeing[:] = [*filter(threading.Thread.is_alive, _freeing), thread]


def _wait_for_room() -> bool:
    """Wait for blocks that are being given back; whether there were any."""
    threads = list(_freeing)
    for thread in threads:
        thread.join()
    return bool(threads)


def publish(temporary: str, path: str, replaces: bool) -> None:
    """Give a finished file its name.

    Not collective: one rank calls it.

    Parameters
    ----------
    temporary : str
        Its name so far, which goes.
    path : str
        Its name from now on.
    replaces : bool
        Whether a file of that name is replaced.

    Raises
    ------
    FileExistsError
        If there is a file of that name, which is not to be replaced.
    OSError
        If the folder cannot be written.
    """
    if replaces:
        with _freed_later(path):
            os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        # Over NFS a call whose answer was lost is repeated, and finds its own link.
        if not os.path.samefile(temporary, path):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # No hard links on this file system.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "File exists", path) from error
        os.rename(temporary, path)
        return
    # The checkpoint is there; what may be left is a second name, for others to tidy.
    with contextlib.suppress(OSError):
        os.unlink(temporary)
