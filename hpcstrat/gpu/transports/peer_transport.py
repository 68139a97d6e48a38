"""Reduction over the GPUs of one node, which read each other's memory (CUDA IPC).

Each rank has a window of device memory that the others have opened, in two halves, used
in turn: the pieces of all calls are numbered, and piece ``k`` lies in half ``k % 2``.
Of two ranks, and for small pieces, each adds all windows in the order of the ranks,
straight into its results. Of more, rank ``r`` sums segment ``r`` of all windows into
its own, and all copy the sums out of the windows in which they were made. Both ways add
in the order of the ranks, and so give the same bits on every rank.

No host waits for a device. What must run after the work of another rank waits for one
of its events, which the processes share:

- ``ready``: its values of the piece are in its window,
- ``summed``: the sums of its segment are.

A wait for an event means the last time it was recorded, and none if it has not been: a
rank that waits too early does not wait at all, and one that waits too late may wait for
a later piece. So that each wait means its own piece, the hosts go in step. Call
``R(k)`` the meeting of the hosts that follows the recording of ``ready`` for piece
``k``: the header of the call for its first piece, where all replicas are one worker,
else a step of the worker. Call ``T(k)`` the step that follows the recording of
``summed``. No host leaves a meeting before all have come to it, having recorded what
precedes it.

- ``ready`` of piece ``k`` is waited for between ``R(k)`` and ``R(k + 1)``. It has been
  recorded before ``R(k)``; the next time, for piece ``k + 2`` in the same half, comes
  after ``R(k + 1)``, to which the waiting host has yet to come.
- ``summed`` in the same way: recorded before ``T(k)``, waited for between that and
  ``R(k + 1)``, and recorded again after ``R(k + 1)``.

A half is written again, for piece ``k + 2``, when no rank reads it any more: work of a
lane runs in its order, and this rank's lane has waited, for piece ``k + 1``, until all
ranks were ready, which each of their lanes comes to after its last work on piece ``k``.
Sums are written into a window only for the rank's own segment, which no other rank
reads between ``ready`` and ``summed``.

That the number of a piece is the same on all ranks follows from the headers: a piece is
counted when the header of its call has been agreed on, in calls that all ranks make in
the same order. What was laid out for a call that failed in its header is overwritten.

Where events cannot be shared, each host waits for its own device before each meeting:
what was to be ready then is so, and ``R(k + 1)`` follows all work on piece ``k``.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from hpcstrat.arrays.packing import Piece, Run
from hpcstrat.channel.agreed_problem import agreed_problem
from hpcstrat.channel.awaited import Awaited, Awaits, EveryRankError, Message
from hpcstrat.channel.channel import Channel
from hpcstrat.collectives.work import Work
from hpcstrat.gpu import kernels
from hpcstrat.gpu.device_memory import rounded
from hpcstrat.gpu.ipc_windows import Windows
from hpcstrat.gpu.streams import Lane
from hpcstrat.gpu.transports.device_reduction import (
    pack_run,
    piece_bytes,
    run_part,
    segment,
)
from hpcstrat.topology.topology import Topology

__all__ = ["PeerTransport"]

# Up to here one meeting less is worth more than what is read twice.
_DIRECT_BYTES = 64 << 10


class PeerTransport:
    """Carries pieces between at most 32 GPUs of a worker that read each other's memory.

    ``events`` says that they can be shared between the processes; the same on all
    ranks.
    """

    name = "peer"

    def __init__(self, topology: Topology, lane: Lane, *, events: bool = True) -> None:
        self.lane = lane
        self._topology = topology
        self._comm = topology.worker_comm
        self._size, self._rank = self._comm.size, self._comm.rank
        if self._size > kernels.MOST_TERMS:
            raise ValueError(
                f"expected at most {kernels.MOST_TERMS} GPUs on a node, found "
                f"{self._size}; use another transport"
            )
        self._shares_events = events
        keys = [(name, half) for name in ("ready", "summed") for half in (0, 1)]
        self._windows = Windows(self._rank, self._size, keys if events else [])
        # Of one half, the same on all ranks; 0 while nothing is connected.
        self._half_bytes = 0
        self._needed_bytes = 0
        self._piece = 0
        self._early: Piece | None = None

    def prepare(self, nbytes: int) -> None:
        """Allocate a window, where there is none that is large enough; may raise."""
        self._early = None
        self._needed_bytes = rounded(nbytes)
        # All ranks have the same sizes, and come to the same answer without a message.
        if self._needed_bytes > self._half_bytes:
            self._windows.allocate(2 * self._needed_bytes)

    def start(self, piece: Piece, work: Work) -> None:
        """Lay out the first piece of a call before its header, which is ``R(k)`` then.

        Does nothing where that must wait.
        """
        # The header stands for R(k) only where it orders all replicas' memory: with
        # one worker.
        connected = self._needed_bytes <= self._half_bytes
        if connected and self._shares_events and self._topology.num_workers == 1:
            self._lay_out(piece, work)
            self._early = piece

    def connect(self, work: Work, channel: Channel) -> Awaits:
        """Open the windows and events of the worker's ranks.

        Collective over ``topology.replica_comm``. Does nothing while the windows are
        large enough, which they are on all ranks or none. Raises EveryRankError on all
        ranks, if one of them could not.
        """
        if self._needed_bytes <= self._half_bytes:
            return
        # All work ends first: to open and close waits for it, with Python's lock held.
        yield self.lane.done()
        if self._half_bytes:
            self._windows.close()
            yield channel.step(work.call)
            self._windows.free()
            self._half_bytes = 0
        record, problem = self._windows.described()
        records = np.empty((self._size, len(record)), np.uint8)
        # Also where this rank has a problem: the others are in it.
        yield Message(self._comm.Iallgather(record, records))
        if not problem:
            problem = self._windows.open(records)
        if problem:
            problem = f"on replica {self._topology.replica_id}: {problem}"
        comm = self._topology.replica_comm
        # Of all workers: none goes on where another one cannot.
        problem = yield from agreed_problem(self._topology.mpi, comm, problem)
        if problem:
            self._windows.close()
            yield channel.step(work.call)
            self._windows.free()
            raise EveryRankError(
                "expected GPUs of one node to open each other's memory, found "
                f"{problem}; choose another transport"
            )
        self._half_bytes = self._needed_bytes

    def reduce(self, piece: Piece, work: Work, channel: Channel) -> Awaits:
        """Reduce one piece, from the sources of the work to its results.

        Collective over ``topology.replica_comm``, which is one worker.
        """
        if self._size > 2 and piece_bytes(piece) > _DIRECT_BYTES:
            yield from self.scatter(piece, work, channel)
            yield from self.gather(piece, work, channel)
            return
        yield from self._meet_ready(piece, work, channel)
        for run in piece:
            pointers = [self._address(rank, run) for rank in range(self._size)]
            kernels.combine(
                pointers,
                run.spans,
                work.results,
                self.lane.stream,
                dtype=run.dtype,
                divisor=work.divisor,
            )
        self._piece += 1

    def scatter(
        self, piece: Piece, work: Work, channel: Channel
    ) -> Generator[Awaited, None, list[tuple[Run, Any]]]:
        """Sum this rank's segments of a piece over its worker.

        Collective over ``topology.worker_comm``. Of each run, segment
        ``worker_comm.rank`` of ``topology.smallest_worker``, in the run's type and in
        this rank's window; empty ones are left out. The sums are there when the lane
        comes to what it is given next. What sums them over the workers does so in
        place, on the lane or before `gather` is called.
        """
        yield from self._meet_ready(piece, work, channel)
        segments = []
        for run in piece:
            low, high = self._segment(run, self._rank)
            if low < high:
                shift = low * run.dtype.itemsize
                own = run_part(run, self._half())[low:high]
                terms = [self._address(r, run) + shift for r in range(self._size)]
                if self._size > 1:
                    kernels.sum_in_order(terms, own, self.lane.stream)
                segments.append((run, own))
        return segments

    def gather(self, piece: Piece, work: Work, channel: Channel) -> Awaits:
        """Copy all segments of a piece into the results; follows each `scatter`.

        Collective over ``topology.worker_comm``. The work's divisor is applied here.
        """
        movers = range(min(self._size, self._topology.smallest_worker))
        yield from self._meet("summed", work, channel, movers)
        for run in piece:
            segments = []
            for rank in movers:
                low, high = self._segment(run, rank)
                if low < high:
                    address = self._address(rank, run) + low * run.dtype.itemsize
                    segments.append((address, low, high))
            kernels.unpack(
                segments,
                run.spans,
                work.results,
                self.lane.stream,
                dtype=run.dtype,
                divisor=work.divisor,
            )
        self._piece += 1

    def close(self) -> None:
        """Free the windows, when all calls have ended; a second call does nothing.

        Collective over ``topology.worker_comm`` where they were opened.
        """
        if self._half_bytes:
            self.lane.synchronize()
            self._windows.close()
            # Memory is freed only after the last process has closed it.
            self._comm.Barrier()
        self._half_bytes = 0
        self._windows.free()

    def abandon(self) -> None:
        """Let go of the windows, without freeing what others may read."""
        self._half_bytes = 0
        self._windows.abandon()

    def _half(self) -> Any:
        """Return this rank's memory for the current piece."""
        start = self._piece % 2 * self._half_bytes
        return self._windows.memory[start : start + self._half_bytes]

    def _address(self, rank: int, run: Run) -> int:
        """Return where a rank's part of a run begins."""
        shift = self._piece % 2 * self._half_bytes + run.start * run.dtype.itemsize
        return self._windows.addresses[rank] + shift

    def _segment(self, run: Run, rank: int) -> tuple[int, int]:
        movers = self._topology.smallest_worker
        return segment(run, rank, movers) if rank < movers else (0, 0)

    def _lay_out(self, piece: Piece, work: Work) -> None:
        """Copy a piece into the window."""
        half = self._half()
        for run in piece:
            pack_run(run, work, half, self.lane)
        self._record("ready")

    def _meet_ready(self, piece: Piece, work: Work, channel: Channel) -> Awaits:
        """Come to ``R(k)``, and let the lane wait until all values are there."""
        early, self._early = self._early, None
        if early is piece:
            self._wait_for("ready", range(self._size))
            return
        self._lay_out(piece, work)
        yield from self._meet("ready", work, channel, range(self._size), records=False)

    def _meet(
        self,
        event: str,
        work: Work,
        channel: Channel,
        ranks: range,
        *,
        records: bool = True,
    ) -> Awaits:
        """Record an event, meet the worker's hosts, and wait for theirs on the lane."""
        if records:
            self._record(event)
        if not self._shares_events:
            yield self.lane.done()
        yield channel.step(work.call)
        self._wait_for(event, ranks)

    def _record(self, name: str) -> None:
        if self._shares_events:
            self._windows.record((name, self._piece % 2), self.lane.stream)

    def _wait_for(self, name: str, ranks: range) -> None:
        """Let the lane wait for an event of other ranks."""
        if self._shares_events:
            key = name, self._piece % 2
            for rank in ranks:
                self._windows.join(rank, key, self.lane.stream)
