"""The command ``hpcstrat torch``: run a program of torch.distributed over MPI."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import click

__all__ = ["torch"]


@click.command(
    # Options behind PROGRAM are the program's, also those that have names of ours.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "--replace",
    type=click.Choice(["gloo", "nccl"]),
    help="Take the place of this backend, which the program names, or leaves to torch.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module's name.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def torch(
    program: str, arguments: tuple[str, ...], replace: str | None, *, module: bool
) -> None:
    """Run a program of torch.distributed under mpirun or srun, instead of torchrun.

    \b
        mpirun -n 8 hpcstrat torch --replace gloo train.py --epochs 3

    Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT and the like from MPI, where they are not set. The backend "hpcstrat" is
    known to init_process_group; with --replace the program stays as it is. The number
    of ranks is the launcher's; without one it is a single one. What stands after
    PROGRAM is the program's.
    """
    # Found, not imported: this process makes room for another one.
    if find_spec("torch") is None:
        raise click.ClickException(
            "expected torch, found none; install it: pip install torch"
        )
    if not module and not os.path.exists(program):
        raise click.ClickException(
            f"expected a program, found no file {program!r}; give its path, or a "
            "module's name with -m"
        )
    # A process of its own kind: how it ends, and its signals, are the program's.
    kind = "module" if module else "script"
    launcher = "hpcstrat.integrations.torch.launch"
    words = [replace or "", kind, program, *arguments]
    os.execv(sys.executable, [sys.executable, "-m", launcher, *words])
