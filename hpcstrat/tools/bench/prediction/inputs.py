"""The inputs of a prediction: figures of one small run, from files or options."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from hpcstrat.checkpoint.interval import best_seconds, mean_seconds_between_losses
from hpcstrat.tools.bench.prediction.dry_run import MemoryCopy, SimulatedJob, dry_run
from hpcstrat.tools.bench.prediction.effective_time import LossyRun, MeasuredTimes
from hpcstrat.tools.bench.prediction.forecast import ForecastPoint, ForecastStep
from hpcstrat.tools.bench.prediction.platforms import NETWORKS, Network
from hpcstrat.tools.bench.prediction.traces import MPI_OPTIONS, Machine
from hpcstrat.tools.bench.run_file import (
    FORMAT,
    BenchError,
    MeasuredRun,
    Part,
    read_run,
)
from hpcstrat.tools.bench.shapes import MODELS

__all__ = ["SURVIVE_FORMAT", "KnownFigures", "read_given"]

SURVIVE_FORMAT = {"format": "hpcstrat survive", "format_version": 1}
"""The beginning of a file of hpcstrat bench survive."""

# A message within a node reads and writes each of its bytes once.
_TOUCHED = 2


@dataclass(frozen=True, slots=True)
class KnownFigures:
    """The known figures of a small run; a value is None if it is unknown.

    Times are in seconds, bandwidths in bytes per second. ``shapes`` are the shapes of
    the gradients. ``memory`` is the memory bandwidth of one replica, counting both
    reads and writes. ``steps`` are measured on ``num_nodes`` nodes; ``saves`` and
    ``starts`` are those of `LossyRun`, and ``losses`` are per node and hour.
    """

    latency: float | None = None
    bandwidth: float | None = None
    inside_latency: float | None = None
    inside_bandwidth: float | None = None
    memory: float | None = None
    compute: float | None = None
    replicas_per_node: int | None = None
    cores_per_node: int | None = None
    slot_bytes: int | None = None
    mpi: str | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None
    steps: MeasuredTimes | None = None
    num_nodes: int | None = None
    saves: MeasuredTimes | None = None
    starts: MeasuredTimes | None = None
    steps_per_save: int | None = None
    losses: float | None = None

    def over(self, other: Self) -> Self:
        """Return a copy in which figures of ``other`` replace the unknown ones."""
        own = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) is not None
        }
        return replace(other, **own)

    def network(self, kind: str) -> Network:
        """Return a network of this kind; raise BenchError if a figure is missing."""
        if kind not in NETWORKS:
            raise BenchError(
                f"expected a network of {', '.join(NETWORKS)}, found {kind!r}; name "
                "the one that is closest to yours"
            )
        return Network(
            kind,
            self._known("latency", "--latency"),
            self._known("bandwidth", "--bandwidth"),
        )

    def job(self) -> SimulatedJob:
        """Return a job on one node, with the known numbers of replicas and cores."""
        return SimulatedJob(
            1,
            self.replicas_per_node or 1,
            self.cores_per_node or 0,
            self.slot_bytes or 0,
        )

    def step(self) -> ForecastStep:
        """Return the training step; raise BenchError if a figure is missing."""
        compute = self._known("compute", "--compute-ms")
        return ForecastStep(compute, self._known("shapes", "--gradients"))

    def machine(self) -> Machine:
        """Return the figures of a node; raise BenchError if one is missing."""
        latency, bandwidth = self.inside_latency, self.inside_bandwidth
        if self.replicas_per_node in (None, 1):
            # A node with one replica has no messages within the node to measure, so use
            # the figures of messages between nodes.
            latency = (
                self._known("latency", "--latency") if latency is None else latency
            )
            if bandwidth is None:
                bandwidth = self._known("bandwidth", "--bandwidth")
        if latency is None or bandwidth is None:
            name = "latency" if latency is None else "bandwidth"
            raise _missing(f"--inside-{name}")
        memory = self.memory or _TOUCHED * bandwidth
        mpi = self.mpi or "openmpi"
        if mpi not in MPI_OPTIONS:
            raise BenchError(
                f"expected an MPI library of {', '.join(MPI_OPTIONS)}, found "
                f"{mpi!r}; name the one that it is based on with --mpi"
            )
        return Machine(latency, bandwidth, memory, mpi)

    def with_losses(self, point: ForecastPoint, run_seconds: float) -> ForecastPoint:
        """Return a point with the spread of its steps, and with its effective time.

        Nodes are late independently of each other, as the measured ones were.
        """
        steps = self.steps or MeasuredTimes.of([point.step_seconds])
        late = steps.slowest_of(point.num_nodes / (self.num_nodes or 1))
        late = late.changed_by(point.step_seconds - steps.median)
        point = replace(
            point, mean_step_seconds=late.mean, step_deviation_seconds=late.deviation
        )
        if self.losses is None:
            return point
        rate = self.losses * point.num_nodes / 3600
        saves = self._known("saves", "--save")
        starts = self._known("starts", "--restart")
        loss = 1 / rate if rate else math.inf
        # Without losses, automatic intervals are those of rare ones.
        best = best_seconds(saves.mean, min(loss, mean_seconds_between_losses(0, 0.0)))
        count = self.steps_per_save or max(1, math.ceil(best / max(late.mean, 1e-9)))
        found = LossyRun(late, saves, starts, loss, count).effective_time(run_seconds)
        return replace(
            point,
            effective_time=found.mean,
            effective_time_deviation=found.deviation,
            losses=None if math.isinf(found.losses) else found.losses,
            steps_per_save=count,
        )

    def measured_point(self, num_nodes: int) -> ForecastPoint:
        """Return a point whose step is as measured, on a network without costs."""
        steps = self.steps
        seconds = steps.median if steps else self._known("compute", "--compute-ms")
        replicas = num_nodes * (self.replicas_per_node or 1)
        return ForecastPoint(num_nodes, replicas, seconds, seconds, 0.0, 0.0, 0.0, 0.0)

    def _known(self, name: str, option: str) -> Any:
        value = getattr(self, name)
        if value is None:
            raise _missing(option)
        return value


def _missing(option: str) -> BenchError:
    return BenchError(
        f"expected {option}, or a file that has it, found neither; give it, or a file "
        "of hpcstrat bench scaling, bench survive --json or doctor --measure --json"
    )


def read_given(path: str) -> KnownFigures:
    """Return the figures in a file; raise BenchError if its format is unknown.

    A file of hpcstrat doctor --measure --json has the links, and the hosts' memory
    bandwidth. A file of hpcstrat bench scaling has the links, the replicas, the step,
    and, in a run of one node, the bandwidth of copies in the step. A file of hpcstrat
    bench survive has the steps, the snapshots, and the starts after losses.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise BenchError(
            f"expected a file of measurements, found that {path} cannot be read: "
            f"{error.strerror}; check the path"
        ) from error
    except ValueError as error:
        raise BenchError(
            f"expected a file of measurements, found that {path} is not JSON: "
            f"{error}; measure again"
        ) from error
    try:
        if isinstance(content, dict) and content.get("format") == FORMAT:
            return _of_run(read_run(path))
        if isinstance(content, dict) and SURVIVE_FORMAT.items() <= content.items():
            return _of_survival(content)
        links = _find_links(content)
        if links is not None:
            return _of_doctor(*links)
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(
            f"expected the figures of hpcstrat doctor --measure --json, found in "
            f"{path} {type(error).__name__}: {error}; measure again"
        ) from error
    raise BenchError(
        "expected a file of hpcstrat bench scaling, hpcstrat bench survive --json, or "
        f"hpcstrat doctor --measure --json, found in {path} another JSON; give one of "
        "these"
    )


