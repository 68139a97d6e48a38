"""The command ``hpcstrat bench predict``, which needs SimGrid, but no MPI."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from hpcstrat.tools.bench.pictures import require_matplotlib
from hpcstrat.tools.bench.prediction.effective_time import MeasuredTimes
from hpcstrat.tools.bench.prediction.forecast import ForecastPoint, predict
from hpcstrat.tools.bench.prediction.inputs import KnownFigures, read_given
from hpcstrat.tools.bench.prediction.picture import PARTS, draw
from hpcstrat.tools.bench.prediction.platforms import MOST_NODES, NETWORKS
from hpcstrat.tools.bench.prediction.simulator import find_smpirun
from hpcstrat.tools.bench.prediction.traces import MPI_OPTIONS
from hpcstrat.tools.bench.run_file import BenchError, write_json
from hpcstrat.tools.bench.shapes import MODELS
from hpcstrat.tools.terminal import add_row, new_console, new_table

__all__ = ["predict_command"]

_NODES = "1,2,4,8,16,32,64,128,256,512,1000,2000,5000,10000"
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?) ?([a-zA-Z]+)(?:/s)?")
_MEASURED = "steps as measured"
_SECONDS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BYTES = {
    "B": 1.0,
    "kB": 1e3,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "kbit": 1e3 / 8,
    "Mbit": 1e6 / 8,
    "Gbit": 1e9 / 8,
}


def _quantity(
    units: dict[str, float], example: str
) -> Callable[[Any, Any, str | None], float | None]:
    """Return a parser of an option whose value is a number with a unit."""

    def parsed(context: Any, option: Any, text: str | None) -> float | None:
        if text is None:
            return None
        found = _QUANTITY.fullmatch(text.strip())
        if found is None or found[2] not in units or not float(found[1]):
            raise click.BadParameter(
                f"expected a number above 0 with a unit, such as {example}, found "
                f"{text!r}; units are {', '.join(units)}",
                context,
                option,
            )
        return float(found[1]) * units[found[2]]

    return parsed


_seconds = _quantity(_SECONDS, "1.5us")
_speed = _quantity(_BYTES, "12.5GB/s")
_size = _quantity(_BYTES, "100MB")


def _shapes(
    context: Any, option: Any, text: str | None
) -> tuple[tuple[int, ...], ...] | None:
    if text is None:
        return None
    if text in MODELS:
        return tuple(MODELS[text]())
    nbytes = _size(context, option, text)
    assert nbytes is not None
    # A size stands for one array of float32 elements.
    return ((max(1, round(nbytes / 4)),),)


def _counts(context: Any, option: Any, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 0 < int(word) <= MOST_NODES for word in words):
        raise click.BadParameter(
            f"expected numbers up to {MOST_NODES} such as 1,2,4, found {text!r}; "
            "separate them by commas",
            context,
            option,
        )
    # Predict small numbers of nodes first, because they take only seconds: their
    # results remain if the user interrupts the command.
    return sorted({int(word) for word in words})


@click.command("predict")
@click.argument("files", nargs=-1, type=click.Path())
@click.option(
    "--network",
    "networks",
    multiple=True,
    type=click.Choice(tuple(NETWORKS)),
    help="Kind of network; repeat the option to predict several kinds. Without it, "
    "steps take as long as measured.",
)
@click.option(
    "--nodes",
    default=_NODES,
    callback=_counts,
    show_default=True,
    help="Numbers of nodes, separated by commas.",
)
@click.option(
    "--latency", callback=_seconds, help="Latency between nodes, such as 1.5us."
)
@click.option(
    "--bandwidth", callback=_speed, help="Bandwidth of a node, such as 12.5GB/s."
)
@click.option("--inside-latency", callback=_seconds, help="Latency within a node.")
@click.option("--inside-bandwidth", callback=_speed, help="Bandwidth within a node.")
@click.option(
    "--memory-bandwidth",
    callback=_speed,
    help="Memory bandwidth of a replica while all replicas of its node use it.",
)
@click.option(
    "--replicas-per-node", type=click.IntRange(1), help="Number of replicas of a node."
)
@click.option(
    "--mpi",
    type=click.Choice(tuple(MPI_OPTIONS)),
    help="Your MPI library, or the library on which it is based.",
)
@click.option(
    "--compute-ms", type=click.FloatRange(0), help="Computation time of a step."
)
@click.option(
    "--gradients",
    callback=_shapes,
    help=f"Gradients that are summed in a step: {', '.join(MODELS)}, or a size such "
    "as 100MB.",
)
@click.option(
    "--losses",
    type=click.FloatRange(0, 1e6),
    help="Losses of each node in an hour, such as 1e-4: predict the effective time.",
)
@click.option(
    "--restart",
    callback=_seconds,
    help="Time from a loss to the next step, such as 5s.",
)
@click.option("--save", callback=_seconds, help="Time of a save or snapshot.")
@click.option(
    "--steps-per-save",
    type=click.IntRange(1),
    help="Steps between saves; default: as every='auto' of CheckpointOptions.",
)
@click.option(
    "--run-hours",
    type=click.FloatRange(0, min_open=True),
    default=24.0,
    show_default=True,
    help="Time of all steps of a run, for the deviation of its effective time.",
)
@click.option(
    "--json", "output", type=click.Path(), help="Write all figures to this file."
)
@click.option(
    "--picture",
    type=click.Path(),
    help="Draw the predicted times into this file; needs matplotlib.",
)
def predict_command(
    files: tuple[str, ...],
    networks: tuple[str, ...],
    nodes: list[int],
    output: str | None,
    picture: str | None,
    **words: Any,
) -> None:
    """Predict steps on many nodes, by SimGrid, and the effective time with losses.

    The figures of a small run are read from FILES, which hpcstrat bench scaling,
    hpcstrat bench survive --json or hpcstrat doctor --measure --json has written.
    Options override figures in FILES.
    """
    try:
        if networks:
            find_smpirun()
        # Check for matplotlib now, and not after minutes of simulations.
        if picture is not None:
            require_matplotlib()
        given, run_seconds = _given(files, words), 3600 * words["run_hours"]
        curves: dict[str, list[ForecastPoint]] = {}
        for kind in dict.fromkeys(networks or (_MEASURED,)):
            curves[kind] = []
            for point in _points(given, kind, nodes):
                curves[kind].append(given.with_losses(point, run_seconds))
                # Write the file now: the user may interrupt the next point.
                if output is not None:
                    _write(output, _report(curves))
            _show(kind, curves[kind])
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    if picture is not None:
        _draw(picture, curves)


def _given(files: Sequence[str], words: dict[str, Any]) -> KnownFigures:
    compute_ms = words["compute_ms"]
    given = KnownFigures(
        latency=words["latency"],
        bandwidth=words["bandwidth"],
        inside_latency=words["inside_latency"],
        inside_bandwidth=words["inside_bandwidth"],
        memory=words["memory_bandwidth"],
        compute=None if compute_ms is None else compute_ms / 1e3,
        replicas_per_node=words["replicas_per_node"],
        mpi=words["mpi"],
        shapes=words["gradients"],
        saves=_constant(words["save"]),
        starts=_constant(words["restart"]),
        steps_per_save=words["steps_per_save"],
        losses=words["losses"],
    )
    for path in files:
        # Options override files, and earlier files override later files.
        given = given.over(read_given(path))
    return given


def _constant(seconds: float | None) -> MeasuredTimes | None:
    return None if seconds is None else MeasuredTimes.of([seconds])


def _points(
    given: KnownFigures, kind: str, nodes: Sequence[int]
) -> Iterator[ForecastPoint]:
    """Predict the points, and print the time and memory that each prediction needs."""
    if kind == _MEASURED:
        yield from map(given.measured_point, nodes)
        return
    network = given.network(kind)
    for point in predict(given.step(), given.job(), given.machine(), network, nodes):
        click.echo(
            f"{kind}, {point.num_nodes} nodes: {point.wall_seconds:.1f} s, "
            f"{point.most_bytes / 1e6:.0f} MB",
            err=True,
        )
        yield point


def _show(kind: str, points: Sequence[ForecastPoint]) -> None:
    console = new_console()
    console.print(f"{kind}: {points[-1].network or 'one node'}")
    table = new_table(
        "nodes",
        "replicas",
        "step ms",
        "efficiency",
        *(f"{words} ms" for words in PARTS.values()),
        "with late nodes ms",
        *(["effective time"] if points[0].effective_time is not None else []),
    )
    for point in points:
        parts = [f"{1e3 * getattr(point, part):.4g}" for part in PARTS]
        times = f"{1e3 * point.step_seconds:.4g}", f"{point.efficiency:.1%}"
        late = point.mean_step_seconds or 0.0, point.step_deviation_seconds or 0.0
        parts.append(f"{1e3 * late[0]:.4g} +- {1e3 * late[1]:.2g}")
        if point.effective_time is not None:
            deviation = point.effective_time_deviation
            parts.append(f"{point.effective_time:.4f} +- {deviation:.4f}")
        add_row(table, point.num_nodes, point.num_replicas, *times, *parts)
    console.print(table)


def _report(curves: dict[str, list[ForecastPoint]]) -> dict[str, Any]:
    """Return the content of the output file, which hpcstrat bench report can read."""
    return {
        "format": "hpcstrat expected",
        "format_version": 1,
        "source": f"SimGrid, {', '.join(curves)}",
        "command": shlex.join(["hpcstrat", *sys.argv[1:]]),
        "points": [
            {
                "part": "step",
                "scaling": "weak",
                "num_replicas": point.num_replicas,
                "seconds": point.step_seconds,
                "kind": kind,
                **point.to_json(),
            }
            for kind, points in curves.items()
            for point in points
        ],
    }


def _write(path: str, report: dict[str, Any]) -> None:
    try:
        write_json(report, path)
    except OSError as error:
        raise BenchError(
            f"expected to write {path}, found {error.strerror}; choose another file"
        ) from error


def _draw(path: str, curves: dict[str, list[ForecastPoint]]) -> None:
    figure = draw(curves, "A training step, predicted by SimGrid")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise click.ClickException(
            f"expected to draw {path}, found {error}; choose another file"
        ) from error
