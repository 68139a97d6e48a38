"""The predicted time of a training step on increasing numbers of nodes.

A step computes, and then sums its gradients over all replicas in one call. SimGrid
simulates the nodes from traces that the module `traces` writes. To save time, only the
first of equal pieces is simulated, and then one more: the additional time is the time
of each further piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpcstrat.engine.algorithms.exchanged import MOST_EXCHANGING
from hpcstrat.engine.calls.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.options import CommunicationOptions
from hpcstrat.tools.bench.prediction.dry_run import Announced, SimulatedJob, dry_run
from hpcstrat.tools.bench.prediction.platforms import Network
from hpcstrat.tools.bench.prediction.simulator import Simulator
from hpcstrat.tools.bench.prediction.traces import (
    MPI_OPTIONS,
    Block,
    Machine,
    Writer,
    blocks,
    is_balanced,
)

__all__ = ["ForecastPoint", "ForecastStep", "predict", "predict_point"]

_FAST = 1e6


@dataclass(frozen=True, slots=True)
class ForecastStep:
    """The training step of a replica, and the options for summing its gradients."""

    compute_seconds: float
    # Shapes of the gradients, in float32.
    shapes: tuple[tuple[int, ...], ...]
    ops: CrossDeviceOps | None = None
    options: CommunicationOptions | None = None


@dataclass(frozen=True, slots=True)
class ForecastPoint:
    """The predicted step on a number of nodes; its parts add up to ``step_seconds``."""

    num_nodes: int
    num_replicas: int
    step_seconds: float
    compute_seconds: float
    # Time of sums and copies within a node, and of adding received data.
    inside_seconds: float
    # Time to exchange the header of the call.
    header_seconds: float
    # Time of the messages with gradients: their latency, and the transfer of the bytes.
    latency_seconds: float
    bandwidth_seconds: float
    # Efficiency relative to one node, with the same work per node.
    efficiency: float = 1.0
    network: str = ""
    # Real time and memory that the simulation needed.
    wall_seconds: float = 0.0
    most_bytes: int = 0
    # Steps with late nodes, and the effective time, if their figures are known.
    mean_step_seconds: float | None = None
    step_deviation_seconds: float | None = None
    effective_time: float | None = None
    effective_time_deviation: float | None = None
    losses: float | None = None
    steps_per_save: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a dict for the module json: the fields, by their names."""
        return asdict(self)


class _StepActions:
    """The events of all nodes of a job during a step, in blocks of one piece each."""

    def __init__(self, step: ForecastStep, job: SimulatedJob, machine: Machine) -> None:
        self.writer = Writer(job, machine)
        # Workers that exchange parts have different partners, so each needs a trace.
        differ = job.num_workers <= MOST_EXCHANGING
        self._nodes = [
            self._of_worker(step, job, worker)
            for worker in range(job.num_workers if differ else 1)
        ]
        self._copies = 1 if differ else job.num_workers
        # ``sequence`` has the blocks of all nodes, piece by piece. ``kinds`` has the
        # first piece of each kind, and the number of equal pieces. If a piece begins
        # messages that another piece ends, it is a kind of its own.
        self.sequence = list(zip(*self._nodes, strict=True))
        self.kinds = list[tuple[tuple[Block, ...], int]]()
        places = dict[tuple[Block, ...], int]()
        for kind in self.sequence:
            place = places.get(kind) if is_balanced(kind[0]) else None
            if place is None:
                places[kind] = len(self.kinds)
                self.kinds.append((kind, 1))
            else:
                self.kinds[place] = kind, self.kinds[place][1] + 1

    def _of_worker(
        self, step: ForecastStep, job: SimulatedJob, worker: int
    ) -> list[Block]:
        return blocks(
            dry_run(step.shapes, job, worker=worker, ops=step.ops, options=step.options)
        )

    def traces(
        self, kinds: Sequence[tuple[Block, ...]], begin: Sequence[str] = ()
    ) -> list[list[str]]:
        """Return the trace lines of all nodes for these blocks."""
        found = []
        for node in range(len(self._nodes)):
            events = [event for kind in kinds for event in kind[node]]
            found.append([*begin, *self.writer.lines(events, node)])
        return found * self._copies

    def inside_seconds(self) -> float:
        """Return the time of sums, copies and synchronizations within a node."""
        return sum(
            count * self.writer.inside_seconds(kind[0]) for kind, count in self.kinds
        )


