"""The measurement of one run, which measures the parts that the run's file lacks."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat._version import __version__
from hpcstrat.engine.calls.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.options import CommunicationImplementation, CommunicationOptions
from hpcstrat.engine.topology.links import Link, Links, find_outliers, measure_links
from hpcstrat.metrics.energy import EnergyMeter
from hpcstrat.strategies.base import Strategy
from hpcstrat.tools.bench.benchmark_parts import Options, Planned, planned
from hpcstrat.tools.bench.run_file import (
    BenchError,
    MeasuredRun,
    Part,
    read_run,
    write_run,
)
from hpcstrat.tools.bench.training import load_function, write_rows

__all__ = ["ScalingRequest", "run_scaling"]

# Suffixes of environment variables that Open MPI's launcher sets, not the user.
_OF_LAUNCHER = ("PREFIXES", "cpu_type", "initial_wdir", "num_procs")
# The maximum number of stored links: the number of pairs of 64 nodes.
_MOST_LINKS = 2016
_SUMMED = ("all_reduce", "gradients", "step")
_ENVIRONMENT = ("HPCSTRAT_", "OMP_", "OMPI_MCA_", "UCX_", "MPICH_", "FI_", "NCCL_")


@dataclass(frozen=True, slots=True)
class ScalingRequest:
    """The parts to measure, and the file for the results.

    ``output`` is the path of the file; in it, ``{n}`` is replaced by the number of
    replicas. ``tell`` prints a line; only one rank calls it.
    """

    options: Options
    output: str
    command: str
    tell: Callable[[str], None]


def run_scaling(strategy: Strategy, wish: ScalingRequest) -> str:
    """Measure the parts that are missing in the file, and return its path.

    Collective over all ranks of the strategy. Raises BenchError on every rank if the
    file is from a different run, or cannot be written. If the user's step fails on a
    rank, this rank raises the error of the step, and the other ranks raise
    ReplicaError; if replicas have several ranks, this rank alone raises. Measurements
    that are already in the file are kept.
    """
    # Do not use str.format, because a path may have other braces.
    path = wish.output.replace("{n}", str(strategy.num_replicas_in_sync))
    run = _on_first(strategy, functools.partial(_open, path, _topology(strategy)))
    plan = planned(wish.options)
    # Measure save and restore together, because they use one checkpoint.
    missing = [p for p in plan if any(run.part(part.key) is None for part in p.parts)]
    if wish.options.step:
        # Load the function now, so that an error does not occur only after minutes.
        with _section(strategy, "--step"):
            load_function(wish.options.step)
    if strategy.writes:
        done = len(plan) - len(missing)
        wish.tell(f"{path}: {done} of {len(plan)} parts are measured already")
    if not missing:
        return path
    # Add this launch to the sessions; each measured part has the session's index.
    run.sessions.append(_session(strategy, wish.command))
    _prepare(strategy, run, wish.options, path)
    meter = EnergyMeter(strategy)
    for number, item in enumerate(missing, 1):
        begun = f"[{number}/{len(missing)}] {item.title}"
        with _section(strategy, begun):
            item.measure(strategy)
        for part in item.parts:
            _describe_reduction(part, strategy)
            part.session = len(run.sessions) - 1
        known = {part.key for part in item.parts}
        run.parts = [part for part in run.parts if part.key not in known]
        run.parts.extend(item.parts)
        run.sessions[-1]["energy"] = meter.result()
        _on_first(strategy, functools.partial(_write, run, path))
        if strategy.writes:
            wish.tell(f"{begun}: {_times(item)}")
    if strategy.writes:
        wish.tell(run.sessions[-1]["energy"]["text"])
    return path


def _section(strategy: Strategy, what: str) -> contextlib.AbstractContextManager[None]:
    """Return a section, whose errors all ranks raise.

    With replicas of several ranks, an error on one rank ends the job instead: the other
    ranks may wait for this rank in calls inside of the replica.
    """
    if strategy.inside.size > 1:
        return contextlib.nullcontext()
    section: contextlib.AbstractContextManager[None]
    section = strategy.collectives.section(what)
    return section


def _prepare(strategy: Strategy, run: MeasuredRun, options: Options, path: str) -> None:
    """Measure the links, and write the file of rows that the parts read."""
    # If a file is continued, its links are valid: `_open` requires the same ranks.
    if not run.links:
        with _section(strategy, "links"):
            run.links = _links(measure_links(strategy.topology))
    run.reduction = _reduction(strategy)

    def action() -> None:
        _write(run, path)
        os.makedirs(options.folder, exist_ok=True)
        write_rows(options.folder, options.row_bytes)

    _on_first(strategy, action)


def _on_first(strategy: Strategy, action: Callable[[], Any]) -> Any:
    """Call a function on one rank; return its result, or raise, on all ranks."""
    outcome: Any = None
    if strategy.writes:
        try:
            outcome = "", action()
        except BenchError as error:
            outcome = str(error), None
        except OSError as error:
            outcome = _unwritten(error), None
    text, result = strategy.collectives.broadcast_object(outcome, 0, "bench")
    if text:
        raise BenchError(text)
    return result


def _unwritten(error: OSError) -> str:
    # NumPy's error for an incomplete write has a text, but no `strerror`.
    words = error.strerror or str(error)
    return (
        f"expected to write {error.filename or 'the results'}, found "
        f"{type(error).__name__}: {words}; free disk space, or choose another "
        "--output and --folder: earlier measurements are kept"
    )


def _open(path: str, topology: dict[str, Any]) -> MeasuredRun:
    """Return the run in a file, or write a new file for a new run."""
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        run = MeasuredRun(topology=topology)
        # Write the file now, so that an error does not occur only after minutes.
        write_run(run, path)
        return run
    run = read_run(path)
    # Do not compare names of hosts: the report has a note if they differ.
    for name, value in topology.items():
        if run.topology[name] != value:
            raise BenchError(
                f"expected the same ranks as in {path}, to continue that run, found "
                f"{name} {value} instead of {run.topology[name]}; choose another "
                "--output, or remove the file"
            )
    return run


def _write(run: MeasuredRun, path: str) -> None:
    write_run(run, path)


def _topology(strategy: Strategy) -> dict[str, Any]:
    """Return the entry ``topology`` of the file; collective over the replicas."""
    topology = strategy.topology
    own = topology.worker_comm.size, strategy.all_ranks.topology.num_cores
    pairs = _of_workers(strategy, own)
    return {
        "num_replicas": topology.num_replicas,
        "replicas_per_worker": [size for size, _ in pairs],
        "cores_per_worker": [cores for _, cores in pairs],
        "worker_of_replica": strategy.collectives.all_gather_object(
            topology.worker_id, "bench"
        ),
        "ranks_per_replica": strategy.inside.size,
        "device": strategy.device.partition(":")[0],
    }


def _of_workers(strategy: Strategy, value: Any) -> list[Any]:
    """Return the ``value`` of each worker's first replica; collective over replicas."""
    topology = strategy.topology
    own = (topology.worker_id, value) if topology.worker_comm.rank == 0 else None
    # The ranks of a worker have the same value, so gather it from one rank of each.
    told = strategy.collectives.all_gather_object(own, "bench")
    return [pair[1] for pair in sorted(filter(None, told), key=lambda pair: pair[0])]


