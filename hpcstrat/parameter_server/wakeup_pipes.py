"""Wakeup pipes: an idle rank sleeps until another rank of its node wakes it.

A waiting rank first spins for a moment, and then sleeps in ``poll`` on its own pipe. A
rank that sends a message to the waiting rank writes a byte into this pipe, if a flag in
shared memory shows that the receiver sleeps. Other ranks open the pipe by ``/proc``, so
that the pipe needs no name and ends with its process. If there are several nodes, or if
a pipe is missing, sleeps are short, because senders on other nodes or without the pipe
cannot wake a rank. Sleeps are also short while messages are being sent or received,
because MPI makes progress only during its calls.
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
# Sleeps are short, because a wakeup is lost if the sender reads the flag just before
# the receiver sets it.
_SLEEP_MILLISECONDS = 20
_SHORT_SLEEP_MILLISECONDS = 1


class WakeupPipes:
    """The wakeup pipes of a node's ranks, and the counters of the node's servers.

    Collective over ``topology.worker_comm``, as is `close`. ``applied[i, rank]`` is the
    number of updates that a server of this node has made for a rank, and ``failed[i,
    rank]`` is the number of these updates that failed; ``i`` is the position of the
    server in ``topology.worker_replicas``.
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
        # Number of this rank's threads that sleep. If there are several, a wakeup may
        # reach the wrong thread.
        self._num_asleep, self._lock = 0, threading.Lock()
        self._pipes = [
            _opened(pid, number)
            for pid, number in comm.allgather((os.getpid(), self._write))
        ]
        # Wait, because the pipe of a process that has ended cannot be opened.
        comm.Barrier()
        self._shares_cores = topology.shares_cores
        self._alone = topology.num_workers == 1 and -1 not in self._pipes
        self._spin = Spin()

    def place(self, rank: int) -> int | None:
        """Return the position of a rank on this node; None for other nodes' ranks."""
        return self._places.get(rank)

    def ring(self, rank: int) -> None:
        """Wake a rank if it is on this node and sleeps."""
        place = self._places.get(rank)
        if place is not None and self._asleep[place * _LINE_BYTES]:
            # Ignore errors: the pipe is full, or the rank needs no wakeup any more.
            with contextlib.suppress(OSError):
                os.write(self._pipes[place], b"!")

    def wait(
        self,
        ready: Callable[[], Any],
        *,
        busy: Callable[[], bool],
        look: Callable[[float], None],
    ) -> Any:
        """Call ``ready`` until its result is true, and return this result.

        ``ready`` calls MPI, so that messages progress. ``busy`` returns whether
        messages are being sent or received. ``look`` is called after each sleep with
        the seconds waited.
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
        # Each wait makes its own poll object, because two threads cannot share one.
        poll = select.poll()
        if self._read >= 0:
            poll.register(self._read, select.POLLIN)
        while True:
            self._count_asleep(1)
            try:
                # Call ``ready`` twice: in Open MPI its first probe may only receive a
                # message, which the second probe then finds.
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
        """Close the pipes, and free the shared memory."""
        del self.applied, self.failed
        self._asleep.release()
        for number in (self._read, self._write, *self._pipes):
            if number >= 0:
                os.close(number)
        self._segment.close()


def _pipe() -> tuple[int, int]:
    """Return both ends of a pipe, or (-1, -1) if no file descriptor is free."""
    try:
        return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # All ranks receive the -1 by allgather, and then sleep only for a millisecond.
        return -1, -1


def _opened(pid: int, number: int) -> int:
    """Open another process's pipe, and return its file descriptor, or -1 on failure."""
    try:
        return os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return -1
