"""The command ``hpcstrat jobs``, which writes job scripts for a user's project."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import click

from hpcstrat.tools.job_scripts.writing import (
    FRAMEWORKS,
    SCHEDULERS,
    JobPlan,
    own_scripts,
    submit_line,
    write,
)
from hpcstrat.tools.terminal import UncutGroup

__all__ = ["jobs"]

# For each scheduler, a command that no other has (SGE and PBS share qsub).
_COMMANDS = {
    "flux": "flux",
    "slurm": "sbatch",
    "lsf": "bsub",
    "pbs": "pbsnodes",
    "sge": "qconf",
}
_PAGES = {
    "numpy": "user-guide/training",
    "torch": "user-guide/torch-jax",
    "torch-ddp": "user-guide/torch-jax",
    "jax": "user-guide/torch-jax",
    "keras": "user-guide/keras",
}


def _found() -> str | None:
    """Return the scheduler whose commands are installed, or None."""
    here = [name for name, command in _COMMANDS.items() if shutil.which(command)]
    return here[0] if here else None


def _is_answered() -> bool:
    """Return whether a user can answer questions: standard input is a terminal."""
    return sys.stdin.isatty()


class _PromptedOption(click.Option):
    """An option; if the user omits it, the command asks for its value."""

    def __init__(self, *words: Any, ask: str, **options: Any) -> None:
        super().__init__(*words, **options)
        self._ask = ask

    def consume_value(self, ctx: click.Context, opts: Any) -> Any:
        """Return the given value, or the user's answer, or the default."""
        value, source = super().consume_value(ctx, opts)
        by_default = source is click.core.ParameterSource.DEFAULT
        if by_default and not ctx.resilient_parsing and _is_answered():
            value = click.prompt(
                self._ask, default=self.get_default(ctx), type=self.type, err=True
            )
            source = click.core.ParameterSource.PROMPT
        return value, source


@click.group(cls=UncutGroup)
def jobs() -> None:
    """Write job scripts for your project."""


@jobs.command()
@click.option(
    "--scheduler",
    cls=_PromptedOption,
    ask="Scheduler",
    type=click.Choice(list(SCHEDULERS)),
    default=_found,
    help="Default: the scheduler whose commands are installed on this machine.",
)
@click.option(
    "--device",
    cls=_PromptedOption,
    ask="Do the ranks compute on CPUs, or each on a GPU",
    type=click.Choice(["cpu", "gpu"]),
    default="cpu",
    show_default=True,
    help="Device on which the ranks compute.",
)
@click.option(
    "--framework",
    cls=_PromptedOption,
    ask="Framework of the program (torch-ddp: an unchanged torch.distributed program)",
    type=click.Choice(FRAMEWORKS),
    default="numpy",
    show_default=True,
    help="Framework of PROGRAM; torch-ddp: an unchanged torch.distributed program.",
)
@click.option(
    "--nodes",
    cls=_PromptedOption,
    ask="Nodes",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Number of nodes.",
)
@click.option(
    "--ranks-per-node",
    cls=_PromptedOption,
    ask="Ranks on each node (as many as GPUs, or cores)",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Number of ranks on each node.",
)
@click.option(
    "--minutes",
    type=click.IntRange(1),
    default=60,
    show_default=True,
    help="Time limit of a job.",
)
@click.option(
    "--restart",
    "restarts",
    is_flag=True,
    help="Start the job again after its time limit, from a checkpoint.",
)
@click.option("--account", default="", help="Account or project to charge.")
@click.option("--queue", default="", help="Queue or partition.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Folder of the project; default: the current folder.",
)
@click.option("--force", is_flag=True, help="Replace an existing script.")
@click.argument("program")
def new(program: str, folder: Path, *, force: bool, **options: Any) -> None:
    """Write jobs/site.env and a job script for PROGRAM.

    \b
        hpcstrat jobs new --scheduler pbs --framework torch --nodes 4 train.py
        hpcstrat jobs new --restart 'train.py --epochs 90'

    On a terminal, the command asks for each of the first five options that is not
    given. Quote PROGRAM together with its own arguments. An existing site.env is not
    changed.
    """
    if options["scheduler"] is None:
        raise click.ClickException(
            "expected commands of a scheduler in the PATH, found none of "
            f"{', '.join(_COMMANDS.values())}; give --scheduler "
            f"({', '.join(SCHEDULERS)})"
        )
    plan = JobPlan(program=program, **options)
    suffix = SCHEDULERS[plan.scheduler].suffix
    script = folder / f"jobs/{plan.name}.{suffix}"
    if script.exists() and not force:
        raise click.ClickException(
            f"expected no file {script}, found one; give --force to replace it"
        )
    text = write(plan)
    script.parent.mkdir(parents=True, exist_ok=True)
    site = folder / "jobs/site.env"
    if site.exists():
        click.echo(f"kept    {site}")
    else:
        shutil.copyfile(own_scripts() / "site.env", site)
        click.echo(f"wrote   {site}: set what differs at your site")
    script.write_text(text, encoding="utf-8")
    script.chmod(0o755)
    click.echo(f"wrote   {script}")
    click.echo(f"submit  {submit_line(plan)}")
    click.echo(f"read    docs/{_PAGES[plan.framework]}, docs/user-guide/your-site")
