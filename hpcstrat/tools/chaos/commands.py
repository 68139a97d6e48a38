"""The command ``hpcstrat chaos``, which disturbs the ranks of a running job."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import signal
import time
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

from hpcstrat.tools.chaos import disturbing as library
from hpcstrat.tools.chaos.watched_runs import lose
from hpcstrat.tools.terminal import UncutGroup

__all__ = ["chaos"]

_COLUMNS = ("job", "Slurm job", "ranks", "processes", "command")


@click.group(cls=UncutGroup)
def chaos() -> None:
    """Kill, stop or slow down ranks of a running job at random.

    Only ranks on this machine that belong to you and to the named job are disturbed.
    """


@chaos.command("list")
def chaos_list() -> None:
    """List your jobs that have ranks on this machine.

    The exit status is 1 if there are none. In a pipe the columns are separated by tabs.
    """
    jobs = library.find_jobs()
    rows = [
        (
            job.name,
            job.slurm_job,
            ",".join(str(process.rank) for process in job.ranks),
            ",".join(str(process.pid) for process in job.ranks),
            job.ranks[0].command,
        )
        for job in jobs
    ]
    console = Console()
    if console.is_terminal:
        table = Table()
        for title in _COLUMNS:
            # Print the job's name in full, so that a user can copy it to --job.
            table.add_column(title, no_wrap=title == "job", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        for row in rows:
            # Write plain lines, for cut and awk, without rich's frames.
            click.echo("\t".join(row))
    if not jobs:
        click.echo("no job of yours has ranks on this machine", err=True)
    raise SystemExit(int(not jobs))


@chaos.command("run")
@click.option(
    "--job",
    "name",
    required=True,
    help="Name of the job, as hpcstrat chaos list prints it, or its Slurm number.",
)
@click.option("--kill", is_flag=True, help="Kill ranks (SIGKILL).")
@click.option("--stop", type=float, metavar="SECONDS", help="Stop ranks for this time.")
@click.option(
    "--delay", type=float, metavar="SECONDS", help="Slow ranks down for this time."
)
@click.option(
    "--factor",
    default=4.0,
    show_default=True,
    help="Factor of the slowdown, for --delay.",
)
@click.option(
    "--every",
    default=10.0,
    show_default=True,
    help="Mean time between disturbances, in seconds.",
)
@click.option("--count", default=1, show_default=True, help="Number of disturbances.")
@click.option(
    "--ranks",
    metavar="LIST",
    help="Ranks, such as 0-3,7; default: all on this machine.",
)
@click.option(
    "--seed", type=int, help="Seed of the random choices; default: a new seed."
)
@click.option(
    "--dry-run", is_flag=True, help="Print the disturbances without doing them."
)
def chaos_run(
    name: str,
    ranks: str | None,
    seed: int | None,
    *,
    dry_run: bool,
    **options: Any,
) -> None:
    """Disturb random ranks of a job, one at a time, after random waits.

    The exit status is 0 if all disturbances were done, 1 if a rank was missing or had
    ended before, 2 for wrong options, and 130 after an interrupt. A stopped rank always
    continues.
    """
    # Print each event in one line, even if the terminal is narrower.
    console = Console(highlight=False, soft_wrap=True)
    # The seed is printed below, so that a user can draw the same acts again.
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    # The order of the options must not change the acts.
    kinds = [k for k in library.KINDS if options[k] not in (None, False)]
    if not kinds:
        raise click.UsageError(
            "expected --kill, --stop or --delay, found none; choose at least one"
        )
    try:
        wanted = None if ranks is None else library.parse_ranks(ranks)
        strength = library.Strength(
            stop_seconds=1.0 if options["stop"] is None else options["stop"],
            delay_seconds=1.0 if options["delay"] is None else options["delay"],
            factor=options["factor"],
        )
        job = library.choose(library.find_jobs(), name)
        here = [process.rank for process in job.ranks]
        every, count = options["every"], options["count"]
        acts = library.draw(wanted or here, kinds, every=every, count=count, seed=seed)
        # Ranks on other nodes cannot be disturbed from this node.
        if missing := sorted(set(wanted or ()) - set(here)):
            raise library.NoSuchRankError(
                f"expected ranks of job {job.name} on this machine, some of {here}, "
                f"found {missing}; see hpcstrat chaos list"
            )
    except library.NoSuchRankError as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    console.print(f"job {job.name}, ranks {wanted or here}, seed {seed}")
    if dry_run:
        at = 0.0
        for act in acts:
            at += act.wait_seconds
            console.print(f"would {act.kind} rank {act.rank} after {at:.2f} s")
        return
    done = _disturb(console, job, acts, strength)
    console.print(f"{done} of {count} done")
    raise SystemExit(int(done < count))


@chaos.command("lose")
@click.option("--run", help="Name of the watched run; default: the only one here.")
@click.argument("part", type=click.Choice(["node", "launcher"]))
def chaos_lose(run: str | None, part: str) -> None:
    """Kill what a watched run has on this machine: all of it, or its launcher.

    For the watchers, "node" is the loss of this node. The exit status is 1 if there is
    no such run or launcher here.
    """
    try:
        name = lose(part, run)
    except library.NoSuchRankError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"run {name} has lost its {part} on this machine")


def _disturb(console: Console, job: Any, acts: Any, strength: Any) -> int:
    """Disturb ranks, print a line for each event, and count the acts done."""
    start = time.monotonic()

    def report(_: Any, process: Any, text: str) -> None:
        # Also print the wall-clock time, to compare these lines with logs of the job.
        clock = datetime.datetime.now().strftime("%H:%M:%S.%f")[:-3]
        at = time.monotonic() - start
        console.print(
            f"{clock} {at:8.2f} s: rank {process.rank} (process {process.pid}) {text}"
        )

    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    # Slurm sends SIGTERM to end a step, and a terminal that is closed sends SIGHUP.
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Only the main thread may set signal handlers; tests may run in another thread.
        with contextlib.suppress(ValueError):
            signal.signal(number, interrupt)
    try:
        return library.disturb(job, acts, strength, report)
    except KeyboardInterrupt:
        console.print("interrupted; a stopped rank goes on")
        # Exit with 128 plus SIGINT, like a program that the signal has ended.
        raise SystemExit(130) from None
