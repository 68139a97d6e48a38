"""The inputs of a prediction: figures of one small run, from files or options."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from hpcstrat.tools.bench.prediction.dry_run import MemoryCopy, SimulatedJob, dry_run
from hpcstrat.tools.bench.prediction.forecast import ForecastStep
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

__all__ = ["KnownFigures", "read_given"]

# A message within a node reads and writes each of its bytes once.
_TOUCHED = 2


@dataclass(frozen=True, slots=True)
class KnownFigures:
    """The known figures of a small run; a value is None if it is unknown.

    Times are in seconds, bandwidths in bytes per second. ``shapes`` are the shapes of
    the gradients. ``memory`` is the memory bandwidth of one replica, counting both
    reads and writes.
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

    def _known(self, name: str, option: str) -> Any:
        value = getattr(self, name)
        if value is None:
            raise _missing(option)
        return value


def _missing(option: str) -> BenchError:
    return BenchError(
        f"expected {option}, or a file that has it, found neither; give it, or a file "
        "of hpcstrat bench scaling or hpcstrat doctor --measure --json"
    )


def read_given(path: str) -> KnownFigures:
    """Return the figures in a file; raise BenchError if its format is unknown.

    A file of hpcstrat doctor --measure --json has the links, and the hosts' memory
    bandwidth. A file of hpcstrat bench scaling has the links, the replicas, the step,
    and, in a run of one node, the bandwidth of copies in the step.
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
        links = _find_links(content)
        if links is not None:
            return _of_doctor(*links)
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(
            f"expected the figures of hpcstrat doctor --measure --json, found in "
            f"{path} {type(error).__name__}: {error}; measure again"
        ) from error
    raise BenchError(
        "expected a file of hpcstrat bench scaling, or of hpcstrat doctor --measure "
        f"--json, found in {path} another JSON; give one of these"
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
    if run.num_workers == 1 and job.replicas_per_worker > 1 and calls > 0:
        events = dry_run(shapes, job)
        copied = sum(event.nbytes for event in events if isinstance(event, MemoryCopy))
        found["memory"] = copied / calls
    return found


def _library(run: MeasuredRun) -> str | None:
    version = str(run.sessions[-1]["versions"].get("mpi", "")) if run.sessions else ""
    names = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel(R) MPI": "mpich"}
    return next((name for word, name in names.items() if word in version), None)
