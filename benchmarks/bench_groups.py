"""Compare synchronous training and `SyncGroups` on two hosts with a slow network.

Run it as root, with an MPI library and without a launcher::

    python benchmarks/bench_groups.py --json FILE --picture FILE

The program makes pretend hosts on this machine by ``tests/cluster/hosts_up.sh``, with a
network of a limited rate between the hosts. It trains the network of
``jobs/train_digits.py`` there: with gradients summed over all ranks at each step; and
with `hpcstrat.SyncGroups`, one group per host, with and without a delay, and with
messages in half precision. All trainings start with the same weights and use the same
number of images. After each epoch, or round of the groups, every rank computes the
accuracy on all test images. The byte counts are the bytes that left each host's
interface since the training began, with headers and acknowledgments.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
from drawing import save_figure
from on_hosts import on_hosts
from report import describe, environment, output_options, styles, write_json

import hpcstrat as hs

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "jobs"))

from digits_network import (  # noqa: E402 - beside the program that trains it
    forward,
    initial_parameters,
    losses_and_gradients,
)

MAX_PIXEL = 16
MOMENTUM = 0.9
SYNCHRONOUS = "hpcstrat, synchronous"
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


@dataclass(frozen=True)
class Point:
    """The progress of a training after some steps; the same on all ranks of a host."""

    step: int
    seconds: float
    sent: int
    accuracy: float


@dataclass
class Found:
    """The result of a training, on this rank's host."""

    points: list[Point] = field(default_factory=list)

    def reached(self, accuracy: float) -> Point | None:
        """Return the first point with at least this accuracy.

        Not collective.

        Parameters
        ----------
        accuracy : float
            An accuracy from 0 to 1.

        Returns
        -------
        Point or None
            None if no point has this accuracy.
        """
        good = (point for point in self.points if point.accuracy >= accuracy)
        return next(good, None)


class Training:
    """A training of the digits, on all ranks.

    Parameters
    ----------
    options : dict
        The command line.
    groups : SyncGroups, optional
        Default: synchronous training.
    """

    def __init__(
        self, options: dict[str, Any], groups: hs.SyncGroups | None = None
    ) -> None:
        self.options, self.groups = options, groups
        self.everyone = groups.everyone if groups else hs.MultiWorkerMirroredStrategy()
        self.strategy: Any = groups.strategy if groups else self.everyone
        self.file = h5py.File(options["data"], "r", locking=False)
        self.tests = self.file["test/images"][:].astype(np.float32) / MAX_PIXEL
        self.labels = self.file["test/labels"][:]
        with self.strategy.scope():
            self.parameters = [
                hs.Variable(value, name=name)
                for name, value in initial_parameters(0, "float32").items()
            ]
            self.optimizer = hs.optimizers.SGD(options["learning_rate"], MOMENTUM)
        self.found = Found()
        self.step = 0

    def _train(self, batch: Any, num_in_sync: float) -> None:
        images = batch["images"].astype(np.float32) / MAX_PIXEL
        _, gradients, _ = losses_and_gradients(
            [variable.value() for variable in self.parameters],
            images,
            batch["labels"],
            num_in_sync,  # type: ignore[arg-type]
        )
        self.optimizer.apply_gradients(zip(gradients, self.parameters, strict=True))

    def _note(self) -> None:
        """Record the training's progress, without a message."""
        sent = int(COUNTER.read_text()) - self._sent
        seconds = time.perf_counter() - self._start
        _, logits = forward([v.numpy() for v in self.parameters], self.tests)
        accuracy = float(np.mean(logits.argmax(axis=1) == self.labels))
        self.found.points.append(Point(self.step, seconds, sent, accuracy))

    def run(self) -> Found:
        """Train.

        Collective over all ranks.

        Returns
        -------
        Found
            The result on this rank's host.
        """
        batch_size, groups = self.options["global_batch"], self.groups
        train = hs.Dataset(self.file["train"], batch_size, shuffle=True, seed=0)
        batches = self.everyone.experimental_distribute_dataset(train)
        self.everyone.barrier()
        self._sent = int(COUNTER.read_text())
        # No rank of this host may send before all ranks of it have read the counters.
        self.everyone.topology.worker_comm.Barrier()
        self._start = time.perf_counter()
        share = groups.num_groups if groups else 1
        for _ in range(self.options["epochs"]):
            left = batches.num_rows
            for batch in batches:
                num_images, left = min(batch_size, left), left - batch_size
                self.strategy.run(self._train, args=(batch, num_images / share))
                self.step += 1
                if groups is not None and groups.step():
                    self._note()
            if groups is None:
                self._note()
        if groups is not None:
            groups.end_round()
            self._note()
        return self.found


