"""Wakeup pipes let an idle rank sleep until another rank of its node wakes it.

A rank spins for a moment, and then sleeps in ``poll`` on a pipe. A rank that has sent
it something writes a byte into the pipe, if a flag in shared memory says that it
sleeps. Others open the pipe by ``/proc``, so that it needs no name and ends with the
process. With several nodes, or without a pipe, no rank is woken, and sleeps are short.
They are also short while messages are under way, as MPI moves them only while it is
called.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcstrat.engine.channel.waiting import Spin
from hpcstrat.engine.topology.segment import Segment
from hpcstrat.engine.topology.topology import Topology

_LINE_BYTES = 64
_LOOKS_BETWEEN_CLOCKS = 8
# Sleeps are short, as a wakeup may be lost between reading the flag and polling.
_SLEEP_MILLISECONDS = 20
_SHORT_SLEEP_MILLISECONDS = 1


class WakeupPipes:
    """Wakeup pipes of a node's ranks, and the counts of its servers.

    Collective over ``topology.worker_comm``, as is `close`. ``applied`` counts the
    updates that each server of the node has made for each rank, ``failed`` the errors;
    the first index is the place of the server in ``topology.worker_replicas``.
    """

    def __init__(self, topology: Topology) -> None:
        comm, world = topology.worker_comm, topology.num_replicas
        self._places = {rank: i for i, rank in enumerate(topology.worker_replicas)}
        self._own = comm.rank * _LINE_BYTES
        lines = comm.size * _LINE_BYTES
        table = comm.size * world * 8
        self._segment = Segment(comm, lines + 2 * table)
        buffer = self._segment.buffer
        self._asleep = buffer[:lines]
        counts = np.frombuffer(buffer, np.int64, 2 * table // 8, lines)
        self.applied, self.failed = counts.reshape(2, comm.size, world)
        self._read, self._write = _pipe()
        # Number of sleeping threads: a wakeup may reach the wrong one.
        self._num_asleep, self._lock = 0, threading.Lock()
        self._pipes = [
            _opened(pid, number)
            for pid, number in comm.allgather((os.getpid(), self._write))
        ]
        # All ranks have opened all pipes before any may end.
        comm.Barrier()
        self._shares_cores = comm.size > topology.num_cores
        self._alone = topology.num_workers == 1 and -1 not in self._pipes
        self._spin = Spin()

    def place(self, rank: int) -> int | None:
        """Return the place of a rank on this node; None for another node's rank."""
        return self._places.get(rank)

    def ring(self, rank: int) -> None:
        """Wake a rank, if it is of this node and sleeps."""
        place = self._places.get(rank)
        if place is not None and self._asleep[place * _LINE_BYTES]:
            # A full pipe wakes the rank, too; an ended rank needs no wakeup.
            with contextlib.suppress(OSError):
                os.write(self._pipes[place], b"!")

    def wait(
        self,
        ready: Callable[[], Any],
        *,
        busy: Callable[[], bool],
        look: Callable[[float], None],
    ) -> Any:
        """Return the first true result of ``ready``, which drives MPI's progress.

        ``busy`` says whether messages are under way; ``look`` gets the seconds waited,
        from time to time.
        """
        start = time.monotonic()
        while time.monotonic() < start + self._spin.seconds:
            for _ in range(_LOOKS_BETWEEN_CLOCKS):
                found = ready()
                if found:
                    return found
                if self._shares_cores:
                    os.sched_yield()
        try:
            return self._sleep(ready, busy, look, start)
        finally:
            self._spin.learn(time.monotonic() - start)

    def _sleep(
        self,
        ready: Callable[[], Any],
        busy: Callable[[], bool],
        look: Callable[[float], None],
        start: float,
    ) -> Any:
        # Each thread has its own: two threads cannot wait with one poll object.
        poll = select.poll()
        if self._read >= 0:
            poll.register(self._read, select.POLLIN)
        while True:
            self._count_asleep(1)
            try:
                # Twice, as a probe of Open MPI may only receive what the next one sees.
                found = ready() or ready()
                if found:
                    return found
                calm = self._alone and self._num_asleep == 1 and not busy()
                if poll.poll(
                    _SLEEP_MILLISECONDS if calm else _SHORT_SLEEP_MILLISECONDS
                ):
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._read, 4096)
            finally:
                self._count_asleep(-1)
            look(time.monotonic() - start)

    def _count_asleep(self, change: int) -> None:
        with self._lock:
            self._num_asleep += change
            self._asleep[self._own] = self._num_asleep > 0

    def close(self) -> None:
        """Free pipes and memory."""
        del self.applied, self.failed
        self._asleep.release()
        for number in (self._read, self._write, *self._pipes):
            if number >= 0:
                os.close(number)
        self._segment.close()


def _pipe() -> tuple[int, int]:
    """Return both ends of a pipe; -1 if the process has no descriptors left."""
    try:
        return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # All ranks learn of it, and poll instead of sleeping.
        return -1, -1


def _opened(pid: int, number: int) -> int:
    """Open the pipe of another process; -1 if that is not possible."""
    try:
        return os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return -1
