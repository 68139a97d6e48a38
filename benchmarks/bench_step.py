"""Benchmark of a training step, compared with the same step by hand on mpi4py.

Run it on two ranks of a quiet machine with two cores, one thread each::

    export OMP_NUM_THREADS=1
    mpirun -n 2 python benchmarks/bench_step.py --json FILE --picture FILE

In a step, a network with one hidden layer computes losses and gradients of its
replica's rows, into preallocated arrays; the gradients are summed over the replicas;
stochastic gradient descent with momentum updates the weights in place; and the loss is
summed. The hpcstrat step uses ``strategy.run``, ``apply_gradients`` and
``strategy.reduce``. There are two steps by hand: the usual one packs the gradients into
one buffer for one ``Allreduce``; the fastest one that we know computes the gradients
directly in that buffer, and sums it in pieces of 1 MiB. All steps get the same rows,
alternate in one process, and must reach the same weights and losses, up to rounding.
The difference of two alternatives is the median of their differences within each round;
``timing.py`` describes how times are measured. Before these steps, ``small_step.py``
measures the cost of the library itself: the time of ``run`` and one update of 20 arrays
of 64 elements, minus the time of the same step by hand. With ``--device``, the step
runs on GPUs: see ``device_step.py``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from device_step import ALONE, SIZES, measure_device
from device_step import SECONDS as DEVICE_SECONDS
from devices import device_options, given, start
from report import (
    byte_ticks,
    describe,
    draw_bars,
    output_options,
    parse_size,
    row,
    size_text,
    styles,
    table,
    write_json,
)
from small_step import BY_ARRAY, BY_HAND, measure_small
from timing import measure_for
from trainers import NUM_FEATURES, ByHand, Ours, Trainer, require_equal

import hpcstrat as hs

# Number of batches; each step uses the next one, so that rows are not always cached.
NUM_BATCHES = 8

OURS = "hpcstrat"
PACKED = "mpi4py, packed"
FASTEST = "mpi4py, fastest"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line; ``main`` describes the options."""

    widths: list[int]
    rows: int
    seconds: float
    json_path: str | None
    picture: str | None


def measure_width(
    strategy: hs.MultiWorkerMirroredStrategy, width: int, options: Options
) -> tuple[int, dict[str, Any]]:
    """Train and time networks of one width.

    Collective over all replicas.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The replicas of this strategy take part.
    width : int
        Number of hidden units.
    options : Options
        The command line.

    Returns
    -------
    nbytes : int
        Size of all gradients.
    times : dict of str to ndarray of shape (rounds,)
        Seconds, from `timing.measure`.
    """
    topology = strategy.topology
    generator = np.random.default_rng([1, topology.replica_id])
    shape = (options.rows, NUM_FEATURES)
    batches = [generator.standard_normal(shape, np.float32) for _ in range(NUM_BATCHES)]
    trainers: dict[str, Trainer] = {
        OURS: Ours(strategy, width, batches),
        PACKED: ByHand(strategy, width, batches, fastest=False),
        FASTEST: ByHand(strategy, width, batches, fastest=True),
    }
    times = measure_for(
        topology.replica_comm, topology.mpi, trainers, options.seconds, least=15
    )
    require_equal(trainers, OURS)
    return sum(array.nbytes for array in trainers[OURS].parameters()), times


def differences(
    times: dict[str, Any], others: tuple[str, ...] = (PACKED, FASTEST)
) -> dict[str, Any]:
    """Return the time of hpcstrat's step minus the times of the steps by hand.

    Not collective.

    Parameters
    ----------
    times : dict of str to ndarray of shape (rounds,)
        Seconds, from `timing.measure`.
    others : tuple of str
        Names of the steps by hand.

    Returns
    -------
    dict of str to ndarray of shape (3,)
        Lower quartile, median and upper quartile of the differences in seconds.
    """
    return {
        name: np.percentile(times[OURS] - times[name], [25, 50, 75]) for name in others
    }


def describe_differences(found: dict[str, Any]) -> str:
    """Return a line of text for each of the `differences`; not collective."""
    return "\n".join(
        f"{OURS} above {name}: {median * 1e6:+.1f} us, quartiles "
        f"{low * 1e6:+.1f} and {high * 1e6:+.1f}"
        for name, (low, median, high) in found.items()
    )


def with_names(found: dict[str, Any]) -> dict[str, Any]:
    """Return `differences` as dicts from quartile name to seconds; not collective."""
    names = "lower", "median", "upper"
    return {name: dict(zip(names, v, strict=True)) for name, v in found.items()}


