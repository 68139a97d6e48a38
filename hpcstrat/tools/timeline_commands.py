"""The command ``hpcstrat timeline``, which needs no MPI."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from hpcstrat.engine.observe.timeline.last_arrivals import last_arrivals
from hpcstrat.engine.observe.timeline.merging import Timeline, open_timeline
from hpcstrat.tools.terminal import UncutGroup

__all__ = ["timeline"]


@click.group(cls=UncutGroup)
def timeline() -> None:
    """Read timelines, which HPCSTRAT_TIMELINE or strategy.timeline() record."""


def _opened(directory: str, run: str | None) -> Timeline:
    try:
        found = open_timeline(directory, run)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    # Print notes to standard error, because scripts may read the standard output.
    cut = [file.thread for file in found.files if not file.whole]
    if cut:
        click.echo(
            "incomplete files, of replicas that did not end normally: "
            f"{', '.join(cut)}",
            err=True,
        )
    for path in found.unread:
        click.echo(f"omitted, because it has no clock measurement: {path}", err=True)
    if found.other_runs:
        runs = ", ".join(found.other_runs)
        click.echo(
            f"reading run {found.run}; choose another run with --run: {runs}", err=True
        )
    return found


_directory = click.argument("directory", type=click.Path(exists=True, file_okay=False))
_run = click.option(
    "--run", help="Run to read, if DIRECTORY has several; default: the newest."
)


@timeline.command()
@_directory
@click.option(
    "-o", "--output", default="trace.json", show_default=True, help="File of the trace."
)
@_run
def merge(directory: str, output: str, run: str | None) -> None:
    """Merge the files in DIRECTORY into one trace for ui.perfetto.dev.

    The times of all hosts are converted to the clock of replica 0. If the name of the
    output ends in .gz, the trace is compressed. Incomplete files of killed jobs are
    read up to their end.
    """
    found = _opened(directory, run)
    try:
        count = found.write(output)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{output}: {count} events of {len(found.files)} replicas")


@timeline.command()
@_directory
@_run
def summary(directory: str, run: str | None) -> None:
    """Show for which replicas the others waited, from the files in DIRECTORY."""
    found = _opened(directory, run)
    try:
        rows = last_arrivals(found.events())
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    headings = ("replica", "worker", "calls", "waited s", "came last", "cost s")
    table = Table(*headings)
    # Sort by the time that other replicas lost: a replica that is often last, but only
    # by microseconds, is no problem.
    ordered = sorted(rows.values(), key=lambda row: -row.cost_seconds)
    for row in ordered:
        share = f"{row.last} ({row.last / row.calls:.0%})" if row.calls else "0"
        numbers = str(row.calls), f"{row.waited_seconds:.4g}", share
        table.add_row(str(row.replica), row.where, *numbers, f"{row.cost_seconds:.4g}")
    Console().print(table)
