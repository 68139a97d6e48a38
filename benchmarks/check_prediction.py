"""Compare predicted with measured steps, on pretend hosts with slow networks.

Run it as root, with an MPI library and SimGrid (apt-get install libsimgrid-dev)::

    python benchmarks/check_prediction.py --json FILE --picture FILE

The program makes pretend hosts on this machine by ``tests/cluster/hosts_up.sh``. On two
hosts it measures latency and bandwidth, and on one host the step of a replica. From
these figures alone, the simulation of `hpcstrat bench predict` predicts the step on 2,
4 and 8 hosts, and the program then measures that step. All hosts share this machine's
cores, so a step sleeps instead of computing. Each point reports the CPU load outside of
that sleep: if the cores are busy, they and not the network limit the step. The rate
limiter passes only a small burst after a pause, because a real cable passes none.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).parents[1]
LARGE_BYTES = 4 << 20
TRIPS = 15
# Number of timed steps. Their median is used, because scheduling of cores adds noise.
STEPS, WARM_UP = 15, 3
WIRES = (("100mbit", 0), ("1gbit", 0), ("100mbit", 500), ("1gbit", 500))
# Bursts of a few milliseconds, and at least 64 KiB, which the kernel sends at once.
BURSTS = {"100mbit": "64kb", "1gbit": "128kb"}
# A queue so long that no packet is dropped, because TCP would wait and resend it.
QUEUE = "400ms"
HOSTS = (2, 4, 8)
WITHIN = 0.1


@dataclass(frozen=True)
class Point:
    """The predicted and the measured times of a step on some hosts, in seconds."""

    rate: str
    delay_us: int
    hosts: int
    replicas_per_host: int
    latency_seconds: float
    bytes_per_second: float
    compute_seconds: float
    nbytes: int
    predicted_seconds: float
    measured_seconds: list[float]
    # CPU seconds of all processes of the machine in a step.
    cores_seconds: float

    @property
    def error(self) -> float:
        """Return predicted / measured - 1, for the seconds of a step."""
        return self.predicted_seconds / statistics.median(self.measured_seconds) - 1

    @property
    def sum_error(self) -> float:
        """Return predicted / measured - 1, for the seconds beyond the computation."""
        measured = statistics.median(self.measured_seconds)
        computing = self.compute_seconds
        return (self.predicted_seconds - computing) / (measured - computing) - 1

    @property
    def busy(self) -> float:
        """Return the CPU load of the machine during the sums, from 0 to 1."""
        summing = statistics.median(self.measured_seconds) - self.compute_seconds
        return self.cores_seconds / summing / (os.cpu_count() or 1)


def measure_link() -> tuple[float, float]:
    """Return latency and bandwidth between the first two hosts' first ranks.

    Called on every rank.
    """
    import hpcstrat as hs

    with hs.MultiWorkerMirroredStrategy() as strategy:
        comm = strategy.topology.cross_worker_comm
        found = (0.0, 0.0)
        if strategy.topology.worker_comm.rank == 0 and comm.rank < 2:
            short, long = _trip(comm, 8, 200), _trip(comm, LARGE_BYTES, TRIPS)
            found = short, LARGE_BYTES / (long - short)
        strategy.barrier()
        return found


def _trip(comm: Any, nbytes: int, count: int) -> float:
    buffer, taken = np.zeros(nbytes, np.uint8), []
    for _ in range(count + 2):
        start = time.perf_counter()
        if comm.rank == 0:
            comm.Send(buffer, 1)
            comm.Recv(buffer, 1)
        else:
            comm.Recv(buffer, 0)
            comm.Send(buffer, 0)
        taken.append((time.perf_counter() - start) / 2)
    return statistics.median(taken[2:])


def measure_steps(compute_seconds: float, nbytes: int) -> tuple[list[float], float]:
    """Return the times of steps on the slowest rank, and the CPU seconds of a step.

    Called on every rank. The CPU seconds are those of all processes of the machine.
    """
    import hpcstrat as hs

    with hs.MultiWorkerMirroredStrategy() as strategy:
        gradient = np.ones(nbytes // 4, np.float32)

        def step() -> Any:
            time.sleep(compute_seconds)
            return hs.get_replica_context().all_reduce("sum", gradient)

        taken = []
        for number in range(WARM_UP + STEPS):
            if number == WARM_UP:
                worked = _worked_seconds()
            start = time.perf_counter()
            strategy.run(step)
            taken.append(time.perf_counter() - start)
        worked = (_worked_seconds() - worked) / STEPS
        every = strategy.gather(np.array([taken[WARM_UP:]]), axis=0)
        return list(np.max(every, axis=0)), worked


def _worked_seconds() -> float:
    """Return the CPU seconds of all cores since the boot of the machine."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def connected(count: int, rate: str, delay_us: int) -> Iterator[Any]:
    """Yield pretend hosts with a network of this rate."""
    from tests.cluster.hosts import Hosts

    with Hosts(count, rate, delay_us) as hosts:
        for number in range(1, count + 1):
            words = [str(hosts.folder / "hx"), f"node{number}", "tc", "qdisc"]
            words += ["replace", "dev", "eth0", "root", "tbf", "rate", rate]
            words += ["burst", BURSTS[rate], "latency", QUEUE]
            subprocess.run(words, check=True)
        yield hosts


