"""Memory that the ranks of one worker share.

The memory is a mapped area of a file in ``/dev/shm``, created exclusively, with mode
0600. The file is unlinked as soon as all ranks have opened it, so that a killed job
leaves no file. If ``/dev/shm`` does not exist, or is too small, the memory is an MPI
window.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import sys
from typing import Any

__all__ = ["Segment", "SharedFile"]

_FOLDER = "/dev/shm"


class SharedFile:
    """An unlinked file that all ranks of ``comm`` have open; segments are its areas.

    The constructor is collective over ``comm``, whose ranks are on one node. The ranks
    of smaller communicators can make segments in the file, which are independent of
    each other, and stay mapped after `close`.
    """

    def __init__(self, comm: Any, folder: str = _FOLDER) -> None:
        self.num_ranks: int = comm.size
        # The file descriptor; -1 on all ranks if a rank cannot open the file.
        self.handle = -1
        path = ""
        try:
            path = _create(folder) if comm.rank == 0 else ""
            path = comm.bcast(path, root=0)
            with contextlib.suppress(OSError):
                self.handle = os.open(path, os.O_RDWR)
            everywhere = all(comm.allgather(self.handle >= 0))
        except BaseException:
            # Unlink the file on every rank, because rank 0 may have died.
            _unlink(path)
            self.close()
            raise
        if comm.rank == 0:
            _unlink(path)
        if not everywhere:
            self.close()

    def append(self, nbytes: int) -> int:
        """Append an area of whole pages, not yet allocated; return its offset, or -1.

        Not collective: one rank of each segment calls this method, and ranks of other
        segments may call it at the same time.
        """
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX)
            try:
                offset = os.fstat(self.handle).st_size
                whole = nbytes + -nbytes % mmap.PAGESIZE
                os.ftruncate(self.handle, offset + whole)
            finally:
                fcntl.flock(self.handle, fcntl.LOCK_UN)
        except OSError:
            return -1
        return offset

    def close(self) -> None:
        """Close this rank's file descriptor; not collective."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class Segment:
    """Shared memory of a worker, initialized to zero.

    The constructor and `close` are collective over ``comm``. ``buffer``
    has ``common_bytes``, rounded up to whole pages, and then ``part_bytes`` for each
    rank, in rank order. All sizes are the same on every rank; ``part_bytes`` is halved,
    down to one page, until the area fits the file system. The memory is an area of
    ``file``, or by default of a new file. The memory stays readable after another rank
    has died.
    """

    def __init__(
        self,
        comm: Any,
        common_bytes: int,
        part_bytes: int = 0,
        *,
        file: SharedFile | None = None,
        folder: str = _FOLDER,
    ) -> None:
        self._map: mmap.mmap | None = None
        self._window: Any = None
        self.common_bytes = common_bytes + -common_bytes % mmap.PAGESIZE
        self.part_bytes = part_bytes
        used = SharedFile(comm, folder) if file is None else file
        try:
            while used.handle >= 0:
                self._map = self._map_area(comm, used)
                if self._map is not None or self.part_bytes <= mmap.PAGESIZE:
                    break
                self.part_bytes = self.part_bytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        finally:
            if file is None:
                used.close()
        if self._map is not None:
            self.buffer = memoryview(self._map)
        else:
            size = self.common_bytes + comm.size * self.part_bytes
            self.buffer = self._open_window(comm, size)

    def _map_area(self, comm: Any, file: SharedFile) -> mmap.mmap | None:
        """Map a new area on all ranks; return None on all if memory is lacking."""
        nbytes = self.common_bytes + comm.size * self.part_bytes
        offset = comm.bcast(file.append(nbytes) if comm.rank == 0 else 0, root=0)
        mapped = None
        own = self.common_bytes + comm.rank * self.part_bytes
        first, end = 0 if comm.rank == 0 else own, own + self.part_bytes
        with contextlib.suppress(OSError):
            mapped = _map(file.handle, offset, nbytes, first, end)
        if all(comm.allgather(mapped is not None)):
            return mapped
        if mapped is not None:
            # The file keeps the pages of an area until they are removed.
            with contextlib.suppress(OSError):
                mapped.madvise(mmap.MADV_REMOVE)
            mapped.close()
        return None

    def _open_window(self, comm: Any, nbytes: int) -> memoryview:
        from mpi4py import MPI

        plain = getattr(comm, "plain", comm)
        own = nbytes if comm.rank == 0 else 0
        window = MPI.Win.Allocate_shared(own, 1, comm=plain)
        shared, _ = window.Shared_query(0)
        self._window = window
        buffer = memoryview(shared).cast("B")[:nbytes]  # type: ignore[arg-type]
        if comm.rank == 0:
            buffer[:] = bytes(nbytes)
        comm.Barrier()
        return buffer

    def close(self) -> None:
        """Release the memory; collective over the segment's communicator."""
        self.release()
        if self._window is not None:
            self._window.Free()
            self._window = None

    def release(self) -> None:
        """Unmap the memory on this rank only; works if other ranks have died.

        A window is not freed until the process ends.
        """
        # If a view of the memory still exists, the mapping ends with the last view.
        with contextlib.suppress(BufferError):
            self.buffer.release()
            if self._map is not None:
                self._map.close()
        self._map = None


def _unlink(path: str) -> None:
    # Another rank that had an error may have unlinked the file already.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _create(folder: str) -> str:
    """Create an empty file, and return its path, or "" if that fails."""
    path = os.path.join(folder, f"hpcstrat-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except OSError:
        return ""
    return path


def _map(handle: int, offset: int, nbytes: int, start: int, end: int) -> mmap.mmap:
    """Map an area; allocate a range of it, on the NUMA node of this rank's core."""
    if offset < 0 or os.fstat(handle).st_size < offset + nbytes:
        raise OSError(f"expected a file with an area of {nbytes} bytes at {offset}")
    # If the file system is full, this call raises an error; without it, the first store
    # would end the process by SIGBUS.
    if end > start:
        os.posix_fallocate(handle, offset + start, end - start)
    # Without trackfd=False, each map keeps a file descriptor open.
    without: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return mmap.mmap(handle, nbytes, offset=offset, **without)
