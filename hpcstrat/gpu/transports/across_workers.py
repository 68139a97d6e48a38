"""Reduction of device memory over several workers: inside each, across, inside again.

Rank ``r`` of every worker has the sums of segment ``r`` of a piece over its worker from
what reaches the worker's GPUs (NCCL, or each other's memory), sums them over the ranks
with the same position in all workers, and all ranks of a worker copy the sums. Where
the workers differ in size, as many ranks of each have segments as the smallest one has.

Across, the segments go by messages with device memory, where MPI moves it; else by way
of the host, which alone can send half-precision numbers in their place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.arrays.packing import Piece, Run
from hpcstrat.channel.awaited import Awaits
from hpcstrat.channel.channel import Channel
from hpcstrat.channel.patient import PIECE_BYTES
from hpcstrat.collectives.hierarchical import sum_over_workers
from hpcstrat.collectives.work import Work
from hpcstrat.gpu.device_memory import Buffers
from hpcstrat.gpu.streams import Lane
from hpcstrat.gpu.transports.host_staging import STAGED_BYTES, HostCopies
from hpcstrat.gpu.transports.nccl_reduction import NcclWorker
from hpcstrat.gpu.transports.pairwise_sums import Limits, PairSum, Peers, abandon
from hpcstrat.gpu.transports.peer_memory import PeerTransport
from hpcstrat.topology.topology import Topology
from hpcstrat.typing import Array

__all__ = ["HierarchicalTransport", "HostAcross", "PairsAcross"]

_Segments = list[tuple[Run, Any]]


class PairsAcross:
    """Sums segments by messages with device memory.

    Parameters
    ----------
    topology : Topology
        Of several workers.
    lane : Lane
        On which the kernels run.
    limits : Limits, optional
        Which algorithm serves for which size; the same on all ranks.
    """

    def __init__(
        self, topology: Topology, lane: Lane, limits: Limits | None = None
    ) -> None:
        peers = Peers(topology.mpi, topology.cross_worker_comm)
        self._sum = PairSum(peers, lane, limits)
        self._buffers = Buffers()
        self._scratch: Any = None

    def prepare(self, nbytes: int) -> None:
        """Make what this rank needs.

        Not collective; may raise.

        Parameters
        ----------
        nbytes : int
            Most bytes of a segment.
        """
        self._scratch = self._buffers.get("scratch", self._sum.scratch_bytes(nbytes))

    def steps(self, segments: _Segments, work: Work, channel: Channel) -> Awaits:
        """Sum segments over the workers, in place.

        Collective over ``topology.cross_worker_comm``.

        Parameters
        ----------
        segments : list of (Run, cupy.ndarray of shape (n,))
            This rank's, in memory that MPI may be given.
        work : Work
            Not used.
        channel : Channel
            Not used.

        Yields
        ------
        Done or Message
            See `hpcstrat.collectives.work`.
        """
        del work, channel
        for _, segment in segments:
            yield from self._sum.steps(segment, self._scratch)

    def close(self) -> None:
        """Free everything, when all calls have ended.

        Not collective.
        """
        self._buffers.clear()

    def abandon(self) -> None:
        """Let go of everything on this rank: others have died.

        Not collective.
        """
        abandon(self._buffers)


class HostAcross:
    """Sums segments by way of the host.

    Parameters
    ----------
    lane : Lane
        On which the copies run.
    wire_dtype : dtype, optional
        In which float32 and float64 travel, see `reduce_hierarchically`.
    part_bytes : int
        Most bytes that are summed at once.
    """

    def __init__(
        self,
        lane: Lane,
        wire_dtype: np.dtype[Any] | None = None,
        part_bytes: int = STAGED_BYTES,
    ) -> None:
        self._wire_dtype = wire_dtype
        self._copies = HostCopies(lane, part_bytes)

    def prepare(self, nbytes: int) -> None:
        """Make what this rank needs.

        Not collective; may raise.

        Parameters
        ----------
        nbytes : int
            Most bytes of a segment.
        """
        self._copies.prepare(nbytes)

    def steps(self, segments: _Segments, work: Work, channel: Channel) -> Awaits:
        """Sum segments over the workers, in place.

        Collective over ``topology.cross_worker_comm``.

        Parameters
        ----------
        segments : list of (Run, cupy.ndarray of shape (n,))
            This rank's.
        work : Work
            To which the runs belong.
        channel : Channel
            Of the replicas.

        Returns
        -------
        iterator
            See `hpcstrat.collectives.work`.
        """
        return self._copies.steps(segments, work, channel, self._sums)

    def _sums(self, run: Run, host: Array, work: Work, channel: Channel) -> Awaits:
        length = PIECE_BYTES // host.itemsize
        parts = [
            (run, host[start : start + length]) for start in range(0, host.size, length)
        ]
        return sum_over_workers(work, channel, self._wire_dtype, parts)

    def close(self) -> None:
        """Free everything, when all calls have ended.

        Not collective.
        """
        self._copies.close()

    def abandon(self) -> None:
        """Let go of everything on this rank: others have died.

        Not collective.
        """
        self._copies.abandon()


class HierarchicalTransport:
    """The transport of several workers.

    Parameters
    ----------
    topology : Topology
        Whose replicas.
    inside : NcclWorker or PeerTransport
        What reaches the GPUs of a worker, with the methods ``scatter`` and ``gather``.
    across : PairsAcross or HostAcross
        What sums over the workers, on the lane of ``inside``.

    Attributes
    ----------
    name : str
        "hierarchical".
    lane : Lane
        That of ``inside``.
    """

    name = "hierarchical"

    def __init__(
        self,
        topology: Topology,
        inside: NcclWorker | PeerTransport,
        across: PairsAcross | HostAcross,
    ) -> None:
        self.lane: Lane = inside.lane
        self._inside = inside
        self._across = across
        self._movers = topology.smallest_worker

    def prepare(self, nbytes: int) -> None:
        """Make what this rank needs for pieces of a size.

        Not collective; may raise.

        Parameters
        ----------
        nbytes : int
            Most bytes of a piece; the same on every rank.
        """
        self._inside.prepare(nbytes)
        # Segments begin at multiples of 256 bytes.
        self._across.prepare(-(-nbytes // self._movers) + 256)

    def start(self, piece: Piece, work: Work) -> None:
        """Do what can be done for the first piece before the header.

        Not collective; may raise.

        Parameters
        ----------
        piece : Piece
            The first one.
        work : Work
            What to reduce.
        """
        early = getattr(self._inside, "start", None)
        if early is not None:
            early(piece, work)

    def connect(self, work: Work, channel: Channel) -> Awaits:
        """Reach the other ranks of the worker, where that has not been done.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        work : Work
            What is to be reduced.
        channel : Channel
            Of the replicas.

        Returns
        -------
        iterator
            See `hpcstrat.collectives.work`. Raises EveryRankError on all ranks, if one
            of them could not.
        """
        return self._inside.connect(work, channel)

    def reduce(self, piece: Piece, work: Work, channel: Channel) -> Awaits:
        """Reduce one piece.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        piece : Piece
            Which elements.
        work : Work
            What to reduce.
        channel : Channel
            Of the replicas.

        Yields
        ------
        object
            See `hpcstrat.collectives.work`.
        """
        segments = yield from self._inside.scatter(piece, work, channel)
        yield from self._across.steps(segments, work, channel)
        yield from self._inside.gather(piece, work, channel)

    def close(self) -> None:
        """Free everything, when all calls have ended.

        Collective over ``topology.replica_comm``.
        """
        self._across.close()
        self._inside.close()

    def abandon(self) -> None:
        """Let go of everything on this rank: others have died.

        Not collective.
        """
        self._across.abandon()
        self._inside.abandon()
