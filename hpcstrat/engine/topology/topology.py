"""The ranks of a job as replicas, workers and hosts, and their communicators."""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hpcstrat.engine.topology.bindings import (
    num_users,
    own_masks,
    remember_masks,
)
from hpcstrat.engine.topology.segment import Segment, SharedFile
from hpcstrat.engine.topology.start_warnings import warn_of_bindings, warn_of_memory
from hpcstrat.engine.topology.starting import expect_losses, start_mpi
from hpcstrat.engine.topology.survival import (
    GARBLED,
    create,
    is_loss,
    require_survival,
    revoke,
)
from hpcstrat.errors import RankLostError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcstrat.engine.topology.rank_gpu import Gpu

__all__ = [
    "RECORD_BYTES",
    "SLOTS_IN_RING",
    "STATUS_BYTES",
    "Topology",
    "slot_bytes",
    "start_mpi",
]

RECORD_BYTES = 64
"""Bytes of a rank's record in the worker's segment: one cache line."""

STATUS_BYTES = 8192
"""Bytes of a rank's status in the worker's segment, after the records of all ranks."""

SLOTS_IN_RING = 4
"""Number of pieces of the largest size in a replica's part of the segment."""

_ROUNDING = 1e-6
# Half of 64 MiB, the size of /dev/shm in many containers.
_SEGMENT_BYTES = 32 << 20
_LARGEST_SLOT_BYTES = 256 << 10
_LARGEST_SENT_SLOT_BYTES = 2 << 20


