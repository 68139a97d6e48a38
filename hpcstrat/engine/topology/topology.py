"""The ranks of a job as replicas, workers and hosts, and their communicators."""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hpcstrat.engine.topology.bindings import own_masks
from hpcstrat.engine.topology.segment import Segment
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
"""Bytes in which a rank tells its worker how it is doing, after all records."""

SLOTS_IN_RING = 4
"""How many pieces of the largest size a replica's part of the segment holds."""

# Many containers have a /dev/shm of 64 MiB: half of it.
_ROUNDING = 1e-6
_SEGMENT_BYTES = 32 << 20
_LARGEST_SLOT_BYTES = 256 << 10
_LARGEST_SENT_SLOT_BYTES = 2 << 20


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
    survives : bool
        Whether the loss of a rank is to be an error on the others, see
        `topology.survival`; ``comm`` is then revoked by a loss during construction.

    Attributes
    ----------
    mpi : module
        ``mpi4py.MPI``.
    survives : bool
        As given.
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
    num_cores : int
        Number of processor cores on which the worker's replicas may run.
    cores_each : int
        Number of cores for this replica, where all of the node share theirs evenly.

    Raises
    ------
    TopologyError
        If the ranks were launched as separate programs, or the loss of a rank cannot be
        survived.
    RankLostError
        If a rank is lost, and that is survived. On every rank that is left.
    ValueError
        If ``replicas_per_worker`` is not positive.
    """

    replica_comm: MPI.Intracomm
    worker_comm: MPI.Intracomm
    cross_worker_comm: MPI.Intracomm
    worker_id: int
    num_workers: int
    # Number of steps that this rank has made in exchanges of data: an exchange that
    # takes long, but moves, is not stuck.
    moves = 0
    # This rank's GPU; None where it computes on the CPU. The strategy sets this
    # attribute and the next three.
    gpu: Gpu | None = None
    # Whether another rank of this host has the same one.
    shares_gpu: bool = False
    mpi_reads_gpu: str = "auto"
    nccl: bool = True

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        replicas_per_worker: int | None = None,
        survives: bool = False,
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
            self._form(parent, replicas_per_worker)
        except (mpi.Exception, RankLostError, *GARBLED) as error:
            lost = survives and is_loss(mpi, error, parent)
            self.revoke()
            if not lost:
                raise
            raise RankLostError(
                "expected all ranks to form a topology, found that one was lost; form "
                "another of those that are left"
            ) from error

    def _form(self, parent: Any, replicas_per_worker: int | None) -> None:
        """Split the ranks, and lay out their shared memory."""
        mpi = self.mpi
        self.replica_comm = self._made(parent, parent.Dup)
        self.replica_id: int = self.replica_comm.rank
        self.num_replicas: int = self.replica_comm.size
        self.worker_comm = self._split_worker(replicas_per_worker)
        self._place_workers()
        self.worker_replicas: list[int] = self.worker_comm.allgather(self.replica_id)
        self.cross_worker_comm = self._made(
            self.replica_comm,
            self.replica_comm.Split,
            self.worker_comm.rank,
            self.worker_id,
        )
        sizes = (self.worker_comm.size, -self.worker_comm.size)
        smallest, largest = (
            abs(self.replica_comm.allreduce(size, op=mpi.MIN)) for size in sizes
        )
        self.smallest_worker: int = smallest
        # Memory shared by the worker's replicas.
        asked = SLOTS_IN_RING * slot_bytes(largest, self.num_workers)
        self.segment = Segment(
            self.worker_comm,
            (2 * RECORD_BYTES + STATUS_BYTES) * self.worker_comm.size,
            asked,
        )
        warn_of_memory(self.worker_comm, asked, self.segment.part_bytes)
        # Size of the largest piece that a replica lays out in its part of the segment,
        # a power of two. A worker whose memory file system is small decides for all.
        self.slot_bytes: int = self.replica_comm.allreduce(
            self.segment.part_bytes // SLOTS_IN_RING, op=mpi.MIN
        )
        # Ranks that are bound to cores see different ones.
        cores = self.worker_comm.allgather(os.sched_getaffinity(0))
        self.num_cores = len(set().union(*cores))

    def _made(self, parent: Any, make: Callable[..., Any], *args: Any) -> Any:
        """Make a communicator, which a loss of ranks revokes."""
        comm = create(self.mpi, parent, functools.partial(make, *args), self.survives)
        self._comms.append(comm)
        return comm

    @staticmethod
    def world() -> MPI.Intracomm:
        """Return the communicator of all ranks of the job.

        Collective over all ranks of the job when it initializes MPI.

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
            Of all ranks of the job; the same on each of them.

        Returns
        -------
        mpi4py.MPI.Intracomm
            To be freed by the caller.
        """
        world = Topology.world()
        group = world.Get_group()
        chosen = group.Incl(ranks)
        comm: MPI.Intracomm = world.Create_group(chosen)
        chosen.Free()
        group.Free()
        return comm

    def _split_worker(self, replicas_per_worker: int | None) -> Any:
        """Group by shared memory, never by the host's name."""
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
        cores = [mask.own for mask in masks]
        # A core that several ranks share counts by halves, thirds and so on.
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

    def _place_workers(self) -> None:
        """Number the workers by their first replicas."""
        color = 0 if self.worker_comm.rank == 0 else self.mpi.UNDEFINED
        leaders = self._made(
            self.replica_comm, self.replica_comm.Split, color, self.replica_id
        )
        place = None
        if leaders != self.mpi.COMM_NULL:
            place = (leaders.rank, leaders.size)
        self.worker_id, self.num_workers = self.worker_comm.bcast(place, root=0)
        self._comms.remove(leaders)
        if place is not None:
            leaders.Free()

    def status(self, index: int) -> memoryview:
        """Return the memory in which a rank tells its worker how it is doing.

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
        """Return a duplicate of ``replica_comm``, which `revoke` wakes, too.

        Collective over ``replica_comm``. For the library's own modules.
        """
        return self._made(self.replica_comm, self.replica_comm.Dup)

    def revoke(self) -> None:
        """Wake all ranks that wait in a communicator of this topology.

        Not collective. Does nothing unless the loss of ranks is survived. For the
        library's own modules.
        """
        if self.survives and not self.closed:
            revoke(self._comms)

    def abandon(self) -> None:
        """Let go of the segment, and leave the communicators: ranks have died.

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
    """Return the size of the largest piece: a power of two, in a limited segment.

    A small /dev/shm makes it smaller. Between several workers, what one rank sends to
    another is a small part of a piece.
    """
    most = _LARGEST_SLOT_BYTES if num_workers == 1 else _LARGEST_SENT_SLOT_BYTES
    share = _SEGMENT_BYTES // (SLOTS_IN_RING * worker_size)
    share = 1 << (max(mmap.PAGESIZE, share).bit_length() - 1)
    return min(most, share)
