"""Names of files: given, taken away, and brought to the disk.

Linux manual: link(2), rename(2), unlink(2).
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator

__all__ = ["flush_folder", "publish", "remove", "wait_for_room"]

_NO_LINKS = (
    *(errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EINVAL),
)
# One list for the process: the next save may be another manager's.
_freeing: list[threading.Thread] = []


def flush_folder(path: str) -> None:
    """Bring the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove(path: str) -> None:
    """Remove a file; a thread gives back its blocks, which takes long for large ones.

    One rank calls it. The name is gone on return.
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


def gives_back() -> bool:
    """Whether a thread of this process still gives back blocks of removed files."""
    return any(thread.is_alive() for thread in _freeing)


def wait_for_room() -> bool:
    """Wait for blocks that are being given back; return whether there were any."""
    threads = list(_freeing)
    for thread in threads:
        thread.join()
    return bool(threads)


def publish(temporary: str, path: str, replaces: bool) -> None:
    """Give a finished file its name, and take its temporary one away.

    One rank calls it. Raises FileExistsError where there is a file of that name, unless
    it ``replaces`` it.
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
