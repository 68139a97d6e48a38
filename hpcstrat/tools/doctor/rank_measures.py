"""Measurements by all ranks together, with a time limit for each wait."""

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
"""Time for which ranks wait for each other in each part of the measurements."""

_NAP_SECONDS = 0.002
_TOKEN_BYTES = 8
# The MPI tag of `share`; the command gathers with other tags.
_VERDICT = 33


@dataclass(slots=True)
class RankMeasures:
    """The measurements of a rank.

    Only the first rank of a worker has ``clocks`` and ``folder``. ``clocks`` compares
    the wall clocks of this rank and replica 0, at the beginning and at the end.
    ``memory_alone`` is the bandwidth in bytes per second while only this rank of its
    host copies, and ``memory_together`` while all ranks copy. Only rank 0 has
    ``links``, for all ranks. An entry of ``troubles`` has the name of a measurement
    that failed, and the reason.
    """

    init_seconds: float | None = None
    links: Links | None = None
    memory_alone: float | None = None
    memory_together: float | None = None
    folder: FolderFacts | None = None
    clocks: list[Sample] = field(default_factory=list)
    troubles: list[tuple[str, str]] = field(default_factory=list)

    def attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """Return the result of an action; after an error, record the error instead."""
        try:
            return action()
        except Exception as error:
            self.troubles.append((what, f"{error}" or type(error).__name__))
            return None


def measure(topology: Topology, folder: str, measures: RankMeasures) -> None:
    """Measure links, memory, folder and clocks.

    Collective over ``topology.replica_comm``.
    """
    together = _BoundedWaits(topology)
    if not together.meet():
        measures.troubles.append(("ranks", "not all ranks have arrived"))
        return
    _note_clock(together, measures)
    links = measures.attempt("links", lambda: measure_links(topology))
    if topology.replica_id == 0:
        measures.links = links
    _measure_memory(together, measures)
    _look(together, folder, measures)
    _note_clock(together, measures)


def measure_alone(folder: str) -> RankMeasures:
    """Measure memory and folder, which needs no MPI."""
    measures = RankMeasures()
    measures.memory_alone = measures.attempt(
        "memory", lambda: MemoryProbe(1).bytes_per_second()
    )
    token = secrets.token_hex(_TOKEN_BYTES)
    measures.folder = look_at_folder(folder, token, 0, LIMIT_SECONDS)
    return measures


class _BoundedWaits:
    """Barriers and broadcasts with a time limit; after a timeout, they do nothing.

    Collective over ``topology.replica_comm``.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        # Use a separate communicator, because a barrier that never ends must not match
        # later calls on ``replica_comm``.
        self.comm, request = topology.replica_comm.Idup()
        self._came = self._await(request)

    def _await(self, request: Any) -> bool:
        # Sleep between checks: a wait that spins would take cores from other ranks.
        return finish([request], time.monotonic() + LIMIT_SECONDS, naps=True)

    def meet(self, comm: Any = None) -> bool:
        """Wait for all ranks of a communicator; return False if one is not in time.

        Collective over ``comm``; by default over all ranks.
        """
        if self._came:
            self._came = self._await((comm or self.comm).Ibarrier())
        return self._came

    def token(self) -> str:
        """Return a random name that rank 0 chooses. Collective over all ranks."""
        # Make a writable copy of the bytes, because other ranks receive into the array.
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

    # Compare wall clocks, because users compare times in files and logs of hosts.
    sample = measures.attempt("clock", compare)
    if sample is not None:
        measures.clocks.append(sample)


def _measure_memory(together: _BoundedWaits, measures: RankMeasures) -> None:
    """Measure memory on each host: one rank after the other, then all ranks."""
    worker = together.topology.worker_comm
    memory = measures.attempt("memory", lambda: MemoryProbe(worker.size))

    # A rank that could not allocate memory must still take part in the barriers.
    def copy(busy: bool = False) -> float | None:
        return None if memory is None else memory.bytes_per_second(busy=busy)

    for turn in range(worker.size):
        if turn == worker.rank:
            measures.memory_alone = measures.attempt("memory", copy)
        together.meet(worker)
    together.meet()
    measures.memory_together = measures.attempt("memory", lambda: copy(busy=True))


def _look(together: _BoundedWaits, folder: str, measures: RankMeasures) -> None:
    """Examine the folder on all hosts at the same time."""
    topology, token = together.topology, together.token()
    # A rank waits up to five times here, one after the other. Together this must be
    # less than the limit, because the other ranks do not wait longer for this rank.
    held, limit = None, LIMIT_SECONDS / 6
    if topology.replica_id == 0:
        # Ignore an error: `look_at_folder` finds its cause below.
        with contextlib.suppress(OSError):
            held = within(limit, lambda: Locked(folder, token))
    try:
        together.meet()
        if topology.worker_comm.rank == 0:
            rank = topology.replica_id
            measures.folder = look_at_folder(folder, token, rank, limit)
        together.meet()
    finally:
        # Remove the file only now, after all hosts have checked its lock.
        if held is not None:
            held.close()


def gather(comm: Any, answer: Any, limit_seconds: float, tag: int) -> list[Any]:
    """Return the answers of all ranks on rank 0, with None for ranks that are too late.

    Collective over ``comm``. Other ranks wait until their answer is sent, and return an
    empty list.
    """
    if comm.rank:
        request = comm.isend((comm.rank, answer), 0, tag)
        finish([request], time.monotonic() + limit_seconds, naps=True)
        return []
    answers: list[Any] = [answer, *[None] * (comm.size - 1)]
    deadline = time.monotonic() + limit_seconds
    num_missing = comm.size - 1
    while num_missing and time.monotonic() < deadline:
        # Use improbe: irecv cannot receive more than 32 KiB of pickle.
        found = comm.improbe(tag=tag)
        if found is None:
            time.sleep(_NAP_SECONDS)
            continue
        rank, told = found.recv()
        answers[rank] = told
        num_missing -= 1
    return answers


def share(comm: Any, verdict: Any, limit_seconds: float) -> Any:
    """Return rank 0's verdict on all ranks, or None if it does not arrive in time.

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
