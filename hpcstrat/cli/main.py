"""The commands."""

from __future__ import annotations

import os

import click
from rich.console import Console
from rich.table import Table

import hpcstrat
from hpcstrat.cli.bench_commands import bench
from hpcstrat.cli.chaos_commands import chaos
from hpcstrat.cli.ckpt_commands import ckpt
from hpcstrat.cli.doctor import doctor
from hpcstrat.cli.doctor.examination import launch_words, software
from hpcstrat.cli.terminal import UncutGroup
from hpcstrat.cli.timeline_commands import timeline
from hpcstrat.cli.torch_command import torch

__all__ = ["main"]


@click.group(cls=UncutGroup)
@click.version_option(hpcstrat.__version__)
def main() -> None:
    """Tools around hpcstrat."""


main.add_command(bench)
main.add_command(chaos)
main.add_command(ckpt)
main.add_command(doctor)
main.add_command(timeline)
main.add_command(torch)


@main.command()
def info() -> None:
    """Show versions, and what the launcher says of this process."""
    table = Table(show_header=False)
    for name, version in software():
        table.add_row(name, version)
    table.add_row("launcher", launch_words())
    # Of the mask that a launcher has set, not of the machine.
    table.add_row("cores for this process", str(len(os.sched_getaffinity(0))))
    Console().print(table)