class Topology:
    """The communicators of a group of replicas.

    Collective over ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        One rank per replica; default: all ranks of the job. The topology duplicates it;
        the caller still owns the original.
    replicas_per_worker : int, optional
        Split the ranks of a node into workers of this many replicas; default: one
        worker per node.
    survives : bool
        Whether the loss of a rank raises an error on the other ranks, see
        `topology.survival`. If True, a loss during construction revokes ``comm``.
    file : SharedFile, optional
        The file of this node in which the worker's segment is made; default: a new one.
        The memory of one segment is enough for two topologies of all ranks of the file.

    Attributes
    ----------
    mpi : module
        ``mpi4py.MPI``.
    survives : bool
        The argument ``survives``.
    replica_comm, worker_comm, cross_worker_comm : mpi4py.MPI.Intracomm
        All replicas in sync; the replicas of this worker; the replicas with this
        replica's position in every worker. The topology owns these communicators: only
        `close` frees them.
    num_replicas, replica_id : int
        Size of, and rank in, ``replica_comm``.
    num_workers, worker_id : int
        Number of workers, and this worker's index, in order of lowest replica.
    worker_replicas : list of int
        Replicas of this worker, in the order of ``worker_comm``.
    smallest_worker : int
        Number of replicas of the smallest worker.
    num_cores : int
        Number of processor cores that the worker's replicas may use.
    cores_each : int
        Number of cores of this replica, if a core shared by n ranks counts as 1/n.
    shares_cores : bool
        Whether more ranks than cores use the cores of the worker's replicas. Ranks of
        the job that are not replicas count, too, if they have formed a topology.

    Raises
    ------
    TopologyError
        If the ranks were launched as separate programs, or the loss of a rank cannot be
        survived.
    RankLostError
        If a rank is lost and ``survives`` is True; raised on every remaining rank.
    ValueError
        If ``replicas_per_worker`` is not positive.
    """

    replica_comm: MPI.Intracomm
    worker_comm: MPI.Intracomm
    cross_worker_comm: MPI.Intracomm
    worker_id: int
    num_workers: int
    # Number of steps of data exchanges that this rank has completed. A slow exchange is
    # not treated as stuck while this number increases.
    moves = 0
    # This rank's GPU, or None if the rank computes on the CPU. The strategy sets this
    # attribute and the next three.
    gpu: Gpu | None = None
    # True if another rank of this host has the same GPU.
    shares_gpu: bool = False
    mpi_reads_gpu: str = "auto"
    nccl: bool = True

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        replicas_per_worker: int | None = None,
        survives: bool = False,
        file: SharedFile | None = None,
    ) -> None:
        if replicas_per_worker is not None and replicas_per_worker < 1:
            raise ValueError(
                "expected replicas_per_worker >= 1 or None, found "
                f"{replicas_per_worker}; pass None for one worker per node"
            )
        self.mpi = mpi = start_mpi()
        self.survives = survives
        self._comms: list[Any] = []
        self.closed = False
        parent = self.world() if comm is None else comm
        self.spans_job = comm is None or comm.size == mpi.COMM_WORLD.size
        try:
            self._form(parent, replicas_per_worker, file)
        except (mpi.Exception, RankLostError, *GARBLED) as error:
            lost = survives and is_loss(mpi, error, parent)
            self.revoke()
            if not lost:
                raise
            raise RankLostError(
                "expected all ranks to form a topology, found that one was lost; form "
                "another one of the remaining ranks"
            ) from error

    def _form(
        self, parent: Any, replicas_per_worker: int | None, file: SharedFile | None
    ) -> None:
        """Create the communicators, and map the worker's shared memory."""
        mpi = self.mpi
        self.replica_comm = self._made(parent, parent.Dup)
        self.replica_id: int = self.replica_comm.rank
        self.num_replicas: int = self.replica_comm.size
        # The replicas' ranks in the job, which errors and reports name.
        self.job_ranks: list[int] = _job_ranks(mpi, self.replica_comm)
        self.worker_comm = self._split_worker(replicas_per_worker)
        self._number_workers()
        self.worker_replicas: list[int] = self.worker_comm.allgather(self.replica_id)
        self.cross_worker_comm = self._made(
            self.replica_comm,
            self.replica_comm.Split,
            self.worker_comm.rank,
            self.worker_id,
        )
        own = self.worker_comm.size
        # The number of rings that share the memory of one segment.
        rings = own if file is None else 2 * file.num_ranks
        smallest, largest = (
            abs(self.replica_comm.allreduce(size, op=mpi.MIN)) for size in (own, -rings)
        )
        self.smallest_worker: int = smallest
        asked = SLOTS_IN_RING * slot_bytes(largest, self.num_workers)
        self.segment = Segment(
            self.worker_comm,
            (2 * RECORD_BYTES + STATUS_BYTES) * self.worker_comm.size,
            asked,
            file=file,
        )
        warn_of_memory(self.worker_comm, asked, self.segment.part_bytes)
        # Size of the largest piece in a replica's part of the segment, a power of two:
        # the smallest of all workers, because a small /dev/shm may limit the size.
        self.slot_bytes: int = self.replica_comm.allreduce(
            self.segment.part_bytes // SLOTS_IN_RING, op=mpi.MIN
        )
        # The ranks' cores differ if the launcher binds ranks to cores.
        cores = self.worker_comm.allgather(os.sched_getaffinity(0))
        every = frozenset[int]().union(*cores)
        self.num_cores = len(every)
        users = max(self.worker_comm.size, num_users(every))
        users = self.worker_comm.allreduce(users, op=mpi.MAX)
        self.shares_cores: bool = users > self.num_cores

    def _made(self, parent: Any, make: Callable[..., Any], *args: Any) -> Any:
        """Create a communicator, and store it, so that `revoke` revokes it, too."""
        comm = create(self.mpi, parent, functools.partial(make, *args), self.survives)
        self._comms.append(comm)
        return comm

    @staticmethod
    def world() -> MPI.Intracomm:
        """Return the communicator of all ranks of the job.

        Collective over all ranks of the job if this call initializes MPI.

        Returns
        -------
        mpi4py.MPI.Intracomm
            ``COMM_WORLD``.
        """
        world: MPI.Intracomm = start_mpi().COMM_WORLD
        return world

    @staticmethod
    def subset(ranks: Sequence[int]) -> MPI.Intracomm:
        """Return a communicator of some ranks of the job, in the order given.

        Collective over these ranks.

        Parameters
        ----------
        ranks : sequence of int
            Ranks in ``COMM_WORLD``; the same sequence on each of these ranks.

        Returns
        -------
        mpi4py.MPI.Intracomm
            A new communicator; the caller must free it.
        """
        world = Topology.world()
        group = world.Get_group()
        chosen = group.Incl(ranks)
        comm: MPI.Intracomm = world.Create_group(chosen)
        chosen.Free()
        group.Free()
        return comm

    def _split_worker(self, replicas_per_worker: int | None) -> Any:
        """Create the worker's communicator from the ranks that share memory."""
        shared = self.mpi.COMM_TYPE_SHARED
        node = self._made(
            self.replica_comm, self.replica_comm.Split_type, shared, self.replica_id
        )
        nodes = self.replica_comm.allreduce(int(node.rank == 0))
        if self.survives:
            require_survival(self.mpi, self.replica_comm, nodes)
            if self.replica_comm.size > 1:
                expect_losses()
        masks = node.allgather(own_masks())
        warn_of_bindings(node.rank, masks)
        remember_masks(masks, anew=self.spans_job or self.survives)
        cores = [mask.own for mask in masks]
        # A core that n ranks share counts as 1/n.
        parts = (1 / sum(core in other for other in cores) for core in cores[node.rank])
        self.cores_each = max(1, int(sum(parts) + _ROUNDING))
        if replicas_per_worker is None:
            return node
        worker = self._made(
            node, node.Split, node.rank // replicas_per_worker, node.rank
        )
        self._comms.remove(node)
        node.Free()
        return worker

    def _number_workers(self) -> None:
        """Number the workers in the order of their first replicas."""
        color = 0 if self.worker_comm.rank == 0 else self.mpi.UNDEFINED
        leaders = self._made(
            self.replica_comm, self.replica_comm.Split, color, self.replica_id
        )
        number = None
        if leaders != self.mpi.COMM_NULL:
            number = (leaders.rank, leaders.size)
        self.worker_id, self.num_workers = self.worker_comm.bcast(number, root=0)
        self._comms.remove(leaders)
        if number is not None:
            leaders.Free()

    def status(self, index: int) -> memoryview:
        """Return the shared memory of a rank's status; all ranks of the worker read it.

        Not collective. For the library's own modules.
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

    def duplicate(self) -> Any:
        """Return a duplicate of ``replica_comm`` that `revoke` revokes, too.

        Collective over ``replica_comm``. For the library's own modules.
        """
        return self._made(self.replica_comm, self.replica_comm.Dup)

    def revoke(self) -> None:
        """Revoke this topology's communicators; this wakes ranks that wait in a call.

        Not collective. Does nothing unless ``survives`` is True. For the library's own
        modules.
        """
        if self.survives and not self.closed:
            revoke(self._comms)

    def abandon(self) -> None:
        """Unmap the segment without freeing communicators, because ranks have died.

        Not collective. A second call does nothing. For the library's own modules.
        """
        if not self.closed:
            self.revoke()
            self.closed = True
            self.segment.release()

    def __repr__(self) -> str:
        return (
            f"Topology(replica {self.replica_id} of {self.num_replicas}, worker "
            f"{self.worker_id} of {self.num_workers})"
        )


def slot_bytes(worker_size: int, num_workers: int = 1) -> int:
    """Return the largest piece size in bytes: a power of two that fits the segment.

    A small /dev/shm reduces the size further. With several workers pieces are larger,
    because each rank sends only a small part of a piece to another rank.
    """
    most = _LARGEST_SLOT_BYTES if num_workers == 1 else _LARGEST_SENT_SLOT_BYTES
    share = _SEGMENT_BYTES // (SLOTS_IN_RING * worker_size)
    share = 1 << (max(mmap.PAGESIZE, share).bit_length() - 1)
    return min(most, share)


def _job_ranks(mpi: Any, comm: Any) -> list[int]:
    """Return the rank in the job of each rank of ``comm``.

    Ranks that are in no common job, because MPI has spawned them or connected two jobs,
    keep their numbers in ``comm``.
    """
    own, every = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    ranks = list(own.Translate_ranks(None, every))
    own.Free()
    every.Free()
    return list(range(comm.size)) if mpi.UNDEFINED in ranks else ranks