def draw(path: str, times: dict[int, dict[str, Any]], title: str) -> None:
    """Draw the times of the steps, and their differences with quartiles.

    Not collective.

    Parameters
    ----------
    path : str
        The picture; its suffix names the format.
    times : dict of int to dict of str to ndarray of shape (rounds,)
        For each size of the gradients in bytes.
    title : str
        Title with the measurement and the machine.
    """
    from matplotlib.figure import Figure

    sizes = list(times)
    figure = Figure(figsize=(9, 8), layout="constrained")
    steps, above = figure.subplots(2, 1, sharex=True)
    chosen = styles([OURS, PACKED, FASTEST])
    for name, style in chosen.items():
        medians = [float(np.median(times[size][name])) * 1e3 for size in sizes]
        steps.plot(sizes, medians, **style)
    steps.set(yscale="log", ylabel="median time of a step in ms")
    for name in (PACKED, FASTEST):
        low, median, high = (
            np.array([differences(times[size])[name] for size in sizes]).T * 1e6
        )
        above.plot(sizes, median, **chosen[name])
        ranges = np.array([median - low, high - median])
        color = chosen[name]["color"]
        above.errorbar(sizes, median, ranges, fmt="none", ecolor=color, capsize=4)
    above.axhline(0, color="gray", linewidth=0.8, zorder=0)
    above.axhline(20, color="gray", linewidth=0.8, linestyle=":", zorder=0)
    above.set_yscale("symlog", linthresh=100, linscale=2)
    above.set(
        xlabel="size of the gradients",
        ylabel="hpcstrat above the other in us, with quartiles\n"
        "linear up to 100, dotted line at 20",
    )
    byte_ticks(above, sizes)
    for axes in (steps, above):
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    figure.legend(
        *steps.get_legend_handles_labels(), loc="outside lower center", ncols=3
    )
    figure.savefig(path, dpi=120)


def _parse_widths(context: Any, option: Any, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) for word in words):
        raise click.BadParameter(
            f"expected positive integers between commas, found {text!r}",
            context,
            option,
        )
    return [int(word) for word in words]


@click.command(context_settings={"show_default": True})
@click.option(
    "--widths",
    default="2,8,32,128,512,2048,8192,20000",
    callback=_parse_widths,
    help="Numbers of hidden units, at 2,052 bytes of gradients each.",
)
@click.option("--rows", default=16, help="Rows of a batch on each replica.")
@click.option("--seconds", default=10.0, help="How long to measure each width.")
@click.option(
    "--gradients",
    default=",".join(size_text(size) for size in SIZES),
    help="With --device: sizes of all gradients together.",
)
@device_options
@output_options
def main(
    device: bool, smoke: bool, results: str | None, gradients: str, **words: Any
) -> None:
    """Measure a training step of hpcstrat and of mpi4py by hand."""
    if device:
        sizes = [parse_size(word) for word in gradients.split(",")]
        bench = start(smoke, results, words)
        seconds = words["seconds"] if given("seconds") else DEVICE_SECONDS
        found = measure_device(bench, sizes, seconds)
        if bench.rank == 0 and words["picture"]:
            draw_bars(words["picture"], found, ALONE, f"step\n{bench.where()}")
        return
    options = Options(**words)
    strategy = hs.MultiWorkerMirroredStrategy()
    mpi = strategy.topology.mpi
    what = f"training step, {options.rows} rows per replica"
    where = describe(mpi)
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    hs.print_once(f"{what}, {where}; OMP_NUM_THREADS: {threads}")
    if threads != "1":
        hs.print_once("set OMP_NUM_THREADS=1: threads of NumPy disturb the other rank")
    small_times = measure_small(strategy, options.seconds)
    small = differences(small_times, (BY_HAND, BY_ARRAY))
    hs.print_once(
        "\nrun and update of 20 arrays of 64 elements, "
        f"{len(small_times[OURS])} steps; faster: than {BY_HAND}\n"
        f"{table(small_times, BY_HAND, BY_ARRAY)}\n{describe_differences(small)}"
    )
    times = {}
    for width in options.widths:
        nbytes, by_name = measure_width(strategy, width, options)
        times[nbytes] = by_name
        hs.print_once(
            f"\n{size_text(nbytes)} of gradients, {len(by_name[OURS])} steps; faster: "
            f"than {PACKED}\n{table(by_name, PACKED, FASTEST)}\n"
            + describe_differences(differences(by_name))
        )
    if strategy.replica_id:
        return
    if options.json_path:
        rows = [
            row(what, name, mpi.COMM_WORLD.size, nbytes, values)
            for nbytes, by_name in times.items()
            for name, values in by_name.items()
        ]
        quartiles = {
            size_text(nbytes): with_names(differences(by_name))
            for nbytes, by_name in times.items()
        }
        write_json(
            options.json_path,
            mpi,
            rows,
            threads=threads,
            rounds={size_text(size): len(t[OURS]) for size, t in times.items()},
            seconds_of_hpcstrat_above=quartiles,
            seconds_above_in_steps_of_20_small_arrays=with_names(small),
        )
    if options.picture:
        draw(options.picture, times, f"{what}\n{where}")


if __name__ == "__main__":
    main()
