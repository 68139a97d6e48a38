"""The commands ``hpcstrat bench scaling`` and ``hpcstrat bench report``."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

import click

from hpcstrat.checkpoint.bench import scratch
from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.settings import Settings
from hpcstrat.errors import CheckpointError, TopologyError
from hpcstrat.strategies import MultiWorkerMirroredStrategy
from hpcstrat.tools.bench.analysis import analyze, read_runs
from hpcstrat.tools.bench.benchmark_parts import PARTS, Options
from hpcstrat.tools.bench.expectation import read_expected
from hpcstrat.tools.bench.input_command import input_command
from hpcstrat.tools.bench.measuring import Repeats
from hpcstrat.tools.bench.pictures import draw, require_matplotlib, save
from hpcstrat.tools.bench.predict_command import predict_command
from hpcstrat.tools.bench.run_file import BenchError
from hpcstrat.tools.bench.scaling import ScalingRequest, run_scaling
from hpcstrat.tools.bench.shapes import MODELS
from hpcstrat.tools.bench.survive_command import survive_command
from hpcstrat.tools.bench.web_page import page
from hpcstrat.tools.terminal import UncutGroup

__all__ = ["bench"]

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZES = "4B,1KiB,16KiB,256KiB,1MiB,4MiB,16MiB,64MiB"


@click.group(cls=UncutGroup)
def bench() -> None:
    """Measure how a job scales or survives losses, and predict larger jobs."""


bench.add_command(input_command)
bench.add_command(predict_command)
bench.add_command(survive_command)


def _listed(known: tuple[str, ...]) -> Callable[..., tuple[str, ...]]:
    """Return a parser of an option with known names, such as ``step,input``."""

    def parsed(context: Any, option: Any, text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
        for name in names:
            if name not in known:
                raise click.BadParameter(
                    f"expected some of {', '.join(known)}, found {name!r}; separate "
                    "them by commas",
                    context,
                    option,
                )
        return names

    return parsed


def _sizes(context: Any, option: Any, text: str) -> tuple[int, ...]:
    found = []
    for word in text.split(","):
        number = word.strip().rstrip("BKMGi ")
        unit = word.strip()[len(number) :].strip()
        if (
            not number.isdecimal()
            or unit not in _UNITS
            or int(number) * _UNITS[unit] < 4
        ):
            raise click.BadParameter(
                f"expected sizes such as 4B, 64KiB or 1MiB, found {word!r}; separate "
                "them by commas",
                context,
                option,
            )
        # Round down to a whole number of float32 elements.
        found.append(int(number) * _UNITS[unit] // 4 * 4)
    return tuple(dict.fromkeys(found))


_MODELS = tuple(MODELS)


@bench.command(context_settings={"show_default": True})
@click.option(
    "-o",
    "--output",
    default="scaling-{n}.json",
    help="File of the run; {n} is the number of replicas.",
)
@click.option(
    "--folder", help="Folder for temporary files; default: the folder of the output."
)
@click.option(
    "--parts",
    default=",".join(PARTS),
    callback=_listed(PARTS),
    help="Parts to measure, separated by commas.",
)
@click.option(
    "--sizes",
    default=_SIZES,
    callback=_sizes,
    help="Sizes of the arrays that are summed.",
)
@click.option(
    "--gradients",
    "models",
    default=",".join(_MODELS),
    callback=_listed(_MODELS),
    help="Models whose gradients are summed, all gradients of a model in one call.",
)
@click.option(
    "--model",
    type=click.Choice(_MODELS),
    default="resnet50",
    help="Model that is trained and saved.",
)
@click.option(
    "--compute-ms",
    type=click.FloatRange(min=0),
    default=100.0,
    help="Time in which a replica computes a step on --batch-size examples.",
)
@click.option(
    "--step",
    default="",
    metavar="MODULE:FUNCTION",
    help="Function that returns your own step, to measure it instead of the built-in "
    "step.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=64,
    help="Examples on each replica (weak scaling), or on all replicas together (strong "
    "scaling).",
)
@click.option(
    "--row-bytes",
    type=click.IntRange(4),
    default=4096,
    help="Size of an example in bytes.",
)
@click.option(
    "--ranks-per-replica",
    type=click.IntRange(1),
    default=1,
    help="Ranks of each replica; each of them computes for --compute-ms.",
)
@click.option(
    "--repeats",
    type=click.IntRange(2),
    default=30,
    help="Measured repeats of each part.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0),
    default=3,
    help="Repeats before the measured repeats.",
)
def scaling(output: str, folder: str | None, **words: Any) -> None:
    """Measure the ranks of this launch, as one point of a scaling curve.

    \b
        mpirun -n 4 hpcstrat bench scaling -o run/scaling-{n}.json

    Repeat the command with other numbers of ranks or nodes, or submit
    jobs/scaling.sbatch, which does this. Then run hpcstrat bench report. The file is
    written after each part: if a run is killed, start the same command again, and it
    continues.
    """
    launch = launch_from_environment()
    place = folder or os.path.dirname(os.path.abspath(output))
    try:
        guard: Any = contextlib.nullcontext("")
        if launch.rank == 0:
            _make(place)
            # Call `scratch` before MPI starts, because it starts a process, which is
            # unsafe after that.
            guard = scratch(place)
        with guard as scratch_folder:
            _measure(output, scratch_folder, words)
    except TopologyError as error:
        raise click.ClickException(str(error)) from error
    except (BenchError, CheckpointError) as error:
        # All ranks raise the same error: print it once.
        if launch.rank == 0:
            click.echo(f"Error: {error}", err=True)
        raise SystemExit(1) from error


def _measure(output: str, folder: str, words: dict[str, Any]) -> None:
    repeats = Repeats(words.pop("repeats"), words.pop("warm_up"))
    compute_seconds = words.pop("compute_ms") / 1e3
    # Turn other recorders off: a process can have only one recorder, and the benchmark
    # records the waiting for late replicas.
    settings = Settings(summary="off", timeline="", nvtx=False)
    ranks = words.pop("ranks_per_replica")
    try:
        made = MultiWorkerMirroredStrategy(settings=settings, ranks_per_replica=ranks)
    except ValueError as error:
        raise BenchError(str(error)) from error
    with made as strategy:
        options = Options(
            **words,
            repeats=repeats,
            compute_seconds=compute_seconds,
            # Broadcast the folder, because only rank 0 has made it and has its name.
            folder=strategy.broadcast_object(folder),
        )
        launcher = launch_from_environment().launcher or "no launcher"
        command = f"{shlex.join(['hpcstrat', *sys.argv[1:]])} ({launcher})"
        path = run_scaling(strategy, ScalingRequest(options, output, command, _tell))
        if strategy.writes:
            _tell(f"hpcstrat bench report {path} [FILES of other sizes] -o report.html")


def _make(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise click.ClickException(
            f"expected a folder for results, found that {folder} cannot be made: "
            f"{error.strerror}; choose another --output or --folder"
        ) from error


def _tell(line: str) -> None:
    click.echo(line, err=True)


@bench.command()
@click.argument("files", nargs=-1, required=True, type=click.Path())
@click.option(
    "-o",
    "--output",
    default="report.html",
    show_default=True,
    help="File of the HTML page.",
)
@click.option(
    "--expected",
    "expected_paths",
    multiple=True,
    type=click.Path(),
    help="File of expected times, such as bench predict --json writes, to use instead "
    "of a simple model.",
)
def report(
    files: tuple[str, ...], output: str, expected_paths: tuple[str, ...]
) -> None:
    """Show FILES of hpcstrat bench scaling as one HTML page, and as pictures.

    The page needs no network. The pictures are written as PNG files into the folder of
    the page. This command needs matplotlib, but no MPI.
    """
    try:
        require_matplotlib()
        given = [read_expected(path) for path in expected_paths]
        found = analyze(read_runs(files), given)
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    # Print the notes in the terminal, too, for a reader who looks only at the pictures.
    for words in (*found.verdicts, *found.notes):
        click.echo(words, err=True)
    figures = draw(found)
    stem = os.path.splitext(output)[0]
    pictures = {f"{stem}-{name}.png": save(f, "png") for name, f in figures.items()}
    text = page(found, {name: save(f, "svg") for name, f in figures.items()})
    contents = {output: text.encode(), **pictures}
    try:
        for path, data in contents.items():
            with open(path, "wb") as file:
                file.write(data)
    except OSError as error:
        raise click.ClickException(
            f"expected to write {error.filename or output}, found {error.strerror}; "
            "choose another --output"
        ) from error
    click.echo("\n".join(contents))
