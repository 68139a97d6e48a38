"""Time-independent traces for SimGrid: what each node does, line by line.

A line is an action of ``smpirun -replay``
(https://simgrid.org/doc/latest/Tutorial_MPI_Applications.html). One simulated process
represents a node, because its replicas do the same at the same time: a message contains
what all of them send together, and work within the node is a sleep.

Where the library calls MPI's nonblocking all-reduce, the trace has SMPI's collectives,
with the algorithm of the MPI library: Open MPI's `coll/libnbc` sums along a binomial
tree and sends the result down another one if the message has less than 64 KiB, if there
are fewer than four ranks, and if the call is in place; otherwise it uses Rabenseifner's
algorithm (https://doi.org/10.1007/978-3-540-24685-5_1), as does MPICH from 2 KiB on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcstrat.tools.bench.prediction.dry_run import (
    AllReduced,
    Announced,
    Begun,
    Ended,
    Event,
    MemoryCopy,
    SimulatedJob,
    Stepped,
    Turned,
)

__all__ = ["MPI_OPTIONS", "Block", "Machine", "Writer", "blocks", "is_balanced"]

_LIBNBC_TREE_BYTES = 65536
_LIBNBC_TREE_RANKS = 4
# Tags are smaller.
_MOST_TAG = 100
# A sum reads two numbers, and writes one.
_TOUCHED = 3

# A header is not an MPI collective, but takes the same steps.
_HEADER = {"smpi/barrier": "ompi_bruck", "smpi/allgather": "bruck"}

MPI_OPTIONS = {
    "openmpi": {
        "smpi/reduce": "binomial",
        "smpi/bcast": "binomial_tree",
        "smpi/allreduce": "rab_rdb",
        **_HEADER,
    },
    "mpich": {"smpi/coll-selector": "mpich", **_HEADER},
}
"""SMPI options that carry out the actions of `Writer` as MPI libraries do."""

# Events of one piece.
Block = tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """Measurements within a node."""

    # Latency of a message between two replicas, and bandwidth of a step of all.
    inside_latency_seconds: float
    inside_bytes_per_second: float
    # Bandwidth of one replica that reads and writes, while all replicas of its node do.
    memory_bytes_per_second: float
    mpi: str = "openmpi"


def blocks(events: Iterable[Event]) -> list[Block]:
    """Cut the actions of a replica where it begins the next piece."""
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


def is_balanced(block: Block) -> bool:
    """Whether equal numbers of messages of each tag end and begin in a block."""
    begun = Counter(event.tag for event in block if isinstance(event, Begun))
    ended = Counter(event.begun.tag for event in block if isinstance(event, Ended))
    return begun == ended


class _Numbers:
    """Numbers for messages under way: traces match by number, not by tag and order."""

    def __init__(self) -> None:
        self._begun, self._ended = Counter[int](), Counter[int]()

    def begin(self, tag: int) -> int:
        """Return the number of a started message."""
        self._begun[tag] += 1
        return tag + _MOST_TAG * self._begun[tag]

    def end(self, tag: int) -> int:
        """Return the number of the oldest message that has not ended."""
        self._ended[tag] += 1
        return tag + _MOST_TAG * self._ended[tag]


class Writer:
    """Writes the actions of a node of a job."""

    def __init__(self, job: SimulatedJob, machine: Machine) -> None:
        self._job, self._machine = job, machine
        # Number of doublings of a tree within a node.
        self._inside_rounds = math.ceil(math.log2(job.replicas_per_worker))

    def lines(self, events: Iterable[Event], worker: int = 0) -> list[str]:
        """Return the actions of a worker's node, without its number."""
        found, numbers = list[str](), _Numbers()
        for event in events:
            if isinstance(event, Begun):
                found += self._begin(event, numbers.begin(event.tag))
            elif isinstance(event, Ended):
                found += self._end(event.begun, numbers.end(event.begun.tag), worker)
            else:
                found += self._event_lines(event)
        return found

    def inside_seconds(self, block: Sequence[Event]) -> float:
        """Return how long the node sleeps in these actions."""
        words = (line.split() for line in self.lines(block))
        return sum(float(word[1]) for word in words if word[0] == "sleep")

    def sleep(self, seconds: float) -> list[str]:
        """Return the action of changing to another kind of work."""
        return [f"sleep {float(seconds)!r}"] if seconds else []

    def _event_lines(self, event: Event) -> list[str]:
        machine = self._machine
        if isinstance(event, Announced):
            return self.announcement(event.nbytes)
        if isinstance(event, Stepped):
            return self.sleep(machine.inside_latency_seconds)
        if isinstance(event, MemoryCopy):
            return self.sleep(event.nbytes / machine.memory_bytes_per_second)
        if isinstance(event, AllReduced):
            return self._all_reduce(event)
        return []

    def announcement(self, nbytes: int = 0) -> list[str]:
        """Return the actions of a header with that many bytes of each worker."""
        job, step = self._job, self._machine.inside_latency_seconds
        if job.num_workers == 1:
            return self.sleep(step)
        # The time of its own bytes is negligible.
        across = f"allgather {nbytes} {nbytes}" if nbytes else "barrier"
        return [*(self.sleep(2 * step) if job.replicas_per_worker > 1 else ()), across]

    def _begin(self, begun: Begun, tag: int) -> list[str]:
        each = self._job.replicas_per_worker
        lines = [f"irecv {peer} {tag} {size * each}" for peer, size in begun.received]
        return lines + [
            f"isend {peer} {tag} {size * each}" for peer, size in begun.sent
        ]

    def _end(self, begun: Begun, tag: int, worker: int) -> list[str]:
        lines = [f"wait {peer} {worker} {tag}" for peer, _ in begun.received]
        return lines + [f"wait {worker} {peer} {tag}" for peer, _ in begun.sent]

    def _all_reduce(self, event: AllReduced) -> list[str]:
        """Return the actions of MPI's all-reduce over all replicas, or those of
        positions.
        """
        job, machine = self._job, self._machine
        nbytes, lines = event.nbytes, list[str]()
        tree = machine.mpi == "openmpi" and (
            event.num_ranks < _LIBNBC_TREE_RANKS
            or nbytes < _LIBNBC_TREE_BYTES
            or event.in_place
        )
        if event.num_ranks == job.num_workers:
            # One replica of each position sends, all at the same time.
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
