"""The commands ``hpcstrat torch`` and ``hpcstrat jax``, which run programs over MPI."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

import click

__all__ = ["jax", "torch"]


@click.command(
    # Options after PROGRAM belong to the program, even if they have the names of ours.
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
    _become("torch", [replace or ""], program, arguments, module=module)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module's name.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def jax(program: str, arguments: tuple[str, ...], *, module: bool) -> None:
    """Run a program of several processes of JAX under mpirun or srun.

    \b
        mpirun -n 8 hpcstrat jax train.py --epochs 3

    Each rank is a process of jax.distributed, which is initialized before the program
    begins, with rank and number from MPI, the address of rank 0, and a GPU for each
    rank of a node. So jax.devices() has those of all ranks. Where the program calls
    jax.distributed.initialize() itself, nothing more happens. What stands after PROGRAM
    is the program's.
    """
    _become("jax", [], program, arguments, module=module)


def _become(
    framework: str,
    options: Sequence[str],
    program: str,
    arguments: Sequence[str],
    *,
    module: bool,
) -> NoReturn:
    """Replace this process by one that sets up the framework and runs the program."""
    # Do not import the framework, because another program will replace this one.
    if find_spec(framework) is None:
        raise click.ClickException(
            f"expected {framework}, found none; install it: pip install {framework}"
        )
    if not module and not os.path.exists(program):
        raise click.ClickException(
            f"expected a program, found no file {program!r}; give its path, or a "
            "module's name with -m"
        )
    # Replace the process, so that signals and the exit status are those of the program.
    kind = "module" if module else "script"
    launcher = f"hpcstrat.integrations.{framework}.{framework}_launcher"
    words = [*options, kind, program, *arguments]
    os.execv(sys.executable, [sys.executable, "-m", launcher, *words])