def _session(strategy: Strategy, command: str) -> dict[str, Any]:
    """Return an entry of ``sessions`` in the file; collective over the replicas."""
    names = ("mpi4py", "numpy", "h5py")
    library = strategy.topology.mpi.Get_library_version().split("\n")[0]
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "hosts": _of_workers(strategy, platform.node()),
        "versions": {
            "hpcstrat": __version__,
            "python": platform.python_version(),
            "mpi": library.strip("\x00 "),
            **{name: importlib.metadata.version(name) for name in names},
            "system": f"{platform.system()} {platform.release()}",
            "processor": _processor(),
        },
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_ENVIRONMENT) and not name.endswith(_OF_LAUNCHER)
        },
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line for line in file if line.startswith("model name")]
    except OSError:
        lines = []
    return lines[0].partition(":")[2].strip() if lines else platform.machine()


def _links(found: Links) -> dict[str, Any]:
    """Return the entry ``links`` of the file."""
    slow = [
        {
            "hosts": list(one.link.hosts),
            "latency_ratio": one.latency_ratio,
            "bandwidth_ratio": one.bandwidth_ratio,
        }
        for one in find_outliers(found.between)
    ]
    kinds = {"inside": _link(found.inside), "between": _link(found.between)}
    return {**kinds, "large_bytes": found.nbytes, "slow": slow}


def _link(links: Sequence[Link]) -> dict[str, Any] | None:
    if not links:
        return None
    latencies = [link.latency_seconds for link in links]
    bandwidths = [link.bandwidth_bytes_per_second for link in links]
    # Store only the slowest links, because thousands of nodes have too many links.
    slowest = sorted(links, key=lambda link: link.bandwidth_bytes_per_second)
    return {
        "latency_seconds": float(np.median(latencies)),
        "bytes_per_second": float(np.median(bandwidths)),
        "num_measured": len(links),
        "measured": [
            [*link.ranks, link.latency_seconds, link.bandwidth_bytes_per_second]
            for link in slowest[:_MOST_LINKS]
        ],
    }


def _reduction(strategy: Strategy) -> dict[str, Any]:
    options = CommunicationOptions()
    return {
        "bytes_per_pack": options.bytes_per_pack,
        "implementation": CommunicationImplementation.parse(
            options.implementation
        ).name,
        "wire_dtype": options.wire_dtype,
        "slot_bytes": strategy.topology.slot_bytes,
    }


def _describe_reduction(part: Part, strategy: Strategy) -> None:
    """Record in a part the algorithm that sums its arrays."""
    nbytes = part.parameters.get("nbytes", 0)
    if strategy.num_replicas_in_sync == 1 or part.name not in _SUMMED or not nbytes:
        return
    chosen = CrossDeviceOps().choose(nbytes, strategy.topology, CommunicationOptions())
    function: Any = chosen.algorithm
    # A functools.partial has no name, so use the name of its function.
    part.algorithm = getattr(function, "func", function).__name__
    part.piece_bytes = chosen.piece_bytes


def _times(item: Planned) -> str:
    return ", ".join(_time(part, item.parts) for part in item.parts)


def _time(part: Part, parts: Sequence[Part]) -> str:
    name = f"{part.name} " if len(parts) > 1 else ""
    return f"{name}{len(part.seconds)} repeats, median {np.median(part.seconds):.4g} s"