def _of_survival(content: dict[str, Any]) -> KnownFigures:
    steps, saves, starts = (
        MeasuredTimes.of(content[f"{name}_seconds"])
        for name in ("step", "save", "start")
    )
    return KnownFigures(
        compute=steps.median,
        replicas_per_node=int(content["replicas_per_node"]),
        steps=steps,
        num_nodes=int(content["num_nodes"]),
        saves=saves,
        starts=starts,
    )


def _find_links(content: Any) -> tuple[dict[str, Any], list[Any]] | None:
    """Return the links and hosts in the JSON of hpcstrat doctor, at any depth."""
    if not isinstance(content, dict):
        return None
    if isinstance(content.get("links"), dict):
        return content["links"], content.get("hosts") or []
    found = (_find_links(value) for value in content.values())
    return next((links for links in found if links is not None), None)


def _of_doctor(links: dict[str, Any], hosts: Sequence[Any]) -> KnownFigures:
    latency, bandwidth = _medians(links["between"])
    inside_latency, inside_bandwidth = _medians(links["inside"])
    ranks = [len(host["ranks"]) for host in hosts]
    # ``memory_together`` counts reads and writes of all replicas of a host.
    shares = [
        host["memory_together"] / len(host["ranks"])
        for host in hosts
        if host.get("memory_together")
    ]
    return KnownFigures(
        latency=latency,
        bandwidth=bandwidth,
        inside_latency=inside_latency,
        inside_bandwidth=inside_bandwidth,
        memory=statistics.median(shares) if shares else None,
        replicas_per_node=max(ranks) if ranks else None,
    )


