"""The command ``hpcstrat`` with its subcommands."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click
from rich.console import Console
from rich.table import Table

import hpcstrat
from hpcstrat.cli.first_import import BEGAN
from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.elastic.watching import watch_command
from hpcstrat.tools.bench.commands import bench
from hpcstrat.tools.chaos.commands import chaos
from hpcstrat.tools.checkpoints.commands import ckpt
from hpcstrat.tools.checkpoints.verify_command import verify_bits
from hpcstrat.tools.doctor import doctor
from hpcstrat.tools.doctor.examination import launch_words, software
from hpcstrat.tools.hang_command import hang
from hpcstrat.tools.job_scripts import jobs
from hpcstrat.tools.launch_commands import jax, torch
from hpcstrat.tools.staging import stage
from hpcstrat.tools.start_times import show_start_times
from hpcstrat.tools.terminal import UncutGroup
from hpcstrat.tools.timeline_commands import timeline

__all__ = ["main"]


@click.group(cls=UncutGroup)
@click.version_option(hpcstrat.__version__)
def main() -> None:
    """Tools to launch, examine and measure jobs of hpcstrat."""


main.add_command(bench)
main.add_command(chaos)
main.add_command(ckpt)
main.add_command(doctor)
main.add_command(hang)
main.add_command(jax)
main.add_command(jobs)
main.add_command(stage)
main.add_command(timeline)
main.add_command(torch)
main.add_command(verify_bits)


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def watch(words: tuple[str, ...]) -> None:
    """Start a program again after the loss of a node, a launcher or a rank.

    Start this command once on each node of a job, as jobs/survive.sbatch does. Its
    options are shown by the command itself: hpcstrat watch -h.
    """
    raise SystemExit(watch_command.watch(words))


@main.command()
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Number of workers whose sums are shown; default: as launched.",
)
@click.option(
    "--ranks-per-worker",
    type=click.IntRange(1),
    help="Number of ranks of each worker; default: as launched.",
)
@click.option(
    "--start",
    is_flag=True,
    help="Print the time from the launcher to the first step, by phases, of all ranks.",
)
@click.option(
    "--import",
    "modules",
    metavar="NAMES",
    default="",
    help="With --start: modules that your program imports, separated by commas.",
)
@click.option(
    "--data", metavar="FILES", help="With --start: also read a first batch of files."
)
def info(
    workers: int | None,
    ranks_per_worker: int | None,
    *,
    start: bool,
    modules: str,
    data: str | None,
) -> None:
    """Show versions, the launcher of this process, and how arrays are summed.

    Under a launcher only the first process prints this.

    \b
        mpirun -n 64 hpcstrat info --start --import torch
    """
    if start:
        names = [name.strip() for name in modules.split(",") if name.strip()]
        show_start_times(BEGAN, names, data)
        return
    if modules or data:
        raise click.UsageError("expected --start beside --import and --data; add it")
    launch = launch_from_environment()
    if launch.rank:
        return
    table = Table(show_header=False)
    for name, version in software():
        table.add_row(name, version)
    table.add_row("launcher", launch_words())
    # Count only the cores to which a launcher has bound this process.
    table.add_row("cores for this process", str(len(os.sched_getaffinity(0))))
    each = ranks_per_worker or launch.local_size or 1
    count = workers or max(1, launch.size // each)
    if each * count > 1:
        for row in _sums(count, each):
            table.add_row(*row)
    Console().print(table)


def _sums(num_workers: int, each: int) -> Iterator[tuple[str, str]]:
    """Yield table rows: from which size on, and how, host arrays are summed."""
    from hpcstrat.engine.algorithms.select import schedule

    ranks = f"{each} rank{'s' if each > 1 else ''}"
    workers = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
    yield "reductions", f"of {workers} of {ranks}, by size in bytes:"
    for start, how in schedule(num_workers, each):
        yield f"  from {start:,}", how
