"""Memory that the ranks of one worker share.

It is a file of ``/dev/shm``, created exclusively, with mode 0600, and unlinked as soon
as all ranks have mapped it, so that a killed job leaves nothing behind. Where there is
no such file system, or not enough of it, an MPI window serves.
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
    """Shared memory of a worker, zero at first.

    Collective over ``comm``, which is used here and for freeing a window. ``buffer``
    has the common bytes, rounded up to whole pages, and then ``part_bytes`` for each
    rank, in order. All sizes are the same on every rank; parts are halved, down to one
    page, until all fit the file system. The memory stays readable after a peer's death.
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
        """Map a new file on all ranks, or on none for lack of memory."""
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
            # Rank 0, which unlinks the file in the end, may have died.
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
        """Release the memory; collective over the communicator that made it."""
        self.release()
        if self._window is not None:
            self._window.Free()
            self._window = None

    def release(self) -> None:
        """Let go of the memory on this rank, also where others have died.

        A window is left to the end of the process.
        """
        # The mapping goes with the last view, if somebody still holds one.
        with contextlib.suppress(BufferError):
            self.buffer.release()
            if self._map is not None:
                self._map.close()
        self._map = None


def _unlink(path: str) -> None:
    # A rank that was interrupted elsewhere may have unlinked it.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _create(nbytes: int, folder: str) -> str:
    """Make the file, still without memory; return an empty path where that fails."""
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
    """Map the file; reserve a range of it, which then lies near this rank's core."""
    if os.fstat(handle).st_size != nbytes:
        raise OSError(f"expected a file of {nbytes} bytes")
    # Reserving finds a full file system here, not as SIGBUS at the first store.
    if end > start:
        os.posix_fallocate(handle, start, end - start)
    # Without this option, each map keeps a file descriptor.
    without: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return mmap.mmap(handle, nbytes, **without)
