"""Time-independent traces for SimGrid: what each node does, line by line.

A line is an action of ``smpirun -replay``
(https://simgrid.org/doc/latest/Tutorial_MPI_Applications.html). One simulated process
stands for a node, as its replicas do the same at the same time: a message is what all
of them send together, and what a node does in itself is a sleep.

Where the library calls MPI's nonblocking all-reduce, the trace has SMPI's collectives,
by the algorithm that the MPI library takes: Open MPI's `coll/libnbc` adds up a binomial
tree and sends down another one where the message has less than 64 KiB, where there are
fewer than four ranks, and where it is in place; else it does as Rabenseifner
(https://doi.org/10.1007/978-3-540-24685-5_1), as does MPICH from 2 KiB on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcstrat.bench.prediction.rehearsal import (
    HEADER_BYTES,
    AllReduced,
    Announced,
    Copied,
    Event,
    Exchanged,
    Job,
    Stepped,
    Turned,
)

__all__ = ["MPI_OPTIONS", "Block", "Machine", "Writer", "blocks"]

_LIBNBC_TREE_BYTES = 65536
_LIBNBC_TREE_RANKS = 4
_TAG = 1
# A sum reads two numbers, and writes one.
_TOUCHED = 3

MPI_OPTIONS = {
    "openmpi": {
        "smpi/reduce": "binomial",
        "smpi/bcast": "binomial_tree",
        "smpi/allreduce": "rab_rdb",
    },
    "mpich": {"smpi/coll-selector": "mpich"},
}
"""Options of SMPI, which carry out what `Writer` writes as MPI libraries do."""

# What is done with one piece.
Block = tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured inside of a node."""

    # Of a message from one replica to another, and of a step of all.
    inside_latency_seconds: float
    inside_bytes_per_second: float
    # What one replica reads and writes, while all of its node do.
    memory_bytes_per_second: float
    mpi: str = "openmpi"


def blocks(events: Iterable[Event]) -> list[Block]:
    """Cut what a replica does where it takes the next piece."""
    found, current = list[Block](), list[Event]()
    for event in events:
        if isinstance(event, Turned):
            if current:
                found.append(tuple(current))
            current = []
        else:
            current.append(event)
    if current:
        found.append(tuple(current))
    return found


class Writer:
    """Writes down what a node of a job does."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self._job, self._machine = job, machine
        # How often a tree doubles inside of a node.
        self._inside_rounds = math.ceil(math.log2(job.replicas_per_worker))

    def lines(self, block: Sequence[Event]) -> list[str]:
        """Return the actions of a node, without its number."""
        return [line for event in block for line in self._event_lines(event)]

    def inside_seconds(self, block: Sequence[Event]) -> float:
        """Return how long the node sleeps in these actions."""
        words = (line.split() for line in self.lines(block))
        return sum(float(word[1]) for word in words if word[0] == "sleep")

    def sleep(self, seconds: float) -> list[str]:
        """Return the action of doing something else."""
        return [f"sleep {seconds!r}"] if seconds else []

    def _event_lines(self, event: Event) -> list[str]:
        machine = self._machine
        if isinstance(event, Announced):
            return self.announcement()
        if isinstance(event, Stepped):
            return self.sleep(machine.inside_latency_seconds)
        if isinstance(event, Copied):
            return self.sleep(event.nbytes / machine.memory_bytes_per_second)
        if isinstance(event, Exchanged):
            return self._exchange(event)
        if isinstance(event, AllReduced):
            return self._all_reduce(event)
        return []

    def announcement(self) -> list[str]:
        """Return the actions of a header."""
        job = self._job
        num_ranks = job.num_workers * job.replicas_per_worker
        if job.num_workers == 1:
            return self.sleep(self._machine.inside_latency_seconds)
        return self._all_reduce(AllReduced(HEADER_BYTES, num_ranks, in_place=False))

    def _exchange(self, event: Exchanged) -> list[str]:
        each = self._job.replicas_per_worker
        lines = [f"irecv {peer} {_TAG} {size * each}" for peer, size in event.received]
        lines += [f"isend {peer} {_TAG} {size * each}" for peer, size in event.sent]
        return [*lines, "waitall"]

    def _all_reduce(self, event: AllReduced) -> list[str]:
        """Return the actions of MPI's all-reduce of all replicas, or of positions."""
        job, machine = self._job, self._machine
        nbytes, lines = event.nbytes, list[str]()
        tree = machine.mpi == "openmpi" and (
            event.num_ranks < _LIBNBC_TREE_RANKS
            or nbytes < _LIBNBC_TREE_BYTES
            or event.in_place
        )
        if event.num_ranks == job.num_workers:
            # Of each position one, all at the same time.
            nbytes *= job.replicas_per_worker
        else:
            one = machine.inside_latency_seconds
            one += event.nbytes / machine.inside_bytes_per_second
            lines += self.sleep(2 * self._inside_rounds * one)
        if job.num_workers == 1:
            return lines
        rounds = math.ceil(math.log2(event.num_ranks)) if tree else 1
        added = rounds * _TOUCHED * event.nbytes
        lines += self.sleep(added / machine.memory_bytes_per_second)
        if tree:
            return [*lines, f"reduce {nbytes} 0 0", f"bcast {nbytes} 0"]
        return [*lines, f"allreduce {nbytes} 0"]
