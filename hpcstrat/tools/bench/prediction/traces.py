"""Traces for SimGrid, which list the actions of each node, one action in a line.

The actions are those of ``smpirun -replay``
(https://simgrid.org/doc/latest/Tutorial_MPI_Applications.html). One simulated process
represents a node, because the replicas of a node do the same at the same time. A
simulated message has the bytes of all replicas together, and work within the node is
simulated as a sleep.

If hpcstrat calls MPI's nonblocking all-reduce, the trace has collectives of SMPI, with
the algorithm that the MPI library uses. Open MPI's `coll/libnbc` uses a binomial tree
for the sum and another tree for the result if the message has less than 64 KiB, or if
there are fewer than four ranks, or if the call is in place. In all other cases it uses
Rabenseifner's algorithm (https://doi.org/10.1007/978-3-540-24685-5_1). MPICH uses
Rabenseifner's algorithm from 2 KiB on.
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
# All tags are smaller than this number. `_Numbers` adds multiples of it to a tag.
_MOST_TAG = 100
# A sum reads two numbers and writes one number.
_TOUCHED = 3

# The exchange of headers is no MPI collective, but has the steps of these two.
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
"""Options with which SMPI executes the actions of `Writer` like each MPI library."""

# The events of one piece.
Block = tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured figures of a node: latency and bandwidths within the node."""

    # Latency and bandwidth of messages between two replicas of a node.
    inside_latency_seconds: float
    inside_bytes_per_second: float
    # Memory bandwidth of one replica, reads and writes, while all replicas of its node
    # use the memory.
    memory_bytes_per_second: float
    mpi: str = "openmpi"


def blocks(events: Iterable[Event]) -> list[Block]:
    """Divide the events of a replica into blocks, one for each piece."""
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
    """Return whether a block ends as many messages of each tag as it begins."""
    begun = Counter(event.tag for event in block if isinstance(event, Begun))
    ended = Counter(event.begun.tag for event in block if isinstance(event, Ended))
    return begun == ended


class _Numbers:
    """Unique numbers for started messages, by which SimGrid matches start and wait."""

    def __init__(self) -> None:
        self._begun, self._ended = Counter[int](), Counter[int]()

    def begin(self, tag: int) -> int:
        """Return a new number for a message that starts."""
        self._begun[tag] += 1
        return tag + _MOST_TAG * self._begun[tag]

    def end(self, tag: int) -> int:
        """Return the number of the oldest message with this tag that has not ended."""
        self._ended[tag] += 1
        return tag + _MOST_TAG * self._ended[tag]


class Writer:
    """Writes the trace lines of a node of a job."""

    def __init__(self, job: SimulatedJob, machine: Machine) -> None:
        self._job, self._machine = job, machine
        # Number of rounds of a binomial tree over the replicas of a node.
        self._inside_rounds = math.ceil(math.log2(job.replicas_per_worker))

    def lines(self, events: Iterable[Event], worker: int = 0) -> list[str]:
        """Return the trace lines of a worker's node, without the node's number."""
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
        """Return the seconds of work inside a node, which the trace has as sleeps."""
        words = (line.split() for line in self.lines(block))
        return sum(float(word[1]) for word in words if word[0] == "sleep")

    def sleep(self, seconds: float) -> list[str]:
        """Return a sleep as a list of trace lines; it is empty for 0 seconds."""
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
        """Return the trace lines of a header with ``nbytes`` values of each worker."""
        job, step = self._job, self._machine.inside_latency_seconds
        if job.num_workers == 1:
            return self.sleep(step)
        # Simulate only the values: the header's own few bytes take negligible time.
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
        """Return the trace lines of an all-reduce of MPI."""
        job, machine = self._job, self._machine
        nbytes, lines = event.nbytes, list[str]()
        tree = machine.mpi == "openmpi" and (
            event.num_ranks < _LIBNBC_TREE_RANKS
            or nbytes < _LIBNBC_TREE_BYTES
            or event.in_place
        )
        if event.num_ranks == job.num_workers:
            # Each position on the workers has its own all-reduce. They run at the same
            # time, so add up their bytes.
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
