"""Measurements of all ranks together. All waits are bounded, and nothing is raised."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcstrat.engine.observe.clocks import measure_clock
from hpcstrat.engine.observe.timeline.alignment import Sample
from hpcstrat.engine.topology.bounded import finish
from hpcstrat.engine.topology.links import Links, measure_links
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.tools.doctor.local import (
    FolderFacts,
    Locked,
    MemoryProbe,
    look_at_folder,
    within,
)

__all__ = ["RankMeasures", "gather", "measure", "measure_alone", "share"]

LIMIT_SECONDS = 60.0
"""How long ranks wait for each other, in each part."""

_NAP_SECONDS = 0.002
_TOKEN_BYTES = 8
# A tag: others than those that the command gathers by.
_VERDICT = 33


@dataclass(slots=True)
class RankMeasures:
    """Measures of a rank.

    ``clocks`` are of this worker's first rank: its wall clock against replica 0's, at
    the beginning and at the end; ``folder`` likewise. Memory is in bytes per second, of
    this rank alone on its host, and of all at once. ``links`` are those of all, and
    told by rank 0. ``troubles`` are what could not be measured, and why.
    """

    init_seconds: float | None = None
    links: Links | None = None
    memory_alone: float | None = None
    memory_together: float | None = None
    folder: FolderFacts | None = None
    clocks: list[Sample] = field(default_factory=list)
    troubles: list[tuple[str, str]] = field(default_factory=list)

    def attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """Return an action's result, or None if it fails, which is recorded."""
        try:
            return action()
        except Exception as error:
            self.troubles.append((what, f"{error}" or type(error).__name__))
            return None


def measure(topology: Topology, folder: str, measures: RankMeasures) -> None:
    """Measure everything. Collective over ``topology.replica_comm``."""
    together = _BoundedWaits(topology)
    if not together.meet():
        measures.troubles.append(("ranks", "not all ranks have come"))
        return
    _note_clock(together, measures)
    links = measures.attempt("links", lambda: measure_links(topology))
    if topology.replica_id == 0:
        measures.links = links
    _measure_memory(together, measures)
    _look(together, folder, measures)
    _note_clock(together, measures)


def measure_alone(folder: str) -> RankMeasures:
    """Measure everything that needs no MPI."""
    measures = RankMeasures()
    measures.memory_alone = measures.attempt(
        "memory", lambda: MemoryProbe(1).bytes_per_second()
    )
    token = secrets.token_hex(_TOKEN_BYTES)
    measures.folder = look_at_folder(folder, token, 0, LIMIT_SECONDS)
    return measures


class _BoundedWaits:
    """Waits of all ranks for each other with a limit; after one timeout, no more waits.

    Collective over ``topology.replica_comm``.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        # A separate communicator: an endless barrier must not match later calls on the
        # other.
        self.comm, request = topology.replica_comm.Idup()
        self._came = self._await(request)

    def _await(self, request: Any) -> bool:
        # With naps: a wait that spins would use the core of those that measure.
        return finish([request], time.monotonic() + LIMIT_SECONDS, naps=True)

    def meet(self, comm: Any = None) -> bool:
        """Wait for all ranks of a communicator, by default all; False if one is
        missing.

        Collective over it.
        """
        if self._came:
            self._came = self._await((comm or self.comm).Ibarrier())
        return self._came

    def token(self) -> str:
        """Return a name that rank 0 chooses. Collective over all ranks."""
        # A copy: bytes cannot be written, and others receive into theirs.
        own = np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), np.uint8).copy()
        if self._came:
            self._came = self._await(self.comm.Ibcast(own))
        return own.tobytes().hex()


def _note_clock(together: _BoundedWaits, measures: RankMeasures) -> None:
    if not together.meet():
        return
    topology = together.topology

    def compare() -> Sample | None:
        return measure_clock(topology, together.comm, LIMIT_SECONDS, clock=time.time_ns)

    # The wall clocks: files and logs of hosts are compared by their times.
    sample = measures.attempt("clock", compare)
    if sample is not None:
        measures.clocks.append(sample)


def _measure_memory(together: _BoundedWaits, measures: RankMeasures) -> None:
    """Measure one rank of each host after the other, then all."""
    worker = together.topology.worker_comm
    memory = measures.attempt("memory", lambda: MemoryProbe(worker.size))

    # A rank that could get no memory still takes part in the barriers.
    def copy(busy: bool = False) -> float | None:
        return None if memory is None else memory.bytes_per_second(busy=busy)

    for turn in range(worker.size):
        if turn == worker.rank:
            measures.memory_alone = measures.attempt("memory", copy)
        together.meet(worker)
    together.meet()
    measures.memory_together = measures.attempt("memory", lambda: copy(busy=True))


def _look(together: _BoundedWaits, folder: str, measures: RankMeasures) -> None:
    """Examine the folder, on all hosts at the same time."""
    topology, token = together.topology, together.token()
    # Five such waits of one rank are less than the one wait of the others.
    held, limit = None, LIMIT_SECONDS / 6
    if topology.replica_id == 0:
        # The cause of a failure is found below.
        with contextlib.suppress(OSError):
            held = within(limit, lambda: Locked(folder, token))
    try:
        together.meet()
        if topology.worker_comm.rank == 0:
            rank = topology.replica_id
            measures.folder = look_at_folder(folder, token, rank, limit)
        together.meet()
    finally:
        # Removed only now, because the others check whether they see the lock.
        if held is not None:
            held.close()


def gather(comm: Any, answer: Any, limit_seconds: float, tag: int) -> list[Any]:
    """Return the answers of all ranks on rank 0; None for ranks without one in time.

    Collective over ``comm``. The others wait until their answer is on its way.
    """
    if comm.rank:
        request = comm.isend((comm.rank, answer), 0, tag)
        finish([request], time.monotonic() + limit_seconds, naps=True)
        return []
    answers: list[Any] = [answer, *[None] * (comm.size - 1)]
    deadline = time.monotonic() + limit_seconds
    num_missing = comm.size - 1
    while num_missing and time.monotonic() < deadline:
        # Not irecv, which has room for 32 KiB of pickle: this one knows the size.
        found = comm.improbe(tag=tag)
        if found is None:
            time.sleep(_NAP_SECONDS)
            continue
        rank, told = found.recv()
        answers[rank] = told
        num_missing -= 1
    return answers


def share(comm: Any, verdict: Any, limit_seconds: float) -> Any:
    """Return rank 0's verdict on all ranks; None if it does not arrive in time.

    Collective over ``comm``.
    """
    if comm.rank == 0:
        sent = [comm.isend(verdict, rank, _VERDICT) for rank in range(1, comm.size)]
        finish(sent, time.monotonic() + limit_seconds, naps=True)
        return verdict
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        found = comm.improbe(0, _VERDICT)
        if found is not None:
            return found.recv()
        time.sleep(_NAP_SECONDS)
    return None