def trainings(options: dict[str, Any]) -> dict[str, Callable[[], Training]]:
    """Return a function for each training that is compared.

    Not collective.

    Parameters
    ----------
    options : dict
        The command line.

    Returns
    -------
    dict of str to callable
        By name of the training.
    """
    every, half = options["every"], hs.CommunicationOptions(wire_dtype="float16")

    def in_groups(**more: Any) -> Callable[[], Training]:
        outer = hs.optimizers.SGD(
            options["outer_rate"],
            options["outer_momentum"],
            nesterov=options["outer_momentum"] > 0,
        )
        return lambda: Training(
            options, hs.SyncGroups(every=every, outer=outer, **more)
        )

    name = f"hpcstrat, groups, every {every} steps"
    return {
        SYNCHRONOUS: lambda: Training(options),
        name: in_groups(),
        f"{name}, awaited {options['delay']} later": in_groups(delay=options["delay"]),
        f"{name}, float16 on the wire": in_groups(communication_options=half),
    }


def measure(options: dict[str, Any]) -> None:
    """Train in this job, whose ranks are on several hosts.

    Collective over all ranks of the job.

    Parameters
    ----------
    options : dict
        The command line.
    """
    from mpi4py import MPI

    all_found = {}
    for name, make in trainings(options).items():
        training = make()
        found = all_found[name] = training.run()
        # Gather the bytes that each host has sent; the accuracy is the same on all
        # ranks.
        last = [training.everyone.topology.worker_id, found.points[-1].sent]
        hosts = dict(training.everyone.collectives.all_gather_object(last, "bytes"))
        found_here = hosts if MPI.COMM_WORLD.rank == 0 else {}
        hs.print_once(_line(name, found, options["target"], found_here))
        (training.groups or training.everyone).close()
    if MPI.COMM_WORLD.rank:
        return
    what = (
        f"digits, {options['num_hosts']} hosts x {options['ranks_per_host']} ranks, "
        f"{options['rate'] or 'no limit'} from each host"
    )
    if options["json_path"]:
        rows = [_row(what, name, found, options) for name, found in all_found.items()]
        where = environment(MPI) | {"command": options["on_hosts"]}
        write_json(options["json_path"], MPI, rows, environment=where)
    if options["picture"]:
        draw(options["picture"], all_found, f"{what}\n{describe(MPI)}")


def _line(name: str, found: Found, target: float, hosts: dict[int, int]) -> str:
    last, reached = found.points[-1], found.reached(target)
    sent = " ".join(f"{hosts[host]:,}" for host in sorted(hosts))
    words = f"{name}: accuracy {last.accuracy:.4f} after {last.step} steps, "
    words += f"{last.seconds:.2f} s, {sent} bytes sent by the hosts; "
    if reached is None:
        return words + f"{target} was not reached"
    at = f"step {reached.step}, {reached.seconds:.2f} s, {reached.sent:,} bytes"
    return words + f"{target} reached at {at}"


def _row(what: str, name: str, found: Found, options: dict[str, Any]) -> dict[str, Any]:
    reached = found.reached(options["target"])
    return {
        "what": what,
        "impl": name,
        "ranks": options["num_hosts"] * options["ranks_per_host"],
        "target_accuracy": options["target"],
        "reached": None if reached is None else vars(reached),
        "points": [vars(point) for point in found.points],
    }


def draw(path: str, all_found: dict[str, Found], title: str) -> None:
    """Draw the accuracy over the bytes that host 0 has sent, and over time.

    Not collective.

    Parameters
    ----------
    path : str
        The picture; its suffix names the format.
    all_found : dict of str to Found
        By name of the training.
    title : str
        Title with the measurement and the machine.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for name, style in styles(list(all_found), by_family=False).items():
        points = all_found[name].points
        for ax, what in zip(axes, ("sent", "seconds"), strict=True):
            values = [getattr(point, what) for point in points]
            ax.plot(values, [point.accuracy for point in points], **style)
    axes[0].set(xlabel="bytes sent by the first host", ylabel="test accuracy")
    axes[1].set(xlabel="seconds")
    for ax in axes:
        ax.set_xscale("log")
        ax.set_ylim(0.8, 1)
    save_figure(path, figure, title)


@click.command(context_settings={"show_default": True})
@click.option("--hosts", "num_hosts", default=2, help="Number of hosts.")
@click.option("--ranks-per-host", default=2, help="Ranks on each of them.")
@click.option(
    "--rate", default="10mbit", help="Limit of what each host sends; '' for none."
)
@click.option("--epochs", default=30, help="Of each training.")
@click.option("--global-batch", default=64, help="Images of a step, over all ranks.")
@click.option("--learning-rate", default=0.1, help="Of the inner optimizer.")
@click.option("--every", default=115, help="Steps of a round.")
@click.option("--delay", default=30, help="Steps after which a sum is awaited.")
@click.option("--outer-rate", default=1.0, help="Of the outer optimizer.")
@click.option("--outer-momentum", default=0.0, help="Of the outer optimizer.")
@click.option("--target", default=0.98, help="Accuracy whose cost is told.")
@click.option("--data", default=str(ROOT / "jobs/data/digits.h5"), help="The images.")
@click.option("--on-hosts", hidden=True, help="Set in the job itself: the command.")
@output_options
def main(**options: Any) -> None:
    """Train digits between pretend hosts, in sync and in groups; needs root."""
    if options["on_hosts"]:
        measure(options)
    else:
        names = ("num_hosts", "ranks_per_host", "rate")
        sys.exit(on_hosts(*(options[name] for name in names)))


if __name__ == "__main__":
    main()
