"""Reduction of device memory by NCCL: over all replicas, or over those of a worker."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from hpcstrat.arrays.packing import Piece, Run
from hpcstrat.channel.agreed_problem import agreed_problem
from hpcstrat.channel.awaited import Awaited, Awaits, EveryRankError
from hpcstrat.channel.channel import Channel
from hpcstrat.collectives.work import Work
from hpcstrat.gpu import kernels
from hpcstrat.gpu.device_memory import Buffers
from hpcstrat.gpu.streams import Lane
from hpcstrat.gpu.transports.device_reduction import (
    pack_run,
    segment,
    straight,
    unpack_run,
)
from hpcstrat.gpu.transports.nccl_group import NcclGroup
from hpcstrat.topology.topology import Topology

__all__ = ["NcclTransport", "NcclWorker"]

# More than there are types of arrays.
_MOST_RUNS = 32
_LINE_BYTES = 256


class NcclTransport:
    """The transport of all replicas by NCCL; without a topology, of one alone."""

    name = "nccl"

    def __init__(self, topology: Topology | None, lane: Lane) -> None:
        mpi: Any = None if topology is None else topology.mpi
        comm: Any = None if topology is None else topology.replica_comm
        self.lane = lane
        survives = topology is not None and topology.survives
        self.group = NcclGroup(mpi, comm, lane, survives=survives)
        self._buffers = Buffers()
        self._values: Any = None

    def prepare(self, nbytes: int) -> None:
        """Make what this rank needs for pieces of at most a size; may raise."""
        self._values = self._buffers.get("values", nbytes)

    def connect(self, work: Work, channel: Channel) -> Awaits:
        """Make NCCL's communicator, the first time.

        Collective over ``topology.replica_comm``. Raises EveryRankError on all ranks,
        if one of them cannot.
        """
        del work, channel
        return self.group.connect()

    def reduce(self, piece: Piece, work: Work, channel: Channel) -> Awaits:
        """Reduce one piece; waits for nobody, unless the loss of a rank is survived.

        Collective over ``topology.replica_comm``. Raises CollectiveError on this rank,
        if NCCL says so.
        """
        del channel
        pairs, packed = [], []
        for run in piece:
            # A single large array is summed where it lies: two copies less.
            pair = straight(run, work)
            if pair is None:
                part = pack_run(run, work, self._values, self.lane)
                packed.append((run, part))
                pair = part, part
            pairs.append(pair)
        self.group.all_reduce(pairs)
        for run, part in packed:
            unpack_run(run, work, part, self.lane)
        return self.group.ended()

    def close(self) -> None:
        """Free everything, when all calls have ended.

        Collective over ``topology.replica_comm``.
        """
        self.lane.synchronize()
        self.group.close()
        self._values = None
        self._buffers.clear()

    def abandon(self) -> None:
        """Give up what is in flight: others have died."""
        self.group.abandon()


class NcclWorker:
    """The halves of a reduction by NCCL over a worker, around what is beyond."""

    name = "nccl"

    def __init__(self, topology: Topology, lane: Lane) -> None:
        self.lane = lane
        self._topology = topology
        self._group = NcclGroup(
            topology.mpi, topology.worker_comm, lane, survives=topology.survives
        )
        self._connected = False
        self._buffers = Buffers()
        self._values: Any = None

    def prepare(self, nbytes: int) -> None:
        """Make what this rank needs for pieces of at most a size; may raise."""
        # Segments are rounded up to lines, in each run.
        most = nbytes + _MOST_RUNS * self._topology.smallest_worker * _LINE_BYTES
        self._values = self._buffers.get("values", most)

    def connect(self, work: Work, channel: Channel) -> Awaits:
        """Make NCCL's communicators of all workers, the first time.

        Collective over ``topology.replica_comm``. Raises EveryRankError on every rank,
        if one cannot.
        """
        del work, channel
        if self._connected:
            return
        topology, problem = self._topology, ""
        try:
            yield from self._group.connect()
        except EveryRankError as error:
            problem = str(error)
        # A worker's ranks agree among themselves; the other workers learn it here.
        found = yield from agreed_problem(topology.mpi, topology.replica_comm, problem)
        if found:
            self._group.abandon()
            raise EveryRankError(found)
        self._connected = True

    def scatter(
        self, piece: Piece, work: Work, channel: Channel
    ) -> Generator[Awaited, None, list[tuple[Run, Any]]]:
        """Sum this rank's segments of a piece over the worker.

        Collective over ``topology.worker_comm``; waits for nobody. Of each run, segment
        ``worker_comm.rank`` of ``topology.smallest_worker``; none where this rank is
        beyond the smallest worker's size, or the segment is empty. They are sums once
        the lane comes there.
        """
        del channel
        laid_out = self._laid_out(piece)
        for run, parts in laid_out:
            whole = self._whole(run, parts)
            kernels.pack(run.spans, work.sources, whole, self.lane.stream)
        self._group.reduce_scatter([parts for _, parts in laid_out])
        me, movers = self._group.rank, self._topology.smallest_worker
        own = []
        for run, parts in laid_out:
            low, high = segment(run, me, movers) if me < movers else (0, 0)
            if low < high:
                own.append((run, parts[me][: high - low]))
        # A generator, as the halves by CUDA IPC are, though nothing is awaited.
        yield from ()
        return own

    def gather(self, piece: Piece, work: Work, channel: Channel) -> Awaits:
        """Copy all segments of a piece into the results; comes after each `scatter`.

        Collective over ``topology.worker_comm``; waits for nobody, unless the loss of a
        rank is survived.
        """
        del channel
        laid_out = self._laid_out(piece)
        self._group.all_gather([parts for _, parts in laid_out])
        for run, parts in laid_out:
            unpack_run(run, work, self._whole(run, parts), self.lane)
        yield from self._group.ended()

    def _laid_out(self, piece: Piece) -> list[tuple[Run, list[Any]]]:
        """Return the memory of each run's segments, all of a run of one length.

        So NCCL can sum each on its rank in one call. What lies behind the last element
        of a run is summed, too, and not used.
        """
        movers, start = self._topology.smallest_worker, 0
        laid_out = []
        for run in piece:
            line = _LINE_BYTES // run.dtype.itemsize
            length = segment(run, 0, movers)[1]
            length += -length % line
            nbytes = length * run.dtype.itemsize
            parts = [
                self._values[low : low + nbytes].view(run.dtype)
                for low in range(start, start + movers * nbytes, nbytes)
            ]
            laid_out.append((run, parts))
            start += movers * nbytes
        return laid_out

    def _whole(self, run: Run, parts: list[Any]) -> Any:
        """Return a run's memory, from its parts that lie one behind the other."""
        start = parts[0].data.ptr - self._values.data.ptr
        end = start + run.size * run.dtype.itemsize
        return self._values[start:end].view(run.dtype)

    def close(self) -> None:
        """Free everything, when all calls have ended.

        Collective over ``topology.worker_comm``.
        """
        self.lane.synchronize()
        self._group.close()
        self._connected = False
        self._values = None
        self._buffers.clear()

    def abandon(self) -> None:
        """Give up what is in flight: others have died."""
        self._group.abandon()