def predict(
    step: ForecastStep,
    job: SimulatedJob,
    machine: Machine,
    network: Network,
    nodes: Sequence[int],
) -> Iterator[ForecastPoint]:
    """Predict a step for each number of nodes; efficiencies are relative to one node.

    ``job`` describes the replicas of a node; its ``num_workers`` is not used. Raises
    BenchError if SimGrid is missing or fails.
    """
    one = predict_point(step, replace(job, num_workers=1), machine, network)
    for num_nodes in nodes:
        point = one
        if num_nodes > 1:
            sized = replace(job, num_workers=num_nodes)
            point = predict_point(step, sized, machine, network)
        yield replace(point, efficiency=one.step_seconds / point.step_seconds)


def predict_point(
    step: ForecastStep,
    job: SimulatedJob,
    machine: Machine,
    network: Network,
    *,
    folds: bool = True,
) -> ForecastPoint:
    """Predict the time of a step of a job, and the parts of this time.

    If ``folds`` is false, every piece is simulated, even if pieces are equal.
    """
    plan = _StepActions(step, job, machine)
    replicas = job.num_workers * job.replicas_per_worker
    header_inside = plan.writer.inside_seconds([Announced()]) if replicas > 1 else 0.0
    inside = plan.inside_seconds() - header_inside
    if job.num_workers == 1:
        seconds = step.compute_seconds + inside + header_inside
        parts = (step.compute_seconds, inside, header_inside, 0.0, 0.0)
        return ForecastPoint(1, replicas, seconds, *parts)
    options = MPI_OPTIONS[machine.mpi]
    simulator = Simulator(network, job.num_workers, options)
    fast = replace(network, bytes_per_second=network.bytes_per_second * _FAST)
    # Also simulate nearly infinite bandwidth, to separate latency from bandwidth.
    without = Simulator(fast, job.num_workers, options)
    replays = _Replays(plan, step, folds=folds)
    total = replays.step_seconds(simulator)
    immediate = replays.step_seconds(without)
    header = replays.seconds(simulator, [plan.writer.announcement()] * job.num_workers)
    return ForecastPoint(
        job.num_workers,
        replicas,
        total,
        step.compute_seconds,
        inside,
        header,
        max(0.0, immediate - step.compute_seconds - inside - header),
        total - immediate,
        network=simulator.words,
        wall_seconds=replays.wall_seconds,
        most_bytes=replays.most_bytes,
    )


class _Replays:
    """Simulations of one plan, and the real time and memory that they need."""

    def __init__(self, plan: _StepActions, step: ForecastStep, *, folds: bool) -> None:
        self._plan, self._step, self._folds = plan, step, folds
        self.wall_seconds, self.most_bytes = 0.0, 0

    def seconds(self, simulator: Simulator, traces: Sequence[Sequence[str]]) -> float:
        """Simulate traces of all nodes, and return the simulated time."""
        done = simulator.replay(traces)
        self.wall_seconds += done.wall_seconds
        self.most_bytes = max(self.most_bytes, done.most_bytes)
        return done.seconds

    def step_seconds(self, simulator: Simulator) -> float:
        """Simulate a step of all nodes, and return the simulated time."""
        plan = self._plan
        begin = plan.writer.sleep(self._step.compute_seconds)
        kinds = [kind for kind, _ in plan.kinds]
        if not self._folds:
            return self.seconds(simulator, plan.traces(plan.sequence, begin))
        seconds = once = self.seconds(simulator, plan.traces(kinds, begin))
        for index, (kind, count) in enumerate(plan.kinds):
            if count > 1:
                # Insert the second copy of the piece beside the first, because the
                # messages of a piece may end only after the next piece has begun.
                again = [*kinds[:index], kind, *kinds[index:]]
                more = self.seconds(simulator, plan.traces(again, begin))
                seconds += (count - 1) * (more - once)
        return seconds
