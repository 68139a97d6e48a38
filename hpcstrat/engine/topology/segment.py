"""Memory that the ranks of one worker share.

The memory is a mapped file in ``/dev/shm``, created exclusively, with mode 0600. The
file is unlinked as soon as all ranks have mapped it, so that a killed job leaves no
file. If ``/dev/shm`` does not exist, or is too small, the memory is an MPI window.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import sys
from typing import Any

__all__ = ["Segment"]

_FOLDER = "/dev/shm"


class Segment:
    """Shared memory of a worker, initialized to zero.

    The constructor and `close` are collective over ``comm``. ``buffer``
    has ``common_bytes``, rounded up to whole pages, and then ``part_bytes`` for each
    rank, in rank order. All sizes are the same on every rank; ``part_bytes`` is halved,
    down to one page, until the file fits the file system. The memory stays readable
    after another rank has died.
    """

    def __init__(
        self,
        comm: Any,
        common_bytes: int,
        part_bytes: int = 0,
        *,
        folder: str = _FOLDER,
    ) -> None:
        self._map: mmap.mmap | None = None
        self._window: Any = None
        self.common_bytes = common_bytes + -common_bytes % mmap.PAGESIZE
        self.part_bytes = part_bytes
        while self._map is None:
            try:
                self._map = self._open_file(comm, folder)
            except FileNotFoundError:
                break
            if self._map is None:
                if self.part_bytes <= mmap.PAGESIZE:
                    break
                self.part_bytes = self.part_bytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None:
            self.buffer = memoryview(self._map)
        else:
            size = self.common_bytes + comm.size * self.part_bytes
            self.buffer = self._open_window(comm, size)

    def _open_file(self, comm: Any, folder: str) -> mmap.mmap | None:
        """Map a new file on all ranks; return None on all if memory is lacking."""
        nbytes = self.common_bytes + comm.size * self.part_bytes
        path, mapped, handle = "", None, -1
        own = self.common_bytes + comm.rank * self.part_bytes
        first = 0 if comm.rank == 0 else own
        try:
            path = _create(nbytes, folder) if comm.rank == 0 else ""
            path = comm.bcast(path, root=0)
            if not path:
                raise FileNotFoundError(folder)
            with contextlib.suppress(OSError):
                handle = os.open(path, os.O_RDWR)
                mapped = _map(handle, nbytes, first, own + self.part_bytes)
            everywhere = all(comm.allgather(mapped is not None))
        except BaseException:
            # Unlink the file on every rank, because rank 0 may have died.
            _unlink(path)
            raise
        if comm.rank == 0:
            _unlink(path)
        if handle >= 0:
            os.close(handle)
        if mapped is not None and not everywhere:
            mapped.close()
        return mapped if everywhere else None

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


def _create(nbytes: int, folder: str) -> str:
    """Create the file without allocating memory; return "" if that fails."""
    path = os.path.join(folder, f"hpcstrat-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError:
        return ""
    try:
        os.ftruncate(handle, nbytes)
    except OSError:
        os.unlink(path)
        return ""
    finally:
        os.close(handle)
    return path


def _map(handle: int, nbytes: int, start: int, end: int) -> mmap.mmap:
    """Map the file; allocate a range of it, on the NUMA node of this rank's core."""
    if os.fstat(handle).st_size != nbytes:
        raise OSError(f"expected a file of {nbytes} bytes")
    # If the file system is full, this call raises an error; without it, the first store
    # would end the process by SIGBUS.
    if end > start:
        os.posix_fallocate(handle, start, end - start)
    # Without trackfd=False, each map keeps a file descriptor open.
    without: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return mmap.mmap(handle, nbytes, **without)