def _medians(links: Sequence[dict[str, Any]]) -> tuple[float | None, float | None]:
    if not links:
        return None, None
    return (
        statistics.median(link["latency_seconds"] for link in links),
        statistics.median(link["bandwidth_bytes_per_second"] for link in links),
    )


def _of_run(run: MeasuredRun) -> KnownFigures:
    between, inside = (run.links.get(name) or {} for name in ("between", "inside"))
    each, slot_bytes = max(run.replicas_per_worker), run.reduction.get("slot_bytes")
    if run.reduction.get("wire_dtype") is not None:
        raise BenchError(
            "expected a run that sends full precision, found "
            f"wire_dtype={run.reduction['wire_dtype']!r} in {run.path}; measure without"
        )
    given = KnownFigures(
        latency=between.get("latency_seconds"),
        bandwidth=between.get("bytes_per_second"),
        inside_latency=inside.get("latency_seconds"),
        inside_bandwidth=inside.get("bytes_per_second"),
        replicas_per_node=each,
        cores_per_node=min(run.topology["cores_per_worker"]),
        slot_bytes=slot_bytes,
        mpi=_library(run),
    )
    saves = [part for part in run.parts if part.name == "save"]
    if saves:
        given = replace(given, saves=MeasuredTimes.of(saves[0].seconds))
    steps = [part for part in run.parts if part.name == "step" and part.own_seconds]
    steps.sort(key=lambda part: part.scaling != "weak")
    return replace(given, **_of_step(run, steps[0], given.job())) if steps else given


def _of_step(run: MeasuredRun, part: Part, job: SimulatedJob) -> dict[str, Any]:
    """Return a step's computation time, gradient shapes, and memory bandwidth."""
    calls = statistics.median(part.communication_seconds)
    own = statistics.median(part.own_seconds)
    late = statistics.median(part.late_seconds)
    model = part.parameters.get("model")
    shapes = MODELS[model]() if model in MODELS else [(part.reduced_bytes // 4,)]
    found: dict[str, Any] = {"compute": own - late - calls, "shapes": tuple(shapes)}
    found |= {"steps": MeasuredTimes.of(part.seconds), "num_nodes": run.num_workers}
    if run.num_workers == 1 and job.replicas_per_worker > 1 and calls > 0:
        events = dry_run(shapes, job)
        copied = sum(event.nbytes for event in events if isinstance(event, MemoryCopy))
        found["memory"] = copied / calls
    return found


def _library(run: MeasuredRun) -> str | None:
    version = str(run.sessions[-1]["versions"].get("mpi", "")) if run.sessions else ""
    names = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel(R) MPI": "mpich"}
    return next((name for word, name in names.items() if word in version), None)