def points(options: dict[str, Any]) -> Iterator[Point]:
    """Measure and predict the steps on all networks and numbers of hosts."""
    from hpcstrat.tools.bench.prediction.dry_run import (
        MemoryCopy,
        SimulatedJob,
        dry_run,
    )
    from hpcstrat.tools.bench.prediction.forecast import ForecastStep, predict_point
    from hpcstrat.tools.bench.prediction.platforms import Network
    from hpcstrat.tools.bench.prediction.traces import Machine

    compute, nbytes = options["compute_ms"] / 1e3, options["nbytes"]
    for rate, delay in WIRES:
        for each in options["replicas"]:
            with connected(2, rate, delay) as hosts:
                latency, speed = hosts.run([each, each], measure_link)[0]
                taken, _ = hosts.run([each], measure_steps, compute, nbytes)[0]
            alone = statistics.median(taken)
            shapes = ((nbytes // 4,),)
            # Estimate the memory bandwidth from the copies and sums inside of a host.
            copied = sum(
                event.nbytes
                for event in dry_run(shapes, SimulatedJob(1, each))
                if isinstance(event, MemoryCopy)
            )
            memory = copied / (alone - compute) if copied else 4e9
            computing = compute if copied else alone
            for count in HOSTS:
                with connected(count, rate, delay) as hosts:
                    taken, worked = hosts.run(
                        [each] * count, measure_steps, compute, nbytes
                    )[0]
                predicted = predict_point(
                    ForecastStep(computing, shapes),
                    SimulatedJob(count, each),
                    Machine(5e-6, memory / 2, memory, options["mpi"]),
                    Network("ethernet", latency, speed),
                )
                yield Point(
                    *(rate, delay, count, each, latency, speed, computing, nbytes),
                    predicted.step_seconds,
                    taken,
                    worked,
                )


def draw(path: str, found: list[Point]) -> None:
    """Draw the measured steps with their spread, and the predicted steps."""
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(p.rate for p in found))
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    panels = figure.subplots(1, len(rates), squeeze=False)[0]
    for axes, rate in zip(panels, rates, strict=True):
        cases = dict.fromkeys(
            (p.delay_us, p.replicas_per_host) for p in found if p.rate == rate
        )
        for number, (delay, each) in enumerate(cases):
            some = [
                p
                for p in found
                if (p.rate, p.delay_us, p.replicas_per_host) == (rate, delay, each)
            ]
            hosts = [p.hosts for p in some]
            axes.plot(
                hosts,
                [1e3 * p.predicted_seconds for p in some],
                color=f"C{number}",
                label=f"+ {delay} us, {each} per host",
            )
            times = np.array([p.measured_seconds for p in some]) * 1e3
            middle = np.median(times, axis=1)
            spread = np.abs(np.percentile(times, [10, 90], axis=1) - middle)
            # Shift the points sideways so that they do not hide each other.
            beside = [count * 1.03 ** (number - len(cases) / 2) for count in hosts]
            axes.errorbar(
                beside, middle, spread, fmt="o", color=f"C{number}", capsize=3
            )
        axes.set(title=rate, xlabel="hosts", ylabel="ms of a step", xscale="log")
        axes.set_ylim(bottom=0)
        axes.set_xticks(HOSTS, [str(count) for count in HOSTS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize="small")
    figure.suptitle("lines: predicted; points: measured, 10% to 90%")
    figure.savefig(path, dpi=120)


def write(path: str, found: list[Point]) -> None:
    """Write all figures, their errors and a description of the machine."""
    from mpi4py import MPI
    from report import environment

    rows = [
        asdict(p) | {"error": p.error, "sum_error": p.sum_error, "busy": p.busy}
        for p in found
    ]
    content = {"environment": environment(MPI), "points": rows}
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


@click.command(context_settings={"show_default": True})
@click.option("--compute-ms", default=200.0, help="A step sleeps so long.")
@click.option("--nbytes", default=1 << 20, help="Of the gradients in a step.")
@click.option("--replicas", default=[1], multiple=True, help="On each host.")
@click.option("--mpi", type=click.Choice(["openmpi", "mpich"]), default="openmpi")
@click.option("--json", "json_path", help="Write all figures there.")
@click.option("--picture", help="Draw there; needs matplotlib.")
def main(**options: Any) -> None:
    """Predict and measure steps on pretend hosts; needs root."""
    sys.path.insert(0, str(ROOT))
    from tests.cluster.hosts import HostsUnavailable

    found = []
    try:
        for point in points(options):
            found.append(point)
            measured = statistics.median(point.measured_seconds)
            click.echo(
                f"{point.rate:>7} + {point.delay_us:3} us, {point.hosts} hosts x "
                f"{point.replicas_per_host}: predicted "
                f"{1e3 * point.predicted_seconds:7.1f} ms, measured "
                f"{1e3 * measured:7.1f} ms, error {point.error:+6.1%}, of the sum "
                f"{point.sum_error:+6.1%}, cores {point.busy:.0%} busy"
            )
            if options["json_path"]:
                write(options["json_path"], found)
    except HostsUnavailable as error:
        raise click.ClickException(str(error)) from error
    if options["picture"]:
        draw(options["picture"], found)
    worst = max(abs(point.error) for point in found)
    click.echo(f"largest error: {worst:.1%}")
    sys.exit(int(worst > WITHIN))


if __name__ == "__main__":
    main()
