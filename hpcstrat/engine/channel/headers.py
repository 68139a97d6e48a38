"""Records in shared memory by which a worker's ranks announce headers and steps.

Each rank has two records, which it uses in turn. A rank overwrites record ``n`` with
record ``n + 2`` only after it has seen the records ``n + 1`` of all ranks; each rank
writes record ``n + 1`` after its last look at the records ``n``. A record contains a
hash of its integers, so that readers detect a half-written record, which a processor
with weak memory ordering may show.

Records also order memory: if a rank has seen another rank's record, it also sees all
that the other rank stored before the record. And a rank loads values before it writes
its record, so that ranks that have seen the record may overwrite these values. On
x86-64 this order needs no extra instruction: stores become visible in program order,
and loads are not reordered after later stores (Intel 64 and IA-32 Architectures
Software Developer's Manual, volume 3A, section 8.2.2; the C library ends its
non-temporal copies with a fence). On other processors, a full memory barrier is
executed before each record is written, and after the records of all ranks have been
seen: ``MPI_Win_sync``, which has this meaning for shared memory (MPI-4.1, sections 12.4
and 12.5.3). The compiled kernel writes and reads the same records by C11 atomics: it
stores the tick last, with release order, and loads it first, with acquire order.

With the kernel, a rank may sleep until all records have arrived. A flag in its own
record shows that it sleeps, and the rank that posts the last record wakes it by a
futex (futex(2) in the Linux manual pages). If no rank sleeps, this costs a memory
barrier and a look at the flags.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import struct
import time
from collections.abc import Callable
from typing import Any

from hpcstrat.engine.channel.waitable import Waitable
from hpcstrat.engine.native import load
from hpcstrat.engine.topology.process_stat import START, STATE, process_stat
from hpcstrat.engine.topology.topology import RECORD_BYTES, SLOTS_IN_RING, Topology

__all__ = ["SegmentHeaders", "make_kernel"]

_TOKEN_BYTES = 16
# The start time of a process that cannot be looked up at the moment.
_UNKNOWN = "?"
_RECORD = struct.Struct("=5q24x")
assert _RECORD.size == RECORD_BYTES


class SegmentHeaders(Waitable):
    """The headers of one worker's ranks, in the worker's shared segment.

    The constructor and `close` are collective over ``topology.worker_comm``. The
    compiled ``kernel`` writes and compares the headers, unless it is None.
    """

    def __init__(self, topology: Topology, kernel: Any = None) -> None:
        self._kernel, self._comm = kernel, topology.worker_comm
        # True if the last header ends the sleeps of the ranks that wait for it.
        self.wakes = kernel is not None
        self.sleep: Callable[[float], None] = time.sleep
        if kernel is not None:
            self.post = kernel.post  # type: ignore[method-assign]
            self.agreed = kernel.agreed  # type: ignore[method-assign]
            self.sleep = kernel.sleep
        self._size, self._replicas = self._comm.size, topology.worker_replicas
        # Keep only the processes that this rank can look up: not those of other
        # containers, in which process IDs are different.
        told = self._comm.allgather(_process_identity(os.getpid()))
        self._processes = {
            rank: (pid, start)
            for rank, (pid, start) in enumerate(told)
            if start not in ("", _UNKNOWN) and (pid, start) == _process_identity(pid)
        }
        span = RECORD_BYTES * self._size
        buffer = topology.segment.buffer
        self._halves = (buffer[:span], buffer[span : 2 * span])
        start = self._comm.rank * RECORD_BYTES
        self._owns = [half[start : start + RECORD_BYTES] for half in self._halves]
        # A copy by ``tobytes`` is compared much faster than the memoryview itself.
        self._reads = [half.tobytes for half in self._halves]
        self._read, self._wanted, self.tick = self._reads[0], b"", 0
        self._window, self._barrier = _memory_barrier(topology.mpi)

    def post(self, run: int, digest: int, flags: int) -> None:
        """Write this rank's header; does not wait."""
        self.tick = tick = self.tick + 1
        check = hash((tick, run, digest, flags))
        record = _RECORD.pack(tick, run, digest, flags, check)
        self._read = self._reads[tick & 1]
        self._wanted = record * self._size
        if self._barrier is not None:
            self._barrier()
        self._owns[tick & 1][:] = record

    def agreed(self) -> bool:
        """Return whether all ranks' headers are equal; False while some are missing."""
        if self._read() != self._wanted:
            return False
        if self._barrier is not None:
            self._barrier()
        return True

    def missing(self) -> list[int]:
        """Return the ranks whose headers have not arrived."""
        tick = self.tick if self._kernel is None else self._kernel.tick
        records = _RECORD.iter_unpack(self._reads[tick & 1]())
        return [
            self._replicas[rank]
            for rank, (*header, check) in enumerate(records)
            # A half-written header of Python counts as missing.
            if header[0] != tick
            or (self._kernel is None and check != hash(tuple(header)))
        ]

    def dead(self) -> list[int]:
        """Return the ranks whose processes are known to have ended."""
        return [
            self._replicas[rank]
            for rank, (pid, start) in self._processes.items()
            if _process_identity(pid)[1] not in (start, _UNKNOWN)
        ]

    def close(self) -> None:
        """Release the kernel and the views of the segment, and free the window."""
        if self._kernel is not None:
            self._kernel.close()
        del self._reads, self._read
        for view in (*self._owns, *self._halves):
            view.release()
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()
            self._window = None


def make_kernel(topology: Topology) -> tuple[Any, bool]:
    """Return a kernel for this worker's segment; None unless all its ranks have one.

    Collective over ``topology.worker_comm``. Also returns whether all ranks of the
    worker can read each other's memory. Each rank tries it, because an operating system
    may forbid it, for example in containers. In a container, a process ID may also
    belong to another process: therefore ranks compare random bytes.
    """
    comm, segment = topology.worker_comm, topology.segment
    module, kernel, own = load(), None, None
    if module is not None and comm.size > 1:
        slot = topology.slot_bytes
        sizes = segment.common_bytes, segment.part_bytes, slot * SLOTS_IN_RING, slot
        # The kernel refuses memory that is not aligned; an MPI window may be unaligned.
        with contextlib.suppress(ValueError):
            kernel = module.Kernel(segment.buffer, *sizes, comm.rank, comm.size)
            token = secrets.token_bytes(_TOKEN_BYTES)
            own = os.getpid(), kernel.offer(token), token
    told = comm.allgather(own)
    if kernel is None or None in told:
        if kernel is not None:
            kernel.close()
        return None, False
    reads = all(kernel.reads(rank, *one) for rank, one in enumerate(told))
    return kernel, all(comm.allgather(reads))


def _memory_barrier(
    mpi: Any, machine: str = platform.machine()
) -> tuple[Any, Callable[[], None] | None]:
    """Return an MPI window and its memory barrier; ``(None, None)`` on x86-64."""
    if machine in ("x86_64", "AMD64"):
        return None, None
    window = mpi.Win.Allocate(8, 1, comm=mpi.COMM_SELF)
    window.Lock_all()
    return window, window.Sync


def _process_identity(pid: int) -> tuple[int, str]:
    """Return a process ID with the start time, which differs if the ID is reused."""
    try:
        _, fields = process_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return pid, ""
    except OSError:
        # The lookup failed, for example without a free file descriptor.
        return pid, _UNKNOWN
    return pid, "" if fields[STATE] in "ZX" else fields[START]
